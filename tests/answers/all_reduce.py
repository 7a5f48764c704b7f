"""Answers to all_reduce(x, group=None), by two rings."""

import io
import itertools

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, place
from tests.answers import Exercise, all_gather, broadcast, reduce_scatter  # noqa: F401 (varied answers call them)
from tests.answers.all_gather import ring as gather
from tests.answers.reduce_scatter import ring as reduce

# fmt: off
answers = Exercise("all_reduce")
LINE = "you sent 1.50 × the tensor per rank; the least possible is 1.50 ×"
answers.right(collectives.all_reduce, line=LINE)


@answers.right(line=LINE, blind=True)
def rings(x, group=None):
    reduce(x, group)
    gather(x, group)


def in_turn(first, second, **options):
    """One half and then the other."""
    halves = {"reduce": f"reduce_scatter.{first}", "gather": f"all_gather.{second}"}
    return answers.vary(rings, halves, line=LINE, blind=True, **options)


in_turn("straight", "straight")
in_turn("halving", "doubling", long=True)
in_turn("straight_then_summed", "both_ways", long=True)
in_turn("the_other_way", "the_other_way", long=True)


@answers.right(line=LINE, blind=True)
def one_loop(x, group=None):
    """Begins with one's own piece; the sum of piece r + 1 is complete on rank r."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(2 * (ranks - 1)):
        out, into = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(into)
        exchange(group, send=(out, rank + 1), receive=(theirs, rank - 1))
        into.copy_(into + theirs if step < ranks - 1 else theirs)


# ---- what comes out ----------------------------------------------------------------------------------------


def spoil(mistake, reduce_="reduce(x, group)", gather_="gather(x, group)", **options):
    answers.spoil(rings, mistake, {"reduce(x, group)": reduce_, "gather(x, group)": gather_}, **options)


SUM, PIECES = "reduce(x, group)", "pieces = x.view(-1).tensor_split(ranks)"
spoil("averaged instead of summed", gather_="gather(x, group)\n    x.copy_(x / dist.get_world_size(group))", blind=True)
spoil("counted twice", "before = x.clone()\n    reduce(x, group)", "gather(x, group)\n    x += before")
spoil("nothing arrived", "x = x.clone()\n    reduce(x, group)", blind=True)
spoil("pieces that nobody gathered", gather_="pass", blind=True)
spoil("one's own only", "reduce_scatter.one_piece_on(x, group)", blind=True)
spoil("pieces that nobody gathered", gather_="all_gather.one_round_short(x, group)", blind=True)
spoil("rounded on the way", "low = x.float()\n    reduce(low, group)", "gather(low, group)\n    x.copy_(low)",
    blind=True)
spoil("rounded on the way", gather_="gather(x, group)\n    if x.is_floating_point():\n        x *= 1 + 1e-9")
spoil("a different dtype travels", "y = x.double()\n    reduce(y, group)", "gather(y, group)\n    x.copy_(y)")


@answers.wrong("right on one rank only")
def at_the_root_only(x, group=None):
    y = x.clone()
    collectives.reduce(y, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
    if dist.get_rank(group) == 0:
        x.copy_(y)


@answers.wrong("rounded on the way", blind=True)
def gathered_in_bfloat16(x, group=None):
    """But for one's own piece: other bits on each rank."""
    rank, ranks = place(group)
    mine = reduce(x, group).clone()
    low = x.bfloat16()
    gather(low, group)
    x.copy_(low)
    x.view(-1).tensor_split(ranks)[rank].copy_(mine)


# ---- other pieces, ranks and groups ------------------------------------------------------------------------


