"""broadcast: a tree, in place, from any root.

A broadcast needs N - 1 messages in all, of which a rank sends at most ceil(log2 N), and ceil(log2 N) rounds: the number
of ranks with the tensor at most doubles in each.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, inf, log2
from typing import Any

from labs.exercises.collectives._by_hand import (
    BUDGET_STEP,
    NOTHING,
    SAME_ROUND,
    InPlace,
    count_rounds,
    in_place,
    too_many_rounds,
    wide,
    worlds,
)
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory, Sends
from labs.exercises.engine.on_ranks import F32, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.value import as_if


def tree(n: int) -> int:
    """Return the number of rounds that a broadcast to n ranks needs."""
    return ceil(log2(n))


def by_tree(world: InPlace) -> Sends:
    total = (world.n - 1) * world.nbytes
    return Sends(total, lambda rank: inf, lambda rank: tree(world.n), ("send", "recv"), most=total)


# fmt: off
BROADCAST = Exercise(
    partial(worlds, rooted=True),
    Expected(lambda world: [world.tensor(world.root)] * world.n),
    question="After one round two ranks know the tensor. How many could know it after the next one?",
    script=partial(in_place, brings="own_or_infinity"),
    sends=by_tree,
    memory=Memory(wide, during=1),
    mistakes=Mistakes((
        NOTHING,
        Mistake("what was there before leaves a trace", "What is 0 × infinity, and who may need a rank's old numbers?",
                lambda one: one.world.dtype is F32 and not one.received.isfinite().all()),
        Mistake("", "", as_if(lambda world: ([world.tensor(other)] * world.n for other in world.members))),
    ), sent=(
        Mistake("the root sends to all", "", lambda sent: too_many_rounds(tree)(sent)
                if sum(event.rank == sent.world.root for event in sent.seen.messages) == sent.world.n - 1 else None),
        Mistake("too many rounds", "", too_many_rounds(tree)),
    )),
    questions=SAME_ROUND | {
        "right only when the number of ranks is a power of two":
            "In the last round on three ranks, whom does each rank tell? Is there a rank with that number?",
    },
)
# fmt: on


@answered
def broadcast(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x, root=0, group=None)`: every rank's x becomes that of global rank `root`, in place, by a tree."""
    events = checked(BROADCAST, (fn,), seed).recording.events
    rounds = count_rounds([event for event in events if event.step == BUDGET_STEP])
    return f"{rounds} rounds on 4 ranks; the least possible is {tree(4)}"
