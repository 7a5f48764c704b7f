"""A verdict on a job that ran on gloo: would it hang on NCCL, which is less forgiving?

    results = run(train, ranks=4, record="order")
    would_hang(results.recording)                   # one of four verdicts, with the ranks, calls and lines

    hangs for certain    some ranks wait for each other, or for a rank that never comes, even under lenient rules
    may hang             ranks wait for each other under a rule that depends on sizes, versions or settings
    silently wrong       all calls end, but some rank receives wrong numbers
    sound                the job neither hangs nor receives wrong numbers

The rules (NCCL's user guide, docs/userguide/source/usage; PyTorch's documentation of torch.distributed):

    1  A communicator runs its calls in the order of issue.  (p2p.rst)
    2  A send needs a receive of the same count and type.  The send waits for the receive unless its message fits into
       NCCL's buffers: up to 32 or 64 MiB in published reports, by hardware and version.  (p2p.rst; pytorch#129341)
    3  A batch_isend_irecv is one group call: its messages run at the same time, messages with one peer run in their
       order, and the batch ends as a whole; an unmatched message may block matched messages.  (groups.rst;
       NVIDIA/nccl#2130)  NCCL splits a batch of more than 256 messages, and not in the same way on all ranks.
       (pytorch#174288)
    4  The calls of all communicators of a device need one order, the same on all ranks.  (communicators.rst;
       NCCL_LAUNCH_ORDER_IMPLICIT, which is off, and new_group in PyTorch's documentation)
    5  With a device_id, PyTorch makes a group's communicator at once, and all calls use this communicator.  Without a
       device_id, PyTorch makes the communicator at the first call, where all members meet, and makes another one for
       each pair of ranks, for sends and recvs outside of a batch.  (pytorch#129140, #73960, #108378)
    6  NCCL compares no counts, types, roots or reductions between ranks, and has no tags.  (NVIDIA/nccl#1394,
       pytorch#94819)
    7  A call that the rank has not waited for may still read and write its memory.  (pytorch#188655)

The calls are replayed under each rule (deadlock_replay.py), and calls that match are compared (faults.py).  A job that
hangs only if a send waits for its receive "may hang", whatever the size of the message.

A recording with record="order", or of a dry run, shows to the byte which memory was read or written before a wait.  A
recording with record="communication" only shows whether a whole tensor was written to.

The verdict does not see:
- equal calls of one line in another order, each of which gets the other's numbers;
- the order of calls in another run, or the order that two threads take next time;
- code that runs only on a GPU, CUDA's streams, device synchronisation, or two ranks on one device;
- timeouts;
- a wait inside C++ or by a future;
- memory that another thread reads or writes;
- any other cause of an unequal number of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from labs.kit.nccl.calls import NcclCall, Program, describe, programs
from labs.kit.nccl.deadlock_replay import Replay, Rules, Standstill
from labs.kit.nccl.faults import mismatched, overlapping, swapped
from labs.kit.record import Recording
from labs.kit.watch.communication import Event

HANGS, MAY_HANG, WRONG, SOUND = VERDICTS = "hangs for certain", "may hang", "silently wrong", "sound"
MOST_MESSAGES = 256  # messages of a batch that NCCL does not split
WHY = {
    Rules.KIND: "",
    Rules.SENDS_WAIT: "where a send waits for its receive, as it does unless it fits into NCCL's buffers",
    Rules.ONE_QUEUE: "where the calls of all communicators are in one order, as NCCL asks for",
    Rules.TOGETHER: "where batches that exchange messages end together, as NCCL may have it",
}
EARLY = "where a group has one communicator for all of its calls (init_process_group with device_id)"
LAZY = "where communicators are made at first use (init_process_group without device_id)"


@dataclass(frozen=True)
class Finding:
    """One problem that a job would have on NCCL; standstill: the ranks that wait for each other, if the job hangs."""

    verdict: str
    why: str
    events: tuple[Event, ...] = field(repr=False)
    standstill: Standstill | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}"


@dataclass(frozen=True, repr=False)
class Verdict:
    """The findings on a job; `name` is the gravest of their verdicts.

    In a notebook, a verdict on a job that hangs is shown as a drawing of the ranks that wait for each other.
    """

    findings: tuple[Finding, ...]
    calls: int
    ranks: int

    @property
    def name(self) -> str:
        return min((finding.verdict for finding in self.findings), key=VERDICTS.index, default=SOUND)

    @property
    def standstill(self) -> Standstill | None:
        return next((finding.standstill for finding in self.findings if finding.standstill), None)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.findings)) or f"sound: {self.calls} calls of {self.ranks} ranks"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from labs.kit.drawing.deadlock_circle import circle  # imported here, since ranks draw no pictures

        if self.standstill is None:
            return {"text/plain": repr(self)}
        return circle(self.standstill, repr(self))._repr_mimebundle_(include, exclude)


def would_hang(recording: Recording, ranks: Collection[int] | None = None) -> Verdict:
    """Return a verdict on how the recorded job would run on NCCL.

    recording: a recording with record="order" or record="communication", or a recording of a dry run
    ranks: the ranks to judge; all other ranks are assumed to make every call that these ranks wait for

    Raises ValueError for another kind of recording, for ranks that are not in the recording, and for a recv from any
    source, which NCCL does not have.
    """
    recording.require("communication")
    ranks = recording.seen if ranks is None else ranks
    if unknown := sorted({*ranks} - {*recording.seen}):
        raise ValueError(f"ranks={[*ranks]}: {unknown} are not in the recording, which has {[*recording.seen]}")
    require_senders(recording.events)
    asked = programs(recording.events)
    calls = {rank: [step for step in steps if isinstance(step, NcclCall)] for rank, steps in asked.items()}
    findings = [
        *mixed_up(recording.events),
        *out_of_order(asked, ranks),
        *(long_batch(call) for own in calls.values() for call in own if len(call.events) > MOST_MESSAGES),
        *wrong(asked, calls, ranks),
    ]
    findings.sort(key=lambda finding: VERDICTS.index(finding.verdict))
    return Verdict(tuple(findings), sum(map(len, calls.values())), len(ranks))


def require_senders(events: Collection[Event]) -> None:
    for event in events:
        if event.op == "recv" and event.peer is None:
            raise ValueError(f"rank {event.rank} has a {describe(event)}: NCCL cannot do that, so name the sender")


def mixed_up(events: Collection[Event]) -> Iterator[Finding]:
    """Yield a finding for process groups with one name and different members: each rank made only its own group."""
    members: dict[str, dict[tuple[int, ...], Event]] = defaultdict(dict)
    for event in events:
        members[event.communicator].setdefault(event.ranks, event)
    for name, groups in members.items():
        if len(groups) > 1:
            whose = " and ".join(f"{list(ranks)} ({event.issuer})" for ranks, event in groups.items())
            why = f"the group {name!r} has members {whose}: every rank must make all groups, in one order"
            yield Finding(HANGS, why, tuple(groups.values()))


def out_of_order(asked: Mapping[int, Program], ranks: Collection[int]) -> Iterator[Finding]:
    """Yield a finding for the most lenient rules under which ranks wait for each other, if there are such rules."""
    if not any(Replay(asked, ranks, Rules.TOGETHER, lazy).stopped for lazy in (False, True)):
        return
    for rules in Rules:
        early, lazy = (Replay(asked, ranks, rules, lazy).stopped for lazy in (False, True))
        if stopped := early or lazy:
            when = [WHY[rules], "" if early and lazy else EARLY if early else LAZY]
            certain = rules == Rules.KIND and early and lazy
            why = "\n    ".join(filter(None, [*when, *stopped.lines]))
            yield Finding(HANGS if certain else MAY_HANG, why, tuple(s.event for s in stopped.stops), stopped)
            return


def long_batch(call: NcclCall) -> Finding:
    more = f"rank {call.rank} has a batch of {len(call.events)} messages ({call.first.issuer})"
    return Finding(MAY_HANG, f"{more}: NCCL cuts one of over {MOST_MESSAGES}, and not alike on all ranks", call.events)


def wrong(
    asked: Mapping[int, Program], calls: Mapping[int, list[NcclCall]], ranks: Collection[int]
) -> Iterator[Finding]:
    """Yield a finding for each fault that gives wrong numbers, but only one finding for the same ranks and lines."""
    matches = [Replay(asked, ranks, Rules.KIND, lazy).matches for lazy in (False, True)]
    faults = [fault for both in matches for match in both for fault in mismatched(match)]
    faults += swapped(matches[0])
    faults += [fault for own in calls.values() for fault in overlapping(own)]
    seen = set()
    for why, events in faults:
        lines = frozenset((event.rank, event.issuer) for event in events)
        if lines not in seen:
            seen.add(lines)
            yield Finding(WRONG, why, events)
