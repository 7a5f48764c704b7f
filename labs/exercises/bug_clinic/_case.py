"""A case of the bug clinic: a bug that a well-known project shipped, written anew, and the instruments that may tell.

A case has two functions, the faulty one and a right one, and a job that calls either of them on every rank.

    numbers      the values of each rank beside those of one process in float64
    gradients    a wrong gradient as a mixture of the gradients of all micro-batches
    sent         the bytes that each rank sends, beside those of the right program
    held         the most bytes that the job adds to what a rank holds, beside the right program's
    time         the calls beside which the rank computes, counted in the order of the program and by no clock
    verdict      would the job hang on NCCL?
    dry          bytes sent, bytes held and the verdict, without other ranks and without numbers

An instrument is a function of `Jobs`, and returns a `Reading`.  The jobs of several cases are run together: first all
faulty programs, a step for each, and then the right ones.  A case that hangs is recorded in a dry run alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from html import escape
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine import learner_job
from labs.exercises.engine.answer import Answer, Wrong, answered, first_fit, instead, show
from labs.exercises.engine.mixture import COEFFICIENTS, Made
from labs.exercises.engine.value import mixture
from labs.kit.dry import Dry, NeedsNumbers, dry, would_hang
from labs.kit.launch import RankError, Results, run
from labs.kit.nccl.would_hang import Verdict
from labs.kit.record import Event, Recording, mark

RANKS = 4
SMALL, PAGE = 64, 4096  # bytes: nobody sees a number more sent, or a page more held, in a ledger
CUT = 2.0  # s of processor time after which a hang is cut; a certain one is found earlier
Job = Callable[[Callable[..., Any], int], dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Case:
    """A bug, and what tells of it.

    group: its symptom. a: the loss is nearly right; b: it is right on one rank or with one micro-batch only; c: the job
        hangs, or would on NCCL; d: memory grows or peaks; e: it is slow; f: the resumed run is another training.
    faulty, right: the function that the learner mends, as it was and as it should be.
    job: `job(fn, seed)` calls one of them on a rank, and returns the rank's values, {name: tensor}.
    alone: `alone(seed)` returns these values for each rank, computed by one process in float64.
    tells: the instruments that tell.
    threads: the reports that it comes from, its first user's before its fix: "project/pull/number state date", as the
        threads on GitHub show them.
    mistake: the name of the bug, for an answer that still has it.
    question: the question that leads on from a wrong answer.
    number: the number of the case's exercise, or 0; the first six are required.
    parts: `parts(seed, rank)` returns the gradient of each micro-batch of each rank, whose mean is the job's
        "gradient" on this rank; None if the case has no gradient.
    hangs: whether the faulty program does not end.
    """

    group: str
    faulty: Callable[..., Any]
    right: Callable[..., Any]
    job: Job
    alone: Callable[[int], Sequence[Mapping[str, Tensor]]]
    _: KW_ONLY
    tells: Collection[str] = ()
    threads: tuple[str, ...] = ()
    mistake: str = ""
    question: str = ""
    number: int = 0
    parts: Callable[[int, int], Sequence[Sequence[Tensor]]] | None = None
    hangs: bool = False

    @property
    def name(self) -> str:
        return self.right.__module__.rpartition(".")[2]

    @property
    def required(self) -> bool:
        return 1 <= self.number <= 6


@dataclass(frozen=True)
class Reading:
    """An instrument's reading of the faulty program.

    tells: whether it differs from the right program's.
    value: a word for the difference, by which a program can branch.
    times: how often each micro-batch of each rank counts in a wrong gradient, as a tensor of one row per rank.
    """

    tells: bool
    text: str
    value: str = ""
    times: Tensor | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f'<div style="white-space: pre-wrap">{escape(self.text)}</div>'  # lines break between words


# ---- the jobs ----------------------------------------------------------------------------------------------


def play(plays: Sequence[tuple[Job, Callable[..., Any]]], seed: int, values: bool = True) -> list[Any]:
    """Run jobs on a rank, each of them a step of the recording; return their values, or nothing in a dry run."""
    found = []
    for job, fn in plays:
        mark("step")
        found.append({name: getattr(x, "data", x) for name, x in job(fn, seed).items()})  # without autograd's graph
        torch.zeros(())  # a recorder of memory notices at an operator what has been freed
    mark("end")
    return found if values else []


@dataclass(frozen=True, eq=False)
class Jobs:
    """The jobs of some cases, each run once, when an instrument asks for it.

    mended: a function that is run instead of the faulty one, of a single case.
    """

    cases: tuple[Case, ...]
    seed: int = 0
    mended: Callable[..., Any] | None = None
    done: dict[str, Any] = field(default_factory=dict)

    def plays(self, ends: bool) -> list[tuple[Job, Callable[..., Any]]]:
        """Return a job and a function for each step; ends: whether a program that hangs is left out."""
        tried = [self.mended or (case.right if ends and case.hangs else case.faulty) for case in self.cases]
        return [(case.job, fn) for case, fn in zip(self.cases, tried, strict=True)] + self.rights

    @property
    def rights(self) -> list[tuple[Job, Callable[..., Any]]]:
        """The right programs; cases that share one run it once."""
        return [*dict.fromkeys((case.job, case.right) for case in self.cases)]

    def run(self, record: str) -> Results:
        if record not in self.done:  # a cached_property would let only one thread run its jobs at a time
            plays = self.plays(ends=True)
            self.done[record] = learner_job.job(play, plays, self.seed, ranks=RANKS, record=record)
        return self.done[record]

    @property
    def order(self) -> Results:
        return self.run("order")

    @property
    def memory(self) -> Results:
        return self.run("memory")

    @property
    def pretended(self) -> Dry | str:
        """The dry run of all ranks, or the reason why there is none."""
        if "dry" not in self.done:
            try:
                plays = self.plays(ends=False)
                self.done["dry"] = dry(play, plays, self.seed, values=False, ranks=RANKS, rank=range(RANKS))
            except NeedsNumbers as error:
                self.done["dry"] = str(error).splitlines()[0]
        return self.done["dry"]

    def steps(self, case: Case) -> tuple[int, int]:
        """Return the step of a case's faulty program, and that of its right one."""
        return self.cases.index(case), len(self.cases) + self.rights.index((case.job, case.right))

    def ends(self, case: Case) -> bool:
        return self.mended is not None or not case.hangs


