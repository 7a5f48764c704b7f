"""Answers to my_shard (01): where a rank's part of a vector begins and ends."""

import math
from fractions import Fraction

import numpy as np

from labs.exercises.start_here.my_shard import MISTAKES
from tests.answers import Exercise

# fmt: off
answers = Exercise("my_shard")
LINE = "right on all 87 examples"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def by_longest(elements, ranks, rank):
    longest = -(-elements // ranks)
    start = min(rank * longest, elements)
    stop = min((rank + 1) * longest, elements)
    return start, stop


@answers.right(blind=True)
def shard_range(elements, ranks, rank):
    size = (elements + ranks - 1) // ranks
    mine = range(elements)[rank * size : (rank + 1) * size]
    return mine.start, mine.stop


@answers.right(blind=True)
def shard_divmod(elements, ranks, rank):
    size, rest = divmod(elements, ranks)
    size += rest > 0
    start = min(elements, size * rank)
    return start, start + min(size, elements - start)


@answers.right(blind=True)
def shard_walk(elements, ranks, rank):
    longest, left = math.ceil(Fraction(elements, ranks)), elements
    for _ in range(rank):
        left -= min(longest, left)
    return elements - left, elements - left + min(longest, left)


@answers.right(blind=True)
def shard_cuts(elements, ranks, rank):
    cuts = [min(elements, i * -(elements // -ranks)) for i in range(ranks + 1)]
    return cuts[rank], cuts[rank + 1]


@answers.right(line=LINE)
def by_numpy(elements, ranks, rank):
    longest = math.ceil(elements / ranks)
    return np.clip([rank * longest, (rank + 1) * longest], 0, elements)


# ---- wrong -----------------------------------------------------------------------------------------------

LONGEST = "-(-elements // ranks)"
START = "min(rank * longest, elements)"
STOP = "min((rank + 1) * longest, elements)"
BOTH = "return start, stop"
UNHELD = {START: "rank * longest"}
EMPTY = "an empty shard that does not end where it starts"
LAST = "elements if rank == ranks - 1 else "

instead = answers.slips(by_longest)
instead("the last rank is given a longer shard than the others",
    {LONGEST: "elements // ranks",
     STOP: f"{LAST}(rank + 1) * longest"}, blind=True)
instead("not cut as torch.chunk cuts",
    {LONGEST: "elements // ranks",
     START: "rank * longest + min(rank, elements % ranks)",
     STOP: "start + longest + (rank < elements % ranks)"}, blind=True)
instead("past the end", UNHELD | {STOP: "start + longest"}, blind=True)
instead("start and length instead of start and stop", {BOTH: "return start, stop - start"}, blind=True)
instead(EMPTY, UNHELD, blind=True)
instead(EMPTY, {BOTH: "return (start, stop) if start < stop else (0, 0)"}, blind=True)
instead(EMPTY, UNHELD | {BOTH: "return start, max(start, stop)"}, blind=True, long=True)
instead(EMPTY, {START: f"rank * longest if rank == ranks - 1 else {START}"}, blind=True, long=True)
instead("", {BOTH: "return start, stop - 1"}, blind=True)
instead("", {LONGEST: "elements // ranks + 1"}, blind=True)
instead("", {LONGEST: "round(elements / ranks)"}, blind=True)
instead("", {START: "rank * elements // ranks", STOP: "(rank + 1) * elements // ranks"}, blind=True)
instead("", {START: "min((rank - 1) * longest, elements)", STOP: "min(rank * longest, elements)"})
instead("", {START: "elements / ranks * rank", STOP: "elements / ranks * (rank + 1)"})

answers.instead(MISTAKES)
