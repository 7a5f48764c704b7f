"""Wrong answers to the exercises of notebook 06, and the right ones that they spoil."""

import torch
import torch.distributed as dist

from labs.group import all_gather, reduce_scatter
from tests.wrong_answers import answers

wrong = answers.wrong

# ---- right ones, which those below spoil -----------------------------------------------------------------


def averaged(gradient, mesh):
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()


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
