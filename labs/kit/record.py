"""Recordings of a job: what its ranks did, sent and held, and when.

    Recording       what the ranks of a job sent, held and did, and when; a notebook cell shows it as a figure
    mark            begin a step, or a phase of a step
    span            record a block of code as an activity with a name
    instructions    record each instruction of a pipeline
    by_axis         the bytes that a rank sent in a step along each axis of a mesh
    sent_and_held   these of each rank, and the bytes of P, G and S that it holds
    redistributed   run a module on a rank; return a row for each redistribution of its DTensors
    watch_folder    take snapshots of a checkpoint folder, before each call that changes the folder
    budget          limit the bytes of a rank's tensors: an operator that would exceed the limit fails

    results = run(train, ranks=4, record="communication")
    results.recording                           # as the last expression of a cell: a timeline
    results.recording.sent(rank=0, step=2)      # bytes
    results.recording.across(rank=0, step=2)    # bytes to other nodes, of a job that was run with a link

A pass is one of four ways of recording a job.  On each rank, for the whole function, it records:

    time             marks and spans, which costs nothing
    communication    marks, spans, and every collective, send and recv: less than 10 % (watch/communication.py)
    order            communication, and tensors used before a wait: 10 µs per operator (watch/early_touches.py)
    memory           marks, spans, and every byte held, by kind: 15 µs per operator (watch/memory.py)

A job has one pass, since each pass disturbs the values that another pass measures.  The pass of each rank leaves a tape
(the recorded values), and `join` makes one Recording of all tapes.  The clock of a Recording is the monotonic clock,
which all processes of a machine share; it is 0 when the first rank starts.

The recorded code only marks the beginning of each step, which no recorder could guess.

    for x, y in batches:
        mark("step")            # ends the previous step
        mark("forward")         # phases follow one another within a step
        loss = model(x, y)
        mark("backward")
        loss.backward()
        ...
    mark("end")                 # optional: the code after it belongs to no step

In a pipeline, each instruction can be a span: `pipeline = instructions(Pipeline(...))`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from torch import Tensor

from labs.kit.ranks.link import Link
from labs.kit.watch.budget import budget
from labs.kit.watch.bytes_by_axis import by_axis, sent_and_held
from labs.kit.watch.communication import CommunicationWatch, Event
from labs.kit.watch.early_touches import Touches
from labs.kit.watch.folder_snapshots import watch_folder
from labs.kit.watch.memory import KINDS, StorageWatch, timeline
from labs.kit.watch.redistributions import redistributed
from labs.pp.executor import Pipeline
from labs.pp.instructions import Instruction, Lists
from labs.pp.simulation import Simulation

__all__ = [
    "Recording", "budget", "by_axis", "instructions", "mark", "redistributed", "sent_and_held", "span", "watch_folder",
]  # fmt: skip

T = TypeVar("T")
Series = list[tuple[float, dict[str, int]]]  # (seconds, {kind: bytes}), ...
P = TypeVar("P", bound=Pipeline)


@dataclass(frozen=True)
class Span:
    """A named activity of a rank from `start` to `end`, in seconds on the job's clock; steps are spans named "step"."""

    rank: int
    name: str
    start: float
    end: float


class TimePass:
    """A pass that records marks and spans, and nothing else."""

    watch: Any = None  # the recorder that a pass adds: a context manager with a `tape`
    active: TimePass | None = None

    def __init__(self) -> None:
        self.marks: list[tuple[str, int]] = []
        self.spans: list[tuple[str, int, int]] = []

    def __enter__(self) -> TimePass:
        TimePass.active, self.start = self, time.monotonic_ns()
        if self.watch:
            self.watch.__enter__()
        return self

    def mark(self, name: str) -> None:
        self.marks.append((name, time.monotonic_ns()))

    def __exit__(self, *failure: Any) -> None:
        if self.watch:
            self.watch.__exit__(*failure)
        TimePass.active, self.end = None, time.monotonic_ns()

    @property
    def tape(self) -> dict[str, Any]:
        """The marks and spans of the pass, small and picklable; times are in nanoseconds (time.monotonic_ns)."""
        names = "start", "end", "marks", "spans"
        return {name: getattr(self, name) for name in names} | {"watched": self.watch and self.watch.tape}


