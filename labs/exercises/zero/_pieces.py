"""Rows of ZeRO's exercises about a rank's piece of a vector: whose it is, its gradient, and the bytes sent and held."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import torch
from torch import Tensor

from labs.exercises.engine import by_script
from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, Wrong, first, first_fit
from labs.exercises.engine.mixture import COEFFICIENTS, Made
from labs.exercises.engine.scripts import Functions
from labs.exercises.engine.value import One, close, mixture
from labs.exercises.zero._flat_layers import Layers

# fmt: off
THAWED = Mistake("requires_grad has changed", "Who decides what is trained?",
                 lambda full: full.thawed and "its requires_grad has changed")
# fmt: on

# ---- pieces ----------------------------------------------------------------------------------------------


def side_by_side(vectors: Sequence[Tensor], n: int, index: int) -> Tensor:
    """Return the piece of this index of each vector, side by side in one tensor; each vector has n pieces."""
    return torch.cat([vector.chunk(n)[index] for vector in vectors])


def in_anothers_place(one: One) -> str | None:
    """Return a sentence about the first piece of a value that stands in another piece's place, or None."""
    found, expected = one.received.chunk(one.n), one.expected.chunk(one.n)
    places = permutations(range(one.n), 2)
    return first(f"Piece {b} stands in the place of piece {a}." for a, b in places if one.near(found[a], expected[b]))


WHICH_PIECE = "Which piece of full is rank r's?"
ROTATED = Mistake("the pieces are rotated", WHICH_PIECE, in_anothers_place)

# ---- which gradient? -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Followed:
    """The gradient that a rank's pieces of all layers received, as one tensor with the pieces side by side.

    gradients: [micro-batches of all ranks][trained layers], the gradients of each micro-batch alone.
    """

    world: Layers
    index: int
    received: Tensor
    gradients: list[list[Tensor]]

    def sources(self, index: int) -> list[Tensor]:
        """Return for each micro-batch the pieces of its gradients with this index."""
        return [side_by_side(each, self.world.n, index) for each in self.gradients]

    @property
    def expected(self) -> Tensor:
        return torch.stack(self.sources(self.index)).double().mean(0)

    @cached_property
    def origin(self) -> tuple[int, Made] | tuple[None, None]:
        """(the index of the piece that the gradient is made of, the linear combination), or (None, None)."""
        n = self.world.n
        for place in (*range(self.index, n), *range(self.index)):
            if (times := mixture(self.received, self.sources(place))) is not None:
                return place, Made((times * len(self.gradients)).view(n, -1), self.index)
        return None, None

    @property
    def called(self) -> str | None:
        """The name of the mistake that the coefficients show; None if there are no coefficients."""
        return first_fit(COEFFICIENTS, self.origin[1])[0].name if self.origin[1] else None

    @property
    def description(self) -> str:
        return self.origin[1].description


# fmt: off
GRADIENT = (
    Mistake("rounded on the way", "In which dtype do the gradients travel?",
            lambda one: close(one.received, one.expected, 1e-2) and "It is right but for its last digits."),
    Mistake("read before it was written", "Who writes into this tensor, and when is that done?",
            lambda one: not one.received.isfinite().all() and "There are numbers in it that nobody has written."),
    Mistake("the gradient of another piece", WHICH_PIECE, lambda one: one.origin[0] not in (None, one.index)
            and f"It is made of piece {one.origin[0]} of the gradients; piece {one.index} is due."),
    *(replace(row, matches=lambda one, row=row: one.origin[1] and row.matches(one.origin[1])) for row in COEFFICIENTS),
    Mistake("", "Which gradients went into this one, and how often?",
            lambda one: "It is not a mixture of the ranks' gradients."),
)
# fmt: on

# ---- budgets ---------------------------------------------------------------------------------------------

BUFFERS = 4.5  # × a layer: the layer in flight, and the copies of it that are sent
SLACK = 1.25  # × a layer: a buffer that is used again may stay
QUESTIONS = {
    "too many bytes": "How often does each number travel, and who needs it?",
    "a different dtype travels": "Who needs the extra digits?",
}


def travel(world: Layers, whole: float, least: float) -> rows.Sends:
    """Return the messages that a step may send: (N - 1) / N of `whole` bytes per rank are enough.

    All ranks together must send at least (N - 1) × `least` bytes.
    """
    return rows.Sends((world.n - 1) * least, lambda rank: 1.02 * (world.n - 1) / world.n * whole + 8 * world.n)


def held(*called: tuple[str, str]) -> tuple[Mistake, ...]:
    """Return the rows about bytes held after a step and during it, with these names and questions."""
    both = zip(rows.HELD[2:], called, strict=True)
    return tuple(replace(row, name=name, question=question, symptom="") for row, (name, question) in both)


# ---- two common slips ------------------------------------------------------------------------------------

# fmt: off
SLIPS = (
    Mistake("there is no memory to gather into",
            "How many bytes does full's storage have when gather begins, and how many when the numbers arrive?",
            lambda text: re.search("storage of size 0|SIGSEGV|SIGBUS", text) is not None),
    Mistake("autograd sees the change",
            "What on this line is still a Parameter, and which attribute of it is unseen by autograd?",
            lambda text: re.search("is being (modified inplace|used in an in-place operation)", text) is not None),
)
# fmt: on


def checked(play: by_script.Play, functions: Functions, seed: int) -> by_script.Passed:
    """Return the measurements of a right answer; raise Wrong for others, by name if torch reports a known slip."""
    try:
        return by_script.checked(play, functions, seed)
    except Wrong as wrong:
        raise hinted(wrong) from None


def hinted(wrong: Wrong) -> Wrong:
    """Return the verdict with the name and question of a common slip, if torch's error shows one."""
    slip = first_fit(SLIPS, wrong.answer.text)
    return Wrong(wrong.answer.text, slip[0].question, slip[0].name) if slip else wrong
