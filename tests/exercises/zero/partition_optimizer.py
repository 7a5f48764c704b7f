"""Answers to partition_optimizer (04): stage 1, one vector."""

import torch  # noqa: F401  (exchanged words name it)
import torch.distributed as dist
from torch import nn

from labs.group import all_gather, reduce_scatter, reduce_scatter_single  # noqa: F401  (exchanged words name it)
from tests.answers import Exercise

# fmt: off
answers = Exercise("partition_optimizer")
SENT = ", and sent 1.50 × the vector per step; the least possible is 0.25 × and 1.50 ×"
STATE = "you hold 0.25 × the optimizer's state per rank" + SENT
COPIED = "you hold 0.38 × the optimizer's state per rank (a copy of the shard included)" + SENT


def place():
    return dist.get_rank(), dist.get_world_size()


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=STATE)
def partition(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


SHARD, MADE = "full.data.chunk(ranks)[rank]", "optimizer = make([shard])"
MEAN = "reduce_scatter(full.grad, None) / ranks"
GRADIENT, STEP, GATHER = f"shard.grad = {MEAN}", "optimizer.step()", "all_gather(full.data, shard.data)"
NEXT = f"{SHARD[:-5]}(rank + 1) % ranks]"
COPY = {SHARD: f"{SHARD}.clone()"}
MIXED = "dist.all_reduce(full.grad)\nfull.grad /= ranks"  # all of it


def deep(changes):
    """More than one line where in the text there was one, each as far to the right as that."""
    within = dict.fromkeys((GRADIENT, STEP, GATHER), "\n        ")
    return {old: new.replace("\n", within.get(old, "\n    ")) for old, new in changes.items()}


def vary(changes, **options):
    answers.vary(partition, deep(changes), **options)


def spoil(mistake, changes, **options):
    answers.spoil(partition, mistake, deep(changes), **options)


# The shard is memory of its own, as where it is of another dtype.
SINGLE = "shard.grad = torch.empty_like(shard)\nreduce_scatter_single(shard.grad, full.grad)\nshard.grad /= ranks"
vary(
    COPY
    | {GRADIENT: f"{SINGLE}\nfull.grad = None", GATHER: "dist.all_gather(list(full.data.chunk(ranks)), shard.data)"},
    line=COPIED,
)
# ---- wrong: which gradient, or which piece ---------------------------------------------------------------

ROLLED = "reduce_scatter(full.grad.view(ranks, -1).roll({}, 0).reshape(-1), None) / ranks"
spoil("the pieces are rotated", {SHARD: f"{NEXT}.clone()", MEAN: ROLLED.format(-1)})
spoil("the gradient of another piece", {MEAN: ROLLED.format(1)})
AGAIN = f"{MEAN} if shard.grad is None else shard.grad + {MEAN}"
spoil("the gradient of the step before is added again", {MEAN: AGAIN})
spoil("rounded on the way", {MEAN: "(reduce_scatter(full.grad.float(), None) / ranks).to(full.dtype)"})
EVERYBODYS = (
    "gradients = [torch.empty_like(full.grad) for _ in range(ranks)]\n"
    "dist.all_gather(gradients, full.grad)\n"
    "shard.grad = torch.stack(gradients).mean(0).chunk(ranks)[rank].clone()"
)
spoil("too many bytes", {GRADIENT: EVERYBODYS})

# ---- wrong: who hears of it ------------------------------------------------------------------------------

spoil("nobody gathers the parameters", {GATHER: "pass"})
spoil("nothing is updated", COPY | {GATHER: "all_gather(torch.empty_like(full.data), shard.data)"})

# ---- wrong: who holds what -------------------------------------------------------------------------------

ALL = "the whole optimizer state is kept"
OF_ALL = {"make([shard])": "make([full])"}

spoil("nothing is sharded", OF_ALL | {GRADIENT: MIXED, GATHER: "pass"})
# Each rank has state for everything, and sends its own part of what comes of it.
spoil(ALL,
    OF_ALL | {GRADIENT: f"mine = {MEAN}\nfull.grad.chunk(ranks)[rank].copy_(mine)", "shard.data)": f"{SHARD}.clone())"})
spoil("a new optimizer in every step", {MADE: "", STEP: "make([shard]).step()"})
spoil("no step is returned", {"return step": "return optimizer"})
