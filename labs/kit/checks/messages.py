"""Does rank 0 learn the mean, by one message from each of the others?

    ranks    what only fails there
    4        the idea, and the budget, always on the same sizes; calls in a row, each with a mean in memory of its
             own; no dimension, several, no element; other dtypes; a large tensor, with what Python and NumPy hold
    1 to 3   what is right only for four; then one of 5 to 8
    4        bytes held, in two calls, and when they are over

A wrong mean is taken apart by least squares: Σ c_i × what rank i brought.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks import case as shared
from labs.kit.checks.answer import Mistake, Wrong, answered, instead, refuse, show
from labs.kit.checks.case import SETTLED, Outcome, close, isclose, largest_of
from labs.kit.checks.collectives.body import snapshot
from labs.kit.checks.collectives.cases import BUDGET, LARGE
from labs.kit.checks.collectives.mistakes import LEFT, LUCK
from labs.kit.checks.job import NEVER_ENDS, job, noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.mixture import all_are, mixture
from labs.kit.checks.wire import SlowWire
from labs.kit.launch import Results
from labs.kit.record import Event, Recording, mark

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
ENOUGH = 2  # tensors besides its own that rank 0 needs: the sum, and room for a message
MOST = 9  # a list of messages, all of them stacked, and the mean: it is a first exercise


@dataclass(frozen=True)
class Case(shared.Case):
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def members(self) -> range:
        return range(self.ranks)

    def tensor(self, rank: int) -> Tensor:
        return torch.randn(self.shape, generator=self.generator(rank), dtype=torch.float64).to(self.dtype)

    @cached_property
    def mean(self) -> Tensor:
        return torch.stack([self.tensor(rank).double() for rank in self.members]).mean(0).to(self.dtype)

    @cached_property
    def precision(self) -> tuple[float, float]:
        return TOLERANCE[self.dtype], largest_of(map(self.tensor, self.members))

    def __str__(self) -> str:
        return f"{self.who}, a tensor of shape {self.shape} and dtype {self.dtype_name}"


@answered
def mean_on_rank_0(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x)`: on rank 0 the mean of all ranks' x, a new tensor; on the others None.  x stays as it is."""
    cases = drawn(seed)
    for ranks in cases:
        play_all(fn, cases[ranks])
    recording = job(hold, fn, Case(seed, 4, dtype=torch.float32, shape=(LARGE,)), ranks=4, record="memory").recording
    beside = held(recording)
    return (
        "3 messages on 4 ranks; the least possible is 3. "
        f"It held {beside:.2f} × the tensor besides its own; {ENOUGH:.2f} × is enough"
    )


def drawn(seed: int) -> dict[int, list[Case]]:
    draw = random.Random(seed)
    seeds = itertools.count(draw.randrange(2**40))
    odd, many = draw.randrange(5, 12), draw.choice((5, 6, 7, 8))

    def case(ranks: int, *shape: int, only: str = "", dtype: torch.dtype = torch.float64) -> Case:
        return Case(next(seeds), ranks, dtype=dtype, only=only, shape=shape)

    again, shapes, dtypes = "right only in the first call", "right only in one dimension", "right only in some dtypes"
    four = [
        case(4, odd),
        case(4, BUDGET, dtype=torch.float32),
        *(case(4, odd, only=again) for _ in range(3)),
        *(case(4, *shape, only=shapes) for shape in ((), (1,), (3, odd), (2, 3, 2))),
        case(4, 0, only="right only where there are elements"),
        *(case(4, odd, only=dtypes, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)),
        case(4, LARGE, only="right only for small tensors", dtype=torch.float32),
    ]
    others = {3: "right only on four ranks", 2: "right only on more than two ranks", 1: "right only on several ranks"}
    few = {ranks: [case(ranks, odd, only=only), case(ranks, only=only)] for ranks, only in others.items()}
    return {4: four, **few, many: [case(many, odd, only="right only on up to four ranks")]}


# ---- on a rank -------------------------------------------------------------------------------------------


