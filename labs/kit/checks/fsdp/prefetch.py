"""prefetch: while a layer computes, the next one's gather is under way, and no third one is held."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.group import all_gather
from labs.kit.checks.acts import Parts, Play, checked, on_each_rank
from labs.kit.checks.answer import Mistake, answered, first, first_fit
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.ranks import BF16, F64, Draw
from labs.kit.checks.scripts import Look, Seen, World

COMPUTE = 0.001  # s that a layer pretends to compute
ONCE = "right only where no layer comes twice"


@dataclass(frozen=True)
class Walk(World):
    """`there`: the number of the layer that is used first, second, ...; one may be used more than once."""

    sizes: tuple[int, ...] = ()  # elements of each layer
    there: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """In this step: there, and back."""
        return self.there[::-1] if self.step else self.there

    def piece(self, number: int, rank: int) -> Tensor:
        """This rank's, in this step."""
        generator = self.generator(rank, 8 * self.step + number)
        return torch.randn(self.sizes[number], generator=generator, dtype=F64).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.who}, layers {', '.join(map(str, self.there))}"


def worlds(draw: Draw) -> dict[int, list[Walk]]:
    def walk(ranks: int, layers: int, *again: int, **options: Any) -> Walk:
        sizes = tuple(draw.random.randrange(3, 9) for _ in range(layers))
        options |= {"sizes": sizes, "there": (*range(layers), *again), "only": ONCE if again else ""}
        return draw.world(Walk, ranks, steps=2, **options)

    return {
        2: [walk(2, 2), walk(2, draw.random.randrange(4, 7)), walk(2, 1), walk(2, 3, 0)],
        4: [walk(4, 5, dtype=BF16), walk(4, 3, 1)],
    }


