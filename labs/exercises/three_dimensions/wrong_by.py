"""wrong_by: three losses that are scaled wrongly, each by a factor that the learner names."""

import random
from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import AsIf, Sheet, answer_is, on_paper, part_as_if, part_is
from labs.parallel import AXES

SIZES = ((2, 1, 4, 3), (3, 2, 5, 2), (4, 3, 1, 8), (1, 1, 7, 1), (5, 1, 1, 2), (16, 2, 64, 8))


@answered
def wrong_by(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(sizes, microbatches) -> {"A": factor, "B": factor, "C": factor}`; return the ✓ line.

    A factor is the loss as a multiple of the right one.

    A: the means of the micro-batches are added up
    B: each rank's sum is divided by the tokens of the whole batch, and these are averaged over the data-parallel ranks
    C: the last stage's loss, and 0 from the other stages, are added up over all ranks and divided by their number
    """
    draw = random.Random(seed)
    jobs = [(sizes, sizes[0] * draw.randrange(2, 9) + 11) for sizes in SIZES]
    words = "{}, {} micro-batches"
    sheets = [
        Sheet((sizes, m), factors(*sizes, m), words.format(" × ".join(map("{} {}".format, AXES, sizes)), m))
        for sizes, m in jobs
    ]
    return on_paper(fn, sheets, MISTAKES, "How many were added up, and by how many was the sum divided?")


def factors(pp: int, replicate: int, shard: int, tp: int, m: int) -> dict[str, float]:
    return {"A": m, "B": 1 / (replicate * shard), "C": 1 / pp}


def instead(name: str, *others: Callable[..., float]) -> AsIf:
    """Return a row's test: whether the factor of this loss is one that these functions compute."""
    return part_as_if(name, *(lambda sizes, m, other=other: other(*sizes, m) for other in others))


# fmt: off
A = "Of m micro-batches each mean is about as large as the mean of all. What is their sum?"
B = "Added up, the ranks' parts would be the mean of the whole batch. What does the mean of them make of it?"
C = "How many of the ranks bring the loss, and how many are counted?"
MISTAKES = (
    Mistake("not three factors, A, B and C", "Which are the keys of the answer?",
            answer_is(lambda found, expected: isinstance(found, dict) and found.keys() != expected.keys())),
    Mistake("A: the other way round", A, instead("A", lambda pp, r, s, tp, m: 1 / m)),
    Mistake("A: nothing is wrong", A, instead("A", lambda *_: 1)),
    Mistake("B: the other way round", B, instead("B", lambda pp, r, s, tp, m: r * s)),
    Mistake("B: one of the data's axes only", "Along which axes do ranks read different sequences?",
            instead("B", lambda pp, r, s, tp, m: 1 / s, lambda pp, r, s, tp, m: 1 / r)),
    Mistake("B: nothing is wrong", B, instead("B", lambda *_: 1)),
    Mistake("C: the other way round", C, instead("C", lambda pp, r, s, tp, m: pp)),
    Mistake("C: nothing is wrong", C, instead("C", lambda *_: 1)),
    *(Mistake(f"{name}: another factor", question, part_is(name))
      for name, question in {"A": A, "B": B, "C": C}.items()),
)
