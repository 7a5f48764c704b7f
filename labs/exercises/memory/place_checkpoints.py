"""place_checkpoints: a GPT is changed so that it keeps to a budget of memory and of recomputation."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import answered
from labs.exercises.memory._recomputing import budgeted


@answered
def place_checkpoints(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(model)`: it changes a GPT, whose `model.layers` is a ModuleDict, in place, to keep to the budget.

    Returns the text of the ✓ line, with the memory and the recomputation measured.
    """
    return budgeted(fn, seed, most=0.40, dear=0.5)  # the other half of the layers would be 0.44
