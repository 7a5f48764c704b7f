"""all_gather: a ring, in place, after which every rank holds all pieces.

An all-gather cannot send less than N - 1 tensors in all.  A rank sends N - 1 messages, in at most 2 (N - 1) rounds.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labs.exercises.collectives._by_hand import (
    NOTHING,
    SAME_ROUND,
    TURNS,
    WHOLE,
    in_place,
    ring,
    sent_line,
    wide,
    worlds,
)
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory
from labs.exercises.engine.on_ranks import Exercise, Expected, Mistakes, checked
from labs.exercises.engine.value import One


def another_piece(one: One) -> str | None:
    """Return a sentence about the first piece that stands in another's place, or None."""
    pairs = list(enumerate(zip(one.world.pieces(one.received), one.world.pieces(one.expected), strict=True)))
    for place, (piece, _) in pairs:
        for other, (_, expected) in pairs:
            if other != place and piece.numel() and torch.equal(piece, expected[: len(piece)]):
                return f"Piece {other} stands in the place of piece {place}."
    return None


# fmt: off
ALL_GATHER = Exercise(
    worlds,
    Expected(lambda world: [world.gathered] * world.n),
    question="Which piece did you receive in the round before, and who lacks it now?",
    script=partial(in_place, brings="only_my_piece"),
    sends=ring(1),
    memory=Memory(wide, during=1),
    mistakes=Mistakes((
        NOTHING,
        Mistake("a piece is missing", "", lambda one: one.received.isnan().any() and "A piece never arrived there."),
        Mistake("a piece in another's place", "Whose piece has just arrived, and where does that one belong?",
                another_piece),
    ), sent=(WHOLE, TURNS)),
    questions=SAME_ROUND,
)
# fmt: on


@answered
def all_gather(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x, group=None)`: rank r has piece r of x; afterwards every rank has all pieces, in place."""
    return sent_line(checked(ALL_GATHER, (fn,), seed).recording, least=0.75)
