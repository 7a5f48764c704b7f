"""What travelled, from the recording: waited for, built by hand, and no more of it than needs be.

A round is what can happen at one moment when a rank sends one message and receives one message at a time.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from labs.kit.checks.answer import Wrong
from labs.kit.checks.kinds import Case, Kind, Outcome
from labs.kit.record import Event


def not_by_luck(case: Case, outcomes: list[Outcome], events: list[Event]) -> None:
    """If it is right, then only because a message was quick."""
    for event in events:
        if event.op in ("send", "recv") and not event.waited:
            verb = "sent to" if event.op == "send" else "received from"
            raise Wrong(
                f"{case}: nobody waited for what rank {event.rank} {verb} rank {event.peer} (at {event.issuer})",
                "When may you touch the tensor of an isend or irecv again?",
                f"a {'receive' if event.op == 'recv' else 'send'} that nobody waited for",
            )
    for index, outcome in enumerate(outcomes):
        if outcome.touched:
            raise Wrong(
                f"{case}: rank {case.members[index]} changed a tensor while it was being sent",
                "When may you touch the tensor of an isend again?",
                "changed while being sent",
            )


def by_hand(kind: Kind, events: list[Event]) -> None:
    used = sorted({event.op for event in events} - {"send", "recv"})
    if used:
        raise Wrong(
            f"the values are right, but they came by dist's own {' and '.join(used)}",
            "Which ranks send what to whom inside of it? Build that from isend and irecv.",
            "a built-in collective",
        )


def within_budget(kind: Kind, case: Case, events: list[Event]) -> None:
    """Bytes of all ranks and of the busiest, messages, rounds: against the least possible."""
    n = len(case.members)
    itemsize = torch.empty(0, dtype=case.dtype).element_size()
    tensor = case.size * itemsize
    as_dtype = {event.dtype for event in events if event.op == "send" and event.bytes_in}
    if as_dtype - {str(case.dtype).removeprefix("torch.")}:
        raise Wrong(
            f"{case}: the numbers travel as {' and '.join(sorted(as_dtype))}",
            "What does that cost, in bytes or in digits?",
            "another dtype travels",
        )
    sent: dict[int, int] = dict.fromkeys(case.members, 0)
    messages: dict[int, int] = dict.fromkeys(case.members, 0)
    for event in events:
        if event.op == "send" and event.bytes_in:
            sent[event.rank] += event.bytes_in
            messages[event.rank] += 1
    busiest = max(sent, key=sent.__getitem__)
    share = kind.copies(n) / n
    if sum(sent.values()) > kind.copies(n) * tensor or (
        not kind.rooted and sent[busiest] > share * tensor + 2 * itemsize
    ):
        whole = any(e.op == "send" and e.bytes_in == tensor and case.size > 1 for e in events) and not kind.rooted
        copies = f"{sent[busiest] / tensor:.2f} × the tensor; the least possible is {share:.2f} ×" if tensor else ""
        raise Wrong(
            f"{case}: rank {busiest} sent {copies}",
            kind.question,
            "whole tensors travel" if whole else "too many bytes",
        )
    if kind.rooted and (rounds := count_rounds(events)) > kind.rounds(n):
        flat = messages[case.root] == n - 1
        raise Wrong(
            f"{case}: {rounds} rounds, one message after the other; the least possible is {kind.rounds(n)}",
            kind.question,
            "the root sends to all" if flat else "too many rounds",
        )
    chatty = max(messages, key=messages.__getitem__)
    if messages[chatty] > kind.messages(n):
        raise Wrong(
            f"{case}: rank {chatty} sent {messages[chatty]} messages; {kind.messages(n)} are enough",
            "Could what goes to the same rank in the same round go as one message?",
            "too many messages",
        )
    if (rounds := count_rounds(events)) > kind.rounds(n):
        raise Wrong(
            f"{case}: it took {rounds} rounds, as ranks wait for each other in turn",
            "Could every rank send and receive at the same moment?",
            "too many rounds",
        )


def count_rounds(events: list[Event]) -> int:
    """The longest chain: a send comes after what its rank has received or sent before it."""
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
