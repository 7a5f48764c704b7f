"""Answers to next_windows (08b): where a rank goes on in the data after a restart."""

from itertools import count, islice

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


@answers.right
def one_batch_after_the_other(order, batch, read, rank, ranks):
    def batches():
        for epoch in count():
            windows = order(epoch)
            for first in range(0, len(windows) - batch + 1, batch):
                yield windows[first : first + batch]

    now = next(islice(batches(), read // batch, None))
    return [window for i, window in enumerate(now) if i * ranks // batch == rank]


# ---- wrong -----------------------------------------------------------------------------------------------

STEP, STEPS, DIVMOD = "step = read // batch", "steps = len(order(0)) // batch", "epoch, step = divmod(step, steps)"
FIRST, RETURN = "first = step * batch + rank * size", "return order(epoch)[first : first + size]"

spoil = answers.slips(by_divmod)
spoil("", {STEPS: "steps = len(order(0)) // batch + 1"})
spoil("in another order", {RETURN: "return sorted(order(epoch)[first : first + size])"})


answers.instead(MISTAKES)
