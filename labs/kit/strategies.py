"""Every strategy of the course, ours and PyTorch's own, in one table; and the one training loop they share.

The tour, the contract test and the benchmarks read STRATEGIES and nothing else: a strategy joins all three as one row.
What others ship, and needs an extra, is in WITH_AN_EXTRA, for the first two.
What a row says is in rows/row.py, the rows are in the other files there, and what a loop needs of a model under a
strategy is in training.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.record import mark
from labs.kit.rows.ddp_rows import DDP, ONE_DEVICE, average_with
from labs.kit.rows.deepspeed_rows import DEEPSPEED
from labs.kit.rows.fsdp_rows import FSDP
from labs.kit.rows.gspmd_rows import GSPMD, Compiled
from labs.kit.rows.parallel_rows import PARALLEL
from labs.kit.rows.pp_rows import PP
from labs.kit.rows.row import Strategy
from labs.kit.rows.tp_rows import TP, by_plan
from labs.kit.training import ADAMW, Batch, Training, backward, replicated, share_of, step, trainable
from labs.mesh import Mesh

__all__ = [
    "ADAMW", "COMPILED", "ONE_DEVICE", "ROWS", "STRATEGIES", "WITH_AN_EXTRA", "Batch", "Compiled", "Strategy",
    "Training", "average_with", "backward", "by_plan", "replicated", "set_up", "step", "train", "trainable",
]  # fmt: skip

STRATEGIES = (*DDP, *FSDP, *TP, *PP, *PARALLEL)
WITH_AN_EXTRA = (*DEEPSPEED,)  # where that is not installed they fit no number of ranks, and say which one adds it
COMPILED = (*GSPMD,)  # likewise; no job of ranks, and for the tour alone
ROWS = {row.name: row for row in (ONE_DEVICE, *STRATEGIES)}  # those that a dry run takes, too


def train(
    strategy: Strategy,
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    micro_batches: int = 1,
    keep: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Take a step for each batch that this rank reads; runs on every rank of a job.

    build: makes the model, the same on every rank; it maps a batch to its mean loss.  batches[part][step]: inputs and
    targets.  micro_batches: into how many each batch is cut, their gradients added up; in a pipeline, into as many for
    each rank.  Returns this rank's loss in each step (none where it does not have the model's end), and by name the
    full parameters (on the CPU) as they were after `keep` steps.
    """
    training, part = set_up(strategy, build())
    losses, kept = [], {}
    for number, batch in enumerate(batches[part]):
        over = share_of([of_part[number][1] for of_part in batches])
        mark("step")
        loss = step(training, *own_batch(training, batch), micro_batches, over)
        losses += [] if loss is None else [loss]
        if number + 1 == keep:
            mark("end")
            kept = {name: p.detach().to("cpu", copy=True) for name, p in training.full().items()}
    mark("end")
    return losses, kept


def own_batch(training: Training, batch: Batch) -> Iterator[Tensor | None]:
    """What this rank reads of it: a copy of its own, as a loader would make it, which dies with its step."""
    for x, reads in zip(batch, training.reads, strict=True):
        yield x.to(torch.get_default_device(), copy=True) if reads else None


def set_up(strategy: Strategy, model: nn.Module) -> tuple[Training, int]:
    """The training of a model by all ranks of this job, and the number of the part of the batch that this one reads."""
    axes = strategy.axes(dist.get_world_size())
    mesh = Mesh(tuple(axes.values()), tuple(axes))
    return strategy.apply(model, mesh), strategy.part(mesh)