@dataclass
class Found(Outcome):
    shared: str = ""  # whose memory the returned tensor has, if it is not its own


def all_cases(fn: Callable[..., Any], cases: list[Case]) -> list[Found]:
    earlier: list[Tensor] = []  # all that was returned so far
    return [one_case(fn, case, dist.get_rank(), earlier) for case in cases]


def one_case(fn: Callable[..., Any], case: Case, rank: int, earlier: list[Tensor]) -> Found:
    x = case.tensor(rank)
    with SlowWire(rank, case.seed) as wire, Aftermath(trace=case.size == LARGE) as aftermath:
        mark("step")
        returned = noted(case, fn, x)
        mark("end")
    found = Found([x], snapshot(returned), wire.touched)
    aftermath.tell(found)
    if isinstance(returned, Tensor):
        found.shared = whose(returned, x, earlier)
        earlier.append(returned)
    return found


def whose(mean: Tensor, x: Tensor, earlier: list[Tensor]) -> str:
    if one_memory(mean, x):
        return "x"
    return "the mean of an earlier call" if any(one_memory(mean, other) for other in earlier) else ""


def one_memory(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def hold(fn: Callable[..., Any], case: Case) -> None:
    """Two calls in a row, and after each of them a step in which nothing happens."""
    x = case.tensor(dist.get_rank())
    for _ in range(2):
        mark("step")
        noted(case, fn, x)
        mark("end")
        time.sleep(SETTLED)
        mark("step")
        mark("end")


# ---- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call, on all ranks."""

    case: Case
    outcomes: list[Found]
    events: list[Event]

    @property
    def found(self) -> Any:
        return self.outcomes[0].returned

    @cached_property
    def messages(self) -> list[Event]:
        return [event for event in self.events if event.op == "send" and event.bytes_in]

    @cached_property
    def times(self) -> Tensor | None:
        """How often each rank's x is in what rank 0 returned; 1 where it is right."""
        sources = [self.case.tensor(rank).flatten() for rank in self.case.members]
        mixed = mixture(self.found.flatten(), sources) if self.found.isfinite().all() else None
        return None if mixed is None else mixed * self.case.ranks

    def made(self, fits: Callable[[Tensor], Any]) -> str | None:
        if self.times is None or not fits(self.times):
            return None
        told = ", ".join(f"rank {rank}'s {c:.2g} times" for rank, c in enumerate(self.times.tolist()))
        return f"Relative to the mean, it has {told}."


def play_all(fn: Callable[..., Any], cases: list[Case]) -> None:
    """All cases in one job.  Where that fails as a whole, those that are alike in one each, to see which it was."""
    try:
        results = job(all_cases, fn, cases, ranks=cases[0].ranks)
    except Wrong as wrong:
        if not wrong.untouched and wrong.answer.mistake != NEVER_ENDS:
            for (only, _), part in groupby(cases, key=lambda case: (case.only, case.shape)):
                play(fn, list(part), only)
        raise
    judge_all(cases, results)


def play(fn: Callable[..., Any], cases: list[Case], only: str) -> None:
    try:
        results = job(all_cases, fn, cases, ranks=cases[0].ranks)
    except Wrong as wrong:
        raise wrong.also(only) from None
    judge_all(cases, results)


def judge_all(cases: list[Case], results: Results) -> None:
    for step, case in enumerate(cases):
        outcomes = [results[rank][step] for rank in case.members]
        events = [event for event in results.recording.events if event.step == step]
        try:
            judge(Call(case, outcomes, events))
        except Wrong as wrong:
            raise wrong.also(case.only) from None
        for rank, outcome in enumerate(outcomes):
            refuse(LEFT, outcome, f"{case}: on rank {rank} ")


def judge(call: Call) -> None:
    where = f"{call.case}: "
    refuse(LUCK, call, where)
    refuse(RETURNED, call, where)
    if not close(call.found, call.case.mean, *call.case.precision):
        at = int((~isclose(call.found, call.case.mean, *call.case.precision)).flatten().nonzero()[0])
        differs = instead(call.found.flatten()[at], call.case.mean.flatten()[at])
        refuse(VALUES, call, f"{where}on rank 0 element {at} is {differs}\n")
    refuse(KEPT, call, where)
    refuse(TRAFFIC, call, where)


def held(recording: Recording) -> float:
    """The most that rank 0 held besides its own tensor, × the tensor."""
    for rank in range(4):
        first, after_first, second, after_second = (
            recording.held(rank, step)["peak"] / (4 * LARGE) - 1 for step in range(4)
        )
        refuse(HELD, (max(first, second), after_first, after_second), f"rank {rank} ")
    return max(recording.held(0, step)["peak"] for step in (0, 2)) / (4 * LARGE) - 1


# ---- the mistakes, in the order in which they are tried --------------------------------------------------


def of_rank_0(bad: Callable[[Call], Any]) -> Callable[[Call], str | None]:
    return lambda call: f"rank 0 returned {told(call.found)}" if bad(call) else None


def told(value: Any) -> str:
    return show(value) if isinstance(value, Tensor) else str(value)


def spoken(call: Call) -> str | None:
    for rank, outcome in enumerate(call.outcomes[1:], 1):
        if outcome.returned != "None":
            return f"rank {rank} returned {told(outcome.returned)}"
    return None


def elsewhere(call: Call) -> bool:
    """Another rank has what rank 0 should."""
    values = [outcome.returned for outcome in call.outcomes[1:]]
    right = (isinstance(x, Tensor) and close(x, call.case.mean, *call.case.precision) for x in values)
    return call.found == "None" and any(right)


RETURNED = (
    Mistake(
        "another rank has the mean",
        "Who sends, who receives, and which of them is rank 0?",
        lambda call: not isinstance(call.found, Tensor) and elsewhere(call) and spoken(call),
    ),
    Mistake(
        "nothing is returned",
        "What does rank 0 hand to whoever called the function?",
        of_rank_0(lambda call: not isinstance(call.found, Tensor) and call.found == "None"),
    ),
    Mistake("not a tensor", "What was x?", of_rank_0(lambda call: not isinstance(call.found, Tensor))),
    Mistake(
        "a different shape",
        "What is the shape of x, and what is that of the mean of several x?",
        of_rank_0(lambda call: call.found.shape != call.case.mean.shape),
    ),
    Mistake(
        "the dtype changed", "What is the dtype of x?", of_rank_0(lambda call: call.found.dtype != call.case.dtype)
    ),
)


def only(*ranks: int) -> Callable[[Tensor], bool]:
    """Of these ranks there is something, and of the others nothing."""

    def fits(times: Tensor) -> bool:
        there = torch.tensor([rank in ranks for rank in range(len(times))])
        return all_are(times[~there], 0) and bool((times[there].abs() > 1e-3).all())

    return fits


VALUES = (
    Mistake(
        "read before it was there",
        "Who writes into this tensor, and when has that happened?",
        lambda call: not call.found.isfinite().all() and "There are numbers in it that nobody has written.",
    ),
    Mistake(
        "rounded on the way",
        "In which dtype do the numbers travel, and in which are they added?",
        lambda call: close(call.found, call.case.mean, 2e-2) and "It is right but for its last digits.",
    ),
    Mistake(
        "the sum, and not the mean",
        "By what do you divide the sum?",
        lambda call: call.made(lambda times: len(times) > 1 and all_are(times, len(times))),
    ),
    Mistake(
        "rank 0 hears nobody",
        "Which line brings the others' numbers to rank 0?",
        lambda call: call.made(only(0)),
        shows="one rank's own loss in the log, taken for the mean",
    ),
    Mistake(
        "rank 0 is left out",
        "Which numbers are on rank 0 from the start?",
        lambda call: call.made(lambda times: only(*range(1, len(times)))(times)),
    ),
    Mistake(
        "only one of the other ranks counts",
        "Who sent each message, and what becomes of the one before it?",
        lambda call: call.made(lambda times: sum(c.abs() > 1e-3 for c in times[1:]) == 1 and len(times) > 2),
    ),
    Mistake(
        "divided by the wrong number",
        "How many ranks have brought a number?",
        lambda call: call.made(lambda times: all_are(times, float(times[0]))),
    ),
    Mistake(
        "a rank is left out",
        "Which ranks does your loop visit?",
        lambda call: call.made(lambda times: (times.abs() < 1e-3).any()),
    ),
    Mistake(
        "some ranks count more than others",
        "How often is each rank's number added, and how often is the sum divided?",
        lambda call: call.made(lambda times: True),
    ),
    Mistake("", "Which numbers went into this one, and how often?", lambda call: True),
)


def changed(call: Call) -> str | None:
    for rank, outcome in enumerate(call.outcomes):
        if not torch.equal(outcome.after[0], call.case.tensor(rank)):
            return f"the mean is right, but x has changed on rank {rank}"
    return None


def not_new(call: Call) -> str | None:
    shared = call.outcomes[0].shared
    return f"the mean is right, but it has the memory of {shared}" if shared else None


KEPT = (
    Mistake("x has changed", "Whose tensor is x, and who may still need it?", changed),
    Mistake("not a new tensor", "Who else writes into this memory, in the next step?", not_new),
    Mistake("the others return something, too", "What do the other ranks know about the mean?", spoken),
)


def built_in(call: Call) -> str | None:
    used = sorted({event.op for event in call.events} - {"send", "recv"})
    return f"the mean is right, but it came through dist's own {' and '.join(used)}" if used else None


def from_anybody(call: Call) -> str | None:
    loose = any(event.op == "recv" and event.peer is None for event in call.events) and call.case.ranks > 2
    return "rank 0 takes whatever message comes first" if loose else None


def too_many(call: Call) -> str | None:
    for rank in call.case.members:
        sent, enough = sum(event.rank == rank for event in call.messages), int(rank > 0)
        if sent > enough:
            return f"rank {rank} sent {sent} message{'s' * (sent > 1)}; {enough or 'none'} is enough"
    return None


def too_large(call: Call) -> str | None:
    size = call.case.size * call.case.dtype.itemsize
    large = next((event for event in call.messages if event.bytes_in > size), None)
    return f"rank {large.rank} sent {large.bytes_in:,} bytes; x has {size:,}" if large else None


def too_few(call: Call) -> str | None:
    size = call.case.size * call.case.dtype.itemsize
    sent, least = sum(event.bytes_in for event in call.messages), size * (call.case.ranks - 1)
    return f"the ranks sent {sent:,} bytes; {least:,} is the least possible" if sent < least else None


TRAFFIC = (
    Mistake("a built-in collective", "Which rank sends what to whom inside of it? Write that.", built_in),
    Mistake(
        "from whoever comes first",
        "Two calls in a row: could somebody's second message be taken for another's first?",
        from_anybody,
    ),
    Mistake("more bytes than x has", "What does rank 0 need from this rank?", too_large),
    Mistake(
        "more messages than needed",
        "Which messages carry numbers that rank 0 needs, and which could be left out?",
        too_many,
    ),
    Mistake("less than the least possible", "How else did the numbers get there?", too_few),
)

# (most besides the tensor itself, after one call, after two), × the tensor
HELD = (
    Mistake(
        "something is kept from every call",
        "Which name still refers to it when you have returned?",
        lambda seen: (
            seen[2] > seen[1] + 0.1 and f"holds {seen[1]:.2f} × the tensor after one call, {seen[2]:.2f} × after two"
        ),
    ),
    Mistake(
        "something is kept from the call",
        "Which name still refers to it when you have returned?",
        lambda seen: seen[1] > 0.1 and f"holds {seen[1]:.2f} × the tensor when the call is over",
    ),
    Mistake(
        "far too much is held",
        "How many of the tensors that have arrived do you still need?",
        lambda seen: seen[0] > MOST + 0.1 and f"held {seen[0]:.2f} × the tensor besides its own",
    ),
)
