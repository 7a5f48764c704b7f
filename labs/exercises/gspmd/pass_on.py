"""pass_on: one letter of an operation is cut, and with it a dim of each other tensor that has the letter.

Each tensor is written as the letters of its dims, and its cut as the number of one dim, or None.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Cut = Sequence[int | None]  # for each tensor, the number of the dim that is cut, or None

OPERATIONS = (  # inputs, and then the result
    ("ik", "kj", "ij"),
    ("ik", "jk", "ij"),
    ("ki", "kj", "ij"),
    ("abc", "c", "abc"),
    ("abc", "abc"),
    ("ab", "ba"),
    ("bhte", "bhse", "bhts"),
    ("abc", "ab"),
    ("vw", "ab", "abw"),
)


def passed_on(dims: Sequence[str], cut: Cut) -> list[int | None]:
    """Return the cuts, with the letter's dim for each other tensor that has it."""
    [letter] = {own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None}
    return [own.index(letter) if dim is None and letter in own else dim for own, dim in zip(dims, cut, strict=True)]


def by_number(dims: Sequence[str], cut: Cut) -> list[int | None]:
    """Return the cuts as they would be if every tensor were cut along the dim with the same index."""
    number = next(dim for dim in cut if dim is not None)
    return [number if dim is None and number < len(own) else dim for own, dim in zip(dims, cut, strict=True)]


# fmt: off
PASSED = (
    Mistake("only from inputs to the result", "Only the result's layout is known. What does that say of its inputs?",
            as_if(lambda dims, cut: [*cut[:-1], passed_on(dims, cut)[-1]]),
            symptom="a gradient that is wanted in shards is made whole first, since nobody told its product"),
    Mistake("by the number of the dim", "Rows of the result: which dim of the second factor do they come from?",
            as_if(by_number), symptom="after a transposed matrix everything is cut along the wrong dim"),
    Mistake("cut, though it lacks the letter", "A bias has no rows. What is there to cut?",
            as_if(lambda dims, cut: [dim or 0 for dim in passed_on(dims, cut)])),
    Mistake("-1, where nothing is known", "What does find return where there is none, and what does the docstring?",
            as_if(lambda dims, cut: [-1 if dim is None else dim for dim in passed_on(dims, cut)])),
    Mistake("what was known is gone", "Is the layout that was given no longer true?",
            as_if(lambda dims, cut: [None if known is not None else dim
                                     for known, dim in zip(cut, passed_on(dims, cut), strict=True)])),
    Mistake("letters, and not numbers of dims", "What does the docstring say is returned?",
            as_if(lambda dims, cut: [None if dim is None else own[dim]
                                     for own, dim in zip(dims, passed_on(dims, cut), strict=True)])),
)
# fmt: on


@answered
def pass_on(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(dims, cut) -> cut`, which passes one letter's cut on to the other tensors; return the ✓ line.

    dims: the letters of each tensor
    cut: for each tensor, the number of the dim that is cut, or None
    """
    draw, sheets = random.Random(seed), []
    for dims in OPERATIONS:
        names = dict(
            zip(
                letters := sorted(set("".join(dims))),
                draw.sample("abcdefghijkmnpqrstuvwxyz", len(letters)),
                strict=True,
            )
        )
        renamed = ["".join(names[letter] for letter in own) for own in dims]
        for known, own in enumerate(renamed):
            for dim in range(len(own)):
                cut = [dim if number == known else None for number in range(len(dims))]
                words = f"{','.join(renamed[:-1])}->{renamed[-1]}, of which {cut} is known"
                sheets.append(Sheet((renamed, cut), passed_on(renamed, cut), words, fills=True))
    draw.shuffle(sheets)
    return on_paper(fn, sheets, PASSED, "Which letter is cut, and which tensors have it?")


pass_on.expected = passed_on  # the notebook goes on with this function, if the learner's is not right yet
