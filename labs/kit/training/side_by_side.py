"""Training with several strategies in one job, one after the other, on the same batches.

in_turn(ways, build, batches, keep)    trains on a rank; returns each strategy's full parameters after `keep` steps
recorded(ways, build, batches)         runs such a job; returns what rank 0 sends in each strategy's second step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.ranks.run import run
from labs.kit.training.strategies import Batch, Strategy, train

Build = Callable[[], nn.Module]


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
