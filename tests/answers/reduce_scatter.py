"""Answers to reduce_scatter(x, group=None) -> piece, by a ring."""

from functools import partial

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, place
from tests.answers import Exercise

# fmt: off
answers = Exercise("reduce_scatter")
LINE = "you sent 0.75 × the tensor per rank; the least possible is 0.75 ×"
answers.right(collectives.reduce_scatter, line=LINE)


@answers.right(line=LINE, blind=True)
def ring(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs
    return pieces[rank]


OUT, INTO = "pieces[(rank - step) % ranks]", "pieces[(rank - step - 1) % ranks]"
the_other_way = answers.vary(ring, {
    OUT: "pieces[(rank + step) % ranks]", INTO: "pieces[(rank + step + 1) % ranks]",
    "rank + 1)": "rank - 1)", "(theirs, rank - 1)": "(theirs, rank + 1)"}, line=LINE, blind=True)


@answers.right(line=LINE, blind=True)
def straight(x, group=None):
    """Each piece goes to where it belongs."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, ranks):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        pieces[rank].add_(theirs)
    return pieces[rank]


answers.vary(straight, {"return pieces[rank]": "return pieces[rank].clone()"}, line=LINE, long=True)


@answers.right(line=LINE, blind=True)
def straight_then_summed(x, group=None):
    """All of them arrive first, and are added up in the order of the ranks."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    rows = [pieces[rank].clone() if other == rank else torch.empty_like(pieces[rank]) for other in range(ranks)]
    for step in range(1, ranks):
        to, source = (rank - step) % ranks, (rank + step) % ranks
        exchange(group, send=(pieces[to], to), receive=(rows[source], source))
    pieces[rank].copy_(rows[0])
    for row in rows[1:]:
        pieces[rank].add_(row)
    return pieces[rank]


@answers.right(line=LINE, blind=True, long=True)
def both_ways(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for way, hops in ((1, ranks // 2), (-1, ranks - 1 - ranks // 2)):
        for step in range(1, hops + 1):
            mine = pieces[(rank + way * (hops - step)) % ranks]
            theirs = torch.empty_like(mine)
            out = pieces[(rank + way * (hops - step + 1)) % ranks]
            exchange(group, send=(out, rank + way), receive=(theirs, rank - way))
            mine += theirs
    return pieces[rank]


@answers.right(line=LINE, blind=True, long=True)
def halving(x, group=None):
    """Piece by piece, where N is a power of two."""
    rank, ranks = place(group)
    pieces, distance = x.view(-1).tensor_split(ranks), ranks // 2
    if ranks & (ranks - 1):
        return straight(x, group)
    while distance:
        peer = rank ^ distance
        for i in range(distance):
            mine = pieces[rank // distance * distance + i]
            theirs = torch.empty_like(mine)
            exchange(group, send=(pieces[peer // distance * distance + i], peer), receive=(theirs, peer))
            mine += theirs
        distance //= 2
    return pieces[rank]


# ---- what comes out ----------------------------------------------------------------------------------------

spoil = partial(answers.spoil, ring)
blind = partial(spoil, blind=True)
CUT, BACK = "pieces = x.view(-1).tensor_split(ranks)", "return pieces[rank]"
EARLY = {OUT: "pieces[(rank - step + 1) % ranks]", INTO: "pieces[(rank - step) % ranks]"}

one_piece_on = blind("the pieces are rotated", EARLY)
spoil("the pieces are rotated", EARLY | {BACK: "return pieces[(rank + 1) % ranks]"})
blind("nothing is returned", {BACK: "return None"})
blind("the whole tensor instead of a piece", {BACK: "return x.view(-1)"})
blind("averaged instead of summed", {BACK: "pieces[rank].copy_(pieces[rank] / ranks)\n    return pieces[rank]"})
# What arrives replaces its own
blind("a rank is left out", {"receive=(theirs": "receive=(mine", "        mine += theirs\n": ""})
spoil("a rank is left out", {"range(1, ranks)": "range(2, ranks)"})
blind("one's own only", {"range(1, ranks)": "range(1, ranks - 1)"})
answers.spoil(straight, "counted twice",
    {"theirs = torch.empty_like(pieces[rank])": "theirs, total = torch.empty_like(pieces[rank]), pieces[rank].clone()",
    "pieces[rank].add_(theirs)": "total += theirs", "    return": "    pieces[rank].add_(total)\n    return"},
    blind=True)
blind("not in place", {"x.view(-1)": "x.clone().view(-1)"})
answers.spoil(collectives.reduce_scatter, "", {"op=ReduceOp.SUM": "op=ReduceOp.MAX"})
blind("right only when the number of ranks divides the size", {CUT: CUT
    + "\n    if x.numel() < ranks:\n        return pieces[rank]"})
answers.spoil(straight, "rounded on the way",
    {"theirs = torch.empty_like(pieces[rank])": "theirs, total = torch.empty_like(pieces[rank]), pieces[rank].float()",
    "pieces[rank].add_(theirs)": "total += theirs.float()",
    "    return": "    pieces[rank].copy_(total)\n    return"}, blind=True)
blind("not the same dtype on every rank", {"torch.empty_like(mine)": "torch.empty(len(mine))",
    "mine += theirs": "mine += theirs.to(mine.dtype)"}, alone=True)
spoil("right only on more than one rank", {BACK: "return pieces[rank] if ranks > 1 else torch.zeros_like(x.view(-1))"})

# ---- other pieces, ranks and groups ------------------------------------------------------------------------

DIVIDES = "right only when the number of ranks divides the size"
spoil(DIVIDES,
    {CUT: "size = x.numel() // ranks\n    pieces = [x.view(-1)[i * size : (i + 1) * size] for i in range(ranks)]"})
spoil(DIVIDES,
    {CUT: "pieces = list(x.view(-1).chunk(ranks))\n    pieces += [x.view(-1)[:0]] * (ranks - len(pieces))"},
    long=True)
blind("right only when the number of ranks divides the size", {"tensor_split": "chunk"}, alone=True, long=True)
blind("", {"torch.empty_like(mine)": "torch.empty_like(pieces[0])", "mine += theirs": INTO + " += theirs"},
    alone=True, long=True)
blind("right only in one dimension", {"x.view(-1)": "x", BACK: "return pieces[rank].reshape(-1)"}, alone=True)
among_all = blind("right only on the group of all ranks", {"exchange(group": "exchange(None"}, alone=True, long=True)
blind("right only on the group of all ranks",
    {"rank, ranks = place(group)": "ranks = dist.get_world_size(group)\n    rank = dist.get_rank() % ranks"},
    alone=True)
spoil("right only on the group of all ranks", {"place(group)": "place(None)", "exchange(group": "exchange(None"},
    alone=True, long=True)
blind("the ranks wait for each other", {"(theirs, rank - 1)": "(theirs, rank + 1)"}, alone=True)  # right for two
answers.spoil(straight, "right only when the number of ranks is a power of two",
    {"pieces[(rank + step) % ranks], rank + step": "pieces[(rank ^ step) % ranks], rank ^ step",
    "rank - step)": "rank ^ step)"}, alone=True, blind=True)
answers.spoil(halving, "right only when the number of ranks is a power of two", {"ranks & (ranks - 1)": "ranks == 1"},
    alone=True, long=True)


@answers.wrong("right only when the number of ranks divides the size", blind=True, alone=True, long=True)
def the_buffer_of_the_first_call(x, group=None, kept={}):  # noqa: B006
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    buffer = kept.setdefault("rs", torch.empty_like(pieces[0]))
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = buffer[: len(mine)]
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs
    return pieces[rank]


# ---- what travels, and what is kept ------------------------------------------------------------------------


@answers.wrong("a built-in collective", blind=True)
def by_all_reduce(x, group=None):
    dist.all_reduce(x, group=group)
    return x.view(-1).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


@answers.wrong("whole tensors travel", blind=True)
def ring_of_whole_tensors(x, group=None):
    rank, ranks = place(group)
    carried, theirs, total = x.clone(), torch.empty_like(x), x.clone()
    for _ in range(1, ranks):
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        carried, theirs = theirs, carried
        total += carried
    x.copy_(total)
    return x.view(-1).tensor_split(ranks)[rank]


@answers.wrong("whole tensors travel", blind=True)
def through_rank_0(x, group=None):
    rank, ranks = place(group)
    pieces, theirs = x.view(-1).tensor_split(ranks), torch.empty_like(x)
    if rank:
        exchange(group, send=(x, 0))
        exchange(group, receive=(pieces[rank], 0))
        return pieces[rank]
    for other in range(1, ranks):
        exchange(group, receive=(theirs, other))
        x += theirs
    for other in range(1, ranks):
        exchange(group, send=(pieces[other], other))
    return pieces[0]


@answers.wrong("too many rounds")
def one_reduce_after_the_other(x, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    pieces = x.view(-1).tensor_split(len(members))
    for root, piece in zip(members, pieces, strict=True):
        collectives.reduce(piece, root, group=group)
    return pieces[dist.get_rank(group)]


@answers.wrong("full copies are kept")
def keeps_everything(x, group=None):
    rank, ranks = place(group)
    pieces, kept = x.view(-1).tensor_split(ranks), [torch.zeros_like(x) for _ in range(ranks)]
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        exchange(group, send=(pieces[to], to), receive=(kept[source].view(-1).tensor_split(ranks)[rank], source))
    pieces[rank].add_(torch.stack(kept).sum(0).view(-1).tensor_split(ranks)[rank])
    return pieces[rank]


@answers.wrong("something is kept from every call")
def remembers(x, group=None, before=[]):  # noqa: B006
    before.append(x.clone())
    return ring(x, group)


answers.spoil(straight, "more messages than needed",
    {"exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))":
    "for out, into in zip(pieces[(rank + step) % ranks].tensor_split(2), theirs.tensor_split(2), strict=True):\n"
    "            exchange(group, send=(out, rank + step), receive=(into, rank - step))"}, blind=True)
spoil("a receive that nobody waited for",
    {"exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))":
    "sent = dist.isend(pieces[(rank - step) % ranks].clone(), group=group, group_dst=(rank + 1) % ranks)\n"
    "        dist.irecv(theirs, group=group, group_src=(rank - 1) % ranks)",
    "mine += theirs": "mine += theirs\n        sent.wait()"})
