"""The time of a step of a layout, by what it is spent on.

    seconds(setup, layout)        Step: compute, launch, tensor, pipeline, bubble, data, rest: their sum is .seconds

compute    matrix products and all other operators of the busiest rank, with recomputation
launch     the time by which Python's launches take longer than the GPU
tensor     tensor parallelism's collectives, as far as computation does not hide them
pipeline   messages between stages while the pipeline fills and drains
bubble     the time in which the busiest rank waits for the others meanwhile: `cost.bubble_seconds`
data       collectives of gradients and parameters, as far as computation does not hide them
rest       the optimizer's step, and a constant time per step

Bytes and operations are those of `labs.cost`, and links those of the cluster.  `constants` has the fractions of both
that are reached.
"""

from functools import lru_cache
from typing import NamedTuple

from labs import cost
from labs.plan.layer_split import split_layers
from labs.plan.layout import Layout, Setup
from labs.plan.room import kept, parameters, unlike

WEIGHT, GRADIENT = 2, 4  # bytes
ACCUMULATE = 2 + 2 + GRADIENT + GRADIENT  # bytes: write a gradient, read it, read and write the sum
OPTIMIZER = GRADIENT + 2 * 12 + WEIGHT + GRADIENT  # bytes: gradient, state, weight; the gradient again for its norm
LOGIT = 2 + 3 * 4  # bytes: 16 bits; float32, its logarithm and its gradient
AGAIN = ("all but attention", "full")  # kinds of recomputation that include matrix products
BACKWARD = 2 / 3  # the fraction of operations that backward has
BUCKET = 25 * cost.MiB  # bytes of gradients in one collective


class Step(NamedTuple):
    """The seconds of a step, by what they are spent on."""

    compute: float
    launch: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    rest: float

    @property
    def seconds(self) -> float:
        return sum(self)

    @property
    def communication(self) -> float:
        return self.tensor + self.pipeline + self.data


def seconds(setup: Setup, layout: Layout) -> Step:
    tp, sp, pp, schedule, stages, replicas, shards, zero, batch, m, recompute = layout
    once = zero == 0 and m == 1
    ranks = on_ranks(setup, tp, sp, pp, schedule, stages, batch, m, recompute, once)
    data, rest = between_replicas(setup, tp, pp, schedule, stages, replicas, shards, zero, m, once, ranks.compute)
    return Step(*ranks, data, rest)


class OnRanks(NamedTuple):
    compute: float
    launch: float
    tensor: float
    pipeline: float
    bubble: float


@lru_cache(1 << 16)
def on_ranks(
    setup: Setup, tp: int, sp: bool, pp: int, schedule: str, stages: int, batch: int, m: int, recompute: str, once: bool
) -> OnRanks:
    layer, head = layer_seconds(setup, tp, sp, pp, batch, recompute, once), head_seconds(setup, tp, batch, once)
    layers, head_at = split_layers(setup.config, pp, schedule, stages)
    takes = [n * layer.seconds + head * (rank == head_at) for rank, n in enumerate(layers)]
    busiest = takes.index(max(takes))
    compute, launch, tensor = (m * layers[busiest] * each for each in layer)
    compute += m * head * (busiest == head_at)
    bubble = cost.bubble_seconds(schedule, sum(takes) - takes[busiest], stages)
    return OnRanks(compute, launch, tensor, fill_seconds(setup, tp, sp, pp, batch), bubble)


class OfLayer(NamedTuple):
    compute: float
    launch: float
    tensor: float

    @property
    def seconds(self) -> float:
        return sum(self)


@lru_cache(1 << 14)
def layer_seconds(setup: Setup, tp: int, sp: bool, pp: int, batch: int, recompute: str, once: bool) -> OfLayer:
    """Return the seconds of one layer and one micro-batch, forward and backward."""
    k, cluster, config, tokens = setup.constants, setup.cluster, setup.config, batch * setup.context
    attention = cost.attention_operations(config, setup.context) * (4 / 3 if recompute == "full" else 1)
    operations = cost.layer_operations(config, setup.context) - cost.attention_operations(config, setup.context)
    operations += cost.recomputed_operations(config, setup.context, "all but attention") * (recompute in AGAIN)
    passes = k.passes * (1 if recompute == "none" else 4 / 3)
    moved = passes * kept(setup, tp, sp, batch, "none") + weights_moved(once) * cost.layer_matrices(config) / tp
    compute = tokens / tp * (float(operations) / k.matmul + attention / k.attention) / cluster.sustained
    compute += moved / cluster.memory
    tensor = k.exposed * crossing_seconds(setup, tp, batch, 6 if recompute in AGAIN else 4) if tp > 1 else 0.0
    launch = k.launch + (k.tangle * tp if tp > 1 and pp > 1 and cluster.nodes > 1 else 0.0)
    return OfLayer(compute, max(0.0, launch - compute - tensor), tensor)


