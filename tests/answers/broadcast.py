"""Answers to broadcast(x, src=0, group=None), by a tree."""

from functools import partial

import torch
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, group_rank, place
from tests.answers import Exercise

# fmt: off
answers = Exercise("broadcast")
LINE = "2 rounds on 4 ranks; the least possible is 2"
answers.right(collectives.broadcast, line=LINE)


@answers.right(line=LINE, blind=True)
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


@answers.right(line=LINE, blind=True)
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


@answers.right(line=LINE, blind=True, long=True)
def halves_of_an_interval(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    flat, low, high = x.view(-1), 0, ranks
    while high - low > 1:
        middle = low + (high - low + 1) // 2
        if me == low:
            exchange(group, send=(flat, rank + middle - low))
        elif me == middle:
            exchange(group, receive=(flat, rank - (middle - low)))
        low, high = (low, middle) if me < middle else (middle, high)


@answers.right(line=LINE, blind=True)
def parent_and_children(x, src=0, group=None):
    rank, ranks = place(group)
    me, bit = (rank - group_rank(src, group)) % ranks, 1
    if me:
        parent = 1 << (me.bit_length() - 1)
        exchange(group, receive=(x.view(-1), rank - parent))
        bit = 2 * parent
    while me + bit < ranks:
        exchange(group, send=(x.view(-1), rank + bit))
        bit *= 2


@answers.right(line=LINE, blind=True, long=True)
def by_a_schedule(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    flat, informed = x.view(-1), 1
    while informed < ranks:
        for teller, told in zip(range(informed), range(informed, ranks), strict=False):
            if me == teller:
                exchange(group, send=(flat, rank + told - teller))
            elif me == told:
                exchange(group, receive=(flat, rank - told + teller))
        informed = min(2 * informed, ranks)


SEND, RECEIVE = "exchange(group, send=(flat, rank + distance))", "exchange(group, receive=(flat, rank - distance))"
BLOCKING = "group=group, group_dst=(rank + distance) % ranks)", "group=group, group_src=(rank - distance) % ranks)"
answers.vary(far_ones_first, {SEND: "dist.send(flat, " + BLOCKING[0], RECEIVE: "dist.recv(flat, " + BLOCKING[1]},
    line=LINE)
answers.spoil(tree, "full copies are kept", {SEND: SEND.replace("flat", "flat.clone()"),
    RECEIVE: "buffer = torch.empty_like(flat)\n            exchange(group, receive=(buffer, rank - distance))\n"
    "            flat.copy_(buffer)"}, blind=True, long=True)  # its writer took it for right

# Taken for wrong by its writer: nobody asked for `exchange`
answers.vary(tree, {SEND: "dist.send(flat, " + BLOCKING[0], RECEIVE: "dist.recv(flat, " + BLOCKING[1]}, line=LINE,
    blind=True)

# ---- whom it reaches, and what -----------------------------------------------------------------------------

spoil = partial(answers.spoil, tree)
blind = partial(spoil, blind=True)
ME, WAY = "me = (rank - group_rank(src, group)) % ranks", "flat, distance = x.view(-1), 1"

spoil("nothing arrived", {WAY: "return"})
blind("nothing arrived", {"x.view(-1)": "x.clone().view(-1)"})
blind("right only from root 0", {ME: "me = rank"})
spoil("", {"src=0": "src=1"})
blind("right only when the number of ranks is a power of two", {" and me + distance < ranks": ""}, alone=True,
    long=True)
answers.spoil(far_ones_first, "right only when the number of ranks is a power of two",
    {"1 << (ranks - 1).bit_length() >> 1": "ranks // 2"}, blind=True)
# All others wait in each round
blind("the ranks wait for each other", {"distance <= me < 2 * distance": "me >= distance"}, alone=True, long=True)
blind("right only from root 0", {"me = (": "rank = me = ("}, alone=True, long=True)  # peers counted from the root
blind("right only from root 0", {") % ranks": ")"}, alone=True, long=True)
blind("right only on up to four ranks", {WAY: "ranks = min(ranks, 4)\n    " + WAY})
GROUP = "right only on the group of all ranks"
blind("right only on the group of all ranks", {"group_rank(src, group)": "src"})
blind("right only on the group of all ranks", {"place(group)": "dist.get_rank(), dist.get_world_size(group)",
    "group_rank(src, group)": "src"}, alone=True, long=True)
blind("right only on the group of all ranks", {SEND: SEND.replace("group", "None"), RECEIVE: RECEIVE.replace("group",
    "None")}, alone=True, long=True)
spoil(GROUP, {"place(group)": "place(None)", "group_rank(src, group)": "src",
    SEND: "dist.send(flat, (rank + distance) % ranks, group=group)",
    RECEIVE: "dist.recv(flat, (rank - distance) % ranks, group=group)"}, alone=True, long=True)
BACK = "distance *= 2\n    x.view(-1).copy_(flat)"
blind("rounded on the way", {"x.view(-1)": "x.view(-1).float()", "distance *= 2": BACK})
spoil("right only in some dtypes", {"x.view(-1)": "x.view(-1).to(torch.promote_types(x.dtype, torch.float32))",
    "distance *= 2": BACK})
spoil("right only in one dimension", {"x.view(-1)": "(x if x.ndim == 1 else x[0]).view(-1)"})
spoil("right only for contiguous tensors", {"x.view(-1)": "x.reshape(-1)"})
blind("what was there before leaves a trace",
    {RECEIVE: "received = torch.empty_like(flat)\n            exchange(group, receive=(received, rank - distance))\n"
    "            flat.mul_(0).add_(received)"})

# ---- by which messages ------------------------------------------------------------------------------------


@answers.wrong("a built-in collective", blind=True)
def built_in(x, src=0, group=None):
    dist.broadcast(x, src=src, group=group)


@answers.wrong("the root sends to all", blind=True)
def one_by_one(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    if me:
        exchange(group, receive=(x.view(-1), rank - me))
    for other in range(1, ranks if me == 0 else 0):
        exchange(group, send=(x.view(-1), rank + other))


@answers.wrong("too many rounds", blind=True)
def chain(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    if me:
        exchange(group, receive=(x.view(-1), rank - 1))
    if me < ranks - 1:
        exchange(group, send=(x.view(-1), rank + 1))


@answers.wrong("too many bytes", blind=True)
def everybody_again_in_each_round(x, src=0, group=None):
    rank, ranks = place(group)
    me = (rank - group_rank(src, group)) % ranks
    flat, distance = x.view(-1), 1
    while distance < ranks:
        send = (flat, rank + distance) if me + distance < ranks else None
        receive = (torch.empty_like(flat), rank - distance) if me >= distance else None
        exchange(group, send=send, receive=receive)
        if receive and me < 2 * distance:
            flat.copy_(receive[0])
        distance *= 2


@answers.wrong("too many rounds", blind=True)
def a_tree_for_each_piece(x, src=0, group=None):
    for piece in x.view(-1).tensor_split(dist.get_world_size(group)):
        tree(piece, src, group)


@answers.wrong("too many rounds", blind=True, long=True)
def a_tree_for_each_row(x, src=0, group=None):
    for row in x:
        tree(row, src, group)


@answers.wrong("more messages than needed")
def twice(x, src=0, group=None):
    tree(x, src, group)
    tree(x, src, group)


@answers.wrong("the ranks wait for each other", alone=True)
def all_receive_first(x, src=0, group=None):
    rank, _ = place(group)
    exchange(group, receive=(x, rank - 1))
    exchange(group, send=(x, rank + 1))


blind("a built-in collective", {"distance *= 2": "distance *= 2\n    dist.barrier(group)"})
blind("a different dtype travels", {WAY: WAY + "\n    token = torch.zeros(1, dtype=torch.uint8)", SEND: SEND
    + "\n            exchange(group, receive=(token, rank + distance))", RECEIVE: RECEIVE
    + "\n            exchange(group, send=(token, rank - distance))"})  # whoever was told answers
spoil("a receive that nobody waited for", {SEND: "dist.isend(flat, " + BLOCKING[0], RECEIVE: "dist.irecv(flat, "
    + BLOCKING[1]})
spoil("changed while being sent", {SEND: "buffer = flat.clone()\n            work = dist.isend(buffer, " + BLOCKING[0]
    + "\n        " "    buffer.zero_()\n            work.wait()"}, alone=True)
