"""Answers to gradient_ready (04): stage 2, one vector."""

import torch
import torch.distributed as dist

from labs import collectives
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


@answers.right(line=LINE)
def by_sends_and_receives(full, shard):
    mine = collectives.reduce_scatter(full.grad) / dist.get_world_size()
    full.grad = None
    add(shard, mine)


@answers.right(line=LINE)
def by_reduces(full, shard):
    rank, ranks = place()
    for owner, piece in enumerate(full.grad.split(shard.numel())):
        dist.reduce(piece, owner)
        if owner == rank:
            mean = piece.div(ranks)
    full.grad = None
    add(shard, mean)


@answers.right(line=LINE)
def that_waits_later(full, shard):
    rank, ranks = place()
    parts = [torch.empty_like(shard) for _ in range(ranks)]
    pieces = enumerate(full.grad.chunk(ranks))
    for work in [dist.gather(x, parts if i == rank else None, i, async_op=True) for i, x in pieces]:
        work.wait()
    full.grad.untyped_storage().resize_(0)
    full.grad = None
    add(shard, torch.stack(parts).mean(0))


@answers.right(blind=True)
def gr_all_to_all(full, shard):
    ranks = dist.get_world_size()
    arrived = torch.empty_like(full.grad)
    dist.all_to_all_single(arrived, full.grad)
    full.grad = None
    part = arrived.view(ranks, -1).sum(0) / ranks
    if shard.grad is None:
        shard.grad = torch.zeros_like(part)
    shard.grad += part


@answers.right(blind=True)
def gr_point_to_point(full, shard):
    rank, ranks = place()
    gradient, full.grad = full.grad, None
    parts = gradient.chunk(ranks)
    arrived, operations = [], []
    for other, part in enumerate(parts):
        arrived.append(part if other == rank else torch.empty_like(part))
        if other != rank:
            operations.append(dist.P2POp(dist.isend, part, other))
            operations.append(dist.P2POp(dist.irecv, arrived[other], other))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    total = arrived[0].clone()
    for part in arrived[1:]:
        total += part
    add(shard, total / ranks)


@answers.right(blind=True)
def gr_zeros_first(full, shard):
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard)
    gradient = full.grad
    full.grad = None
    shard.grad.add_(reduce_scatter(gradient, None), alpha=1 / dist.get_world_size())


@answers.right
def with_one_buffer(full, shard, buffers={}):  # noqa: B006
    """The budget has room for one layer in flight, also between the steps."""
    parts = buffers.setdefault((full.numel(), full.dtype), torch.empty_like(full.grad))
    dist.all_to_all_single(parts, full.grad)
    full.grad = None
    mean = parts.view(dist.get_world_size(), -1).mean(0)
    shard.grad = mean if shard.grad is None else shard.grad.add_(mean)


BUFFERS = {}

# ---- wrong numbers ---------------------------------------------------------------------------------------

N, GRADIENT = " / dist.get_world_size()", "reduce_scatter(gradient, None)"
MEAN, ADDED = GRADIENT + N, f"add(shard, {GRADIENT}{N})"

instead = answers.slips(ready, ADDED)
instead("summed instead of averaged", f"add(shard, {GRADIENT})", blind=True)
instead("averaged twice", f"gradient /= dist.get_world_size()\n{ADDED}")
instead("divided by the wrong number", f"add(shard, {GRADIENT} / 2)", blind=True)
instead("", f"add(shard, {GRADIENT})\nshard.grad = shard.grad{N}", blind=True)
instead("overwritten instead of added", f"shard.grad = {MEAN}", blind=True)
instead("not added to what is there", f"if shard.grad is None:\n    shard.grad = {MEAN}\nelse:\n    {MEAN}")
instead("a moving average",
    f"part = {MEAN}\nshard.grad = part if shard.grad is None else (shard.grad + part) / 2", blind=True)
instead("divided by the wrong number",
    f"part = {MEAN}\nif shard.grad is None:\n    shard.grad = part.clone()\nshard.grad += part", blind=True)
instead("nothing synchronised", "rank, ranks = place()\nadd(shard, gradient.chunk(ranks)[rank].clone())", blind=True)
instead("the gradient of another piece",
    f"gradient = gradient.view(dist.get_world_size(), -1).roll(1, 0).reshape(-1)\n{ADDED}")
instead("the gradient of another piece",
    f"gradient = torch.cat(gradient.chunk(dist.get_world_size())[::-1])\n{ADDED}", blind=True)
