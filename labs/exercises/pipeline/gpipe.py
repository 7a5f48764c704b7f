"""gpipe: all forwards, then all backwards, in the order of the micro-batches."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.pipeline._listed import Listed, checked
from labs.exercises.pipeline._orders import SPLIT, disordered, early, fraction, sizes

# fmt: off
GPIPE = Listed(
    sizes,
    bubble=fraction,
    alive=lambda p, m: [m] * p,
    mistakes=(
        SPLIT,
        Mistake("a backward before the last forward", "GPipe is the simplest: which two phases does each rank have?",
                early),
        Mistake("the micro-batches are in another order",
                "One process adds up the gradients of micro-batches 0, 1, 2, ...: why do the bits depend on the order?",
                disordered),
    ),
)
# fmt: on


@answered
def gpipe(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(ranks, microbatches) -> lists` of F and B, with stage r on rank r; return the ✓ line."""
    return checked(GPIPE, fn, seed)
