"""exposed: the time that a step waits, after its last backward, for the all-reduces of its gradients.

The check asks about layers that are alike, and others that are not.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Seconds = Sequence[float]


@answered
def exposed(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(backward, reduce) -> seconds` that a step waits after its last backward; return the ✓ line.

    backward, reduce: the seconds of each layer's backward and all-reduce
    """
    draw = random.Random(seed)
    steps = [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([2, 2, 2], [1, 1, 1]),
        ([1, 1, 1], [3, 3, 3]),
        ([5, 1, 1, 4], [6, 0, 0, 1]),
        ([1, 2, 3, 4], [9, 0, 0, 1]),
        ([1, 1, 1], [9, 0, 1]),
        ([9, 1], [1, 5]),
        ([3], [2]),
        ([], []),
        ([0, 0, 0], [1, 2, 3]),
        *([[draw.uniform(0, 3) for _ in range(n)] for _ in range(2)] for n in (2, 5, 9)),
    ]
    words = "backwards of {} s, all-reduces of {} s"
    sheets = [Sheet((one, other), waits(one, other), words.format(*map(short, (one, other)))) for one, other in steps]
    return on_paper(fn, sheets, MISTAKES, "When can the all-reduce of a layer begin: what must be over?")


def waits(backward: Seconds, reduce: Seconds) -> float:
    """Return the seconds that a step waits for its gradients after its last backward."""
    computed = reduced = 0.0
    for one, other in zip(backward, reduce, strict=True):
        computed += one
        reduced = max(reduced, computed) + other
    return reduced - computed


def short(seconds: Seconds) -> str:
    return ", ".join(f"{each:.3g}" for each in seconds) or "no layer at all"


def side_by_side(backward: Seconds, reduce: Seconds) -> float:
    """Return the seconds as if each all-reduce had a wire of its own."""
    ends = [sum(backward[: n + 1]) + each for n, each in enumerate(reduce)]
    return max(ends, default=0) - sum(backward)


# fmt: off
MISTAKES = (
    Mistake("nothing is hidden", "The first layer's gradient is there before the others'. What does the wire do then?",
            as_if(lambda backward, reduce: sum(reduce))),
    Mistake("only the totals are compared",
            "When is the last gradient there, and can its all-reduce have begun before that?",
            as_if(lambda backward, reduce: max(0, sum(reduce) - sum(backward)))),
    Mistake("all-reduces side by side", "There is one wire: when is it free for the next all-reduce?",
            as_if(side_by_side)),
    Mistake("an all-reduce before its gradient", "What is there to be sent, before the layer's backward is over?",
            as_if(lambda backward, reduce: max(0.0, waits([0.0, *backward], [*reduce, 0.0])))),
)
# fmt: on

exposed.expected = waits  # the notebook goes on with this function, if the learner's is not right yet
