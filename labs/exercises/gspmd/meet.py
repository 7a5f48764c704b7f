"""meet: two dims (letters) of an operation are sharded; the one is kept for which the fewest elements have to move.

Each tensor is written as the letters of its dims, and its cut as the number of one dim, or None.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Cut = Sequence[int | None]  # for each tensor, the number of the dim that is cut, or None


def moved(dims: Sequence[str], cut: Cut, sizes: Sequence[int]) -> dict[str, int]:
    """Return for each letter the elements that are cut along another one, in the order in which the letters come."""
    known = [(own[dim], size) for own, dim, size in zip(dims, cut, sizes, strict=True) if dim is not None]
    return {letter: sum(size for other, size in known if other != letter) for letter, _ in known}


def met(dims: Sequence[str], cut: Cut, sizes: Sequence[int]) -> str:
    """Return the letter for which the fewest elements have to move."""
    elements = moved(dims, cut, sizes)
    return min(elements, key=elements.__getitem__)


# fmt: off
MET = (
    Mistake("what is large moves", "One of them stays where it is, the other travels. Which one should travel?",
            as_if(lambda *job: max(elements := moved(*job), key=elements.__getitem__)),
            symptom="few tokens, and yet every weight is gathered; or the other way round"),
    Mistake("always the first letter", "What if the batch is very small?", as_if(lambda *job: next(iter(moved(*job)))),
            symptom="FSDP for any batch, and never anything else"),
    Mistake("of equals, not the first", "Both cost the same. Which one does the docstring ask for?",
            as_if(lambda *job: min(reversed(elements := moved(*job)), key=elements.__getitem__))),
)
# fmt: on


@answered
def meet(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(dims, cut, sizes) -> letter`, for which the fewest elements are cut in another way; return the ✓ line.

    dims: the letters of each tensor
    cut: for each tensor, the number of the dim that is cut, or None
    sizes: the number of elements of each tensor
    """
    draw, sheets = random.Random(seed), []
    cases = (((0, 1, None), (1, 2, 9)), ((0, 1, None), (2, 1, 9)), ((0, 1, 1), (5, 3, 3)), ((0, 1, 0), (3, 5, 3)))
    cases += (((0, 1, 1), (9, 2, 2)), ((0, 1, 0), (2, 9, 2)), ((1, 1, 0), (2, 3, 4)), ((1, 1, None), (3, 7, 1)))
    cases += (((0, None, 1), (5, 9, 3)), ((None, 1, 0), (9, 5, 3)), ((1, 1, None), (4, 4, 1)))
    for cut, ratios in cases:
        times = draw.randrange(2, 2000)
        sizes = [times * ratio for ratio in ratios]
        arguments = ["ik", "kj", "ij"], list(cut), sizes
        sheets.append(
            Sheet(arguments, met(*arguments), f"ik,kj->ij, of which {list(cut)} is known, of {sizes} elements")
        )
    draw.shuffle(sheets)
    return on_paper(fn, sheets, MET, "If this letter is followed, which tensors are not cut as they should be?")


meet.expected = met  # the notebook goes on with this function, if the learner's is not right yet