# ---- the instruments ---------------------------------------------------------------------------------------


def numbers(jobs: Jobs, case: Case, ranks: Sequence[int] = range(RANKS)) -> Reading:
    expected = case.alone(jobs.seed)
    for rank in ranks:
        found = jobs.order[rank][jobs.steps(case)[0]]
        for name, due in expected[rank].items():
            if getattr(found[name], "shape", None) != due.shape:
                return Reading(
                    True, f"on rank {rank} {name} is {show(found[name])}, and {show(due)} in one process", name
                )
            one, other = found[name].double().flatten(), due.detach().double().flatten()
            far = ~torch.isclose(one, other, rtol=1e-9, atol=1e-9)
            if far.any():
                at = int(far.nonzero()[0])
                element = f" at element {at}" * (len(other) > 1)
                text = f"on rank {rank} {name}{element} is {instead(one[at], other[at])} (one process)"
                return Reading(True, text, name)
    return Reading(False, "the numbers are one process's, up to rounding")


def gradients(jobs: Jobs, case: Case) -> Reading:
    if case.parts is None:
        return Reading(False, "no gradient is a mixture of micro-batches' gradients here")
    for rank in range(RANKS):
        parts = case.parts(jobs.seed, rank)
        columns = [part.flatten() for own in parts for part in own]
        found = jobs.order[rank][jobs.steps(case)[0]]["gradient"].flatten()
        times = mixture(found, columns)
        if times is None:
            return Reading(True, f"rank {rank}'s gradient is no mixture of the micro-batches' gradients", "no mixture")
        made = Made((times * len(columns)).view(len(parts), -1), rank)
        if not torch.allclose(made.times, torch.ones_like(made.times), atol=2e-3):
            mistake, sentence = first_fit(COEFFICIENTS, made)
            name = mistake.name or "a mixture"
            return Reading(True, f"rank {rank}'s gradient: {name}. {sentence}".strip(), name, made.times)
    return Reading(False, "each micro-batch's gradient counts once on every rank")


def bytes_sent(recording: Recording, steps: tuple[int, int]) -> Reading:
    one, other = ([recording.sent(rank, each) for rank in range(RANKS)] for each in steps)
    rank = max(range(RANKS), key=lambda rank: abs(one[rank] - other[rank]))
    text = f"rank {rank} sends {one[rank]:,} bytes, and {other[rank]:,} in the right program"
    return Reading(abs(one[rank] - other[rank]) > SMALL, text, "more sent" if one[rank] > other[rank] else "less sent")


def bytes_held(recording: Recording, steps: tuple[int, int]) -> Reading:
    def added(rank: int, step: int) -> int:
        before, *later = [size for _, size in recording.during(rank, step)]
        return max(before, *later) - before

    pairs = [(added(rank, steps[0]), added(rank, steps[1])) for rank in range(RANKS)]
    rank = max(range(RANKS), key=lambda rank: pairs[rank][0] / max(pairs[rank][1], 1))
    one, other = pairs[rank]
    text = f"rank {rank} holds up to {one:,} bytes more than before, and {other:,} in the right program"
    return Reading(one > 1.25 * other + PAGE, text, "more held")


