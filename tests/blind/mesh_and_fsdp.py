"""Right and wrong answers, written from the notebooks alone."""

from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.group import all_gather, reduce_scatter

# ============================================================ partial_to_shard: right


def _lengths(summand, dim, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = summand.shape[dim]
    longest = -(-size // ranks)
    return rank, ranks, size, longest, max(0, min(longest, size - rank * longest))


def ps_movedim_pad(summand, dim, group=None):
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, ranks * longest - size]).contiguous()
    piece = reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def ps_table(summand, dim, group=None):
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    shape = list(summand.shape)
    shape[dim] = longest
    table = summand.new_zeros(ranks, *shape)
    for row, piece in zip(table, summand.split(max(longest, 1), dim)):
        row.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    piece = reduce_scatter(table.view(-1), group).view(shape)
    return piece if mine == longest else piece.narrow(dim, 0, mine).clone(memory_format=torch.contiguous_format)


def ps_cat(summand, dim, group=None):
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rest = list(summand.shape)
    each = prod(rest[:dim] + rest[dim + 1 :]) * longest
    parts = []
    for r in range(ranks):
        start, end = min(r * longest, size), min((r + 1) * longest, size)
        part = summand.narrow(dim, start, end - start)
        if end - start < longest:
            fill = rest[:dim] + [longest - (end - start)] + rest[dim + 1 :]
            part = torch.cat([part, summand.new_zeros(fill)], dim)
        parts.append(part.reshape(-1))
    vector = torch.cat(parts)
    assert vector.numel() == each * ranks
    del parts, part
    piece = reduce_scatter(vector, group)
    rest[dim] = longest
    out = summand.new_empty([mine if i == dim else n for i, n in enumerate(rest)])
    out.copy_(piece.view(rest).narrow(dim, 0, mine))
    return out


def ps_unflatten(summand, dim, group=None):
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    shape = list(summand.shape)
    shape[dim] = ranks * longest
    padded = torch.zeros(shape, dtype=summand.dtype, device=summand.device)
    padded.narrow(dim, 0, size).copy_(summand)
    shape[dim : dim + 1] = [ranks, longest]
    vector = padded.view(shape).movedim(dim, 0).reshape(-1)
    del padded
    shape = shape[:dim] + shape[dim + 1 :]
    piece = reduce_scatter(vector, group).view(shape)
    out = torch.empty_like(piece.narrow(dim, 0, mine), memory_format=torch.contiguous_format)
    return out.copy_(piece.narrow(dim, 0, mine))


def ps_transpose(summand, dim, group=None):
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    first = summand.transpose(0, dim)
    others = first.shape[1:]
    vector = summand.new_zeros(ranks * longest * prod(others))
    vector[: summand.numel()] = first.reshape(-1)
    piece = reduce_scatter(vector, group)[: mine * prod(others)]
    return piece.view(mine, *others).transpose(0, dim).contiguous().clone()


def ps_all_to_all(summand, dim, group=None):
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    send = summand.new_zeros(ranks * longest, *rows.shape[1:])
    send[:size] = rows
    come = torch.empty_like(send)
    dist.all_to_all_single(come, send, group=group)
    total = come[:mine].clone()
    for r in range(1, ranks):
        total += come[r * longest : r * longest + mine]
    come.untyped_storage().resize_(0)
    send.untyped_storage().resize_(0)
    return total.movedim(0, dim)


# ============================================================ partial_to_shard: wrong


def psw_no_padding(summand, dim, group=None):  # pieces not padded: fails where N does not divide the dim
    ranks = dist.get_world_size(group)
    pieces = summand.chunk(ranks, dim)
    vector = torch.cat([piece.reshape(-1) for piece in pieces])
    return reduce_scatter(vector, group).view(pieces[0].shape)


def psw_dim_0(summand, dim, group=None):  # always cuts along dim 0
    return ps_movedim_pad(summand, 0, group)


def psw_memory_order(summand, dim, group=None):  # pads dim, but does not put pieces one after another: dim > 0 wrong
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    shape = list(summand.shape)
    shape[dim] = ranks * longest
    padded = summand.new_zeros(shape)
    padded.narrow(dim, 0, size).copy_(summand)
    shape[dim] = longest
    return reduce_scatter(padded.view(-1), group).view(shape).narrow(dim, 0, mine).clone()


def psw_not_trimmed(summand, dim, group=None):  # keeps the padding: shows where N does not divide the dim
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, ranks * longest - size]).contiguous()
    piece = reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])
    return piece.movedim(0, dim).contiguous()


