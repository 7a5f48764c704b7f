"""started_when: the all-reduces that backward and sync() start, as a table from memory."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper


@answered
def started_when(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(tensors, buckets) -> {strategy: (all-reduces started by backward, by sync)}`, for one micro-batch."""
    sheets = [
        Sheet(
            (t, b),
            {"Naive": (0, t), "Bucketed": (0, b), "Overlapped": (b, 0)},
            f"{t} tensors, {b} buckets",
            secret=True,
        )
        for t, b in ((28, 6), (100, 1), (7, 7))
    ]
    return on_paper(fn, sheets, STARTED, "Who starts an all-reduce, a hook of backward or sync()?")


# fmt: off
STARTED = (
    Mistake("the columns are exchanged", "Which comes first in a pair, and when does Naive send?",
            as_if(lambda t, b: {"Naive": (t, 0), "Bucketed": (b, 0), "Overlapped": (0, b)})),
    Mistake("Overlapped is made to send twice", "What is left for sync(), when all buckets are on their way?",
            as_if(lambda t, b: {"Naive": (0, t), "Bucketed": (0, b), "Overlapped": (b, b)})),
)
# fmt: on
