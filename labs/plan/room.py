"""Bytes that a layout holds, by kind, on the rank that holds the most.

    held(setup, layout)                 Held: P, G, S, A, comm, temporary, peak
    held_by(setup, layout, rank=0)      the same for one rank of the pipeline

P, G, S    `cost.bytes_held` of the rank's layers, embedding and head, in the precision that the constants name
A          `cost.regathered_activations` of a layer, for each stage that `cost.stages_alive` counts
comm       under stage 3 of ZeRO, two gathered layers: the one at work and the next; under stage 2, the gradients of
           the largest part of the model before they are reduced; with tensor parallelism, the whole input of a split
           layer and its gradient
           Experts are sharded over the ranks that have copies of them; along cp, a rank has a part of each sequence.
temporary  a layer that is recomputed, or logits with their gradient; and a constant reserve
"""

from functools import lru_cache

from labs import cost
from labs.plan import sparse
from labs.plan.layer_split import split_layers
from labs.plan.layout import Layout, Setup
from labs.plan.sparse import SparseConfig

ONCE, ADDED_UP = "mixed", "mixed, float32 gradients"  # ONCE: a single micro-batch without shards adds up no gradients
WEIGHT, GRADIENT = 2, 4  # bytes
CROSSING = 2  # whole tensors while a split layer is at work: its input, and the gradient of its input
GATHERED = 2  # gathered layers: the one at work, and the next


def held(setup: Setup, layout: Layout) -> cost.HeldBytes:
    """Return the bytes that the fullest rank holds, by kind."""
    ranks = unlike(setup, layout.pp, layout.schedule, layout.stages_per_rank)
    return max((held_by(setup, layout, rank) for rank in ranks), key=lambda each: each.peak)


def peak(setup: Setup, layout: Layout) -> int:
    """Return the bytes on the fullest rank."""
    return max(
        sum(kinds(setup, layout, rank)) for rank in unlike(setup, layout.pp, layout.schedule, layout.stages_per_rank)
    )


def held_by(setup: Setup, layout: Layout, rank: int) -> cost.HeldBytes:
    by_kind = kinds(setup, layout, rank)
    return cost.HeldBytes(*by_kind, peak=sum(by_kind))


@lru_cache(1 << 12)
def unlike(setup: Setup, pp: int, schedule: str, stages: int) -> list[int]:
    """Return ranks of which one is the fullest: among ranks with equal parts of the model, the first has most alive."""
    layers, head_at = split_layers(setup.config, pp, schedule, stages)
    first = {(layers[rank], rank == 0, rank == head_at): rank for rank in reversed(range(pp))}
    return sorted(first.values())


def kinds(setup: Setup, layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the bytes of P, G, S, A, comm and temporary."""
    tp, sp, pp, schedule, stages, replicas, shards, zero, batch, m, recompute, cp, ep = layout
    ranks = replicas * shards * cp * tp  # of a stage
    shards, copies = (shards * cp, max(1, ranks // ep // replicas)) if zero else (1, 1)
    P, G, S, gathered = state(setup, tp, pp, schedule, stages, zero, shards, copies, ep, zero == 0 and m == 1, rank)
    A, crossing, temporary = passing(setup, tp, sp, pp, schedule, stages, batch, m, recompute, cp, rank)
    return P, G, S, A, gathered + crossing, temporary


@lru_cache(1 << 16)
def state(
    setup: Setup,
    tp: int,
    pp: int,
    schedule: str,
    stages: int,
    zero: int,
    shards: int,
    copies: int,
    ep: int,
    once: bool,
    rank: int,
) -> tuple[int, int, int, int]:
    """Return the bytes of P, G and S, and of the parameters or gradients that are whole for a moment.

    copies: ranks among which the state of a rank's experts is sharded.
    """
    precision = setup.constants.precision
    precision = ONCE if once and precision == ADDED_UP else precision
    held = (
        cost.bytes_held(parameters(setup, tp, pp, schedule, stages, rank), shards, zero, precision),
        cost.bytes_held(experts(setup, pp, schedule, stages, ep, rank), copies, zero, precision),
    )
    one = sparse.expert_matrices(setup.config) / ep
    layer = (sparse.layer_matrices(setup.config) - sparse.expert_matrices(setup.config)) / tp + one
    table = setup.config.vocab * setup.config.dim / tp
    whole = {2: GRADIENT * max(layer, table), 3: GATHERED * WEIGHT * layer}.get(zero, 0)
    P, G, S = (round(sum(each[kind] for each in held)) for kind in "PGS")
    return P, G, S, int(whole)


@lru_cache(1 << 16)
def parameters(setup: Setup, tp: int, pp: int, schedule: str, stages: int, rank: int) -> int:
    """Return the number of parameters of a rank's layers, embedding and head, without experts."""
    layers, head_at = split_layers(setup.config, pp, schedule, stages)
    table = setup.config.vocab * setup.config.dim
    tables = (rank == 0) + (rank == head_at and not (setup.config.tied and head_at == 0))
    layer = sparse.layer_matrices(setup.config) - sparse.expert_matrices(setup.config)
    return int((layers[rank] * layer + tables * table) // tp)


@lru_cache(1 << 16)
def experts(setup: Setup, pp: int, schedule: str, stages: int, ep: int, rank: int) -> int:
    """Return the number of parameters of the experts in a rank's layers."""
    layers, _ = split_layers(setup.config, pp, schedule, stages)
    return int(layers[rank] * sparse.expert_matrices(setup.config) // ep)


@lru_cache(1 << 16)
def passing(
    setup: Setup,
    tp: int,
    sp: bool,
    pp: int,
    schedule: str,
    stages: int,
    batch: int,
    m: int,
    recompute: str,
    cp: int,
    rank: int,
) -> tuple[int, int, int]:
    """Return the bytes of activations that wait for backward, of whole inputs of a split layer, and of temporaries."""
    k, (layers, head_at) = setup.constants, split_layers(setup.config, pp, schedule, stages)
    alive = cost.stages_alive(schedule, pp, rank, m, stages) / stages
    A = k.slack * layers[rank] * alive * kept(setup, tp, sp, batch, recompute, cp)
    again = k.slack * kept(setup, tp, sp, batch, "none", cp) if recompute != "none" else 0
    tokens = batch * setup.context // cp
    logits = k.logit * tokens * setup.config.vocab // tp if rank == head_at else 0
    crossing = CROSSING * WEIGHT * tokens * setup.config.dim if tp > 1 else 0
    return round(A), crossing, round(max(again, logits) + k.reserve)


@lru_cache(4096)
def kept(setup: Setup, tp: int, sp: bool, batch: int, recompute: str, cp: int = 1) -> int:
    """Return the bytes that a layer keeps of one micro-batch for backward."""
    if isinstance(setup.config, SparseConfig):
        return int(sparse.kept(setup.config, batch * setup.context // cp, recompute) // (tp if sp else 1))
    config = cost.share(setup.config, tp, 0, sp) if tp > 1 else setup.config
    job = cost.Job(config, batch, context=setup.context // cp, precision=ONCE, fused_norms=True)
    return cost.regathered_activations(job, recompute)
