"""ZeRO: what a rank sends and holds in a step, stage by stage, as `labs.zero` does it.

    stage    sent by each rank, a step of a micro-batches        textbook, N large and a = 1
    1        reduce_scatter G, all_gather P                      2 Ψ
    2        a reduce_scatter G, all_gather P                    2 Ψ
    3        a (reduce_scatter G, 2 all_gather P)                3 Ψ

Each layer's parameters are padded to a multiple of N, so that all ranks send and hold the same.

Source: [ZeRO] Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod

from labs.cost.activations import Part, backward
from labs.cost.collectives import all_gather, reduce_scatter
from labs.cost.memory import (
    FLOAT,
    Held,
    Layer,
    Moment,
    Prediction,
    bytes_of,
    gpt_layers,
    held,
    optimizer_step,
    require_stage,
)

PRECISION = {"float32": "float32, AdamW", "mixed": "mixed precision, AdamW"}


def zero(
    config,
    batch: int,
    ranks: int,
    stage: int,
    rank: int = 0,
    context: int | None = None,
    accumulation: int = 1,
    precision: str = "float32",
) -> Prediction:
    """A step of `GPT(config)` with AdamW on CPU, from the second step on; `batch` sequences at a time.

    precision: "float32", or "mixed": bfloat16 with float32 masters (`labs.precision`). The answer is the same for
    every rank. On gloo, all_to_all stands for reduce_scatter.
    """
    layers, convention = gpt_layers(config), PRECISION[precision]
    itemsize = bytes_of(convention)["P"]
    counts = [turns(layer, stage, accumulation) for layer in layers]
    return Prediction(
        sent=zero_sent(layers, ranks, stage, accumulation, itemsize),
        collectives={"all_gather": sum(g for g, _ in counts), "reduce_scatter": sum(r for _, r in counts)},
        textbook=itemsize * zero_limit(sum(sum(layer.sizes) for layer in layers), ranks, stage, accumulation),
        held=zero_held(config, batch, ranks, stage, context, accumulation, convention),
    )


# ---- sent ------------------------------------------------------------------------------------------------


def zero_limit(psi: int, ranks: int, stage: int, accumulation: int = 1) -> Fraction:
    """Elements that each rank sends: 2, 2 and 3 (N-1)/N Ψ for a single micro-batch [ZeRO, section 7]."""
    gathers, reduces = turns(Layer(), stage, accumulation)
    return Fraction((gathers + reduces) * (ranks - 1) * psi, ranks)


def zero_sent(layers: Sequence[Layer], ranks: int, stage: int, accumulation: int = 1, itemsize: int = FLOAT) -> int:
    """Bytes that each rank sends in a step, whatever the model."""
    sent = 0
    for layer in layers:
        gathers, reduces = turns(layer, stage, accumulation)
        n = padded(sum(layer.sizes), ranks)
        sent += gathers * all_gather(n, ranks).elements + reduces * reduce_scatter(n, ranks).elements
        if stage == 3:
            frozen = padded(sum(map(prod, layer.frozen)), ranks)
            sent += gathers * all_gather(frozen, ranks).elements
    return itemsize * sent


def turns(layer: Layer, stage: int, accumulation: int) -> tuple[int, int]:
    """How often a layer's parameters are gathered, and their gradients reduced, in a step."""
    require_stage(stage)
    match stage:
        case 1:
            return 1, 1
        case 2:
            return 1, accumulation
    return 2 * layer.uses * accumulation, accumulation


