"""Answers to partial_to_shard (05): this rank's piece of the sum of all ranks' summands."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from labs.group import reduce_scatter
from tests.answers import Exercise

# fmt: off
answers = Exercise("partial_to_shard")
LINE = "you sent 0.75 × the tensor per rank; the least possible is 0.75 ×"


def cut(summand, dim, group):
    """Return the number of pieces, and the lengths of a piece and of this rank's piece, as torch.chunk cuts them."""
    rank, ranks, size = dist.get_rank(group), dist.get_world_size(group), summand.shape[dim]
    longest = -(-size // ranks)
    return ranks, longest, max(0, min(longest, size - rank * longest))


def chunks(summand, dim, ranks):
    pieces = [piece.contiguous() for piece in summand.chunk(ranks, dim)]
    return pieces + [summand.narrow(dim, 0, 0).contiguous()] * (ranks - len(pieces))


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def padded_rows(summand, dim, group=None):
    ranks, longest, mine = cut(summand, dim, group)
    rows = summand.movedim(dim, 0)
    padded = pad(rows, [0, 0] * (rows.ndim - 1) + [0, ranks * longest - summand.shape[dim]]).contiguous()
    piece = reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])
    return piece[:mine].movedim(0, dim).clone(memory_format=torch.contiguous_format)
MINE, CLONE = "piece[:mine].movedim(0, dim)", ".clone(memory_format=torch.contiguous_format)"


@answers.right(line=LINE)
def by_unflatten(summand, dim, group=None):
    ranks, longest, mine = cut(summand, dim, group)
    padded = pad(summand, [0, 0] * (summand.ndim - dim - 1) + [0, ranks * longest - summand.shape[dim]])
    pieces = padded.unflatten(dim, (ranks, longest)).movedim(dim, 0)
    return reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:]).narrow(dim, 0, mine)


@answers.right
def by_all_to_all(summand, dim, group=None):
    ranks, longest, mine = cut(summand, dim, group)
    rows = summand.movedim(dim, 0)
    send = summand.new_zeros(ranks * longest, *rows.shape[1:])
    send[: summand.shape[dim]] = rows
    come = torch.empty_like(send)
    dist.all_to_all_single(come, send, group=group)
    total = come[:mine].clone()
    for r in range(1, ranks):
        total += come[r * longest : r * longest + mine]
    return total.movedim(0, dim)


# ---- wrong: the numbers ----------------------------------------------------------------------------------

CUT = "ranks, longest, mine = cut(summand, dim, group)"
RETURNED = f"return {MINE}{CLONE}"
EMPTY = "right only where no piece is empty"
BUFFERS, FIRST = {}, {}

instead = answers.slips(padded_rows)


def before(mistake, lines, **options):
    instead(mistake, CUT, f"{lines}\n{CUT}".replace("\n", "\n    "), **options)


def after(mistake, lines, **options):
    """lines: when the piece is there."""
    instead(mistake, RETURNED, f"piece = {MINE}{CLONE}\n{lines}".replace("\n", "\n    "), **options)


instead("one's own summand", "reduce_scatter(padded.view(-1), group).view(longest, *rows.shape[1:])",
    "padded.view(ranks, longest, *rows.shape[1:])[dist.get_rank(group)]")
after("averaged instead of summed", "return piece / ranks")
answers.spoil(by_unflatten, "cut in the order of memory", {"pieces.flatten()": "padded.flatten()"})
instead("the padding is still there", "piece[:mine]", "piece")
before("cut along another dim", "dim = 0")
after("another shape", "return piece.flatten()")
after(EMPTY, "return piece if piece.numel() else summand.new_empty(0)")
after("right only on more than one rank", "return piece if ranks > 1 else summand * 2")
KEY = "(summand.shape, summand.dtype, dim, summand.is_contiguous(), dist.get_world_size(group))"
answers.spoil(padded_rows, "right only the first time",
    {CUT: f"if {KEY} in FIRST:\n        return FIRST[{KEY}].clone()\n    {CUT}",
     RETURNED: f"FIRST[{KEY}] = {MINE}{CLONE}\n    return FIRST[{KEY}].clone()"}, alone=True)

# ---- wrong: what is sent ---------------------------------------------------------------------------------


@answers.wrong("an all-reduce where a part is enough")
def all_reduced(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return chunks(total, dim, ranks)[rank].clone()

# ---- wrong: what is left ---------------------------------------------------------------------------------

answers.spoil(by_all_to_all, "something is kept from the call", {".clone()": ""})
after("a later call writes into what this one returned",
    "return BUFFERS.setdefault((piece.shape, piece.dtype), torch.empty_like(piece)).copy_(piece)", alone=True)
