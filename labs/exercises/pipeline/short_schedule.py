"""The challenge of 10: find the fastest schedule of eight stages on four ranks, under a limit of activations held.

Any stage may be on any rank, and backwards may be whole or split.  The time of a schedule is simulated
(labs.pp.simulation), like all times of that notebook; then the course's executor obeys it in a real job, whose
gradients must equal one process's.

The bound: some rank computes at least a quarter of all the work, and each stage is on one rank, for all micro-batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from labs import pp
from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, job
from labs.exercises.engine.value import close
from labs.exercises.pipeline._listed import run
from labs.exercises.pipeline._stages_run_by_lists import TOLERANCE, Stacked
from labs.pp.checker import alive, microbatches_of, stages_of
from labs.pp.instructions import Lists

RANKS, STAGES, MICROBATCHES = 4, 8, 8


class StageTimes(NamedTuple):
    """A setup: the times of a stage's F, I and W, the time of a message, and a limit.

    F, I, W: the time for each stage; a whole backward B takes I + W.
    send: the time of a message from rank to rank.
    most: the largest number of activations that a rank may hold.
    """

    F: list[float]
    I: list[float]  # noqa: E741
    W: list[float]
    send: float
    most: int

    @property
    def costs(self) -> dict[str, Any]:
        B = [i + w for i, w in zip(self.I, self.W, strict=True)]
        return {"F": self.F, "I": self.I, "W": self.W, "B": B, "send": self.send}


EVEN, HEAD, TURNS = [1.0] * STAGES, [*[1.0] * (STAGES - 1), 2.0], [1.0, 2.0] * (STAGES // 2)
CASES = {
    "even": StageTimes(EVEN, EVEN, EVEN, send=0.25, most=8),
    "a heavy head": StageTimes(HEAD, HEAD, HEAD, send=0.25, most=8),
    "a slow wire": StageTimes(EVEN, EVEN, EVEN, send=1.0, most=12),
    "by turns": StageTimes(TURNS, TURNS, EVEN, send=0.5, most=10),
    "attention": StageTimes(EVEN, [1.5] * STAGES, [0.5] * STAGES, send=0.5, most=9),
}


def bound(case: StageTimes) -> float:
    stages = [sum(each) for each in zip(case.F, case.I, case.W, strict=True)]
    return MICROBATCHES * max(sum(stages) / RANKS, *stages)


def on_a_rank(fn: Function) -> list[Any]:
    found = []
    for case in CASES.values():
        lists = fn(RANKS, MICROBATCHES, case.costs, case.most)
        if not isinstance(lists, list | tuple) or len(lists) != RANKS:
            raise ValueError(f"it returned {show(lists)}: a list of instructions for each of {RANKS} ranks is needed")
        found.append(tuple(tuple(order) for order in lists))
    return found


def judge(fn: Function) -> Judged:
    (chosen,) = job(on_a_rank, fn, ranks=1)
    scores = {}
    for (called, case), lists in zip(CASES.items(), chosen, strict=True):
        scores[called] = 100 * bound(case) / taken(called, case, lists)
    world = Stacked(0, RANKS, lists=chosen[0])
    if not all(close(*pair, TOLERANCE[world.dtype]) for found in job(run, world, ranks=RANKS) for pair in found):
        raise Wrong("run for real, the gradients are not one process's", "Which micro-batch does each stage take next?")
    return Judged.of(scores)


def taken(called: str, case: StageTimes, lists: Lists) -> float:
    try:
        simulation = pp.simulate(lists, **case.costs)
    except ValueError as error:  # a WrongSchedule is one
        raise Wrong(f"{called}: {error}", "What does that instruction wait for?") from None
    if (stages_of(lists), microbatches_of(lists)) != (STAGES, MICROBATCHES):
        raise Wrong(f"{called}: there are {STAGES} stages and {MICROBATCHES} micro-batches", "Which are missing?")
    for rank, numbers in enumerate(alive(lists)):
        if max(numbers) > case.most:
            raise Wrong(f"{called}: rank {rank} has {max(numbers)} activations alive, and room for {case.most}")
    return simulation.time


short_schedule = Challenge(
    "short_schedule",
    "10",
    "The shortest schedule under a limit of memory",
    "Eight stages on four ranks, eight micro-batches, and so many activations alive on a rank. Any stage may be on any "
    "rank, and backwards may be split. Five cases differ in what stages and messages take.",
    judge,
    floor=74.2,
    course=78.9,
    possible=83.1,
)
