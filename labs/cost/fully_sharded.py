"""FSDP: what a rank sends and holds in a step where parameters are sharded one by one, as `labs.fsdp` does it.

Each parameter is cut along its first dim in S chunks, padded to the longest.  A layer is gathered at once.  The root,
which is the embedding, last norm and head, stays gathered from forward to backward.  N ranks are R replicas of S
shards, and Ψ' is Ψ with the padding, l of it in the layers; p is what an element has when it is gathered, 4 bytes in
float32 and 2 in bfloat16:

    sent by each rank, for each micro-batch                            bytes                         of it, textbook
    all_gather         once in forward, and layers in backward         p (S-1)/S (Ψ' + l)            2 p Ψ   [ZeRO, 7]
                       likewise, without resharding                    p (S-1)/S Ψ'                    p Ψ
    reduce_scatter     gradients, in float32                           4 (S-1)/S Ψ'                  4   Ψ
    all_reduce         of the shard's, over the replicas               8 (R-1)/R Ψ'/S                8   Ψ/S

Sources: [ZeRO] Rajbhandari et al. 2020, arXiv 1910.02054, section 7; [FSDP] Zhao et al. 2023, arXiv 2304.11277,
section 3.2, whose unit is a layer's vector, padded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.autograd import backward
from labs.cost.collectives import all_gather, all_reduce, reduce_scatter
from labs.cost.job import Job
from labs.cost.memory import (
    FLOAT,
    INDEX,
    Held,
    Layer,
    Moment,
    Prediction,
    Shape,
    gpt_layers,
    held,
    optimizer_state,
    optimizer_step,
    parameter_sizes,
)


def fsdp(job: Job, reshard_after_forward: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> Prediction:
    """A step on CPU, at rest in float32.

    replicas: R of the N ranks.  itemsize: bytes of an element that is gathered.
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


def groups(config) -> tuple[Layer, list[Layer]]:
    """The root and the layers of a GPT, each gathered at once."""
    embedding, *others = gpt_layers(config)
    layers, rest = others[: config.depth], others[config.depth :]
    return Layer(tuple(chain(embedding.trained, *(layer.trained for layer in rest)))), layers


