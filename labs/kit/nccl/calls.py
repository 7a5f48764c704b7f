"""The calls that each rank of a recorded job would make to NCCL, in order of issue, and the waits between them.

    programs(recording.events)[rank]        [NcclCall, NcclCall, Wait, ...]

An `NcclCall` is one unit of work for NCCL: a collective, a send or recv, or all messages of a batch_isend_irecv, which
is one group call (ncclGroupStart ... ncclGroupEnd).  A `Wait` stands where the rank has waited for a call, so the rank
has issued all later calls after the awaited call was done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from labs.kit.watch.communication import Event

MESSAGES = "send", "recv"
Communicator = tuple[str | int, ...]  # the group's name, its members, and the two ranks of a pair's own one


@dataclass(frozen=True, eq=False)
class NcclCall:
    """One unit of work for NCCL; events: a single collective, send or recv, or the messages of a batch_isend_irecv."""

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
        """Return the time at which the rank had waited for the call; infinity if the rank never waited.

        A wait for one message of a batch counts for the whole batch, since NCCL has one Work for a batch.
        """
        return min(event.waits[0][1] if event.waits else float("inf") for event in self.events)

    def communicator(self, lazy: bool) -> Communicator:
        """Return the call's communicator.

        lazy: whether PyTorch makes communicators at their first use; then each pair of ranks has a communicator for
            sends and recvs outside of a batch.
        """
        event = self.first
        pair = sorted((event.rank, event.peer)) if lazy and self.is_message and not self.is_batch else ()
        return event.communicator, *event.ranks, "of", *pair

    def members(self, lazy: bool) -> tuple[int, ...]:
        """Return the ranks that share the call's communicator."""
        single = lazy and self.is_message and not self.is_batch
        return tuple(sorted((self.first.rank, self.first.peer))) if single else self.first.ranks

    def __repr__(self) -> str:
        more = f" and {len(self.events) - 1} more in a batch" if len(self.events) > 1 else ""
        return f"rank {self.rank}: {describe(self.first)}{more}"


@dataclass(frozen=True, eq=False)
class Wait:
    """A place in a rank's program where the rank waits until a call is done."""

    call: NcclCall


Program = list[NcclCall | Wait]


def programs(events: Iterable[Event]) -> dict[int, Program]:
    """Return {rank: the rank's calls and waits in order} of a recorded job."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    return {rank: program(own) for rank, own in by_rank.items()}


def program(events: list[Event]) -> Program:
    """Return the calls and waits of one rank, whose recorded events are given in order."""
    calls = calls_of(events)
    issued = [(call.start, 1, call) for call in calls]
    waited = [(call.done, 0, Wait(call)) for call in calls if call.done < float("inf")]
    return [step for *_, step in sorted(issued + waited, key=itemgetter(0, 1))]


def calls_of(events: list[Event]) -> list[NcclCall]:
    calls: list[list[Event]] = []
    batches: dict[int, list[Event]] = {}
    for event in events:
        if event.batch is None:
            calls.append([event])
        elif event.batch in batches:
            batches[event.batch].append(event)
        else:
            calls.append(batches.setdefault(event.batch, [event]))
    return [NcclCall(own[0].rank, tuple(own)) for own in calls]


def describe(event: Event) -> str:
    """Return a recorded event in words: "send of 16 bytes to 1 (messages.py:129 send)"."""
    whom = {"send": f" to {event.peer}", "recv": f" from {'anyone' if event.peer is None else event.peer}"}.get(
        event.op, ""
    )
    root = f" with root {event.root}" if event.root is not None else ""
    size = f" of {max(event.bytes_in, event.bytes_out)} bytes" if event.dtype else ""
    return f"{event.op}{size}{whom}{root} ({event.issuer})"
