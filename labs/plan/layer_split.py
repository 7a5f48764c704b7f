"""The layers of a model, split among the ranks of a pipeline so that the busiest rank has the least work.

    split_layers(config, pp=4)        (5, 5, 5, 1), 3: the number of layers of each rank, and the rank of the head

Each stage has one layer or more, and the last stage has the head, as in `labs.pp.cut`.  A rank with several stages has
every pp-th stage (1F1B, interleaved), or two stages of a V.
"""

from functools import lru_cache

from labs.plan.sparse import active_matrices

V_SHAPED = ("zbv", "dualpipev")


@lru_cache(4096)
def split_layers(config, pp: int, schedule: str = "1f1b", stages_per_rank: int = 1) -> tuple[tuple[int, ...], int]:
    """Return the number of layers of each rank, and the rank that has the head."""
    stages = cut_by_work(config, pp * stages_per_rank)
    owner = [rank_of(stage, pp, schedule) for stage in range(len(stages))]
    layers = [0] * pp
    for rank, n in zip(owner, stages, strict=True):
        layers[rank] += n
    return tuple(layers), owner[-1]


def cut_by_work(config, stages: int) -> list[int]:
    """Return the number of layers of each stage; the last one has fewer, since its head is work, too.

    Work is measured in parameters of matrices, of which a token uses only some experts'.
    """
    if not 1 < stages <= config.depth:  # nanotron has run pipelines of more stages than layers
        return [config.depth] if stages == 1 else [1] * config.depth + [0] * (stages - config.depth)
    head = config.vocab * config.dim / active_matrices(config)

    def busiest(last: int) -> float:
        return max(-(-(config.depth - last) // (stages - 1)), last + head)

    last = min(range(config.depth // stages, 0, -1), key=busiest)  # the largest of equally good numbers
    each, more = divmod(config.depth - last, stages - 1)
    return [*(each + (stage < more) for stage in range(stages - 1)), last]


def rank_of(stage: int, pp: int, schedule: str) -> int:
    if schedule in V_SHAPED:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp
