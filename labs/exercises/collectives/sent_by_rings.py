"""sent_by_rings: the elements that each ring sends, as a table from memory."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper


@answered
def sent_by_rings(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(ranks) -> {collective: elements that a rank sends}`, as multiples of the tensor's elements."""
    sheets = [Sheet((n,), rings((n - 1) / n), f"{n} ranks", secret=True) for n in (2, 3, 4, 8, 512, 1)]
    return on_paper(fn, sheets, RINGS, "How many pieces does a rank send, and how large is one?")


def rings(part: float, twice: float = 2) -> dict[str, float]:
    """Return the table, if a rank sends `part` of a tensor in each ring, and `twice` that in an all-reduce."""
    return {"reduce_scatter": part, "all_gather": part, "all_reduce": twice * part, "all_to_all": part}


# fmt: off
RINGS = (
    Mistake("all_reduce once instead of twice", "Which two collectives is it made of?",
            as_if(lambda n: rings((n - 1) / n, 1))),
    Mistake("(N − 1) tensors instead of pieces", "How large is a piece?", as_if(lambda n: rings(n - 1))),
    Mistake("N pieces, and not N − 1", "Whom does a rank send its own piece to?", as_if(lambda n: rings(1))),
)
# fmt: on
