"""Does it fit? The peak of a rank of a GPU job, and the number of ranks that fit it on cards of some size.

The formulas are those of `labs.cost.zero`, in any precision, for any shapes, with RMSNorm as one kernel. They leave
out CUDA's own memory (some hundred MB) and the allocator's reserve.

Source: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 3.
"""

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache

from labs.cost.job import Job
from labs.cost.model_states import HeldBytes, held
from labs.cost.zero_stages import zero_step

POWERS = 21  # the powers of two that are tried: 1, 2, ... 2**20 ranks


@lru_cache(1024)
def per_rank(job: Job, stage: int, offload: bool = False, fused_norms: bool = True) -> HeldBytes:
    """Return the bytes on each rank in a step of the job on GPUs, or, without fused norms, on CPU.

    stage: 0 to 3
    offload: whether masters and optimizer state are in host memory, and updated there
    """
    P, S, moments = zero_step(replace(job, fused_norms=fused_norms), stage)
    if offload:
        S, moments = 0, [moment for moment in moments if moment.name != "step"]
    return held(P, S, moments)


def smallest_ranks(
    job: Job, stage: int, card_bytes: int, offload: bool = False, fused_norms: bool = True
) -> int | None:
    """Return the smallest power of two of ranks on which the job fits a card; None if 2**20 are not enough."""

    def fits(power: int) -> bool:
        return per_rank(replace(job, ranks=2**power, rank=0), stage, offload, fused_norms).peak <= card_bytes

    powers = range(POWERS)
    first = bisect_left(powers, True, key=fits)
    return 2**first if first < POWERS else None
