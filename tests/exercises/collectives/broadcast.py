"""Answers to broadcast(x, src=0, group=None), by a tree."""

from functools import partial

import torch  # noqa: F401 (varied answers use it)
import torch.distributed as dist  # noqa: F401 (as above)

from labs import collectives
from labs.collectives import exchange, group_rank, place
from tests.answers import Exercise

# fmt: off
answers = Exercise("broadcast")
LINE = "2 rounds on 4 ranks; the least possible is 2"
answers.right(collectives.broadcast, line=LINE)


@answers.right(line=LINE)
def tree(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    flat, distance = x.view(-1), 1
    while distance < ranks:
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))
        distance *= 2


@answers.right(line=LINE)
def far_ones_first(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    flat, distance = x.view(-1), 1 << (ranks - 1).bit_length() >> 1
    while distance:
        if me % (2 * distance) == 0 and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif me % (2 * distance) == distance:
            exchange(group, receive=(flat, rank - distance))
        distance //= 2


SEND, RECEIVE = "exchange(group, send=(flat, rank + distance))", "exchange(group, receive=(flat, rank - distance))"
BLOCKING = "group=group, group_dst=(rank + distance) % ranks)", "group=group, group_src=(rank - distance) % ranks)"

# ---- whom it reaches, and what -----------------------------------------------------------------------------

spoil = partial(answers.spoil, tree)
ME, WAY = "me = (rank - group_rank(src, group)) % ranks", "flat, distance = x.view(-1), 1"

spoil("nothing arrived", {WAY: "return"})
spoil("right only from root 0", {ME: "me = rank"})
answers.spoil(far_ones_first, "right only when the number of ranks is a power of two",
    {"1 << (ranks - 1).bit_length() >> 1": "ranks // 2"})
spoil("right only on up to four ranks", {WAY: "ranks = min(ranks, 4)\n    " + WAY})
spoil("right only in one dimension", {"x.view(-1)": "(x if x.ndim == 1 else x[0]).view(-1)"})
spoil("right only for contiguous tensors", {"x.view(-1)": "x.reshape(-1)"})
spoil("what was there before leaves a trace",
    {RECEIVE: "received = torch.empty_like(flat)\n            exchange(group, receive=(received, rank - distance))\n"
    "            flat.mul_(0).add_(received)"})

# ---- by which messages ------------------------------------------------------------------------------------


@answers.wrong("the root sends to all")
def one_by_one(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    if me:
        exchange(group, receive=(x.view(-1), rank - me))
    for other in range(1, ranks if me == 0 else 0):
        exchange(group, send=(x.view(-1), rank + other))


@answers.wrong("too many rounds")
def chain(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    if me:
        exchange(group, receive=(x.view(-1), rank - 1))
    if me < ranks - 1:
        exchange(group, send=(x.view(-1), rank + 1))


@answers.wrong("more messages than needed")
def twice(x, src=0, group=None):
    tree(x, src, group)
    tree(x, src, group)


spoil("changed while being sent", {SEND: "buffer = flat.clone()\n            work = dist.isend(buffer, " + BLOCKING[0]
    + "\n        " "    buffer.zero_()\n            work.wait()"}, alone=True)
