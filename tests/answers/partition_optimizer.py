"""Answers to partition_optimizer (04): stage 1, one vector."""

import torch  # noqa: F401  (exchanged words name it)
import torch.distributed as dist
from torch import nn

from labs import collectives  # noqa: F401  (exchanged words name it)
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
MINE = "shard.grad = full.grad.chunk(ranks)[rank] / ranks"
WHOLE = "whole = torch.empty_like(full.data)\nall_gather(whole, shard.data)"
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
# By sends and receives.
vary(
    {f"nn.Parameter({SHARD})": "full.detach().chunk(ranks)[rank].requires_grad_()",
     GRADIENT: f"collectives.reduce_scatter(full.grad)\n{MINE}",
     GATHER: "collectives.all_gather(full.data)"}, line=STATE)
# That waits later.
ARRIVED = (
    "parts = torch.empty_like(full.grad)\n"
    "dist.all_to_all_single(parts, full.grad, async_op=True){}\n"
    "shard.grad = parts.view(ranks, -1).mean(0)"
)
PIECES = "pieces = [torch.empty_like(shard) for _ in range(ranks)]\n"
PIECES += "dist.all_gather(pieces, shard.data, async_op=True).wait()\n"
vary(
    {GRADIENT: ARRIVED.format(".wait()"),
     STEP: f"{STEP}\noptimizer.zero_grad()",
     GATHER: f"{PIECES}with torch.no_grad():\n    full.copy_(torch.cat(pieces))"}, line=STATE)
# By reduce and broadcast.
vary(
    {GRADIENT: "[dist.reduce(gradient, owner) for owner, gradient in enumerate(full.grad.chunk(ranks))]\n" + MINE,
     GATHER: "[dist.broadcast(piece, owner) for owner, piece in enumerate(full.data.chunk(ranks))]"},
    line=STATE)
vary(COPY | {GRADIENT: f"shard.data.copy_({SHARD})\n{GRADIENT}", STEP: f"{STEP}\noptimizer.zero_grad()"}, blind=True)
vary(
    {SHARD: "torch.tensor_split(full.data, ranks)[rank]",
     MEAN: "reduce_scatter(full.grad / ranks, None)",
     STEP: f"{STEP}\nshard.grad = None",
     GATHER: f"{WHOLE}\nfull.data.copy_(whole)"}, blind=True)


class Partition:
    def __init__(self, full, make):
        self.rank, self.ranks = place()
        self.full = full
        self.shard = nn.Parameter(full.data.view(self.ranks, -1)[self.rank])
        self.optimizer = make([self.shard])

    def __call__(self):
        gradient = reduce_scatter(self.full.grad, None)
        gradient *= 1 / self.ranks
        self.shard.grad = gradient
        self.optimizer.step()
        self.shard.grad = None
        all_gather(self.full.data, self.shard.data.clone())


@answers.right(blind=True)
def po_class(full, make):
    return Partition(full, make)


# ---- wrong: which gradient, or which piece ---------------------------------------------------------------

ROLLED = "reduce_scatter(full.grad.view(ranks, -1).roll({}, 0).reshape(-1), None) / ranks"

spoil("summed instead of averaged", {MEAN: "reduce_scatter(full.grad, None)"}, blind=True)
spoil("divided by the wrong number", {MEAN: MEAN.replace("ranks", "2")}, blind=True)
spoil("averaged twice", {MEAN: "reduce_scatter(full.grad / ranks, None) / ranks"}, blind=True)
spoil("nothing synchronised", {MEAN: "full.grad.chunk(ranks)[rank].clone()"}, blind=True)
spoil("the pieces are rotated", {SHARD: f"{NEXT}.clone()", MEAN: ROLLED.format(-1)})
spoil("the gradient of another piece", {MEAN: ROLLED.format(1)})
spoil("", {SHARD: NEXT}, blind=True)
spoil("", {SHARD: "full.data[rank::ranks].clone()"}, blind=True)
AGAIN = f"{MEAN} if shard.grad is None else shard.grad + {MEAN}"
spoil("the gradient of the step before is added again", {MEAN: AGAIN}, blind=True)
spoil("rounded on the way", {MEAN: "(reduce_scatter(full.grad.float(), None) / ranks).to(full.dtype)"})
spoil("", {MEAN: "(reduce_scatter(full.grad.bfloat16(), None) / ranks).to(full.dtype)"}, blind=True)
spoil("nobody waited", {GRADIENT: ARRIVED.format("")})
spoil("an all-reduce where a part is enough", {GRADIENT: f"dist.all_reduce(full.grad)\n{MINE}"}, blind=True)
EVERYBODYS = (
    "gradients = [torch.empty_like(full.grad) for _ in range(ranks)]\n"
    "dist.all_gather(gradients, full.grad)\n"
    "shard.grad = torch.stack(gradients).mean(0).chunk(ranks)[rank].clone()"
)
spoil("too many bytes", {GRADIENT: EVERYBODYS})
# A rank whose own gradient is zero stays away, and the others wait for ever.
spoil("", {GRADIENT: f"if not full.grad.any():\n    return\n{GRADIENT}"}, blind=True, alone=True)

