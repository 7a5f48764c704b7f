"""one_f_one_b: GPipe's bubble, with at most min(m, p - rank) micro-batches alive."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labs.exercises.engine.answer import answered
from labs.exercises.pipeline._listed import LONG, Listed, checked
from labs.exercises.pipeline._orders import ALL_FIRST, BUBBLE, CROWD, SPLIT, fraction, sizes

# fmt: off
ONE_F_ONE_B = Listed(
    partial(sizes, few=LONG),
    bubble=fraction,
    alive=lambda p, m: [min(m, p - rank) for rank in range(p)],
    mistakes=(SPLIT, ALL_FIRST, *CROWD, *BUBBLE),
)
# fmt: on


@answered
def one_f_one_b(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(ranks, microbatches) -> lists` of F and B, with stage r on rank r; return the ✓ line."""
    return checked(ONE_F_ONE_B, fn, seed)
