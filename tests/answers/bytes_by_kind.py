"""Answers to bytes_by_kind (01): what parameters, gradients and the optimizer take, with some parameters frozen."""

import functools
import math
import operator

import numpy as np
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


@answers.right(blind=True)
def bytes_size(parameters, mixed):
    per = {"P": 2, "G": 2, "S": 12} if mixed else {"P": 4, "G": 4, "S": 8}
    sizes = [(torch.Size(shape).numel(), trained) for shape, trained in parameters]
    counts = {kind: sum(n for n, trained in sizes if trained or kind == "P") for kind in per}
    held = {kind: per[kind] * counts[kind] for kind in per}
    if not mixed:
        held["S"] += 4 * sum(1 for _, trained in sizes if trained)
    return held


@answers.right(blind=True)
def bytes_reduce(parameters, mixed):
    def of(shape, trained):
        n = functools.reduce(operator.mul, shape, 1)
        one = 2 * n if mixed else 4 * n
        return one, one * bool(trained), (12 * n if mixed else 2 * 4 * n + 4) if trained else 0

    rows = [of(*parameter) for parameter in parameters] + [(0, 0, 0)]
    return dict(zip("PGS", map(sum, zip(*rows, strict=True)), strict=True))


@answers.right(line=LINE)
def by_numpy(parameters, mixed):
    n = np.array([np.prod(shape, dtype=int) for shape, _ in parameters], dtype=int)
    trained = np.array([trained for _, trained in parameters], dtype=bool)
    width = 2 if mixed else 4
    remembered = 12 * n if mixed else 8 * n + 4
    return {"P": width * n.sum(), "G": width * n[trained].sum(), "S": remembered[trained].sum()}


@answers.right(line=LINE)
def by_optimizer(parameters, mixed):
    """By torch's own AdamW, of masters where there are some."""
    models = [torch.nn.Parameter(torch.zeros(shape), requires_grad=trained) for shape, trained in parameters]
    masters = [p for p in models if p.requires_grad]
    for p in masters:
        p.grad = torch.zeros_like(p)
    states = {}
    if masters:
        optimizer = torch.optim.AdamW(masters)
        optimizer.step()
        states = optimizer.state
    kept = sum(x.nbytes for state in states.values() for x in state.values())
    total = sum(p.nbytes for p in masters)
    if mixed:
        return {"P": sum(p.nbytes for p in models) / 2, "G": total / 2, "S": kept - 4 * len(masters) + total}
    return {"P": sum(p.nbytes for p in models), "G": total, "S": kept}


# ---- wrong -----------------------------------------------------------------------------------------------

EACH, IF, COUNT, ALL = "for shape, trained in parameters:", "if trained:", "math.prod(shape)", "return held"
WEIGHTS = 'held["P"] += n * (2 if mixed else 4)'
GRADIENT = 'held["G"] += n * (2 if mixed else 4)'
STATE = "12 * n if mixed else 8 * n + 4"

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
instead("a different kind of answer", {ALL: "return sum(held.values())"})
instead("a different kind of answer", {ALL: "return list(held.values())"})
instead("nothing is returned", {ALL: "pass"})
instead("", {"8 * n + 4": "8 * n", ALL: 'held["S"] += 0 if mixed else 4\n    return held'}, blind=True)
instead("", {ALL: 'held["S"] += 0 if mixed else 4 * sum(not t for _, t in parameters)\n    return held'}, blind=True)
instead("", {COUNT: "math.prod(tuple(shape)[:2])"}, blind=True)
instead("", {WEIGHTS: 'held["P"] += n * (2 if mixed and trained else 4)'}, blind=True)
instead("", {"8 * n + 4": "8 * n + 8"}, blind=True)
instead("", {WEIGHTS: 'held["P"] += 4 * n', IF: "if True:", GRADIENT: 'held["G"] += 4 * n', STATE: "8 * n"})
instead("", {IF: "if all(trained for _, trained in parameters):"})
instead("", {ALL: "parameters[:] = [each for each in parameters if each[1]]\n    return held"})

answers.instead(MISTAKES)
