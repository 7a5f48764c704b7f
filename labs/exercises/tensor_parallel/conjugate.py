"""conjugate: tensor parallelism's copy and reduce, each forward and backward, and both twice in a larger graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labs.dtensor import Partial, Replicate
from labs.dtensor.redistribute import Line
from labs.exercises.engine import differentiated as ways
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory
from labs.exercises.engine.on_ranks import F32, Draw, Mistakes, checked
from labs.exercises.engine.scripts import Functions
from labs.exercises.engine.value import One, as_if
from labs.tp import conjugate as borders


def sum_by_border(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' x, by `labs.tp.conjugate` and with the exercise's arguments."""
    ranks = Line(tuple(x.shape), dist.get_world_size(group), dist.get_rank(group), group)
    return borders.Border.apply(x, ranks, (Partial(), Replicate()), (Replicate(), Replicate()))


@dataclass(frozen=True)
class Border(ways.Split):
    """A world in which tensors cross the borders of a tensor-parallel layer.

    kind: "copy"; "reduce"; or "both", which is two layers x + reduce(w · copy(x)), where w differs between ranks and is
    0 on one of them.  The bytes held are measured with "one of the other", which is reduce(copy(x)).
    """

    kind: str = "one of the other"
    shape: tuple[int, ...] = (5, 7)

    whole = "x"

    @property
    def alike(self) -> tuple[str, ...]:
        return () if self.kind == "reduce" else ("x",)

    @property
    def own_gradients(self) -> bool:
        return self.kind == "copy"

    def brings(self, rank: int) -> ways.Brought:
        x = self.numbers(self.shape, rank if self.kind == "reduce" else self.fellows(rank)[0] + 32)
        return {"x": x} | ({"w": self.numbers(self.shape, rank, 1) * (rank != 1)} if self.kind == "both" else {})

    def on_one(self, brought: Sequence[ways.Brought]) -> Tensor:
        if self.kind == "both":
            return (1 + sum(each["w"] for each in brought)) ** 2 * brought[0]["x"]
        return brought[0]["x"] * 1 if self.kind == "copy" else sum(each["x"] for each in brought)

    def call(self, functions: Functions, brought: ways.Brought, **group: Any) -> Any:
        (copy, reduce), x = functions, brought["x"]
        if self.kind == "reduce":
            return reduce(x, **group)
        if self.kind == "one of the other":
            return reduce(copy(x, **group), **group)
        if self.kind == "copy":
            y = copy(x, **group)
            copy(x.detach())  # another call of copy, in the group of all ranks, before the gradient comes
            return y
        first = reduce(brought["w"] * copy(x, **group), **group)
        return x + first + reduce(brought["w"] * copy(x + first, **group), **group)

    @property
    def calls(self) -> tuple[int, int]:
        return {"copy": (0, 1), "reduce": (1, 0), "both": (2, 2)}[self.kind]


def worlds(draw: Draw) -> dict[int, list[Border]]:
    a, b = draw.random.randrange(4, 8), draw.random.randrange(5, 9)
    options = [*ways.usual(shape=(64, 96)), *ways.UNUSUAL]
    options += [{"shape": shape} for shape in ((2, a, b), (a,), (1,), (0, 3), ())]
    options += [{"ranks": ranks} for ranks in (draw.random.choice((3, 5, 6, 7, 8)), 1)]
    both = [each | {"kind": kind} for each in options for kind in ("copy", "reduce")]
    return ways.draw_worlds(draw, Border, [*both, {"kind": "both"}])


def of_copy(make: Callable[[Border], Any], step: int) -> Callable[[One], bool]:
    """Return a row's test: whether copy gave, in this step, the values that `make` computes."""
    matches = as_if(make)
    return lambda one: one.world.kind == "copy" and one.world.step == step and matches(one)


# fmt: off
EXERCISE = ways.both_ways(
    worlds,
    question="Follow x through the split layer, and its gradient back: where is it whole, and where a summand?",
    memory=Memory(lambda draw: Border(0, 4, dtype=F32, shape=(128, 256)), during=6, after=1, between=0),
    mistakes=Mistakes((
        Mistake("copy sends forward", "Every rank has all of x already: what could it lack?",
                of_copy(lambda w: w.times(w.width), 0)),
        ways.summands("What does each rank have where a split layer ends?"),
        Mistake("the gradient of copy is not summed",
                "Each rank has used x for its own part of the weights. What does it know of x's gradient?",
                of_copy(Border.alone, 1),
                symptom="the loss goes down more slowly: the layers in front get only a part of their gradient"),
        ways.SUMMED_TOO,
    )),
)
# fmt: on


@answered
def conjugate(copy: Callable[..., Any], reduce: Callable[..., Any], seed: int) -> str:
    """Check `copy(x, group=None)` and `reduce(x, group=None)`, forward and backward; neither may change x.

    copy: returns x as it is; its backward returns the sum of all ranks' gradients
    reduce: returns the sum of all ranks' x; its backward returns the gradient as it is

    Returns the text of the ✓ line, with the bytes sent.
    """
    recording = checked(EXERCISE, (copy, reduce), seed).recording
    copied, reduced = (ways.describe(recording, what, 64 * 96 * 4, step) for what, step in (("the tensor", 4), ("", 6)))
    least = "the least possible is 1.50 × where something is due, and 0.00 × elsewhere"
    return f"copy sent {copied}, reduce {reduced}; {least}"


conjugate.reduce = sum_by_border  # the notebook goes on with this function, if the learner's is not right yet
