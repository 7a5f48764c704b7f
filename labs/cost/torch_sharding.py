"""PyTorch's own ZeRO: what a rank sends and holds in a step, in the layouts of `labs.native.zero1` and `.fsdp`.

    ZeroRedundancyOptimizer    whole parameters are dealt out to ranks, the largest first, each to the one with the
    with DDP                   fewest elements. DDP all-reduces all gradients; each rank steps its own parameters and
                               broadcasts them: 2 (N-1)/N Ψ, and (N-1) times its own, which is 3 (N-1)/N Ψ on average
    fully_shard                each parameter is cut along its first dim in N chunks, padded to the longest. A layer
                               is gathered at once. The root, which is the embedding, last norm and head, stays
                               gathered from forward to backward

Read in PyTorch 2.13 and 2.15: torch/distributed/optim/zero_redundancy_optimizer.py and .../fsdp/_fully_shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version

from labs.cost.data_parallel import buckets, ddp_held, ddp_sent
from labs.cost.fully_sharded import chunks_of, computed, fsdp, groups, rows
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    Held,
    Moment,
    Prediction,
    held,
    optimizer_state,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.saved_activations import Part
from labs.cost.split_activations import ends_of_forward, parts_of

Passes = tuple[Sequence[Moment], Sequence[Part]]

# Before PyTorch 2.15 fully_shard copied a layer from its buffer while the one before it still stood.
TWO_BUFFERS = tuple(map(int, version("torch").split(".")[:2])) < (2, 15)
# Since then it leaves gradients as they come, and norms, which compute in float32, have theirs in float32.
LONG_NORMS = not TWO_BUFFERS

# ---- ZeroRedundancyOptimizer with DDP --------------------------------------------------------------------


def zero_redundancy(job: Job) -> Prediction:
    """A step in float32 on CPU."""
    job.require("cost.zero_redundancy", precision=("float32",))
    sizes, ranks = parameter_sizes(job.config), job.ranks
    return Prediction(
        sent=zero_redundancy_sent(sizes, ranks, job.rank),
        collectives={"all_reduce": len(buckets(sizes, "torch")), "broadcast": len(sizes)},
        textbook=Fraction(FLOAT * 3 * (ranks - 1) * sum(sizes), ranks),
        held=ddp_held(job, "torch", stepped=dealt(sizes, ranks)[job.rank]),
    )


def zero_redundancy_sent(sizes: Sequence[int], ranks: int, rank: int = 0) -> int:
    """Bytes that `rank` sends in a step, for float32 parameters of these sizes, whatever the model."""
    return ddp_sent(sizes, ranks, "torch", rank) + FLOAT * (ranks - 1) * sum(dealt(sizes, ranks)[rank])


def dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Sizes of the parameters that each rank steps."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(hands, key=sum).append(size)
    return hands


# ---- fully_shard -----------------------------------------------------------------------------------------


def fully_shard(job: Job, reshard_after_forward: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> Prediction:
    """A step on CPU, at rest in float32; it sends what `cost.fsdp` says, whose settings it has."""
    job.require("cost.fully_shard", precision=("float32",), recompute=("none",))
    held = fully_shard_held(job, reshard_after_forward, replicas, itemsize)
    return replace(fsdp(job, reshard_after_forward, replicas, itemsize), held=held)


def fully_shard_held(
    job: Job, reshard_after_forward: bool = True, replicas: int = 1, itemsize: int = FLOAT, passes: Passes | None = None
) -> Held:
    """P, S and G are the rank's shards; padding counts for P and G, and not for S.

    passes: what there is at the end of forward, and as backward passes through the parts, where it is another model's.
    """
    (root, layers), ranks = groups(job.config), job.ranks // replicas
    padded = [sum(rows(shape, ranks) for shape in group.trained) for group in (root, *layers)]
    chunks = chunks_of(job, ranks)
    shards = FLOAT * sum(padded) // ranks
    own = computed(job, itemsize)
    passes = passes or ([*ends_of_forward(own)], parts_of(own))
    moments = fully_shard_moments(own, passes, padded[0], padded[-1], reshard_after_forward, ranks, itemsize)
    step = optimizer_step(passes[1][-1].left, shards, 0, chunks).plus(temporary=job.losses)
    most = held(shards, optimizer_state(chunks), [*moments, step])
    mesh = FLOAT * job.ranks  # the ranks' numbers
    return replace(most, temporary=most.temporary + mesh, peak=most.peak + mesh)


def fully_shard_moments(
    job: Job, passes: Passes, root: int, layer: int, reshard: bool, ranks: int, itemsize: int
) -> Iterator[Moment]:
    """Bytes besides P and S, from the end of forward on; all that is whole counts as `comm`.

        forward ends    the root gathered; layers, unless resharded; the buffer from which the last one was copied
        in a layer      it is gathered, and the one before it already on its way in a buffer; of the one behind it,
                        what was reduced; the gradients of its own parameters, and of the root's
        a layer ends    it is dropped; its gradients are copied side by side to be reduced

    root, layer: elements of each with padding.
    """
    depth, first, table = job.config.depth, job.accumulation == 1, FLOAT * layer
    parts, arrived = passes[1], 0 if first else (FLOAT * root + depth * table) // ranks
    root, layer = itemsize * root, itemsize * layer
    whole, gradients, reduced, pending = root + (0 if reshard else depth * layer), 0, 0, 2 * FLOAT + job.losses
    for moment in forward_moments(job, passes, root, layer, reshard):
        yield moment.plus(G=arrived)
    for number, part in enumerate(parts):
        in_layer, prefetched = part.name.startswith("layer"), layer if reshard and number < 2 + depth else 0
        comm = whole + prefetched + reduced + gradients + (layer if in_layer and reshard else 0)
        if in_layer and reshard:
            besides = dict(G=arrived, A=parts[number - 1].left, temporary=part.handed_on + pending)
            yield Moment(f"gather {part.name} again", comm=whole + reduced + gradients + 2 * layer, **besides)
        norms = {"norm": 1, "layer": 2}.get(part.name.split()[0], 0)
        longer = norms * LONG_NORMS * (FLOAT - itemsize) * job.config.dim
        for at in part.worst:
            made = itemsize * at.gradients + (longer if at.gradients == sum(part.sizes) else 0) + at.comm
            yield Moment(at.name, G=arrived, A=at.A, comm=comm + made, temporary=at.temporary + pending)
        own = itemsize * sum(part.sizes) + longer
        if in_layer:
            whole -= 0 if reshard else layer
            comm = whole + prefetched + gradients + own + table
            yield Moment(part.name, G=arrived, A=part.left, comm=comm, temporary=part.handed_on + pending)
            arrived, reduced = arrived + first * table // ranks, table
        elif part.shared:
            pending += own
        else:
            gradients += own


def forward_moments(job: Job, passes: Passes, root: int, layer: int, reshard: bool) -> Iterator[Moment]:
    """Each layer arrives in a buffer, and is copied from there; see TWO_BUFFERS for the one before it."""
    ends, parts = passes
    before, whole = root * TWO_BUFFERS, root
    for part in [part for part in parts if part.name.startswith("layer")][::-1]:
        whole += layer
        A = part.left + part.handed_on
        yield Moment(f"gather {part.name}", A=A, comm=whole + before + layer, temporary=job.losses)
        before = layer * TWO_BUFFERS
        whole -= layer if reshard else 0
    yield from (end.plus(comm=whole + layer) for end in ends)
