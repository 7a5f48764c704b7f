"""Answers to gradient_ready (04): stage 2, one vector."""

import torch
import torch.distributed as dist

from labs.group import all_gather, reduce_scatter, reduce_scatter_single  # noqa: F401  (exchanged words name it)
from tests.answers import Exercise

# fmt: off
answers = Exercise("gradient_ready")
LINE = (
    "besides the layer in flight you held 0.25 × the gradients, and sent 0.75 × the gradients per rank and "
    "micro-batch; the least possible is 0.25 × and 0.75 ×"
)


def place():
    return dist.get_rank(), dist.get_world_size()


def add(shard, part):
    shard.grad = part if shard.grad is None else shard.grad + part


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def ready(full, shard):
    gradient, full.grad = full.grad, None
    add(shard, reduce_scatter(gradient, None) / dist.get_world_size())


@answers.right(line=LINE)
def by_torch(full, shard):
    mean = torch.empty_like(shard)
    reduce_scatter_single(mean, full.grad / dist.get_world_size())
    full.grad = None
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard)
    shard.grad += mean


# ---- wrong numbers ---------------------------------------------------------------------------------------

N, GRADIENT = " / dist.get_world_size()", "reduce_scatter(gradient, None)"
MEAN, ADDED = GRADIENT + N, f"add(shard, {GRADIENT}{N})"

instead = answers.slips(ready, ADDED)
instead("divided by the wrong number", f"add(shard, {GRADIENT} / 2)")
instead("overwritten instead of added", f"shard.grad = {MEAN}")
instead("a moving average",
    f"part = {MEAN}\nshard.grad = part if shard.grad is None else (shard.grad + part) / 2")
instead("the gradient of another piece",
    f"gradient = gradient.view(dist.get_world_size(), -1).roll(1, 0).reshape(-1)\n{ADDED}")
# ---- wrong: what is sent ---------------------------------------------------------------------------------

instead("an all-reduce where a part is enough",
    "rank, ranks = place()\ndist.all_reduce(gradient)\nadd(shard, gradient.chunk(ranks)[rank] / ranks)")

# ---- wrong: what is left ---------------------------------------------------------------------------------

TAKEN = "gradient, full.grad = full.grad, None"
LAST = []

answers.spoil(ready, "the whole gradient is kept", {TAKEN: "gradient = full.grad"})
instead("the whole gradient is kept elsewhere", f"full.kept = gradient\n{ADDED}")
instead("freed only at the end of backward", f"LAST.append(gradient)\n{ADDED}\nif len(LAST) == 10:\n    LAST.clear()")
instead("the shard has no gradient", f"return {MEAN}")
instead("requires_grad has changed", f"{ADDED}\nfull.requires_grad_(False)")