def padded(n: int, ranks: int) -> int:
    return -(-n // ranks) * ranks


# ---- held ------------------------------------------------------------------------------------------------


def zero_held(
    config,
    batch: int,
    ranks: int,
    stage: int,
    context: int | None = None,
    accumulation: int = 1,
    convention: str = "float32, AdamW",
    recompute: str = "none",
    fused_norms: bool = False,
) -> Held:
    """A step's most, by kind. Activations and parameters have the same precision."""
    size = bytes_of(convention)
    parts = backward(config, batch, context, size["P"], recompute, fused_norms)
    units = [padded(sum(layer.sizes), ranks) for layer in gpt_layers(config)]
    P = size["P"] * sum(units) // (ranks if stage == 3 else 1)
    S = size["S"] * sum(units) // ranks + FLOAT * len(units)  # AdamW counts the steps of each shard
    return held(P, S, zero_moments(parts, units, ranks, stage, size, accumulation))


def zero_moments(
    parts: Sequence[Part], units: Sequence[int], ranks: int, stage: int, size: Mapping[str, int], accumulation: int
) -> Iterator[Moment]:
    """Bytes beside P and S, from the end of forward on.

    The gradients of a unit's parameters are laid side by side when all are there. As one vector they wait for
    `sync` (stage 1), or are reduced: what other ranks send comes into a buffer of the same size. The vector of a tied
    head waits for the embedding's. The loss and its gradient count as temporary.
    """
    p, g, first = size["P"], size["G"], accumulation == 1
    come, waiting = 0 if first else g * sum(units) // (ranks if stage > 1 else 1), 2 * FLOAT
    yield Moment("forward", G=come, A=parts[0].worst[0].A + FLOAT)
    for part in parts:
        pieces, n = sum(part.sizes), padded(sum(part.sizes), ranks)
        gathered = p * n if stage == 3 else 0
        for at in part.worst:
            temporary = at.temporary + p * at.gradients + waiting
            yield Moment(at.name, G=come, A=at.A, comm=gathered, temporary=temporary)
        if part.shared:
            yield Moment(
                part.name, G=come, A=part.left, comm=gathered, temporary=part.handed_on + p * (pieces + n) + waiting
            )
            waiting += p * n
        elif n:
            if part is parts[-1] and parts[1].shared:
                yield Moment("both uses", G=come, A=part.left, comm=gathered, temporary=p * (pieces + n) + waiting)
                waiting = 2 * FLOAT
            yield whole(part, come, first, n, ranks, stage, size, waiting)
            come += first * (g * n // ranks if stage > 1 else g * n)
    yield from end_of_step(parts[-1].left, units, ranks, stage, size)


def whole(
    part: Part, come: int, first: bool, n: int, ranks: int, stage: int, size: Mapping[str, int], waiting: int
) -> Moment:
    """All of a part's gradients are there, in one vector; and under stages 2 and 3 it is reduced."""
    p, vector, shard = size["P"], size["G"] * n, size["G"] * n // ranks
    left, temporary = dict(name=part.name, A=part.left), part.handed_on + waiting
    match stage:
        case 1:
            new, more = (vector, 0) if first else (0, vector)
            return Moment(**left, G=come + new, temporary=temporary + p * sum(part.sizes) + more)
        case 2:
            new, more = (shard, 0) if first else (0, shard)
            return Moment(**left, G=come + vector + new, comm=vector, temporary=temporary + more)
    new, more = (shard, 0) if first else (0, shard)
    still_gathered = p * n if part.handed_on else 0
    return Moment(**left, G=come + new, comm=still_gathered + 2 * vector, temporary=temporary + more)


def end_of_step(A: int, units: Sequence[int], ranks: int, stage: int, size: Mapping[str, int]) -> Iterator[Moment]:
    """`sync` of stage 1, unit by unit; and the optimizer, with float32 copies of the gradients where it has masters."""
    g, shards = size["G"], [n // ranks for n in units]
    for number, n in enumerate(units if stage == 1 else ()):
        G = g * (sum(units[number:]) + sum(shards[: number + 1]))
        yield Moment(f"sync {number}", A=A, G=G, comm=g * n, temporary=FLOAT)
    yield optimizer_step(A, g * sum(shards), 0, shards, masters=size["S"] > 2 * FLOAT)
