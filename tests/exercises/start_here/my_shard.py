"""Answers to my_shard (01): where a rank's part of a vector begins and ends."""

from labs.exercises.start_here.my_shard import MISTAKES
from tests.answers import Exercise

# fmt: off
answers = Exercise("my_shard")
LINE = "right on all 87 examples"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def by_longest(elements, ranks, rank):
    longest = -(-elements // ranks)
    start = min(rank * longest, elements)
    stop = min((rank + 1) * longest, elements)
    return start, stop


@answers.right
def shard_range(elements, ranks, rank):
    size = (elements + ranks - 1) // ranks
    mine = range(elements)[rank * size : (rank + 1) * size]
    return mine.start, mine.stop


# ---- wrong -----------------------------------------------------------------------------------------------

START = "min(rank * longest, elements)"
UNHELD = {START: "rank * longest"}
EMPTY = "an empty shard that does not end where it starts"

instead = answers.slips(by_longest)
instead(EMPTY, UNHELD)

answers.instead(MISTAKES)
