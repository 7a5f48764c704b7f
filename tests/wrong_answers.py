"""Wrong answers to the exercises, each with the name by which its check must call it ("" where any rejection will do).

    python tests/wrong_answers.py      the share of them that the checks catch

Most are what people do write: the mistakes were seen in courses and repositories, or are one slip away from a right
answer.  Each is right in something, so that an easier check would let it pass.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from labs import collectives, ddp
from labs.collectives import exchange, group_rank, place, powers_of_two


class WrongAnswer(NamedTuple):
    check: str
    mistake: str
    fn: Callable


ANSWERS: list[WrongAnswer] = []


def wrong(check, mistake=""):
    def note(fn):
        ANSWERS.append(WrongAnswer(check, mistake, fn))
        return fn

    return note


# ---- broadcast -------------------------------------------------------------------------------------------


@wrong("broadcast", "nothing arrived")
def broadcast_to_nobody(x, src=0, group=None):
    pass


@wrong("broadcast", "nothing arrived")
def broadcast_into_a_copy(x, src=0, group=None):
    x = x.clone()
    collectives.broadcast(x, src, group)
    return x


@wrong("broadcast", "a built-in collective")
def broadcast_built_in(x, src=0, group=None):
    dist.broadcast(x, src, group=group)


@wrong("broadcast", "the root sends to all")
def broadcast_by_the_root_alone(x, src=0, group=None):
    rank, ranks = place(group)
    root = group_rank(src, group)
    for other in range(ranks):
        if rank == root != other:
            exchange(group, send=(x, other))
        elif rank == other != root:
            exchange(group, receive=(x, root))


@wrong("broadcast", "too many rounds")
def broadcast_along_a_chain(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    if me > 0:
        exchange(group, receive=(x, rank - 1))
    if me < ranks - 1:
        exchange(group, send=(x, rank + 1))


@wrong("broadcast", "too many bytes")
def broadcast_back_and_forth(x, src=0, group=None):
    collectives.broadcast(x, src, group)
    collectives.broadcast(x, src, group)


@wrong("broadcast", "right only from root 0")
def broadcast_from_rank_0(x, src=0, group=None):
    collectives.broadcast(x, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group)


@wrong("broadcast", "right only when the number of ranks is a power of two")
def broadcast_doubling_only(x, src=0, group=None):
    rank, ranks = place(group)
    root = group_rank(src, group)
    me = (rank - root) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance:
            exchange(group, send=(x, rank + distance))
        elif me < 2 * distance:
            exchange(group, receive=(x, rank - distance))


@wrong("broadcast", "right only on the group of all ranks")
def broadcast_with_global_ranks(x, src=0, group=None):
    rank, ranks = place(None)
    me = (rank - src) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance and me + distance < ranks:
            dist.send(x, (rank + distance) % ranks, group=group)
        elif distance <= me < 2 * distance:
            dist.recv(x, (rank - distance) % ranks, group=group)


@wrong("broadcast", "the ranks wait for each other")
def broadcast_where_all_receive_first(x, src=0, group=None):
    rank, _ = place(group)
    exchange(group, receive=(x, rank - 1))
    exchange(group, send=(x, rank + 1))


@wrong("broadcast", "right only in some dtypes")
def broadcast_as_float32(x, src=0, group=None):
    y = x.float() if x.dtype is not torch.float64 else x
    collectives.broadcast(y, src, group)
    x.copy_(y)


@wrong("broadcast")
def broadcast_without_waiting(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance and me + distance < ranks:
            dist.isend(x, group=group, group_dst=(rank + distance) % ranks)
        elif distance <= me < 2 * distance:
            dist.irecv(x, group=group, group_src=(rank - distance) % ranks)


@wrong("broadcast", "changed while being sent")
def broadcast_from_a_buffer_that_is_used_again(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance and me + distance < ranks:
            buffer = x.clone()
            work = dist.isend(buffer, group=group, group_dst=(rank + distance) % ranks)
            buffer.zero_()
            work.wait()
        elif distance <= me < 2 * distance:
            exchange(group, receive=(x, rank - distance))


@wrong("broadcast", "rounded on the way")
def broadcast_everything_as_float32(x, src=0, group=None):
    y = x.float()
    collectives.broadcast(y, src, group)
    x.copy_(y)


@wrong("broadcast")
def broadcast_from_another_root_unless_told(x, src=1, group=None):
    collectives.broadcast(x, src, group)


@wrong("broadcast", "right only in one dimension")
def broadcast_of_the_first_row(x, src=0, group=None):
    collectives.broadcast(x if x.ndim == 1 else x[0], src, group)


# ---- reduce_scatter --------------------------------------------------------------------------------------


@wrong("reduce_scatter", "a built-in collective")
def reduce_scatter_by_all_reduce_and_slice(x, group=None):
    dist.all_reduce(x, group=group)
    return x.view(-1).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


@wrong("reduce_scatter", "whole tensors travel")
def reduce_scatter_by_a_ring_of_whole_tensors(x, group=None):
    rank, ranks = place(group)
    total, carried = x.clone(), x.clone()
    for _ in range(ranks - 1):
        received = torch.empty_like(x)
        exchange(group, send=(carried, rank + 1), receive=(received, rank - 1))
        carried = received
        total += received
    x.copy_(total)
    return x.view(-1).tensor_split(ranks)[rank]


@wrong("reduce_scatter", "the pieces are rotated")
def reduce_scatter_one_piece_on(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        mine += received
    return pieces[(rank + 1) % ranks]


@wrong("reduce_scatter", "nothing is returned")
def reduce_scatter_that_returns_nothing(x, group=None):
    collectives.reduce_scatter(x, group=group)


@wrong("reduce_scatter", "the whole tensor instead of a piece")
def reduce_scatter_that_returns_all(x, group=None):
    collectives.reduce_scatter(x, group=group)
    return x


@wrong("reduce_scatter", "averaged instead of summed")
def reduce_scatter_that_averages(x, group=None):
    piece = collectives.reduce_scatter(x, group=group)
    return piece.div_(dist.get_world_size(group)) if x.is_floating_point() else piece


@wrong("reduce_scatter", "left out")
def reduce_scatter_one_round_short(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(2, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        mine += received
    return pieces[rank]


@wrong("reduce_scatter", "right only when the size divides by the number of ranks")
def reduce_scatter_of_equal_pieces(x, group=None):
    rank, ranks = place(group)
    size = x.numel() // ranks
    pieces = [x.view(-1)[i * size : (i + 1) * size] for i in range(ranks)]
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        mine += received
    return pieces[rank]


@wrong("reduce_scatter", "right only on the group of all ranks")
def reduce_scatter_on_all_ranks(x, group=None):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        exchange(None, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        mine += received
    return pieces[rank]


@wrong("reduce_scatter", "not in place")
def reduce_scatter_of_a_copy(x, group=None):
    return collectives.reduce_scatter(x.clone(), group=group)


@wrong("reduce_scatter", "a receive that nobody waited for")
def reduce_scatter_without_waiting(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        sent = dist.isend(pieces[(rank - step) % ranks].clone(), group=group, group_dst=(rank + 1) % ranks)
        dist.irecv(received, group=group, group_src=(rank - 1) % ranks)
        mine += received
        sent.wait()
    return pieces[rank]


@wrong("reduce_scatter", "right only when the number of ranks is a power of two")
def reduce_scatter_by_halving(x, group=None):
    rank, ranks = place(group)
    pieces = list(x.view(-1).tensor_split(ranks))
    low, high = 0, ranks
    while high - low > 1:
        half = (high - low) // 2
        middle = low + half
        keep = (low, middle) if rank < middle else (middle, high)
        give = (middle, high) if rank < middle else (low, middle)
        partner = rank + half if rank < middle else rank - half
        mine = x.view(-1)[offset(pieces, keep[0]) : offset(pieces, keep[1])]
        received = torch.empty_like(mine)
        theirs = x.view(-1)[offset(pieces, give[0]) : offset(pieces, give[1])]
        exchange(group, send=(theirs, partner), receive=(received, partner))
        mine += received
        low, high = keep
    return pieces[rank]


def offset(pieces, index):
    return sum(len(piece) for piece in pieces[:index])


@wrong("reduce_scatter", "full copies are kept")
def reduce_scatter_that_keeps_everything(x, group=None):
    rank, ranks = place(group)
    pieces, kept = x.view(-1).tensor_split(ranks), [torch.zeros_like(x) for _ in range(ranks)]
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        arrived = kept[source].view(-1).tensor_split(ranks)[rank]
        exchange(group, send=(pieces[to], to), receive=(arrived, source))
    pieces[rank].add_(torch.stack(kept).sum(0).view(-1).tensor_split(ranks)[rank])
    return pieces[rank]


@wrong("reduce_scatter", "right only when the size divides by the number of ranks")
def reduce_scatter_of_chunks(x, group=None):
    """torch.chunk makes the last piece shorter, and sometimes makes fewer."""
    rank, ranks = place(group)
    pieces = list(x.view(-1).chunk(ranks))
    pieces += [x.view(-1)[:0]] * (ranks - len(pieces))
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        mine += received
    return pieces[rank]


@wrong("reduce_scatter")
def reduce_scatter_by_the_largest(x, group=None):
    return collectives.reduce_scatter(x, dist.ReduceOp.MAX, group)


@wrong("reduce_scatter", "too many rounds")
def reduce_scatter_by_one_reduce_after_the_other(x, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    pieces = x.view(-1).tensor_split(len(members))
    for root, piece in zip(members, pieces, strict=True):
        collectives.reduce(piece, root, group=group)
    return pieces[dist.get_rank(group)]


# ---- all_gather ------------------------------------------------------------------------------------------


@wrong("all_gather", "nothing arrived")
def all_gather_into_a_copy(x, group=None):
    x = x.clone()
    collectives.all_gather(x, group)
    return x


@wrong("all_gather", "a built-in collective")
def all_gather_by_objects(x, group=None):
    rank, ranks = place(group)
    gathered = [None] * ranks
    dist.all_gather_object(gathered, x.view(-1).tensor_split(ranks)[rank].clone(), group=group)
    x.view(-1).copy_(torch.cat(gathered))


@wrong("all_gather", "a built-in collective")
def all_gather_by_built_in_broadcasts(x, group=None):
    for index, piece in enumerate(x.view(-1).tensor_split(dist.get_world_size(group))):
        dist.broadcast(piece, group=group, group_src=index)


@wrong("all_gather")
def all_gather_by_one_broadcast_after_the_other(x, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for root, piece in zip(members, x.view(-1).tensor_split(len(members)), strict=True):
        collectives.broadcast(piece, root, group)


@wrong("all_gather", "whole tensors travel")
def all_gather_of_whole_tensors(x, group=None):
    rank, ranks = place(group)
    carried = x.clone()
    for step in range(ranks - 1):
        received = torch.empty_like(x)
        exchange(group, send=(carried, rank + 1), receive=(received, rank - 1))
        carried = received
        source = (rank - step - 1) % ranks
        x.view(-1).tensor_split(ranks)[source].copy_(received.view(-1).tensor_split(ranks)[source])


@wrong("all_gather", "a piece is missing")
def all_gather_one_round_short(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 2):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


@wrong("all_gather")
def all_gather_that_begins_one_piece_early(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step + 1) % ranks], pieces[(rank - step) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


@wrong("all_gather", "the pieces are rotated")
def all_gather_in_order_of_arrival(x, group=None):
    rank, ranks = place(group)
    collectives.all_gather(x, group)
    pieces = [piece.clone() for piece in x.view(-1).tensor_split(ranks)]
    x.view(-1).copy_(torch.cat([pieces[(rank + i) % ranks] for i in range(ranks)]))


@wrong("all_gather", "right only on the group of all ranks")
def all_gather_with_global_ranks(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        posts = [
            dist.P2POp(dist.isend, send, (rank + 1) % ranks, group),
            dist.P2POp(dist.irecv, receive, (rank - 1) % ranks, group),
        ]
        for work in dist.batch_isend_irecv(posts):
            work.wait()


@wrong("all_gather", "right only in some dtypes")
def all_gather_as_float32(x, group=None):
    y = x if x.dtype is torch.float64 else x.float()
    collectives.all_gather(y, group)
    x.copy_(y)


@wrong("all_gather", "too many messages")
def all_gather_element_by_element(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        for half in (slice(None, 1), slice(1, None)):
            exchange(group, send=(send[half], rank + 1), receive=(receive[half], rank - 1))


@wrong("all_gather", "full copies are kept")
def all_gather_that_keeps_every_round(x, group=None):
    rank, ranks = place(group)
    pieces, rounds = x.view(-1).tensor_split(ranks), []
    for step in range(ranks - 1):
        source = (rank - step - 1) % ranks
        rounds.append(torch.zeros_like(x).view(-1).tensor_split(ranks))
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(rounds[-1][source], rank - 1))
        pieces[source].copy_(rounds[-1][source])


@wrong("all_gather", "too many rounds")
def all_gather_in_single_file(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        for turn in range(ranks):
            if rank == turn:
                exchange(group, send=(pieces[(rank - step) % ranks], rank + 1))
            elif rank == (turn + 1) % ranks:
                exchange(group, receive=(pieces[(rank - step - 1) % ranks], rank - 1))


# ---- all_reduce ------------------------------------------------------------------------------------------


@wrong("all_reduce", "a built-in collective")
def all_reduce_built_in(x, group=None):
    dist.all_reduce(x, group=group)


@wrong("all_reduce", "whole tensors travel")
def all_reduce_by_a_ring_of_whole_tensors(x, group=None):
    reduce_scatter_by_a_ring_of_whole_tensors(x, group)


@wrong("all_reduce", "whole tensors travel")
def all_reduce_through_the_root(x, group=None):
    root = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    collectives.reduce(x, root, group=group)
    collectives.broadcast(x, root, group)


@wrong("all_reduce", "whole tensors travel")
def all_reduce_by_doubling(x, group=None):
    collectives.all_reduce_doubling(x, group=group)


@wrong("all_reduce", "right on one rank only")
def all_reduce_at_the_root_only(x, group=None):
    rank, _ = place(group)
    y = x.clone()
    collectives.reduce(y, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
    if rank == 0:
        x.copy_(y)


@wrong("all_reduce", "averaged instead of summed")
def all_reduce_that_averages(x, group=None):
    collectives.all_reduce(x, group=group)
    if x.is_floating_point():
        x /= dist.get_world_size(group)


@wrong("all_reduce", "counted twice")
def all_reduce_that_counts_itself_twice(x, group=None):
    before = x.clone()
    collectives.all_reduce(x, group=group)
    x += before


@wrong("all_reduce", "nothing arrived")
def all_reduce_that_returns_a_new_tensor(x, group=None):
    x = x.clone()
    collectives.all_reduce(x, group=group)
    return x


@wrong("all_reduce", "another dtype travels")
def all_reduce_as_float64(x, group=None):
    y = x.double()
    collectives.all_reduce(y, group=group)
    x.copy_(y)


@wrong("all_reduce", "pieces that nobody gathered")
def all_reduce_half_way(x, group=None):
    collectives.reduce_scatter(x, group=group)


@wrong("all_reduce", "rounded on the way")
def all_reduce_with_a_growing_error(x, group=None):
    collectives.all_reduce(x, group=group)
    if x.is_floating_point():
        x *= 1 + 1e-9


# ---- average_gradients -----------------------------------------------------------------------------------


def gradients(model):
    return [p for p in model.parameters() if p.grad is not None]


@wrong("average_gradients", "nothing synchronised")
def average_nothing(model):
    for p in gradients(model):
        p.grad /= 1


@wrong("average_gradients", "summed instead of averaged")
def average_by_a_sum(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)


@wrong("average_gradients", "parameters averaged instead of gradients")
def average_the_parameters(model):
    for p in gradients(model):
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


@wrong("average_gradients", "divided by the wrong number")
def average_over_four(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)
        p.grad /= 4


@wrong("average_gradients", "averaged twice")
def average_twice(model):
    for p in gradients(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "the mean does not reach .grad")
def average_a_copy(model):
    for p in gradients(model):
        mean = p.grad / dist.get_world_size()
        dist.all_reduce(mean)


@wrong("average_gradients", "a tied weight reduced twice")
def average_by_name(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "a tied weight reduced twice")
def average_by_name_and_divide_once(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.grad is not None:
            dist.all_reduce(p.grad)
    for p in gradients(model):
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "a frozen parameter has a gradient")
def average_with_frozen(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "zeros where nobody has a gradient")
def average_with_zeros(model):
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "rank 0's gradient everywhere")
def average_by_broadcast(model):
    for p in gradients(model):
        dist.broadcast(p.grad, 0)


@wrong("average_gradients", "right on some ranks only")
def average_at_rank_0(model):
    for p in gradients(model):
        mean = p.grad / dist.get_world_size()
        dist.reduce(mean, 0)
        if dist.get_rank() == 0:
            p.grad = mean


@wrong("average_gradients", "some parameters are left out")
def average_the_matrices(model):
    for p in gradients(model):
        if p.ndim > 1:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "rounded on the way")
def average_in_float32(model):
    for p in gradients(model):
        mean = p.grad.float()
        dist.all_reduce(mean)
        p.grad.copy_(mean / dist.get_world_size())


@wrong("average_gradients", "too many bytes")
def average_by_gathering(model):
    for p in gradients(model):
        all_of_them = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, p.grad)
        p.grad = torch.stack(all_of_them).mean(0)


@wrong("average_gradients", "one rank does the work for all")
def average_at_rank_0_and_tell_all(model):
    for p in gradients(model):
        dist.reduce(p.grad, 0)
        dist.broadcast(p.grad, 0)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "nobody waited")
def average_without_waiting(model):
    for p in gradients(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)


@wrong("average_gradients")
def average_the_transposed(model):
    average_right(model)
    for p in gradients(model):
        if p.ndim == 2 and p.shape[0] == p.shape[1]:
            p.grad = p.grad.T


@wrong("average_gradients", "requires_grad has changed")
def average_and_thaw(model):
    average_right(model)
    model.requires_grad_(True)


@wrong("average_gradients", "some parameters are left out")
def average_all_that_has_dimensions(model):
    for p in gradients(model):
        if p.ndim:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def average_right(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- accumulation ----------------------------------------------------------------------------------------


@wrong("accumulation", "the loss is not divided by the number of micro-batches")
def accumulate_without_division(model, micro_batches):
    with model.no_sync():
        for micro_batch in micro_batches[:-1]:
            model(*micro_batch).backward()
    model(*micro_batches[-1]).backward()
    model.sync()


@wrong("accumulation", "synchronised at every micro-batch")
def accumulate_with_every_sync(model, micro_batches):
    for micro_batch in micro_batches:
        (model(*micro_batch) / len(micro_batches)).backward()
        model.sync()


@wrong("accumulation", "nothing synchronised")
def accumulate_without_sync(model, micro_batches):
    for micro_batch in micro_batches:
        with model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("accumulation", "nothing synchronised")
def accumulate_and_sync_inside(model, micro_batches):
    with model.no_sync():
        for micro_batch in micro_batches:
            (model(*micro_batch) / len(micro_batches)).backward()
        model.sync()


@wrong("accumulation", "only the first micro-batch is synchronised")
def accumulate_after_sync(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        with contextlib.nullcontext() if i == 0 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
            if i == 0:
                model.sync()


@wrong("accumulation", "only the last micro-batch counts")
def accumulate_nothing(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        model.zero_grad()
        with contextlib.nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "the graphs of all micro-batches are kept")
def accumulate_the_losses(model, micro_batches):
    (sum(model(*micro_batch) for micro_batch in micro_batches) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "only the last micro-batch is synchronised")
def accumulate_the_last_only(model, micro_batches):
    before = {}
    for i, micro_batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        if last:
            before = {p: p.grad for p in model.parameters()}
            model.zero_grad()
        with contextlib.nullcontext() if last else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
    model.sync()
    for p, gradient in before.items():
        if gradient is not None:
            p.grad += gradient


@wrong("accumulation", "divided by the number of micro-batches twice")
def accumulate_and_divide_twice(model, micro_batches):
    accumulate(model, micro_batches)
    for p in gradients(model):
        p.grad /= len(micro_batches)


@wrong("accumulation", "the gradient is zero")
def accumulate_and_step_too_early(model, micro_batches):
    accumulate(model, micro_batches)
    model.zero_grad(set_to_none=False)


@wrong("accumulation", "the parameters have changed")
def accumulate_and_step(model, micro_batches):
    accumulate(model, micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@wrong("accumulation")
def accumulate_in_all_but_the_last(model, micro_batches):
    accumulate(model, micro_batches[:-1] or micro_batches)


def accumulate(model, micro_batches):
    """Right."""
    with model.no_sync():
        for micro_batch in micro_batches[:-1]:
            (model(*micro_batch) / len(micro_batches)).backward()
    (model(*micro_batches[-1]) / len(micro_batches)).backward()
    model.sync()


# ---- data_parallel ---------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A right one, which those below spoil in one method each: hooks, and replicas made equal."""

    def __init__(self, model):
        super().__init__()
        self.module, self.syncing, self.works = model, True, []
        self.make_equal()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.ready)

    def trained(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def make_equal(self):
        for p in self.module.parameters():
            dist.broadcast(p.data, 0)

    def forward(self, *args):
        return self.module(*args)

    def ready(self, p):
        if self.syncing:
            p.grad /= dist.get_world_size()
            self.works.append(dist.all_reduce(p.grad, async_op=True))

    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True

    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        for work in self.works:
            work.wait()
        self.works = []


@wrong("data_parallel", "parameters averaged instead of gradients")
class AveragesTheParameters(Wrapper):
    def ready(self, p):
        if self.syncing:
            p.data /= dist.get_world_size()
            dist.all_reduce(p.data)


@wrong("data_parallel", "only the last micro-batch is synchronised")
class HooksTheTensor(Wrapper):
    """Tensor.register_hook sees the gradient of this backward, before it is added to what is there."""

    def __init__(self, model):
        super().__init__(model)
        for p in self.trained():
            p.register_hook(self.average)

    def ready(self, p):
        pass

    def average(self, gradient):
        if self.syncing:
            gradient = gradient / dist.get_world_size()
            dist.all_reduce(gradient)
        return gradient


@wrong("data_parallel", "a replica that started from another seed")
class TrustsTheSeeds(Wrapper):
    def make_equal(self):
        pass


@wrong("data_parallel", "summed instead of averaged")
class Sums(Wrapper):
    def ready(self, p):
        if self.syncing:
            self.works.append(dist.all_reduce(p.grad, async_op=True))


@wrong("data_parallel", "synchronised at every micro-batch")
class NeverPauses(Wrapper):
    def ready(self, p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    @contextlib.contextmanager
    def no_sync(self):
        yield


@wrong("data_parallel", "nothing synchronised")
class Plain(Wrapper):
    def ready(self, p):
        pass


@wrong("data_parallel", "a tied weight reduced twice")
class LoopsOverModules(Wrapper):
    def ready(self, p):
        pass

    def sync(self):
        for module in self.module.modules():
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()


@wrong("data_parallel", "frozen parameters are sent")
class SendsTheFrozen(Wrapper):
    def sync(self):
        super().sync()
        for p in self.module.parameters():
            if not p.requires_grad:
                dist.all_reduce(torch.zeros_like(p))


@wrong("data_parallel", "not a wrapper")
def forgets_to_return(model):
    Wrapper(model)


@wrong("data_parallel", "not a wrapper")
class HasNoPause(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = DistributedDataParallel(model)

    def forward(self, *args):
        return self.module(*args)


@wrong("data_parallel")
class StaysPaused(Wrapper):
    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield


@wrong("data_parallel", "zeros where nobody has a gradient")
class FillsWithZeros(Wrapper):
    def ready(self, p):
        pass

    def sync(self):
        for p in self.trained():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("data_parallel")
class ReusesTheFirstBucket(Wrapper):
    """The flat buffer is filled in the first step only."""

    flat = None

    def ready(self, p):
        pass

    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        if self.flat is None:
            self.flat = torch.cat([p.grad.flatten() for p in self.trained()])
            dist.all_reduce(self.flat)
            self.flat /= dist.get_world_size()
        for p, mean in zip(self.trained(), ddp.unflatten(self.flat, self.trained()), strict=True):
            p.grad.copy_(mean)


@wrong("data_parallel", "nobody waited")
class NeverWaits(Wrapper):
    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        self.works = []


@wrong("data_parallel", "full copies are kept")
class KeepsTheHistory(Wrapper):
    def sync(self):
        super().sync()
        self.history = [[p.grad.clone() for p in self.trained()] for _ in range(4)]


@wrong("data_parallel", "a replica that started from another seed")
class EqualisesWhatIsTrained(Wrapper):
    """A frozen parameter takes part in the forward, too."""

    def make_equal(self):
        for p in self.trained():
            dist.broadcast(p.data, 0)


@wrong("data_parallel", "another loss")
class AveragesTheLoss(Wrapper):
    def forward(self, *args):
        loss = self.module(*args)
        return loss / dist.get_world_size()


def share_caught() -> dict[str, tuple[int, int]]:
    """By check: (caught, in all).  Caught is a rejection, by its name where it has one."""
    from labs.kit import check

    found = defaultdict(lambda: (0, 0))
    for name, mistake, fn in ANSWERS:
        answer = getattr(check, name)(fn)
        caught = answer.ok is False and mistake in ("", answer.mistake)
        if not caught:
            print(f"{fn.__name__}, which should be called {mistake!r}:\n{answer}\n")
        found[name] = (found[name][0] + caught, found[name][1] + 1)
    return dict(found)


if __name__ == "__main__":
    table = share_caught()
    for name, (caught, of) in table.items():
        print(f"{name:20} {caught} of {of}")
    print(f"{'all':20} {sum(c for c, _ in table.values())} of {sum(n for _, n in table.values())}")
