"""ZeRO: bytes that a rank sends and holds in a step, stage by stage, as in `labs.zero`.

    stage    sent by each rank in a step of a micro-batches      textbook, N large and a = 1
    1        reduce_scatter G, all_gather P                      2 Ψ
    2        a reduce_scatter G, all_gather P                    2 Ψ
    3        a (reduce_scatter G, 2 all_gather P)                3 Ψ

Each layer's parameters are padded to a multiple of N, so that all ranks send and hold the same number of bytes. Once
per step, each rank sends the others a checksum of the units that it gathered and reduced, in their order.

Source: [ZeRO] Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from labs.cost.data_parallel import ddp_moments
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    HeldBytes,
    LayerShapes,
    Moment,
    Prediction,
    gpt_layers,
    held,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.saved_activations import activations, backward
from labs.cost.traffic import all_gather, reduce_scatter

CHECKSUM = 8  # bytes of each rank's checksum


def zero(job: Job, stage: int) -> Prediction:
    """Predict a step on CPU, in float32 or mixed precision (bfloat16 with float32 masters), the same for every rank.

    On gloo, all_to_all stands for reduce_scatter.
    """
    job.require("cost.zero", precision=("float32", "mixed"))
    layers = gpt_layers(job.config)
    counts = [turns(layer, stage, job.accumulation) for layer in layers]
    return Prediction(
        sent=zero_sent(layers, job.ranks, stage, job.accumulation, job.itemsize),
        collectives={"all_gather": sum(g for g, _ in counts) + 1, "reduce_scatter": sum(r for _, r in counts)},
        textbook=job.itemsize * zero_limit(sum(parameter_sizes(job.config)), job.ranks, stage, job.accumulation),
        held=zero_held(job, stage),
    )


# ---- sent ------------------------------------------------------------------------------------------------


def zero_limit(psi: int, ranks: int, stage: int, accumulation: int = 1) -> Fraction:
    """Return the elements that each rank sends by the textbook [ZeRO, section 7].

    In stages 1, 2 and 3 these are 2, 2 and 3 times (N-1)/N Ψ for a single micro-batch.
    """
    gathers, reduces = turns(LayerShapes(), stage, accumulation)
    return Fraction(psi) * (gathers + reduces) * (ranks - 1) / ranks


def zero_sent(
    layers: Sequence[LayerShapes], ranks: int, stage: int, accumulation: int = 1, itemsize: int = FLOAT
) -> int:
    """Return the bytes that each rank sends in a step, whatever the model."""
    sent = 0
    for layer in layers:
        gathers, reduces = turns(layer, stage, accumulation)
        n = padded(sum(layer.sizes), ranks)
        sent += gathers * all_gather(n, ranks).elements + reduces * reduce_scatter(n, ranks).elements
        if stage == 3:
            frozen = padded(sum(map(prod, layer.frozen)), ranks)
            sent += gathers * all_gather(frozen, ranks).elements
    return itemsize * sent + CHECKSUM * all_gather(ranks, ranks).elements


def turns(layer: LayerShapes, stage: int, accumulation: int) -> tuple[int, int]:
    """Return how often a layer's parameters are gathered in a step, and how often their gradients are reduced."""
    match stage:
        case 1:
            return 1, 1
        case 2:
            return 1, accumulation
        case 3:
            return 2 * layer.uses * accumulation, accumulation
    raise ValueError("stage 0 is plain data parallelism, which is cost.ddp's: ZeRO has the stages 1, 2 and 3")


