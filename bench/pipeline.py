"""Pipelines: a training step of the tour's model, ours against PyTorch's; and the bubble, measured and on paper.

The bubble cannot be measured with real computation: where 4 ranks compute on 2 cores, a rank that waits lends its core
to the others.  So the stages sleep for known times in F, in I and in W; everything else is real.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.figure import Figure, figure
from bench.step import RANKS, Stepper, rounds, side_by_side, slowest
from labs import pp
from labs.kit.record import mark
from labs.pp.checker import stages_of

MICRO_BATCHES = 8
# s: forward, and half the backward, of a rank take this divided by the bubble, so that messages never dominate a small
# bubble
NAP = 0.075


def figures(quick: bool) -> list[Figure]:
    rows = ("pp-gpipe", "pp-1f1b", "pp-interleaved", "pp-zbv")
    return [*side_by_side("pipeline", rows, quick, batch=2 * RANKS), *bubbles(list(pp.SCHEDULES), 2 if quick else 3)]


def bubbles(names: Sequence[str], count: int) -> list[Figure]:
    """Measure the bubble of each schedule with stages that sleep, as a ratio to the simulated bubble."""
    found = []
    for name, ranks in rounds(names, count, build=sleeper, warm_up=1).items():
        bubble = simulated(name)
        # The ideal is the time that the ranks did sleep: no sleep is shorter than requested, and some are longer.
        busiest = [max(taken["sleep"] for taken in turn) for turn in zip(*ranks, strict=True)]
        measured = [long / ideal - 1 for long, ideal in zip(slowest(ranks), busiest, strict=True)]
        note = f"simulated {bubble:.3f}, measured {statistics.median(measured):.3f}"
        samples = [each / bubble for each in measured]
        found.append(figure(f"bubble: {name}, measured / simulated", samples, target="at most 1.05", note=note))
    return found


def simulated(name: str) -> float:
    return pp.simulate(pp.SCHEDULES[name](RANKS, MICRO_BATCHES)).bubble


def sleeper(name: str) -> Stepper:
    """Return a function that takes one step with this schedule, without an optimizer."""
    lists = pp.SCHEDULES[name](dist.get_world_size(), MICRO_BATCHES)
    stages = stages_of(lists)
    seconds = NAP / simulated(name) * dist.get_world_size() / stages
    pipeline = pp.Pipeline([Sleeps(seconds) for _ in range(stages)], lists, lambda y, target: (y - target).sum())
    # x requires a gradient, so that the first stage's I and W take as long as those of the others.
    x = torch.ones(MICRO_BATCHES, 1, requires_grad=True)
    return lambda: pipeline.forward_backward(x, torch.zeros(MICRO_BATCHES, 1))


def nap(seconds: float) -> None:
    mark("sleep")
    time.sleep(seconds)
    mark("wait")


class Sleeps(nn.Module):
    """A layer that sleeps for the same time in F, in I and in W."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(1, 1, bias=False)
        self.linear.weight.register_hook(lambda gradient: nap(seconds))

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(self.linear(x), self.seconds)


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        nap(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        nap(ctx.seconds)
        return gradient, None
