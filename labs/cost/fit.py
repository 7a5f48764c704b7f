"""Does it fit? The most that a rank of a GPU job holds, and how many ranks a card of some size takes.

As `labs.cost.zero` has it, in any convention, for shapes of any size, with RMSNorm as one kernel. Left out are what
CUDA itself takes (some hundred MB) and what the allocator keeps in reserve.

Source: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 3.
"""

from bisect import bisect_left
from functools import lru_cache

from labs.cost.activations import backward
from labs.cost.memory import Held, bytes_of, held
from labs.cost.zero import zero_step

POWERS = 21  # of two: 1, 2, ... 2**20 ranks


@lru_cache(1024)
def per_rank(
    config,
    convention: str,
    ranks: int,
    stage: int,
    batch: int,
    context: int | None = None,
    recompute: str = "none",
    offload: bool = False,
) -> Held:
    """Bytes on each of N ranks in a step of `GPT(config)` with AdamW, of `batch` sequences on each.

    convention: a name in PIE.  stage: 0 to 3.  recompute: as in `activations`.  offload: masters and optimizer state
    are in host memory, and updated there.
    """
    size = bytes_of(convention)
    parts = backward(config, batch, context, size["P"], recompute, fused_norms=True)
    P, S, moments = zero_step(config, parts, ranks, stage, size)
    if offload:
        S, moments = 0, [moment for moment in moments if moment.name != "step"]
    return held(P, S, moments)


def smallest_ranks(
    config,
    convention: str,
    stage: int,
    batch: int,
    card_bytes: int,
    context: int | None = None,
    recompute: str = "none",
    offload: bool = False,
) -> int | None:
    """The least power of two of ranks with which `per_rank` fits a card; None if not even 2**20 do."""

    def fits(power: int) -> bool:
        return per_rank(config, convention, 2**power, stage, batch, context, recompute, offload).peak <= card_bytes

    powers = range(POWERS)
    first = bisect_left(powers, True, key=fits)
    return 2**first if first < POWERS else None
