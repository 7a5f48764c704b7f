"""Steps of a row of the table of strategies, on whatever rank this is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist

from labs.kit.dry.alone import neighbours
from labs.kit.record import mark
from labs.kit.rows.row import Strategy
from labs.kit.strategies import set_up
from labs.kit.training import take_step
from labs.model import GPT, Config


def rehearse(row: Strategy, config: Config, batch: int, steps: int = 2, micro_batches: int = 1) -> Iterator[None]:
    """Train a GPT on `batch` sequences for each part of the batch, and yield after each step."""
    training, _ = set_up(row, GPT(config))
    axes = row.axes(dist.get_world_size())
    around = nullcontext()
    if "pp" in axes:
        around = neighbours(torch.empty(batch // micro_batches // axes["pp"], config.context, config.dim))
    with around:
        for _ in range(steps):
            mark("step")
            # Where a pipeline's rank reads nothing, it is told how much there is: that is all that a meta tensor tells.
            x, y = (
                torch.zeros(batch, config.context, dtype=torch.long, device=None if reads else "meta")
                for reads in training.reads
            )
            take_step(training, x, y, micro_batches)
            del x, y
            yield
    mark("end")