# ---- wrong: who hears of it ------------------------------------------------------------------------------

spoil("nobody gathers the parameters", {GATHER: "pass"}, blind=True)
spoil("", COPY | {GATHER: f"{SHARD}.copy_(shard.data)"}, blind=True)
spoil("nothing is updated", COPY | {GATHER: "all_gather(torch.empty_like(full.data), shard.data)"})
spoil("not in place", COPY | {GATHER: f"{WHOLE}\nfull.data = whole"}, blind=True)
ROUNDED = "whole = full.data.bfloat16()\nall_gather(whole, shard.data.bfloat16())\nfull.data.copy_(whole)"
spoil("", {GATHER: ROUNDED}, blind=True)
spoil("", {STEP: f"{GATHER}\n{STEP}", f"{STEP}\n        {GATHER}": STEP}, long=True)
spoil("", {GATHER: "dist.all_reduce(full.data)\nfull.data /= ranks"}, long=True)
spoil("", {STEP: f"{STEP}\n{STEP}"}, long=True)

# ---- wrong: who holds what -------------------------------------------------------------------------------

ALL = "the whole optimizer state is kept"
OF_ALL = {"make([shard])": "make([full])"}

spoil("nothing is sharded", OF_ALL | {GRADIENT: MIXED, GATHER: "pass"}, blind=True)
# Each rank has state for everything, and sends its own part of what comes of it.
spoil(ALL,
    OF_ALL | {GRADIENT: f"mine = {MEAN}\nfull.grad.chunk(ranks)[rank].copy_(mine)", "shard.data)": f"{SHARD}.clone())"})
# The optimizer knows all elements; zeros are the gradients of the others.
spoil(ALL,
    {SHARD: "full.data.clone()",
     GRADIENT: f"part = {MEAN}\nshard.grad = torch.zeros_like(shard)\nshard.grad.chunk(ranks)[rank].copy_(part)",
     GATHER: "all_gather(full.data, shard.data.chunk(ranks)[rank].clone())\nshard.data.copy_(full.data)"},
    blind=True)
FOR_EACH = (
    "optimizers = [make([nn.Parameter(piece)]) for piece in full.data.chunk(ranks)]\noptimizers[rank] = make([shard])"
)
spoil(ALL, {MADE: FOR_EACH, STEP: "optimizers[rank].step()"})
ON_RANK_0 = {MADE: "optimizer = make([full]) if rank == 0 else None", STEP: f"if rank == 0:\n    {STEP}"}
spoil(ALL, ON_RANK_0 | {GRADIENT: MIXED, GATHER: "dist.broadcast(full.data, 0)"}, blind=True)
HALF = "half = nn.Parameter(shard.data[: len(shard) // 2])\noptimizer = make([half])"
spoil("", {MADE: HALF, GRADIENT: f"half.grad = ({MEAN})[: len(half)]"}, long=True)
spoil("a new optimizer in every step", {MADE: "", STEP: "make([shard]).step()"}, blind=True)
spoil("an optimizer of too few elements", {MADE: "", STEP: "shard.data -= 0.1 * shard.grad"}, long=True)
DOUBLE = {SHARD: f"{SHARD}.double()", MEAN: f"({MEAN}).double()", "shard.data)": "shard.data.to(full.dtype))"}
spoil("", DOUBLE, long=True)
spoil("no step is returned", {"return step": "return optimizer"})


@answers.wrong(ALL, long=True)
def after_the_first_step(full, make):
    """A whole optimizer takes the first step; then its state is cut."""
    rank, ranks = place()
    shard, own = nn.Parameter(full.data.chunk(ranks)[rank]), []

    def step():
        if own:
            shard.grad = reduce_scatter(full.grad, None) / ranks
            own[0].step()
            return all_gather(full.data, shard.data)
        whole = make([full])
        dist.all_reduce(full.grad)
        full.grad /= ranks
        whole.step()
        own.append(make([shard]))
        for key, value in whole.state[full].items():
            own[0].state[shard][key] = value.chunk(ranks)[rank].clone() if value.dim() else value

    return step


@answers.wrong("full copies are kept")
def that_remembers(full, make):
    step, before = partition(full, make), []

    def remembering():
        before[:] = [full.data.clone(), full.grad.clone()]
        step()

    return remembering


HOOK = """
    def ready(full):
        gradient, full.grad = full.grad, None
        mean = reduce_scatter(gradient, None) / ranks
        shard.grad = mean if shard.grad is None else shard.grad + mean

    full.register_post_accumulate_grad_hook(ready)

    def step():
"""
answers.spoil(partition, "synchronised at every micro-batch",
    {f"\n    def step():\n        {GRADIENT}\n": HOOK,
     STEP: f"{STEP}\n        shard.grad = None"})
