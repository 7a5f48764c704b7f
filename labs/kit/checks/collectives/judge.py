"""Is this function that collective?

    ranks    inputs, and what only fails there (cases.py)
    4        sizes that divide, and the budget, always on the same sizes; two calls in a row; pieces of unequal size,
             and of no element at all; two dimensions, and none; other roots; other dtypes; a sub-group, whose ranks
             are not the global ones; not contiguous, which may be refused
    3, 2, 1  what is only right for a power of two, for more than two, for more than one; and a large tensor
    5 to 8   one of them
    4        bytes held, in two calls, and when they are over

What is judged, and by which name: mistakes.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch

from labs.kit.checks.answer import Wrong, answered, instead, refuse
from labs.kit.checks.case import Outcome, close, isclose, largest_of
from labs.kit.checks.collectives.body import hold, one_rank
from labs.kit.checks.collectives.cases import (
    ALL_GATHER,
    ALL_RANKS_ONLY,
    ALL_REDUCE,
    BROADCAST,
    BUDGET,
    POWERS_ONLY,
    REDUCE_SCATTER,
    Case,
    Kind,
    drawn,
    held,
)
from labs.kit.checks.collectives.mistakes import HELD, IN_PLACE, LEFT, LUCK, RETURNED, TRAFFIC, VALUES
from labs.kit.checks.job import NEVER_ENDS, job
from labs.kit.launch import Results
from labs.kit.record import Event, Recording

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.0, torch.int64: 0.0}
BUDGET_STEP = 1
NOBODY_LEFT = "In the last round on three ranks, whom does each rank tell? Is there a rank with that number?"

# ---- the checks ------------------------------------------------------------------------------------------


@answered
def broadcast(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, root=0, group=None)`: every rank's x becomes global rank `root`'s, in place, by a tree."""
    rounds = count_rounds([event for event in every_job(BROADCAST, fn, seed).events if event.step == BUDGET_STEP])
    return f"{rounds} rounds on 4 ranks; the least possible is {BROADCAST.rounds(4)}"


@answered
def reduce_scatter(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None) -> piece`: piece r of x becomes the sum over all ranks on rank r, which also returns it."""
    return sent_line(every_job(REDUCE_SCATTER, fn, seed), least=0.75)


@answered
def all_gather(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None)`: rank r brings piece r of x; afterwards every rank has all of them, in place."""
    return sent_line(every_job(ALL_GATHER, fn, seed), least=0.75)


@answered
def all_reduce(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None)`: every rank's x becomes the sum over all ranks, in place."""
    return sent_line(every_job(ALL_REDUCE, fn, seed), least=1.5)


def sent_line(recording: Recording, least: float) -> str:
    most = max(recording.sent(rank, BUDGET_STEP) for rank in range(4)) / (BUDGET * 4)
    return f"you sent {most:.2f} × the tensor per rank; the least possible is {least:.2f} ×"


# ---- jobs ------------------------------------------------------------------------------------------------


def every_job(kind: Kind, fn: Callable[..., Any], seed: int) -> Recording:
    """Put `fn` through all of them; the recording of 4 ranks."""
    cases = drawn(kind, seed)
    try:
        recording = play_all(kind, fn, cases[4])
    except Wrong as wrong:
        if wrong.answer.mistake == ALL_RANKS_ONLY:  # or is it that the group has three members?
            play_all(kind, fn, cases[3])
        raise
    for ranks in (ranks for ranks in cases if ranks != 4):
        play_all(kind, fn, cases[ranks])
    case = held(seed)
    bytes_held = job(hold, kind.name, fn, case, ranks=4, record="memory").recording
    for rank in range(4):
        tensors = (bytes_held.held(rank, step)["peak"] / case.size / case.dtype.itemsize for step in range(4))
        refuse(HELD, Held(*(x - 1 for x in tensors)), f"{case}: rank {rank} ")
    return recording


class Held(NamedTuple):
    """On one rank, besides the tensor, × the tensor: the most in each of two calls, and what is there after each."""

    first: float
    after_first: float
    second: float
    after_second: float


def play_all(kind: Kind, fn: Callable[..., Any], cases: list[Case]) -> Recording:
    """All cases in one job.  Where that fails as a whole, those that share a name in one each, to see which it was."""
    try:
        results = job(one_rank, kind.name, fn, cases, ranks=cases[0].ranks)
    except Wrong as wrong:
        if not wrong.untouched and wrong.answer.mistake != NEVER_ENDS:
            for _, part in groupby(cases, key=lambda case: case.only):
                play(kind, fn, list(part))
        raise
    judge_all(kind, cases, results)
    return results.recording