def padded(n: int, ranks: int) -> int:
    return -(-n // ranks) * ranks


# ---- held ------------------------------------------------------------------------------------------------


def zero_held(job: Job, stage: int) -> HeldBytes:
    """Return the bytes held in a step: P, G and S as the stage shards them, with padding; the most of the others."""
    return replace(held(*zero_step(job, stage)), G=most_gradients(job, stage), temporary=None)


def units_of(job: Job) -> list[int]:
    return [padded(sum(layer.sizes), job.ranks) for layer in gpt_layers(job.config)]


def most_gradients(job: Job, stage: int) -> int:
    """Return the most bytes of gradients.

    Stage 1 has all of a layer's gradients until its own part is averaged. Stage 2 has 1/N of the layers that backward
    has passed, all of one layer, and 1/N of it; or 1/N of everything, if it adds to earlier micro-batches. The
    optimizer of float32 masters has a float32 copy of one part.
    """
    units, g, accumulating = units_of(job), job.size["G"], job.accumulation > 1
    shards = [n // job.ranks for n in units]
    most = g * sum(shards) + FLOAT * max(shards) * job.masters
    if stage == 1:
        return max(most, *(g * (sum(units[n:]) + sum(shards[: n + 1])) for n in range(len(units))))
    if stage == 2:
        most = max(most, *(g * (units[n] + sum(shards[0 if accumulating else n :])) for n in range(len(units))))
    return most


def zero_step(job: Job, stage: int) -> tuple[int, int, list[Moment]]:
    """Return P, S, and the moments of a step at which a rank may hold the most.

    Stage 0 is `labs.ddp.Naive`. AdamW has a counter of 4 bytes for each of its tensors.
    """
    size = job.size
    if stage == 0:
        units = shards = parameter_sizes(job.config)
        moments = [*ddp_moments(job, units, own=size["G"] * sum(units))]
    else:
        units = units_of(job)
        shards = [n // job.ranks for n in units]
        moments = [
            *in_backward(job, stage, size["G"] * sum(units if stage == 1 else shards)),
            in_step(job, stage, shards),
        ]
    P = size["P"] * sum(shards if stage == 3 else units)
    return P, size["S"] * sum(shards) + FLOAT * len(shards), moments


def in_backward(job: Job, stage: int, total: int) -> Iterator[Moment]:
    """Yield the bytes besides P and S while backward runs; total: bytes of gradients at its end.

    A layer's gradients are separate until all of them are there. Then they are copied side by side into a vector, which
    stage 1 keeps. Stages 2 and 3 send it, hold as much again of the other ranks' pieces, and keep 1/N. Stage 3 has the
    layer's parameters gathered meanwhile, except the embedding's, whose input has no gradient. A tied head's vector
    waits for the embedding's. Losses and their gradient count as temporary.
    """
    accumulating, p, g = job.accumulation > 1, job.size["P"], job.size["G"]
    for at in backward(job):
        n = padded(at.unit, job.ranks)
        new, gathered = g * n // (1 if stage == 1 else job.ranks), p * n * (stage == 3)
        now = Moment(at.name, total if accumulating else g * at.before // (1 if stage == 1 else job.ranks))
        now = now.plus(temporary=job.losses)
        yield replace(now, A=at.A).plus(comm=gathered, temporary=at.temporary + p * at.own)
        if at.name == "head" and job.config.tied:
            yield replace(now, A=at.left).plus(comm=gathered, temporary=at.x + 2 * p * n)
            continue
        vectors = {
            1: {"temporary": p * n},
            2: {"G": g * n, "comm": g * n},
            3: {"comm": 2 * g * n + gathered * (at.x > 0)},
        }
        now = replace(now, A=at.left).plus(temporary=at.x).plus(**vectors[stage])
        yield now.plus(**{"temporary" if accumulating else "G": new})
    if stage == 1:
        units, at_rest = units_of(job), activations(job)["tokens"]
        for number, n in enumerate(units):
            G = g * (sum(units[number:]) + sum(units[: number + 1]) // job.ranks)
            yield Moment(f"sync {number}", G, at_rest, g * n, job.losses)


def in_step(job: Job, stage: int, shards: Sequence[int]) -> Moment:
    at_rest, G = activations(job)["tokens"], job.size["G"] * sum(shards)
    return optimizer_step(at_rest, G, 0, shards, job.masters).plus(temporary=job.losses)
