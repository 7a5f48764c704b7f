"""mean_on_rank_0: rank 0 computes the mean of all ranks' x, a new tensor, from one message of each other rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory, Sends, alone, made_of
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw, Exercise, Expected, Given, Mistakes, checked

LARGE = 1 << 16
ENOUGH = 2  # × x, beside x itself: the sum, and room for a message


def worlds(draw: Draw) -> dict[int, list[Given]]:
    odd, many = draw.random.randrange(5, 12), draw.random.choice((5, 6, 7, 8))
    others = {3: "right only on four ranks", 2: "right only on more than two ranks", 1: "right only on several ranks"}
    return {
        4: [
            draw.given(4, (odd,)),
            draw.given(4, (4096,), dtype=F32),
            *(draw.given(4, (odd,), "right only in the first call") for _ in range(3)),
            *(draw.given(4, shape, "right only in one dimension") for shape in ((), (1,), (3, odd), (2, 3, 2))),
            draw.given(4, (0,), "right only where there are elements"),
            *(draw.given(4, (odd,), "right only in some dtypes", dtype=dtype) for dtype in (F32, BF16)),
            draw.given(4, (LARGE,), "right only for small tensors", dtype=F32, traced=True),
        ],
        **{ranks: [draw.given(ranks, (odd,), only), draw.given(ranks, (), only)] for ranks, only in others.items()},
        many: [draw.given(many, (odd,), "right only on up to four ranks")],
    }


def mean(world: Given) -> Tensor:
    return torch.stack([x.double() for x in world.xs]).mean(0).to(world.dtype)


def on_rank_0(value: Tensor, world: Given) -> list[Tensor | None]:
    return [value] + [None] * (world.n - 1)


# fmt: off
EXERCISE = Exercise(
    worlds,
    Expected(
        lambda world: on_rank_0(mean(world), world),
        summands=lambda world, i: [x / world.n for x in world.xs] if i == 0 else [],
        tolerance={F64: 1e-12, F32: 1e-5, BF16: 1e-2},
    ),
    question="Which numbers went into this one, and how often?",
    sends=lambda world: Sends(
        least=world.nbytes * (world.n - 1), enough=lambda rank: world.nbytes * (rank > 0),
        messages=lambda rank: rank > 0, ops=("send", "recv"),
    ),
    # Enough for a list of all messages, a stack of them, and the mean, because it is a first exercise.
    memory=Memory(lambda draw: draw.given(4, (LARGE,), dtype=F32), during=9, after=1),
    mistakes=Mistakes((
        Mistake("rank 0 hears nobody", "Which line brings the others' numbers to rank 0?", made_of(alone),
                symptom="one rank's own loss in the log, taken for the mean"),
        Mistake("rank 0 is left out", "Which numbers are on rank 0 from the start?",
                made_of(lambda times, _: abs(times[0]) < 1e-3 and bool((times[1:].abs() > 1e-3).all()))),
        Mistake("only one of the other ranks counts", "Who sent each message, and what becomes of the one before it?",
                made_of(lambda times, _: len(times) > 2 and (times[1:].abs() > 1e-3).sum() == 1)),
    ), form=(
    ), after=(
        Mistake("not a new tensor", "Who else writes into this memory, in the next step?",
                lambda one: one.done.facts["shared"] and "returned x itself"),
    )),
    questions={
        "summed instead of averaged": "By what do you divide the sum?",
        "something is returned where nothing is due": "What do the other ranks know about the mean?",
        "another shape": "What is the shape of x, and what is that of the mean of several x?",
    },
)
# fmt: on


@answered
def mean_on_rank_0(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x)`: on rank 0 it returns the mean of all ranks' x, a new tensor, elsewhere None; x stays as it is."""
    most = checked(EXERCISE, (fn,), seed).most
    return (
        "3 messages on 4 ranks; the least possible is 3. "
        f"It held {most:.2f} × the tensor besides its own; {ENOUGH:.2f} × is enough"
    )
