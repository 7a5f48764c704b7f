"""The cost of a schedule in closed form: seconds of a step, and the stages whose activations a rank holds.

There are p ranks with v stages each, and m micro-batches. All stages of a rank together take t seconds for a
micro-batch, forward and backward; max t and sum of t are over the ranks:

                  seconds                                stages alive on rank r
    gpipe         m max t + (sum of t - max t)           m
    1f1b          the same                               p - r
    interleaved   the waiting divided by v               (v + 1) p - 2 r - 1
    zb1p          the waiting divided by 3 v             v p
    zbv           the waiting divided by 6               2 p
    dualpipev     the same                               2 p + 1

The busiest rank sets the pace.  While the pipeline fills and drains, that rank waits once for each of the others; this
is the bubble, the second term of the seconds.  With equal stages it is the textbook's (p - 1) / m of the ideal time.  A
zero-bubble schedule computes gradients of weights there.

Sources: those of `labs.pp.schedules`, whose lists agree with these formulas for m large enough.
"""

from collections.abc import Sequence

# Each schedule's divisor of the waiting, and its stages alive on rank r, for p ranks with v stages each.
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
    """Return the seconds of a step.

    ranks_seconds: seconds of each rank's stages for a micro-batch, forward and backward
    """
    slowest = max(ranks_seconds)
    return microbatches * slowest + bubble_seconds(schedule, sum(ranks_seconds) - slowest, stages_per_rank)


def bubble_seconds(schedule: str, others: float, stages_per_rank: int = 1) -> float:
    """Return the seconds that the slowest rank waits in a step.

    others: seconds of a micro-batch on all ranks but the slowest, added up
    """
    return others / of(schedule)[0](stages_per_rank)


def stages_alive(schedule: str, ranks: int, rank: int, microbatches: int, stages_per_rank: int = 1) -> int:
    """Return the most activations that a rank holds at once, as a number of stages times micro-batches."""
    most = of(schedule)[1](ranks, stages_per_rank, rank, microbatches)
    return min(most, microbatches * stages_per_rank)


def of(schedule: str):
    if schedule not in BUBBLES:
        raise ValueError(f"schedule is {schedule!r}: it must be one of {', '.join(map(repr, BUBBLES))}")
    return BUBBLES[schedule]
