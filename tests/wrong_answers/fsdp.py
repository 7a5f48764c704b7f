"""Wrong answers to the exercises of notebook 06, and the right ones that they spoil."""

import torch
import torch.distributed as dist

from labs.group import all_gather, reduce_scatter
from tests.wrong_answers import answers


def wrong(check, mistake, **options):
    """A wrong unshard comes with a right reshard, and the other way round."""
    pairs = {"unshard": lambda fn: (fn, reshard), "reshard": lambda fn: (unshard, fn)}
    exercise = "unshard_and_reshard" if check in pairs else check
    return answers.wrong(exercise, mistake, functions=pairs.get(check), **options)


# ---- right ones, which those below spoil -----------------------------------------------------------------


def pieces_of(fulls, ranks):
    return [-(-len(full) // ranks) * full.shape[1:].numel() for full in fulls]


def side_by_side(shards, sizes, dtype):
    row = torch.zeros(sum(sizes), dtype=dtype)
    for shard, place in zip(shards, row.split(sizes), strict=True):
        place[: shard.numel()] = shard.flatten()
    return row


def table_of(shards, fulls, dtype=None):
    ranks, sizes = dist.get_world_size(), pieces_of(fulls, dist.get_world_size())
    row = side_by_side(shards, sizes, dtype or fulls[0].dtype)
    table = row.new_empty(ranks, len(row))
    all_gather(table.view(-1), row)
    return table, sizes


def fill(full, numbers):
    full.untyped_storage().resize_(full.nbytes)
    full.copy_(numbers.flatten()[: full.numel()].view(full.shape))


def unshard(shards, fulls):
    table, sizes = table_of(shards, fulls)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


def reshard(fulls):
    for full in fulls:
        full.untyped_storage().resize_(0)


def averaged(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()


# ---- unshard and reshard ---------------------------------------------------------------------------------


@wrong("unshard", "gathered in the wrong dtype")
def unshard_and_cast_later(shards, fulls):
    table, sizes = table_of(shards, fulls, shards[0].dtype)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "rounded on the way")
def unshard_in_half_precision(shards, fulls):
    table, sizes = table_of(shards, fulls, torch.float16)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "a collective for each parameter")
def unshard_one_by_one(shards, fulls):
    for shard, full in zip(shards, fulls, strict=True):
        unshard([shard], [full])


@wrong("unshard", "the pieces of several parameters are mixed up")
def unshard_row_by_row(shards, fulls):
    table, sizes = table_of(shards, fulls)
    ranks = dist.get_world_size()
    for full, numbers in zip(fulls, table.flatten().split([size * ranks for size in sizes]), strict=True):
        fill(full, numbers)


@wrong("unshard", "one's own shard everywhere")
def unshard_what_is_here(shards, fulls):
    ranks = dist.get_world_size()
    sizes = pieces_of(fulls, ranks)
    row = side_by_side(shards, sizes, fulls[0].dtype)
    table = row.repeat(ranks, 1)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "rows in the wrong order")
def unshard_from_the_next_rank_on(shards, fulls):
    table, sizes = table_of(shards, fulls)
    for full, pieces in zip(fulls, table.roll(-1, 0).split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "full has other memory")
def unshard_into_new_memory(shards, fulls):
    table, sizes = table_of(shards, fulls)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        full.data = pieces.flatten()[: full.numel()].view(full.shape)


@wrong("unshard", "storage of another size")
def unshard_with_the_padding(shards, fulls):
    table, sizes = table_of(shards, fulls)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        full.untyped_storage().resize_(pieces.numel() * full.itemsize)
        full.copy_(pieces.flatten()[: full.numel()].view(full.shape))


@wrong("unshard", "an all-reduce where a part is enough")
def unshard_by_an_all_reduce(shards, fulls):
    ranks = dist.get_world_size()
    sizes = pieces_of(fulls, ranks)
    table = torch.zeros(ranks, sum(sizes), dtype=fulls[0].dtype)
    table[dist.get_rank()] = side_by_side(shards, sizes, table.dtype)
    dist.all_reduce(table)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "too many bytes")
def unshard_with_room_for_the_longest(shards, fulls):
    """Every parameter is padded as the longest one."""
    ranks = dist.get_world_size()
    most = max(pieces_of(fulls, ranks))
    row = side_by_side(shards, [most] * len(fulls), fulls[0].dtype)
    table = row.new_empty(ranks, len(row))
    all_gather(table.view(-1), row)
    for full, pieces, size in zip(fulls, table.split(most, 1), pieces_of(fulls, ranks), strict=True):
        fill(full, pieces[:, :size])