def crossing_seconds(setup: Setup, tp: int, batch: int, times: int) -> float:
    """Return the seconds of `times` all-reduces of x, or of the gathers and scatters that replace them."""
    link, x = link_between(setup, tp, 1, setup.constants.outer), WEIGHT * batch * setup.context * setup.config.dim
    return times * (link.begin + cost.ring_seconds(x, tp, link.latency, link.bandwidth))


@lru_cache(1 << 12)
def head_seconds(setup: Setup, tp: int, batch: int, once: bool) -> float:
    k, cluster, config, tokens = setup.constants, setup.cluster, setup.config, batch * setup.context
    operations = cost.head_operations(config) * tokens / tp
    moved = LOGIT * tokens * config.vocab / tp + weights_moved(once) * config.vocab * config.dim / tp
    return operations / (k.matmul * cluster.sustained) + moved / cluster.memory


def weights_moved(once: bool) -> int:
    return 2 * WEIGHT if once else ACCUMULATE


def fill_seconds(setup: Setup, tp: int, sp: bool, pp: int, batch: int) -> float:
    """Return the seconds in which x crosses each cut once, and its gradient once."""
    if pp == 1:
        return 0.0
    x = WEIGHT * batch * setup.context * setup.config.dim / (tp if sp else 1)
    link = link_between(setup, pp, setup.cluster.gpus // pp)
    return 2 * (pp - 1) * (link.latency + x / link.bandwidth)


@lru_cache(1 << 16)
def between_replicas(
    setup: Setup,
    tp: int,
    pp: int,
    schedule: str,
    stages: int,
    replicas: int,
    shards: int,
    zero: int,
    m: int,
    once: bool,
    compute: float,
) -> tuple[float, float]:
    """Return the seconds of data parallelism's exposed communication, and of the optimizer's step with the rest."""
    k, cluster = setup.constants, setup.cluster
    n = max(parameters(setup, tp, pp, schedule, stages, rank) for rank in unlike(setup, pp, schedule, stages))
    rest = OPTIMIZER * n / shards / cluster.memory + k.step
    if replicas * shards == 1:
        return 0.0, rest
    backward = BACKWARD * compute / m
    if zero == 0:
        travels = reduce_seconds(setup, n, replicas, tp, WEIGHT if once else GRADIENT)
        return max(0.0, travels - k.hidden * backward), rest
    layers = max(1, setup.config.depth // pp) if zero == 3 else 0  # gathered one by one
    scatter, gather = (sharded_seconds(setup, bytes * n, shards, tp, layers) for bytes in (GRADIENT, WEIGHT))
    if zero < 3:
        times = m if zero == 2 else 1
        return times * max(0.0, scatter - k.ahead * backward) + gather, rest
    travels = scatter + 2 * gather
    if replicas > 1:
        travels += reduce_seconds(setup, n / shards, replicas, tp * shards, GRADIENT)
    return max(0.0, m * travels - k.prefetched * compute), rest


@lru_cache(1 << 12)
def link_between(setup: Setup, ranks: int, stride: int, reached: float = 1.0) -> cost.LinkClass:
    return setup.cluster.link(ranks, stride, reached)


def reduce_seconds(setup: Setup, n: float, ranks: int, stride: int, itemsize: int) -> float:
    """Return the seconds of all-reduces of buckets on a ring."""
    return ring_seconds(setup, itemsize * n, ranks, stride, 2)


def sharded_seconds(setup: Setup, size: float, ranks: int, stride: int, units: float = 0) -> float:
    """Return the seconds of reduce-scatters or all-gathers, half of an all-reduce, of buckets or of `units` pieces."""
    return ring_seconds(setup, size, ranks, stride, 1, units)


@lru_cache(1 << 16)
def ring_seconds(setup: Setup, size: float, ranks: int, stride: int, rounds: int, units: float = 0) -> float:
    link = link_between(setup, ranks, stride, setup.constants.outer)
    units = units or max(1.0, size / BUCKET)
    all_reduce = cost.ring_seconds(size, ranks, units * link.latency, link.bandwidth)
    return units * link.begin + all_reduce * rounds / 2
