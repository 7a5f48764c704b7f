"""Sizes and mistakes that the exercises on the schedules gpipe, one_f_one_b and zero_bubble have in common."""

import random
from collections.abc import Callable
from typing import Any

from labs import pp
from labs.exercises.engine.answer import Mistake
from labs.exercises.pipeline._listed import FEW, Asked, ReturnedLists
from labs.exercises.pipeline._stages_run_by_lists import many

ALONE = "right only on more than one rank"


Fits = Callable[[ReturnedLists], Any]


def sizes(seed: int, few: str = FEW) -> list[Asked]:
    """Return the sheets of ranks and micro-batches: the notebook's size first, fewer micro-batches than ranks last."""

    def size(p: int, m: int, only: str = "") -> Asked:
        return Asked((p, m), None, f"{many(p, 'rank')}, {many(m, 'micro-batch', 'es')}", only=only)

    draw, found = random.Random(seed), [size(4, 8)]
    for p in range(1, 9):
        for m in {1, 2, p - 1, p, p + 1, 2 * p, draw.randrange(2 * p, 4 * p)} - {0}:
            found.append(size(p, m, ALONE if p == 1 else few if m < p else ""))
    return sorted(found, key=lambda sheet: ["", ALONE, few].index(sheet.only))


def fraction(p: int, m: int) -> float:
    return (p - 1) / m


def too_many(matches: Fits = lambda seen: True) -> Fits:
    """Return a row's test: a sentence if a rank holds too many activations and `matches`."""
    return lambda seen: seen.crowd and matches(seen) and seen.crowd


def too_long(matches: Fits = lambda seen: True) -> Fits:
    """Return a row's test: a sentence if the bubble is too large and `matches`."""
    return lambda seen: seen.wait and matches(seen) and seen.wait


def early(seen: ReturnedLists) -> str | None:
    """Return a sentence about the first backward that has forwards after it, or None."""
    return seen.like("[BIW](?=.*F)", ", and forwards come after it")


def disordered(seen: ReturnedLists) -> str | None:
    """Return a sentence about the first instruction that comes after the same one of a later micro-batch, or None."""

    def matches(rank: int, place: int, x: pp.Instruction) -> bool:
        alike = (y for y in seen.lists[rank][:place] if type(y) is type(x) and y.stage == x.stage)
        return any(y.microbatch > x.microbatch for y in alike)

    return seen.first(matches, ", and has done the same for a later micro-batch before")


# fmt: off
SPLIT = Mistake("the backward is split", "Which two instructions is this schedule made of?",
                lambda seen: seen.like("[IW]"))
BUBBLE = (
    Mistake("one micro-batch at a time", "What could a rank do until the gradient of its first micro-batch comes back?",
            too_long(lambda seen: max(map(max, seen.alive)) <= 1),
            symptom="a bubble of 100 % and more: only one rank works at any time"),
    Mistake("the micro-batches are in another order",
            "For which micro-batch does the rank before wait, while this one does another?", too_long(disordered)),
    Mistake("the bubble is too large",
            "How many forwards must rank r have done when the first gradient can come back to it?", too_long()),
)
ALL_FIRST = Mistake("all forwards first", "A backward frees what its forward has kept. When could the first one begin?",
                    too_many(lambda seen: not early(seen)),
                    symptom="memory that grows with the number of micro-batches")
CROWD = (
    Mistake("the same warm-up on every rank",
            "How long does a gradient take to come back to rank r, and how long to the last rank?",
            too_many(lambda seen: len({len(kinds) - len(kinds.lstrip("F")) for kinds in seen.kinds}) == 1)),
    Mistake("too many activations alive", "What frees an activation, and what could stand before this forward?",
            too_many()),
)
# fmt: on
