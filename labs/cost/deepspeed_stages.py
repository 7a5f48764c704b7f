"""DeepSpeed's ZeRO: bytes that a rank sends and holds in a step, with the settings of `labs.deepspeed.like_zero`.

    stage    sent by each rank in a step of a micro-batches          textbook, N large and a = 1
    1        all_reduce G, all_gather P                              3 Ψ
    2        a all_reduce G, all_gather P                            3 Ψ
    3        a (reduce_scatter G, 2 all_gather P)                    3 Ψ

Stages 1 and 2 all-reduce a bucket of gradients for several ranks, although each rank needs only its own part; they
hold all trained parameters as one vector, padded to a multiple of 2 N.  Stage 3 cuts each parameter into N chunks,
padded to the longest.  In each stage the optimizer steps float32 masters, even if the parameters are float32
themselves, and the norm of all gradients is all-reduced before each step.

Source: DeepSpeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py and stage3.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, HeldBytes, LayerShapes, Moment, Prediction, gpt_layers, held
from labs.cost.saved_activations import activations, backward
from labs.cost.traffic import all_gather, all_reduce, reduce_scatter
from labs.cost.zero_stages import padded

NORM = {1: 4, 2: 4, 3: 8}  # bytes of the norm: stage 3 adds up squares in float64


def deepspeed(job: Job, stage: int, bucket: int) -> Prediction:
    """Predict a step in float32 on CPU; bucket: elements of gradients that are reduced at once."""
    job.require("cost.deepspeed", precision=("float32",))
    if stage not in NORM:
        raise ValueError(f"stage={stage!r}: cost.deepspeed has stages 1, 2 and 3; without sharding it is cost.ddp")
    layers, accumulation = gpt_layers(job.config), job.accumulation
    sizes = [size for layer in layers for size in layer.sizes]
    reduces = len(reduced_together(sizes, bucket)) * (1 if stage == 1 else accumulation)
    if stage < 3:
        collectives, turns = {"all_reduce": reduces + 1, "all_gather": 1}, 3 if stage == 1 else 1 + 2 * accumulation
    else:
        gathers = sum(2 * layer.uses * len(layer.sizes) for layer in layers) * accumulation
        collectives = {"all_gather": gathers, "reduce_scatter": reduces, "all_reduce": 1}
        turns = 3 * accumulation
    return Prediction(
        sent=deepspeed_sent(layers, job.ranks, stage, job.rank, bucket, accumulation),
        collectives=collectives,
        textbook=Fraction(FLOAT * turns * (job.ranks - 1) * sum(sizes), job.ranks),
        held=deepspeed_held(job, stage, bucket),
    )


def deepspeed_sent(
    layers: Sequence[LayerShapes], ranks: int, stage: int, rank: int, bucket: int, accumulation: int = 1
) -> int:
    """Return the bytes that a rank sends in a step, whatever the model; layers: in the order of registration."""
    sizes = [size for layer in layers for size in layer.sizes]
    times, norm = 1 if stage == 1 else accumulation, NORM[stage] * all_reduce(1, ranks, rank).elements
    if stage < 3:
        reduced = sum(all_reduce(sum(each), ranks, rank).elements for each in reduced_together(sizes, bucket))
        return FLOAT * (times * reduced + all_gather(padded(sum(sizes), 2 * ranks), ranks, rank).elements) + norm
    reduced = sum(reduce_scatter(padded(size, ranks), ranks, rank).elements for size in sizes)
    gathered = 0
    for layer in layers:
        whole = sum(padded(prod(shape), ranks) for shape in (*layer.trained, *layer.frozen))
        gathered += 2 * layer.uses * all_gather(whole, ranks, rank).elements
    return FLOAT * accumulation * (reduced + gathered) + norm


def reduced_together(sizes: Sequence[int], bucket: int) -> list[list[int]]:
    """Return the sizes of the gradients that are reduced together, bucket by bucket.

    Gradients arrive from the last parameter to the first; a bucket is reduced when the next gradient would not fit.
    """
    filled: list[list[int]] = []
    for size in reversed(sizes):
        if filled and sum(filled[-1]) + size <= bucket:
            filled[-1].append(size)
        else:
            filled.append([size])
    return filled


def deepspeed_held(job: Job, stage: int, bucket: int) -> HeldBytes:
    """Return P, G, S and A exactly, and the peak within 10 %.

    The optimizer has a counter for a single vector.
    """
    sizes = [size for layer in gpt_layers(job.config) for size in layer.sizes]
    vector = padded(sum(sizes), 2 * job.ranks) if stage < 3 else sum(padded(size, job.ranks) for size in sizes)
    shard = FLOAT * vector // job.ranks
    most = held(shard if stage == 3 else FLOAT * vector, 3 * shard + FLOAT, moments(job, stage, bucket, sizes, shard))
    G = {1: FLOAT * sum(sizes), 2: max(shard, FLOAT * max(sizes)), 3: shard}[stage]
    return replace(most, G=G, comm=None, temporary=None)


def moments(job: Job, stage: int, bucket: int, sizes: Sequence[int], shard: int) -> Iterator[Moment]:
    """Yield the bytes besides P and S while backward runs, and in the step.

    The bucket is allocated at the first gradient, and copied when it is reduced, twice in stage 3.  Stage 3 also has up
    to two gathered parameters, and a second buffer for its gradients.
    """
    gathered, second = (2 * FLOAT * max(sizes), shard) if stage == 3 else (0, 0)
    filled, at_rest = max(map(sum, reduced_together(sizes, bucket))), activations(job)["tokens"]
    buffers, reduced = FLOAT * bucket + gathered, (2 if stage == 3 else 1) * FLOAT * filled
    for at in backward(job):
        G = shard if stage == 3 else FLOAT * (at.newest + (stage == 1) * at.before)
        yield Moment(at.name, G, at.A, buffers, at.temporary + second)
    G = {1: FLOAT * sum(sizes), 2: FLOAT * max(sizes), 3: shard}[stage]
    yield Moment("last bucket", G, at_rest, buffers + reduced, second)
    yield Moment("step", G if stage == 1 else shard, at_rest, 0, 2 * shard + second)
