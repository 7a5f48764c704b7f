"""Tensor parallelism: bytes that a rank sends and holds in a step, as `labs.tp` runs the GPT's plan.

There are N ranks, and M tokens of D numbers at a time.  If every rank holds all of x between layers, each rank sends
for each micro-batch:

                  forward                                  backward
    embedding     all_reduce M D                           -
    a layer       2 all_reduce M D                         2 all_reduce M D
    head          -                                        all_reduce M D
    loss          all_reduce M, all_reduce 2 M             -

With sequence parallelism, each all_reduce of M D becomes a reduce_scatter and an all_gather, which send as much
together.  Norms see only a shard of the tokens, so their gradients are all-reduced:

    embedding     reduce_scatter M D                       all_gather M D
    a layer       2 all_gather, 2 reduce_scatter M D       2 all_gather, 2 reduce_scatter M D, 2 all_reduce D
    norm          -                                        all_reduce D
    head          all_gather M D                           reduce_scatter M D
    loss          the same as above                        -

If C neighbours have the same head of keys and values, they all-reduce the gradients of its two weights.

Sources: [Megatron] Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from labs.cost import traffic
from labs.cost.context_parallel import cp, zigzag_places
from labs.cost.data_parallel import in_backward
from labs.cost.fully_sharded import fsdp
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    HeldBytes,
    Moment,
    Prediction,
    held,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.split import count_heads, share
from labs.cost.traffic import all_reduce_limit


def tp(job: Job, sequence_parallel: bool = False) -> Prediction:
    """Predict a step on CPU in which all ranks read the same batch.  On gloo, all_to_all stands for reduce_scatter."""
    job.require("cost.tp", precision=("float32", "mixed"), recompute=("none",))
    return Prediction(*tp_step(job, sequence_parallel), textbook(job), tp_held(job, sequence_parallel))


def textbook(job: Job) -> Fraction:
    """Return the bytes of 4 all-reduces per layer, one after the embedding, and one before the head.

    With sequence parallelism, gathers and scatters send as much.
    """
    times = job.accumulation * (4 * job.config.depth + 2)
    return job.itemsize * all_reduce_limit(times * job.tokens * job.config.dim, job.ranks)


# ---- sent ------------------------------------------------------------------------------------------------

ENTER, LEAVE = "enter", "leave"  # x enters a split layer by a copy or a gather, and leaves it by a reduce or a scatter
SPLIT = (("embedding", LEAVE, 1), ("a layer", ENTER, 2), ("a layer", LEAVE, 2), ("head", ENTER, 1))
WHOLE = {ENTER: {"backward": "all_reduce"}, LEAVE: {"forward": "all_reduce"}}
IN_SHARDS = {
    ENTER: {"forward": "all_gather", "backward": "reduce_scatter"},
    LEAVE: {"forward": "reduce_scatter", "backward": "all_gather"},
}


@dataclass(frozen=True)
class Call:
    """Collectives of one kind in a micro-batch: their number, and the bytes that a rank sends for each."""

    part: str
    phase: str
    op: str
    times: int
    sent: int


def tp_calls(job: Job, sequence_parallel: bool = False) -> Iterator[Call]:
    """Yield the calls of a micro-batch; those of "a layer" appear once, not for each layer.

    Raises ValueError for heads, or a sequence, that the ranks cannot share.
    """
    ranks, rank, D, E = job.ranks, job.rank, job.config.dim, job.config.head_size
    _, _, copies = count_heads(job.config.heads, job.config.kv_heads, ranks, rank)
    require_equal_shards(job, sequence_parallel)

    def call(part: str, phase: str, op: str, n: int, times: int = 1, itemsize: int = job.itemsize, among: int = ranks):
        return Call(part, phase, op, times, itemsize * getattr(traffic, op)(n, among, rank % among).elements)

    for part, border, times in SPLIT if ranks > 1 else ():
        for phase, op in (IN_SHARDS if sequence_parallel else WHOLE)[border].items():
            yield call(part, phase, op, job.tokens * D, times)
    if copies > 1:
        yield call("a layer", "backward", "all_reduce", E * D, 2, among=copies)
    if sequence_parallel and ranks > 1:
        yield call("a layer", "backward", "all_reduce", D, 2)
        yield call("norm", "backward", "all_reduce", D)
    for n in (job.tokens, 2 * job.tokens):
        yield call("loss", "forward", "all_reduce", n, itemsize=FLOAT)


def tp_sent(job: Job, sequence_parallel: bool = False) -> dict[str, dict[str, int]]:
    """Return the bytes that the rank sends for a micro-batch, as {part: {"forward": bytes, "backward": bytes}}."""
    table = {part: {"forward": 0, "backward": 0} for part in ("embedding", "a layer", "norm", "head", "loss")}
    for call in tp_calls(job, sequence_parallel):
        table[call.part][call.phase] += call.times * call.sent
    return table


def tp_step(job: Job, sequence_parallel: bool = False) -> tuple[int, dict[str, int]]:
    """Return the bytes that the rank sends in a step, and its collectives, as {name: calls}."""
    sent, counts = 0, {}
    for call in tp_calls(job, sequence_parallel):
        times = call.times * job.accumulation * (job.config.depth if call.part == "a layer" else 1)
        sent += times * call.sent
        counts[call.op] = counts.get(call.op, 0) + times
    return sent, counts


def require_equal_shards(job: Job, sequence_parallel: bool) -> None:
    if sequence_parallel and job.T % job.ranks:
        fits = job.T - job.T % job.ranks
        raise ValueError(
            f"{job.T} positions are not divisible by {job.ranks} ranks: use {f'{fits} or ' if fits else ''}"
            f"{fits + job.ranks}, or sequence_parallel=False"
        )


# ---- held ------------------------------------------------------------------------------------------------


def tp_held(job: Job, sequence_parallel: bool = False) -> HeldBytes:
    """Return the bytes of the rank's share, which has no padding.  The batch counts as temporary."""
    own = replace(job, config=share(job.config, job.ranks, job.rank, sequence_parallel), ranks=1, rank=0)
    sizes, size = parameter_sizes(own.config), job.size
    most = held(size["P"] * sum(sizes), size["S"] * sum(sizes) + FLOAT * len(sizes), tp_moments(own))
    return with_bytes(most, batch_bytes(job) + INDEX * job.ranks)  # the batch, and the ranks' numbers


