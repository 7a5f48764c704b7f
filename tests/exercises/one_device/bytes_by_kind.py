"""Answers to bytes_by_kind (01): what parameters, gradients and the optimizer take, with some parameters frozen."""

import math

import torch

from labs.exercises.one_device.bytes_by_kind import MISTAKES
from tests.answers import Exercise

# fmt: off
answers = Exercise("bytes_by_kind")
LINE = "right on all 16 examples"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def loop(parameters, mixed):
    held = {"P": 0, "G": 0, "S": 0}
    for shape, trained in parameters:
        n = math.prod(shape)
        held["P"] += n * (2 if mixed else 4)
        if trained:
            held["G"] += n * (2 if mixed else 4)
            held["S"] += 12 * n if mixed else 8 * n + 4
    return held


@answers.right(line=LINE, blind=True)
def bytes_sums(parameters, mixed):
    all_of_it = sum(math.prod(shape) for shape, _ in parameters)
    trained = [math.prod(shape) for shape, t in parameters if t]
    low = 4 - 2 * mixed
    return {"P": low * all_of_it, "G": low * sum(trained), "S": sum(12 * n if mixed else 4 + 8 * n for n in trained)}


@answers.right(line=LINE, blind=True)
def bytes_meta(parameters, mixed):
    dtype = torch.bfloat16 if mixed else torch.float32
    tensors = [(torch.empty(tuple(shape), dtype=dtype, device="meta"), trained) for shape, trained in parameters]
    held = {"P": sum(x.nbytes for x, _ in tensors), "G": sum(x.nbytes for x, trained in tensors if trained), "S": 0}
    for x, trained in tensors:
        if trained:
            state = [x.float(), x.float(), x.float() if mixed else torch.empty((), device="meta")]
            held["S"] += sum(kept.nbytes for kept in state)
    return held


# ---- wrong -----------------------------------------------------------------------------------------------

EACH, IF, COUNT, ALL = "for shape, trained in parameters:", "if trained:", "math.prod(shape)", "return held"
GRADIENT = 'held["G"] += n * (2 if mixed else 4)'

instead = answers.slips(loop)
instead("the steps are not counted", {"8 * n + 4": "8 * n"}, blind=True)
instead("a number of steps in mixed precision, where none is kept", {"12 * n": "12 * n + 4"}, blind=True)
instead("no masters", {"12 * n": "8 * n"}, blind=True)
instead("gradients in float32", {GRADIENT: 'held["G"] += 4 * n'}, blind=True)
instead("a gradient, though it is frozen", {f"{IF}\n            {GRADIENT}": f"{GRADIENT}\n        {IF}"},
    blind=True)
instead("the parameters that are frozen are left out",
    {EACH: f"{EACH}\n        if not trained:\n            continue"}, blind=True)
instead("no number in a tensor without dims", {COUNT: f"{COUNT} if shape else 0"}, blind=True)
instead("nothing is returned", {ALL: "pass"})
instead("", {"8 * n + 4": "8 * n", ALL: 'held["S"] += 0 if mixed else 4\n    return held'}, blind=True)

answers.instead(MISTAKES)
