"""Does it fit? The most that a rank of a GPU job holds, and how many ranks a card of some size takes.

As `labs.cost.zero` has it, in any convention, for shapes of any size, with RMSNorm as one kernel. Left out are what
CUDA itself takes (some hundred MB) and what the allocator keeps in reserve.

Source: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 3.
"""

from labs.cost.activations import backward
from labs.cost.memory import Held, bytes_of, held
from labs.cost.zero import zero_step

MOST_RANKS = 2**20


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
    ranks = 1
    while per_rank(config, convention, ranks, stage, batch, context, recompute, offload).peak > card_bytes:
        ranks *= 2
        if stage == 0 or ranks > MOST_RANKS:
            return None
    return ranks
