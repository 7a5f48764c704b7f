"""Data parallelism: what a rank sends and holds in a step, for each variant of `labs.ddp` and PyTorch's own.

Source: [DDP] Li et al. 2020, arXiv 2006.15704, section 3.2.
"""

from collections.abc import Sequence

from labs.cost.collectives import all_reduce, all_reduce_limit
from labs.cost.memory import (
    FLOAT,
    Held,
    MiB,
    Prediction,
    activations,
    optimizer_state,
    parameter_sizes,
    workspace,
)


def buckets(sizes: Sequence[int], variant: str, bucket_bytes: int = 25 * MiB) -> list[int]:
    """Elements of each all-reduce of a step: "single", "naive", "bucketed", "overlapped" or "torch" [DDP].

    Buckets are filled from the last parameter on, and closed when they have reached their size. PyTorch's first
    one is closed at 1 MiB; it fills them in the order in which gradients came in the first step, taken here to
    be the same (which cannot matter as long as all sizes are multiples of N).
    """
    match variant:
        case "single":
            return []
        case "naive":
            return list(sizes)
        case "bucketed" | "overlapped":
            first = bucket_bytes
        case "torch":
            first = MiB
        case _:
            raise ValueError(f"{variant!r} is none of single, naive, bucketed, overlapped, torch")
    full, filled = [], 0
    for size in reversed(sizes):
        filled += size
        if FLOAT * filled >= (bucket_bytes if full else first):
            full, filled = [*full, filled], 0
    return full + [filled] * (filled > 0)


def ddp_sent(
    sizes: Sequence[int],
    ranks: int,
    variant: str,
    rank: int = 0,
    bucket_bytes: int = 25 * MiB,
    find_unused: bool = False,
    buffer_bytes: int = 0,
) -> int:
    """Bytes that `rank` sends in a step, for float32 parameters of these sizes, whatever the model.

    `find_unused` adds one int32 a parameter, all-reduced; buffers go out from rank 0 to each of the others.
    Accumulation adds nothing, thanks to `no_sync`; without it, multiply by the number of micro-batches.
    """
    counts = buckets(sizes, variant, bucket_bytes) + [len(sizes)] * find_unused
    sent = FLOAT * sum(all_reduce(n, ranks, rank).elements for n in counts)
    return sent + (ranks - 1) * buffer_bytes * (rank == 0)


def ddp(
    config,
    batch: int,
    ranks: int,
    variant: str,
    rank: int = 0,
    context: int | None = None,
    bucket_bytes: int = 25 * MiB,
    accumulation: int = 1,
) -> Prediction:
    """A step of `GPT(config)` with AdamW, in float32 on CPU, from the second step on; `batch` sequences at a time."""
    sizes = parameter_sizes(config)
    counts = buckets(sizes, variant, bucket_bytes)
    return Prediction(
        sent=ddp_sent(sizes, ranks, variant, rank, bucket_bytes),
        all_reduces=len(counts),
        textbook=FLOAT * all_reduce_limit(sum(counts), ranks),
        held=ddp_held(config, batch, variant, context, bucket_bytes, accumulation),
    )


def ddp_held(
    config,
    batch: int,
    variant: str,
    context: int | None = None,
    bucket_bytes: int = 25 * MiB,
    accumulation: int = 1,
) -> Held:
    """P, S and A are those of one process ("single"). Where the variants differ, in bytes:

                        gradients of their own    buckets that stay    a buffer that passes
        single, naive            P
        bucketed                 P                                     the largest bucket
        overlapped                                        P
        torch                    P                        P

    In overlapped's buckets live the gradients themselves, and G has one more, on its way into its bucket.
    """
    sizes = parameter_sizes(config)
    P, S, A = FLOAT * sum(sizes), optimizer_state(sizes), sum(activations(config, batch, context).values())
    largest_bucket = FLOAT * max(buckets(sizes, variant, bucket_bytes), default=0)
    rows = {"bucketed": (P, 0, largest_bucket), "overlapped": (0, P, 0), "torch": (P, P, 0)}
    own, staying, passing = rows.get(variant, (P, 0, 0))

    work = workspace(config, batch, context)
    already, yet_to_come = (own, 0) if accumulation > 1 else (0, work.gradients if own else 0)
    moments = (
        A + work.loss + already + staying,
        A - work.freed + work.mlp + already + yet_to_come + staying,
        work.inputs + max(passing, work.optimizer) + own + staying,
    )
    return Held(
        P=P,
        G=own or staying + FLOAT * max(sizes),
        S=S,
        A=A,
        comm=passing + (staying if own else 0),
        temporary=max(work.loss, work.mlp, work.optimizer - FLOAT) + 2 * FLOAT,  # with the loss and its gradient
        peak=P + S + max(moments) + FLOAT,
    )