GATHERED = {}


@wrong("unshard", "the parameters of the step before")
def unshard_once(shards, fulls):
    """Nothing is sharded after the first time."""
    if fulls[0].data_ptr() or id(fulls) not in GATHERED:
        table, sizes = table_of(shards, fulls)
        GATHERED[id(fulls)] = [pieces.clone() for pieces in table.split(sizes, 1)]
    for full, pieces in zip(fulls, GATHERED[id(fulls)], strict=True):
        fill(full, pieces)


@wrong("unshard", "something is kept from the call")
def unshard_and_remember(shards, fulls):
    table, sizes = table_of(shards, fulls)
    GATHERED["table"] = table
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "full copies are kept")
def unshard_after_all_are_whole(shards, fulls):
    table, sizes = table_of(shards, fulls)
    wholes = [pieces.flatten() for pieces in table.split(sizes, 1)]
    for full, whole in zip(fulls, wholes, strict=True):
        fill(full, whole)


@wrong("unshard", "a barrier")
def unshard_together(shards, fulls):
    unshard(shards, fulls)
    dist.barrier()


@wrong("unshard", "nobody waited")
def unshard_and_do_not_wait(shards, fulls):
    ranks, sizes = dist.get_world_size(), pieces_of(fulls, dist.get_world_size())
    row = side_by_side(shards, sizes, fulls[0].dtype)
    table = row.new_zeros(ranks, len(row))
    all_gather(table.view(-1), row, async_op=True)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@wrong("unshard", "the shard has changed")
def unshard_and_clear(shards, fulls):
    unshard(shards, fulls)
    for shard in shards:
        shard.zero_()


@wrong("unshard", "the shard has changed")
def unshard_and_free_the_shards(shards, fulls):
    unshard(shards, fulls)
    for shard in shards:
        shard.untyped_storage().resize_(0)


@wrong("unshard", "a rank died", alone=True)
def unshard_without_room(shards, fulls):
    table, sizes = table_of(shards, fulls)
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        full.copy_(pieces.flatten()[: full.numel()].view(full.shape))


@wrong("reshard", "full has other memory")
def reshard_by_an_empty_tensor(fulls):
    for full in fulls:
        empty = torch.empty_like(full)
        reshard([empty])
        full.data = empty


@wrong("reshard", "full parameters are never freed")
def reshard_never(fulls):
    pass


@wrong("reshard", "full parameters are never freed")
def reshard_by_zeros(fulls):
    for full in fulls:
        full.zero_()


@wrong("reshard", "full parameters are never freed")
def reshard_by_another_tensor(fulls):
    for full in fulls:
        full.data = torch.empty_like(full)


@wrong("reshard", "full parameters are never freed")
def reshard_all_but_the_last(fulls):
    reshard(fulls[:-1])


# ---- the gradient of HSDP --------------------------------------------------------------------------------


@wrong("hsdp_gradient", "nothing is sharded")
def all_of_it(gradient, mesh):
    dist.all_reduce(gradient)
    return gradient / mesh.size()


@wrong("hsdp_gradient", "never averaged over the replicas")
def only_the_shards(gradient, mesh):
    return reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")


@wrong("hsdp_gradient", "never averaged over the shards")
def only_the_replicas(gradient, mesh):
    piece = gradient.chunk(mesh.size("shard"))[mesh.get_local_rank("shard")].clone()
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size("replicate")


@wrong("hsdp_gradient", "sharded along the wrong axis")
def the_axes_exchanged(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("replicate"))
    dist.all_reduce(piece, group=mesh.get_group("shard"))
    return piece / mesh.size()


