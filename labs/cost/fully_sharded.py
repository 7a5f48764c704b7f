"""FSDP: bytes that a rank sends and holds in a step if parameters are sharded one by one, as in `labs.fsdp`.

Each parameter is cut along its first dim into S chunks, padded to the longest.  A layer is gathered at once.  The
root, which is the embedding, last norm and head, stays gathered from forward to backward.  The N ranks are R replicas
of S shards.  Ψ' is Ψ with the padding, and l is the part of Ψ' in the layers.  A gathered element has p bytes, 4 in
float32 and 2 in bfloat16:

    sent by each rank, for each micro-batch                            bytes                         textbook's limit
    all_gather         once in forward, and layers in backward         p (S-1)/S (Ψ' + l)            2 p Ψ   [ZeRO, 7]
                       once in forward, without resharding             p (S-1)/S Ψ'                    p Ψ
    reduce_scatter     gradients, in float32                           4 (S-1)/S Ψ'                  4   Ψ
    all_reduce         gradients of the shard, over the replicas       8 (R-1)/R Ψ'/S                8   Ψ/S

Sources: [ZeRO] Rajbhandari et al. 2020, arXiv 1910.02054, section 7; [FSDP] Zhao et al. 2023, arXiv 2304.11277,
section 3.2, whose unit is a layer's vector, padded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    HeldBytes,
    LayerShapes,
    Moment,
    Prediction,
    Shape,
    gpt_layers,
    held,
    optimizer_state,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.saved_activations import High, activations, backward
from labs.cost.split import chunk
from labs.cost.traffic import all_gather, all_reduce, reduce_scatter


def fsdp(job: Job, reshard_after_forward: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> Prediction:
    """Predict a step on CPU, with float32 parameters between steps.

    replicas: R, the number of replicas among the N ranks
    itemsize: p, the bytes of a gathered element
    """
    job.require("cost.fsdp", precision=("float32",), recompute=("none",))
    (root, layers), shards, psi = groups(job.config), job.ranks // replicas, sum(parameter_sizes(job.config))
    gathers, reduces = 1 + len(layers) * (1 + reshard_after_forward), 1 + len(layers)
    counts = {"all_gather": gathers, "reduce_scatter": reduces} | ({"all_reduce": reduces} if replicas > 1 else {})
    sharded = Fraction((shards - 1) * psi, shards) * (itemsize * (1 + reshard_after_forward) + FLOAT)
    replicated = Fraction(2 * (replicas - 1) * psi, replicas * shards) * FLOAT
    return Prediction(
        sent=fully_shard_sent(
            root, layers, job.ranks, reshard_after_forward, job.accumulation, job.rank, replicas, itemsize
        ),
        collectives={name: job.accumulation * count for name, count in counts.items()},
        textbook=job.accumulation * (sharded + replicated),
        held=fsdp_held(job, reshard_after_forward, replicas, itemsize),
    )


# ---- sent ------------------------------------------------------------------------------------------------


def groups(config) -> tuple[LayerShapes, list[LayerShapes]]:
    """Return the root and the layers of a GPT, each of which is gathered at once."""
    embedding, *others = gpt_layers(config)
    layers, rest = others[: config.depth], others[config.depth :]
    return LayerShapes(tuple(chain(embedding.trained, *(layer.trained for layer in rest)))), layers


def fully_shard_sent(
    root: LayerShapes,
    layers: Sequence[LayerShapes],
    ranks: int,
    reshard_after_forward: bool = True,
    accumulation: int = 1,
    rank: int = 0,
    replicas: int = 1,
    itemsize: int = FLOAT,
) -> int:
    """Return the bytes that `rank` sends in a step, for float32 parameters of these shapes, whatever the model."""
    shards, sent = ranks // replicas, 0
    for number, group in enumerate((root, *layers)):
        trained, frozen = (sum(rows(shape, shards) for shape in shapes) for shapes in (group.trained, group.frozen))
        gathers = 2 if number and reshard_after_forward else 1
        sent += itemsize * gathers * all_gather(trained + frozen, shards).elements
        sent += FLOAT * reduce_scatter(trained, shards).elements
        sent += FLOAT * all_reduce(trained // shards, replicas, rank // shards).elements
    return accumulation * sent


def rows(shape: Shape, shards: int) -> int:
    """Return the elements of a parameter whose first dim is padded to S equal chunks."""
    first, *others = shape
    return -(-first // shards) * shards * prod(others)


# ---- held ------------------------------------------------------------------------------------------------


def chunks_of(job: Job, shards: int) -> list[int]:
    """Return the elements of this rank's chunk of each parameter, without the padding."""
    shapes = (shape for group in gpt_layers(job.config) for shape in group.trained)
    return [chunk(first, shards, job.rank % shards) * prod(others) for first, *others in shapes]


