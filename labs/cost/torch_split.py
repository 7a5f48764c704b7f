"""PyTorch's own tensor parallelism: what a rank sends and holds in a step, in the layouts of `labs.native.tp`.

It sends and holds what `labs.cost.tp` says, except for this:

    the loss          its three numbers per token travel one by one; its gradient is worked out in three tensors of the
                      logits' shape
    norms on shards   the gradient stays a summand, and AdamW, which uses it three times, has it added up each time
    the embedding     its gradient is that of all words on every rank, of which AdamW cuts out the rank's rows
    sums              go from one tensor to another, where ours stay in their buffers: both count as comm
    padding           each part lies in as many bytes as the longest one

Heads are cut like features, and each rank must have as many; the same goes for the width of the mlp.  Embedding and
head cannot be tied.

Read in PyTorch 2.13: torch/distributed/tensor/parallel.
"""

from collections.abc import Iterator
from dataclasses import replace

from labs.cost.data_parallel import in_backward
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    Held,
    Moment,
    Prediction,
    held,
    optimizer_state,
    optimizer_step,
    parameter_sizes,
)
from labs.cost.saved_activations import Part, Within, activations
from labs.cost.split import share
from labs.cost.split_activations import split_backward
from labs.cost.tensor_parallel import batch_bytes, on_grid, textbook, together, tp_step, with_bytes
from labs.cost.torch_sharding import fully_shard, fully_shard_held
from labs.cost.traffic import all_reduce

USES = 3  # of a gradient, by AdamW


def parallelize_module(job: Job, sequence_parallel: bool = False) -> Prediction:
    """A step in float32 on CPU."""
    job.require("cost.parallelize_module", precision=("float32",), recompute=("none",))
    require_equal_parts(job, job.ranks)
    step = torch_step(job, sequence_parallel, USES)
    return Prediction(*step, textbook(job), parallelize_module_held(job, sequence_parallel))


def fully_shard_tp(job: Job, tp: int = 2, sequence_parallel: bool = False) -> Prediction:
    """`fully_shard` of what it has left, as in `labs.cost.fsdp_tp`."""
    job.require("cost.fully_shard_tp", precision=("float32",), recompute=("none",))
    require_equal_parts(job, tp)
    row, column = on_grid(job, tp, sequence_parallel)
    parts = torch_backward(column, job.config.vocab * job.config.dim)
    shards = fully_shard_held(column, passes=([end_of_forward(column, parts[0])], parts))
    shards = replace(fully_shard(column), held=with_bytes(shards, FLOAT * (job.ranks - column.ranks)))
    return together(torch_step(row, sequence_parallel, job.accumulation), textbook(row), shards)


def require_equal_parts(job: Job, ranks: int) -> None:
    for name in ("kv_heads", "hidden"):
        if (size := getattr(job.config, name)) % ranks:
            raise ValueError(f"{name} is {size}, which {ranks} ranks cannot share equally, as PyTorch's plan has it")
    if job.config.tied:
        raise ValueError("the head is tied to the embedding, and PyTorch's plan would untie it: give tied=False")


def torch_step(job: Job, sequence_parallel: bool, uses: int) -> tuple[int, dict[str, int]]:
    """As `tp_step`; uses: how often in a step the gradients of norms on shards are added up."""
    sent, counts = tp_step(job, sequence_parallel)
    one, two, norm = (
        FLOAT * all_reduce(n, job.ranks, job.rank).elements for n in (job.tokens, 2 * job.tokens, job.config.dim)
    )
    norms = (2 * job.config.depth + 1) * (uses - job.accumulation) * (sequence_parallel and job.ranks > 1)
    counts["all_reduce"] += job.accumulation + norms
    return sent + job.accumulation * (2 * one - two) + norms * norm, counts


# ---- held ------------------------------------------------------------------------------------------------


def parallelize_module_held(job: Job, sequence_parallel: bool = False) -> Held:
    own = replace(job, config=share(job.config, job.ranks, job.rank, sequence_parallel), ranks=1, rank=0)
    sizes, of_all_words = parameter_sizes(own.config), job.config.vocab * job.config.dim
    moments = torch_moments(own, FLOAT * (sum(sizes[1:]) + of_all_words), of_all_words)
    padded = parameter_sizes(share(job.config, job.ranks))  # every part has room for as many rows as the first
    return with_bytes(held(FLOAT * sum(padded), optimizer_state(sizes), moments), FLOAT * job.ranks)


def torch_moments(job: Job, G: int, of_all_words: int) -> Iterator[Moment]:
    """Bytes besides P and S, from the end of forward on; the batch is kept for the backward, as in one process."""
    sizes, number = parameter_sizes(job.config), FLOAT * job.tokens
    parts, before = torch_backward(job, of_all_words), G * (job.accumulation > 1)
    yield end_of_forward(job, parts[0]).plus(G=before, comm=number)
    yield from in_backward(job, parts, G)
    yield optimizer_step(parts[-1].left, G, 0, sizes).plus(temporary=job.losses)


def end_of_forward(job: Job, loss: Part) -> Moment:
    return Moment("forward", A=loss.worst[0].A, temporary=FLOAT * job.tokens * job.own.vocab + job.losses)


def torch_backward(job: Job, of_all_words: int) -> list[Part]:
    """As `split_backward`; the batch is kept, and the loss worked out, as in one process."""
    own, number = job.own, FLOAT * job.tokens
    logits, x = number * own.vocab, number * own.dim
    _, *parts, embedding = split_backward(job)
    A, batch = sum(activations(job).values()), batch_bytes(job)
    in_loss = Within("loss", A, 3 * logits + 8 * number + job.tokens, 0)
    found = [Part("loss", [], [in_loss], A - logits, logits)]
    more = batch - embedding.left
    for part in parts:
        worst = [replace(torch_sum(at, x, own.shards), A=at.A + more) for at in part.worst]
        found += [replace(part, worst=worst, left=part.left + more)]
    in_embedding = Within("embedding", batch, x, of_all_words, of_all_words)
    return [*found, Part("embedding", [of_all_words], [in_embedding], batch, 0)]


def torch_sum(at: Within, x: int, shards: int) -> Within:
    """Where ours adds up a gradient in its own buffers, theirs goes from one tensor to another; both count as comm."""
    if shards == 1 and at.comm:
        return replace(at, temporary=at.temporary - x, comm=2 * x)
    if at.comm >= 2 * x:
        return replace(at, temporary=at.temporary - x // shards, comm=at.comm - x + x // shards)
    return at
