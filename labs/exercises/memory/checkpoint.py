"""checkpoint: each layer runs its forward a second time in backward, and keeps only its input until then."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import answered
from labs.exercises.memory._recomputing import budgeted


@answered
def checkpoint(fn: Callable[..., Any], seed: int) -> str:
    """`fn(layer, x)`: what `layer(x)` is, and its gradients, with nothing kept but x until backward."""
    return budgeted(fn, seed, around=True, most=0.30, dear=1.0, runs=2)
