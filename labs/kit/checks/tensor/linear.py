"""row_linear: summands of y from pieces of x, and the bias once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.ranks import F32, Draw
from labs.kit.checks.tensor import ways


@dataclass(frozen=True)
class Row(ways.Split):
    """inputs: of each rank, 5 if they are left out; outer: the dims of x before them."""

    outer: tuple[int, ...] = (6,)
    inputs: tuple[int, ...] = ()
    outputs: int = 7
    biased: bool = True

    alike = ("bias",)

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


def worlds(draw: Draw) -> list[Row]:
    a, b = draw.random.randrange(4, 8), draw.random.randrange(5, 9)
    options = [{}, {"dtype": F32, "outer": (32,), "outputs": 24}, ways.AGAIN, {"biased": False}, *ways.UNUSUAL]
    options += [{"outer": outer} for outer in ((), (2, 3), (0,), (2, 1, a))]
    options += [{"inputs": inputs} for inputs in ((0, a, 0, 1), (a, 0, b, 0))]
    options += [{"ranks": ranks} for ranks in (draw.random.choice((3, 5, 6, 7, 8)), 1)]
    return ways.drawn(draw, Row, options)


def bias_added(one: ways.One, times: int) -> bool:
    """So many times, and not once?"""
    if not (one.is_result and one.case.biased and one.n > 1):
        return False
    return one.same(one.due + (times - 1) * one.case.brings(one.rank)["bias"].double())


# fmt: off
ONE_BIAS = "The copies of the bias must stay equal: which gradient does each of them get?"
EXERCISE = ways.Exercise(
    worlds,
    wide=[Row(0, 4, dtype=F32, outer=(256,), inputs=(64,) * 4, outputs=128)], unit="y", kept=1.3, most=7.1,
    question="Which summand of y does this rank make, and who adds what to it?",
    forms=(
        Mistake("the bias on one rank alone", ONE_BIAS,
                ways.form(lambda one: one.name == "bias" and one.found is None
                     and any(one.on(r) is not None for r in one.members))),
    ),
    mistakes=(
        Mistake("the bias is added on every rank", "How many ranks add it, before the sum?",
                lambda one: bias_added(one, one.n),
                shows="a model with biases that is right on one rank, and wrong on more"),
        Mistake("the bias is left out", "Who adds it, and where?", lambda one: bias_added(one, 0)),
        Mistake("a rank without inputs leaves early",
                "Its summand of y is zero. Who waits for it, and who tells it what y is?",
                lambda one: one.is_result and one.alone and not one.forward.events
                and not one.case.brings(one.rank)["x"].numel()),
        ways.summands("What does each rank have of y?"),
        Mistake("the gradient of the bias is an N-th",
                "Every rank has all of the bias. How much of its gradient must it see?",
                lambda one: one.name == "bias" and one.times(1 / one.n),
                shows="the right output, and biases that learn N times too slowly"),
        Mistake("the bias on one rank alone", ONE_BIAS, lambda one: one.name == "bias" and not one.found.any(),
                shows="the right output, and copies of the bias that drift apart"),
        ways.SUMMED_TOO,
    ),
)
# fmt: on


@answered
def row_linear(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, weight, bias, group=None) -> y`, whole on every rank: of this rank's inputs to all outputs.

    x [..., inputs], weight [outputs, inputs], whose sizes may differ between ranks; bias [outputs], the same, or None.
    """
    recording = ways.checked(EXERCISE, (fn,), seed)
    return f"you sent {ways.told(recording, 'y', 32 * 24 * 4, 2)}; the least possible is 1.50 × and 0.00 ×"
