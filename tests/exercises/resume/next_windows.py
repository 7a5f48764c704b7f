"""Answers to next_windows (08b): where a rank goes on in the data after a restart."""

from labs.exercises.resume.next_windows import MISTAKES
from tests.answers import Exercise

answers = Exercise("next_windows")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line="right on all 60 examples")
def by_divmod(order, batch, read, rank, ranks):
    step = read // batch
    steps = len(order(0)) // batch
    epoch, step = divmod(step, steps)
    size = batch // ranks
    first = step * batch + rank * size
    return order(epoch)[first : first + size]


@answers.right
def walking(order, batch, read, rank, ranks):
    """Epoch by epoch."""
    epoch = 0
    while read >= (used := len(order(epoch)) // batch * batch):
        read, epoch = read - used, epoch + 1
    now = order(epoch)[read : read + batch]
    return now[rank * batch // ranks : (rank + 1) * batch // ranks]


# ---- wrong -----------------------------------------------------------------------------------------------

RETURN = "return order(epoch)[first : first + size]"

spoil = answers.slips(by_divmod)
spoil("in another order", {RETURN: "return sorted(order(epoch)[first : first + size])"})


answers.instead(MISTAKES)
