"""The training steps of one strategy (a row of the table of strategies) on this rank, for a dry run or a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from labs import agree
from labs.kit.record import mark
from labs.kit.rows.row import Strategy
from labs.kit.simulated.without_other_ranks import our_neighbours, torchs_neighbours
from labs.kit.training.training_step import take_step
from labs.memory.recompute import recompute as compute_again
from labs.memory.selective import ATTENTION, MATMULS
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.moe import MoEConfig, MoEGPT


def rehearse(
    row: Strategy,
    config: Config,
    batch: int,
    steps: int = 2,
    micro_batches: int = 1,
    axes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
) -> Iterator[None]:
    """Train a GPT by a strategy of the table for some steps, and yield after each step.

    batch: the number of sequences in each rank's part of the batch.
    axes: `{axis: size}` of the mesh; by default the strategy's own axes for this number of ranks.
    dtype: the model's dtype.
    recompute: the part of a layer that is recomputed, a name in cost.RECOMPUTE.
    """
    axes = axes or row.axes(dist.get_world_size())
    training = row.apply(model_of(config, dtype, recompute), Mesh(tuple(axes.values()), tuple(axes)))
    around = nullcontext()
    if "pp" in axes and agree.alone:
        sizes = batch // micro_batches // axes["pp"], config.context, config.dim
        around = NEIGHBOURS[row.side](torch.empty(sizes, dtype=dtype, device="meta"))
    with around:
        for _ in range(steps):
            mark("step")
            x, y = (tokens(batch, config.context, reads) for reads in training.reads)
            take_step(training, x, y, micro_batches)
            del x, y
            yield
    mark("end")


def model_of(config: Config, dtype: torch.dtype, recompute: str, seed: int = 0) -> GPT:
    model = (MoEGPT if isinstance(config, MoEConfig) else GPT)(config, seed)
    if dtype != torch.float32:  # converting allocates new memory
        model.to(dtype)
    if recompute != "none":
        compute_again(model.layers.values(), KEEP[recompute])
    return model


KEEP = {"selective": MATMULS | ATTENTION, "all but attention": ATTENTION, "full": ()}
NEIGHBOURS = {"ours": our_neighbours, "native": torchs_neighbours}


def tokens(batch: int, context: int, reads: bool) -> Tensor | None:
    """Return zeros as tokens, [batch, context].

    A rank that reads no tokens gets None, since other ranks tell it the size of the batch.  In a dry run, which has no
    other ranks, such a rank gets a meta tensor of the batch's size.
    """
    if not reads and not agree.alone:
        return None
    return torch.zeros(batch, context, dtype=torch.long, device=None if reads else "meta")