def psw_view_of_padded(summand, dim, group=None):  # a view of the padded piece: an empty piece keeps a whole one
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, ranks * longest - size]).contiguous()
    piece = reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim)


def psw_all_reduce(summand, dim, group=None):  # all-reduces, then cuts: twice the bytes
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.narrow(dim, min(rank * longest, size), mine).clone()


def psw_world(summand, dim, group=None):  # reduce-scatters over all ranks, whatever the group
    return ps_table(summand, dim, None)


def psw_global_rank(summand, dim, group=None):  # trims by the rank in the world: wrong in a group of some ranks
    _, ranks, size, longest, _ = _lengths(summand, dim, group)
    rank = dist.get_rank()
    mine = max(0, min(longest, size - rank * longest))
    rows = summand.movedim(dim, 0)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, ranks * longest - size]).contiguous()
    piece = reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone()


def psw_float_table(summand, dim, group=None):  # table of the default dtype: returns float32 for other dtypes
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    table = torch.zeros(ranks * longest, *rows.shape[1:])
    table[:size] = rows
    piece = reduce_scatter(table.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone()


def psw_double_wire(summand, dim, group=None):  # sums in float64 and casts back: 2 to 4 times the bytes
    return ps_table(summand.double(), dim, group).to(summand.dtype)


def psw_changes_summand(summand, dim, group=None):  # writes the sum back into the summand
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    piece = ps_table(summand, dim, group)
    summand.narrow(dim, min(rank * longest, size), mine).copy_(piece)
    return piece


def psw_floor(summand, dim, group=None):  # even cut like tensor_split: 6 on 4 ranks is 2,2,1,1 instead of 2,2,2,0
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = [p.movedim(dim, 0) for p in summand.tensor_split(ranks, dim)]
    longest = len(pieces[0])
    table = summand.new_zeros(ranks, longest, *pieces[0].shape[1:])
    for row, piece in zip(table, pieces):
        row[: len(piece)] = piece
    mine = reduce_scatter(table.view(-1), group).view(table.shape[1:])
    return mine[: len(pieces[rank])].movedim(0, dim).clone()


def psw_chunk(summand, dim, group=None):  # torch.chunk may return fewer pieces than ranks: fails with empty pieces
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    pieces = [p.movedim(dim, 0) for p in summand.chunk(ranks, dim)]
    lengths = [len(p) for p in pieces]
    pieces[-1] = F.pad(pieces[-1], [0, 0] * (summand.dim() - 1) + [0, longest - len(pieces[-1])])
    vector = torch.stack(pieces).reshape(-1)
    piece = reduce_scatter(vector, group).view(longest, *pieces[0].shape[1:])
    return piece[: lengths[rank]].movedim(0, dim).clone()


def psw_pad_front(summand, dim, group=None):  # zeros before, not behind: pieces are shifted
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [ranks * longest - size, 0]).contiguous()
    piece = reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone()


def psw_mean(summand, dim, group=None):  # the mean, not the sum (and integers become floats)
    return ps_table(summand, dim, group) / dist.get_world_size(group)


def psw_view_needs_contiguous(summand, dim, group=None):  # .view(-1) of the summand: fails for other strides
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    before, after = prod(summand.shape[:dim]), prod(summand.shape[dim + 1 :])
    box = summand.view(before, size, after)
    table = summand.new_zeros(ranks * longest, before, after)
    table[:size] = box.transpose(0, 1)
    piece = reduce_scatter(table.view(-1), group).view(longest, before, after)[:mine]
    return piece.transpose(0, 1).reshape(*summand.shape[:dim], mine, *summand.shape[dim + 1 :]).clone()


def psw_empty_returns_early(summand, dim, group=None):  # a rank with an empty piece takes no part: the others hang
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    if mine == 0:
        shape = list(summand.shape)
        shape[dim] = 0
        return summand.new_empty(shape)
    return ps_table(summand, dim, group)