def computed(job: Job, itemsize: int) -> Job:
    """Return the job in the dtype in which it computes, whatever dtype is held between steps."""
    if itemsize not in (2, FLOAT):
        raise ValueError(f"itemsize is {itemsize}: bytes held are predicted only for 2 or {FLOAT}")
    return job if itemsize == FLOAT else replace(job, precision="mixed")


def fsdp_held(job: Job, reshard: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> HeldBytes:
    """Return the bytes held in a step.

    P and S are the rank's chunks, without padding.  G has the padding, since a gradient stays in the buffer in which it
    was reduced.
    """
    (root, layers), shards = groups(job.config), job.ranks // replicas
    root, layer = (sum(rows(shape, shards) for shape in group.trained) for group in (root, layers[0]))
    chunks, G = chunks_of(job, shards), FLOAT * (root + len(layers) * layer) // shards
    moments = [*fsdp_moments(computed(job, itemsize), root, layer, reshard, G, shards)]
    step = optimizer_step(activations(job)["tokens"], G, 0, chunks).plus(temporary=job.losses)
    most = held(FLOAT * sum(chunks), optimizer_state(chunks), [*moments, step])
    mesh = INDEX * job.ranks  # the ranks' numbers
    return replace(most, temporary=None, peak=most.peak + mesh)


def fsdp_moments(
    job: Job, root: int, layer: int, reshard: bool, G: int, shards: int, highs: Sequence[High] = (), ahead: int = 1
) -> Iterator[Moment]:
    """Yield the bytes besides P and S while backward runs.

    The root is gathered until the embedding's gradients are there; a layer is gathered, and the layer before it, which
    is prefetched; or all layers, if they are not resharded after the forward. Gradients are whole until they are
    reduced, the root's at the end of backward, for which they are copied into a buffer that is sent and one that
    receives; a layer's buffers are there while the layer before it runs. All of this is `comm`.

    root, layer: elements of each with padding
    G: bytes of all reduced gradients; if there were earlier micro-batches, theirs are held, and the new ones separately
    highs: the moments of backward, by default the dense GPT's
    ahead: layers that are prefetched; 0 for a layer of two groups, of which one is gathered as the other is needed
    """
    p, depth, table = job.itemsize, job.config.depth, job.own.vocab * job.config.dim
    new, before = ("comm" if shards < job.ranks else "temporary", G) if job.accumulation > 1 else ("G", 0)
    start = Moment("backward ends", before, temporary=job.losses)
    for at in highs or backward(job):
        left, in_layer = depth - at.passed, at.name in ("layer", "attention", "norm")
        gathered = root + layer * (min(1 + ahead, left) * in_layer if reshard else left)
        roots, flying = (at.before > 0) * (root - table), 2 * layer * (at.passed > 0)
        comm = p * (gathered + roots + at.own) + FLOAT * flying
        now = replace(start, name=at.name, A=at.A).plus(**{new: FLOAT * layer * max(0, at.passed - 1) // shards})
        newest = p * job.config.dim * (at.name == "norm")  # that of the norm's weight is not assigned yet
        yield now.plus(comm=comm - newest, temporary=at.temporary + newest)
        if at.name == "layer" and reshard:  # it arrives in a buffer, from which it is copied
            yield now.plus(comm=p * (root + (1 + ahead) * layer + roots) + FLOAT * flying, temporary=at.x)
    yield replace(start, A=activations(job)["tokens"]).plus(comm=2 * FLOAT * root).plus(**{new: G})
