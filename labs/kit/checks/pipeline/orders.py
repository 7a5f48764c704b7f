"""Three orders in which a pipeline can do its work.

gpipe          all forwards, then all backwards, in the order of the micro-batches
one_f_one_b    the same bubble, and min(m, p - rank) micro-batches alive
zero_bubble    the backward split: a bubble no larger than ZB-H1's, and no more alive than with 1F1B
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from labs import pp
from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.pipeline.listed import FEW, LONG, Asked, Listed, Seen, checked
from labs.kit.checks.pipeline.stacked import many, whole

ALONE = "right only on more than one rank"
Fits = Callable[[Seen], Any]


def sizes(seed: int, few: str = FEW) -> list[Asked]:
    """The one that is drawn in the notebook comes first, and those with fewer micro-batches than ranks last."""

    def size(p: int, m: int, only: str = "") -> Asked:
        return Asked((p, m), None, f"{many(p, 'rank')}, {many(m, 'micro-batch', 'es')}", only=only)

    draw, found = random.Random(seed), [size(4, 8)]
    for p in range(1, 9):
        for m in {1, 2, p - 1, p, p + 1, 2 * p, draw.randrange(2 * p, 4 * p)} - {0}:
            found.append(size(p, m, ALONE if p == 1 else few if m < p else ""))
    return sorted(found, key=lambda sheet: ["", ALONE, few].index(sheet.only))


def fraction(p: int, m: int) -> float:
    return (p - 1) / m


def too_many(fits: Fits = lambda seen: True) -> Fits:
    """Activations."""
    return lambda seen: seen.crowd and fits(seen) and seen.crowd


def too_long(fits: Fits = lambda seen: True) -> Fits:
    return lambda seen: seen.wait and fits(seen) and seen.wait


def early(seen: Seen) -> str | None:
    return seen.like("[BIW](?=.*F)", ", and forwards come after it")


def disordered(seen: Seen) -> str | None:
    """After the same kind of a later micro-batch."""

    def fits(rank: int, place: int, x: pp.Instruction) -> bool:
        alike = (y for y in seen.lists[rank][:place] if type(y) is type(x) and y.stage == x.stage)
        return any(y.microbatch > x.microbatch for y in alike)

    return seen.first(fits, ", and has done the same for a later micro-batch before")


def w_at_once(seen: Seen) -> str | None:
    """Each W directly after its I: told of the last rank, for whose I's all others wait."""
    told = ", while the other ranks wait for its next I"
    on_the_last = seen.first(lambda rank, place, x: rank == seen.p - 1 and isinstance(x, pp.W), told)
    return None if seen.like("[^I]W") else on_the_last


def only_w_is_elsewhere(seen: Seen) -> bool:
    """Without its W's it is 1F1B."""
    return whole(seen.lists) == [list(order) for order in pp.one_f_one_b(seen.p, seen.m)]


# fmt: off
SPLIT = Mistake("the backward is split", "Which two instructions is this schedule made of?",
                lambda seen: seen.like("[IW]"))
BUBBLE = (
    Mistake("one micro-batch at a time", "What could a rank do until the gradient of its first micro-batch comes back?",
            too_long(lambda seen: max(map(max, seen.alive)) <= 1),
            shows="a bubble of 100 % and more: only one rank works at any time"),
    Mistake("the micro-batches are in another order",
            "For which micro-batch does the rank before wait, while this one does another?", too_long(disordered)),
    Mistake("the bubble is too large",
            "How many forwards must rank r have done when the first gradient can come back to it?", too_long()),
)
ALL_FIRST = Mistake("all forwards first", "A backward frees what its forward has kept. When could the first one begin?",
                    too_many(lambda seen: not early(seen)), shows="memory that grows with the number of micro-batches")
CROWD = (
    Mistake("the same warm-up on every rank",
            "How long does a gradient take to come back to rank r, and how long to the last rank?",
            too_many(lambda seen: len({len(kinds) - len(kinds.lstrip("F")) for kinds in seen.kinds}) == 1)),
    Mistake("too many activations alive", "What frees an activation, and what could stand before this forward?",
            too_many()),
)
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
ONE_F_ONE_B = Listed(
    partial(sizes, few=LONG),
    bubble=fraction,
    alive=lambda p, m: [min(m, p - rank) for rank in range(p)],
    mistakes=(SPLIT, ALL_FIRST, *CROWD, *BUBBLE),
)
ZERO_BUBBLE = Listed(
    sizes,
    bubble=lambda p, m: pp.simulate(pp.zb1p(p, m)).bubble,
    alive=lambda p, m: [min(m, p)] * p,
    mistakes=(
        Mistake("the backward is not split", "Of the two halves of a backward, for which one does another rank wait?",
                too_long(lambda seen: not seen.like("I"))),
        Mistake("all W at the end", "Until when is an activation held: until its I, or until its W?",
                too_many(lambda seen: not seen.like("W.*I")),
                shows="no bubble, but memory that grows with the number of micro-batches"),
        ALL_FIRST,
        Mistake("W directly after its I", "Nobody waits for a W. Where does a rank wait that could do one?",
                lambda seen: seen.wait and (at := w_at_once(seen)) and f"{seen.wait.partition(':')[0]}: {at}",
                shows="a split backward with the bubble of 1F1B"),
        Mistake("W's in the wrong places",
                "An activation is held until its W. Which W could stand where this rank waits, and which one must not "
                "wait?", lambda seen: (seen.crowd or seen.wait) and only_w_is_elsewhere(seen)
                and (seen.crowd or seen.wait)),
        *CROWD,
        *BUBBLE,
    ),
)
# fmt: on


@answered
def gpipe(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F and B: stage r on rank r."""
    return checked(GPIPE, fn, seed)


@answered
def one_f_one_b(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F and B: stage r on rank r."""
    return checked(ONE_F_ONE_B, fn, seed)


@answered
def zero_bubble(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F, I and W: stage r on rank r.  F, I and W take equally long."""
    return checked(ZERO_BUBBLE, fn, seed)
