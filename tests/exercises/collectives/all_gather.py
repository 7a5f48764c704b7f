"""Answers to all_gather(x, group=None), by a ring."""

from functools import partial

import torch  # noqa: F401 (varied answers use it)
import torch.distributed as dist

from labs import collectives
from labs.collectives import exchange, place
from tests.answers import Exercise

# fmt: off
answers = Exercise("all_gather")
LINE = "you sent 0.75 × the tensor per rank; the least possible is 0.75 ×"
answers.right(collectives.all_gather, line=LINE)


@answers.right(line=LINE)
def ring(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        out, into = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(out, rank + 1), receive=(into, rank - 1))


EXCHANGE = "exchange(group, send=(out, rank + 1), receive=(into, rank - 1))"

# ---- what arrives, and where -------------------------------------------------------------------------------

spoil = partial(answers.spoil, ring)
ROUNDS, CUT = "range(ranks - 1)", "pieces = x.view(-1).tensor_split(ranks)"

spoil("nothing arrived", {"x.view(-1)": "x.clone().view(-1)"})
spoil("a piece is missing", {ROUNDS: "range(ranks - 2)"})
OWN = {EXCHANGE: "theirs = torch.empty_like(pieces[(rank - 1) % ranks])\n"
                 "        exchange(group, send=(pieces[rank], rank + 1), receive=(theirs, rank - 1))\n"
                 "        into[: len(theirs)] = theirs[: len(into)]"}
spoil("a piece in another's place", OWN)


BACK = {EXCHANGE: EXCHANGE + "\n    x.view(-1).copy_(low)"}
spoil("rounded on the way", {CUT: "low = x.view(-1).float()\n    pieces = low.tensor_split(ranks)"} | BACK)
spoil("right only in some dtypes", {CUT: "low = x.view(-1).to(torch.promote_types(x.dtype, torch.float32))\n"
    "    pieces = low.tensor_split(ranks)"} | BACK)


@answers.wrong("right only in the first call")
def has_seen_this_size(x, group=None, seen={}):  # noqa: B006
    key = x.shape, x.dtype, dist.get_world_size(group)
    if key not in seen:
        ring(x, group)
        seen[key] = x.clone()
    x.copy_(seen[key])
