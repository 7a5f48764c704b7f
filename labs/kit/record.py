"""Watch a job from outside: when its ranks did what, what they sent, what they held.

    results = run(train, ranks=4, record="communication")
    results.recording                           # draws itself
    results.recording.sent(rank=0, step=2)      # bytes

    pass             on a rank, for the whole of the function   it costs
    time             marks and spans                            nothing
    communication    and every collective and send/recv         less than 10 % of the step (watch/communication.py)
    memory           and every byte held, by kind               a quarter to a half of the step (watch/memory.py)

One pass a job, since each disturbs what another would measure.  Each rank's pass leaves a tape; `join` makes one
Recording of them, on one clock: the monotonic one that all processes of a machine share, 0 at the first rank's start.

The watched code has no part in this, but for the one thing that nobody could guess: where a step begins.

    for x, y in batches:
        mark("step")            # closes the step before it
        mark("forward")         # phases follow one another within a step
        loss = model(x, y)
        mark("backward")
        loss.backward()
        ...
    mark("end")                 # optional: what comes now belongs to no step
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from labs.kit.watch.communication import CommunicationWatch, Event
from labs.kit.watch.memory import KINDS, StorageWatch, timeline


@dataclass(frozen=True)
class Span:
    """Something that a rank was doing, from `start` to `end` (s on the job's clock); a step is one named "step"."""

    rank: int
    name: str
    start: float
    end: float


class TimePass:
    """Marks and spans, and nothing else."""

    watch: Any = None  # what a pass has on besides: a context manager with a `tape`
    active: TimePass | None = None

    def __init__(self) -> None:
        self.marks: list[tuple[str, int]] = []
        self.spans: list[tuple[str, int, int]] = []

    def __enter__(self) -> TimePass:
        TimePass.active, self.start = self, time.monotonic_ns()
        if self.watch:
            self.watch.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        if self.watch:
            self.watch.__exit__(*failure)
        TimePass.active, self.end = None, time.monotonic_ns()

    @property
    def tape(self) -> dict[str, Any]:
        """Small and picklable; times in nanoseconds of the monotonic clock."""
        names = "start", "end", "marks", "spans"
        return {name: getattr(self, name) for name in names} | {"watched": self.watch and self.watch.tape}


class CommunicationPass(TimePass):
    """Marks and spans, and every collective, send and recv."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = CommunicationWatch()


class MemoryPass(TimePass):
    """Marks and spans, and the bytes held."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = StorageWatch()


PASSES = {"time": TimePass, "communication": CommunicationPass, "memory": MemoryPass}


def mark(name: str) -> None:
    """From here on this rank is in phase `name`; "step" begins a step, "end" ends the last.  Free outside of a pass."""
    if TimePass.active:
        TimePass.active.marks.append((name, time.monotonic_ns()))


@contextmanager
def span(name: str) -> Iterator[None]:
    """What runs inside is a span `name`; unlike phases, spans may nest.  Free outside of a pass."""
    start, watch = time.monotonic_ns(), TimePass.active
    yield
    if watch:
        watch.spans.append((name, start, time.monotonic_ns()))


@dataclass(frozen=True, repr=False)
class Recording:
    """What a pass saw of all ranks, on one clock (seconds, 0 when the first rank began)."""

    kind: str  # "time", "communication" or "memory"
    ranks: int
    events: list[Event] = field(default_factory=list)  # in order of their start
    spans: list[Span] = field(default_factory=list)  # likewise
    memory: list[list[tuple[float, dict[str, int]]]] = field(default_factory=list)  # by rank: (s, bytes by kind), ...

    @property
    def steps(self) -> int:
        """How many steps rank 0 marked."""
        return len(self.step_spans(0))

    def step_spans(self, rank: int = 0) -> list[Span]:
        return [span for span in self.spans if span.rank == rank and span.name == "step"]

    def sent(self, rank: int = 0, step: int | None = None) -> int:
        """Logical bytes that a rank sent, in one step or in all of the job."""
        return sum(event.sent for event in self.select(rank, step))

    def counts(self, rank: int = 0, step: int | None = None) -> Counter[str]:
        """How many of each op a rank issued, in one step or in all of the job."""
        return Counter(event.op for event in self.select(rank, step))

    def select(self, rank: int = 0, step: int | None = None) -> list[Event]:
        """The events of a rank, of one step or of all of the job."""
        self.require("communication")
        self.window(rank, step)
        return [event for event in self.events if event.rank == rank and step in (None, event.step)]

    def held(self, rank: int = 0, step: int | None = None) -> dict[str, int]:
        """The most bytes that a rank held of each kind, each at its own moment, and as "peak" the most in all."""
        self.require("memory")
        start, end = self.window(rank, step)
        times = [moment for moment, _ in self.memory[rank]]
        first = max(0, bisect_left(times, start) - 1)  # what was there as the step began
        moments = [held for _, held in self.memory[rank][first : bisect_left(times, end)]] or [dict.fromkeys(KINDS, 0)]
        most = {kind: max(held[kind] for held in moments) for kind in KINDS}
        return most | {"peak": max(sum(held.values()) for held in moments)}

    def steady(self, rank: int = 0) -> dict[str, int]:
        """What a rank holds in a step of a training under way: of each kind the least of all steps but the first.

        The least, since now and then a thread of the backend keeps a tensor a moment longer than the step needs it.
        """
        later = [self.held(rank, step) for step in range(1, self.steps)]
        if not later:
            raise ValueError(f"this recording has {self.steps} steps: a steady one takes 2 or more")
        return {kind: min(held[kind] for held in later) for kind in later[0]}

    def require(self, kind: str) -> None:
        if self.kind != kind:
            raise ValueError(f'this is a recording of {self.kind}: run(..., record="{kind}") makes the one needed here')

    def window(self, rank: int, step: int | None) -> tuple[float, float]:
        """Start and end of a step (s).  Raises ValueError when there is no such rank or step."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank}: this recording has ranks 0 to {self.ranks - 1}")
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
        from labs.kit import draw  # with matplotlib, which a rank has no use for

        figure = draw.memory(self) if self.kind == "memory" else draw.timeline(self)
        return figure._repr_mimebundle_(include, exclude)


def join(kind: str, tapes: list[dict[str, Any]]) -> Recording:
    """One Recording of what the passes of all ranks left, in order of rank."""
    zero = min(tape["start"] for tape in tapes)

    def seconds(moment: int) -> float:
        return (moment - zero) / 1e9

    recording = Recording(kind, len(tapes))
    for rank, tape in enumerate(tapes):
        cut = phases(tape) + tape["spans"]
        recording.spans.extend(Span(rank, name, seconds(start), seconds(end)) for name, start, end in cut)
        if kind == "communication":
            recording.events.extend(event(row, recording.step_spans(rank), seconds) for row in tape["watched"])
        if kind == "memory":
            recording.memory.append([(seconds(moment), held) for moment, held in timeline(tape["watched"])])
    for found in (recording.spans, recording.events):
        found.sort(key=lambda each: each.start)
    return recording


def event(row: dict[str, Any], steps: list[Span], seconds: Callable[[int], float]) -> Event:
    start, end, waited = seconds(row["start"]), seconds(row["end"]), row["waited"] / 1e9
    step = next((number for number, step in enumerate(steps) if step.start <= start < step.end), None)
    return Event(**row | {"start": start, "end": end, "waited": waited, "step": step})


def phases(tape: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(name, start, end) of each step, from its mark to the next one of a step, and of the phases in between."""
    marks = [*tape["marks"], ("end", tape["end"])]
    borders = [(name, moment) for name, moment in marks if name in ("step", "end")]
    steps = [pair for pair in pairwise(borders) if pair[0][0] == "step"]
    within = [pair for pair in pairwise(marks) if pair[0][0] not in ("step", "end")]
    return [(name, start, end) for (name, start), (_, end) in steps + within]
