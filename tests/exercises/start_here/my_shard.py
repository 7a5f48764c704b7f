"""Answers to my_shard (01): where a rank's part of a vector begins and ends."""

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
instead("", {BOTH: "return start, stop - 1"}, blind=True)

answers.instead(MISTAKES)
