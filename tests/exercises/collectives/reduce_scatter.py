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


@answers.right(line=LINE)
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
    "rank + 1)": "rank - 1)", "(theirs, rank - 1)": "(theirs, rank + 1)"}, line=LINE)


@answers.right(line=LINE)
def straight(x, group=None):
    """Each piece goes to where it belongs."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, ranks):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        pieces[rank].add_(theirs)
    return pieces[rank]


# ---- what comes out ----------------------------------------------------------------------------------------

spoil = partial(answers.spoil, ring)
CUT, BACK = "pieces = x.view(-1).tensor_split(ranks)", "return pieces[rank]"
EARLY = {OUT: "pieces[(rank - step + 1) % ranks]", INTO: "pieces[(rank - step) % ranks]"}

spoil("the pieces are rotated", EARLY)
spoil("nothing is returned", {BACK: "return None"})
spoil("the whole tensor instead of a piece", {BACK: "return x.view(-1)"})
# What arrives replaces its own
spoil("a rank is left out", {"receive=(theirs": "receive=(mine", "        mine += theirs\n": ""})
spoil("one's own only", {"range(1, ranks)": "range(1, ranks - 1)"})
answers.spoil(straight, "counted twice",
    {"theirs = torch.empty_like(pieces[rank])": "theirs, total = torch.empty_like(pieces[rank]), pieces[rank].clone()",
    "pieces[rank].add_(theirs)": "total += theirs", "    return": "    pieces[rank].add_(total)\n    return"})
spoil("not in place", {"x.view(-1)": "x.clone().view(-1)"})
answers.spoil(collectives.reduce_scatter, "", {"op=ReduceOp.SUM": "op=ReduceOp.MAX"})
spoil("right only when the number of ranks divides the size", {CUT: CUT
    + "\n    if x.numel() < ranks:\n        return pieces[rank]"})
spoil("not the same dtype on every rank", {"torch.empty_like(mine)": "torch.empty(len(mine))",
    "mine += theirs": "mine += theirs.to(mine.dtype)"}, alone=True)

# ---- other pieces, ranks and groups ------------------------------------------------------------------------

spoil("right only in one dimension", {"x.view(-1)": "x", BACK: "return pieces[rank].reshape(-1)"}, alone=True)
spoil("right only on the group of all ranks", {"exchange(group": "exchange(None"}, alone=True)
spoil("the ranks wait for each other", {"(theirs, rank - 1)": "(theirs, rank + 1)"}, alone=True)  # right for two
answers.spoil(straight, "right only when the number of ranks is a power of two",
    {"pieces[(rank + step) % ranks], rank + step": "pieces[(rank ^ step) % ranks], rank ^ step",
    "rank - step)": "rank ^ step)"}, alone=True)


# ---- what travels, and what is kept ------------------------------------------------------------------------


@answers.wrong("a built-in collective")
def by_all_reduce(x, group=None):
    dist.all_reduce(x, group=group)
    return x.view(-1).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


@answers.wrong("whole tensors travel")
def ring_of_whole_tensors(x, group=None):
    rank, ranks = place(group)
    carried, theirs, total = x.clone(), torch.empty_like(x), x.clone()
    for _ in range(1, ranks):
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        carried, theirs = theirs, carried
        total += carried
    x.copy_(total)
    return x.view(-1).tensor_split(ranks)[rank]


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
    "            exchange(group, send=(out, rank + step), receive=(into, rank - step))"})
spoil("a receive that nobody waited for",
    {"exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))":
    "sent = dist.isend(pieces[(rank - step) % ranks].clone(), group=group, group_dst=(rank + 1) % ranks)\n"
    "        dist.irecv(theirs, group=group, group_src=(rank - 1) % ranks)",
    "mine += theirs": "mine += theirs\n        sent.wait()"})