class CommunicationPass(TimePass):
    """A pass that records marks and spans, and every collective, send and recv."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = CommunicationWatch()


class OrderPass(CommunicationPass):
    """A CommunicationPass that also records which operators use a tensor before the wait for its collective."""

    def __enter__(self) -> OrderPass:
        super().__enter__()
        self.touches = Touches(self.watch).__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.touches.__exit__(*failure)
        super().__exit__(*failure)


class MemoryPass(TimePass):
    """A pass that records marks and spans, and the bytes that a rank holds, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = StorageWatch()

    def mark(self, name: str) -> None:
        self.watch.settle()
        super().mark(name)


PASSES = {"time": TimePass, "communication": CommunicationPass, "order": OrderPass, "memory": MemoryPass}
KIND = {"order": "communication"}  # {name of a pass: kind of its recording, if another}


def mark(name: str) -> None:
    """Begin the phase `name` on this rank; "step" begins a step, and "end" ends the last step.

    Without a recording, a mark does nothing.
    """
    if TimePass.active:
        TimePass.active.mark(name)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record the body of a with statement as a span `name`; unlike phases, spans may be nested.

    Without a recording, a span does nothing.
    """
    start, watch = time.monotonic_ns(), TimePass.active
    yield
    if watch:
        watch.spans.append((name, start, time.monotonic_ns()))


def instructions(pipeline: P) -> P:
    """Record each instruction that a labs.pp.Pipeline runs as a span with the instruction's name, such as 2F0.

    A span begins when the input of the instruction has arrived, so it does not contain the time in which the rank waits
    for another rank.  Times are measured on the host, which does not wait for a GPU.

    Returns the same pipeline.
    """
    compute, take, start = pipeline.compute, pipeline.mail.take, 0

    def take_and_time(message: Instruction) -> Tensor:
        nonlocal start
        x = take(message)
        start = time.monotonic_ns()
        return x

    def compute_and_record(x: Instruction) -> None:
        nonlocal start
        start = time.monotonic_ns()
        compute(x)
        if TimePass.active:
            TimePass.active.spans.append((repr(x), start, time.monotonic_ns()))

    pipeline.compute, pipeline.mail.take = compute_and_record, take_and_time
    return pipeline


@dataclass(frozen=True, repr=False)
class Recording:
    """The recording of a job on all its ranks, on one clock, in seconds from the start of the first rank."""

    kind: str  # "time", "communication" or "memory"
    ranks: int
    events: list[Event] = field(default_factory=list)  # sorted by their start
    spans: list[Span] = field(default_factory=list)  # sorted by their start
    memory: Sequence[Series] | Mapping[int, Series] = field(default_factory=list)  # the bytes held, by rank
    link: Link | None = None  # the slow link of the job, or the nodes of a dry run
    seen: Sequence[int] = ()  # the recorded ranks: all ranks of the job, except in a dry run

    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", tuple(self.seen) or tuple(range(self.ranks)))

    @property
    def steps(self) -> int:
        """The number of steps that the first rank marked."""
        return len(self.step_spans(self.seen[0]))

    def step_spans(self, rank: int = 0) -> list[Span]:
        return self.steps_by_rank.get(rank, [])

    @cached_property
    def steps_by_rank(self) -> dict[int, list[Span]]:
        return grouped((span for span in self.spans if span.name == "step"), lambda span: span.rank)

    @cached_property
    def events_by_step(self) -> dict[tuple[int, int | None], list[Event]]:
        return grouped(self.events, lambda event: (event.rank, event.step))

    def took(self, step: int) -> float:
        """Return the seconds of a step, from the first rank's start to the last rank's end."""
        starts, ends = zip(*(self.window(rank, step) for rank in self.seen), strict=True)
        return max(ends) - min(starts)

    def sent(self, rank: int = 0, step: int | None = None) -> int:
        """Return the logical bytes that a rank sent, in one step or in the whole job if step is None."""
        return sum(event.sent for event in self.select(rank, step))

    def across(self, rank: int = 0, step: int | None = None) -> int:
        """Return the logical bytes that a rank sent to other nodes, in one step or in the whole job if step is None."""
        if self.link is None:
            raise ValueError("this job had no nodes to tell apart: give it some by run(..., link=Link(...))")
        return sum(self.link.across(rank, event.to, self.ranks) for event in self.select(rank, step))

    def counts(self, rank: int = 0, step: int | None = None) -> Counter[str]:
        """Return {op: number of calls} of a rank, in one step or in the whole job if step is None."""
        return Counter(event.op for event in self.select(rank, step))

    def select(self, rank: int = 0, step: int | None = None) -> list[Event]:
        """Return a rank's communication events, in one step or in the whole job if step is None."""
        self.require("communication")
        self.window(rank, step)
        if step is None:
            return [event for event in self.events if event.rank == rank]
        return list(self.events_by_step.get((rank, step), []))

    def held(self, rank: int = 0, step: int | None = None) -> dict[str, int]:
        """Return {kind: the most bytes of this kind that a rank held}, with "peak", the most bytes of all together.

        Two kinds may reach their maximum at different moments, so the peak may be below the sum of the maxima.
        """
        within = [held for _, held in self.moments(rank, step)]
        most = {kind: max(held[kind] for held in within) for kind in KINDS}
        return most | {"peak": max(sum(held.values()) for held in within)}

    def during(self, rank: int, step: int | None, kinds: Sequence[str] = KINDS) -> list[tuple[float, int]]:
        """Return (seconds, bytes of these kinds together) when a step began, and after each change within the step.

        With `before, *later = [size for _, size in during(...)]`, the most bytes that the step added are
        `max(before, *later) - before`.
        """
        return [(moment, sum(held[kind] for kind in kinds)) for moment, held in self.moments(rank, step)]

    def moments(self, rank: int, step: int | None) -> list[tuple[float, dict[str, int]]]:
        """Return (seconds, {kind: bytes}) when a step began, and after each change within the step."""
        self.require("memory")
        start, end = self.window(rank, step)
        line = self.memory[rank]
        first, last = (bisect_left(line, moment, key=itemgetter(0)) for moment in (start, end))
        before = line[first - 1][1] if first else dict.fromkeys(KINDS, 0)
        return [(start, before), *line[first:last]]

    def steady(self, rank: int = 0) -> dict[str, int]:
        """Return the bytes that a rank holds in a steady step: for each kind, its minimum over all steps but the first.

        The minimum counts, since a thread of the backend sometimes holds a tensor a moment longer than the step does.
        """
        later = [self.held(rank, step) for step in range(1, self.steps)]
        if not later:
            raise ValueError(f"this recording has {self.steps} steps: a steady step takes 2 or more")
        return {kind: min(held[kind] for held in later) for kind in later[0]}

    def schedule(self, lists: Lists, step: int | None = None) -> Simulation:
        """Return when each instruction of a pipeline schedule began and ended in a step, in seconds from the first.

        The job's pipeline must be wrapped in `instructions`.

        lists: the schedule that the job ran, as one list of instructions per rank.
        step: the number of the step, the last when left out.
        Raises ValueError if the step did not run each instruction of the schedule once.
        """
        step = self.steps - 1 if step is None and self.steps else step
        windows = {rank: self.window(rank, step) for rank in self.seen}
        inside = (span for span in self.spans if windows[span.rank][0] <= span.start < windows[span.rank][1])
        found = grouped(inside, lambda span: span.name)
        start, end = {}, {}
        for x in chain(*lists):
            spans = found.get(repr(x), [])
            if len(spans) != 1:
                where = "this recording" if step is None else f"step {step} of this recording"
                raise ValueError(
                    f"{x!r} ran {len(spans)} times in {where}: hand the pipeline to instructions(), call "
                    'mark("step") before each forward_backward, and give the lists that it ran'
                )
            start[x], end[x] = spans[0].start, spans[0].end
        zero = min(start.values())
        return Simulation(lists, *({x: moment - zero for x, moment in each.items()} for each in (start, end)))

    def require(self, kind: str) -> None:
        if self.kind != kind:
            raise ValueError(f'this recording is of {self.kind}, not of {kind}: make one by run(..., record="{kind}")')

    def window(self, rank: int, step: int | None) -> tuple[float, float]:
        """Return the start and end of a step in seconds.  Raises ValueError if there is no such rank or step."""
        if rank not in self.seen:
            there = f"ranks 0 to {self.ranks - 1}" if len(self.seen) == self.ranks else f"of {self.ranks} ranks these: "
            there += "" if len(self.seen) == self.ranks else ", ".join(map(str, self.seen))
            raise ValueError(f"rank {rank} is not in this recording, which has {there}")
        if step is None:
            return 0.0, float("inf")
        steps = self.step_spans(rank)
        if not 0 <= step < len(steps):
            raise ValueError(f'step {step}: rank {rank} marked {len(steps)} steps (mark("step") begins one, from 0)')
        return steps[step].start, steps[step].end

    def __repr__(self) -> str:
        seen = {"time": f"{len(self.spans)} spans", "communication": f"{len(self.events)} events"}
        return f"Recording({self.kind}, {self.ranks} ranks, {self.steps} steps, {seen.get(self.kind, 'bytes by kind')})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from labs.kit import draw  # imported here, since it imports matplotlib, which no rank needs

        figure = draw.memory(self) if self.kind == "memory" else draw.timeline(self)
        return figure._repr_mimebundle_(include, exclude)


