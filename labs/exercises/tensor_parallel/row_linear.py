"""row_linear: each rank computes a summand of y from its piece of x, and the bias is added once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from labs.exercises.engine import differentiated as ways
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory
from labs.exercises.engine.on_ranks import F32, Draw, Mistakes, checked
from labs.exercises.engine.value import One, as_if


@dataclass(frozen=True)
class RowSplit(ways.Split):
    """A linear layer whose inputs are split over the ranks.

    inputs: the number of inputs of each rank; 5 on each if left out.
    outer: the sizes of x's dims before the inputs.
    """

    outer: tuple[int, ...] = (6,)
    inputs: tuple[int, ...] = ()
    outputs: int = 7
    biased: bool = True

    alike = ("bias",)
    whole = "y"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.outer, self.outputs)

    def brings(self, rank: int) -> ways.Brought:
        mine = self.inputs[self.fellows(rank).index(rank)] if self.inputs else 5
        x, weight = self.numbers([*self.outer, mine], rank), self.numbers([self.outputs, mine], rank, 1)
        return {"x": x, "weight": weight, "bias": self.numbers([self.outputs], 63, 2) if self.biased else None}

    def on_one(self, brought: Sequence[ways.Brought]) -> Tensor:
        y = sum(F.linear(each["x"], each["weight"]) for each in brought)
        return y + brought[0]["bias"] if self.biased else y


def worlds(draw: Draw) -> dict[int, list[RowSplit]]:
    a, b = draw.random.randrange(4, 8), draw.random.randrange(5, 9)
    options = [*ways.usual(outer=(32,), outputs=24), {"biased": False}, *ways.UNUSUAL]
    options += [{"outer": outer} for outer in ((), (2, 3), (0,), (2, 1, a))]
    options += [{"inputs": inputs} for inputs in ((0, a, 0, 1), (a, 0, b, 0))]
    options += [{"ranks": ranks} for ranks in (draw.random.choice((3, 5, 6, 7, 8)), 1)]
    return ways.draw_worlds(draw, RowSplit, options)


def bias_added(times: Callable[[int], int]) -> Callable[[One], bool]:
    """Return a row's test: whether the bias was added `times(ranks)` times, and not once."""

    def y(world: RowSplit) -> Iterator[ways.Numbers]:
        if world.biased and world.step == 0:
            more = times(world.width) - 1
            yield [
                {"y": expected["y"] + more * world.brings(rank)["bias"]}
                for rank, expected in enumerate(world.expected())
            ]

    return as_if(y)


def left_early(one: One) -> bool:
    """Return whether a rank without inputs has only its own summand of y."""
    return as_if(RowSplit.alone)(one) and not one.world.brings(one.rank)["x"].numel()


def on_one_rank_alone(one: One) -> str | bool:
    if one.name != BIAS or one.received.any() or not one.expected.any():
        return False
    theirs = [rank for rank, done in one.seen.ranks if done.values[BIAS].any()]
    return bool(theirs) and f"has no gradient of its bias; rank {theirs[0]} has one"


# fmt: off
BIAS = ways.of("bias")
EXERCISE = ways.both_ways(
    worlds,
    question="Which summand of y does this rank make, and who adds what to it?",
    memory=Memory(
        lambda draw: RowSplit(0, 4, dtype=F32, outer=(256,), inputs=(64,) * 4, outputs=128),
        during=7, after=1, between=1.2,
    ),
    mistakes=Mistakes((
        Mistake("the bias is added on every rank", "How many ranks add it, before the sum?",
                bias_added(lambda ranks: ranks),
                symptom="a model with biases that is right on one rank, and wrong on more"),
        Mistake("the bias is left out", "Who adds it, and where?", bias_added(lambda ranks: 0)),
        Mistake("", "Its summand of y is zero. Who waits for it, and who tells it what y is?", left_early),
        ways.summands("What does each rank have of y?"),
        Mistake("the gradient of the bias is an N-th",
                "Every rank has all of the bias. How much of its gradient must it see?",
                lambda one: one.name == BIAS and as_if(lambda w: w.times(1 / w.width))(one),
                symptom="the right output, and biases that learn N times too slowly"),
        ways.SUMMED_TOO,
    ), form=(
        Mistake("the bias on one rank alone",
                "The copies of the bias must stay equal: which gradient does each of them get?", on_one_rank_alone,
                symptom="the right output, and copies of the bias that drift apart"),
    )),
)
# fmt: on


@answered
def row_linear(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x, weight, bias, group=None) -> y`, a linear layer whose inputs are split; y is whole on every rank.

    x: this rank's inputs, [..., inputs]; their number may differ between ranks
    weight: this rank's columns of the weight, [outputs, inputs]
    bias: the same on every rank, [outputs], or None

    Returns the text of the ✓ line, with the bytes sent.
    """
    recording = checked(EXERCISE, (fn,), seed).recording
    return f"you sent {ways.describe(recording, 'y', 32 * 24 * 4, 2)}; the least possible is 1.50 × and 0.00 ×"
