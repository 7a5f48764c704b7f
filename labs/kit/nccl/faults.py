"""Faults of a recorded job that would give wrong numbers on NCCL, without an error.

    mismatched     a send and its recv, or the members of a collective, differ in something that NCCL never compares
    swapped        two ranks issue equal calls of two lines in different orders: each line gets the other's numbers
    overlapping    memory is used again while a call still reads or writes this memory

A fault is a sentence and the events that the sentence is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from labs.kit.nccl.calls import Communicator, NcclCall, describe
from labs.kit.nccl.deadlock_replay import Match
from labs.kit.watch.c10d_tap import OUTSTANDING
from labs.kit.watch.communication import Event, Extent

Fault = tuple[str, tuple[Event, ...]]
OF_EQUALS = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
ALIKE_IN = "all_reduce", "broadcast", "reduce"  # calls in which every rank passes equally many bytes


def mismatched(match: Match) -> Iterator[Fault]:
    events = match.events
    if events[0].op == "send":
        yield from mismatched_message(*events)
        return
    for what, values in {
        "types": [event.dtype for event in events],
        "roots": [event.root for event in events],
        "reductions": [event.reduction for event in events],
    }.items():
        if len(set(values)) > 1:
            yield f"the {what} differ ({', '.join(map(str, values))}) in {everybodys(events)}", events
    if not sizes_fit(events):
        yield f"the sizes do not fit together in {everybodys(events)}", events


def swapped(matches: Iterable[Match]) -> Iterator[Fault]:
    """Yield a fault where two ranks have issued the equal calls of two lines in different orders.

    Only collectives without a root count: in a broadcast, the root may use another line than the other ranks.
    """
    seen: dict[tuple[object, ...], Event] = {}
    for first, *others in (match.events for match in matches if match.events[0].op in OF_EQUALS):
        for other in others:
            if first.issuer != other.issuer:
                alike = first.communicator, first.op, first.bytes_in, first.rank, other.rank
                seen[*alike, first.issuer, other.issuer] = first
                if before := seen.get((*alike, other.issuer, first.issuer)):
                    both = f"{whose(first)} meets {whose(other)}, which met the other way round before"
                    yield f"{both}: each gets the other's numbers", (before, first, other)


def mismatched_message(send: Event, recv: Event) -> Iterator[Fault]:
    both = f"{whose(send)} and {whose(recv)}"
    if (send.bytes_in, send.dtype) != (recv.bytes_out, recv.dtype):
        yield f"the types or sizes differ ({send.dtype}, {recv.dtype}) in {both}", (send, recv)
    if send.tag != recv.tag:
        yield f"NCCL has no tags, and matches {both}, of tags {send.tag} and {recv.tag}", (send, recv)


def sizes_fit(events: Sequence[Event]) -> bool:
    """Return whether the sizes that the members passed to a collective fit; events: one event per recorded member."""
    sent, taken = [event.bytes_in for event in events], [event.bytes_out for event in events]
    everybody = len(events) == len(events[0].ranks)
    match events[0].op:
        case op if op in ALIKE_IN:
            return len(set(sent)) == 1
        case "all_gather":
            return len(set(taken)) == 1 and (not everybody or sum(sent) == taken[0])
        case "reduce_scatter":
            return len(set(sent)) == 1 and (not everybody or sum(taken) == sent[0])
        case "gather":
            return not everybody or sum(sent) == sum(taken)
        case "scatter":
            return not everybody or sum(taken) == sum(sent)
        case "all_to_all":
            return all(a.to.get(b.rank, 0) == b.takes.get(a.rank, 0) for a in events for b in events if a is not b)
    return True


def overlapping(calls: Iterable[NcclCall]) -> Iterator[Fault]:
    """Yield a fault where memory is used while a call of one rank that uses this memory is in flight.

    Calls of one communicator run in order.  The rank's own reads and writes come after a call only if the rank has
    waited for the call, or for a later call of the same communicator.  A recording does not show some waits: waits for
    calls that C++ issues (torch's DDP), waits by a future, and waits for a call that many others in flight follow.

    calls: the calls of one rank, in order.
    """
    calls = [*calls]
    done = ends(calls)
    in_flight: list[NcclCall] = []
    for call in calls:
        in_flight = [other for other in in_flight if done[other] > call.start]
        for other in in_flight:
            if is_ordered(other, call) and done[other] < float("inf"):
                continue
            if clash(other.events, call.events):
                how = "is never waited for" if done[other] == float("inf") else "is waited for later"
                yield f"{other!r} {how}, and {call!r} uses its memory", (*other.events, *call.events)
        for number, event in enumerate(call.events):
            if clash((event,), call.events[number + 1 :]):
                yield f"{call!r} has two messages that use the same memory", call.events
            if event.overwritten:
                yield f"{whose(event)} was still in flight when its tensor was written to", (event,)
            if event.read_at:
                yield f"{whose(event)} was still in flight when its output was read ({event.read_at})", (event,)
        if not call.first.unseen:
            in_flight = [*in_flight, call][-OUTSTANDING:]


def is_ordered(one: NcclCall, other: NcclCall) -> bool:
    return one.communicator(lazy=True) == other.communicator(lazy=True)


def ends(calls: Sequence[NcclCall]) -> dict[NcclCall, float]:
    """Return {call: time at which the rank had waited for this call, or for a later call of its communicator}."""
    done: dict[NcclCall, float] = {}
    latest: dict[Communicator, float] = {}
    for call in reversed(calls):
        key = call.communicator(lazy=True)
        done[call] = latest[key] = min(call.done, latest.get(key, float("inf")))
    return done


def clash(ones: Iterable[Event], others: Sequence[Event]) -> bool:
    return any(
        meet(one.writes, other.reads + other.writes) or meet(one.reads, other.writes)
        for one in ones
        for other in others
    )


def meet(some: Iterable[Extent], others: Sequence[Extent]) -> bool:
    return any(begin < until and start < end for begin, end in some for start, until in others)


def whose(event: Event) -> str:
    return f"rank {event.rank}'s {describe(event)}"


def everybodys(events: Sequence[Event]) -> str:
    shown = "; ".join(map(whose, events[:3]))
    return f"{shown}; ..." if len(events) > 3 else shown