def fully_shard_sent(
    root: Layer,
    layers: Sequence[Layer],
    ranks: int,
    reshard_after_forward: bool = True,
    accumulation: int = 1,
    rank: int = 0,
    replicas: int = 1,
    itemsize: int = FLOAT,
) -> int:
    """Bytes that `rank` sends in a step, for float32 parameters of these shapes, whatever the model."""
    shards, sent = ranks // replicas, 0
    for number, group in enumerate((root, *layers)):
        trained, frozen = (sum(rows(shape, shards) for shape in shapes) for shapes in (group.trained, group.frozen))
        gathers = 2 if number and reshard_after_forward else 1
        sent += itemsize * gathers * all_gather(trained + frozen, shards).elements
        sent += FLOAT * reduce_scatter(trained, shards).elements
        sent += FLOAT * all_reduce(trained // shards, replicas, rank // shards).elements
    return accumulation * sent


def rows(shape: Shape, shards: int) -> int:
    """Elements of a parameter whose first dim is padded to S equal chunks."""
    first, *others = shape
    return -(-first // shards) * shards * prod(others)


def chunk(shape: Shape, shards: int, number: int) -> int:
    """Elements of one chunk, without the padding; the last ones may have none."""
    first, *others = shape
    longest = -(-first // shards)
    return max(0, min(longest, first - number * longest)) * prod(others)


# ---- held ------------------------------------------------------------------------------------------------


def chunks_of(job: Job, shards: int) -> list[int]:
    """Elements of this rank's chunk of each parameter, without the padding."""
    return [chunk(shape, shards, job.rank % shards) for group in gpt_layers(job.config) for shape in group.trained]


def computed(job: Job, itemsize: int) -> Job:
    """The job by the dtype in which it computes, whatever is held at rest."""
    return job if itemsize == FLOAT else replace(job, precision="mixed")


def fsdp_held(job: Job, reshard: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> Held:
    """P and S are the rank's chunks, without padding; G has it, since a gradient stays where it was added up."""
    (root, layers), shards = groups(job.config), job.ranks // replicas
    padded = [sum(rows(shape, shards) for shape in group.trained) for group in (root, *layers)]
    chunks = chunks_of(job, shards)
    moments = fsdp_moments(job, padded[0], padded[-1], reshard, replicas, itemsize)
    G = FLOAT * sum(padded) // shards
    step = optimizer_step(backward(job)[-1].left, G, 0, chunks).plus(temporary=job.losses)
    most = held(FLOAT * sum(chunks), optimizer_state(chunks), [*moments, step])
    mesh = INDEX * job.ranks  # the ranks' numbers
    return replace(most, temporary=most.temporary + mesh, peak=most.peak + mesh)


def fsdp_moments(job: Job, root: int, layer: int, reshard: bool, replicas: int, itemsize: int) -> Iterator[Moment]:
    """Bytes beside P and S, from the forward on; all that is whole counts as `comm`.

        forward         the root; a layer that arrives, twice: in the table that travelled, and copied from there
        in a layer      it is gathered; the one before it is on its way in a table; so are the gradients of the one
                        behind it, twice: as they are sent, and as they come; its own gradients, and the root's
        a layer ends    it is dropped; the one behind it gets its part; its gradients are laid into a table, and sent
        backward ends   the root's likewise

    root, layer: elements of each with padding.
    """
    parts, shards, losses = backward(computed(job, itemsize)), job.ranks // replicas, job.losses
    layers = [part for part in parts if part.name.startswith("layer")]
    w, whole = itemsize * layer, itemsize * root
    parts_of = FLOAT * (root + len(layers) * layer) // shards
    arrived = 0 if job.accumulation == 1 else parts_of
    # A part that is added to one of an earlier micro-batch stays by itself until backward ends.
    kind = "G" if job.accumulation == 1 else "comm" if replicas > 1 else "temporary"
    for part in reversed(layers):
        yield Moment(f"{part.name} arrives", arrived, part.left + part.handed_on, whole + 2 * w, losses)
        whole += 0 if reshard else w
    loss = parts[0].worst[0]
    yield Moment("forward", arrived, loss.A + FLOAT, whole, loss.temporary // 2 + FLOAT + losses)

    kept, roots, behind = Moment("kept", arrived, temporary=2 * FLOAT + losses), 0, 0
    for number, part in enumerate(parts):
        in_layer, flying, own = part in layers, 2 * FLOAT * behind, itemsize * sum(part.sizes)
        if in_layer and reshard:
            again = replace(kept, name=f"{part.name} arrives again", A=parts[number - 1].left)
            yield again.plus(comm=whole + 2 * w + flying + roots, temporary=part.handed_on)
            whole += w
        prefetched = w if in_layer and reshard and part is not layers[-1] else 0
        ends_group = in_layer or part is parts[-1]
        for at in part.worst:
            last = itemsize * part.sizes[0] if ends_group and at.gradients == sum(part.sizes) else 0
            comm = whole + prefetched + flying + roots + itemsize * at.gradients - last
            yield replace(kept, name=at.name, A=at.A).plus(comm=comm, temporary=at.temporary + last)
        if part.shared:
            kept = kept.plus(temporary=own)
        elif not in_layer and part is not parts[-1]:
            roots += own
        else:
            whole -= w if in_layer else whole
            ends = replace(kept, name=part.name, A=part.left).plus(temporary=part.handed_on)
            if in_layer:
                ends, n = ends.plus(comm=whole + prefetched + roots), layer
            else:
                own, n = own + roots, root
            new = {kind: FLOAT * behind // shards}
            newest = itemsize * part.sizes[0]
            yield from reduction(ends, new, flying, own, newest, n, itemsize)
            kept, behind = kept.plus(**new), n
    yield (
        replace(kept, name="root", A=parts[-1].left).plus(comm=2 * FLOAT * root).plus(**{kind: FLOAT * root // shards})
    )


def reduction(
    ends: Moment, new: dict[str, int], flying: int, own: int, newest: int, n: int, itemsize: int
) -> Iterator[Moment]:
    yield ends.plus(comm=flying + own - newest, temporary=newest).plus(**new)
    ends, table = ends.plus(**new), FLOAT * n
    if itemsize == FLOAT:
        yield ends.plus(comm=table + own - newest, temporary=newest)
    else:
        yield ends.plus(comm=table, temporary=FLOAT * own // itemsize)
    yield ends.plus(comm=2 * table)
