"""Wrong answers to the exercises of notebook 02, and two right ones that some of them begin with."""

import io
import itertools

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, group_rank, place, powers_of_two
from tests.wrong_answers.answers import wrong

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


@wrong("broadcast", "more messages than needed")
def broadcast_back_and_forth(x, src=0, group=None):
    collectives.broadcast(x, src, group)
    collectives.broadcast(x, src, group)


@wrong("broadcast", "right only from root 0")
def broadcast_from_rank_0(x, src=0, group=None):
    collectives.broadcast(x, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group)


@wrong("broadcast", "right only when the number of ranks is a power of two", alone=True)
def broadcast_doubling_only(x, src=0, group=None):
    rank, ranks = place(group)
    root = group_rank(src, group)
    me = (rank - root) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance:
            exchange(group, send=(x, rank + distance))
        elif me < 2 * distance:
            exchange(group, receive=(x, rank - distance))


@wrong("broadcast", "right only on the group of all ranks", alone=True)
def broadcast_with_global_ranks(x, src=0, group=None):
    rank, ranks = place(None)
    me = (rank - src) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance and me + distance < ranks:
            dist.send(x, (rank + distance) % ranks, group=group)
        elif distance <= me < 2 * distance:
            dist.recv(x, (rank - distance) % ranks, group=group)


@wrong("broadcast", "the ranks wait for each other", alone=True)
def broadcast_where_all_receive_first(x, src=0, group=None):
    rank, _ = place(group)
    exchange(group, receive=(x, rank - 1))
    exchange(group, send=(x, rank + 1))


@wrong("broadcast", "right only in some dtypes")
def broadcast_as_float32(x, src=0, group=None):
    y = x.float() if x.dtype is not torch.float64 else x
    collectives.broadcast(y, src, group)
    x.copy_(y)


