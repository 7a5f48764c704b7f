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
from itertools import chain
from math import prod

from labs.cost.autograd import backward
from labs.cost.collectives import all_gather, reduce_scatter
from labs.cost.data_parallel import buckets, ddp_held, ddp_sent
from labs.cost.job import Job
from labs.cost.memory import (
    FLOAT,
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

# Before PyTorch 2.15 fully_shard copied a layer from its buffer while the one before it still stood.
TWO_BUFFERS = tuple(map(int, version("torch").split(".")[:2])) < (2, 15)

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


def fully_shard(job: Job, reshard_after_forward: bool = True) -> Prediction:
    """A step in float32 on CPU."""
    job.require("cost.fully_shard", precision=("float32",), recompute=("none",))
    root, layers = groups(job.config)
    gathers = job.accumulation * (1 + len(layers) * (1 + reshard_after_forward))
    times = job.accumulation * (3 if reshard_after_forward else 2)
    return Prediction(
        sent=fully_shard_sent(root, layers, job.ranks, reshard_after_forward, job.accumulation),
        collectives={"all_gather": gathers, "reduce_scatter": job.accumulation * (1 + len(layers))},
        textbook=Fraction(FLOAT * times * (job.ranks - 1) * sum(parameter_sizes(job.config)), job.ranks),
        held=fully_shard_held(job, reshard_after_forward),
    )


def groups(config) -> tuple[Layer, list[Layer]]:
    """The root and the layers of a GPT, each gathered at once."""
    embedding, *others = gpt_layers(config)
    layers, rest = others[: config.depth], others[config.depth :]
    return Layer(tuple(chain(embedding.trained, *(layer.trained for layer in rest)))), layers


def fully_shard_sent(
    root: Layer, layers: Sequence[Layer], ranks: int, reshard_after_forward: bool = True, accumulation: int = 1
) -> int:
    """Bytes that each rank sends in a step, for float32 parameters of these shapes, whatever the model."""
    sent = 0
    for number, group in enumerate((root, *layers)):
        trained, frozen = (sum(rows(shape, ranks) for shape in shapes) for shapes in (group.trained, group.frozen))
        gathers = 2 if number and reshard_after_forward else 1
        sent += gathers * all_gather(trained + frozen, ranks).elements + reduce_scatter(trained, ranks).elements
    return FLOAT * accumulation * sent


def rows(shape: Shape, ranks: int) -> int:
    """Elements of a parameter whose first dim is padded to N equal chunks."""
    first, *others = shape
    return -(-first // ranks) * ranks * prod(others)


def chunk(shape: Shape, ranks: int, rank: int) -> int:
    """Elements of a rank's chunk, without the padding; the last ranks may have none."""
    first, *others = shape
    longest = -(-first // ranks)
    return max(0, min(longest, first - rank * longest)) * prod(others)


def fully_shard_held(job: Job, reshard_after_forward: bool = True) -> Held:
    """P, S and G are the rank's shards; padding counts for P and G, and not for S."""
    (root, layers), ranks = groups(job.config), job.ranks
    padded = [sum(rows(shape, ranks) for shape in group.trained) for group in (root, *layers)]
    chunks = [chunk(shape, ranks, job.rank) for group in gpt_layers(job.config) for shape in group.trained]
    shards = FLOAT * sum(padded) // ranks
    moments = fully_shard_moments(job, FLOAT * padded[0], FLOAT * padded[-1], reshard_after_forward)
    step = optimizer_step(backward(job)[-1].left, shards, 0, chunks).plus(temporary=job.losses)
    most = held(shards, optimizer_state(chunks), [*moments, step])
    mesh = FLOAT * ranks  # the ranks' numbers
    return replace(most, temporary=most.temporary + mesh, peak=most.peak + mesh)


def fully_shard_moments(job: Job, root: int, layer: int, reshard: bool) -> Iterator[Moment]:
    """Bytes beside P and S, from the end of forward on; all that is whole counts as `comm`.

        forward ends    the root gathered; layers, unless resharded; the buffer from which the last one was copied
        in a layer      it is gathered, and the one before it already on its way in a buffer; of the one behind it,
                        what was reduced; the gradients of its own parameters, and of the root's
        a layer ends    it is dropped; its gradients are copied side by side to be reduced

    root, layer: bytes of each when it is gathered.
    """
    parts, depth, ranks, first = backward(job), job.config.depth, job.ranks, job.accumulation == 1
    arrived = 0 if first else (root + depth * layer) // ranks
    whole, gradients, reduced, pending = root + (0 if reshard else depth * layer), 0, 0, 2 * FLOAT + job.losses
    yield from forward_moments(job, root, layer, reshard, arrived)
    for number, part in enumerate(parts):
        in_layer, prefetched = part.name.startswith("layer"), layer if reshard and number < 2 + depth else 0
        comm = whole + prefetched + reduced + gradients + (layer if in_layer and reshard else 0)
        if in_layer and reshard:
            besides = dict(G=arrived, A=parts[number - 1].left, temporary=part.handed_on + pending)
            yield Moment(f"gather {part.name} again", comm=whole + reduced + gradients + 2 * layer, **besides)
        for at in part.worst:
            yield Moment(at.name, G=arrived, A=at.A, comm=comm + FLOAT * at.gradients, temporary=at.temporary + pending)
        own = FLOAT * sum(part.sizes)
        if in_layer:
            whole -= 0 if reshard else layer
            comm = whole + prefetched + gradients + own + layer
            yield Moment(part.name, G=arrived, A=part.left, comm=comm, temporary=part.handed_on + pending)
            arrived, reduced = arrived + first * layer // ranks, layer
        elif part.shared:
            pending += own
        else:
            gradients += own


def forward_moments(job: Job, root: int, layer: int, reshard: bool, arrived: int) -> Iterator[Moment]:
    """Each layer arrives in a buffer, and is copied from there; see TWO_BUFFERS for the one before it."""
    parts = backward(job)
    loss, layers = parts[0].worst[0], [part for part in parts if part.name.startswith("layer")][::-1]
    before, whole = root * TWO_BUFFERS, root
    for part in layers:
        whole += layer
        A = part.left + part.handed_on
        yield Moment(f"gather {part.name}", G=arrived, A=A, comm=whole + before + layer, temporary=job.losses)
        before = layer * TWO_BUFFERS
        whole -= layer if reshard else 0
    temporary = loss.temporary // 2 + FLOAT + job.losses
    yield Moment("forward", G=arrived, A=loss.A + FLOAT, comm=whole + layer, temporary=temporary)