def at_the_same_time(recording: Recording, steps: tuple[int, int]) -> Reading:
    (one, calls), (other, _) = (beside(recording, each) for each in steps)
    text = f"rank 0 computes beside {one} of its {len(calls)} calls, and beside {other} in the right program"
    unwaited = sum(not call.waits for call in calls)
    text += f"; it never waits for {unwaited} of them" * (one < other and unwaited > 0)
    return Reading(one < other, text, "less at once")


def beside(recording: Recording, step: int) -> tuple[int, list[Event]]:
    """Return in how many of rank 0's calls a span began between the call and the wait for it, and all its calls."""
    starts = [span.start for span in recording.spans if span.rank == 0 and span.name != "step"]
    calls = recording.select(0, step)
    open_ = [(call.start, call.waits[0][0]) for call in calls if call.waits]
    return sum(any(start < span < wait for span in starts) for start, wait in open_), calls


def verdict(jobs: Jobs, case: Case) -> Reading:
    if jobs.ends(case):
        return judged_as(jobs.order.recording, jobs.steps(case)[0])
    return dry_run(jobs, case)


def judged_as(recording: Recording, step: int) -> Reading:
    found = judged(recording, step)
    return Reading(found.name != "sound", f"on NCCL: {found}", found.name)


def judged(recording: Recording, step: int) -> Verdict:
    return would_hang(replace(recording, events=[event for event in recording.events if event.step == step]))


def dry_run(jobs: Jobs, case: Case) -> Reading:
    pretended, steps = jobs.pretended, jobs.steps(case)
    if isinstance(pretended, str):
        return Reading(False, pretended)
    readings = (
        judged_as(pretended.communication, steps[0]),
        bytes_sent(pretended.communication, steps),
        bytes_held(pretended.memory, steps),
    )
    telling = [reading for reading in readings if reading.tells]
    return Reading(bool(telling), "; ".join(map(repr, telling or readings)))


INSTRUMENTS: dict[str, Callable[[Jobs, Case], Reading]] = {
    "numbers": numbers,
    "gradients": gradients,
    "sent": lambda jobs, case: bytes_sent(jobs.order.recording, jobs.steps(case)),
    "held": lambda jobs, case: bytes_held(jobs.memory.recording, jobs.steps(case)),
    "time": lambda jobs, case: at_the_same_time(jobs.order.recording, jobs.steps(case)),
    "verdict": verdict,
    "dry": dry_run,
}


def read(instrument: str, jobs: Jobs, case: Case) -> Reading:
    """Return an instrument's reading; raise ValueError for one that the clinic does not have."""
    if instrument not in INSTRUMENTS:
        raise ValueError(f"there is no instrument {instrument!r}: the clinic has {', '.join(INSTRUMENTS)}")
    if not jobs.ends(case) and instrument not in ("verdict", "dry"):
        return Reading(False, "the job does not come to an end, so there is nothing to read", "no end")
    return INSTRUMENTS[instrument](jobs, case)


def fewest(told: Mapping[str, set[str]]) -> set[str]:
    """Return the fewest instruments of which at least one tells of each case; told: {case: instruments that tell}."""
    sizes = range(1 + len(INSTRUMENTS))
    some = (set(chosen) for size in sizes for chosen in combinations(INSTRUMENTS, size))
    return next(chosen for chosen in some if all(chosen & tells for tells in told.values()))


