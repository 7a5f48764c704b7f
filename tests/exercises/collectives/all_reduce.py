"""Answers to all_reduce(x, group=None), by two rings."""

import io
import itertools

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, place
from tests.answers import Exercise
from tests.exercises.collectives import (
    all_gather,  # noqa: F401 (varied answers use it)
    reduce_scatter,  # noqa: F401 (varied answers call them)
)
from tests.exercises.collectives.all_gather import ring as gather
from tests.exercises.collectives.reduce_scatter import ring as reduce

# fmt: off
answers = Exercise("all_reduce")
LINE = "you sent 1.50 × the tensor per rank; the least possible is 1.50 ×"
answers.right(collectives.all_reduce, line=LINE)


@answers.right(line=LINE)
def rings(x, group=None):
    reduce(x, group)
    gather(x, group)


# ---- what comes out ----------------------------------------------------------------------------------------


def spoil(mistake, reduce_="reduce(x, group)", gather_="gather(x, group)", **options):
    answers.spoil(rings, mistake, {"reduce(x, group)": reduce_, "gather(x, group)": gather_}, **options)


PIECES = "pieces = x.view(-1).tensor_split(ranks)"
spoil("averaged instead of summed", gather_="gather(x, group)\n    x.copy_(x / dist.get_world_size(group))")
spoil("nothing arrived", "x = x.clone()\n    reduce(x, group)")
spoil("pieces that nobody gathered", gather_="pass")


# ---- other pieces, ranks and groups ------------------------------------------------------------------------


@answers.right(line=LINE)
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
answers.spoil(of_pieces, "right only when the number of ranks divides the size",
    {PIECES: "size = x.numel() // ranks\n    pieces = [x.view(-1)[i * size : (i + 1) * size] for i in range(ranks)]"})


@answers.wrong("right only on more than one rank", alone=True)
def with_itself(x, group=None):
    """Exchange with oneself on one rank."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, max(ranks, 2)):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        pieces[rank].add_(theirs)
    gather(x, group)


# ---- what travels, and what is left ------------------------------------------------------------------------


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
