"""The time of a step of a layout, by what it is spent on.

    seconds(setup, layout)        Step: compute, launch, tensor, pipeline, bubble, data, rest: their sum is .seconds

compute    matrix products and all other operators of the busiest rank, with recomputation
launch     the time by which Python's launches take longer than the GPU
tensor     messages inside of a layer, as far as computation does not hide them: the collectives of tensor parallelism,
           keys and values that go round along cp, and tokens that go to their experts and come back along ep
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
from labs.plan import sparse
from labs.plan.layer_split import split_layers
from labs.plan.layout import Layout, Setup
from labs.plan.room import experts, kept, parameters, unlike

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
    tp, sp, pp, schedule, stages, replicas, shards, zero, batch, m, recompute, cp, ep = layout
    once = zero == 0 and m == 1
    ranks = on_ranks(setup, tp, sp, pp, schedule, stages, batch, m, recompute, once, cp, ep)
    data, rest = between_replicas(
        setup, tp, pp, schedule, stages, replicas, shards, zero, m, once, cp, ep, ranks.compute
    )
    return Step(*ranks, data, rest)


class OnRanks(NamedTuple):
    compute: float
    launch: float
    tensor: float
    pipeline: float
    bubble: float


@lru_cache(1 << 16)
def on_ranks(
    setup: Setup,
    tp: int,
    sp: bool,
    pp: int,
    schedule: str,
    stages: int,
    batch: int,
    m: int,
    recompute: str,
    once: bool,
    cp: int,
    ep: int,
) -> OnRanks:
    layer = layer_seconds(setup, tp, sp, pp, batch, recompute, once, cp, ep)
    head = head_seconds(setup, tp, batch, once, cp)
    layers, head_at = split_layers(setup.config, pp, schedule, stages)
    takes = [n * layer.seconds + head * (rank == head_at) for rank, n in enumerate(layers)]
    busiest = takes.index(max(takes))
    compute, launch, tensor = (m * layers[busiest] * each for each in layer)
    compute += m * head * (busiest == head_at)
    bubble = cost.bubble_seconds(schedule, sum(takes) - takes[busiest], stages)
    return OnRanks(compute, launch, tensor, fill_seconds(setup, tp, sp, pp, batch, cp), bubble)


class OfLayer(NamedTuple):
    compute: float
    launch: float
    tensor: float

    @property
    def seconds(self) -> float:
        return sum(self)


@lru_cache(1 << 14)
def layer_seconds(
    setup: Setup, tp: int, sp: bool, pp: int, batch: int, recompute: str, once: bool, cp: int, ep: int
) -> OfLayer:
    """Return the seconds of one layer and one micro-batch, forward and backward."""
    k, cluster, config, tokens = setup.constants, setup.cluster, setup.config, batch * setup.context / cp
    attention = sparse.attention_operations(config, setup.context) * (4 / 3 if recompute == "full" else 1)
    chosen = sparse.active_experts(config)
    every = sparse.layer_matrices(config) - sparse.expert_matrices(config)
    numbers = every + chosen / k.grouped  # experts' products reach only a part of what large products do
    operations = (8 if recompute in AGAIN else 6) * numbers
    passes = k.passes * (1 if recompute == "none" else 4 / 3)
    moved = passes * kept(setup, tp, sp, batch, "none", cp)
    moved += weights_moved(once) * (every / tp + sparse.expert_matrices(config) / ep)
    rate = k.matmul * (k.eight if setup.bits == 8 else 1)
    compute = tokens / tp * (operations / rate + attention / k.attention) / cluster.sustained
    compute += moved / cluster.memory
    tensor = k.exposed * crossing_seconds(setup, tp, batch, 6 if recompute in AGAIN else 4, cp) if tp > 1 else 0.0
    hides = tokens / tp * attention / k.attention / cluster.sustained
    tensor += max(0.0, circling_seconds(setup, tp, batch, cp) - hides) if cp > 1 else 0.0
    tensor += k.exchanged * exchange_seconds(setup, tp, batch, cp, ep) if ep > 1 else 0.0
    launch = k.launch + (k.tangle * tp if tp > 1 and pp > 1 and cluster.nodes > 1 else 0.0)
    return OfLayer(compute, max(0.0, launch - compute - tensor), tensor)


def crossing_seconds(setup: Setup, tp: int, batch: int, times: int, cp: int = 1) -> float:
    """Return the seconds of `times` all-reduces of x, or of the gathers and scatters that replace them."""
    link, x = link_between(setup, tp, 1, setup.constants.outer), WEIGHT * batch * setup.context / cp * setup.config.dim
    return times * (link.begin + cost.ring_seconds(x, tp, link.latency, link.bandwidth))


def circling_seconds(setup: Setup, tp: int, batch: int, cp: int) -> float:
    """Return the seconds in which keys and values go round: once in forward, and in backward with their gradients."""
    link, config = link_between(setup, cp, tp, setup.constants.outer), setup.config
    both = 2 * WEIGHT * batch * setup.context / cp * config.kv_heads * config.head_size / tp
    return 3 * (cp - 1) * (link.begin + link.latency + both / link.bandwidth)


def exchange_seconds(setup: Setup, tp: int, batch: int, cp: int, ep: int) -> float:
    """Return the seconds of a layer's all-to-alls: a token's row goes to its experts and back, twice.

    Rows for experts on other nodes leave through the rank's own link; the others stay on the node.
    """
    cluster, config = setup.cluster, setup.config
    local = cluster.local(ep, 1)
    rows = sparse.active_experts(config) / (3 * config.dim * config.expert_hidden)
    sent = 4 * WEIGHT * batch * setup.context / cp / tp * rows * config.dim
    between = cluster.between * setup.constants.outer
    return sent * ((local - 1) / ep / cluster.inside + (ep - local) / ep / between)


@lru_cache(1 << 12)
def head_seconds(setup: Setup, tp: int, batch: int, once: bool, cp: int = 1) -> float:
    k, cluster, config, tokens = setup.constants, setup.cluster, setup.config, batch * setup.context / cp
    operations = cost.head_operations(config) * tokens / tp
    moved = LOGIT * tokens * config.vocab / tp + weights_moved(once) * config.vocab * config.dim / tp
    return operations / (k.matmul * cluster.sustained) + moved / cluster.memory


def weights_moved(once: bool) -> int:
    return 2 * WEIGHT if once else ACCUMULATE


def fill_seconds(setup: Setup, tp: int, sp: bool, pp: int, batch: int, cp: int = 1) -> float:
    """Return the seconds in which x crosses each cut once, and its gradient once."""
    if pp == 1:
        return 0.0
    x = WEIGHT * batch * setup.context / cp * setup.config.dim / (tp if sp else 1)
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
    cp: int,
    ep: int,
    compute: float,
) -> tuple[float, float]:
    """Return the seconds of data parallelism's exposed communication, and of the optimizer's step with the rest."""
    k, cluster = setup.constants, setup.cluster
    ranks = unlike(setup, pp, schedule, stages)
    n = max(parameters(setup, tp, pp, schedule, stages, rank) for rank in ranks)
    theirs = max(experts(setup, pp, schedule, stages, ep, rank) for rank in ranks)
    copies = max(1, replicas * shards * cp * tp // ep)  # ranks with the same experts
    replicas, shards = (replicas * cp, 1) if zero == 0 else (replicas, shards * cp)
    apart = max(1, copies // replicas) if zero else 1
    rest = OPTIMIZER * (n / shards + theirs / apart) / cluster.memory + k.step
    n += theirs * (1 - 1 / copies)  # what is not sent for the experts is not counted
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
