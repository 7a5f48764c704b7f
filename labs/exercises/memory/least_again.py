"""The challenge of 07: change a GPT so that its step fits into memory, and as little as possible is recomputed.

A real step measures two ratios, with the class that the checks of the notebook use (`Twice`).  The first is the bytes
held besides parameters and gradients, divided by those without recomputation; the second is the recomputed
multiplications, divided by those of the layers' forward.

The bound: selective recomputation holds 4D + 2KE + H + 2F numbers per token and layer, and recomputes no matrix
product.  (The output of `down` is not among them: it is the next layer's input minus this layer's.)  To hold one number
less is to drop a result of a product or of attention, whose recomputation costs at least 2D operations.  A score is the
spared share of a forward, divided by the largest share that can be spared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from labs.exercises.engine.answer import Wrong
from labs.exercises.engine.by_script import first_wrong
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.exercises.engine.on_ranks import F32, Draw
from labs.exercises.memory._recomputing import CHANGED, NUMBERS
from labs.exercises.memory._trained_twice import Model, Twice
from labs.model import Config

MOST = 0.56, 0.46, 0.40, 0.34, 0.28  # × the bytes that a step holds without recomputation


def bound(most: float, before: int, world: Model, config: Config) -> float:
    """Return the operations that must be recomputed, as a multiple of the layers' forward.

    most: the allowed bytes, as a multiple of `before`.
    before: the bytes held without recomputation.
    """
    D, KE, H, F = config.dim, config.kv_heads * config.head_size, config.heads, config.hidden
    free = config.depth * (4 * D + 2 * KE + H + 2 * F)
    less = max(free - most * before / 4 / (world.sequences * world.tokens), 0)
    forward = 2 * D * (2 * D + 2 * KE) + 4 * world.tokens * D + 6 * D * F
    return less * 2 * D / (config.depth * forward)


class Tried(NamedTuple):
    """A step of a changed model.

    held: the bytes held, as a multiple of those without recomputation.
    again: the recomputed operations, as a multiple of the layers' forward.
    least: the bound of `again`.
    """

    held: float
    again: float
    least: float


def on_a_rank(fn: Function, cases: Sequence[tuple[Model, float]]) -> list[dict[str, Any]]:
    """Return, for each limit of memory, the measurements or the mistake, up to the first answer that scores nothing."""
    found = []
    for world, most in cases:
        twice = Twice(world, lambda model, most=most: fn(model, most))
        facts = first_wrong(CHANGED, [("", twice)]) or first_wrong(NUMBERS, twice.steps())
        if not facts and world.measured:
            facts = twice.costs | {"least": bound(most, twice.costs["before"], world, twice.plain.config)}
        found.append(facts)
        if "mistake" in facts or facts.get("held", 0) > most:
            break
    return found


def judge(fn: Function) -> Judged:
    tries = zip(MOST, steps(fn, *MOST, dropout=True), strict=True)
    return Judged.of({f"{most:.2f}": max(100 * (1 - each.again) / (1 - each.least), 0) for most, each in tries})


def measured(fn: Function, most: float) -> Tried:
    """Return what a step holds and recomputes under one limit, measured as the judge does, without dropout."""
    return steps(fn, most)[0]


def steps(fn: Function, *limits: float, dropout: bool = False) -> list[Tried]:
    """Return what a step holds and recomputes under each limit; raise Wrong for an answer that scores nothing.

    dropout: whether a model with dropout is trained, too, which is not measured.
    """
    model = partial(Draw(chance().initial_seed()).world, Model, 1, depth=8)
    scored = model(sequences=4, tokens=64, measured=True, dtype=F32)
    cases = {str(most): (scored, most) for most in limits}
    if dropout:
        cases["with dropout"] = model(dropout=True, frozen=True, waiting=2), MOST[2]
    (found,), tries = job(on_a_rank, fn, [*cases.values()], ranks=1, record=None), []
    for (called, (world, most)), each in zip(cases.items(), found, strict=False):
        if "mistake" in each:
            raise Wrong(f"{called}: {each['mistake']}: {each['sentence']}")
        if world.measured and each["held"] > most:
            raise Wrong(
                f"the step holds {each['held']:.3f} × the bytes that it held before, and {most} × is the limit",
                "At which moment?",
            )
        if world.measured:
            tries.append(Tried(each["held"], each["again"], each["least"]))
    return tries


least_again = Challenge(
    "least_again",
    "07",
    "The least computed again",
    "Change a GPT of eight layers so that its step holds at most 0.56, 0.46, 0.40, 0.34 and 0.28 × what it held, and "
    "so that as few multiplications as possible are made again. Numbers stay what they were, with dropout, too.",
    judge,
    floor=19.2,
    course=56.8,
    possible=86.6,
    measured=measured,
)
