"""all_reduce: two rings, in place, after which every rank holds the sum.

An all-reduce cannot send less than 2 (N - 1) tensors in all.  A rank sends 2 (N - 1) messages, in at most 4 (N - 1)
rounds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from labs.exercises.collectives._by_hand import (
    NOTHING,
    SAME_ROUND,
    TURNS,
    WHOLE,
    InPlace,
    in_place,
    ring,
    sent_line,
    too_many_rounds,
    wide,
    worlds,
)
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory, Sent
from labs.exercises.engine.on_ranks import Exercise, Expected, Mistakes, checked
from labs.exercises.engine.value import One


def own_piece_only(one: One) -> str | bool:
    """Return a sentence if a rank's result is right in the rank's own piece only; else False."""
    found, expected = (one.world.pieces(x)[one.index] for x in (one.received, one.expected))
    rounded = one.near(one.received, one.expected, 2e-2)
    return one.near(found, expected, 1e-5) and not rounded and f"Piece {one.index}, its own, is right."


def other_bits(sent: Sent) -> str | bool:
    """Return a sentence if the sums differ between ranks in their bits; else False."""
    first, *others = (done.values[""] for done in sent.seen.done)
    return not all(torch.equal(first, x) for x in others) and "the sums differ between ranks in their last bits"


# fmt: off
ALL_REDUCE = Exercise(
    worlds,
    Expected(lambda world: [world.total] * world.n, summands=lambda world, index: world.xs, pieces=InPlace.pieces),
    question="What if each rank first became responsible for the sum of one piece only?",
    script=in_place,
    sends=ring(2),
    memory=Memory(wide, during=1),
    mistakes=Mistakes((
        NOTHING,
        Mistake("pieces that nobody gathered", "Who knows the sum of the other pieces?", own_piece_only),
    ), sent=(
        WHOLE,
        replace(TURNS, matches=too_many_rounds(lambda n: 4 * (n - 1))),
        Mistake("not the same bits on every rank", "Does every rank add up in the same order?", other_bits),
    )),
    questions=SAME_ROUND,
)
# fmt: on


@answered
def all_reduce(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x, group=None)`: every rank's x becomes the sum over all ranks, in place."""
    return sent_line(checked(ALL_REDUCE, (fn,), seed).recording, least=1.5)