def play(kind: Kind, fn: Callable[..., Any], cases: list[Case]) -> None:
    within = f"in the group of ranks {cases[0].group}" if cases[0].group else ""
    try:
        results = job(one_rank, kind.name, fn, cases, ranks=cases[0].ranks, when=within)
    except Wrong as wrong:
        wrong = wrong.also(cases[0].only)
        if kind.rooted and wrong.answer.mistake == POWERS_ONLY and not wrong.raised:
            wrong = Wrong(wrong.answer.text, NOBODY_LEFT, POWERS_ONLY)
        raise wrong from None
    judge_all(kind, cases, results)


# ---- what is judged --------------------------------------------------------------------------------------


def judge_all(kind: Kind, cases: list[Case], results: Results) -> None:
    """Raise Wrong for the first case that is not right, by its own name where nothing more exact is known."""
    for step, case in enumerate(cases):
        outcomes = [results[rank][step] for rank in case.members]
        events = [event for event in results.recording.events if event.step == step and event.rank in case.members]
        try:
            judge(Call(kind, case, outcomes, events))
        except Wrong as wrong:
            raise wrong.also(case.only) from None
        for rank, outcome in zip(case.members, outcomes, strict=True):
            refuse(LEFT, outcome, f"{case}: on rank {rank} ")


def judge(call: Call) -> None:
    if all(outcome.refused for outcome in call.outcomes):
        return
    where, question = f"{call.case}: ", call.kind.question
    for one in call.ranks:
        refuse(RETURNED, one, where)
    refuse(LUCK, call, where)
    for one in call.ranks:
        if not one.right:
            refuse(VALUES, one, f"{where}on rank {one.rank} {one.first_wrong()}\n", question)
    for one in call.ranks:
        refuse(IN_PLACE, one, where)
    refuse(TRAFFIC, call, where, question)


class Call:
    """One call, on all ranks that took part."""

    def __init__(self, kind: Kind, case: Case, outcomes: list[Outcome], events: list[Event]) -> None:
        self.kind, self.case, self.outcomes, self.events = kind, case, outcomes, events
        self.n, self.tensor_bytes = len(case.members), case.size * case.dtype.itemsize
        self.messages = [event for event in events if event.op == "send" and event.bytes_in]
        self.sent = {r: sum(event.bytes_in for event in self.messages if event.rank == r) for r in case.members}
        self.ranks = [One(self, index) for index in range(self.n)]

    @cached_property
    def rounds(self) -> int:
        return count_rounds(self.events)


class One:
    """One rank's part of a call; `index` is its number in the group."""

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.kind, self.case, self.index = call, call.kind, call.case, index
        self.rank, self.outcome = call.case.members[index], call.outcomes[index]
        self.before, self.expected = (x(call.case, index) for x in (call.kind.brings, call.kind.expected))
        self.found = self.outcome.returned if call.kind.returns_piece else self.outcome.after[0]

    @cached_property
    def right(self) -> bool:
        largest = largest_of(map(self.case.tensor, self.case.members)) if self.kind.sums else None
        return close(self.found, self.expected, TOLERANCE[self.case.dtype], largest)

    def first_wrong(self) -> str:
        differs = ~isclose(self.found, self.expected, 1e-5 if TOLERANCE[self.case.dtype] else 0.0)
        at = int((differs if differs.any() else self.found != self.expected).nonzero()[0])
        return f"element {at} is {instead(self.found[at], self.expected[at])}"


def count_rounds(events: list[Event]) -> int:
    """The longest chain: a send comes after what its rank has received or sent before it.

    A round is what can happen at one moment when a rank sends one message and receives one message at a time.
    """
    moments = [
        (e.start if e.op == "send" else e.end, e)
        for e in events
        if e.op in ("send", "recv")
        if e.bytes_in or e.bytes_out
    ]
    on_the_way: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    last_sent: dict[int, int] = defaultdict(int)
    last_received: dict[int, int] = defaultdict(int)
    for _, event in sorted(moments, key=lambda moment: moment[0]):
        if event.op == "send":
            last_sent[event.rank] = 1 + max(last_sent[event.rank], last_received[event.rank])
            on_the_way[event.rank, event.peer].append(last_sent[event.rank])
        elif on_the_way[event.peer, event.rank]:
            arrived = on_the_way[event.peer, event.rank].pop(0)
            last_received[event.rank] = max(arrived, 1 + last_received[event.rank])
    return max([*last_sent.values(), *last_received.values()], default=0)
