"""The challenge of notebook 02: the sum over all ranks on a slow network, for small, medium and large tensors.

A message of m bytes takes latency + m / bandwidth; a rank sends one message at a time, and receives one at a time.  By
this rule the messages of a real job are timed (`seconds`): a message leaves when its rank has no other one in flight
and has received everything that it waited for before.

The bound: with each message, a rank's data reaches at most twice as many ranks, so the last rank has it after
ceil(log2 N) latencies; and some rank has to send 2 (N - 1)/N of its tensor.  No way takes less than either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from math import ceil, log2
from typing import Any

import torch
import torch.distributed as dist

from labs.exercises.engine.answer import Wrong, instead
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import Event, mark

LATENCY, BANDWIDTH = 1e-3, 8e6  # s, bytes/s: in one latency, 1,000 elements of float64 are sent
RANKS = 8, 6
SIZES = 100, 2_000, 8_000, 40_000  # elements
WAITED = "When is its tensor yours again? (The judge sees waits for dist.isend and irecv, and not of torch.ops.)"
NOT_SCORED = 97, 2_011  # the range of a random size, which in most cases no number of ranks divides


def on_a_rank(fn: Function, sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (the rank's tensor before the call, the same after it) for each size."""
    generator, pairs = chance(), []
    for size in sizes:
        given = torch.randn(size, generator=generator, dtype=torch.float64)
        x = given.clone()
        dist.barrier()
        mark("step")
        fn(x, LATENCY, BANDWIDTH)
        mark("end")
        pairs.append((given, x))
    return pairs


def judge(fn: Function) -> Judged:
    """Return the score of a sum, the mean over all sizes; raise Wrong if it scores nothing."""
    scores, details = [], []
    for ranks in RANKS:
        odd = int(torch.randint(*NOT_SCORED, (), generator=chance()))
        results = job(on_a_rank, fn, (*SIZES, odd), ranks=ranks, record="order")
        require_sums(results, ranks)
        require_messages(results)
        for step, size in enumerate(SIZES):
            took = seconds([event for event in results.recording.events if event.step == step])
            scores.append(100 * bound(8 * size, ranks) / took)
        details.append(f"{ranks} ranks: " + ", ".join(f"{score:.0f}" for score in scores[-len(SIZES) :]))
    sizes = ", ".join(f"{size:,}" for size in SIZES)
    return Judged(sum(scores) / len(scores), f"for {sizes} elements on {'; on '.join(details)}")


def measured(fn: Function, size: int, ranks: int) -> float:
    """Return the seconds of a sum of `size` elements, computed from the messages of a real job as the judge does."""
    results = job(on_a_rank, fn, (size,), ranks=ranks, record="order")
    require_sums(results, ranks)
    require_messages(results)
    return seconds([event for event in results.recording.events if event.step == 0])


def bound(nbytes: float, ranks: int) -> float:
    """Return the least seconds that a sum over all ranks can take."""
    return max(ceil(log2(ranks)) * LATENCY, 2 * (ranks - 1) / ranks * nbytes / BANDWIDTH)


def require_sums(results: Sequence[Any], ranks: int) -> None:
    for case in zip(*results, strict=True):
        expected = torch.stack([given for given, _ in case]).sum(0)
        for rank, (_, x) in enumerate(case):
            wrong = ~is_near(x, expected)
            if bool(wrong.any()):
                place = int(wrong.nonzero()[0])
                almost = bool(torch.isclose(x[place], expected[place], rtol=1e-5))
                raise Wrong(
                    f"{len(expected)} elements on {ranks} ranks: on rank {rank} element {place} is "
                    f"{instead(x[place], expected[place])}",
                    "Is all sent and added in float64?" if almost else "Which ranks' numbers are in it, and how often?",
                )


def is_near(x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (x - expected).abs() <= 1e-12 * RANKS[0] * (1 + expected.abs())


def require_messages(results: Any) -> None:
    events = [event for event in results.recording.events if event.step is not None]
    if others := {event.op for event in events} - {"send", "recv"}:
        raise Wrong(f"it calls {min(others)}: only messages have a time here", "Which messages does it send inside?")
    for event in events:
        if event.peer is None:
            raise Wrong("a recv accepts a message from any rank: name the sender", "Whose turn is it?")
        if event.read_at or event.overwritten or (event.op == "recv" and not event.waits):
            raise Wrong(f"{event.issuer}: nobody waited for this {event.op}", WAITED)


def seconds(events: Sequence[Event]) -> float:
    """Return the time at which the last message of one call has arrived."""
    receives: dict[Any, list[Event]] = defaultdict(list)  # {(sender, receiver, tag): receives, as they were posted}
    for event in sorted(events, key=lambda event: event.start):
        if event.op == "recv":
            receives[event.peer, event.rank, event.tag].append(event)
    # A rank's program is the list of its sends and of the receives that it waited for, in its own order.
    happens = [(event.start if event.op == "send" else event.waits[-1][1], event) for event in events]
    programs: dict[int, list[Event]] = defaultdict(list)
    for _, event in sorted(happens, key=lambda item: item[0], reverse=True):
        programs[event.rank].append(event)
    # Seconds, for each rank: until it has all that it waited for, until its last send and its last receive have ended.
    knows, out, into = defaultdict(float), defaultdict(float), defaultdict(float)
    left: dict[int, tuple[float, float]] = {}  # {id of a receive: (the time its message left, the seconds it takes)}
    while any(programs.values()):
        for rank, program in programs.items():
            while program and (program[-1].op == "send" or id(program[-1]) in left):
                event = program.pop()
                if event.op == "send":
                    takes, leaves = LATENCY + event.bytes_in / BANDWIDTH, max(knows[rank], out[rank])
                    left[id(receives[rank, event.peer, event.tag].pop(0))] = leaves, takes
                    out[rank] = leaves + takes
                else:
                    leaves, takes = left[id(event)]
                    knows[rank] = into[rank] = max(leaves, into[rank]) + takes
    return max(into.values(), default=0.0)


slow_wire = Challenge(
    "slow_wire",
    "02",
    "The quickest sum on a slow wire",
    "Add up a tensor over 8 and over 6 ranks, where a message of m bytes takes latency + m / bandwidth, and a rank "
    "sends one and receives one at a time. Small tensors, large ones, and those in between count the same.",
    judge,
    floor=46.6,
    course=63.1,
    possible=75.2,
    cases=tuple(product(SIZES, RANKS)),
    bound=bound,
    measured=measured,
)
