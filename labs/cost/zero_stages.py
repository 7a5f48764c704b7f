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
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from labs.cost.data_parallel import ddp_moments
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    Held,
    Layer,
    Moment,
    Prediction,
    gpt_layers,
    held,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.saved_activations import backward
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
    gathers, reduces = turns(Layer(), stage, accumulation)
    return Fraction(psi) * (gathers + reduces) * (ranks - 1) / ranks


def zero_sent(layers: Sequence[Layer], ranks: int, stage: int, accumulation: int = 1, itemsize: int = FLOAT) -> int:
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


def turns(layer: Layer, stage: int, accumulation: int) -> tuple[int, int]:
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


def zero_held(job: Job, stage: int) -> Held:
    """Return the bytes held in a step: P, G and S as the stage shards them, with padding; the most of the others."""
    return held(*zero_step(job, stage))


def zero_step(job: Job, stage: int) -> tuple[int, int, list[Moment]]:
    """Return P, S, and the moments of a step.

    Stage 0 is `labs.ddp.Naive`. AdamW has a counter of 4 bytes for each of its tensors.
    """
    size = job.size
    if stage == 0:
        units = shards = parameter_sizes(job.config)
        moments = ddp_moments(job, units, own=size["G"] * sum(units))
    else:
        units = [padded(sum(layer.sizes), job.ranks) for layer in gpt_layers(job.config)]
        shards = [n // job.ranks for n in units]
        moments = zero_moments(job, units, StageShares(stage, job.ranks, size["P"], size["G"]))
    P = size["P"] * sum(shards if stage == 3 else units)
    return P, size["S"] * sum(shards) + FLOAT * len(shards), list(moments)


@dataclass(frozen=True)
class StageShares:
    """The bytes of a unit of n elements under a stage; p and g are the bytes of a parameter and of its gradient."""

    number: int
    ranks: int
    p: int
    g: int

    def gathered(self, n: int) -> int:
        return self.p * n if self.number == 3 else 0

    def stays(self, n: int) -> int:
        """Return the bytes of a unit's gradient that stay until the step."""
        return self.g * n // (self.ranks if self.number > 1 else 1)

    def reduced(self, n: int, accumulating: bool, still_gathered: bool) -> dict[str, int]:
        """Return the bytes when all gradients of a unit have been copied side by side into a vector.

        Stage 1 has the vector and the separate gradients; stages 2 and 3 have the vector, the other ranks' pieces, and
        their sum.

        accumulating: whether the sum is then added to that of earlier micro-batches
        still_gathered: whether the unit's parameters are still gathered, in stage 3
        """
        vector, new = self.g * n, self.stays(n)
        more = {"temporary": new} if accumulating else {"G": new}
        match self.number:
            case 1:
                return more | {"temporary": self.p * n + accumulating * new}
            case 2:
                return more | {"G": vector + (not accumulating) * new, "comm": vector}
        return more | {"comm": 2 * vector + still_gathered * self.gathered(n)}


def zero_moments(job: Job, units: Sequence[int], stage: StageShares) -> Iterator[Moment]:
    """Yield the bytes besides P and S, from the end of forward on.

    A layer is gathered until the gradient of its input is computed, so also while its own gradients are reduced. The
    embedding is not, since its input are tokens. The vector of a tied head waits until the embedding's is complete. The
    losses and their gradient count as temporary.
    """
    parts, accumulating = backward(job), job.accumulation > 1
    arrived, losses, at_rest = accumulating * sum(map(stage.stays, units)), 2 * FLOAT + job.losses, parts[-1].left
    pending = losses
    yield Moment("forward", G=arrived, A=parts[0].worst[0].A + FLOAT, temporary=job.losses)
    for part in parts:
        n = padded(sum(part.sizes), stage.ranks)
        for at in part.worst:
            temporary = at.temporary + stage.p * at.gradients + pending
            yield Moment(at.name, arrived, at.A, stage.gathered(n), temporary)
        done = Moment(part.name, arrived, part.left, temporary=part.input_gradient)
        if part.shared or (pending > losses and part is parts[-1]):
            yield done.plus(comm=stage.gathered(n), temporary=2 * stage.p * n + pending)
            pending = losses + part.shared * stage.p * n
        if n and not part.shared:
            still_gathered = part.input_gradient > 0
            yield done.plus(temporary=pending).plus(**stage.reduced(n, accumulating, still_gathered))
            arrived += (not accumulating) * stage.stays(n)
    shards = [n // stage.ranks for n in units]
    for number, n in enumerate(units if stage.number == 1 else ()):
        G = stage.g * (sum(units[number:]) + sum(shards[: number + 1]))
        yield Moment(f"sync {number}", G, at_rest, comm=stage.g * n, temporary=FLOAT + job.losses)
    yield optimizer_step(at_rest, stage.g * sum(shards), 0, shards, job.masters).plus(temporary=job.losses)
