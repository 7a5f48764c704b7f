"""Wrong answers to the exercises of notebook 05, and the right ones that some of them spoil."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from labs.group import reduce_scatter
from tests.wrong_answers.answers import wrong

# ---- right ones, which those below spoil -----------------------------------------------------------------


def in_pieces(summand, dim, ranks, longest):
    """[N, *piece], padded."""
    missing = ranks * longest - summand.shape[dim]
    padded = pad(summand, [0, 0] * (summand.ndim - dim - 1) + [0, missing])
    return padded.unflatten(dim, (ranks, longest)).movedim(dim, 0)


def partial_to_shard(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = summand.shape[dim]
    longest = -(-size // ranks)
    pieces = in_pieces(summand, dim, ranks, longest)
    mine = reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:])
    return mine.narrow(dim, 0, max(0, min(longest, size - rank * longest)))


# ---- partial_to_shard ------------------------------------------------------------------------------------


@wrong("partial_to_shard", "an all-reduce where a part is enough")
def reduce_all_then_cut(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    longest = -(-summand.shape[dim] // ranks)
    start = min(rank * longest, summand.shape[dim])
    return total.narrow(dim, start, min(longest, summand.shape[dim] - start)).clone()


@wrong("partial_to_shard", "the whole sum instead of a piece")
def reduce_all(summand, dim, group=None):
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@wrong("partial_to_shard", "one's own summand")
def only_cut(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = summand.chunk(ranks, dim)
    return pieces[rank].clone() if rank < len(pieces) else summand.narrow(dim, 0, 0)


@wrong("partial_to_shard", "averaged instead of summed")
def mean_of_summands(summand, dim, group=None):
    return partial_to_shard(summand, dim, group) / dist.get_world_size(group)


KEPT = {}


@wrong("partial_to_shard", "right only the first time", alone=True)
def kept_by_shape(summand, dim, group=None):
    key = summand.shape, summand.dtype, dim, summand.is_contiguous(), dist.get_world_size(group)
    if key not in KEPT:
        KEPT[key] = partial_to_shard(summand, dim, group)
    return KEPT[key].clone()


@wrong("partial_to_shard", "right only where no piece is empty", alone=True)
def leaves_without_a_piece(summand, dim, group=None):
    size, ranks = summand.shape[dim], dist.get_world_size(group)
    if dist.get_rank(group) * -(-size // ranks) >= size:
        return summand.narrow(dim, 0, 0).clone()
    return partial_to_shard(summand, dim, group)


BUFFERS = {}


@wrong("partial_to_shard", "a later call writes into what this one returned", alone=True)
def into_the_same_buffer(summand, dim, group=None):
    piece = partial_to_shard(summand, dim, group)
    key = piece.shape, piece.dtype
    BUFFERS[key] = BUFFERS.get(key, piece).copy_(piece)
    return BUFFERS[key]


@wrong("partial_to_shard", "the padding is still there")
def keeps_padding(summand, dim, group=None):
    ranks = dist.get_world_size(group)
    pieces = in_pieces(summand, dim, ranks, -(-summand.shape[dim] // ranks))
    return reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:])


@wrong("partial_to_shard", "cut in the order of memory")
def flat(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = summand.shape[dim]
    longest = -(-size // ranks)
    padded = pad(summand, [0, 0] * (summand.ndim - dim - 1) + [0, ranks * longest - size])
    shape = (*summand.shape[:dim], longest, *summand.shape[dim + 1 :])
    mine = reduce_scatter(padded.flatten(), group).view(shape)
    return mine.narrow(dim, 0, max(0, min(longest, size - rank * longest)))


@wrong("partial_to_shard", "the pieces are rotated")
def next_piece(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = summand.shape[dim]
    longest = -(-size // ranks)
    pieces = in_pieces(summand, dim, ranks, longest).roll(1, 0)
    mine = reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:])
    return mine.narrow(dim, 0, max(0, min(longest, size - rank * longest)))


@wrong("partial_to_shard", "cut along another dim")
def always_dim_0(summand, dim, group=None):
    return partial_to_shard(summand, 0, group)


@wrong("partial_to_shard", "another shape")
def as_tensor_split_cuts(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    theirs = [piece.contiguous() for piece in summand.tensor_split(ranks, dim)]
    for index, piece in enumerate(theirs):
        theirs[index] = piece = piece.clone()
        dist.reduce(piece, group=group, group_dst=index)
    return theirs[rank]


@wrong("partial_to_shard", alone=True)
def no_padding(summand, dim, group=None):
    ranks = dist.get_world_size(group)
    pieces = torch.stack(summand.tensor_split(ranks, dim))
    return reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:])


@wrong("partial_to_shard", "right only on the group of all ranks", alone=True)
def forgets_the_group(summand, dim, group=None):
    return partial_to_shard(summand, dim)


@wrong("partial_to_shard", "what was given has changed")
def in_place(summand, dim, group=None):
    mine = partial_to_shard(summand, dim, group)
    summand.zero_()
    return mine


@wrong("partial_to_shard", "the dtype changed")
def in_float(summand, dim, group=None):
    return partial_to_shard(summand.double(), dim, group)


@wrong("partial_to_shard", "a different dtype travels")
def wider(summand, dim, group=None):
    if not summand.is_floating_point():
        return partial_to_shard(summand, dim, group)
    return partial_to_shard(summand.double(), dim, group).to(summand.dtype)


@wrong("partial_to_shard", "rounded on the way")
def narrower(summand, dim, group=None):
    if not summand.is_floating_point():
        return partial_to_shard(summand, dim, group)
    return partial_to_shard(summand.bfloat16(), dim, group).to(summand.dtype)


@wrong("partial_to_shard", "nothing is returned")
def returns_nothing(summand, dim, group=None):
    partial_to_shard(summand, dim, group)


@wrong("partial_to_shard", "something is kept from the call")
def view_of_all_that_arrived(summand, dim, group=None):
    rank, ranks, size = dist.get_rank(group), dist.get_world_size(group), summand.shape[dim]
    longest = -(-size // ranks)
    pieces = in_pieces(summand, dim, ranks, longest).contiguous()
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived.view(-1), pieces.view(-1), group=group)
    total = arrived[0].copy_(arrived.sum(0, dtype=summand.dtype))
    return total.narrow(dim, 0, max(0, min(longest, size - rank * longest)))


@wrong("partial_to_shard", "something is kept from every call", alone=True)
def remembers(summand, dim, group=None, memory=[]):  # noqa: B006
    memory.append(summand.clone())
    return partial_to_shard(summand, dim, group)


@wrong("partial_to_shard", "right only in some dtypes")
def adds_up_in_a_wider_dtype(summand, dim, group=None):
    piece = partial_to_shard(summand, dim, group)
    return torch.stack([piece]).sum(0)


@wrong("partial_to_shard")
def turned_where_the_dim_is_the_third(summand, dim, group=None):
    piece = partial_to_shard(summand, dim, group)
    return piece.movedim(dim, 0).transpose(0, dim) if dim == 2 else piece


@wrong("partial_to_shard")
def views_what_divides(summand, dim, group=None):
    if dim == 0 and summand.shape[0] % dist.get_world_size(group) == 0:
        summand.view(-1)
    return partial_to_shard(summand, dim, group)


@wrong("partial_to_shard", "too many bytes")
def gathers_everything(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    everybodys = [torch.empty(summand.shape, dtype=summand.dtype) for _ in range(ranks)]
    dist.all_gather(everybodys, summand.contiguous(), group=group)
    pieces = torch.stack(everybodys).sum(0).chunk(ranks, dim)
    return pieces[rank].clone() if rank < len(pieces) else summand.narrow(dim, 0, 0).clone()


@wrong("partial_to_shard", "right only on more than one rank")
def dies_alone(summand, dim, group=None):
    if dist.get_world_size(group) == 1:
        return summand * 2
    return partial_to_shard(summand, dim, group)
