"""Answers to all_gather(x, group=None), by a ring."""

from functools import partial

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, place
from tests.answers import Exercise, broadcast, reduce_scatter

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


the_other_way = answers.vary(ring, {
    "rank - step)": "rank + step)", "rank - step - 1": "rank + step + 1", "(out, rank + 1": "(out, rank - 1",
    "(into, rank - 1": "(into, rank + 1"}, line=LINE, blind=True, long=True)


@answers.right(line=LINE, blind=True)
def straight(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        exchange(group, send=(pieces[rank], to), receive=(pieces[source], source))


@answers.right(line=LINE, blind=True, long=True)
def both_ways(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for way, hops in ((1, ranks // 2), (-1, ranks - 1 - ranks // 2)):
        for step in range(hops):
            out, into = pieces[(rank - way * step) % ranks], pieces[(rank - way * (step + 1)) % ranks]
            exchange(group, send=(out, rank + way), receive=(into, rank - way))


@answers.wrong("too many rounds", blind=True)  # which its writer took for right
def each_tells_all_in_turn(x, group=None):
    rank, ranks = place(group)
    for owner, piece in enumerate(x.view(-1).tensor_split(ranks)):
        if owner != rank:
            exchange(group, receive=(piece, owner))
        for other in range(ranks) if owner == rank else ():
            if other != rank:
                exchange(group, send=(piece, other))


@answers.right(line=LINE, blind=True, long=True)
def doubling(x, group=None):
    """Piece by piece, where N is a power of two."""
    rank, ranks = place(group)
    pieces, distance = x.view(-1).tensor_split(ranks), 1
    if ranks & (ranks - 1):
        return straight(x, group)
    while distance < ranks:
        peer = rank ^ distance
        mine, theirs = rank // distance * distance, peer // distance * distance
        for i in range(distance):
            exchange(group, send=(pieces[mine + i], peer), receive=(pieces[theirs + i], peer))
        distance *= 2
    return None


@answers.wrong("too many rounds", blind=True, long=True)  # as well
def a_tree_for_each_piece(x, group=None):
    """Every rank stands in each place of a tree once, so it sends N - 1 pieces."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for root, piece in zip(members, x.view(-1).tensor_split(len(members)), strict=True):
        broadcast.tree(piece, root, group)


EXCHANGE = "exchange(group, send=(out, rank + 1), receive=(into, rank - 1))"
TURNS = ("        if rank {}:\n            dist.send(out, group=group, group_dst=(rank + 1) % ranks)\n",
         "        dist.recv(into, group=group, group_src=(rank - 1) % ranks)\n")
answers.vary(ring, {"        " + EXCHANGE: TURNS[0].format("% 2 == 0") + TURNS[1] + TURNS[0].format("% 2")}, line=LINE)

# ---- what arrives, and where -------------------------------------------------------------------------------

spoil = partial(answers.spoil, ring)
blind = partial(spoil, blind=True)
ROUNDS, CUT = "range(ranks - 1)", "pieces = x.view(-1).tensor_split(ranks)"
EARLY = {"rank - step)": "rank - step + 1)", "rank - step - 1)": "rank - step)"}

blind("nothing arrived", {"x.view(-1)": "x.clone().view(-1)"})
one_round_short = blind("a piece is missing", {ROUNDS: "range(ranks - 2)"})
spoil("a piece is missing", EARLY)  # begins with the piece of the rank before, or
# Of the one behind
blind("a piece is missing", {"rank - step - 1)": "rank - step - 2)", "rank - step)": "rank - step - 1)"}, long=True)
ADDS = {EXCHANGE: "theirs = torch.empty_like(into)\n"
    "        exchange(group, send=(out, rank + 1), receive=(theirs, rank - 1))\n"
                  "        into += theirs"}
blind("nothing arrived", ADDS)
OWN = {EXCHANGE: "theirs = torch.empty_like(pieces[(rank - 1) % ranks])\n"
                 "        exchange(group, send=(pieces[rank], rank + 1), receive=(theirs, rank - 1))\n"
                 "        into[: len(theirs)] = theirs[: len(into)]"}
blind("a piece in another's place", OWN)


@answers.wrong("a piece in another's place")
def in_order_of_arrival(x, group=None):
    rank, ranks = place(group)
    ring(x, group)
    pieces = [piece.clone() for piece in x.view(-1).tensor_split(ranks)]
    x.view(-1).copy_(torch.cat([pieces[(rank + i) % ranks] for i in range(ranks)]))


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

blind("right only when the number of ranks divides the size", {"tensor_split": "chunk"}, alone=True, long=True)
blind("right only in one dimension", {"x.view(-1)": "x"}, alone=True)
blind("right only when the number of ranks divides the size",
    {CUT: "size = x.numel() // ranks\n    pieces = [x.view(-1)[i * size : (i + 1) * size] for i in range(ranks)]"})
blind("right only when the number of ranks divides the size", {CUT: CUT
    + "\n    if not len(pieces[-1]):\n        return"})
among_all = blind("right only on the group of all ranks", {"exchange(group": "exchange(None"}, alone=True, long=True)
blind("right only on the group of all ranks",
    {"rank, ranks = place(group)": "ranks = dist.get_world_size(group)\n    rank = dist.get_rank() % ranks"},
    alone=True)
spoil("right only on the group of all ranks",
    {EXCHANGE: "posts = [dist.P2POp(dist.isend, out, (rank + 1) % ranks, group)]\n"
    "        posts += [dist.P2POp(dist.irecv, into, (rank - 1) % ranks, group)]\n"
    "        for work in dist.batch_isend_irecv(posts):\n            work.wait()"}, alone=True, long=True)
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


@answers.wrong("a built-in collective", blind=True)
def by_objects(x, group=None):
    rank, ranks = place(group)
    everybody = [None] * ranks
    dist.all_gather_object(everybody, x.view(-1).tensor_split(ranks)[rank].clone(), group=group)
    x.view(-1).copy_(torch.cat(everybody))


@answers.wrong("a built-in collective", long=True)
def by_built_in_broadcasts(x, group=None):
    for index, piece in enumerate(x.view(-1).tensor_split(dist.get_world_size(group))):
        dist.broadcast(piece, group=group, group_src=index)


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


@answers.wrong("whole tensors travel", blind=True)
def through_rank_0(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    if rank:
        exchange(group, send=(pieces[rank], 0))
    for other in range(1, ranks) if rank == 0 else ():
        exchange(group, receive=(pieces[other], other))
    broadcast.tree(x, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group)


blind("more messages than needed", {ROUNDS: "range(ranks if ranks > 1 else 0)"})  # its own piece comes back
answers.spoil(straight, "more messages than needed",
    {"exchange(group, send=(pieces[rank], to), receive=(pieces[source], source))":
    "for out, into in zip(pieces[rank].tensor_split(2), pieces[source].tensor_split(2), strict=True):\n"
    "            exchange(group, send=(out, to), receive=(into, source))"}, blind=True, long=True)
spoil("more messages than needed", {EXCHANGE: "for half in (slice(None, 1), slice(1, None)):\n"
    "            exchange(group, send=(out[half], rank + 1), receive=(into[half], rank - 1))"}, long=True)
spoil("full copies are kept", {CUT: CUT + "\n    kept = []",
    EXCHANGE: "kept.append(torch.zeros_like(x).view(-1)[: len(into)])\n"
    "        exchange(group, send=(out, rank + 1), receive=(kept[-1], rank - 1))\n        into.copy_(kept[-1])"})
spoil("too many rounds", {EXCHANGE: "for turn in range(ranks):\n            if rank == turn:\n"
    "                exchange(group, send=(out, rank + 1))\n            elif rank == (turn + 1) % ranks:\n"
    "                exchange(group, receive=(into, rank - 1))"})
spoil("kept out of torch's sight", {EXCHANGE: EXCHANGE + "\n    x.copy_(torch.tensor(x.tolist(), dtype=x.dtype))"})
