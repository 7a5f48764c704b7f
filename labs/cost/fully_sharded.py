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
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.job import Job
from labs.cost.model_states import (
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
from labs.cost.split import chunk
from labs.cost.split_activations import ends_of_forward, parts_of
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


def groups(config) -> tuple[Layer, list[Layer]]:
    """Return the root and the layers of a GPT, each of which is gathered at once."""
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


def fsdp_held(job: Job, reshard: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> Held:
    """Return the bytes held in a step.

    P and S are the rank's chunks, without padding.  G has the padding, since a gradient stays in the buffer in which it
    was reduced.
    """
    (root, layers), shards = groups(job.config), job.ranks // replicas
    padded = [sum(rows(shape, shards) for shape in group.trained) for group in (root, *layers)]
    chunks = chunks_of(job, shards)
    moments = fsdp_moments(job, padded[0], padded[-1], reshard, replicas, itemsize)
    G = FLOAT * sum(padded) // shards
    step = optimizer_step(parts_of(job)[-1].left, G, 0, chunks).plus(temporary=job.losses)
    most = held(FLOAT * sum(chunks), optimizer_state(chunks), [*moments, step])
    mesh = INDEX * job.ranks  # the ranks' numbers
    return replace(most, temporary=most.temporary + mesh, peak=most.peak + mesh)


def fsdp_moments(job: Job, root: int, layer: int, reshard: bool, replicas: int, itemsize: int) -> Iterator[Moment]:
    """Yield the bytes besides P and S, from the forward on; everything that is gathered counts as `comm`.

    root, layer: elements of each with padding
    """
    job, shards, first = computed(job, itemsize), job.ranks // replicas, job.accumulation == 1
    arrived = 0 if first else FLOAT * (root + job.config.depth * layer) // shards
    # A reduced gradient that will be added to an earlier micro-batch's is held separately until backward ends.
    kind = "G" if first else "comm" if replicas > 1 else "temporary"
    yield from in_forward(job, arrived, itemsize * root, itemsize * layer, reshard)
    groups_of = (Group(n, shards, itemsize, kind) for n in (root, layer))
    yield from in_backward(job, arrived, *groups_of, reshard)


@dataclass(frozen=True)
class Group:
    """The root or a layer: n elements with padding, cut into shards; kind: the kind of its reduced gradient."""

    n: int
    shards: int
    itemsize: int
    kind: str

    @property
    def gathered(self) -> int:
        return self.itemsize * self.n

    @property
    def table(self) -> int:
        """Return the bytes of its gradients side by side in one buffer."""
        return FLOAT * self.n

    @property
    def part(self) -> dict[str, int]:
        return {self.kind: self.table // self.shards}

    def reduced(self, at: Moment, own: int, newest: int) -> Iterator[Moment]:
        """Yield the bytes while gradients of `own` bytes are reduced.

        They are copied into a table, which is then sent; a buffer of the same size receives. The newest gradient is
        not assigned to its parameter yet. Gradients of another dtype are first cast to float32.
        """
        copies = 0 if self.itemsize == FLOAT else FLOAT * own // self.itemsize
        yield at.plus(comm=self.table + (0 if copies else own - newest), temporary=copies or newest)
        yield at.plus(comm=2 * self.table)


def in_forward(job: Job, arrived: int, whole: int, layer: int, reshard: bool) -> Iterator[Moment]:
    """Yield the bytes in forward: the root is whole, and a layer that arrives is held twice.

    One copy is in the buffer that was received, the other in the parameters.
    """
    for part in reversed([part for part in parts_of(job) if part.name.startswith("layer")]):
        yield Moment(f"{part.name} arrives", arrived, part.left + part.input_gradient, whole + 2 * layer, job.losses)
        whole += 0 if reshard else layer
    yield from (end.plus(G=arrived, comm=whole) for end in ends_of_forward(job))


def in_backward(job: Job, arrived: int, root: Group, layer: Group, reshard: bool) -> Iterator[Moment]:
    """Yield the bytes in backward, layer by layer. These parts are held whole:

    in a layer      its parameters; a buffer for those of the layer before it, which are being prefetched; the
                    gradients of the layer behind it, in a buffer that is sent and one that receives; its own
                    gradients, and the root's
    a layer ends    its parameters are freed, and its gradients are reduced; the layer behind it has its part now
    backward ends   the gradients of the root are reduced
    """
    parts, depth = parts_of(job), job.config.depth
    whole, roots, behind = root.gathered + (0 if reshard else depth * layer.gathered), 0, None
    kept, before = Moment("kept", arrived, temporary=2 * FLOAT + job.losses), parts[0].left
    for part in parts:
        in_layer, own = part.name.startswith("layer"), root.itemsize * sum(part.sizes)
        flying = 2 * behind.table if behind else 0
        if in_layer and reshard:
            again = replace(kept, name=f"{part.name} arrives again", A=before)
            yield again.plus(comm=whole + 2 * layer.gathered + flying + roots, temporary=part.input_gradient)
            whole += layer.gathered
        prefetched = layer.gathered if in_layer and reshard and part.name != "layer 0" else 0
        newest = root.itemsize * part.sizes[0] if in_layer or part is parts[-1] else 0
        for at in part.worst:
            last = newest if at.gradients == sum(part.sizes) else 0
            comm = whole + prefetched + flying + roots + root.itemsize * at.gradients - last + at.comm
            yield replace(kept, name=at.name, A=at.A).plus(comm=comm, temporary=at.temporary + last)
        before = part.left
        if part.shared:
            kept = kept.plus(temporary=own)
        elif not newest:
            roots += own
        else:
            whole -= layer.gathered if in_layer else whole
            ends, own = (prefetched + whole + roots, own) if in_layer else (0, own + roots)
            at = replace(kept, name=part.name, A=part.left).plus(comm=ends, temporary=part.input_gradient)
            new = behind.part if behind else {}
            yield at.plus(comm=flying + own - newest, temporary=newest).plus(**new)
            behind, kept = layer if in_layer else root, kept.plus(**new)
            yield from behind.reduced(at.plus(**new), own, newest)
    yield replace(kept, name="backward ends", A=parts[-1].left).plus(comm=2 * root.table).plus(**root.part)
