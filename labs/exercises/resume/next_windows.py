"""next_windows: the windows of the data set that this rank reads next, after a restart.

The check asks within an epoch, at its end, and where the last windows of an epoch fill no batch.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, answer_is, as_if, on_paper

Order = Callable[[int], list[int]]  # returns the order of an epoch's windows
JOBS = (  # windows in an epoch, batch, ranks; steps so far
    (24, 8, 4, (1, 2, 3, 4, 7, 0)),
    (23, 6, 3, (1, 2, 3, 5, 6, 8)),
    (14, 4, 2, (2, 3, 5)),
    (9, 4, 1, (1, 2, 3)),
    (5, 5, 5, (1, 2)),
    (1000, 64, 64, (14, 15, 31)),
)


@dataclass(frozen=True)
class Drawn:
    windows: int
    seed: int

    def __call__(self, epoch: int) -> list[int]:
        return random.Random(self.seed + epoch).sample(range(self.windows), self.windows)


@answered
def next_windows(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(order, batch, read, rank, ranks) -> windows`, the r-th of equal parts of the next batch.

    Returns the ✓ line.
    """
    sheets = [
        Sheet(
            job := (Drawn(windows, seed), batch, batch * step, rank, ranks),
            take(*job),
            f"{windows} windows in an epoch, {batch} in a batch, {batch * step} read so far, rank {rank} of {ranks}",
        )
        for windows, batch, ranks, steps in JOBS
        for step in steps
        for rank in sorted({0, ranks // 2, ranks - 1})
    ]
    return on_paper(fn, sheets, MISTAKES, "In which epoch is this, and how many of its windows have been read?")


def part(step: int, batch: int, rank: int, ranks: int) -> slice:
    """Return the places of a rank's part of a step's batch, in an epoch's order."""
    size = batch // ranks
    return slice(step * batch + rank * size, step * batch + (rank + 1) * size)


def take(
    order: Order,
    batch: int,
    read: int,
    rank: int,
    ranks: int,
    places: Callable[[int, int, int, int], slice] = part,
) -> list[int]:
    """Return the windows that this rank reads next, or those of a mistake.

    places: returns the places of a rank's part
    """
    epoch, step = divmod(read // batch, len(order(0)) // batch)
    return order(epoch)[places(step, batch, rank, ranks)]


def by_windows(order: Order, batch: int, read: int, rank: int, ranks: int) -> list[int]:
    """Return the windows as if an epoch ended with its last window, and not with its last batch."""
    epoch, first = divmod(read, len(order(0)))
    return order(epoch)[first:][part(0, batch, rank, ranks)]


def joined(order: Order, batch: int, read: int, rank: int, ranks: int) -> list[int]:
    """Return the windows of `by_windows`, as if a batch could also go on into the next epoch."""
    epoch, first = divmod(read, len(order(0)))
    return [*order(epoch), *order(epoch + 1)][first:][part(0, batch, rank, ranks)]


def not_over(order: Order, batch: int, read: int, rank: int, ranks: int) -> list[int]:
    """Return the windows of a loader that does not notice that all steps of an epoch have been taken."""
    steps, step = len(order(0)) // batch, read // batch
    epoch = max(0, step - 1) // steps
    return order(epoch)[part(step - epoch * steps, batch, rank, ranks)]


# fmt: off
PARTS = "Rank r reads the r-th of equal parts: of 8 windows, at which places are those of rank 1 of 2?"
TAIL = "10 windows in an epoch, 4 in a batch: how many steps are that, and in which epoch is the third step?"
MISTAKES = (
    Mistake("begun anew", "How many windows have been read already?",
            as_if(lambda order, batch, read, *rank: take(order, batch, 0, *rank)),
            symptom="after a restart the loss is a little too low: the model has seen these windows"),
    Mistake("the order of epoch 0 in every epoch", "For which epoch is order asked, once epoch 0 is over?",
            as_if(lambda order, *job: take(lambda epoch: order(0), *job)),
            symptom="the same order again and again, as from a DistributedSampler without set_epoch"),
    Mistake("read is taken for what this rank has read", "Who has read these: one rank, or all of them together?",
            as_if(lambda order, batch, read, rank, ranks: take(order, batch, read * ranks, rank, ranks)),
            symptom="after a restart windows are left out, more of them the more ranks there are"),
    Mistake("windows that fill no batch are counted", TAIL, as_if(by_windows, joined),
            symptom="right in the first epoch; from the second on, other windows than without a restart"),
    Mistake("an epoch that is over", "All steps of epoch 0 have been taken. In which epoch is the next one?",
            as_if(not_over), symptom="a batch that is empty, or too short, where an epoch ends"),
    Mistake("all ranks read the same", PARTS,
            as_if(take, places=lambda step, batch, rank, ranks: part(step, batch, 0, ranks)),
            symptom="N ranks that learn no more than one"),
    Mistake("dealt out one by one", PARTS,
            as_if(take, places=lambda step, batch, rank, ranks: slice(step * batch + rank, (step + 1) * batch, ranks)),
            symptom="the right batch, but on other ranks than before: losses that differ in their last digits"),
    Mistake("in another order", "In which order are they read?",
            answer_is(lambda found, expected: isinstance(found, list) and sorted(map(str, found)) == sorted(map(str,
            expected)))),
)