class Layer:
    """What the learner's function is given: gather() starts and returns at once, arrive() waits, drop() frees."""

    def __init__(self, world: Walk, number: int, notes: list[tuple[str, int]]) -> None:
        self._number, self._notes = number, notes
        self._mine = world.piece(number, dist.get_rank())
        self._due = torch.cat([world.piece(number, rank) for rank in range(world.ranks)])
        self._whole, self._work, self._there = None, None, False

    def gather(self) -> None:
        if self._work is None and not self._there:
            self._notes.append(("gather", self._number))
            self._whole = torch.empty_like(self._due)
            self._work = all_gather(self._whole, self._mine, async_op=True)

    def arrive(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._notes.append(("arrive", self._number))
            self._work, self._there = None, True

    def drop(self) -> None:
        self.arrive()
        if self._there:
            self._notes.append(("drop", self._number))
            self._whole, self._there = None, False

    def _computes(self) -> bool:
        """Whether it has its numbers."""
        return self._there and torch.equal(self._whole, self._due)

    def __repr__(self) -> str:
        return f"<layer {self._number}>"


def walk(world: Walk, fn: Callable[..., Any]) -> Iterator[Look | None]:
    for step in range(world.steps):
        order, notes = world.at(step).order, []
        layers = [Layer(world.at(step), number, notes) for number in range(len(world.sizes))]

        def compute(layer: Layer, notes: list[tuple[str, int]] = notes) -> None:
            notes.append(("begin" if layer._computes() else "begin without", layer._number))
            time.sleep(COMPUTE)
            notes.append(("end", layer._number))

        given = [layers[number] for number in order]
        yield None
        fn(given, compute)
        facts = {"notes": list(notes), "listed": given == [layers[number] for number in order]}
        for layer in layers:
            layer.drop()  # nothing is to be on its way in the next step
        yield Look(facts=facts)


class Steps:
    """One walk on one rank: (what, number of the layer), in the order in which it happened."""

    def __init__(self, order: tuple[int, ...], collectives: int, notes: list[Any], listed: bool) -> None:
        self.order, self.collectives, self.notes, self.listed = order, collectives, notes, listed
        self.begins = [i for i, (what, _) in enumerate(notes) if what.startswith("begin")]
        self.ends = [i for i, (what, _) in enumerate(notes) if what == "end"]
        self.gathers = sum(what == "gather" for what, _ in notes)
        changes = [{"gather": 1, "drop": -1}.get(what, 0) for what, _ in notes]
        self.held = list(accumulate(changes))  # layers that are there or on their way, after each note

    @property
    def most(self) -> int:
        return max(self.held, default=0)

    def ahead(self, what: str) -> list[bool]:
        """By place: did the last such note about the layer that follows come before this one had computed?"""

        def last(place: int, following: int) -> float:
            found = [i for i in range(self.begins[place + 1]) if self.notes[i] == [what, following]]
            return found[-1] if found else inf

        return [last(place, following) < self.ends[place] for place, following in enumerate(self.order[1:])]


def steps_of(twice: bool) -> Parts:
    """Of walks on which a layer comes twice, or of the others."""

    def parts(seen: Seen) -> Iterator[tuple[str, Steps]]:
        for rank, (where, done) in enumerate(on_each_rank(seen)):
            if twice == bool(seen.world.only):
                yield where, Steps(seen.world.order, len(seen.of(rank)), **done.facts)

    return parts


def other_order(steps: Steps) -> str | None:
    used = [steps.notes[i][1] for i in steps.begins]
    return f"computed layers {used}, and not {list(steps.order)}" if used != list(steps.order) else None


def pair(steps: Steps, place: int, what: str) -> str:
    return f"layer {steps.order[place + 1]} was {what} layer {steps.order[place]} had computed"


def late(steps: Steps) -> str | bool:
    ahead = steps.ahead("gather")
    return not all(ahead) and pair(steps, ahead.index(False), "not under way before")


def waited_early(steps: Steps) -> str | bool:
    ahead = steps.ahead("arrive")
    return any(ahead) and pair(steps, ahead.index(True), "waited for before")


# fmt: off
AHEAD = "Which layer must be here now, and which one may still be on its way?"
WALK = (
    Mistake("computed before it was there", "gather() returns at once. Which call waits?",
            lambda steps: first(f"layer {number} computed when its parameters were not there"
                                for what, number in steps.notes if what == "begin without"),
            shows="NaN, or the numbers of another step, on a slow wire only"),
    Mistake("layers left out, or in another order", "In which order does the model use its layers?", other_order),
    Mistake("every layer is held",
            "At the last layer's turn, what of the first one is still here? Then what has sharding saved?",
            lambda steps: steps.most == len(set(steps.order)) > 2 and f"held {steps.most} layers at once",
            shows="quick, but the peak is the whole model's"),
    Mistake("gathered for nothing", "Who uses what comes after the last layer?",
            lambda steps: steps.gathers != len(steps.order)
            and f"it gathered {steps.gathers} times, to compute {len(steps.order)} times"),
    Mistake("full parameters are never freed", "Who drops the last one?",
            lambda steps: steps.held[-1] > 0
            and f"{steps.held[-1]} of {len(set(steps.order))} layers are still held at the end"),
    Mistake("three layers at a time", AHEAD, lambda steps: steps.most > 2 and f"held {steps.most} layers at once"),
    Mistake("waited for before it is needed",
            "What could this rank compute, instead of standing still for the next layer?", waited_early,
            shows="gathers begin early, but the waiting is as long as without prefetch"),
    Mistake("nothing is in flight while a layer computes", AHEAD,
            lambda steps: not any(steps.ahead("gather")) and late(steps),
            shows="a comb of waiting in the timeline"),
    Mistake("some gathers come late", AHEAD, late),
    Mistake("collectives that nobody asked for", "Which line begins them?",
            lambda steps: steps.collectives > steps.gathers
            and f"{steps.collectives} collectives, {steps.gathers} gathers"),
    Mistake("the list of layers has changed", "Whose list is it, and who goes through it in the next step?",
            lambda steps: not steps.listed and "the list of layers is not what it was before the call"),
)
TWICE = (
    Mistake(ONCE, "At which place of the list is this layer now, and which layer comes after that place?",
            lambda steps: (found := first_fit(WALK, steps)) and found[1]),
)
# fmt: on
PLAY = Play(
    worlds,
    walk,
    tables=((steps_of(twice=False), WALK), (steps_of(twice=True), TWICE), (on_each_rank, AFTERMATH)),
    question=AHEAD,
)


@answered
def prefetch(fn: Callable[..., Any], seed: int) -> str:
    """`fn(layers, compute)` calls compute(layer) for each, in this order, when it is there; none is held at the end.

    A layer has gather(), which starts its all-gather and returns at once, arrive(), which waits, and drop().
    The list is the caller's, and stays as it is.
    """
    last = checked(PLAY, (fn,), seed).seen[-1]
    most = max(steps.most for _, steps in steps_of(twice=True)(last))
    return (
        f"each layer but the first was under way while the one before it computed, and you held {most} layers "
        "at most; without prefetch 1, with it 2 is the least possible"
    )
