"""Answers to next_windows (08b): where a rank goes on in the data after a restart."""

from itertools import count, islice

import torch

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


@answers.right
def by_torch(order, batch, read, rank, ranks):
    steps = len(order(0)) // batch
    epoch, step = read // batch // steps, read // batch % steps
    windows = torch.tensor(order(epoch))[: steps * batch]
    return windows.view(steps, ranks, -1)[step, rank]


@answers.right
def in_a_tuple(order, batch, read, rank, ranks):
    usable = len(order(0)) - len(order(0)) % batch
    windows = order(read // usable)
    first = read % usable + rank * (batch // ranks)
    return tuple(windows[i] for i in range(first, first + batch // ranks))


# ---- wrong -----------------------------------------------------------------------------------------------

STEP, STEPS, DIVMOD = "step = read // batch", "steps = len(order(0)) // batch", "epoch, step = divmod(step, steps)"
FIRST, RETURN = "first = step * batch + rank * size", "return order(epoch)[first : first + size]"
SIZE = "size = batch // ranks"
BEYOND = "windows that fill no batch are counted"

spoil = answers.slips(by_divmod)
spoil("", {STEPS: "steps = len(order(0)) // batch + 1"})
spoil("a different kind of answer", {RETURN: "return order(epoch)[first]"})
spoil("a different kind of answer", {RETURN: "return set(order(epoch)[first : first + size])"})
spoil("nothing is returned", {RETURN: "order(epoch)[first : first + size]"})
spoil("in another order", {RETURN: "return sorted(order(epoch)[first : first + size])"})
spoil("in another order", {RETURN: "return order(epoch)[first : first + size][::-1]"})
spoil("", {FIRST: "first = step * batch + (ranks - 1 - rank) * size"})
spoil("", {FIRST: "first = step * batch + rank * size + 1"})
spoil("", {RETURN: "return order(epoch)[first : first + size - 1]"})
spoil("", {RETURN: "return order(epoch)[first : first + size + 1]"})
spoil("", {FIRST: "first = step * size + rank * size"})
spoil("", {DIVMOD: "epoch = 0", RETURN: "return order(0)[first : first + size]"})
spoil("", {FIRST: "first = step * batch + (rank - 1) * size"})
spoil("", {STEPS: "steps = (len(order(0)) - 1) // batch"})


@answers.wrong()
def shuffled_by_rank(order, batch, read, rank, ranks):
    """Each rank in an epoch of its own."""
    steps, size = len(order(0)) // batch, batch // ranks
    epoch, step = divmod(read // batch, steps)
    return order(epoch + rank)[step * batch + rank * size :][:size]


KEPT = []


@answers.wrong()
def kept_orders(order, batch, read, rank, ranks):
    """The orders of another training are still there."""
    if not KEPT:
        KEPT.extend(order(epoch) for epoch in range(64))
    return by_divmod(lambda epoch: KEPT[epoch], batch, read, rank, ranks)


answers.instead(MISTAKES)
