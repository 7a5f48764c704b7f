"""ring_seconds: the time of an all-reduce around a ring."""

from collections.abc import Callable
from typing import Any

from labs.exercises.collectives._seconds import Count, sheets
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import as_if, on_paper


@answered
def ring_seconds(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(size, ranks, latency, bandwidth) -> seconds`: 2 (N − 1) rounds, and a piece is sent in each."""
    return on_paper(fn, sheets(ring, seed), RING, "How many rounds are there, and how many bytes are sent in each?")


def ring(
    size: int,
    ranks: int,
    latency: float,
    bandwidth: float,
    rounds: Count = lambda n: 2 * (n - 1),
    tensors: Count = lambda n: 2 * (n - 1) / n,
) -> float:
    """Return the seconds of a ring all-reduce; or a wrong answer, with other numbers of rounds, or of tensors."""
    return rounds(ranks) * latency + tensors(ranks) * size / bandwidth


# fmt: off
RING = (
    Mistake("only the first half of the ring",
            "After the reduce_scatter every rank has one piece of the sum. What is left to do?",
            as_if(ring, rounds=lambda n: n - 1, tensors=lambda n: (n - 1) / n)),
    Mistake("whole tensors travel", "How large is what leaves in one round?",
            as_if(ring, tensors=lambda n: 2 * (n - 1))),
    Mistake("N rounds, and not N − 1", "With two ranks, how often does a rank send?",
            as_if(ring, rounds=lambda n: 2 * n, tensors=lambda n: 2)),
)
# fmt: on
