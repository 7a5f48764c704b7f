"""Answers to partition_optimizer (04): stage 1, one vector."""

import torch
import torch.distributed as dist
from torch import nn

from labs import collectives
from labs.group import all_gather, reduce_scatter, reduce_scatter_single
from tests.answers import Exercise

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


@answers.right(line=COPIED)
def with_a_copy(full, make):
    """The shard is memory of its own, as where it is of another dtype."""
    rank, ranks = place()
    n = full.numel() // ranks
    shard = nn.Parameter(full.detach()[rank * n : (rank + 1) * n].clone())
    optimizer = make([shard])

    def step():
        shard.grad = torch.empty_like(shard)
        reduce_scatter_single(shard.grad, full.grad)
        shard.grad /= ranks
        full.grad = None
        optimizer.step()
        dist.all_gather(list(full.data.chunk(ranks)), shard.data)

    return step


@answers.right(line=STATE)
def by_sends_and_receives(full, make):
    rank, ranks = place()
    n = full.numel() // ranks
    shard = full.detach().narrow(0, rank * n, n).requires_grad_()
    optimizer = make([shard])

    def step():
        collectives.reduce_scatter(full.grad)
        shard.grad = full.grad.narrow(0, rank * n, n) / ranks
        optimizer.step()
        collectives.all_gather(full.data)

    return step