def with_bytes(most: HeldBytes, extra: int) -> HeldBytes:
    """Return the bytes with more of them at the peak, without a prediction of buffers and temporaries."""
    return replace(most, comm=None, temporary=None, peak=most.peak + extra)


def batch_bytes(job: Job) -> int:
    return 2 * INDEX * job.tokens * job.accumulation


def tp_moments(job: Job) -> Iterator[Moment]:
    """Yield the bytes besides P, S and the batch."""
    sizes = parameter_sizes(job.config)
    G = job.size["G"] * sum(sizes)
    yield from in_backward(job, G)
    yield optimizer_step(0, G, 0, sizes, job.masters).plus(temporary=job.losses)


# ---- on a grid -------------------------------------------------------------------------------------------


def fsdp_tp(job: Job, tp: int = 2, sequence_parallel: bool = False) -> Prediction:
    """Predict a step of `labs.fsdp` on the shares of tensor parallelism.

    The N ranks form a grid ("dp", "tp") with tp ranks in a row; job.batch is the sequences that each row reads.
    """
    job.require("cost.fsdp_tp", precision=("float32",), recompute=("none",))
    row, column = on_grid(job, tp, sequence_parallel)
    most = with_bytes(fsdp(column).held, batch_bytes(job) + INDEX * (job.ranks + tp))  # the ranks of grid and row
    return together(tp_step(row, sequence_parallel), textbook(row), replace(fsdp(column), held=most))


def cp_tp(job: Job, tp: int = 2, sequence_parallel: bool = False) -> Prediction:
    """Predict a step of a ring of `labs.cp` on the shares of tensor parallelism.

    The N ranks form a grid ("cp", "tp") with tp ranks in a row.  All ranks read the same batch, and those of a row
    compute the same piece of each sequence.
    """
    row, column = on_grid(job, tp, sequence_parallel)
    row = replace(row, context=len(zigzag_places(column)[column.rank]))
    most = with_bytes(cp(column).held, INDEX * (job.ranks + tp))  # the ranks of grid and row
    return together(tp_step(row, sequence_parallel), textbook(row), replace(cp(column), held=most))


def on_grid(job: Job, tp: int, sequence_parallel: bool) -> tuple[Job, Job]:
    """Return a rank's job along its row, and its job along its column, which shards the rank's share of the model."""
    row = replace(job, ranks=tp, rank=job.rank % tp)
    own = share(job.config, tp, row.rank, sequence_parallel)
    return row, replace(job, config=own, ranks=job.ranks // tp, rank=job.rank // tp)


def together(step: tuple[int, dict[str, int]], limit: Fraction, other: Prediction) -> Prediction:
    sent, counts = step
    both = {op: counts.get(op, 0) + other.collectives.get(op, 0) for op in counts | other.collectives}
    return Prediction(sent + other.sent, both, limit + other.textbook, other.held)
