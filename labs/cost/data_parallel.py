"""Data parallelism: bytes that a rank sends and holds in a step, for each variant of `labs.ddp` and PyTorch's own.

Source: [DDP] Li et al. 2020, arXiv 2006.15704, section 3.2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    HeldBytes,
    MiB,
    Moment,
    Prediction,
    held,
    optimizer_state,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.saved_activations import High, activations, backward
from labs.cost.traffic import all_reduce, all_reduce_limit


def buckets(sizes: Sequence[int], variant: str, bucket_bytes: int = 25 * MiB) -> list[int]:
    """Return the number of elements of each all-reduce of a step [DDP].

    Buckets are filled from the last parameter on, and closed when they have reached their size. PyTorch closes its
    first bucket at 1 MiB, and fills buckets in the order in which gradients arrived in the first step. That order is
    assumed to be the same here; it makes no difference if all sizes are multiples of N.

    sizes: elements of each parameter, in the order of registration
    variant: "single", "naive", "bucketed", "overlapped" or "torch"
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
            raise ValueError(
                f"variant is {variant!r}: it must be 'single', 'naive', 'bucketed', 'overlapped' or 'torch'"
            )
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
    """Return the bytes that `rank` sends in a step, for float32 parameters of these sizes, whatever the model.

    `find_unused` adds an all-reduce of one int32 per parameter. Rank 0 sends `buffer_bytes` to each of the others.
    Accumulation adds nothing, thanks to `no_sync`; without it, multiply by the number of micro-batches.
    """
    counts = buckets(sizes, variant, bucket_bytes) + [len(sizes)] * find_unused
    sent = FLOAT * sum(all_reduce(n, ranks, rank).elements for n in counts)
    return sent + (ranks - 1) * buffer_bytes * (rank == 0)


def ddp(job: Job, variant: str = "overlapped", bucket_bytes: int = 25 * MiB) -> Prediction:
    """Predict a step in float32 on CPU, for a variant of `buckets`."""
    job.require("cost.ddp", precision=("float32",))
    sizes = parameter_sizes(job.config)
    counts = buckets(sizes, variant, bucket_bytes)
    return Prediction(
        sent=ddp_sent(sizes, job.ranks, variant, job.rank, bucket_bytes),
        collectives={"all_reduce": len(counts)} if counts else {},
        textbook=FLOAT * all_reduce_limit(sum(counts), job.ranks),
        held=ddp_held(job, variant, bucket_bytes),
    )


def ddp_held(job: Job, variant: str, bucket_bytes: int = 25 * MiB) -> HeldBytes:
    """Return the bytes held in a step.

    P, S and A are those of one process ("single"). The variants differ in these bytes:

                        separate gradients        lasting buckets      temporary buffer
        single, naive            P
        bucketed                 P                                     the largest bucket
        overlapped                                        P

    In "overlapped", the gradients are views of the buckets, and G is the one gradient that is being copied into its
    bucket. For PyTorch's DDP ("torch") only P, G and S are predicted, which are also those of one process.
    """
    sizes = parameter_sizes(job.config)
    P, S, largest_bucket = (
        FLOAT * sum(sizes),
        optimizer_state(sizes),
        max(buckets(sizes, variant, bucket_bytes), default=0),
    )
    if variant == "torch":
        return HeldBytes(P=P, G=P, S=S)
    rows = {"bucketed": (P, 0, FLOAT * largest_bucket), "overlapped": (0, P, 0)}
    own, staying, passing = rows.get(variant, (P, 0, 0))
    most = held(P, S, ddp_moments(job, sizes, own, staying, passing))
    G, comm = (most.G, most.comm) if own else (staying + FLOAT * max(sizes), passing)
    return replace(most, G=G, comm=comm, temporary=None)


def ddp_moments(job: Job, sizes: Sequence[int], own: int, staying: int = 0, passing: int = 0) -> Iterator[Moment]:
    """Yield the bytes besides P and S.  The losses and their gradient count as temporary.

    own: bytes of separate gradients
    staying: bytes of lasting buckets
    passing: bytes of the temporary buffer
    """
    at_rest = activations(job)["tokens"]
    yield from in_backward(job, own, staying)
    yield Moment("average", own, at_rest, staying + passing, FLOAT + job.losses)
    yield optimizer_step(at_rest, own, staying, sizes, job.masters).plus(temporary=job.losses)


def in_backward(job: Job, own: int, staying: int = 0, highs: Sequence[High] = ()) -> Iterator[Moment]:
    """Yield the bytes while backward computes the gradients.

    If gradients are added to those of earlier micro-batches, or copied into buckets, only the newest one is held in
    addition.

    highs: the moments of backward, by default the dense GPT's
    """
    for at in highs or backward(job):
        if job.accumulation > 1:
            new = {"G": own, "temporary": job.itemsize * at.newest}
        else:
            new = {"G": job.itemsize * (at.before + at.own if own else at.newest)}
        yield Moment(at.name, 0, at.A, staying, at.temporary + job.losses).plus(**new)