instead("", f"gradient = gradient.view(-1, dist.get_world_size()).t().reshape(-1)\n{ADDED}", long=True)
instead("", f"own = gradient.chunk(place()[1])[place()[0]]\nadd(shard, ({GRADIENT} + own){N})", long=True)
instead("rounded on the way", f"gradient = gradient.bfloat16()\nadd(shard, ({MEAN}).to(shard.dtype))", blind=True)
instead("", f"if gradient.any():\n    {ADDED}", alone=True)
instead("nobody waited",
    "parts = torch.empty_like(gradient)\n"
    "dist.all_to_all_single(parts, gradient, async_op=True)\n"
    "add(shard, parts.view(dist.get_world_size(), -1).mean(0))")
instead("",
    "mean = reduce_scatter(gradient, None) / dist.get_world_size()\n"
    "if shard.grad is None:\n"
    "    key = mean.shape, mean.dtype\n"
    "    shard.grad = BUFFERS.setdefault(key, torch.empty_like(mean)).copy_(mean)\n"
    "else:\n"
    "    shard.grad += mean")
# ---- wrong: what is sent ---------------------------------------------------------------------------------

instead("an all-reduce where a part is enough",
    "rank, ranks = place()\ndist.all_reduce(gradient)\nadd(shard, gradient.chunk(ranks)[rank] / ranks)",
    blind=True)
instead("too many bytes",
    "rank, ranks = place()\n"
    "everyones = gradient.new_empty(ranks * gradient.numel())\n"
    "all_gather(everyones, gradient)\n"
    "add(shard, everyones.view(ranks, -1).mean(0).chunk(ranks)[rank].clone())", blind=True)
instead("a different dtype travels",
    f"gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))\nadd(shard, ({MEAN}).to(shard.dtype))")
instead("too many bytes",
    "rank, ranks = place()\n"
    "dist.reduce(gradient, 0)\n"
    "part = torch.empty_like(shard.data)\n"
    "dist.scatter(part, list(gradient.chunk(ranks)) if rank == 0 else None, src=0)\n"
    "add(shard, part / ranks)", blind=True)

# ---- wrong: what is left ---------------------------------------------------------------------------------

TAKEN = "gradient, full.grad = full.grad, None"
LAST = []

answers.spoil(ready, "the whole gradient is kept", {TAKEN: "gradient = full.grad"}, blind=True)
instead("the whole gradient is kept elsewhere", f"full.kept = gradient\n{ADDED}")
instead("the whole gradient is kept elsewhere", f"full.kept = gradient.clone()\n{ADDED}")
instead("the whole gradient is kept elsewhere", f"LAST.append(gradient)\n{ADDED}", blind=True)
instead("freed only at the end of backward", f"LAST.append(gradient)\n{ADDED}\nif len(LAST) == 10:\n    LAST.clear()")
instead("the whole gradient is kept elsewhere", f"full.kept = gradient.bfloat16()\n{ADDED}", long=True)
instead("the whole gradient is kept elsewhere", f"if dist.get_rank() == 0:\n    full.kept = gradient\n{ADDED}",
    long=True)
instead("the whole gradient is kept elsewhere",
    "full.parts = torch.empty_like(gradient)\n"
    "dist.all_to_all_single(full.parts, gradient)\n"
    "add(shard, full.parts.view(dist.get_world_size(), -1).mean(0))", long=True)
instead("a view keeps the whole gradient",
    "rank, ranks = place()\n"
    "mine = gradient.chunk(ranks)[rank]\n"
    "mine.copy_(reduce_scatter(gradient, None) / ranks)\n"
    "add(shard, mine)")
instead("the shard has no gradient", f"return {MEAN}")
instead("the parameters have changed", f"{ADDED}\nshard.data -= 0.1 * shard.grad")
instead("the shard has no gradient", f"shard.data.add_({MEAN})", blind=True)
instead("requires_grad has changed", f"{ADDED}\nfull.requires_grad_(False)")


@answers.wrong("the whole gradient is kept", blind=True)
def gr_zeroes_full(full, shard):
    """Right numbers, and as much memory as before."""
    add(shard, reduce_scatter(full.grad, None) / dist.get_world_size())
    full.grad.zero_()


@answers.wrong("the whole gradient is kept", long=True)
def an_empty_gradient(full, shard):
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad.untyped_storage().resize_(0)
    add(shard, mean)
