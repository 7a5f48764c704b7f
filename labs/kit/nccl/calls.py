"""The calls of a recorded job as values: what each rank asks of NCCL, in its order of issue.

    programs(recording.events)[rank]        [Call, Call, Wait, ...]

A `Call` is what NCCL runs as one: a collective, a send or recv, or all messages of a batch_isend_irecv, which is one
group call (ncclGroupStart ... ncclGroupEnd).  A `Wait` stands where the rank had waited for one: what it issued later,
it issued when that was done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from labs.kit.watch.communication import Event

MESSAGES = "send", "recv"
Communicator = tuple[str | int, ...]  # the name of a group and its members; of a pair, these two besides


@dataclass(frozen=True, eq=False)
class Call:
    """events: one, or the messages of a batch."""

    rank: int
    events: tuple[Event, ...]

    @property
    def first(self) -> Event:
        return self.events[0]

    @property
    def is_batch(self) -> bool:
        return self.first.batch is not None

    @property
    def is_message(self) -> bool:
        return self.first.op in MESSAGES

    @property
    def start(self) -> float:
        return self.first.start

    @property
    def done(self) -> float:
        """When the rank had waited for it; infinite where it has not.  NCCL has one Work for all of a batch."""
        return min(event.waits[0][1] if event.waits else float("inf") for event in self.events)

    def communicator(self, lazy: bool) -> Communicator:
        """lazy: PyTorch makes communicators at first use, and gives a single send or recv one of the pair alone."""
        event = self.first
        pair = sorted((event.rank, event.peer)) if lazy and self.is_message and not self.is_batch else ()
        return event.communicator, *event.ranks, "of", *pair

    def members(self, lazy: bool) -> tuple[int, ...]:
        """The ranks that share the communicator."""
        single = lazy and self.is_message and not self.is_batch
        return tuple(sorted((self.first.rank, self.first.peer))) if single else self.first.ranks

    def __repr__(self) -> str:
        more = f" and {len(self.events) - 1} more in a batch" if len(self.events) > 1 else ""
        return f"rank {self.rank}: {tell(self.first)}{more}"


@dataclass(frozen=True, eq=False)
class Wait:
    """The rank goes no further before this call is done."""

    call: Call


Program = list[Call | Wait]


def programs(events: Iterable[Event]) -> dict[int, Program]:
    """By rank."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    return {rank: program(own) for rank, own in by_rank.items()}


def program(events: list[Event]) -> Program:
    """events: those of one rank, in order."""
    calls = calls_of(events)
    issued = [(call.start, 1, call) for call in calls]
    waited = [(call.done, 0, Wait(call)) for call in calls if call.done < float("inf")]
    return [step for *_, step in sorted(issued + waited, key=itemgetter(0, 1))]


def calls_of(events: list[Event]) -> list[Call]:
    calls: list[list[Event]] = []
    batches: dict[int, list[Event]] = {}
    for event in events:
        if event.batch is None:
            calls.append([event])
        elif event.batch in batches:
            batches[event.batch].append(event)
        else:
            calls.append(batches.setdefault(event.batch, [event]))
    return [Call(own[0].rank, tuple(own)) for own in calls]


def tell(event: Event) -> str:
    """ "send of 16 bytes to 1 (messages.py:129 send)"."""
    whom = {"send": f" to {event.peer}", "recv": f" from {'anyone' if event.peer is None else event.peer}"}.get(
        event.op, ""
    )
    root = f" with root {event.root}" if event.root is not None else ""
    size = f" of {max(event.bytes_in, event.bytes_out)} bytes" if event.dtype else ""
    return f"{event.op}{size}{whom}{root} ({event.issuer})"
