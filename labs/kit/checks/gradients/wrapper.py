"""data_parallel: any wrapper, through several steps of training, with and without accumulation."""

from collections.abc import Callable
from functools import partial
from typing import Any

from labs.kit.checks.acts import Play, as_a_whole, checked
from labs.kit.checks.answer import Mistake, Wrong, answered, first
from labs.kit.checks.gradients.trained import Training, odd, train_wrapped
from labs.kit.checks.gradients.wrong_gradients import (
    KIND,
    NOT_IN_PLACE,
    QUESTION,
    WRAPPED,
    bytes_held,
    each_gradient,
    line,
    tables,
)  # fmt: skip
from labs.kit.checks.ranks import BF16, F32, Draw
from labs.kit.checks.scripts import Seen


def worlds(draw: Draw) -> dict[int, list[Training]]:
    case = partial(odd, draw)
    return {
        3: [case(3, steps=3), case(3, micro_batches=3, steps=2)],
        2: [case(2, micro_batches=2, steps=3), case(2, steps=2, dtype=F32, evaluating=True)],
        4: [
            case(4, micro_batches=2, steps=2),
            case(4, steps=2, mixed=True),
            case(4, dtype=BF16),
            draw.world(Training, 4, dtype=F32, steps=3),
        ],
        1: [case(1, steps=2)],
        0: [case(steps=2)],
    }


def still_unequal(seen: Seen) -> str | None:
    values = [done.facts["after"] for done in seen.done]
    apart = ((name, r) for name, x in values[0].items() for r, other in enumerate(values) if (x != other[name]).any())
    return first(f"{name!r} still differs between rank 0 and rank {r}, and nobody was told" for name, r in apart)


# fmt: off
REPLICAS = (
    Mistake("a replica that started from another seed",
            "Equal gradients keep equal replicas equal. Who makes sure that they start equal?", still_unequal,
            shows="wrong from step 0, though each rank by itself looks fine"),
)
# fmt: on
PLAY = Play(worlds, train_wrapped, tables(NOT_IN_PLACE, exact=False), QUESTION)
# Where replicas start unequal, or a parameter is used by nobody, an error is a right answer; so are equal replicas,
# and no gradient.  Zeros are not, nor is a hang.
UNEQUAL, UNUSED = (
    Play(lambda draw, world=world: {0: [odd(draw, **world)]}, train_wrapped, tables, QUESTION)
    for world, tables in (
        ({"ranks": 3, "equal": False}, ((as_a_whole, WRAPPED), (as_a_whole, REPLICAS))),
        ({"ranks": 2, "steps": 2, "spare": True}, ((each_gradient, KIND),)),
    )
)


@answered
def data_parallel(wrap: Callable[..., Any], seed: int) -> str:
    """`wrap(model)` -> a module with `forward`, `no_sync()` and `sync()`; sync may be missing if backward waits.

    Trained for several steps, with and without accumulation; replicas that start unequal must be refused or made equal.
    """
    said = line(checked(PLAY, (wrap,), seed))
    for play in (UNEQUAL, UNUSED):
        try:
            checked(play, (wrap,), seed)
        except Wrong as wrong:
            if not wrong.raised:
                raise
    bytes_held(train_wrapped, wrap, seed)
    return said.format(" and step")
