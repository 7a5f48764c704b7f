"""Answers to save_interval (11b): seconds between two saves of a job with a time limit."""

from math import ceil, floor, sqrt

from labs.exercises.clusters.save_interval import MISTAKES
from tests.answers import Exercise, from_notebook

answers = Exercise("save_interval")
answers.right(from_notebook("save_interval"), line="right on all 7 examples")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def from_youngs_number(limit, saving, rate):
    near = limit * sqrt(rate / 3600 / (2 * saving))
    below, above = max(1, floor(near)), max(1, ceil(near))
    # The loss is n·a + b / n, so n + 1 is better than n where near² > n (n + 1).
    return limit / (above if near**2 > below * above else below) - saving


# ---- wrong -----------------------------------------------------------------------------------------------


answers.instead(MISTAKES)


@answers.wrong()
def at_most_99_saves(limit, saving, rate):
    numbers = [n for n in range(1, 100) if n * saving < limit]
    best = min(numbers, key=lambda n: n * saving + rate * limit / 3600 * (limit / n - saving) / 2)
    return limit / best - saving
