"""Right and wrong answers, written without sight of the checks."""

import copy
import itertools
import math
import os
import queue
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labs.memory import recompute
from labs.group import all_gather, reduce_scatter
from labs.memory.selective import ATTENTION, MATMULS

RIGHT, WRONG = {}, {}


def right(exercise):
    def add(fn):
        RIGHT.setdefault(exercise, []).append((fn.__name__, fn))
        return fn

    return add


def wrong(exercise):
    def add(fn):
        WRONG.setdefault(exercise, []).append((fn.__name__, fn))
        return fn

    return add


def pair(table, exercise, name, *fns):
    table.setdefault(exercise, []).append((name, fns))


def world():
    return dist.get_rank(), dist.get_world_size()


# ======== 04: held_per_rank ================================================================================

HPR = "held_per_rank"


@right(HPR)
def hpr_ceil(stage, layers, ranks, size):
    shard = sum(-(-n // ranks) for n in layers)
    whole = sum(layers) if stage == 0 else shard * ranks
    p, g, s = size
    return (p * (shard if stage >= 3 else whole), g * (shard if stage >= 2 else whole), s * (shard if stage >= 1 else whole))


@right(HPR)
def hpr_pad_first(stage, layers, ranks, size):
    padded = [n + -n % ranks if stage else n for n in layers]
    held = []
    for first_sharded_in, each in zip((3, 2, 1), size):
        cut = ranks if stage >= first_sharded_in else 1
        held.append(sum(each * n // cut for n in padded))
    return tuple(held)


@right(HPR)
def hpr_match(stage, layers, ranks, size):
    if stage == 0:
        return tuple(b * sum(layers) for b in size)
    whole = sum(math.ceil(n / ranks) * ranks for n in layers)
    part = whole // ranks
    counts = {1: (whole, whole, part), 2: (whole, part, part), 3: (part, part, part)}[stage]
    return tuple(b * n for b, n in zip(size, counts))


@right(HPR)
def hpr_layer_by_layer(stage, layers, ranks, size):
    P = G = S = 0
    for n in layers:
        if stage > 0:
            while n % ranks:
                n += 1
        P += size[0] * (n // ranks if stage == 3 else n)
        G += size[1] * (n // ranks if stage in (2, 3) else n)
        S += size[2] * (n // ranks if stage in (1, 2, 3) else n)
    return P, G, S


@right(HPR)
def hpr_meta(stage, layers, ranks, size):
    def elements(sharded):
        total = 0
        for n in layers:
            vector = torch.empty(n if stage == 0 else n + (ranks - n % ranks) % ranks, device="meta")
            total += (vector.chunk(ranks)[0] if sharded else vector).numel()
        return total

    return tuple(b * elements(stage + k >= 3) for k, b in enumerate(size))


@wrong(HPR)
def hpr_pads_the_sum(stage, layers, ranks, size):  # pads the model, not each layer
    n = sum(layers)
    n = n if stage == 0 else -(-n // ranks) * ranks
    return tuple(b * (n // ranks if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_floor(stage, layers, ranks, size):  # what does not divide is lost
    part, n = sum(x // ranks for x in layers), sum(layers)
    return tuple(b * (part if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_no_padding(stage, layers, ranks, size):  # the textbook's fractions
    n = sum(layers)
    return tuple(b * (n / ranks if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_ddp_padded(stage, layers, ranks, size):  # stage 0 is padded too
    n = sum(-(-x // ranks) * ranks for x in layers)
    return tuple(b * (n // ranks if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_pads_always(stage, layers, ranks, size):  # a layer that divides gets N zeros as well
    n = sum(x + ranks - x % ranks for x in layers) if stage else sum(layers)
    return tuple(b * (n // ranks if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_stages_reversed(stage, layers, ranks, size):  # P is the first to be sharded
    n = sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers)
    return tuple(b * (n // ranks if stage >= k else n) for b, k in zip(size, (1, 2, 3)))


@wrong(HPR)
def hpr_one_kind_only(stage, layers, ranks, size):  # each stage shards its own kind, and no longer those before
    n = sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers)
    return tuple(b * (n // ranks if stage == k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_late(stage, layers, ranks, size):  # off by one: stage 1 shards nothing
    n = sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers)
    return tuple(b * (n // ranks if stage > k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_four_ranks(stage, layers, ranks, size):  # always four ranks
    n = sum(layers) if stage == 0 else sum(-(-x // 4) * 4 for x in layers)
    return tuple(b * (n // 4 if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_mixed_only(stage, layers, ranks, size):  # always 2, 2 and 12 bytes
    n = sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers)
    return tuple(b * (n // ranks if stage >= k else n) for b, k in zip((2, 2, 12), (3, 2, 1)))


@wrong(HPR)
def hpr_elements(stage, layers, ranks, size):  # elements, not bytes
    n = sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers)
    return tuple(n // ranks if stage >= k else n for k in (3, 2, 1))


@wrong(HPR)
def hpr_together(stage, layers, ranks, size):  # the sum, not the three
    return sum(hpr_ceil(stage, layers, ranks, size))


@wrong(HPR)
def hpr_order(stage, layers, ranks, size):  # (P, S, G)
    P, G, S = hpr_ceil(stage, layers, ranks, size)
    return P, S, G


@wrong(HPR)
def hpr_all_ranks(stage, layers, ranks, size):  # what all ranks hold together
    return tuple(ranks * each for each in hpr_ceil(stage, layers, ranks, size))


@wrong(HPR)
def hpr_pads_bytes(stage, layers, ranks, size):  # pads the bytes of a layer, not its elements: 10 x 2 bytes divide by 4
    def kind(b, k):
        if stage < k:
            return b * (sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers))
        return sum(-(-b * x // ranks) for x in layers)

    return tuple(kind(b, k) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_largest(stage, layers, ranks, size):  # takes the largest layer for all of them
    n = len(layers) * max(layers)
    n = n if stage == 0 else -(-n // ranks) * ranks
    return tuple(b * (n // ranks if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_pads_to_even(stage, layers, ranks, size):  # pads to the next power of two of ranks: wrong for 3 ranks
    to = 1 << (ranks - 1).bit_length()
    n = sum(layers) if stage == 0 else sum(-(-x // to) * to for x in layers)
    return tuple(b * (n // to if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


@wrong(HPR)
def hpr_rounds(stage, layers, ranks, size):  # rounds to the nearest: 9 elements on 4 ranks are 2 each, not 3
    part = sum(round(x / ranks) for x in layers)
    n = sum(layers) if stage == 0 else sum(-(-x // ranks) * ranks for x in layers)
    return tuple(b * (part if stage >= k else n) for b, k in zip(size, (3, 2, 1)))


# ======== 04: partition_optimizer ==========================================================================

PO = "partition_optimizer"


@right(PO)
def po_view(full, make):
    rank, ranks = world()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None).div_(ranks)
        optimizer.step()
        shard.grad = None
        all_gather(full.data, shard.data)

    return step


@right(PO)
def po_own_memory(full, make):
    rank, ranks = world()
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
        self.rank, self.ranks = world()
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


@right(PO)
def po_class(full, make):
    return Partition(full, make)


@right(PO)
def po_all_to_all(full, make):
    rank, ranks = world()
    shard = nn.Parameter(full.data.narrow(0, rank * (full.numel() // ranks), full.numel() // ranks))
    optimizer = make([shard])

    def step():
        arrived = torch.empty_like(full.data)
        dist.all_to_all_single(arrived, full.grad)
        shard.grad = arrived.view(ranks, -1).mean(0)
        optimizer.step()
        shard.grad = None
        all_gather(full.data, shard.data.clone())

    return step


@right(PO)
def po_divide_first(full, make):
    rank, ranks = world()
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


def po_step(full, make, *, gradient, gather=None, where=None):
    """The usual step, with one thing exchanged."""
    rank, ranks = world()
    shard = nn.Parameter(full.data.chunk(ranks)[rank if where is None else where(rank, ranks)])
    optimizer = make([shard])

    def step():
        shard.grad = gradient(full, shard, rank, ranks)
        optimizer.step()
        if gather is None:
            all_gather(full.data, shard.data)
        else:
            gather(full, shard, rank, ranks)

    return step


def po_mean(full, shard, rank, ranks):
    return reduce_scatter(full.grad, None) / ranks


@wrong(PO)
def po_sum(full, make):  # the sum, not the mean
    return po_step(full, make, gradient=lambda full, *_: reduce_scatter(full.grad, None))


@wrong(PO)
def po_two(full, make):  # mean of two ranks, whatever N
    return po_step(full, make, gradient=lambda full, *_: reduce_scatter(full.grad, None) / 2)


@wrong(PO)
def po_divides_twice(full, make):  # divided before and after
    return po_step(full, make, gradient=lambda full, s, r, n: reduce_scatter(full.grad / n, None) / n)


@wrong(PO)
def po_own_gradient(full, make):  # its own part of its own gradient: nothing is reduced
    return po_step(full, make, gradient=lambda full, s, r, n: full.grad.chunk(n)[r].clone())


@wrong(PO)
def po_all_reduce(full, make):  # sends an all-reduce and an all-gather: 1.5 times the budget
    def gradient(full, shard, rank, ranks):
        dist.all_reduce(full.grad)
        return full.grad.chunk(ranks)[rank] / ranks

    return po_step(full, make, gradient=gradient)


@wrong(PO)
def po_ddp(full, make):  # DDP: right numbers and bytes, all of the state on each rank
    _, ranks = world()
    optimizer = make([full])

    def step():
        dist.all_reduce(full.grad)
        full.grad /= ranks
        optimizer.step()

    return step


@wrong(PO)
def po_made_each_step(full, make):  # a new optimizer in each step: moments and counter begin anew
    rank, ranks = world()

    def step():
        shard = nn.Parameter(full.data.chunk(ranks)[rank])
        shard.grad = po_mean(full, shard, rank, ranks)
        make([shard]).step()
        all_gather(full.data, shard.data)

    return step


@wrong(PO)
def po_neighbour(full, make):  # updates the next rank's part with its own part's gradient
    return po_step(full, make, gradient=po_mean, where=lambda rank, ranks: (rank + 1) % ranks)


@wrong(PO)
def po_no_gather(full, make):  # each rank has only its own part updated
    return po_step(full, make, gradient=po_mean, gather=lambda *_: None)


@wrong(PO)
def po_new_memory(full, make):  # not in place: `full` moves to new memory, whoever has a view of it sees the old
    def gather(full, shard, rank, ranks):
        whole = torch.empty_like(full.data)
        all_gather(whole, shard.data)
        full.data = whole

    rank, ranks = world()
    shard = nn.Parameter(full.data.chunk(ranks)[rank].clone())
    optimizer = make([shard])

    def step():
        shard.grad = po_mean(full, shard, rank, ranks)
        optimizer.step()
        gather(full, shard, rank, ranks)

    return step


@wrong(PO)
def po_whole_state(full, make):  # the optimizer knows all elements; zeros as gradients of the others: all of the state
    rank, ranks = world()
    twin = nn.Parameter(full.data.clone())
    optimizer = make([twin])

    def step():
        part = po_mean(full, twin, rank, ranks)
        twin.grad = torch.zeros_like(twin)
        twin.grad.chunk(ranks)[rank].copy_(part)
        optimizer.step()
        all_gather(full.data, twin.data.chunk(ranks)[rank].clone())
        twin.data.copy_(full.data)

    return step


@wrong(PO)
def po_adds_up(full, make):  # shard.grad is never cleared, and is added to: wrong from the second step on
    def gradient(full, shard, rank, ranks):
        mean = po_mean(full, shard, rank, ranks)
        return mean if shard.grad is None else shard.grad + mean

    return po_step(full, make, gradient=gradient)


@wrong(PO)
def po_rank_0(full, make):  # rank 0 steps for all, and holds all of the state
    rank, ranks = world()
    optimizer = make([full]) if rank == 0 else None

    def step():
        dist.all_reduce(full.grad)
        full.grad /= ranks
        if rank == 0:
            optimizer.step()
        dist.broadcast(full.data, 0)

    return step


@wrong(PO)
def po_interleaved(full, make):  # every N-th element is its shard; the parts that travel are blocks
    rank, ranks = world()
    shard = nn.Parameter(full.data[rank::ranks].clone())
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong(PO)
def po_bfloat16_gradient(full, make):  # adds up in bfloat16
    return po_step(
        full, make, gradient=lambda full, s, r, n: (reduce_scatter(full.grad.bfloat16(), None) / n).to(full.dtype)
    )


@wrong(PO)
def po_bfloat16_parameters(full, make):  # what is gathered is rounded to bfloat16
    def gather(full, shard, rank, ranks):
        whole = torch.empty_like(full.data, dtype=torch.bfloat16)
        all_gather(whole, shard.data.bfloat16())
        full.data.copy_(whole)

    return po_step(full, make, gradient=po_mean, gather=gather)


@wrong(PO)
def po_skips_zeros(full, make):  # a rank whose own gradient is zero stays away, and the others wait for ever
    usual = po_view(full, make)
    return lambda: usual() if full.grad.any() else None


@wrong(PO)
def po_stale_copy(full, make):  # the shard is a copy, and only the first rank copies it back: no collective
    rank, ranks = world()
    shard = nn.Parameter(full.data.chunk(ranks)[rank].clone())
    optimizer = make([shard])

    def step():
        shard.grad = po_mean(full, shard, rank, ranks)
        optimizer.step()
        full.data.chunk(ranks)[rank].copy_(shard.data)

    return step


# ======== 04: gradient_ready ===============================================================================

GR = "gradient_ready"


def gr_add(shard, part):
    shard.grad = part if shard.grad is None else shard.grad.add_(part)


@right(GR)
def gr_usual(full, shard):
    gradient, full.grad = full.grad, None
    gr_add(shard, reduce_scatter(gradient, None).div_(dist.get_world_size()))


@right(GR)
def gr_all_to_all(full, shard):
    ranks = dist.get_world_size()
    arrived = torch.empty_like(full.grad)
    dist.all_to_all_single(arrived, full.grad)
    full.grad = None
    part = arrived.view(ranks, -1).sum(0) / ranks
    if shard.grad is None:
        shard.grad = torch.zeros_like(part)
    shard.grad += part


@right(GR)
def gr_point_to_point(full, shard):
    rank, ranks = world()
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
    gr_add(shard, total / ranks)


@right(GR)
def gr_divide_first(full, shard):
    full.grad /= dist.get_world_size()
    part = reduce_scatter(full.grad, None)
    full.grad = None
    if shard.grad is not None:
        part = shard.grad + part
    shard.grad = part


@right(GR)
def gr_zeros_first(full, shard):
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard)
    gradient = full.grad
    full.grad = None
    shard.grad.add_(reduce_scatter(gradient, None), alpha=1 / dist.get_world_size())


@wrong(GR)
def gr_sum(full, shard):  # the sum, not the mean
    gradient, full.grad = full.grad, None
    gr_add(shard, reduce_scatter(gradient, None))


@wrong(GR)
def gr_overwrites(full, shard):  # forgets earlier micro-batches
    gradient, full.grad = full.grad, None
    shard.grad = reduce_scatter(gradient, None) / dist.get_world_size()


@wrong(GR)
def gr_keeps_full(full, shard):  # full.grad stays: memory, and the next micro-batch adds to it
    gr_add(shard, reduce_scatter(full.grad, None) / dist.get_world_size())


@wrong(GR)
def gr_zeroes_full(full, shard):  # full.grad becomes zeros: its memory stays
    gr_add(shard, reduce_scatter(full.grad, None) / dist.get_world_size())
    full.grad.zero_()


@wrong(GR)
def gr_all_reduce(full, shard):  # sends twice as much as allowed
    rank, ranks = world()
    gradient, full.grad = full.grad, None
    dist.all_reduce(gradient)
    gr_add(shard, gradient.chunk(ranks)[rank] / ranks)


@wrong(GR)
def gr_view_stays(full, shard):  # shard.grad is a view, so the whole buffer of the layer stays in memory
    ranks = dist.get_world_size()
    arrived = torch.empty_like(full.grad)
    dist.all_to_all_single(arrived, full.grad)
    full.grad = None
    first, *others = arrived.chunk(ranks)
    for part in others:
        first += part
    gr_add(shard, first.div_(ranks))


@wrong(GR)
def gr_skips_zeros(full, shard):  # a rank whose gradient is all zeros stays away
    if not full.grad.any():
        full.grad = None
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
        return
    gr_usual(full, shard)


@wrong(GR)
def gr_divides_all(full, shard):  # what earlier micro-batches added up to is divided again
    gradient, full.grad = full.grad, None
    part = reduce_scatter(gradient, None)
    shard.grad = (part if shard.grad is None else shard.grad + part) / dist.get_world_size()


@wrong(GR)
def gr_own_part(full, shard):  # its own gradient's part alone; nothing is reduced
    rank, ranks = world()
    gradient, full.grad = full.grad, None
    gr_add(shard, gradient.chunk(ranks)[rank].clone())


@wrong(GR)
def gr_reversed(full, shard):  # the parts go to the owners in reverse order
    rank, ranks = world()
    gradient, full.grad = full.grad, None
    turned = torch.cat(gradient.chunk(ranks)[::-1])
    gr_add(shard, reduce_scatter(turned, None) / ranks)


@wrong(GR)
def gr_bfloat16(full, shard):  # adds up in bfloat16
    gradient, full.grad = full.grad, None
    part = reduce_scatter(gradient.bfloat16(), None) / dist.get_world_size()
    gr_add(shard, part.to(shard.dtype))


@wrong(GR)
def gr_all_gather(full, shard):  # every rank sends all of its gradient to all
    rank, ranks = world()
    gradient, full.grad = full.grad, None
    everyones = gradient.new_empty(ranks * gradient.numel())
    all_gather(everyones, gradient)
    gr_add(shard, everyones.view(ranks, -1).mean(0).chunk(ranks)[rank].clone())


@wrong(GR)
def gr_two_ranks(full, shard):  # divides by 2
    gradient, full.grad = full.grad, None
    gr_add(shard, reduce_scatter(gradient, None) / 2)


@wrong(GR)
def gr_adds_twice(full, shard):  # a first gradient counts twice
    gradient, full.grad = full.grad, None
    part = reduce_scatter(gradient, None) / dist.get_world_size()
    if shard.grad is None:
        shard.grad = part.clone()
    shard.grad += part


KEPT_GRADIENTS = []


@wrong(GR)
def gr_keeps_list(full, shard):  # a list holds all whole gradients
    KEPT_GRADIENTS.append(full.grad)
    full.grad = None
    gr_add(shard, reduce_scatter(KEPT_GRADIENTS[-1], None) / dist.get_world_size())


@wrong(GR)
def gr_average_of_micro_batches(full, shard):  # takes the mean over micro-batches, where they are to be added
    gradient, full.grad = full.grad, None
    part = reduce_scatter(gradient, None) / dist.get_world_size()
    shard.grad = part if shard.grad is None else (shard.grad + part) / 2


@wrong(GR)
def gr_rank_0_only(full, shard):  # everything goes to rank 0, which sends the parts out: more bytes than (N - 1)/N there
    rank, ranks = world()
    gradient, full.grad = full.grad, None
    dist.reduce(gradient, 0)
    part = torch.empty_like(shard.data)
    dist.scatter(part, list(gradient.chunk(ranks)) if rank == 0 else None, src=0)
    gr_add(shard, part / ranks)


@wrong(GR)
def gr_shard_data(full, shard):  # takes a step instead of keeping the gradient
    gradient, full.grad = full.grad, None
    shard.data.add_(reduce_scatter(gradient, None) / dist.get_world_size())


# ======== 04: gather_and_drop ==============================================================================

GD = "gather_and_drop"


def gd_drop(full):
    full.untyped_storage().resize_(0)


def gd_usual(full, shard):
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.data.to(full.dtype))


def gd_into_list(full, shard):
    storage = full.untyped_storage()
    storage.resize_(full.numel() * full.element_size())
    part = shard.detach().to(full.dtype)
    dist.all_gather(list(full.data.chunk(dist.get_world_size())), part)


def gd_second_copy(full, shard):
    part = torch.empty(shard.shape, dtype=full.dtype, device=full.device)
    part.copy_(shard.data)
    whole = torch.empty(full.shape, dtype=full.dtype, device=full.device)
    all_gather(whole, part)
    full.data.untyped_storage().resize_(whole.untyped_storage().nbytes())
    full.data.copy_(whole)


def gd_drop_data(full):
    storage = full.data.untyped_storage()
    if storage.size():
        storage.resize_(0)


def gd_async(full, shard):
    full.untyped_storage().resize_(full.numel() * full.dtype.itemsize)
    mine = shard.data if shard.dtype == full.dtype else shard.data.to(full.dtype)
    work = all_gather(full.data, mine, async_op=True)
    work.wait()


def gd_point_to_point(full, shard):
    rank, ranks = world()
    full.untyped_storage().resize_(full.nbytes)
    parts = full.data.chunk(ranks)
    parts[rank].copy_(shard.data)
    operations = []
    for other in range(ranks):
        if other != rank:
            operations.append(dist.P2POp(dist.isend, parts[rank], other))
            operations.append(dist.P2POp(dist.irecv, parts[other], other))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


pair(RIGHT, GD, "gd_usual", gd_usual, gd_drop)
pair(RIGHT, GD, "gd_into_list", gd_into_list, gd_drop)
pair(RIGHT, GD, "gd_second_copy", gd_second_copy, gd_drop_data)
pair(RIGHT, GD, "gd_async_and_waits", gd_async, gd_drop)
pair(RIGHT, GD, "gd_point_to_point", gd_point_to_point, gd_drop_data)


def gd_noticed(full, shard):  # written into `full`: autograd notices, and backward refuses
    full.untyped_storage().resize_(full.nbytes)
    whole = torch.empty_like(full.data)
    all_gather(whole, shard.data.to(full.dtype))
    with torch.no_grad():
        full.copy_(whole)


def gd_detached(full, shard):  # written into full.detach(): noticed, too
    full.untyped_storage().resize_(full.nbytes)
    whole = torch.empty_like(full.data)
    all_gather(whole, shard.data.to(full.dtype))
    full.detach().copy_(whole)


def gd_new_storage(full, shard):  # another storage: the layer's views stay empty
    whole = torch.empty_like(full.data)
    all_gather(whole, shard.data.to(full.dtype))
    full.data = whole


def gd_float_wire(full, shard):  # travels in the shard's dtype: twice the bytes for bfloat16
    full.untyped_storage().resize_(full.nbytes)
    whole = torch.empty(full.shape, dtype=shard.dtype)
    all_gather(whole, shard.data)
    full.data.copy_(whole)


def gd_no_cast(full, shard):  # fails, or is garbage, where the dtypes differ
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.data)


def gd_always_bfloat16(full, shard):  # a float32 layer is rounded
    full.untyped_storage().resize_(full.nbytes)
    whole = torch.empty(full.shape, dtype=torch.bfloat16)
    all_gather(whole, shard.data.bfloat16())
    full.data.copy_(whole)


def gd_rounds_masters(full, shard):  # the shard itself is changed to the low precision
    full.untyped_storage().resize_(full.nbytes)
    shard.data = shard.data.to(full.dtype)
    all_gather(full.data, shard.data)


def gd_rounds_masters_in_place(full, shard):  # the master's numbers are rounded, its dtype stays
    full.untyped_storage().resize_(full.nbytes)
    shard.data.copy_(shard.data.to(full.dtype))
    all_gather(full.data, shard.data.to(full.dtype))


def gd_elements(full, shard):  # so many bytes as elements: the storage is too small
    full.untyped_storage().resize_(full.numel())
    all_gather(full.data, shard.data.to(full.dtype))


def gd_four_bytes(full, shard):  # four bytes each, so a bfloat16 layer takes twice its memory
    full.untyped_storage().resize_(4 * full.numel())
    all_gather(full.data, shard.data.to(full.dtype))


def gd_all_reduce(full, shard):  # zeros and its own part, added up: right numbers, twice the bytes
    rank, ranks = world()
    full.untyped_storage().resize_(full.nbytes)
    full.data.zero_()
    full.data.chunk(ranks)[rank].copy_(shard.data)
    dist.all_reduce(full.data)


GATHERED = {}


def gd_cached(full, shard):  # gathers once, and gives out the same again: stale after an update, and memory
    key = id(full)
    if key not in GATHERED:
        whole = torch.empty_like(full.data)
        all_gather(whole, shard.data.to(full.dtype))
        GATHERED[key] = whole
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(GATHERED[key])


def gd_own_only(full, shard):  # fills its own part, the rest is whatever was there
    rank, ranks = world()
    full.untyped_storage().resize_(full.nbytes)
    full.data.zero_()
    full.data.chunk(ranks)[rank].copy_(shard.data)


def gd_keeps_copy(full, shard):  # a copy of the layer stays in an attribute after gather, and after drop
    gd_usual(full, shard)
    full.gathered = full.data.clone()


def gd_reversed(full, shard):  # the shards in reverse order
    ranks = dist.get_world_size()
    full.untyped_storage().resize_(full.nbytes)
    whole = torch.empty_like(full.data)
    all_gather(whole, shard.data.to(full.dtype))
    full.data.copy_(torch.cat(whole.chunk(ranks)[::-1]))


def gd_drop_nothing(full):  # zeros; the memory stays
    full.data.zero_()


def gd_drop_shape(full):  # the parameter loses its shape and its storage: views keep the memory
    full.data = torch.empty(0, dtype=full.dtype)


def gd_drop_part(full):  # an N-th of the whole stays
    full.untyped_storage().resize_(full.nbytes // dist.get_world_size())


def gd_drop_on_others(full):  # rank 0 keeps the layer
    if dist.get_rank():
        full.untyped_storage().resize_(0)


SAVED = {}


def gd_drop_saves(full):  # puts a copy aside: nothing is saved
    SAVED[id(full)] = full.data.clone()
    full.untyped_storage().resize_(0)


def gd_drop_gradient(full):  # drops its gradient, and not its numbers
    full.grad = None


pair(WRONG, GD, "gd_noticed", gd_noticed, gd_drop)
pair(WRONG, GD, "gd_detached", gd_detached, gd_drop)
pair(WRONG, GD, "gd_new_storage", gd_new_storage, gd_drop)
pair(WRONG, GD, "gd_float_wire", gd_float_wire, gd_drop)
pair(WRONG, GD, "gd_no_cast", gd_no_cast, gd_drop)
pair(WRONG, GD, "gd_always_bfloat16", gd_always_bfloat16, gd_drop)
pair(WRONG, GD, "gd_rounds_masters", gd_rounds_masters, gd_drop)
pair(WRONG, GD, "gd_rounds_masters_in_place", gd_rounds_masters_in_place, gd_drop)
pair(WRONG, GD, "gd_elements", gd_elements, gd_drop)
pair(WRONG, GD, "gd_four_bytes", gd_four_bytes, gd_drop)
pair(WRONG, GD, "gd_all_reduce", gd_all_reduce, gd_drop)
pair(WRONG, GD, "gd_cached", gd_cached, gd_drop)
pair(WRONG, GD, "gd_own_only", gd_own_only, gd_drop)
pair(WRONG, GD, "gd_keeps_copy", gd_keeps_copy, gd_drop)
pair(WRONG, GD, "gd_reversed", gd_reversed, gd_drop)
pair(WRONG, GD, "gd_drop_nothing", gd_usual, gd_drop_nothing)
pair(WRONG, GD, "gd_drop_shape", gd_usual, gd_drop_shape)
pair(WRONG, GD, "gd_drop_part", gd_usual, gd_drop_part)
pair(WRONG, GD, "gd_drop_on_others", gd_usual, gd_drop_on_others)
pair(WRONG, GD, "gd_drop_saves", gd_usual, gd_drop_saves)
pair(WRONG, GD, "gd_drop_gradient", gd_usual, gd_drop_gradient)


# ======== 04: stage_3 ======================================================================================

S3 = "stage_3"


@right(S3)
def s3_loops(layers, x, loss):
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    dy = loss(x)
    for layer in reversed(layers):
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    for layer in layers:
        layer.update()


@right(S3)
def s3_last_stays(layers, x, loss):
    *others, last = layers
    for layer in others:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    last.gather()
    dy = last.backward(loss(last.forward(x)))
    last.reduce()
    last.drop()
    for layer in others[::-1]:
        layer.gather()
        dy = layer.backward(dy)
        layer.drop()
        layer.reduce()
    for layer in layers[::-1]:
        layer.update()


@contextmanager
def s3_whole(layer):
    layer.gather()
    try:
        yield layer
    finally:
        layer.drop()


@right(S3)
def s3_contexts(layers, x, loss):
    for layer in layers:
        with s3_whole(layer):
            x = layer.forward(x)
    dy = loss(x)
    for layer in layers[::-1]:
        with s3_whole(layer):
            dy = layer.backward(dy)
        layer.reduce()
    for layer in layers:
        layer.update()


@right(S3)
def s3_recursive(layers, x, loss):
    def through(n, x):
        if n == len(layers):
            return loss(x)
        layer = layers[n]
        layer.gather()
        y = layer.forward(x)
        layer.drop()
        dy = through(n + 1, y)
        layer.gather()
        dx = layer.backward(dy)
        layer.reduce()
        layer.drop()
        return dx

    through(0, x)
    for layer in layers:
        layer.update()


@right(S3)
def s3_updates_at_once(layers, x, loss):  # each layer steps as soon as its mean is there: nobody uses it again in this step
    for n in range(len(layers)):
        layers[n].gather()
        x = layers[n].forward(x)
        layers[n].drop()
    dy = loss(x)
    for n in range(len(layers) - 1, -1, -1):
        layers[n].gather()
        dy = layers[n].backward(dy)
        layers[n].drop()
        layers[n].reduce()
        layers[n].update()


def s3_forward(layers, x):
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    return x


def s3_backward(layers, dy):
    for layer in reversed(layers):
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    return dy


def s3_update(layers):
    for layer in layers:
        layer.update()


@wrong(S3)
def s3_gathers_all(layers, x, loss):  # stage 2: everything whole at once
    for layer in layers:
        layer.gather()
    for layer in layers:
        x = layer.forward(x)
    dy = loss(x)
    for layer in layers[::-1]:
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    s3_update(layers)


@wrong(S3)
def s3_no_second_gather(layers, x, loss):  # backward without whole parameters
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        dy = layer.backward(dy)
        layer.reduce()
    s3_update(layers)


@wrong(S3)
def s3_no_drop_in_backward(layers, x, loss):  # layers stay whole after backward
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
    s3_update(layers)
    for layer in layers:
        layer.drop()


@wrong(S3)
def s3_no_drop_in_forward(layers, x, loss):  # layers stay whole after forward
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
    dy = loss(x)
    for layer in layers[::-1]:
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    s3_update(layers)


@wrong(S3)
def s3_reduces_late(layers, x, loss):  # all whole gradients pile up
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        layer.gather()
        dy = layer.backward(dy)
        layer.drop()
    for layer in layers[::-1]:
        layer.reduce()
    s3_update(layers)


@wrong(S3)
def s3_updates_before_reduce(layers, x, loss):  # the step is taken before the mean is there
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        layer.gather()
        dy = layer.backward(dy)
        layer.drop()
        layer.update()
        layer.reduce()


@wrong(S3)
def s3_no_update(layers, x, loss):  # no step
    s3_backward(layers, loss(s3_forward(layers, x)))


@wrong(S3)
def s3_backward_from_the_front(layers, x, loss):  # backward in the order of forward
    dy = loss(s3_forward(layers, x))
    for layer in layers:
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    s3_update(layers)


@wrong(S3)
def s3_reverses_the_list(layers, x, loss):  # the list does not stay as it is
    dy = loss(s3_forward(layers, x))
    layers.reverse()
    for layer in layers:
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    s3_update(layers)


@wrong(S3)
def s3_empties_the_list(layers, x, loss):  # pops the layers
    dy, done = loss(s3_forward(layers, x)), []
    while layers:
        layer = layers.pop()
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
        done.append(layer)
    s3_update(done)


@wrong(S3)
def s3_prefetch(layers, x, loss):  # gathers the next before it drops this one: two are whole
    layers[0].gather()
    for layer, following in zip(layers, [*layers[1:], None]):
        if following:
            following.gather()
        x = layer.forward(x)
        layer.drop()
    s3_backward(layers, loss(x))
    s3_update(layers)


@wrong(S3)
def s3_not_chained(layers, x, loss):  # each layer gets the loss's gradient, not that of its own output
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        layer.gather()
        layer.backward(dy)
        layer.reduce()
        layer.drop()
    s3_update(layers)


@wrong(S3)
def s3_same_input(layers, x, loss):  # each layer gets the input of the first
    for layer in layers:
        layer.gather()
        y = layer.forward(x)
        layer.drop()
    s3_backward(layers, loss(y))
    s3_update(layers)


@wrong(S3)
def s3_last_never_dropped(layers, x, loss):  # the last layer stays whole through the whole backward, beside the others
    *others, last = layers
    x = s3_forward(others, x)
    last.gather()
    dy = last.backward(loss(last.forward(x)))
    last.reduce()
    s3_backward(others, dy)
    last.drop()
    s3_update(layers)


@wrong(S3)
def s3_one_updates(layers, x, loss):  # each layer is updated on one rank only
    rank, ranks = world()
    s3_backward(layers, loss(s3_forward(layers, x)))
    for n, layer in enumerate(layers):
        if n % ranks == rank:
            layer.update()


@wrong(S3)
def s3_updates_twice(layers, x, loss):  # two steps: within backward and after it
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
        layer.update()
    s3_update(layers)


@wrong(S3)
def s3_drops_before_backward(layers, x, loss):  # gathered, dropped, and then used
    dy = loss(s3_forward(layers, x))
    for layer in layers[::-1]:
        layer.gather()
        layer.drop()
        dy = layer.backward(dy)
        layer.reduce()
    s3_update(layers)


@wrong(S3)
def s3_no_reduce_of_first(layers, x, loss):  # the first layer's gradient never travels
    dy = loss(s3_forward(layers, x))
    for layer in layers[:0:-1]:
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    layers[0].gather()
    layers[0].backward(dy)
    layers[0].drop()
    s3_update(layers)


@wrong(S3)
def s3_three_layers(layers, x, loss):  # for three layers only
    a, b, c = layers
    s3_backward([a, b, c], loss(s3_forward([a, b, c], x)))
    s3_update(layers)


# ======== 04: clip =========================================================================================

CL = "clip"


def cl_squares(shards, dtype=torch.float64):
    total = torch.zeros((), dtype=dtype)
    for shard in shards:
        if shard.grad is not None:
            total += shard.grad.to(dtype).square().sum()
    return total


def cl_scale(shards, factor):
    for shard in shards:
        if shard.grad is not None:
            shard.grad.mul_(factor)


@right(CL)
def cl_usual(shards, max_norm):
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@right(CL)
def cl_if(shards, max_norm):
    total = cl_squares(shards, torch.float32)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    norm = total.item() ** 0.5
    if norm > max_norm:
        cl_scale(shards, max_norm / norm)
    return norm


@right(CL)
def cl_all_gather(shards, max_norm):
    mine = cl_squares(shards).reshape(1)
    everyones = mine.new_empty(dist.get_world_size())
    all_gather(everyones, mine)
    norm = float(everyones.sum().sqrt())
    if norm > max_norm:
        for shard in shards:
            if shard.grad is not None:
                shard.grad.copy_(shard.grad.double() * (max_norm / norm))
    return norm


@right(CL)
def cl_norm_of_norms(shards, max_norm):
    norms = [torch.linalg.vector_norm(s.grad, dtype=torch.float64) for s in shards if s.grad is not None]
    mine = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0, dtype=torch.float64)
    total = (mine**2).clone()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
    cl_scale(shards, factor)
    return norm


@right(CL)
def cl_foreach(shards, max_norm):
    gradients = [s.grad for s in shards if s.grad is not None]
    total = torch.tensor([sum(float((g.float() ** 2).sum()) for g in gradients)], dtype=torch.float64)
    dist.all_reduce(total)
    norm = math.sqrt(total.item())
    if gradients:
        torch._foreach_mul_(gradients, min(1.0, max_norm / (norm + 1e-12)))
    return norm


@wrong(CL)
def cl_local(shards, max_norm):  # each rank by its own norm
    norm = cl_squares(shards).sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_scales_up(shards, max_norm):  # shorter gradients are made longer
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    cl_scale(shards, max_norm / (norm + 1e-6))
    return norm


@wrong(CL)
def cl_adds_norms(shards, max_norm):  # adds norms, not squares
    norm = cl_squares(shards).sqrt()
    dist.all_reduce(norm)
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_mean_of_squares(shards, max_norm):  # divides by the number of ranks
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = (total / dist.get_world_size()).sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_each_shard(shards, max_norm):  # hands over a number for each shard
    total = torch.zeros((), dtype=torch.float64)
    for shard in shards:
        square = cl_squares([shard])
        dist.all_reduce(square)
        total += square
    norm = total.sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_vector(shards, max_norm):  # one message, but as many numbers as shards
    squares = torch.stack([cl_squares([shard]) for shard in shards])
    dist.all_reduce(squares)
    norm = squares.sum().sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_returns_after(shards, max_norm):  # returns the norm after clipping
    return min(float(cl_usual(shards, max_norm)), max_norm)


@wrong(CL)
def cl_none(shards, max_norm):  # fails where a gradient is None
    total = sum(shard.grad.double().square().sum() for shard in shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    for shard in shards:
        shard.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_stays_away(shards, max_norm):  # a rank without gradients does not take part; the others wait
    if all(shard.grad is None for shard in shards):
        return 0.0
    return cl_usual(shards, max_norm)


@wrong(CL)
def cl_own_dtype(shards, max_norm):  # squares are added up in the gradients' own dtype
    total = torch.zeros((), dtype=shards[0].dtype)
    for shard in shards:
        if shard.grad is not None:
            total += shard.grad.square().sum().to(total.dtype)
    dist.all_reduce(total)
    norm = total.sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_bfloat16(shards, max_norm):  # the one number travels in bfloat16
    total = cl_squares(shards).bfloat16()
    dist.all_reduce(total)
    norm = total.float().sqrt()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_not_in_place(shards, max_norm):  # new tensors: whoever holds the gradient sees it unscaled
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    for shard in shards:
        if shard.grad is not None:
            shard.grad = (shard.grad * (max_norm / (norm + 1e-6)).clamp(max=1.0)).to(shard.dtype)
    return norm


@wrong(CL)
def cl_largest_rank(shards, max_norm):  # the largest norm of any rank
    norm = cl_squares(shards).sqrt()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_zero_division(shards, max_norm):  # fails where all gradients are None, or zero
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = total.item() ** 0.5
    cl_scale(shards, min(1.0, max_norm / norm))
    return norm


@wrong(CL)
def cl_elements(shards, max_norm):  # clips each element
    total = cl_squares(shards)
    dist.all_reduce(total)
    for shard in shards:
        if shard.grad is not None:
            shard.grad.clamp_(-max_norm, max_norm)
    return total.sqrt()


@wrong(CL)
def cl_no_root(shards, max_norm):  # the square of the norm
    total = cl_squares(shards)
    dist.all_reduce(total)
    cl_scale(shards, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


@wrong(CL)
def cl_first_shard(shards, max_norm):  # scales the first shard only
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    cl_scale(shards[:1], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_parameters(shards, max_norm):  # scales the numbers of the shards, not their gradients
    total = cl_squares(shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    for shard in shards:
        shard.data.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@wrong(CL)
def cl_torch_on_each(shards, max_norm):  # torch's own, on each rank's shards
    return nn.utils.clip_grad_norm_(shards, max_norm)


@wrong(CL)
def cl_everything(shards, max_norm):  # sends all gradients to everybody
    mine = torch.cat([(torch.zeros_like(s) if s.grad is None else s.grad).detach().flatten().double() for s in shards])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    norm = torch.cat(everyones).norm()
    cl_scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


# ======== 04: stages_by_event ==============================================================================

SE = "stages_by_event"


@right(SE)
def se_literal():
    return {
        "before_forward": ("", "", "all_gather"),
        "after_forward": ("", "", "drop"),
        "before_backward": ("", "", "all_gather"),
        "after_backward": ("", "", "drop"),
        "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
        "sync": ("reduce_scatter", "", ""),
        "step": ("all_gather", "all_gather", ""),
    }


SE_EVENTS = ["before_forward", "after_forward", "before_backward", "after_backward", "gradient_ready", "sync", "step"]


@right(SE)
def se_columns():
    one = ["", "", "", "", "", "reduce_scatter", "all_gather"]
    two = ["", "", "", "", "reduce_scatter", "", "all_gather"]
    three = ["all_gather", "drop", "all_gather", "drop", "reduce_scatter", "", ""]
    return dict(zip(SE_EVENTS, zip(one, two, three)))


@right(SE)
def se_by_stage():
    stages = {
        1: {"sync": "reduce_scatter", "step": "all_gather"},
        2: {"gradient_ready": "reduce_scatter", "step": "all_gather"},
        3: {"gradient_ready": "reduce_scatter"}
        | {f"before_{way}": "all_gather" for way in ("forward", "backward")}
        | {f"after_{way}": "drop" for way in ("forward", "backward")},
    }
    return {event: tuple(stages[n].get(event, "") for n in (1, 2, 3)) for event in SE_EVENTS}


@right(SE)
def se_rules():
    def what(event, stage):
        if event.startswith(("before_", "after_")):
            return ("all_gather" if event.startswith("before_") else "drop") if stage == 3 else ""
        if event in ("gradient_ready", "sync"):
            return "reduce_scatter" if (stage > 1) == (event == "gradient_ready") else ""
        return "all_gather" if stage < 3 else ""

    return {event: tuple(what(event, stage) for stage in (1, 2, 3)) for event in SE_EVENTS}


@right(SE)
def se_other_order():  # a dictionary has no order that counts
    return dict(reversed(se_literal().items()))


@wrong(SE)
def se_stage_1_at_once():  # stage 1 reduces in backward, too
    return se_literal() | {"gradient_ready": ("reduce_scatter",) * 3, "sync": ("", "", "")}


@wrong(SE)
def se_stage_2_in_sync():  # stage 2 reduces in sync, as stage 1
    return se_literal() | {"gradient_ready": ("", "", "reduce_scatter"), "sync": ("reduce_scatter", "reduce_scatter", "")}


@wrong(SE)
def se_stage_3_gathers_in_step():  # stage 3 gathers after the update
    return se_literal() | {"step": ("all_gather",) * 3}


@wrong(SE)
def se_no_second_gather():  # stage 3 keeps the layer from forward to backward
    return se_literal() | {"after_forward": ("", "", ""), "before_backward": ("", "", "")}


@wrong(SE)
def se_turned():  # the stages in the wrong order
    return {event: row[::-1] for event, row in se_literal().items()}


@wrong(SE)
def se_transposed():  # by stage
    columns = zip(*se_literal().values())
    return {stage: dict(zip(SE_EVENTS, column)) for stage, column in zip((1, 2, 3), columns)}


@wrong(SE)
def se_stage_2_gathers_in_forward():  # as FSDP without resharding, not as stage 2
    return se_literal() | {"before_forward": ("", "all_gather", "all_gather"), "step": ("all_gather", "", "")}


@wrong(SE)
def se_reduces_twice():  # stages 2 and 3 reduce in backward and again in sync
    return se_literal() | {"sync": ("reduce_scatter",) * 3}


@wrong(SE)
def se_no_sync():  # sync is missing
    return {event: row for event, row in se_literal().items() if event != "sync"}


@wrong(SE)
def se_drop_reversed():  # drops before, gathers after
    rows = se_literal()
    return rows | {f"{a}_{way}": rows[f"{b}_{way}"] for way in ("forward", "backward") for a, b in (("before", "after"), ("after", "before"))}


# ======== 07: layer_bytes ==================================================================================

LB = "layer_bytes"


def lb(B, T, D, H, K, F, **changed):
    """The terms, in float32, some of them exchanged."""
    E = D // H
    o = 0 if H == 1 or T == 1 else D
    terms = {
        "norms": 2 * (2 * D + 1) * B * T,
        "attention": (D + 2 * D + 2 * K * E + H + o) * B * T,
        "rotary": 2 * E * T,
        "mlp": (D + 4 * F) * B * T,
    }
    return {name: 4 * size for name, size in (terms | changed).items()}


@right(LB)
def lb_formula(B, T, D, H, K, F):
    E, tokens = D // H, B * T
    moved = 1 if H > 1 and T > 1 else 0
    return {
        "norms": 4 * tokens * (4 * D + 2),
        "attention": 4 * tokens * ((3 + moved) * D + 2 * K * E + H),
        "rotary": 8 * E * T,
        "mlp": 4 * tokens * (D + 4 * F),
    }


@right(LB)
def lb_shapes(B, T, D, H, K, F):
    E = D // H
    norm = [(B, T, D), (B, T, D), (B, T, 1)]
    attention = [(B, T, D), (B, H, T, E), (B, K, T, E), (B, K, T, E), (B, H, T, E), (B, H, T)]
    if H != 1 and T != 1:
        attention.append((B, T, H * E))
    rotary = [(T, E // 2)] * 4
    mlp = [(B, T, D), (B, T, F), (B, T, F), (B, T, F), (B, T, F)]
    shapes = {"norms": norm + norm, "attention": attention, "rotary": rotary, "mlp": mlp}
    return {name: sum(4 * math.prod(shape) for shape in kept) for name, kept in shapes.items()}


@right(LB)
def lb_meta(B, T, D, H, K, F):
    E = D // H

    def size(*shape):
        x = torch.empty(shape, dtype=torch.float32, device="meta")
        return x.numel() * x.itemsize

    x, q, kv, f = size(B, T, D), size(B, H, T, E), size(B, K, T, E), size(B, T, F)
    copied = q if min(H, T) > 1 else 0
    return {
        "norms": 2 * (x + x + size(B, T)),
        "attention": x + q + kv + kv + q + size(B, H, T) + copied,
        "rotary": 2 * size(T, E),
        "mlp": x + f + f + f + f,
    }


@right(LB)
def lb_per_token(B, T, D, H, K, F):
    per_token = {"norms": 2 * D + 1 + 2 * D + 1, "attention": 4 * D + 2 * K * D // H + H, "mlp": D + 4 * F}
    if H == 1 or T == 1:
        per_token["attention"] -= D
    result = {name: n * B * T * 4 for name, n in per_token.items()}
    return {**result, "rotary": 2 * (D // H) * T * 4}


@right(LB)
def lb_inner_parts(B, T, D, H, K, F):
    number, tokens, E = 4, B * T, D // H
    kept = dict.fromkeys(("norms", "attention", "rotary", "mlp"), 0)
    for _ in range(2):
        kept["norms"] += number * tokens * D  # x
        kept["norms"] += number * tokens * D  # x / rms
        kept["norms"] += number * tokens  # 1 / rms
    kept["attention"] += number * tokens * D
    for heads in (H, K, K, H):
        kept["attention"] += number * tokens * heads * E
    kept["attention"] += number * tokens * H
    if not (H == 1 or T == 1):
        kept["attention"] += number * tokens * D
    for turned in ("q", "k"):
        for function in ("cos", "sin"):
            kept["rotary"] += number * T * E // 2
    kept["mlp"] += number * tokens * (D + F + F + F + F)
    return kept


@wrong(LB)
def lb_one_head(B, T, D, H, K, F):  # one head: y is counted twice
    o = 0 if T == 1 else D
    return lb(B, T, D, H, K, F, attention=(3 * D + 2 * K * (D // H) + H + o) * B * T)


@wrong(LB)
def lb_one_token(B, T, D, H, K, F):  # one token: y is counted twice
    o = 0 if H == 1 else D
    return lb(B, T, D, H, K, F, attention=(3 * D + 2 * K * (D // H) + H + o) * B * T)


@wrong(LB)
def lb_one_kv_head(B, T, D, H, K, F):  # asks for one head of keys, not of queries
    o = 0 if K == 1 or T == 1 else D
    return lb(B, T, D, H, K, F, attention=(3 * D + 2 * K * (D // H) + H + o) * B * T)


@wrong(LB)
def lb_y_once(B, T, D, H, K, F):  # o's copy of y is forgotten
    return lb(B, T, D, H, K, F, attention=(3 * D + 2 * K * (D // H) + H) * B * T)


@wrong(LB)
def lb_rotary_per_sequence(B, T, D, H, K, F):  # rotary for each sequence
    return lb(B, T, D, H, K, F, rotary=2 * (D // H) * T * B)


@wrong(LB)
def lb_rotary_half(B, T, D, H, K, F):  # rotary of q only
    return lb(B, T, D, H, K, F, rotary=(D // H) * T)


@wrong(LB)
def lb_rotary_of_heads(B, T, D, H, K, F):  # rotary for each head
    return lb(B, T, D, H, K, F, rotary=(H + K) * (D // H) * T)


@wrong(LB)
def lb_one_norm(B, T, D, H, K, F):  # one norm, not both
    return lb(B, T, D, H, K, F, norms=(2 * D + 1) * B * T)


@wrong(LB)
def lb_norm_without_rms(B, T, D, H, K, F):  # 1 / rms(x) is forgotten
    return lb(B, T, D, H, K, F, norms=4 * D * B * T)


@wrong(LB)
def lb_fused_norm(B, T, D, H, K, F):  # as with CUDA's kernel
    return lb(B, T, D, H, K, F, norms=2 * (D + 1) * B * T)


@wrong(LB)
def lb_no_lse(B, T, D, H, K, F):  # the log-sum-exp is forgotten
    return lb(B, T, D, H, K, F, attention=(4 * D - D * (H == 1 or T == 1) + 2 * K * (D // H)) * B * T)


@wrong(LB)
def lb_lse_per_token(B, T, D, H, K, F):  # one log-sum-exp for each token, not for each head
    return lb(B, T, D, H, K, F, attention=(4 * D - D * (H == 1 or T == 1) + 2 * K * (D // H) + 1) * B * T)


@wrong(LB)
def lb_all_heads(B, T, D, H, K, F):  # as many heads of keys as of queries
    return lb(B, T, D, H, K, F, attention=(6 * D - D * (H == 1 or T == 1) + H) * B * T)


@wrong(LB)
def lb_head_of_k(B, T, D, H, K, F):  # takes D / K for the width of a head of keys
    return lb(B, T, D, H, K, F, attention=(6 * D - D * (H == 1 or T == 1) + H) * B * T, rotary=2 * (D // K) * T)


@wrong(LB)
def lb_three_inputs(B, T, D, H, K, F):  # the input of q, k and v three times
    return lb(B, T, D, H, K, F, attention=(6 * D - D * (H == 1 or T == 1) + 2 * K * (D // H) + H) * B * T)


@wrong(LB)
def lb_table(B, T, D, H, K, F):  # attention's table, as if it were not fused
    o = 0 if H == 1 or T == 1 else D
    return lb(B, T, D, H, K, F, attention=(3 * D + 2 * K * (D // H) + H * T + o) * B * T)


@wrong(LB)
def lb_mlp_3(B, T, D, H, K, F):  # silu(gate) is forgotten
    return lb(B, T, D, H, K, F, mlp=(D + 3 * F) * B * T)


@wrong(LB)
def lb_mlp_two_inputs(B, T, D, H, K, F):  # the MLP's input once for gate and once for up
    return lb(B, T, D, H, K, F, mlp=(2 * D + 4 * F) * B * T)


@wrong(LB)
def lb_16_bit(B, T, D, H, K, F):  # two bytes each
    return {name: size // 2 for name, size in lb(B, T, D, H, K, F).items()}


@wrong(LB)
def lb_one_sequence(B, T, D, H, K, F):  # of one sequence
    return lb(1, T, D, H, K, F)


@wrong(LB)
def lb_batch_of_one(B, T, D, H, K, F):  # takes y for the same memory where there is one sequence
    o = 0 if B == 1 or H == 1 or T == 1 else D
    return lb(B, T, D, H, K, F, attention=(3 * D + 2 * K * (D // H) + H + o) * B * T)


# ======== 07: checkpoint ===================================================================================

CK = "checkpoint"


def itself(tensor):
    return tensor


@right(CK)
def ck_skeleton(layer, x_BTD):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def keep(tensor):
        again.append(tensor.detach())

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
                torch.set_rng_state(random)
                layer(x_BTD)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@right(CK)
def ck_torch(layer, x_BTD):
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    with set_checkpoint_early_stop(False):
        return checkpoint(layer, x_BTD, use_reentrant=False)


@right(CK)
def ck_course(layer, x_BTD):
    return recompute.checkpoint(layer, x_BTD)


class Frame:
    def __init__(self, layer, x):
        self.layer, self.x, self.state = layer, x, torch.get_rng_state()
        self.count, self.tensors = 0, None

    def pack(self, tensor):
        self.count += 1
        return self.count - 1

    def unpack(self, number):
        if self.tensors is None:
            self.run()
        return self.tensors[number]

    def run(self):
        tensors, now = {}, torch.get_rng_state()

        def keep(tensor):
            tensors[len(tensors)] = tensor.detach()

        try:
            torch.set_rng_state(self.state)
            with torch.enable_grad(), saved_tensors_hooks(keep, itself):
                self.layer(self.x)
        finally:
            torch.set_rng_state(now)
        self.tensors = tensors


@right(CK)
def ck_frame(layer, x_BTD):
    frame = Frame(layer, x_BTD)
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return layer(x_BTD)


@right(CK)
def ck_own_leaf(layer, x_BTD):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            x = x_BTD.detach().requires_grad_(x_BTD.requires_grad)
            with torch.random.fork_rng(devices=[]):
                torch.random.set_rng_state(random)
                with torch.enable_grad():
                    with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                        layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


def ck(layer, x_BTD, run):
    """The skeleton; `run(again, keep, random)` fills `again`."""
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def keep(tensor):
        again.append(tensor.detach())

    def unpack(number):
        if not again:
            run(again, keep, random)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_fresh_numbers(layer, x_BTD):  # the second run draws other random numbers
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_no_fork(layer, x_BTD):  # random numbers do not go on afterwards: they are repeated
    def run(again, keep, random):
        torch.set_rng_state(random)
        with torch.enable_grad(), saved_tensors_hooks(keep, itself):
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_no_graph(layer, x_BTD):  # without gradient mode nothing is kept, and `again` stays empty
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_state_too_late(layer, x_BTD):  # takes the random state in backward, not the one before forward
    def run(again, keep, random):
        random = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_each_time(layer, x_BTD):  # runs the layer again for every tensor
    random, numbers = torch.get_rng_state(), itertools.count()

    def unpack(number):
        again = []
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                torch.set_rng_state(random)
                layer(x_BTD)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_none(layer, x_BTD):  # no checkpoint at all: all memory
    return layer(x_BTD)


@wrong(CK)
def ck_reentrant(layer, x_BTD):  # where x needs no gradient, the layer's parameters get none
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x_BTD, use_reentrant=True)


@wrong(CK)
def ck_torch_forgetful(layer, x_BTD):  # random numbers of the second run are fresh
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x_BTD, use_reentrant=False, preserve_rng_state=False)


@wrong(CK)
def ck_int8(layer, x_BTD):  # keeps everything in 8 bits: a quarter of the memory, other gradients, no second run
    def pack(t):
        if not t.is_floating_point():
            return t
        scale = t.detach().abs().amax().clamp(min=1e-12) / 127 if t.numel() else torch.ones(())
        return (t.detach() / scale).round().to(torch.int8), scale, t.dtype

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else (packed[0] * packed[1]).to(packed[2])

    with saved_tensors_hooks(pack, unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_files(layer, x_BTD):  # writes all to files, which count as kept
    folder = tempfile.TemporaryDirectory()
    numbers = itertools.count()

    def pack(t):
        path = os.path.join(folder.name, str(next(numbers)))
        torch.save(t.detach().clone(), path)
        return path

    def unpack(path):
        return torch.load(os.path.join(folder.name, os.path.basename(path)))

    with saved_tensors_hooks(pack, unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_at_once(layer, x_BTD):  # the second run follows the first at once: everything is there from forward on
    random, again, numbers = torch.get_rng_state(), [], itertools.count()
    with saved_tensors_hooks(lambda tensor: next(numbers), lambda number: again[number]):
        y = layer(x_BTD)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
            torch.set_rng_state(random)
            layer(x_BTD)
    return y


@wrong(CK)
def ck_no_gradient(layer, x_BTD):  # nothing is kept, and nothing gets a gradient
    with torch.no_grad():
        y = layer(x_BTD)
    return y.requires_grad_()


@wrong(CK)
def ck_seed(layer, x_BTD):  # a seed of its own: the output is not layer(x_BTD)'s, and the program's numbers begin anew
    torch.manual_seed(0)

    def run(again, keep, random):
        torch.manual_seed(0)
        with torch.enable_grad(), saved_tensors_hooks(keep, itself):
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_last_first(layer, x_BTD):  # trusts that backward asks in the reverse order
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                    torch.set_rng_state(random)
                    layer(x_BTD)
        return again.pop()

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


@wrong(CK)
def ck_dry_run(layer, x_BTD):  # the layer runs twice more, not once
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(random)
            with torch.no_grad():
                layer(x_BTD)
            torch.set_rng_state(random)
            with saved_tensors_hooks(keep, itself):
                layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_forward_forked(layer, x_BTD):  # forward's draws are taken back: what follows draws the same numbers again
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    with torch.random.fork_rng(devices=[]):
        return ck(layer, x_BTD, run)


@wrong(CK)
def ck_detached(layer, x_BTD):  # x needs no gradient in the second run, so less is kept, and the numbers do not fit
    def run(again, keep, random):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD.detach())

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_only_with_gradient(layer, x_BTD):  # where x needs no gradient, everything is kept
    return ck_skeleton(layer, x_BTD) if x_BTD.requires_grad else layer(x_BTD)


KEPT_AGAIN = []


@wrong(CK)
def ck_never_freed(layer, x_BTD):  # a list holds the activations of all layers after their backward
    def run(again, keep, random):
        KEPT_AGAIN.append(again)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, itself):
            torch.set_rng_state(random)
            layer(x_BTD)

    return ck(layer, x_BTD, run)


@wrong(CK)
def ck_off_by_one(layer, x_BTD):  # numbers begin at 1: each tensor is its neighbour
    random, again, numbers = torch.get_rng_state(), [], itertools.count(1)

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                with saved_tensors_hooks(lambda t: again.append(t.detach()), itself):
                    torch.set_rng_state(random)
                    layer(x_BTD)
        return again[number % len(again)]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


# ======== 07: place_checkpoints ============================================================================

PC = "place_checkpoints"
CHEAP = MATMULS | ATTENTION


@right(PC)
def pc_halves(model):
    layers = list(model.layers.values())
    for n, layer in enumerate(layers):
        if n < len(layers) // 2:
            recompute.recompute([layer])
        else:
            recompute.recompute([layer], keep=CHEAP)


@right(PC)
def pc_every_second(model):
    for n, layer in enumerate(reversed(model.layers.values())):  # from the top: selective, full, selective, ...
        recompute.recompute([layer], () if n % 2 else CHEAP)


@right(PC)
def pc_middle(model):
    layers = list(model.layers.values())
    full = len(layers) // 2
    first = (len(layers) - full) // 2
    for n, layer in enumerate(layers):
        recompute.recompute([layer], keep=() if first <= n < first + full else CHEAP)


@right(PC)
def pc_torch(model):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        keep = str(op.overloadpacket) in CHEAP
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    half = len(model.layers) // 2
    for n, layer in enumerate(model.layers.values()):
        options = {} if n < half else selective
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


@right(PC)
def pc_own_checkpoint(model):
    layers = list(model.layers.values())
    half = len(layers) // 2
    for layer in layers[:half]:
        layer.forward = partial(ck_skeleton, layer.forward)
    recompute.recompute(layers[half:], keep=CHEAP)


def pc_by(model, keep_of):
    """keep_of(n, depth): what layer n keeps; None: it is left alone."""
    for n, layer in enumerate(model.layers.values()):
        keep = keep_of(n, len(model.layers))
        if keep is not None:
            recompute.recompute([layer], keep=keep)


@wrong(PC)
def pc_exchanged(model):  # the upper half in full: the tooth on top is a whole layer
    pc_by(model, lambda n, depth: () if n >= depth - depth // 2 else CHEAP)


@wrong(PC)
def pc_full(model):  # too slow
    pc_by(model, lambda n, depth: ())


@wrong(PC)
def pc_selective(model):  # too large
    pc_by(model, lambda n, depth: CHEAP)


@wrong(PC)
def pc_nothing_put_in(model):  # wraps, and does not put the wrappers in
    [partial(recompute.checkpoint, layer) for layer in model.layers.values()]


@wrong(PC)
def pc_ceil(model):  # one layer too many where the depth is odd
    pc_by(model, lambda n, depth: () if n < (depth + 1) // 2 else CHEAP)


@wrong(PC)
def pc_four(model):  # four in full, whatever the depth: too slow for fewer than 8
    pc_by(model, lambda n, depth: () if n < 4 else CHEAP)


@wrong(PC)
def pc_half_left_alone(model):  # the upper half keeps everything
    pc_by(model, lambda n, depth: () if n < depth // 2 else None)


@wrong(PC)
def pc_matmuls_only(model):  # attention is computed again in the upper half, too: more than half of the multiplications
    pc_by(model, lambda n, depth: () if n < depth // 2 else MATMULS)


@wrong(PC)
def pc_attention_only(model):  # the matrix products are computed again in all layers
    pc_by(model, lambda n, depth: () if n < depth // 2 else ATTENTION)


@wrong(PC)
def pc_gpu_attention(model):  # keeps attention by the name that it has on a GPU: here it is computed again
    pc_by(model, lambda n, depth: () if n < depth // 2 else MATMULS | {"aten._scaled_dot_product_flash_attention"})


class Again(nn.Module):
    def __init__(self, inner, keep):
        super().__init__()
        self.inner, self.keep = inner, keep

    def forward(self, x_BTD):
        return recompute.checkpoint(self.inner, x_BTD, keep=self.keep)


@wrong(PC)
def pc_new_names(model):  # the names in state_dict() change
    half = len(model.layers) // 2
    for n, (name, layer) in enumerate(list(model.layers.items())):
        model.layers[name] = Again(layer, frozenset() if n < half else CHEAP)


@wrong(PC)
def pc_three_of_eight(model):  # too few in full: too large
    pc_by(model, lambda n, depth: () if n < 3 * depth // 8 else CHEAP)


@wrong(PC)
def pc_last_full(model):  # every second layer in full, the last of them on top
    pc_by(model, lambda n, depth: () if n % 2 else CHEAP)


@wrong(PC)
def pc_even_full(model):  # every second from the first: at odd depth more than half
    pc_by(model, lambda n, depth: CHEAP if n % 2 else ())


@wrong(PC)
def pc_mlps(model):  # the MLPs of all layers: more than half of the multiplications
    recompute.recompute([layer.mlp for layer in model.layers.values()])


@wrong(PC)
def pc_copy(model):  # changes a copy
    pc_halves(copy.deepcopy(model))


def pc_without_graph(forward, x_BTD):
    with torch.no_grad():
        return forward(x_BTD)


@wrong(PC)
def pc_no_gradient(model):  # the lower half keeps nothing and learns nothing
    layers = list(model.layers.values())
    for layer in layers[: len(layers) // 2]:
        layer.forward = partial(pc_without_graph, layer.forward)
    recompute.recompute(layers[len(layers) // 2 :], keep=CHEAP)


@wrong(PC)
def pc_nested(model):  # a checkpoint in a checkpoint: the lower half is computed three times
    layers = list(model.layers.values())
    for n, layer in enumerate(layers):
        if n < len(layers) // 2:
            recompute.recompute([layer.attention, layer.mlp])
            recompute.recompute([layer])
        else:
            recompute.recompute([layer], keep=CHEAP)


@wrong(PC)
def pc_twice(model):  # all selectively, then half of them again in full: recompute() refuses
    layers = list(model.layers.values())
    recompute.recompute(layers, keep=CHEAP)
    recompute.recompute(layers[: len(layers) // 2])


# ======== 07b: offloaded_step ==============================================================================

OS = "offloaded_step"


@right(OS)
def os_lists(due, fetch, update, store):
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            values = update(i, values)
            stored.append(thread.submit(store, i, values))
            del values
    for future in stored:
        future.result()


@right(OS)
def os_early(due, fetch, update, store):
    due = list(due)
    if not due:
        return
    with ThreadPoolExecutor(max_workers=1) as thread:
        fetching, storing = thread.submit(fetch, due[0]), None
        for i, following in zip(due, [*due[1:], None]):
            values = fetching.result()
            fetching = None
            if following is not None:
                fetching = thread.submit(fetch, following)
            values = update(i, values)
            if storing is not None:
                storing.result()  # it has run beside the update
            storing = thread.submit(store, i, values)
            values = None
        storing.result()


@right(OS)
def os_iterator(due, fetch, update, store):
    stores = deque()
    with ThreadPoolExecutor(1) as thread:

        def arriving():
            numbers = iter(due)
            pending = deque((i, thread.submit(fetch, i)) for i in itertools.islice(numbers, 1))
            while pending:
                i, future = pending.popleft()
                values = future.result()
                del future
                pending.extend((j, thread.submit(fetch, j)) for j in itertools.islice(numbers, 1))
                yield i, [values]
                del values

        for i, box in arriving():
            stores.append(thread.submit(store, i, update(i, box.pop())))
        while stores:
            stores.popleft().result()


class Worker:
    """A thread with a queue."""

    def __init__(self):
        self.queue = queue.Queue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while True:
            task = self.queue.get()
            if task is None:
                return
            future, f, args = task
            try:
                future.set_result(f(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, f, args

    def submit(self, f, *args):
        future = Future()
        self.queue.put((future, f, args))
        return future

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.queue.put(None)
        self.thread.join()


@right(OS)
def os_own_thread(due, fetch, update, store):
    stored = []
    with Worker() as worker:
        coming = worker.submit(fetch, due[0]) if len(due) else None
        for n in range(len(due)):
            values = coming.result()
            coming = worker.submit(fetch, due[n + 1]) if n + 1 < len(due) else None
            new = update(due[n], values)
            stored.append(worker.submit(store, due[n], new))
            del values, new
        for future in stored:
            future.result()


@right(OS)
def os_shutdown(due, fetch, update, store):
    thread, stored, coming = ThreadPoolExecutor(1), [], {}
    try:
        for n, i in enumerate(due):
            if n == 0:
                coming[0] = thread.submit(fetch, i)
            values = coming.pop(n).result()
            if n < len(due) - 1:
                coming[n + 1] = thread.submit(fetch, due[n + 1])
            stored.append(thread.submit(store, i, update(i, values)))
            values = None
    finally:
        thread.shutdown(wait=True)
    [future.result() for future in stored]


@wrong(OS)
def os_one_by_one(due, fetch, update, store):  # no overlap, and all of it is the caller's work
    for i in due:
        store(i, update(i, fetch(i)))


@wrong(OS)
def os_fetches_all(due, fetch, update, store):  # all of the state in memory
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due]
        stored = [thread.submit(store, i, update(i, future.result())) for i, future in zip(due, coming)]
    for future in stored:
        future.result()


@wrong(OS)
def os_deaf(due, fetch, update, store):  # nobody hears of what store raises
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            thread.submit(store, i, update(i, values))


@wrong(OS)
def os_last_only(due, fetch, update, store):  # hears of the last store only
    future = None
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            future = thread.submit(store, i, update(i, values))
    if future:
        future.result()


@wrong(OS)
def os_not_empty(due, fetch, update, store):  # fails where nothing is due
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch, due[0])
        for n, i in enumerate(due):
            values = coming.result()
            coming = thread.submit(fetch, due[n + 1]) if n + 1 < len(due) else None
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_fetches_first_again(due, fetch, update, store):  # after the last comes the first again: one fetch too many
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(fetch, due[0]) if due else None
        for n, i in enumerate(due):
            values = coming.result()
            coming = thread.submit(fetch, due[(n + 1) % len(due)])
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_next_number(due, fetch, update, store):  # fetches i + 1, not the next that is due
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for i in due:
            values = coming[0].result()
            coming = [thread.submit(fetch, i + 1)] if i != due[-1] else []
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_old_values(due, fetch, update, store):  # stores what it has fetched
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            update(i, values)
            stored.append(thread.submit(store, i, values))
    for future in stored:
        future.result()


@wrong(OS)
def os_submits_late(due, fetch, update, store):  # the next is fetched after the update, not during it
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            new = update(i, coming[0].result())
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, new))
    for future in stored:
        future.result()


@wrong(OS)
def os_returns_early(due, fetch, update, store):  # returns before everything is stored
    thread = ThreadPoolExecutor(1)
    coming = [thread.submit(fetch, i) for i in due[:1]]
    for n, i in enumerate(due):
        values = coming[0].result()
        coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
        thread.submit(store, i, update(i, values))
    thread.shutdown(wait=False)


@wrong(OS)
def os_caller_stores(due, fetch, update, store):  # the caller stores
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            store(i, update(i, values))


@wrong(OS)
def os_waits_for_store(due, fetch, update, store):  # waits for each store at once: none runs during an update
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            thread.submit(store, i, update(i, values)).result()


@wrong(OS)
def os_stores_at_the_end(due, fetch, update, store):  # keeps all new values until the end
    new = {}
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            new[i] = update(i, values)
        stored = [thread.submit(store, i, values) for i, values in new.items()]
    for future in stored:
        future.result()


@wrong(OS)
def os_keeps_futures(due, fetch, update, store):  # a list of futures holds everything that was fetched
    coming, stored = [], []
    with ThreadPoolExecutor(1) as thread:
        if due:
            coming.append(thread.submit(fetch, due[0]))
        for n, i in enumerate(due):
            values = coming[n].result()
            if n + 1 < len(due):
                coming.append(thread.submit(fetch, due[n + 1]))
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_sorted(due, fetch, update, store):  # takes the parameters in the order of their numbers, not in the one given
    os_lists(sorted(due), fetch, update, store)


@wrong(OS)
def os_swallows(due, fetch, update, store):  # what cannot be fetched is left out, without a word
    stored = []
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            failed = coming[0].exception() is not None
            values = None if failed else coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            if not failed:
                stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


@wrong(OS)
def os_last_not_stored(due, fetch, update, store):  # stores the one before; the last is never stored
    stored, before = [], None
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            if before:
                stored.append(thread.submit(store, *before))
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            before = i, update(i, values)
    for future in stored:
        future.result()


@wrong(OS)
def os_updates_in_the_thread(due, fetch, update, store):  # all in the thread, one after the other: no overlap
    with ThreadPoolExecutor(1) as thread:
        for future in [thread.submit(lambda i=i: store(i, update(i, fetch(i)))) for i in due]:
            future.result()


OS_THREAD = []


@wrong(OS)
def os_once(due, fetch, update, store):  # its thread is shut down after the first call: the second fails
    if not OS_THREAD:
        OS_THREAD.append(ThreadPoolExecutor(1))
    stored = []
    with OS_THREAD[0] as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, j) for j in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for future in stored:
        future.result()


# ======== 07b: step_seconds ================================================================================

SS = "step_seconds"


@right(SS)
def ss_slots(fetch, update, store):
    n = len(update)
    if n == 0:
        return 0.0
    total = fetch[0]
    for i in range(n):
        beside = (store[i - 1] if i > 0 else 0) + (fetch[i + 1] if i + 1 < n else 0)
        total += max(update[i], beside)
    return total + store[-1]


@right(SS)
def ss_padded(fetch, update, store):
    before, after = [0, *store], [*fetch[1:], 0]
    return sum(fetch[:1]) + sum(max(u, s + f) for u, s, f in zip(update, before, after)) + sum(store[-1:])


@right(SS)
def ss_two_clocks(fetch, update, store):
    caller = thread = 0.0
    fetched = {}
    if fetch:
        thread = fetched[0] = fetch[0]
    for i in range(len(update)):
        caller = max(caller, fetched[i])
        if i + 1 < len(fetch):
            thread = fetched[i + 1] = max(thread, caller) + fetch[i + 1]
        caller += update[i]
        thread = max(thread, caller) + store[i]
    return max(caller, thread)


@right(SS)
def ss_longest_path(fetch, update, store):
    n = len(update)
    from functools import cache

    @cache
    def updated(i):  # when update i is done
        return begins(i) + update[i]

    @cache
    def begins(i):
        return fetch[0] if i == 0 else max(updated(i - 1), begins(i - 1) + (store[i - 2] if i > 1 else 0) + fetch[i])

    if n == 0:
        return 0
    for i in range(n):  # from the front, so that nothing is deep
        begins(i)
    free = begins(n - 1) + (store[n - 2] if n > 1 else 0)
    return max(updated(n - 1), free) + store[n - 1]


@right(SS)
def ss_tensor(fetch, update, store):
    if not update:
        return 0.0
    f, u, s = (torch.tensor(seconds, dtype=torch.float64) for seconds in (fetch, update, store))
    zero = torch.zeros(1, dtype=torch.float64)
    slots = torch.maximum(u, torch.cat([zero, s[:-1]]) + torch.cat([f[1:], zero]))
    return (f[0] + slots.sum() + s[-1]).item()


@wrong(SS)
def ss_no_overlap(fetch, update, store):  # one after the other
    return sum(fetch) + sum(update) + sum(store)


@wrong(SS)
def ss_largest_sum(fetch, update, store):  # as if everything could overlap
    return max(sum(update), sum(fetch) + sum(store))


@wrong(SS)
def ss_no_first_fetch(fetch, update, store):  # what comes before the first slot is forgotten
    return ss_padded(fetch, update, store) - sum(fetch[:1])


@wrong(SS)
def ss_no_last_store(fetch, update, store):  # what comes after the last slot is forgotten
    return ss_padded(fetch, update, store) - sum(store[-1:])


@wrong(SS)
def ss_own_store(fetch, update, store):  # its own store in its slot, not the one before
    if not update:
        return 0
    return fetch[0] + sum(max(u, s + f) for u, s, f in zip(update, store, [*fetch[1:], 0])) + store[-1]


@wrong(SS)
def ss_own_fetch(fetch, update, store):  # its own fetch in its slot, not the next
    if not update:
        return 0
    return fetch[0] + sum(max(u, s + f) for u, s, f in zip(update, [0, *store], fetch)) + store[-1]


@wrong(SS)
def ss_two_threads(fetch, update, store):  # fetch and store beside each other
    if not update:
        return 0
    return fetch[0] + sum(map(max, update, [0, *store], [*fetch[1:], 0])) + store[-1]


@wrong(SS)
def ss_negative_index(fetch, update, store):  # in the first slot, store[-1] is the last one's
    if not update:
        return 0
    total = fetch[0]
    for i in range(len(update)):
        total += max(update[i], store[i - 1] + (fetch[i + 1] if i + 1 < len(fetch) else 0))
    return total + store[-1]


@wrong(SS)
def ss_not_empty(fetch, update, store):  # fails where nothing is due
    return fetch[0] + sum(max(u, s + f) for u, s, f in zip(update, [0, *store], [*fetch[1:], 0])) + store[-1]


@wrong(SS)
def ss_all_alike(fetch, update, store):  # as if all were like the first
    if not update:
        return 0
    n, f, u, s = len(update), fetch[0], update[0], store[0]
    if n == 1:
        return f + u + s
    return f + max(u, f) + (n - 2) * max(u, f + s) + max(u, s) + s


@wrong(SS)
def ss_n_slots(fetch, update, store):  # a full slot for each, also the first and the last
    if not update:
        return 0
    return fetch[0] + sum(max(u, f + s) for f, u, s in zip(fetch, update, store)) + store[-1]


@wrong(SS)
def ss_last_slot_alone(fetch, update, store):  # in the last slot nothing is stored beside the update
    if not update:
        return 0
    slots = [max(u, s + f) for u, s, f in zip(update[:-1], [0, *store], fetch[1:])]
    return fetch[0] + sum(slots) + update[-1] + store[-1]


@wrong(SS)
def ss_store_waits(fetch, update, store):  # the store is not beside the update, only the next fetch
    if not update:
        return 0
    return fetch[0] + sum(max(u, f) + s for u, f, s in zip(update, [*fetch[1:], 0], store))


@wrong(SS)
def ss_whole_seconds(fetch, update, store):  # rounded to whole seconds
    return int(ss_padded(fetch, update, store))


@wrong(SS)
def ss_one_parameter(fetch, update, store):  # of one parameter: its store is counted beside its update, too
    if not update:
        return 0
    slots = [max(u, s + f) for u, s, f in zip(update[1:-1], store, fetch[2:])]
    first = max(update[0], fetch[min(1, len(fetch) - 1)])
    return fetch[0] + first + sum(slots) + max(update[-1], store[max(len(store) - 2, 0)]) + store[-1]


@wrong(SS)
def ss_update_first(fetch, update, store):  # the slots of the updates are added to the thread's work
    if not update:
        return 0
    return fetch[0] + max(sum(update), sum(fetch[1:]) + sum(store[:-1])) + store[-1]


@wrong(SS)
def ss_smaller(fetch, update, store):  # the slot lasts until one of both is done
    if not update:
        return 0
    return fetch[0] + sum(min(u, s + f) for u, s, f in zip(update, [0, *store], [*fetch[1:], 0])) + store[-1]
