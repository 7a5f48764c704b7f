"""reduce_scatter: a ring, in place, after which rank r holds the sum of piece r.

A reduce-scatter cannot send less than N - 1 tensors in all (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations").  A rank sends N - 1 messages, in at most 2 (N - 1) rounds.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from labs.exercises.collectives._by_hand import SAME_ROUND, TURNS, WHOLE, InPlace, ring, sent_line, wide, worlds
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory
from labs.exercises.engine.on_ranks import Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look
from labs.exercises.engine.value import One, as_if


def with_its_piece(world: InPlace, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play one call: yield before it, and then a look at the returned piece and the tensor."""
    x = world.own(world.index())
    yield None
    returned = fn(x, **world.process_group())
    yield Look({"": returned}, {"x": x})


def whole_sum_elsewhere(one: One) -> str | None:
    """Return a sentence if a piece of the tensor that is not this rank's holds a whole sum; else None."""
    pieces = zip(one.world.pieces(one.done.facts["x"]), one.world.pieces(one.world.total), strict=True)
    for place, (piece, expected) in enumerate(pieces):
        if place != one.index and piece.numel() and expected.any() and one.near(piece, expected, 1e-5):
            return f"In the tensor of rank {one.rank}, piece {place} is a whole sum."
    return None


def rotated(world: InPlace) -> Iterator[list[Tensor]]:
    """Return an iterator over the ways in which every rank has the sum of another rank's piece."""
    pieces = world.pieces(world.total)
    return ([*pieces[shift:], *pieces[:shift]] for shift in range(1, world.n))


# fmt: off
REDUCE_SCATTER = Exercise(
    worlds,
    Expected(
        lambda world: world.pieces(world.total),
        summands=lambda world, index: [world.pieces(x)[index] for x in world.xs],
    ),
    question="Which one piece does the neighbour need from you in this round?",
    script=with_its_piece,
    sends=ring(1),
    memory=Memory(wide, during=1, after=0.25),
    mistakes=Mistakes((
        Mistake("the pieces are rotated",
                "A partial sum sets out from rank r and takes N - 1 steps. Where does it end?",
                lambda one: as_if(rotated)(one) or whole_sum_elsewhere(one),
                symptom="every number is right, but in another's place"),
    ), form=(
        Mistake("the whole tensor instead of a piece", "How does tensor_split cut this many elements into N pieces?",
                lambda one: isinstance(one.received, Tensor)
                and one.expected.numel() != one.received.numel() == one.world.total.numel()
                    and f"returned {one.description}"),
    ), after=(
        Mistake("not in place", "Where would an all_gather go on from?",
                lambda one: not one.near(one.world.pieces(one.done.facts["x"])[one.index], one.expected, 1e-5)
                and "returned what is right, but its piece of the tensor is not"),
    ), sent=(WHOLE, TURNS)),
    questions=SAME_ROUND | {"another shape": "How does tensor_split cut this many elements into N pieces?"},
)
# fmt: on


@answered
def reduce_scatter(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x, group=None) -> piece`: on rank r, piece r of x becomes the sum over all ranks, and is returned."""
    return sent_line(checked(REDUCE_SCATTER, (fn,), seed).recording, least=0.75)