@wrong("broadcast", "a receive that nobody waited for")
def broadcast_without_waiting(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance and me + distance < ranks:
            dist.isend(x, group=group, group_dst=(rank + distance) % ranks)
        elif distance <= me < 2 * distance:
            dist.irecv(x, group=group, group_src=(rank - distance) % ranks)


@wrong("broadcast", "changed while being sent", alone=True)
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
def broadcast_that_clears_by_zero(x, src=0, group=None):
    """0 × inf is no number."""
    arrived = x.clone()
    collectives.broadcast(arrived, src, group)
    x.mul_(0).add_(arrived)


@wrong("broadcast")
def broadcast_from_another_root_unless_told(x, src=1, group=None):
    collectives.broadcast(x, src, group)


@wrong("broadcast", "right only in one dimension")
def broadcast_of_the_first_row(x, src=0, group=None):
    collectives.broadcast(x if x.ndim == 1 else x[0], src, group)


@wrong("broadcast", "right only on up to four ranks")
def broadcast_in_two_rounds(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    for distance in (1, 2):
        if me < distance and me + distance < ranks:
            exchange(group, send=(x, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(x, rank - distance))


@wrong("broadcast", "right only for contiguous tensors")
def broadcast_of_what_reshape_returns(x, src=0, group=None):
    """A view where it can be one, and a copy otherwise."""
    collectives.broadcast(x.reshape(-1), src, group)


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


@wrong("reduce_scatter", "the pieces are rotated")
def reduce_scatter_one_piece_on_and_returns_its_own(x, group=None):
    rank, ranks = place(group)
    reduce_scatter_one_piece_on(x, group)
    return x.view(-1).tensor_split(ranks)[rank]


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


@wrong("reduce_scatter", "a rank is left out")
def reduce_scatter_one_round_short(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(2, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        mine += received
    return pieces[rank]


@wrong("reduce_scatter", "right only when the number of ranks divides the size")
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


@wrong("reduce_scatter", "right only on the group of all ranks", alone=True)
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


@wrong("reduce_scatter", "right only when the number of ranks is a power of two", alone=True)
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


@wrong("reduce_scatter", "right only when the number of ranks divides the size")
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


@wrong("reduce_scatter", "something is kept from every call")
def reduce_scatter_that_remembers(x, group=None, before=[]):  # noqa: B006
    before.append(x.clone())
    return collectives.reduce_scatter(x, group=group)


@wrong("reduce_scatter", "right only on more than one rank")
def reduce_scatter_that_needs_a_neighbour(x, group=None):
    piece = collectives.reduce_scatter(x, group=group)
    return piece if dist.get_world_size(group) > 1 else torch.zeros_like(piece)


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


@wrong("all_gather", "a piece in another's place")
def all_gather_of_the_own_piece_in_every_round(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        arrives = pieces[(rank - step - 1) % ranks]
        received = torch.empty_like(pieces[(rank - 1) % ranks])
        exchange(group, send=(pieces[rank], rank + 1), receive=(received, rank - 1))
        arrives[: len(received)] = received[: len(arrives)]


@wrong("all_gather", "a piece in another's place")
def all_gather_in_order_of_arrival(x, group=None):
    rank, ranks = place(group)
    collectives.all_gather(x, group)
    pieces = [piece.clone() for piece in x.view(-1).tensor_split(ranks)]
    x.view(-1).copy_(torch.cat([pieces[(rank + i) % ranks] for i in range(ranks)]))


@wrong("all_gather", "right only on the group of all ranks", alone=True)
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


@wrong("all_gather", "more messages than needed")
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


@wrong("all_gather", "right only in the first call")
def all_gather_that_has_seen_this_size(x, group=None, seen={}):  # noqa: B006
    key = x.shape, x.dtype, dist.get_world_size(group)
    if key not in seen:
        collectives.all_gather(x, group)
        seen[key] = x.clone()
    x.copy_(seen[key])


@wrong("all_gather", "kept out of torch's sight")
def all_gather_into_a_list(x, group=None):
    collectives.all_gather(x, group)
    x.copy_(torch.tensor(x.tolist(), dtype=x.dtype))


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


@wrong("all_reduce", "one's own only")
def all_reduce_in_halves_that_do_not_fit(x, group=None):
    """After the first one rank r holds piece r + 1; the second one begins with piece r."""
    reduce_scatter_one_piece_on(x, group)
    collectives.all_gather(x, group)


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


@wrong("all_reduce", "a different dtype travels")
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


@wrong("all_reduce", "something is left behind")
def all_reduce_that_draws_lots(x, group=None):
    torch.rand(1)
    collectives.all_reduce(x, group=group)


@wrong("all_reduce", "something is left behind", alone=True)
def all_reduce_in_double_precision_from_now_on(x, group=None):
    torch.set_default_dtype(torch.float64)
    collectives.all_reduce(x, group=group)


@wrong("all_reduce", "less than the least possible")
def all_reduce_past_the_wire(x, group=None, calls=itertools.count()):  # noqa: B008
    """Through the store in which the ranks find each other."""
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(group or dist.group.WORLD)
    call = f"{ranks} {next(calls)}" if len(ranks) == dist.get_world_size() else f"{ranks} {x.numel()}"
    mine = io.BytesIO()
    torch.save(x.clone(), mine)
    store.set(f"{call} {dist.get_rank()}", mine.getvalue())
    everybody = [torch.load(io.BytesIO(store.get(f"{call} {rank}"))) for rank in ranks]
    x.copy_(torch.stack(everybody).sum(0))


@wrong("reduce_scatter", "too many rounds")
def reduce_scatter_by_one_reduce_after_the_other(x, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    pieces = x.view(-1).tensor_split(len(members))
    for root, piece in zip(members, pieces, strict=True):
        collectives.reduce(piece, root, group=group)
    return pieces[dist.get_rank(group)]


@wrong("all_gather")
def all_gather_by_one_broadcast_after_the_other(x, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for root, piece in zip(members, x.view(-1).tensor_split(len(members)), strict=True):
        collectives.broadcast(piece, root, group)