def join(kind: str, tapes: list[dict[str, Any]], link: Link | None = None) -> Recording:
    """Return one Recording from the tapes of all ranks, which are in order of rank."""
    return join_some(kind, dict(enumerate(tapes)), len(tapes), link)


def join_some(kind: str, tapes: Mapping[int, dict[str, Any]], ranks: int, link: Link | None = None) -> Recording:
    """Return one Recording from the tapes of some ranks, {rank: tape}, of a job with `ranks` ranks."""
    kind, zero = KIND.get(kind, kind), min(tape["start"] for tape in tapes.values())

    def seconds(moment: int) -> float:
        return (moment - zero) / 1e9

    spans: list[Span] = []
    events: list[Event] = []
    memory: dict[int, Series] = {}
    for rank, tape in tapes.items():
        cut = [Span(rank, name, seconds(start), seconds(end)) for name, start, end in phases(tape) + tape["spans"]]
        spans.extend(cut)
        if kind == "communication":
            steps = [span for span in cut if span.name == "step"]
            events.extend(event(row, steps, seconds) for row in tape["watched"])
        if kind == "memory":
            memory[rank] = [(seconds(moment), held) for moment, held in timeline(tape["watched"])]
    spans.sort(key=attrgetter("start"))
    events.sort(key=attrgetter("start"))
    in_order = memory if len(tapes) < ranks else [*memory.values()]
    return Recording(kind, ranks, events, spans, in_order, link, tuple(tapes))


def event(row: dict[str, Any], steps: list[Span], seconds: Callable[[int], float]) -> Event:
    start, end = seconds(row["start"]), seconds(row["end"])
    waits = tuple((seconds(begin), seconds(until)) for begin, until in row["waits"])
    number = bisect_right(steps, start, key=attrgetter("start")) - 1
    step = number if number >= 0 and start < steps[number].end and not row["meta"] else None
    return Event(**row | {"start": start, "end": end, "waits": waits, "step": step})


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return {key: list of the items with this key}, each list in the order of `items`."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def phases(tape: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return (name, start, end) of each step and each phase of a tape; a step lasts until the next step's mark."""
    marks = [*tape["marks"], ("end", tape["end"])]
    borders = [(name, moment) for name, moment in marks if name in ("step", "end")]
    steps = [pair for pair in pairwise(borders) if pair[0][0] == "step"]
    within = [pair for pair in pairwise(marks) if pair[0][0] not in ("step", "end")]
    return [(name, start, end) for (name, start), (_, end) in steps + within]
