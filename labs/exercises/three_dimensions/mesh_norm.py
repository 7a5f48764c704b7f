"""mesh_norm: the norm of all gradients on a mesh, along whose axes some gradients are cut and others copied."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Sends
from labs.exercises.engine.on_axes import OnMesh
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look, same_numbers
from labs.exercises.engine.value import as_if
from labs.parallel import AXES

CUT = (("pp", "shard", "tp"), ("pp", "shard"), ("shard", "tp"), ("shard",), ())  # the axes that cut each gradient
NUMBER = 8  # bytes


@dataclass(frozen=True)
class Gradients(OnMesh):
    axes: tuple[str, ...] = AXES
    bare: bool = False  # the last rank's piece of the first gradient is empty
    frozen: bool = False  # the last stage has no gradients at all
    scale: float = 1.0

    def brings(self, rank: int) -> list[tuple[Tensor, tuple[str, ...]]]:
        found = []
        for number, cut in enumerate(CUT):
            its = self.first_alike(rank, tuple(axis for axis in self.axes if axis not in cut))
            if self.frozen and ("pp" not in cut or self.place(rank)[0] == self.shape[0] - 1):
                continue
            size = 0 if self.bare and number == 0 and its == self.ranks - 1 else 5 + its % 3
            drawn = (
                torch.randn(size, generator=self.generator(its, number), dtype=F64) * (1 + number + its) * self.scale
            )
            found.append((drawn.to(self.dtype), cut))
        return found

    @cached_property
    def squares(self) -> Tensor:
        """Return the sum of squares of each rank's gradients, [sizes of the axes, gradients]."""
        sums = torch.zeros(self.ranks, len(CUT), dtype=F64)
        for rank in range(self.ranks):
            for x, cut in self.brings(rank):
                sums[rank, CUT.index(cut)] = x.double().square().sum()
        return sums.view(*self.shape, len(CUT))

    def counted(self, *several: str, along: tuple[str, ...] = AXES) -> list[Tensor]:
        """Return the norm that each rank computes, right or by a mistake.

        several: the axes along which copies count several times
        along: the axes along which the squares are added up
        """
        copies = [prod(self.sizes[a] for a in AXES if a not in cut and a not in several) for cut in CUT]
        squares, numbers = (self.squares / torch.tensor(copies)).sum(-1), [self.axes.index(axis) for axis in along]
        return self.on_each(squares.sum(numbers, keepdim=True) if numbers else squares)

    def on_each(self, squares: Tensor) -> list[Tensor]:
        return list(squares.sqrt().expand(self.shape).flatten())


def worlds(draw: Draw) -> dict[int, list[Gradients]]:
    shapes = (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 1), (1, 1, 4, 1), (2, 1, 2, 1)
    options: list[dict[str, Any]] = [{}, {"dtype": F32}, {"bare": True}, {"dtype": BF16}, {}, {"frozen": True}]
    options[4]["scale"] = 1e20  # float32 cannot hold the squares of such numbers
    return {4: [draw.world(Gradients, 4, shape=s, **each) for s, each in zip(shapes, options, strict=True)]}


def script(world: Gradients, fn: Callable[..., Any]) -> Iterator[Look | None]:
    given = world.brings(world.index())
    yield None
    norm = fn(given, world.mesh)
    if type(norm) in (float, int) or (isinstance(norm, Tensor) and norm.numel() == 1):
        norm = torch.tensor(float(norm), dtype=F64)
    pairs = zip(given, world.brings(world.index()), strict=True)
    changed = any(not same_numbers(now, before) for (now, _), (before, _) in pairs)
    yield Look({"": norm}, {"changed": changed})


# fmt: off
ONCE = "On how many ranks is this gradient, and how often should its squares count?"
EXERCISE = Exercise(
    worlds,
    Expected(lambda world: world.counted(), tolerance={F64: 1e-6}),
    question=ONCE,
    script=script,
    sends=lambda world: Sends(least=0, enough=lambda rank: 2 * NUMBER * len(AXES)),
    mistakes=Mistakes((
        Mistake("this rank's gradients only", "What does the rank know of the others' gradients?",
                as_if(lambda w: w.counted(*AXES, along=())),
                symptom="each stage clipped by its own norm: the direction of the gradient is lost"),
        Mistake("copies count as often as there are ranks", ONCE, as_if(lambda w: w.counted(*AXES)),
                symptom="a norm that grows with the number of ranks, and gradients that are clipped too much"),
        *(Mistake(f"copies along {axis} count several times", ONCE,
                  as_if(lambda w, axis=axis: w.counted(axis))) for axis in AXES),
        *(Mistake(f"not added up along {axis}", "Which parts of the model do the ranks along it have?",
                  as_if(lambda w, axis=axis: (w.counted(*own, along=tuple(a for a in AXES if a != axis))
                                              for own in ((), (axis,)))))
          for axis in ("pp", "shard", "tp")),
        Mistake("the squares are too large for their dtype", "In which dtype are the squares added up?",
                lambda one: float(one.received) == float("inf")),
    ), sent=(
        Mistake("the gradients travel", "Which one number does a rank need to tell of them?",
                lambda sent: sent.too_much),
    )),
    questions={
        "rounded on the way": "In which dtype are the squares added up?",
    },
)
# fmt: on


@answered
def mesh_norm(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(gradients, mesh) -> norm`, which is the same on all ranks.

    gradients: pairs of a tensor and the axes along which it is cut
    mesh: a mesh with the axes pp, replicate, shard and tp

    Returns the text of the ✓ line, with the bytes sent.
    """
    last = checked(EXERCISE, (fn,), seed).last
    return f"a rank sent {max(last.sent.values())} bytes, whatever the gradients' size"
