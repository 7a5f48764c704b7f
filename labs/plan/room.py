"""What a layout holds, in bytes by kind, on the rank that holds the most.

    held(setup, layout)                 Held: P, G, S, A, comm, temporary, peak
    held_by(setup, layout, rank=0)      of a rank of the pipeline

P, G, S    `cost.bytes_held`, of the rank's layers, embedding and head: 2, 4 and 12 bytes, as Megatron-LM has them
A          `cost.regathered_activations` of a layer, for each stage that `cost.stages_alive` counts
comm       layers that stage 3 of ZeRO has gathered: the one at work and the next
temporary  a layer that is computed again, or logits with their gradient; and what is always taken
"""

from functools import lru_cache

from labs import cost
from labs.plan.candidates import Layout, Setup
from labs.plan.dealt import dealt

PRECISION = "mixed, float32 gradients"
ONCE = "mixed"  # a single micro-batch without shards needs nothing to add gradients up in


def held(setup: Setup, layout: Layout) -> cost.Held:
    """Of the fullest rank: the first has most micro-batches alive, the one with the head its logits."""
    _, head_at = dealt(setup.config, layout.pp, layout.schedule, layout.stages_per_rank)
    return max((held_by(setup, layout, rank) for rank in {0, head_at}), key=lambda each: each.peak)


def peak(setup: Setup, layout: Layout) -> int:
    """Bytes on the fullest rank: `held`, for a search that has no time for kinds."""
    tp, sp, pp, schedule, stages, _, shards, zero, batch, m, recompute = layout
    _, head_at = dealt(setup.config, pp, schedule, stages)
    most, once = 0, zero == 0 and m == 1
    for rank in (0, head_at) if head_at else (0,):
        at_rest = state(setup, tp, pp, schedule, stages, zero, shards, once, rank)
        most = max(most, sum(at_rest) + sum(passing(setup, tp, sp, pp, schedule, stages, batch, m, recompute, rank)))
    return most


def held_by(setup: Setup, layout: Layout, rank: int) -> cost.Held:
    tp, sp, pp, schedule, stages, _, shards, zero, batch, m, recompute = layout
    P, G, S, gathered = state(setup, tp, pp, schedule, stages, zero, shards, zero == 0 and m == 1, rank)
    A, temporary = passing(setup, tp, sp, pp, schedule, stages, batch, m, recompute, rank)
    return cost.Held(P, G, S, A, gathered, temporary, P + G + S + A + gathered + temporary)


@lru_cache(1 << 16)
def state(setup: Setup, tp: int, pp: int, schedule: str, stages: int, zero: int, shards: int, once: bool, rank: int):
    """P, G, S, and what is gathered."""
    n = parameters(setup, tp, pp, schedule, stages, rank)
    pie = cost.bytes_held(n, shards, zero, ONCE if once else PRECISION)
    gathered = 2 * 2 * cost.layer_matrices(setup.config) // tp if zero == 3 else 0
    return round(pie["P"]), round(pie["G"]), round(pie["S"]), gathered


@lru_cache(1 << 16)
def parameters(setup: Setup, tp: int, pp: int, schedule: str, stages: int, rank: int) -> int:
    """Of a rank's layers, embedding and head."""
    layers, head_at = dealt(setup.config, pp, schedule, stages)
    table = setup.config.vocab * setup.config.dim
    tables = (rank == 0) + (rank == head_at and not (setup.config.tied and head_at == 0))
    return (layers[rank] * cost.layer_matrices(setup.config) + tables * table) // tp


@lru_cache(1 << 16)
def passing(
    setup: Setup, tp: int, sp: bool, pp: int, schedule: str, stages: int, batch: int, m: int, recompute: str, rank: int
) -> tuple[int, int]:
    """Activations that wait for their backward, and what a rank holds for a moment."""
    k, (layers, head_at) = setup.constants, dealt(setup.config, pp, schedule, stages)
    alive = cost.stages_alive(schedule, pp, rank, m, stages) / stages
    A = k.slack * layers[rank] * alive * kept(setup, tp, sp, batch, recompute)
    again = k.slack * kept(setup, tp, sp, batch, "none") if recompute != "none" else 0
    logits = k.logit * batch * setup.context * setup.config.vocab // tp if rank == head_at else 0
    return round(A), round(max(again, logits) + k.reserve)


@lru_cache(4096)
def kept(setup: Setup, tp: int, sp: bool, batch: int, recompute: str) -> int:
    """Bytes of a layer and a micro-batch."""
    config = cost.share(setup.config, tp, 0, sp) if tp > 1 else setup.config
    job = cost.Job(config, batch, context=setup.context, precision=PRECISION, fused_norms=True)
    return cost.regathered_activations(job, recompute)
