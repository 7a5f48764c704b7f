"""Right and wrong answers, written from the notebooks alone."""


import torch
import torch.distributed as dist

from labs.group import all_gather, reduce_scatter

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
    "hsdp_gradient": _named("hg_"),
}
WRONG = {
    "hsdp_gradient": _named("hgw_"),
}