@answers.right(line=STATE)
def that_waits_later(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.split(full.numel() // ranks)[rank])
    optimizer = make([shard])

    def step():
        parts = torch.empty_like(full.grad)
        dist.all_to_all_single(parts, full.grad, async_op=True).wait()
        shard.grad = parts.view(ranks, -1).mean(0)
        optimizer.step()
        optimizer.zero_grad()
        pieces = [torch.empty_like(shard) for _ in range(ranks)]
        dist.all_gather(pieces, shard.data, async_op=True).wait()
        with torch.no_grad():
            full.copy_(torch.cat(pieces))

    return step


@answers.right(line=STATE)
def by_reduce_and_broadcast(full, make):
    rank, ranks = place()
    pieces = full.data.chunk(ranks)
    mine = nn.Parameter(pieces[rank])
    optimizer = make([mine])

    def step():
        for owner, gradient in enumerate(full.grad.chunk(ranks)):
            dist.reduce(gradient, owner)
        mine.grad = full.grad.chunk(ranks)[rank] / ranks
        optimizer.step()
        for owner, piece in enumerate(pieces):
            dist.broadcast(piece, owner)

    return step


@answers.right(blind=True)
def po_own_memory(full, make):
    rank, ranks = place()
    n = full.numel() // ranks
    mine = slice(rank * n, rank * n + n)
    shard = nn.Parameter(full.detach()[mine].clone())
    optimizer = make([shard])

    def step():
        shard.data.copy_(full.data[mine])
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        all_gather(full.data, shard.data)

    return step


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


@answers.right(blind=True)
def po_divide_first(full, make):
    rank, ranks = place()
    shard = nn.Parameter(torch.tensor_split(full.data, ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad / ranks, None)
        optimizer.step()
        shard.grad = None
        whole = torch.empty_like(full.data)
        all_gather(whole, shard.data)
        full.data.copy_(whole)

    return step


# ---- wrong: which gradient, or which piece ---------------------------------------------------------------

MEAN = "reduce_scatter(full.grad, None) / ranks"
SHARD = "full.data.chunk(ranks)[rank]"
GATHER = "all_gather(full.data, shard.data)"
NEXT = f"{SHARD[:-5]}(rank + 1) % ranks]"

answers.spoil(partition, "summed instead of averaged", {MEAN: "reduce_scatter(full.grad, None)"}, blind=True)
answers.spoil(partition, "divided by the wrong number", {MEAN: MEAN.replace("ranks", "2")}, blind=True)
answers.spoil(partition, "averaged twice", {MEAN: "reduce_scatter(full.grad / ranks, None) / ranks"}, blind=True)
answers.spoil(partition, "nothing synchronised", {MEAN: "full.grad.chunk(ranks)[rank].clone()"}, blind=True)
answers.spoil(
    partition,
    "the pieces are rotated",
    {SHARD: f"{NEXT}.clone()", MEAN: "reduce_scatter(full.grad.view(ranks, -1).roll(-1, 0).reshape(-1), None) / ranks"},
)
answers.spoil(
    partition,
    "the gradient of another piece",
    {MEAN: "reduce_scatter(full.grad.view(ranks, -1).roll(1, 0).reshape(-1), None) / ranks"},
)
answers.spoil(partition, "", {SHARD: NEXT}, blind=True)
answers.spoil(partition, "", {SHARD: "full.data[rank::ranks].clone()"}, blind=True)
answers.spoil(
    partition,
    "the gradient of the step before is added again",
    {MEAN: f"{MEAN} if shard.grad is None else shard.grad + {MEAN}"},
    blind=True,
)
answers.spoil(
    partition, "rounded on the way", {MEAN: "(reduce_scatter(full.grad.float(), None) / ranks).to(full.dtype)"}
)
answers.spoil(
    partition,
    "",
    {MEAN: "(reduce_scatter(full.grad.bfloat16(), None) / ranks).to(full.dtype)"},
    blind=True,
)
answers.spoil(
    partition,
    "nobody waited",
    {
        f"shard.grad = {MEAN}": "parts = torch.empty_like(full.grad)\n"
        "        dist.all_to_all_single(parts, full.grad, async_op=True)\n"
        "        shard.grad = parts.view(ranks, -1).mean(0)"
    },
)
answers.spoil(
    partition,
    "an all-reduce where a part is enough",
    {f"shard.grad = {MEAN}": "dist.all_reduce(full.grad)\n        shard.grad = full.grad.chunk(ranks)[rank] / ranks"},
    blind=True,
)
answers.spoil(
    partition,
    "too many bytes",
    {
        f"shard.grad = {MEAN}": "gradients = [torch.empty_like(full.grad) for _ in range(ranks)]\n"
        "        dist.all_gather(gradients, full.grad)\n"
        "        shard.grad = torch.stack(gradients).mean(0).chunk(ranks)[rank].clone()"
    },
)

# ---- wrong: who hears of it ------------------------------------------------------------------------------

answers.spoil(partition, "nobody gathers the parameters", {GATHER: "pass"}, blind=True)
answers.spoil(
    partition,
    "",
    {SHARD: f"{SHARD}.clone()", GATHER: f"{SHARD}.copy_(shard.data)"},
    blind=True,
)
answers.spoil(
    partition,
    "nothing is updated",
    {SHARD: f"{SHARD}.clone()", GATHER: "all_gather(torch.empty_like(full.data), shard.data)"},
)
answers.spoil(
    partition,
    "not in place",
    {
        SHARD: f"{SHARD}.clone()",
        GATHER: "whole = torch.empty_like(full.data)\n        all_gather(whole, shard.data)\n        full.data = whole",
    },
    blind=True,
)
answers.spoil(
    partition,
    "",
    {
        GATHER: "whole = torch.empty_like(full.data, dtype=torch.bfloat16)\n"
        "        all_gather(whole, shard.data.bfloat16())\n"
        "        full.data.copy_(whole)"
    },
    blind=True,
)
answers.spoil(partition, "", {f"optimizer.step()\n        {GATHER}": f"{GATHER}\n        optimizer.step()"}, long=True)
answers.spoil(partition, "", {GATHER: "dist.all_reduce(full.data)\n        full.data /= ranks"}, long=True)
answers.spoil(partition, "", {"optimizer.step()": "optimizer.step()\n        optimizer.step()"}, long=True)

# ---- wrong: who holds what -------------------------------------------------------------------------------


@answers.wrong("nothing is sharded", blind=True)
def po_ddp(full, make):
    _, ranks = place()
    optimizer = make([full])

    def step():
        dist.all_reduce(full.grad)
        full.grad /= ranks
        optimizer.step()

    return step


@answers.wrong("the whole optimizer state is kept")
def only_the_update(full, make):
    """Each rank has state for everything, and sends its own part of what comes of it."""
    rank, ranks = place()
    optimizer = make([full])

    def step():
        mine = reduce_scatter(full.grad, None) / ranks
        full.grad.chunk(ranks)[rank].copy_(mine)
        optimizer.step()
        all_gather(full.data, full.data.chunk(ranks)[rank].clone())

    return step


@answers.wrong("the whole optimizer state is kept", blind=True)
def po_whole_state(full, make):
    """The optimizer knows all elements; zeros are the gradients of the others."""
    rank, ranks = place()
    twin = nn.Parameter(full.data.clone())
    optimizer = make([twin])

    def step():
        part = reduce_scatter(full.grad, None) / ranks
        twin.grad = torch.zeros_like(twin)
        twin.grad.chunk(ranks)[rank].copy_(part)
        optimizer.step()
        all_gather(full.data, twin.data.chunk(ranks)[rank].clone())
        twin.data.copy_(full.data)

    return step


@answers.wrong("the whole optimizer state is kept")
def an_optimizer_for_each_piece(full, make):
    rank, ranks = place()
    pieces = [nn.Parameter(piece) for piece in full.data.chunk(ranks)]
    optimizers = [make([piece]) for piece in pieces]

    def step():
        pieces[rank].grad = reduce_scatter(full.grad, None) / ranks
        optimizers[rank].step()
        all_gather(full.data, pieces[rank].data)

    return step


@answers.wrong("", long=True)
def half_of_it(full, make):
    rank, ranks = place()
    shard = full.data.chunk(ranks)[rank]
    half = nn.Parameter(shard[: len(shard) // 2])
    optimizer = make([half])

    def step():
        half.grad = (reduce_scatter(full.grad, None) / ranks)[: len(half)]
        optimizer.step()
        all_gather(full.data, shard)

    return step


@answers.wrong("the whole optimizer state is kept", blind=True)
def po_rank_0(full, make):
    rank, ranks = place()
    optimizer = make([full]) if rank == 0 else None

    def step():
        dist.all_reduce(full.grad)
        full.grad /= ranks
        if rank == 0:
            optimizer.step()
        dist.broadcast(full.data, 0)

    return step


@answers.wrong("a new optimizer in every step", blind=True)
def po_made_each_step(full, make):
    rank, ranks = place()

    def step():
        shard = nn.Parameter(full.data.chunk(ranks)[rank])
        shard.grad = reduce_scatter(full.grad, None) / ranks
        make([shard]).step()
        all_gather(full.data, shard.data)

    return step


@answers.wrong("an optimizer of too few elements", long=True)
def by_hand(full, make):
    """No optimizer at all."""
    rank, ranks = place()

    def step():
        mine = full.data.chunk(ranks)[rank]
        mine -= 0.1 * reduce_scatter(full.grad, None) / ranks
        all_gather(full.data, mine.clone())

    return step


@answers.wrong("the whole optimizer state is kept", long=True)
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


answers.spoil(
    partition,
    "",
    {
        SHARD: f"{SHARD}.double()",
        MEAN: f"({MEAN}).double()",
        GATHER: "all_gather(full.data, shard.data.to(full.dtype))",
    },
    long=True,
)


@answers.wrong("full copies are kept")
def that_remembers(full, make):
    step, before = partition(full, make), []

    def remembering():
        before[:] = [full.data.clone(), full.grad.clone()]
        step()

    return remembering


@answers.wrong("no step is returned")
def the_optimizer(full, make):
    rank, ranks = place()
    return make([nn.Parameter(full.data.chunk(ranks)[rank])])


@answers.wrong("synchronised at every micro-batch")
def reduced_in_a_hook(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def ready(full):
        gradient, full.grad = full.grad, None
        mean = reduce_scatter(gradient, None) / ranks
        shard.grad = mean if shard.grad is None else shard.grad + mean

    full.register_post_accumulate_grad_hook(ready)

    def step():
        optimizer.step()
        shard.grad = None
        all_gather(full.data, shard.data)

    return step


@answers.wrong("", blind=True, alone=True)
def po_skips_zeros(full, make):
    """A rank whose own gradient is zero stays away, and the others wait for ever."""
    usual = partition(full, make)
    return lambda: usual() if full.grad.any() else None