class Visit:
    """A learner's visit to a case, whose instruments are counted, each time that one is read, in `counts`.

    fn: the function that the job calls; the faulty one by default.
    suspect: what the learner suspected before the first reading.
    """

    def __init__(self, case: Case, fn: Callable[..., Any] | None = None, seed: int = 0) -> None:
        self.case, self.counts, self.suspect = case, Counter[str](), ""
        self.jobs = Jobs((case if fn is None else replace(case, faulty=fn),), seed)

    def look(self, suspect: str | None, instruments: Sequence[str] | str | None) -> Reading:
        """Read these instruments in order; return a line for each.

        suspect: what may be wrong, in a few words; None is "not yet", and nothing is read.
        instruments: the names of instruments, or one name; None is "not yet".
        """
        if suspect is None or instruments is None:
            names = ", ".join(f'"{name}"' for name in INSTRUMENTS)
            return Reading(False, f"not yet: write what may be wrong, and choose a list from {names}")
        self.suspect = suspect
        chosen = [instruments] if isinstance(instruments, str) else instruments
        return Reading(True, "\n".join(f"{name}: {self.read(name)}" for name in chosen))

    def bill(self) -> dict[str, str | int]:
        """Return a row of a table: the suspicion, the readings, and the fewest that tell of this case."""
        return {
            "you suspected": self.suspect,
            "you read": ", ".join(self.counts),
            "readings": self.counts.total(),
            "fewest": len(fewest({self.case.name: self.case.tells})),
            "any of these tells": ", ".join(name for name in INSTRUMENTS if name in self.case.tells),
        }

    def read(self, instrument: str) -> Reading:
        self.counts[instrument] += 1
        return read(instrument, self.jobs, self.jobs.cases[0])

    def both(self, name: str, rank: int = 0) -> dict[str, Tensor]:
        """Return a rank's value of this name, as the faulty program and as one process compute it."""
        case, seed = self.jobs.cases[0], self.jobs.seed
        return {"one process": case.alone(seed)[rank][name], f"rank {rank}": self.jobs.order[rank][0][name]}

    def factors(self) -> Tensor:
        """Return how often each micro-batch of each rank counts in the gradient of rank 0; it is no reading."""
        times = gradients(self.jobs, self.jobs.cases[0]).times
        if times is None:
            raise ValueError(f"{self.case.name}: its gradient is right, or no mixture of micro-batches' gradients")
        return times

    def waits(self) -> list[dict[str, Any]]:
        """Return a row for each rank that would wait for ever on NCCL: its call, and the ranks of the call's group."""
        standstill = judged(self.jobs.order.recording, 0).standstill
        stops = sorted(standstill.stops, key=lambda stop: stop.rank) if standstill else []
        return [
            {"rank": stop.rank, "waits in": stop.event.op, "of ranks": " and ".join(map(str, stop.event.ranks))}
            for stop in stops
        ]

    def hang_report(self) -> Reading:
        """Return what the launcher says of a job that hangs, which is cut after CUT seconds; it is no reading."""
        case = self.jobs.cases[0]
        try:
            limit = learner_job.patience(CUT)
            run(play, [(case.job, case.faulty)], self.jobs.seed, ranks=RANKS, timeout=limit, device="cpu")
        except RankError as error:
            return Reading(True, str(error).split("\n\n")[0])
        return Reading(False, "the job has come to its end")


# ---- the check ---------------------------------------------------------------------------------------------

NAMES = {
    "numbers": "other numbers than one process's",
    "sent": "other bytes are sent than by the right program",
    "held": "more is held than by the right program",
    "time": "less runs at the same time than in the right program",
    "verdict": "the job would hang on NCCL",
}
MISSING = "one side of a message or a collective is missing"


def checked(case: Case, fn: Callable[..., Any], seed: int) -> str:
    """Return the readings of what told of the bug, of a mended function; raise Wrong if an instrument tells of it."""
    jobs, readings = Jobs((case,), seed, fn), {}
    for name, mistake in NAMES.items():
        try:
            readings[name] = reading = read(name, jobs, case)
        except Wrong as wrong:
            hangs = case.hangs and wrong.answer.mistake == MISSING
            raise wrong.with_name(case.mistake if hangs else "") from None
        if reading.tells:
            as_shipped = not case.hangs and symptoms(name, jobs) == symptoms(name, Jobs((case,), seed))
            raise Wrong(f"{RANKS} ranks: {reading}", case.question, case.mistake if as_shipped else mistake)
    return "; ".join(repr(readings[name]) for name in NAMES if name == "numbers" or name in case.tells)


def symptoms(instrument: str, jobs: Jobs) -> list[Reading]:
    """Return an instrument's reading, or that of each rank if it reads numbers."""
    (case,) = jobs.cases
    if instrument == "numbers":
        return [numbers(jobs, case, [rank]) for rank in range(RANKS)]
    return [read(instrument, jobs, case)]


def clinic(*programs: Any, asks: str, **words: Any) -> Callable[..., Answer]:
    """Return the check of a case, which has the case, and a visit to it, as attributes.

    programs, words: the fields of Case.
    asks: what the mended function is called with, and what it must do.
    """
    case = Case(*programs, **words)

    def judge(fn: Callable[..., Any], seed: int) -> str:
        return checked(case, fn, seed)

    judge.__name__, judge.__doc__ = case.name, f"Check {asks}."
    check = answered(judge)
    check.case, check.visit = case, functools.partial(Visit, case)
    return check


# ---- what jobs are made of ---------------------------------------------------------------------------------


def drawn(shape: Sequence[int], *place: int) -> Tensor:
    """Return random numbers that belong to a place, such as (seed, rank, step), in float64; the same on any device."""
    seed = 0
    for number in place:
        seed = 1009 * seed + number + 1
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device())


def mean_of(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([part for own in parts for part in own]).mean(0)
