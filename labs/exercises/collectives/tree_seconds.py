"""tree_seconds: how long an all-reduce takes up and down a tree."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from labs.exercises.collectives._seconds import Count, doublings, sheets
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import as_if, on_paper


@answered
def tree_seconds(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(size, ranks, latency, bandwidth) -> seconds`: a reduce, then a broadcast, of whole tensors."""
    return on_paper(fn, sheets(tree, seed), TREE, "How many rounds are there, and how many bytes are sent in each?")


def tree(
    size: int,
    ranks: int,
    latency: float,
    bandwidth: float,
    rounds: Count = lambda n: 2 * doublings(n),
    tensors: Count | None = None,
) -> float:
    """Return the seconds of a tree all-reduce; or a wrong answer, with other numbers of rounds, or of tensors."""
    return rounds(ranks) * latency + (tensors or rounds)(ranks) * size / bandwidth


# fmt: off
TREE = (
    Mistake("the way back is left out", "The root has the sum. Who needs it?", as_if(tree, rounds=doublings)),
    Mistake("the rounds are not rounded up", "With five ranks, how many rounds does it take until all have heard?",
            as_if(*(partial(tree, rounds=rounds)
                    for rounds in (lambda n: 2 * math.log2(n), lambda n: 2 * (n.bit_length() - 1))))),
    Mistake("one round too many", "With two ranks, how many rounds does a broadcast take?",
            as_if(tree, rounds=lambda n: 2 * n.bit_length())),
    Mistake("a round for each rank, and not for each doubling", "In each round, how many ranks tell another one?",
            as_if(tree, rounds=lambda n: 2 * (n - 1))),
    Mistake("pieces travel as in a ring, and not whole tensors",
            "What does a rank in the tree hand on: a piece, or all that it has?",
            as_if(tree, tensors=lambda n: 2 * doublings(n) / n)),
)
# fmt: on
