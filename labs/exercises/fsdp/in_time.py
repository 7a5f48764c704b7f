"""The challenge of notebook 06: choose when each layer is gathered and how long it is held, so that a rank waits least.

A step is a list of instructions, in the order in which a rank issues them.  A forward or a backward takes its time, and
waits for its layer.  A gather starts a message and returns at once; each backward starts a reduce-scatter.  The network
carries one message at a time, which takes latency + bytes / bandwidth.  A rank holds a layer from its gather to its
drop, and a gradient from its backward until it is reduced (`measured`).

The bound is the larger of two times.  All layers are computed between the first gather and the last reduce-scatter.
The network carries a gather and a reduce-scatter of each layer; and the layers that do not fit beside the last layer's
gradient, when forward turns to backward, are gathered once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.group import all_gather, start_reduce_scatter

RANKS = 2
Program = Sequence[tuple[str, int]]


class LayerCosts(NamedTuple):
    """A step of a model: for each layer, from the first on, its bytes and the seconds of its forward and backward."""

    nbytes: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    budget: int  # bytes
    latency: float  # s
    bandwidth: float  # bytes/s


def step(kilobytes: Sequence[int], milliseconds: Sequence[float], budget: int, latency: float) -> LayerCosts:
    """Return a step whose backward takes twice its forward, on a network of 8 MB/s.

    milliseconds: the time of each layer's forward.
    """
    forward = tuple(each / 1e3 for each in milliseconds)
    nbytes, backward = tuple(1000 * k for k in kilobytes), tuple(2 * each for each in forward)
    return LayerCosts(nbytes, forward, backward, 1000 * budget, latency, 8e6)


STEPS = {
    "even": step([16] * 10, [2] * 10, 80, 3e-4),
    "ups and downs": step([32, 4] * 5, [1, 4] * 5, 120, 1e-3),
    "a hill": step([8, 16, 32, 64, 64, 32, 16, 8], [2] * 8, 180, 1e-3),
    "a tower": step([8, 8, 16, 16, 32, 32, 64, 64], [8, 4, 4, 4, 2, 2, 2, 1], 208, 1e-3),
    "a funnel": step([64, 64, 32, 32, 16, 16, 8, 8], [2, 2, 3, 3, 4, 4, 5, 5], 170, 1e-3),
}


def measured(program: Program, given: LayerCosts) -> tuple[float, int]:
    """Return the seconds from the first instruction to the last reduce-scatter, and the most bytes held at once.

    Raise ValueError for a list of instructions that cannot be obeyed.
    """
    given = LayerCosts(*given)
    layers = range(len(given.nbytes))
    moment, wire, here, held, computed = 0.0, 0.0, {}, [], []
    for what, layer in program:
        if layer not in layers or (what == "gather") == (layer in here):
            if layer not in layers:
                why = "there is no such layer"
            else:
                why = f"layer {layer} is {'gathered already' if layer in here else 'not gathered'}"
            raise ValueError(f"({what!r}, {layer!r}): {why}")
        nbytes, message = given.nbytes[layer], given.latency + given.nbytes[layer] / given.bandwidth
        if what == "gather":
            here[layer] = wire = max(wire, moment) + message
            held.append((moment, nbytes))
        elif what == "drop":
            held.append((max(moment, here.pop(layer)), -nbytes))
        else:
            computed.append((what, layer))
            begin = max(moment, here[layer])
            moment = begin + (given.forward if what == "forward" else given.backward)[layer]
            if what == "backward":
                wire = max(wire, moment) + message
                held += [(begin, nbytes), (wire, -nbytes)]
    expected = [("forward", layer) for layer in layers] + [("backward", layer) for layer in reversed(layers)]
    if computed != expected or here:
        raise ValueError("the list needs each forward in order, then each backward, and a drop for each gather")
    return wire, max(sum(nbytes for at, nbytes in held if at <= now) for now, _ in held)


def bound(given: LayerCosts) -> float:
    """Return the least seconds that a step within the budget of memory can take."""
    message = given.latency + given.nbytes[0] / given.bandwidth
    again = max(sum(given.nbytes) + given.nbytes[-1] - given.budget, 0)
    sent = 2 * len(given.nbytes) * given.latency + (2 * sum(given.nbytes) + again) / given.bandwidth
    return max(message + sum(given.forward) + sum(given.backward) + message, sent)


def used(whole: Tensor, x: Tensor) -> Tensor:
    """Return the result of a layer."""
    return x + (whole * x).tanh().mean()


def obeyed(program: Program, shards: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Obey the list of instructions on real tensors; return this rank's shards of the gradients."""
    wholes, works, inputs, reduced, gradient = {}, {}, {}, {}, torch.ones_like(x)
    for what, layer in program:
        if what == "gather":
            wholes[layer] = torch.empty(RANKS * len(shards[layer]), dtype=x.dtype)
            works[layer] = all_gather(wholes[layer], shards[layer], async_op=True)
            continue
        works[layer].wait()
        if what == "drop":
            del wholes[layer]
        elif what == "forward":
            inputs[layer], x = x, used(wholes[layer], x)
        else:
            given = wholes[layer].requires_grad_(), inputs[layer].requires_grad_()
            whole, gradient = torch.autograd.grad(used(*given), given, gradient)
            reduced[layer] = start_reduce_scatter(whole, None)
    return [reduced[layer]() for layer in range(len(shards))]


def on_a_rank(fn: Function) -> list[Any]:
    generator, found = chance(), []
    for given in STEPS.values():
        program = fn(*(list(each) if isinstance(each, tuple) else each for each in given))
        if not isinstance(program, list) or not all(isinstance(each, tuple) and len(each) == 2 for each in program):
            raise ValueError(f"it returned {show(program)}: a list of instructions is needed, such as ('gather', 0)")
        measured(program, given)
        x, *shards = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((), *(nbytes // 8 // RANKS for nbytes in given.nbytes))
        )
        found.append((program, x, shards, obeyed(program, shards, x.clone())))
    return found


def judge(fn: Function) -> Judged:
    results, scores = job(on_a_rank, fn, ranks=RANKS), {}
    for number, (called, given) in enumerate(STEPS.items()):
        programs, inputs, shards, gradients = zip(*(found[number] for found in results), strict=True)
        if programs[0] != programs[1]:
            raise Wrong("the ranks do not have the same list", "What does your function know that differs there?")
        wholes = [torch.cat(each).requires_grad_() for each in zip(*shards, strict=True)]
        sum(reduce(lambda y, whole: used(whole, y), wholes, x) for x in inputs).backward()
        for whole, parts in zip(wholes, zip(*gradients, strict=True), strict=True):
            if not torch.allclose(torch.cat(parts), whole.grad, rtol=1e-12):
                raise Wrong(f"{called}: obeyed on two ranks, the gradients are not one process's")
        seconds, most = measured(programs[0], given)
        if most > given.budget:
            raise Wrong(f"{called}: {most:,} bytes are held at once, and the budget is {given.budget:,}", "When?")
        scores[called] = 100 * bound(given) / seconds
    return Judged.of(scores)


in_time = Challenge(
    "in_time",
    "06",
    "Gathered in time, within a budget",
    "Say when each layer is gathered and dropped, in a step of five models on one wire: what is gathered late is "
    "waited for, and what is here early, or stays from forward to backward, takes of the bytes that may be held.",
    judge,
    floor=49.6,
    course=70.6,
    possible=83.1,
    cases=STEPS,
    measured=measured,
)
