"""Layouts that follow from others (labs.gspmd.propagation): along a letter, and where two letters meet.

Each tensor is the letters of its dims, and what is known of it the number of the dim that is cut, or None.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.pencil.sheet import Sheet, as_if, on_paper

Cut = Sequence[int | None]
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


# ---- along a letter --------------------------------------------------------------------------------------


def passed_on(dims: Sequence[str], cut: Cut) -> list[int | None]:
    [letter] = {own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None}
    return [own.index(letter) if dim is None and letter in own else dim for own, dim in zip(dims, cut, strict=True)]


def by_number(dims: Sequence[str], cut: Cut) -> list[int | None]:
    number = next(dim for dim in cut if dim is not None)
    return [number if dim is None and number < len(own) else dim for own, dim in zip(dims, cut, strict=True)]


def to_the_first(dims: Sequence[str], cut: Cut) -> list[int | None]:
    """Besides the one that is known."""
    found, due = list(cut), passed_on(dims, cut)
    for at, dim in enumerate(due):
        if cut[at] is None and dim is not None:
            found[at] = dim
            break
    return found


# fmt: off
PASSED = (
    Mistake("only from inputs to the result", "Only the result's layout is known. What does that say of its inputs?",
            as_if(lambda dims, cut: [*cut[:-1], passed_on(dims, cut)[-1]]),
            shows="a gradient that is wanted in shards is made whole first, since nobody told its product"),
    Mistake("only to inputs", "Which of these tensors comes out?",
            as_if(lambda dims, cut: [*passed_on(dims, cut)[:-1], cut[-1]])),
    Mistake("by the number of the dim", "Rows of the result: which dim of the second factor do they come from?",
            as_if(by_number), shows="after a transposed matrix everything is cut along the wrong dim"),
    Mistake("cut, though it lacks the letter", "A bias has no rows. What is there to cut?",
            as_if(lambda dims, cut: [dim or 0 for dim in passed_on(dims, cut)])),
    Mistake("-1, where nothing is known", "What does find return where there is none, and what does the docstring?",
            as_if(lambda dims, cut: [-1 if dim is None else dim for dim in passed_on(dims, cut)])),
    Mistake("what was known is gone", "Is the layout that was given no longer true?",
            as_if(lambda dims, cut: [None if known is not None else dim
                                     for known, dim in zip(cut, passed_on(dims, cut), strict=True)])),
    Mistake("only the first that has the letter", "Which other tensors have the letter?", as_if(to_the_first)),
    Mistake("tensors without the letter are left out", "How is the caller to know whose number this is?",
            as_if(lambda dims, cut: [dim for dim in passed_on(dims, cut) if dim is not None])),
    Mistake("letters, and not numbers of dims", "What does the docstring say is returned?",
            as_if(lambda dims, cut: [None if dim is None else own[dim]
                                     for own, dim in zip(dims, passed_on(dims, cut), strict=True)])),
)
# fmt: on


@answered
def pass_on(fn: Callable[..., Any], seed: int) -> str:
    """`fn(dims, cut) -> cut`: which dim of each tensor is cut, once one letter is."""
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


# ---- where two meet --------------------------------------------------------------------------------------


def moved(dims: Sequence[str], cut: Cut, sizes: Sequence[int]) -> dict[str, int]:
    """By letter: elements that are cut along another one, in the order in which the letters come."""
    known = [(own[dim], size) for own, dim, size in zip(dims, cut, sizes, strict=True) if dim is not None]
    return {letter: sum(size for other, size in known if other != letter) for letter, _ in known}


def met(dims: Sequence[str], cut: Cut, sizes: Sequence[int]) -> str:
    elements = moved(dims, cut, sizes)
    return min(elements, key=elements.__getitem__)


def of_the_largest(dims: Sequence[str], cut: Cut, sizes: Sequence[int]) -> str:
    """Of the largest tensor alone."""
    return max((size, own[dim]) for own, dim, size in zip(dims, cut, sizes, strict=True) if dim is not None)[1]


def with_the_unknown(dims: Sequence[str], cut: Cut, sizes: Sequence[int]) -> str:
    """What is not cut counts, too, where it lacks the letter."""
    elements = moved(dims, cut, sizes)
    for letter in elements:
        elements[letter] += sum(
            size for own, dim, size in zip(dims, cut, sizes, strict=True) if dim is None and letter not in own
        )
    return min(elements, key=elements.__getitem__)


# fmt: off
MET = (
    Mistake("what is large moves", "One of them stays where it is, the other travels. Which one should travel?",
            as_if(lambda *job: max(elements := moved(*job), key=elements.__getitem__)),
            shows="few tokens, and yet every weight is gathered; or the other way round"),
    Mistake("only the largest tensor counts", "Two tensors have the other letter. How much do they weigh together?",
            as_if(of_the_largest)),
    Mistake("tensors are counted, and not what is in them", "Is it as much work to move a bias as to move a weight?",
            as_if(lambda dims, cut, sizes: met(dims, cut, [1] * len(dims)))),
    Mistake("what is not known to be cut counts, too", "Nothing is known of it yet. Does it have to move?",
            as_if(with_the_unknown)),
    Mistake("always the first letter", "What if the batch is very small?", as_if(lambda *job: next(iter(moved(*job)))),
            shows="FSDP for any batch, and never anything else"),
    Mistake("always the last letter", "What if the batch is very large?", as_if(lambda *job: [*moved(*job)][-1])),
    Mistake("of equals, not the first", "Both cost the same. Which one does the docstring ask for?",
            as_if(lambda *job: min(reversed(elements := moved(*job)), key=elements.__getitem__))),
)
# fmt: on


@answered
def meet(fn: Callable[..., Any], seed: int) -> str:
    """`fn(dims, cut, sizes) -> letter`: the one with which the fewest elements are cut in another way."""
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
