"""The challenge of notebook 03: choose which gradients share a bucket, and in which order, for an early next step.

Backward goes from the last layer to the first, the next forward from the first to the last, and a layer's forward needs
its averaged gradients.  The network carries one all-reduce at a time, which takes latency + bytes / bandwidth
(`step_seconds`).

The bound: all layers are computed one after another; and all gradients are sent between the backward of the last layer
and its next forward, in at least one message.  No step takes less than either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import mark

RANKS = 2
Buckets = Sequence[Sequence[int]]


class GradientCosts(NamedTuple):
    """A step of a model: for each layer, from the first on, the bytes of its gradient and the seconds it computes."""

    nbytes: tuple[int, ...]
    backward: tuple[float, ...]
    forward: tuple[float, ...]
    latency: float  # s
    bandwidth: float  # bytes/s


def step(kilobytes: Sequence[int], milliseconds: Sequence[float], latency: float) -> GradientCosts:
    """Return a step whose backward takes twice its forward, on a network of 8 MB/s.

    milliseconds: the time of each layer's forward.
    """
    forward = tuple(each / 1e3 for each in milliseconds)
    return GradientCosts(tuple(1000 * k for k in kilobytes), tuple(2 * each for each in forward), forward, latency, 8e6)


STEPS = {
    "even": step([20] * 12, [1] * 12, 3e-4),
    "large ends": step([96, *[12] * 10, 96], [1, *[1] * 10, 3], 5e-4),
    "a far wire": step([8] * 16, [1] * 16, 3e-3),
    "a pyramid": step([8, 16, 16, 32, 32, 64, 64, 128, 128, 256], [8, 4, 4, 4, 2, 2, 2, 1, 1, 1], 2e-3),
    "ups and downs": step([64, 4] * 5, [1, 4] * 5, 1e-3),
}


def step_seconds(buckets: Buckets, given: GradientCosts) -> float:
    """Return the seconds from the first backward to the end of the next forward."""
    given, moment, ready = GradientCosts(*given), 0.0, {}
    for layer in reversed(range(len(given.nbytes))):
        ready[layer] = moment = moment + given.backward[layer]
    wire, arrived = 0.0, {}
    for bucket in buckets:
        wire = max(wire, *(ready[layer] for layer in bucket))
        wire += given.latency + sum(given.nbytes[layer] for layer in bucket) / given.bandwidth
        arrived |= dict.fromkeys(bucket, wire)
    for layer, forward in enumerate(given.forward):
        moment = max(moment, arrived[layer]) + forward
    return moment


def bound(given: GradientCosts) -> float:
    """Return the least seconds that a step can take, with any buckets."""
    computed = sum(given.backward) + sum(given.forward)
    sent = given.latency + sum(given.nbytes) / given.bandwidth
    return max(computed, given.backward[-1] + sent + given.forward[-1])


def on_a_rank(fn: Function, steps: Sequence[GradientCosts]) -> list[Any]:
    """Send the buckets that the learner's function chooses; return the gradients before and after, and the buckets."""
    generator, found = chance(), []
    for given in steps:
        gradients = [torch.randn(n // 8, generator=generator, dtype=torch.float64) for n in given.nbytes]
        before = [gradient.clone() for gradient in gradients]
        buckets = fn(*(list(each) if isinstance(each, tuple) else each for each in given))
        require_each_once(buckets, len(gradients))
        mark("step")
        for bucket in buckets:
            flat = torch.cat([gradients[layer] for layer in bucket])
            dist.all_reduce(flat)
            for layer, piece in zip(bucket, flat.split([len(gradients[layer]) for layer in bucket]), strict=True):
                gradients[layer] = piece / RANKS
        mark("end")
        found.append((before, gradients, [list(bucket) for bucket in buckets]))
    return found


def require_each_once(buckets: Any, layers: int) -> None:
    try:
        sent = sorted(layer for bucket in buckets for layer in bucket)
    except TypeError:
        raise ValueError(f"it returned {show(buckets)}: a list of lists of layers is needed") from None
    if sent != list(range(layers)):
        raise ValueError(f"{buckets}: each of {layers} layers must be in one bucket, once")
    if not all(map(len, buckets)):
        raise ValueError(f"{buckets}: a bucket is empty")


def judge(fn: Function) -> Judged:
    results = job(on_a_rank, fn, list(STEPS.values()), ranks=RANKS)
    for number, given in enumerate(STEPS.values()):
        before, after, chosen = zip(*(found[number] for found in results), strict=True)
        sent = [event.bytes_in for event in results.recording.select(0, number)]
        if sent != [sum(given.nbytes[layer] for layer in bucket) for bucket in chosen[0]] or chosen[0] != chosen[1]:
            raise Wrong("the ranks do not send the same buckets", "What does your function know that differs there?")
        for layer, gradients in enumerate(zip(*before, strict=True)):
            if not all(torch.allclose(each[layer], sum(gradients) / RANKS, rtol=1e-12) for each in after):
                raise Wrong(f"the gradient of layer {layer} is not the mean", "In which bucket does it travel?")
    scores = {
        name: 100 * bound(given) / step_seconds(results[0][number][2], given)
        for number, (name, given) in enumerate(STEPS.items())
    }
    return Judged.of(scores)


early_start = Challenge(
    "early_start",
    "03",
    "The earliest next step",
    "Choose which gradients travel together and in which order: backward goes from the last layer to the first, the "
    "next forward from the first to the last, and a layer waits for its gradients. Five models, one wire.",
    judge,
    floor=72.8,
    course=81.4,
    possible=89.6,
    cases=STEPS,
    bound=bound,
    measured=step_seconds,
)
