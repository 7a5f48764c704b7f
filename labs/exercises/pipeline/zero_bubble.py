"""zero_bubble: a split backward, whose bubble is at most ZB-H1's, with no more micro-batches alive than 1F1B has."""

from collections.abc import Callable
from typing import Any

from labs import pp
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.pipeline._listed import Listed, ReturnedLists, checked
from labs.exercises.pipeline._orders import ALL_FIRST, BUBBLE, CROWD, sizes, too_long, too_many
from labs.exercises.pipeline._stages_run_by_lists import whole


def w_at_once(seen: ReturnedLists) -> str | None:
    """Return a sentence about the last rank, for whose I's all others wait, if each W comes directly after its I."""
    then = ", while the other ranks wait for its next I"
    on_the_last = seen.first(lambda rank, place, x: rank == seen.p - 1 and isinstance(x, pp.W), then)
    return None if seen.like("[^I]W") else on_the_last


def only_w_is_elsewhere(seen: ReturnedLists) -> bool:
    """Return whether the returned lists, without their W's, are 1F1B."""
    return whole(seen.lists) == [list(order) for order in pp.one_f_one_b(seen.p, seen.m)]


# fmt: off
ZERO_BUBBLE = Listed(
    sizes,
    bubble=lambda p, m: pp.simulate(pp.zb1p(p, m)).bubble,
    alive=lambda p, m: [min(m, p)] * p,
    mistakes=(
        Mistake("the backward is not split", "Of the two halves of a backward, for which one does another rank wait?",
                too_long(lambda seen: not seen.like("I"))),
        Mistake("all W at the end", "Until when is an activation held: until its I, or until its W?",
                too_many(lambda seen: not seen.like("W.*I")),
                symptom="no bubble, but memory that grows with the number of micro-batches"),
        ALL_FIRST,
        Mistake("W directly after its I", "Nobody waits for a W. Where does a rank wait that could do one?",
                lambda seen: seen.wait and (at := w_at_once(seen)) and f"{seen.wait.partition(':')[0]}: {at}",
                symptom="a split backward with the bubble of 1F1B"),
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
def zero_bubble(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(ranks, microbatches) -> lists` of F, I and W, with stage r on rank r; return the ✓ line.

    F, I and W take equally long.
    """
    return checked(ZERO_BUBBLE, fn, seed)