def psw_gather_all(summand, dim, group=None):  # everybody's summands to everybody: N times the bytes, N copies
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    everyone = [torch.empty_like(summand, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(everyone, summand.contiguous(), group=group)
    total = everyone[0]
    for other in everyone[1:]:
        total += other
    return total.narrow(dim, min(rank * longest, size), mine).clone()


def psw_view_of_arrived(summand, dim, group=None):  # adds up in the first of the arrived pieces and returns it: keeps all N
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    send = summand.new_zeros(ranks * longest, *rows.shape[1:])
    send[:size] = rows
    come = torch.empty_like(send)
    dist.all_to_all_single(come, send, group=group)
    total = come[:longest]
    for r in range(1, ranks):
        total += come[r * longest : (r + 1) * longest]
    return total[:mine].movedim(0, dim)


def psw_sum_widens(summand, dim, group=None):  # .sum(0) makes int64 of int32 and bool
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    send = summand.new_zeros(ranks, longest, *rows.shape[1:])
    send.view(ranks * longest, *rows.shape[1:])[:size] = rows
    come = torch.empty_like(send)
    dist.all_to_all_single(come.view(-1), send.view(-1), group=group)
    total = come.sum(0)
    return total[:mine].movedim(0, dim).clone()


def psw_flat_empty(summand, dim, group=None):  # an empty piece comes back as a 1-D tensor
    piece = ps_table(summand, dim, group)
    return piece if piece.numel() else summand.new_empty(0)


_PS_BUFFERS = {}


def psw_keeps_buffer(summand, dim, group=None):  # keeps its padded buffer for the next call: memory held after the call
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0)
    key = (ranks, longest, tuple(rows.shape), summand.dtype)
    if key not in _PS_BUFFERS:
        _PS_BUFFERS[key] = summand.new_zeros(ranks * longest, *rows.shape[1:])
    table = _PS_BUFFERS[key]
    table[:size] = rows
    piece = reduce_scatter(table.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone()


def psw_many_copies(summand, dim, group=None):  # keeps each of its intermediate copies: more than 4.5 x
    rank, ranks, size, longest, mine = _lengths(summand, dim, group)
    rows = summand.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, ranks * longest - size]).clone()
    pieces = [part.clone() for part in padded.split(max(longest, 1))]
    flat = [part.flatten().clone() for part in pieces]
    vector = torch.cat(flat)
    piece = reduce_scatter(vector, group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone()


# ============================================================ hsdp_gradient: right


def hg_end(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece.div_(mesh.size("shard") * mesh.size("replicate"))


def hg_between(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size("replicate")


def hg_all_between(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    piece /= mesh.size("shard") * mesh.size("replicate")
    work = dist.all_reduce(piece, group=mesh.get_group("replicate"), async_op=True)
    work.wait()
    return piece


def hg_gather_and_add(gradient, mesh):
    """Adds the replicas' pieces in their order: on 2 x 2 as many bytes as the all-reduce."""
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    group = mesh.get_group("replicate")
    replicas = dist.get_world_size(group)
    pieces = piece.new_empty(replicas, len(piece))
    all_gather(pieces.view(-1), piece, group=group)
    piece.copy_(pieces[0])
    for other in pieces[1:]:
        piece += other
    return piece.div_(replicas * mesh.size("shard"))


def hg_own_all_to_all(gradient, mesh):
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    shards = mesh.size("shard")
    parts = torch.empty_like(gradient)
    dist.all_to_all_single(parts, gradient, group=shard)
    piece = parts.view(shards, -1).sum(0)
    del parts
    dist.all_reduce(piece, op=dist.ReduceOp.SUM, group=replicate)
    return piece.mul_(1 / dist.get_world_size()) if gradient.dtype == torch.bfloat16 else piece / dist.get_world_size()


def hg_skip_alone(gradient, mesh):
    """No collective along an axis of one rank."""
    shards, replicas = mesh.size("shard"), mesh.size("replicate")
    piece = reduce_scatter(gradient, mesh.get_group("shard")) if shards > 1 else gradient.clone()
    if replicas > 1:
        dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece.div_(shards * replicas)


# ============================================================ hsdp_gradient: wrong


def hgw_shard_only(gradient, mesh):  # averaged over the shards only: replicas differ
    return reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")


def hgw_by_shards(gradient, mesh):  # divided by the shards only
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size("shard")


def hgw_by_replicas(gradient, mesh):  # divided by the replicas only
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size("replicate")


def hgw_sum(gradient, mesh):  # the sum
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece


def hgw_by_sum_of_sizes(gradient, mesh):  # divided by S + R: right on 2 x 2
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / (mesh.size("shard") + mesh.size("replicate"))


def hgw_axes_swapped(gradient, mesh):  # cut along replicate, added along shard
    piece = reduce_scatter(gradient, mesh.get_group("replicate"))
    dist.all_reduce(piece, group=mesh.get_group("shard"))
    return piece / dist.get_world_size()


def hgw_replicate_first(gradient, mesh):  # all-reduces the whole gradient first: 1.5 x
    whole = gradient.clone()
    dist.all_reduce(whole, group=mesh.get_group("replicate"))
    return reduce_scatter(whole, mesh.get_group("shard")) / dist.get_world_size()


def hgw_world(gradient, mesh):  # one all-reduce over all ranks, and a slice: 1.5 x
    whole = gradient.clone()
    dist.all_reduce(whole)
    n = len(gradient) // mesh.size("shard")
    place = dist.get_rank(mesh.get_group("shard"))
    return whole[place * n : (place + 1) * n] / dist.get_world_size()


def hgw_divides_first(gradient, mesh):  # a divided copy of the whole gradient: 3 x in memory
    mean = gradient / dist.get_world_size()
    piece = reduce_scatter(mean, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece


def hgw_divides_in_place(gradient, mesh):  # divides the given gradient in place
    gradient /= dist.get_world_size()
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece


def hgw_alias_one_shard(gradient, mesh):  # with one shard the piece is the gradient itself, and is changed
    piece = gradient if mesh.size("shard") == 1 else reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece.div_(dist.get_world_size())


def hgw_no_shard_bug(gradient, mesh):  # one shard: nothing to do (the bug of the notebook)
    if mesh.size("shard") == 1:
        return gradient.clone()
    return hg_end(gradient, mesh)


def hgw_one_replica(gradient, mesh):  # one replica: forgets to divide
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    if mesh.size("replicate") == 1:
        return piece
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / dist.get_world_size()


_HG_BUFFERS = {}


def hgw_static_buffer(gradient, mesh):  # the next call writes into what the last one returned
    piece = hg_end(gradient, mesh)
    buffer = _HG_BUFFERS.setdefault((piece.shape, piece.dtype), torch.empty_like(piece))
    return buffer.copy_(piece)


def hgw_view(gradient, mesh):  # a view of all that arrived
    parts = torch.empty_like(gradient)
    dist.all_to_all_single(parts, gradient, group=mesh.get_group("shard"))
    first, *others = parts.chunk(mesh.size("shard"))
    for other in others:
        first += other
    dist.all_reduce(first, group=mesh.get_group("replicate"))
    return first.div_(dist.get_world_size())


def hgw_float32_result(gradient, mesh):  # float32, whatever came in
    return hg_end(gradient, mesh).float()


def hgw_float32_wire(gradient, mesh):  # bfloat16 all-reduced in float32: too many bytes along replicate
    piece = reduce_scatter(gradient, mesh.get_group("shard")).float()
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return (piece / dist.get_world_size()).to(gradient.dtype)


def hgw_low_precision(gradient, mesh):  # "compresses" along replicate: bfloat16 for all dtypes
    piece = reduce_scatter(gradient, mesh.get_group("shard")).bfloat16()
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece.to(gradient.dtype) / dist.get_world_size()


def hgw_all_reduce_everyone(gradient, mesh):  # the all-reduce without a group mixes different pieces
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece)
    return piece / dist.get_world_size()


def hgw_first_replica(gradient, mesh):  # reduced to the first replica only: replicas differ
    group = mesh.get_group("replicate")
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.reduce(piece, dist.get_process_group_ranks(group)[0], group=group)
    return piece / dist.get_world_size()


def hgw_own_first(gradient, mesh):  # adds the own piece first, then the others': other bits on other replicas from three on
    group = mesh.get_group("replicate")
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    pieces = piece.new_empty(dist.get_world_size(group), len(piece))
    all_gather(pieces.view(-1), piece, group=group)
    me = dist.get_rank(group)
    for number, other in enumerate(pieces):
        if number != me:
            piece += other
    return piece.div_(dist.get_world_size())


def hgw_four(gradient, mesh):  # divided by 4
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / 4


def hgw_rank_slice(gradient, mesh):  # averages along both axes, cuts by the global rank: wrong (and empty) in the second replica
    whole = gradient.clone()
    dist.all_reduce(whole, group=mesh.get_group("shard"))
    n = len(gradient) // mesh.size("shard")
    piece = whole[dist.get_rank() * n : (dist.get_rank() + 1) * n].clone()
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / dist.get_world_size()


_HG_HISTORY = []


def hgw_history(gradient, mesh):  # keeps a copy of each gradient it has seen: more than 2.75 x, and more with each call
    _HG_HISTORY.append(gradient.clone())
    return hg_end(gradient, mesh)


# ============================================================ the lists


def _named(prefix):
    return [(name[len(prefix) :], f) for name, f in list(globals().items()) if name.startswith(prefix) and callable(f)]


RIGHT = {
    "partial_to_shard": _named("ps_"),
    "hsdp_gradient": _named("hg_"),
}
WRONG = {
    "partial_to_shard": _named("psw_"),
    "hsdp_gradient": _named("hgw_"),
}
