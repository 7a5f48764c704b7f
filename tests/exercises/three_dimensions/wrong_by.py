"""Answers to wrong_by (11): three losses, and by which factor each is wrong."""

from math import prod

from labs.exercises.three_dimensions.wrong_by import MISTAKES
from tests.answers import Exercise

answers = Exercise("wrong_by")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line="right on all 6 examples")
def by_names(sizes, microbatches):
    pp, replicate, shard, tp = sizes
    assert pp * replicate * shard * tp == prod(sizes)
    return {"A": microbatches, "B": 1 / (replicate * shard), "C": 1 / pp}


@answers.right
def by_counting(sizes, microbatches):
    ranks = prod(sizes)
    last = ranks // sizes[0]  # ranks that have a loss
    parts = prod(sizes[1:3])
    return dict(zip("ABC", (sum([1] * microbatches), parts**-1, last / ranks), strict=True))


# ---- wrong -----------------------------------------------------------------------------------------------

instead = answers.slips(by_names)
A, B, C = '"A": microbatches', '"B": 1 / (replicate * shard)', '"C": 1 / pp'
instead("A: another factor", A, '"A": microbatches / pp')
instead("B: another factor", B, '"B": 1 / (shard * tp)')
instead("C: another factor", C, '"C": 1 / (pp * tp)')
instead("not three factors, A, B and C", f"{C}", "")

answers.instead(MISTAKES)
