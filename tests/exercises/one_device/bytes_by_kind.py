"""Answers to bytes_by_kind (01): what parameters, gradients and the optimizer take, with some parameters frozen."""

import math

from labs.exercises.one_device.bytes_by_kind import MISTAKES
from tests.answers import Exercise

# fmt: off
answers = Exercise("bytes_by_kind")
LINE = "right on all 16 examples"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def loop(parameters, mixed):
    held = {"P": 0, "G": 0, "S": 0}
    for shape, trained in parameters:
        n = math.prod(shape)
        held["P"] += n * (2 if mixed else 4)
        if trained:
            held["G"] += n * (2 if mixed else 4)
            held["S"] += 12 * n if mixed else 8 * n + 4
    return held


@answers.right(line=LINE)
def bytes_sums(parameters, mixed):
    all_of_it = sum(math.prod(shape) for shape, _ in parameters)
    trained = [math.prod(shape) for shape, t in parameters if t]
    low = 4 - 2 * mixed
    return {"P": low * all_of_it, "G": low * sum(trained), "S": sum(12 * n if mixed else 4 + 8 * n for n in trained)}


# ---- wrong -----------------------------------------------------------------------------------------------


answers.instead(MISTAKES)
