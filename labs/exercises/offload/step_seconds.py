"""step_seconds: the time of an optimizer step whose state is fetched from another tier and stored there.

The check asks about steps with no, one and several parameters.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Seconds = Sequence[float]


@answered
def step_seconds(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(fetch, update, store) -> seconds`; return the ✓ line.

    fetch, update, store: lists with the seconds that each parameter takes.
    """
    draw = random.Random(seed)
    steps = [
        ([1, 1, 1], [2, 2, 2], [1, 1, 1]),
        ([3, 3, 3, 3], [1, 1, 1, 1], [2, 2, 2, 2]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [5, 5, 5, 5]),
        ([5, 1, 0, 7, 2], [2, 9, 1, 1, 3], [1, 0, 6, 1, 4]),
        ([2], [3], [4]),
        ([], [], []),
        ([0, 0, 0], [1, 2, 3], [0, 0, 0]),
        ([1, 2, 3], [0, 0, 0], [3, 2, 1]),
        ([1, 9], [9, 1], [1, 1]),
        *(draw_step(draw) for _ in range(6)),
    ]
    sheets = [Sheet(step, slots(*step), "fetch {}, update {}, store {} s".format(*step)) for step in steps]
    return on_paper(fn, sheets, MISTAKES, "What does the thread have to do while parameter n is updated?")


def draw_step(draw: random.Random) -> tuple[list[float], ...]:
    count = draw.randint(3, 7)
    return tuple([draw.randint(0, 36) / 4 for _ in range(count)] for _ in range(3))


def slots(
    fetch: Seconds,
    update: Seconds,
    store: Seconds,
    slot: Callable[..., float] = lambda update, coming, going: max(update, coming + going),
    first: bool = True,
    last: bool = True,
    before_the_first: int = 0,
) -> float:
    """Return the seconds of an offloaded step: a first fetch, a slot for each update, and a last store.

    During a slot, the thread stores the previous parameter's state and fetches the next one's.

    slot: the seconds of a slot, from those of update n, fetch n + 1 and store n - 1
    first, last: whether the first fetch and the last store are counted
    before_the_first: whether a store is counted in the first slot
    """
    if not update:
        return 0
    coming, going = [*fetch[1:], 0], [before_the_first and store[-1], *store[:-1]]
    return first * fetch[0] + sum(map(slot, update, coming, going)) + last * store[-1]


# fmt: off
MISTAKES = (
    Mistake("one after the other", "Who works while the caller updates?",
            as_if(lambda fetch, update, store: sum(fetch) + sum(update) + sum(store)),
            symptom="a step that is said to take the sum of everything, though it overlaps"),
    Mistake("all of it at the same time", "Can the first update begin before the first fetch has ended?",
            as_if(lambda fetch, update, store: max(sum(update), sum(fetch) + sum(store))),
            symptom="a step that is said to take the longer of the two sums, which it never reaches"),
    Mistake("the first fetch is left out", "What happens before the first update?", as_if(slots, first=False)),
    Mistake("the last store is left out", "When is the step over?", as_if(slots, last=False)),
    Mistake("two threads, and not one", "How many things can one thread do at the same time?",
            as_if(slots, slot=lambda update, coming, going: max(update, coming, going))),
    Mistake("the caller stores, and not the thread", "Who stores, and what does the caller do meanwhile?",
            as_if(lambda *step: slots(*step[:2], [0] * len(step[2])) + sum(step[2]))),
    Mistake("a store before the first update", "What is store[n - 1] in Python when n is 0?",
            as_if(slots, before_the_first=1), symptom="almost right: store[-1] is the last one, and not nothing"),
)
# fmt: on

step_seconds.expected = slots  # the notebook goes on with this function, if the learner's is not right yet
