"""The table of all strategies, ours and PyTorch's, and the training loop that they share.

The tour, the contract test and the benchmarks read only STRATEGIES: a strategy with one row is in all three.
WITH_AN_EXTRA has the strategies of other libraries that need an extra; the tour and the contract test also read these.
The class of a row is in rows/row.py, and the rows are in the other files of rows/.  training_step.py has the class of a
model under a strategy, which the loop uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.record import mark
from labs.kit.rows.cp_rows import CP
from labs.kit.rows.ddp_rows import DDP, ONE_DEVICE, average_with
from labs.kit.rows.deepspeed_rows import DEEPSPEED, by_file
from labs.kit.rows.ep_rows import EP
from labs.kit.rows.fsdp_rows import FSDP
from labs.kit.rows.gspmd_rows import GSPMD, Compiled
from labs.kit.rows.parallel_rows import PARALLEL
from labs.kit.rows.pp_rows import PP
from labs.kit.rows.row import Strategy
from labs.kit.rows.tp_rows import TP, by_plan
from labs.kit.training.training_step import ADAMW, Batch, Training, backward, replicated, share_of, step, trainable
from labs.mesh import Mesh

__all__ = [
    "ADAMW", "COMPILED", "EXPERTS", "ONE_DEVICE", "ROWS", "STRATEGIES", "WITH_AN_EXTRA", "Batch", "Compiled",
    "Strategy", "Training", "average_with", "backward", "by_file", "by_plan", "replicated", "set_up", "step", "train",
    "trainable",
]  # fmt: skip

STRATEGIES = (*DDP, *FSDP, *TP, *CP, *PP, *PARALLEL)
WITH_AN_EXTRA = (*DEEPSPEED,)  # strategies that need an extra; without it they fit no number of ranks, and name it
COMPILED = (*GSPMD,)  # strategies of XLA, which need an extra, too, and run in one process; only the tour reads them
EXPERTS = (*EP,)  # strategies of a MoEGPT, which the dense GPT's tests cannot train; tests/moe has theirs
ROWS = {row.name: row for row in (ONE_DEVICE, *STRATEGIES, *EXPERTS)}  # the rows of dry runs and of the trainer


def train(
    strategy: Strategy,
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    micro_batches: int = 1,
    keep: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model with a strategy, one step per batch; every rank of a job runs this function.

    build: a function that makes the model, the same on every rank; the model maps a batch to its mean loss.
    batches: inputs and targets, batches[part][step].
    micro_batches: the number of micro-batches into which each batch is cut, whose gradients are added up; in a
        pipeline, their number per rank.
    keep: the number of steps after which the full parameters are copied.
    Returns this rank's loss in each step, or no losses on a rank without the last layer, and {name: full parameter on
    the CPU} after `keep` steps.
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
    """Yield x, then y, as a copy on this rank's device, or as None if the rank does not read it.

    A copy belongs to one step, and is freed after the step, as the batch of a data loader is.
    """
    for x, reads in zip(batch, training.reads, strict=True):
        yield x.to(torch.get_default_device(), copy=True) if reads else None


def set_up(strategy: Strategy, model: nn.Module) -> tuple[Training, int]:
    """Apply a strategy to a model on this rank; all ranks of the job call this function.

    Returns the Training of this rank, and the number of the part of each batch that the rank reads.
    """
    axes = strategy.axes(dist.get_world_size())
    mesh = Mesh(tuple(axes.values()), tuple(axes))
    return strategy.apply(model, mesh), strategy.part(mesh)