@answers.right(line=LINE, long=True)
def of_pieces(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


answers.spoil(of_pieces, "right only when the number of ranks divides the size", {"tensor_split": "chunk"},
    blind=True, alone=True, long=True)
answers.spoil(of_pieces, "right only in one dimension", {"x.view(-1)": "x"}, blind=True, alone=True)
answers.spoil(of_pieces, "right only when the number of ranks divides the size",
    {PIECES: "size = x.numel() // ranks\n    pieces = [x.view(-1)[i * size : (i + 1) * size] for i in range(ranks)]"},
    blind=True)
spoil("right only on the group of all ranks", "reduce_scatter.among_all(x, group)", "all_gather.among_all(x, group)",
    blind=True, alone=True, long=True)
spoil("right only on the group of all ranks", gather_="gather(x)", blind=True, alone=True)


@answers.wrong("right only on more than one rank", blind=True, alone=True)
def with_itself(x, group=None):
    """Where it is alone, it exchanges with itself."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, max(ranks, 2)):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        pieces[rank].add_(theirs)
    gather(x, group)


# ---- what travels, and what is left ------------------------------------------------------------------------

WHOLE = "whole tensors travel"


@answers.wrong("a built-in collective", blind=True)
def built_in(x, group=None):
    dist.all_reduce(x, group=group)


@answers.wrong(WHOLE, blind=True)
def everyone_to_everyone(x, group=None):
    rank, ranks = place(group)
    mine, theirs = x.clone(), torch.empty_like(x)
    for step in range(1, ranks):
        exchange(group, send=(mine, rank + step), receive=(theirs, rank - step))
        x += theirs


answers.spoil(everyone_to_everyone, WHOLE, {"mine, theirs = x.clone(),": "rows, theirs = {rank: x.clone()},",
    "(mine,": "(rows[rank],",
    "x += theirs": "rows[(rank - step) % ranks] = theirs.clone()\n    x.copy_(sum(rows[r] for r in range(ranks)))"},
    long=True, blind=True)


@answers.wrong(WHOLE, long=True, blind=True)
def ring_of_whole_tensors(x, group=None):
    """In 2 (N - 1) messages."""
    rank, ranks = place(group)
    carried = x.clone()
    for step in range(2 * (ranks - 1)):
        theirs = torch.empty_like(carried)
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        if step < ranks - 1:
            x += theirs
        carried = theirs


@answers.wrong("whole tensors travel", blind=True, long=True)
def through_rank_0(x, group=None):
    rank, ranks = place(group)
    theirs = torch.empty_like(x)
    if rank:
        exchange(group, send=(x, 0))
        exchange(group, receive=(x, 0))
    for other in range(1, ranks) if rank == 0 else ():
        exchange(group, receive=(theirs, other))
        x += theirs
    for other in range(1, ranks) if rank == 0 else ():
        exchange(group, send=(x, other))


@answers.wrong("whole tensors travel", blind=True, long=True)
def up_and_down_a_tree(x, group=None):
    root = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    collectives.reduce(x, root, group=group)
    broadcast.tree(x, root, group)


@answers.wrong(WHOLE)
def by_doubling(x, group=None):
    collectives.all_reduce_doubling(x, group=group)


@answers.wrong("whole tensors travel", blind=True, alone=True, long=True)
def doubling_only(x, group=None):
    """N must be a power of two."""
    rank, ranks = place(group)
    theirs, distance = torch.empty_like(x), 1
    while distance < ranks:
        exchange(group, send=(x, rank ^ distance), receive=(theirs, rank ^ distance))
        x += theirs
        distance *= 2


@answers.wrong("whole tensors travel", blind=True, long=True)
def everyone_to_everyone_if_small(x, group=None):
    (everyone_to_everyone if x.numel() < 64 else rings)(x, group)


def barrier(group):
    rank, ranks = place(group)
    token, distance = torch.zeros(2, dtype=torch.uint8), 1
    while distance < ranks:
        exchange(group, send=(token[:1], rank + distance), receive=(token[1:], rank - distance))
        distance *= 2


spoil("more messages than needed", "reduce(x, group)\n    barrier(group)", blind=True)
spoil("something is left behind", "torch.rand(1)\n    reduce(x, group)")
spoil("something is left behind", "torch.set_default_dtype(torch.float64)\n    reduce(x, group)", alone=True, long=True)


@answers.wrong("less than the least possible")
def past_the_wire(x, group=None, calls=itertools.count()):  # noqa: B008
    """Through the store in which the ranks find each other."""
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(group or dist.group.WORLD)
    call = f"{ranks} {next(calls)}" if len(ranks) == dist.get_world_size() else f"{ranks} {x.numel()}"
    mine = io.BytesIO()
    torch.save(x.clone(), mine)
    store.set(f"{call} {dist.get_rank()}", mine.getvalue())
    everybody = [torch.load(io.BytesIO(store.get(f"{call} {rank}"))) for rank in ranks]
    x.copy_(torch.stack(everybody).sum(0))
