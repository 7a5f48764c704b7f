"""Strategies side by side: in one job each trains in turn, on the same batches.

in_turn(ways, build, batches, keep)    on every rank; by strategy: the full parameters after `keep` steps
recorded(ways, build, batches)         the job; by strategy: what rank 0 does in its second step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.launch import run
from labs.kit.strategies import Batch, Strategy, train

Build = Callable[[], nn.Module]


def in_turn(
    ways: Mapping[str, Strategy], build: Build, batches: Sequence[Batch], keep: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Each rank reads its part of each batch."""
    kept = {}
    for name, way in ways.items():
        parts = way.parts(dist.get_world_size())
        own = [[(x.chunk(parts)[part], y.chunk(parts)[part]) for x, y in batches] for part in range(parts)]
        kept[name] = train(way, build, own, keep=keep)[1]
    return kept


def recorded(
    ways: Mapping[str, Strategy], build: Build, batches: Sequence[Batch], ranks: int = 4
) -> dict[str, dict[str, int]]:
    """Bytes sent, collectives, and how many of these are made while the optimizer steps."""
    told = {"record": "communication", "tell": "what is sent"}
    seen = run(in_turn, ways, build, batches, ranks=ranks, device="cpu", **told).recording
    began = [span.start for span in seen.spans if (span.rank, span.name) == (0, "optimizer")]
    found = {}
    for number, name in enumerate(ways):
        second = number * len(batches) + 1
        late = sum(event.start > began[second] for event in seen.select(0, second))
        counts = {"sent": seen.sent(0, second), "collectives": seen.counts(0, second).total()}
        found[name] = counts | {"in the optimizer": late}
    return found
