"""Answers to all_gather(x, group=None), by a ring."""

from functools import partial

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, place
from tests.answers import Exercise
from tests.exercises.collectives import reduce_scatter

# fmt: off
answers = Exercise("all_gather")
LINE = "you sent 0.75 × the tensor per rank; the least possible is 0.75 ×"
answers.right(collectives.all_gather, line=LINE)


@answers.right(line=LINE, blind=True)
def ring(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        out, into = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(out, rank + 1), receive=(into, rank - 1))


@answers.right(line=LINE, blind=True)
def straight(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        exchange(group, send=(pieces[rank], to), receive=(pieces[source], source))


@answers.wrong("too many rounds", blind=True)  # which its writer took for right
def each_tells_all_in_turn(x, group=None):
    rank, ranks = place(group)
    for owner, piece in enumerate(x.view(-1).tensor_split(ranks)):
        if owner != rank:
            exchange(group, receive=(piece, owner))
        for other in range(ranks) if owner == rank else ():
            if other != rank:
                exchange(group, send=(piece, other))


EXCHANGE = "exchange(group, send=(out, rank + 1), receive=(into, rank - 1))"

# ---- what arrives, and where -------------------------------------------------------------------------------

spoil = partial(answers.spoil, ring)
blind = partial(spoil, blind=True)
ROUNDS, CUT = "range(ranks - 1)", "pieces = x.view(-1).tensor_split(ranks)"

blind("nothing arrived", {"x.view(-1)": "x.clone().view(-1)"})
one_round_short = blind("a piece is missing", {ROUNDS: "range(ranks - 2)"})
OWN = {EXCHANGE: "theirs = torch.empty_like(pieces[(rank - 1) % ranks])\n"
                 "        exchange(group, send=(pieces[rank], rank + 1), receive=(theirs, rank - 1))\n"
                 "        into[: len(theirs)] = theirs[: len(into)]"}
blind("a piece in another's place", OWN)


BACK = {EXCHANGE: EXCHANGE + "\n    x.view(-1).copy_(low)"}
blind("rounded on the way", {CUT: "low = x.view(-1).float()\n    pieces = low.tensor_split(ranks)"} | BACK)
spoil("right only in some dtypes", {CUT: "low = x.view(-1).to(torch.promote_types(x.dtype, torch.float32))\n"
    "    pieces = low.tensor_split(ranks)"} | BACK)


@answers.wrong("right only in the first call")
def has_seen_this_size(x, group=None, seen={}):  # noqa: B006
    key = x.shape, x.dtype, dist.get_world_size(group)
    if key not in seen:
        ring(x, group)
        seen[key] = x.clone()
    x.copy_(seen[key])


# ---- other pieces, ranks and groups ------------------------------------------------------------------------

blind("right only in one dimension", {"x.view(-1)": "x"}, alone=True)
blind("right only when the number of ranks divides the size",
    {CUT: "size = x.numel() // ranks\n    pieces = [x.view(-1)[i * size : (i + 1) * size] for i in range(ranks)]"})
among_all = blind("right only on the group of all ranks", {"exchange(group": "exchange(None"}, alone=True, long=True)
blind("right only on the group of all ranks",
    {"rank, ranks = place(group)": "ranks = dist.get_world_size(group)\n    rank = dist.get_rank() % ranks"},
    alone=True)
answers.spoil(straight, "right only when the number of ranks is a power of two",
    {"(rank + step) % ranks": "rank ^ step", "(rank - step) % ranks": "(rank ^ step) % ranks",
    "], source))": "], rank ^ step))"}, alone=True, blind=True)
# Right for two
answers.spoil(straight, "the ranks wait for each other", {"(rank - step)": "(rank + step)"}, alone=True, blind=True)

# ---- what travels, and what is kept ------------------------------------------------------------------------


@answers.wrong("a built-in collective", blind=True)
def built_in(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    padded = torch.zeros(len(pieces[0]), dtype=x.dtype)
    padded[: len(pieces[rank])] = pieces[rank]
    everybody = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everybody, padded, group=group)
    for piece, theirs in zip(pieces, everybody, strict=True):
        piece.copy_(theirs[: len(piece)])


@answers.wrong("whole tensors travel", blind=True)
def ring_of_whole_tensors(x, group=None):
    rank, ranks = place(group)
    carried = x.view(-1).clone()
    for step in range(1, ranks):
        theirs = torch.empty_like(carried)
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        source, carried = (rank - step) % ranks, theirs
        x.view(-1).tensor_split(ranks)[source].copy_(theirs.tensor_split(ranks)[source])


@answers.wrong("more messages than needed", blind=True)
def zeros_and_a_sum(x, group=None):
    rank, ranks = place(group)
    for number, piece in enumerate(x.view(-1).tensor_split(ranks)):
        if number != rank:
            piece.zero_()
    reduce_scatter.ring(x, group)
    ring(x, group)
spoil("full copies are kept", {CUT: CUT + "\n    kept = []",
    EXCHANGE: "kept.append(torch.zeros_like(x).view(-1)[: len(into)])\n"
    "        exchange(group, send=(out, rank + 1), receive=(kept[-1], rank - 1))\n        into.copy_(kept[-1])"})
spoil("kept out of torch's sight", {EXCHANGE: EXCHANGE + "\n    x.copy_(torch.tensor(x.tolist(), dtype=x.dtype))"})
