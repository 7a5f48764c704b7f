"""The layers dealt out to the ranks of a pipeline, so that all have about as much to do.

    dealt(config, context, pp=4)        [6, 5, 5, 0]: how many layers each rank has; the head is the last one's

All stages have as many layers, as Megatron-LM has it, or each ends where its share of the work is reached, as nanotron
has it: whichever leaves the busiest less to do.  A head can be so large that its stage has no layer.  Where a rank has
several stages, it has every pp-th (1F1B, interleaved), or two of a V.
"""

from functools import lru_cache

from labs import cost

V_SHAPED = ("zbv", "dualpipev")


@lru_cache(4096)
def dealt(config, pp: int, schedule: str = "1f1b", stages_per_rank: int = 1) -> tuple[tuple[int, ...], int]:
    """Layers of each rank, and which rank has the head."""
    stages, head_at = cut_by_work(config, pp * stages_per_rank)
    owner = [rank_of(stage, pp, schedule) for stage in range(len(stages))]
    layers = [0] * pp
    for rank, n in zip(owner, stages, strict=True):
        layers[rank] += n
    return tuple(layers), owner[head_at]


def cut_by_work(config, stages: int) -> tuple[list[int], int]:
    """Layers of each stage, and which one has the head.  Work: the numbers in matrices."""
    layer, head = cost.layer_matrices(config), config.vocab * config.dim
    share, done, layers, stage = (config.depth * layer + head) / stages, 0, [0] * stages, 0
    for _ in range(config.depth):
        layers[stage] += 1
        done += layer
        if done >= share * (stage + 1) and stage < stages - 1:
            stage += 1
    busiest = max(n * layer + head * (s == stage) for s, n in enumerate(layers))
    if config.depth % stages == 0 and (each := config.depth // stages) * layer + head < busiest:
        return [each] * stages, stages - 1
    return layers, stage


def rank_of(stage: int, pp: int, schedule: str) -> int:
    if schedule in V_SHAPED:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp
