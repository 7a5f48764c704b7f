"""Training with several strategies in one job, one after the other, on the same batches.

in_turn(ways, build, batches, keep)    trains on a rank; returns each strategy's full parameters after `keep` steps
recorded(ways, build, batches)         runs such a job; returns what rank 0 sends in each strategy's second step
ledgers(ways, build, batches)          runs two; returns losses, and what rank 0 sends in a third step, and holds
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.ranks.run import run
from labs.kit.record import Recording, mark
from labs.kit.training.strategies import Batch, Strategy, train

Build = Callable[[], nn.Module]
THIRD = 3  # the number of the third step, after an empty one


def in_turn(
    ways: Mapping[str, Strategy], build: Build, batches: Sequence[Batch], keep: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Train with each strategy in turn on a rank; return {strategy: full parameters after `keep` steps}.

    ways: the strategies, as {name: row of the table of strategies}.
    build: a function that makes the model.
    batches: whole batches, of which each rank reads its part.
    """
    kept = {}
    for name, way in ways.items():
        parts = way.parts(dist.get_world_size())
        own = [[(x.chunk(parts)[part], y.chunk(parts)[part]) for x, y in batches] for part in range(parts)]
        kept[name] = train(way, build, own, keep=keep)[1]
    return kept


def recorded(
    ways: Mapping[str, Strategy], build: Build, batches: Sequence[Batch], ranks: int = 4
) -> dict[str, dict[str, int]]:
    """Train with each strategy in one job; return what rank 0 sends in each strategy's second step.

    Returns {strategy: {"sent": bytes, "collectives": number, "in the optimizer": number after the optimizer began}}.
    """
    options = {"record": "communication", "tell": "what is sent"}
    recording = run(in_turn, ways, build, batches, ranks=ranks, device="cpu", **options).recording
    began = [span.start for span in recording.spans if (span.rank, span.name) == (0, "optimizer")]
    found = {}
    for number, name in enumerate(ways):
        second = number * len(batches) + 1
        late = sum(event.start > began[second] for event in recording.select(0, second))
        counts = {"sent": recording.sent(0, second), "collectives": recording.counts(0, second).total()}
        found[name] = counts | {"in the optimizer": late}
    return found


@dataclass(frozen=True)
class Ledgers:
    """The losses of a training, and what rank 0 sent and held in it.

    losses: the mean loss of all ranks in each step.
    sent: bytes sent in the third step.
    calls: {op: number} in the third step.
    held: {kind: the most bytes held in a steady step}, with "peak", beyond those held before the model was made.
    """

    losses: list[float]
    sent: int
    calls: Counter[str]
    held: dict[str, int] = field(default_factory=dict)


def ledgers(
    ways: Mapping[str, Strategy],
    build: Build,
    batches: Sequence[Batch],
    ranks: int = 4,
    memory: bool = True,
) -> dict[str, Ledgers]:
    """Train with each strategy in a job that records what is sent, and in another one that records what is held.

    build: a function that makes the model.
    batches: whole batches, one per step and at least three; each rank reads its part.
    memory: whether the second job runs, on the first three batches.
    """
    options, few = {"ranks": ranks, "device": "cpu"}, batches[:THIRD]
    talk = run(each_alone, ways, build, batches, record="communication", tell="sent", **options)
    watched = run(each_alone, ways, build, few, record="memory", tell="held", **options) if memory else None
    found = {}
    for number, name in enumerate(ways):
        first = number * (1 + len(batches))
        losses = [sum(step) / ranks for step in zip(*(of_rank[number] for of_rank in talk), strict=True)]
        sent, calls = talk.recording.sent(0, first + THIRD), talk.recording.counts(0, first + THIRD)
        held = {}
        if watched:
            start = number * (1 + len(few))
            held = beyond(watched.recording, range(start, start + 1 + len(few)))
        found[name] = Ledgers(losses, sent, calls, held)
    return found


def beyond(recording: Recording, steps: range) -> dict[str, int]:
    """Return the most bytes of each kind in a steady step, beyond those that were held in the first, empty step.

    The step that holds least counts, since a thread of the backend sometimes holds a tensor for a moment longer.
    """
    before = recording.moments(0, steps[0])[0][1]
    later = [recording.held(0, step) for step in steps[2:]]
    return {kind: min(held[kind] for held in later) - before.get(kind, sum(before.values())) for kind in later[0]}


def each_alone(ways: Mapping[str, Strategy], build: Build, batches: Sequence[Batch]) -> list[list[float]]:
    """Train with each strategy in turn on a rank, after an empty step; return the losses of each."""
    losses = []
    for way in ways.values():
        gc.collect()
        mark("step")  # memory that is held here belongs to earlier strategies
        parts = way.parts(dist.get_world_size())
        own = [[(x.chunk(parts)[part], y.chunk(parts)[part]) for x, y in batches] for part in range(parts)]
        losses.append(train(way, build, own)[0])
    return losses