@wrong("hsdp_gradient", "averaged twice")
def each_axis_and_all(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()


@wrong("hsdp_gradient", "averaged twice")
def before_and_after(gradient, mesh):
    return averaged(gradient / mesh.size(), mesh)


@wrong("hsdp_gradient", "divided by one axis only")
def by_the_shards_alone(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece


@wrong("hsdp_gradient", "summed instead of averaged")
def the_sum(gradient, mesh):
    return averaged(gradient, mesh) * mesh.size()


@wrong("hsdp_gradient", "whole gradients cross the replicas")
def replicas_first(gradient, mesh):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=mesh.get_group("replicate"))
    return reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size()


@wrong("hsdp_gradient", "whole gradients cross the replicas")
def all_ranks_and_a_part(gradient, mesh):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient.chunk(mesh.size("shard"))[mesh.get_local_rank("shard")].clone() / mesh.size()


@wrong("hsdp_gradient", "whole gradients cross the replicas")
def reduced_over_all_ranks_and_gathered(gradient, mesh):
    """As many bytes in all as are due, and nearly all of them between the replicas."""
    replicas, shards = mesh.shape
    size = len(gradient) // shards
    parts = torch.nn.functional.pad(gradient.view(shards, size), (0, -size % replicas)).view(shards, replicas, -1)
    mine = reduce_scatter(parts.transpose(0, 1).flatten(), None)
    piece = mine.new_empty(replicas * len(mine))
    all_gather(piece, mine, group=mesh.get_group("replicate"))
    return piece[:size] / mesh.size()


@wrong("hsdp_gradient", "one replica sends for all")
def reduced_to_one_replica(gradient, mesh):
    piece, group = reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size(), mesh.get_group("replicate")
    dist.reduce(piece, group_dst=0, group=group)
    dist.broadcast(piece, group_src=0, group=group)
    return piece


@wrong("hsdp_gradient", "too many bytes")
def reduced_to_every_shard(gradient, mesh):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=mesh.get_group("shard"))
    piece = gradient.chunk(mesh.size("shard"))[mesh.get_local_rank("shard")].clone()
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()


@wrong("hsdp_gradient", "too many bytes")
def gathered_from_the_replicas(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    pieces = piece.new_empty(mesh.size("replicate"), len(piece))
    all_gather(pieces.view(-1), piece, group=mesh.get_group("replicate"))
    return pieces.sum(0) / mesh.size()


@wrong("hsdp_gradient", "what was given has changed")
def divided_where_it_stands(gradient, mesh):
    return averaged(gradient.div_(mesh.size()), mesh) * mesh.size()


@wrong("hsdp_gradient", "sharded over all ranks")
def a_piece_for_every_rank(gradient, mesh):
    room = -(-len(gradient) // mesh.size()) * mesh.size()
    padded = torch.nn.functional.pad(gradient, (0, room - len(gradient)))
    return reduce_scatter(padded, None) / mesh.size()


@wrong("hsdp_gradient", "another rank's piece")
def the_next_ones_piece(gradient, mesh):
    shards = mesh.size("shard")
    return averaged(gradient.view(shards, -1).roll(-1, 0).reshape(-1), mesh)


@wrong("hsdp_gradient", "reduced in the wrong dtype")
def in_double_precision(gradient, mesh):
    return averaged(gradient.double(), mesh).to(gradient.dtype)


@wrong("hsdp_gradient", "the dtype changed")
def and_left_there(gradient, mesh):
    return averaged(gradient.double(), mesh)


@wrong("hsdp_gradient", "a view keeps the whole gradient")
def a_view_of_it(gradient, mesh):
    piece = averaged(gradient, mesh)
    mine = gradient.chunk(mesh.size("shard"))[mesh.get_local_rank("shard")]
    return mine.copy_(piece)


@wrong("hsdp_gradient", "nothing is returned")
def in_place_of_it(gradient, mesh):
    gradient.chunk(mesh.size("shard"))[mesh.get_local_rank("shard")].copy_(averaged(gradient, mesh))


@wrong("hsdp_gradient", "nobody waited")
def not_waited_for(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size()
    sums = piece.clone()
    dist.all_reduce(sums, group=mesh.get_group("replicate"), async_op=True)
    return sums.clone()


@wrong("hsdp_gradient", "the other replicas are missing")
def read_before_the_wait(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size()
    before = piece.clone()
    dist.all_reduce(piece, group=mesh.get_group("replicate"), async_op=True).wait()
    return before


@wrong("hsdp_gradient", "full copies are kept")
def divided_first(gradient, mesh):
    piece = reduce_scatter(gradient / mesh.size(), mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece


BUFFERS = {}


@wrong("hsdp_gradient", "a later call writes into what this one returned")
def into_one_buffer(gradient, mesh):
    piece = averaged(gradient, mesh)
    return BUFFERS.setdefault((piece.shape, piece.dtype), torch.empty_like(piece)).copy_(piece)


KEPT = []


@wrong("hsdp_gradient", "something is kept from every call")
def and_remembered(gradient, mesh):
    KEPT.append(gradient)
    return averaged(gradient, mesh)
