"""What a schedule costs, in closed form: seconds of a step, and how much a rank keeps alive.

p ranks with v stages each, m micro-batches; all stages of a rank together take t seconds for a micro-batch, forward and
backward:

                  seconds                                stages alive on rank r
    gpipe         m max t + (sum of t - max t)           m
    1f1b          the same                               p - r
    interleaved   the waiting divided by v               (v + 1) p - 2 r - 1
    zb1p          the waiting divided by 3 v             v p
    zbv           the waiting divided by 6               2 p
    dualpipev     the same                               2 p + 1

The busiest rank sets the pace; while the pipeline fills and drains, it waits once for each of the others.  With equal
stages that is the textbook's (p - 1) / m of the ideal time.  A zero-bubble schedule puts gradients of weights there.

Sources: as in `labs.pp.schedules`, whose lists agree with these for m large enough.
"""

from collections.abc import Sequence

# By schedule: what the waiting is divided by, and stages alive on rank r, for p ranks with v stages each.
BUBBLES = {
    "gpipe": (lambda v: 1, lambda p, v, r, m: m),
    "1f1b": (lambda v: 1, lambda p, v, r, m: p - r),
    "interleaved": (lambda v: v, lambda p, v, r, m: (v + 1) * p - 2 * r - 1),
    "zb1p": (lambda v: 3 * v, lambda p, v, r, m: v * p),
    "zbv": (lambda v: 6, lambda p, v, r, m: 2 * p),
    "dualpipev": (lambda v: 6, lambda p, v, r, m: 2 * p + 1),
}


def pipeline_seconds(
    schedule: str, ranks_seconds: Sequence[float], microbatches: int, stages_per_rank: int = 1
) -> float:
    """ranks_seconds: what each rank's stages take for a micro-batch, forward and backward."""
    slowest = max(ranks_seconds)
    return microbatches * slowest + bubble_seconds(schedule, sum(ranks_seconds) - slowest, stages_per_rank)


def bubble_seconds(schedule: str, others: float, stages_per_rank: int = 1) -> float:
    """others: seconds of a micro-batch on all ranks but the slowest."""
    return others / of(schedule)[0](stages_per_rank)


def stages_alive(schedule: str, ranks: int, rank: int, microbatches: int, stages_per_rank: int = 1) -> int:
    """How many times a stage's activations a rank has at the most."""
    most = of(schedule)[1](ranks, stages_per_rank, rank, microbatches)
    return min(most, microbatches * stages_per_rank)


def of(schedule: str):
    if schedule not in BUBBLES:
        raise ValueError(f"schedule is {schedule!r}: it must be one of {', '.join(map(repr, BUBBLES))}")
    return BUBBLES[schedule]
