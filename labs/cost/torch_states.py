"""PyTorch's own strategies: the bytes that a rank sends in a step, and P, G and S, in the layouts of `labs.native`.

    zero_redundancy          ZeroRedundancyOptimizer with DDP assigns whole parameters, the largest first, each to the
                             rank with the fewest elements. DDP all-reduces all gradients; each rank steps its own
                             parameters and broadcasts them. This sends 2 (N-1)/N Ψ, and (N-1) times its own parameters,
                             together 3 (N-1)/N Ψ on average.
    fully_shard              It sends as much as `labs.cost.fsdp`; P and G have shards padded to the longest, S does
                             not.
    parallelize_module       It sends as much as `labs.cost.tp`, but the loss's three numbers per token one by one. The
                             gradient of a norm on shards is a summand, and AdamW, which uses it three times, has it
                             all-reduced each time. The embedding's gradient has the whole vocabulary. A part is padded
                             to the longest.
    fully_shard_tp           It is `fully_shard` of the shares of tensor parallelism.
    templated_ring           It is DDP on each rank's tokens, and attention gathers keys and values, repeated for each
                             head of queries, and passes their gradients on N times.
    pipelining               It sends as much as `labs.cost.pp`, and has the parameters of its stages.
    pipelining_on_a_mesh     It combines the three.

Activations, buffers and the peak depend on PyTorch's version, so they are not predicted; a recording shows them.

Heads are cut like features, and each rank must have the same number; the same goes for the width of the mlp. Embedding
and head cannot be tied under tensor parallelism; in a pipeline, tied weights are left to the caller.

Source: PyTorch 2.13 and 2.15, torch/distributed/optim/zero_redundancy_optimizer.py, .../fsdp/_fully_shard,
.../tensor/parallel and .../pipelining.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from labs.cost.data_parallel import buckets, ddp_sent
from labs.cost.fully_sharded import chunks_of, fsdp, groups, rows
from labs.cost.job import Job
from labs.cost.model_states import FLOAT, HeldBytes, Prediction, optimizer_state, parameter_sizes
from labs.cost.on_a_mesh import on_mesh, parallel
from labs.cost.pipeline import Plan, checked_stages, numbers_of, step_of
from labs.cost.pipeline_stages import Stage
from labs.cost.split import share
from labs.cost.tensor_parallel import on_grid, textbook, together, tp_step
from labs.cost.traffic import all_reduce, all_reduce_limit

USES = 3  # the number of times that AdamW uses a gradient


# ---- ZeroRedundancyOptimizer with DDP --------------------------------------------------------------------


def zero_redundancy(job: Job) -> Prediction:
    """Predict a step in float32."""
    job.require("cost.zero_redundancy", precision=("float32",))
    sizes, ranks = parameter_sizes(job.config), job.ranks
    whole = FLOAT * sum(sizes)
    return Prediction(
        sent=zero_redundancy_sent(sizes, ranks, job.rank),
        collectives={"all_reduce": len(buckets(sizes, "torch")), "broadcast": len(sizes)},
        textbook=Fraction(FLOAT * 3 * (ranks - 1) * sum(sizes), ranks),
        held=HeldBytes(P=whole, G=whole, S=optimizer_state(assign(sizes, ranks)[job.rank])),
    )


def zero_redundancy_sent(sizes: Sequence[int], ranks: int, rank: int = 0) -> int:
    """Return the bytes that `rank` sends in a step, for float32 parameters of these sizes, whatever the model."""
    return ddp_sent(sizes, ranks, "torch", rank) + FLOAT * (ranks - 1) * sum(assign(sizes, ranks)[rank])


def assign(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign each parameter to the rank that steps it; return the sizes, by rank."""
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(by_rank, key=sum).append(size)
    return by_rank


# ---- context parallelism ---------------------------------------------------------------------------------


def templated_ring(job: Job) -> Prediction:
    """Predict a step in float32 in which all ranks read the same batch, and average gradients by DDP.

    For each layer and micro-batch with n elements of a rank's keys and values, H heads each, a rank sends (N - 1) n in
    forward and (2 N - 1) n in backward.
    """
    job.require("cost.templated_ring", precision=("float32",), recompute=("none",))
    sizes, ranks, times = parameter_sizes(job.config), job.ranks, job.accumulation * job.config.depth
    if job.T % (2 * ranks):
        raise ValueError(f"{job.T} positions are not divisible by {2 * ranks}, two equal chunks for each rank")
    own = 2 * FLOAT * job.tokens // ranks * job.config.dim
    whole = FLOAT * sum(sizes)
    averaged = len(buckets(sizes, "torch"))
    return Prediction(
        sent=ddp_sent(sizes, ranks, "torch", job.rank) + times * (3 * ranks - 2) * own,
        collectives={"all_reduce": averaged, "all_gather": 2 * times, "all_to_all": ranks * times},
        textbook=FLOAT * all_reduce_limit(sum(sizes), ranks) + times * 3 * (ranks - 1) * own,
        held=HeldBytes(P=whole, G=whole, S=optimizer_state(sizes)),
    )


# ---- fully_shard, and tensor parallelism -----------------------------------------------------------------


def fully_shard(job: Job, reshard_after_forward: bool = True, replicas: int = 1, itemsize: int = FLOAT) -> Prediction:
    """Predict a step with the settings of `labs.cost.fsdp`, between steps in float32."""
    job.require("cost.fully_shard", precision=("float32",), recompute=("none",))
    root, layers = groups(job.config)
    ranks = job.ranks // replicas
    shards = FLOAT * sum(rows(shape, ranks) for group in (root, *layers) for shape in group.trained) // ranks
    states = HeldBytes(P=shards, G=shards, S=optimizer_state(chunks_of(job, ranks)))
    return replace(fsdp(job, reshard_after_forward, replicas, itemsize), held=states)


def parallelize_module(job: Job, sequence_parallel: bool = False) -> Prediction:
    """Predict a step in float32."""
    job.require("cost.parallelize_module", precision=("float32",), recompute=("none",))
    require_equal_parts(job, job.ranks)
    own, longest = (
        parameter_sizes(share(job.config, job.ranks, rank, sequence_parallel)) for rank in (job.rank, 0)
    )  # the first rank has the longest parts
    of_all_words = job.config.vocab * job.config.dim
    states = HeldBytes(P=FLOAT * sum(longest), G=FLOAT * (of_all_words + sum(own[1:])), S=optimizer_state(own))
    return Prediction(*torch_step(job, sequence_parallel, USES), textbook(job), states)


def fully_shard_tp(job: Job, tp: int = 2, sequence_parallel: bool = False) -> Prediction:
    """Predict a step of `fully_shard` on the shares of tensor parallelism, as in `labs.cost.fsdp_tp`."""
    job.require("cost.fully_shard_tp", precision=("float32",), recompute=("none",))
    require_equal_parts(job, tp)
    row, column = on_grid(job, tp, sequence_parallel)
    step = torch_step(row, sequence_parallel, job.accumulation)
    return together(step, textbook(row), fully_shard(column))


def require_equal_parts(job: Job, ranks: int) -> None:
    for name in ("kv_heads", "hidden"):
        if (size := getattr(job.config, name)) % ranks:
            raise ValueError(f"{name} is {size}, which {ranks} ranks cannot share equally, as PyTorch's plan has it")
    if job.config.tied:
        raise ValueError("the head is tied to the embedding, and PyTorch's plan would untie it: give tied=False")


def torch_step(job: Job, sequence_parallel: bool, uses: int) -> tuple[int, dict[str, int]]:
    """Return bytes sent and collectives, as `tp_step` does.

    uses: the number of all-reduces per step of a norm's gradient, where the norm runs on shards of the sequence
    """
    sent, counts = tp_step(job, sequence_parallel)
    norm = FLOAT * all_reduce(job.config.dim, job.ranks, job.rank).elements
    norms = (2 * job.config.depth + 1) * (uses - job.accumulation) * (sequence_parallel and job.ranks > 1)
    counts["all_reduce"] += job.accumulation + norms
    return sent + job.accumulation * one_by_one(job) + norms * norm, counts


def one_by_one(job: Job) -> int:
    """Return the additional bytes if the loss all-reduces two numbers per token one by one, rather than together."""
    one, two = (FLOAT * all_reduce(n * job.tokens, job.ranks, job.rank).elements for n in (1, 2))
    return 2 * one - two


# ---- pipelines -------------------------------------------------------------------------------------------


def pipelining(job: Job, plans: Sequence[Plan], layers: Sequence[int] | None = None) -> Prediction:
    """Predict a step in float32 by these plans, which `cost.pp` describes."""
    stages = checked_stages(job, plans, layers)
    sizes = [size for number in numbers_of(plans[job.rank]) for size in stages[number].sizes]
    P = FLOAT * sum(sizes)
    return step_of(job, plans, HeldBytes(P=P, G=P, S=optimizer_state(sizes)))


def pipelining_on_a_mesh(job: Job, plans: Sequence[Plan], axes: Mapping[str, int]) -> Prediction:
    """Predict a step of `labs.native.parallel`.

    If parts are split but not sharded, each is padded to the longest, and the embedding's gradient has the whole
    vocabulary.
    """
    step, own = parallel(job, plans, axes), on_mesh(job, plans, axes)
    row, ends = replace(job, ranks=axes["tp"], rank=own.at["tp"]), len(own.stages) - 1 in own.numbers
    times = job.accumulation * (ends and axes["tp"] > 1)
    P = G = FLOAT * own.padded // own.axes["shard"]
    if axes["tp"] > 1 and not own.shards_data:
        mine = [own.stages[number] for number in own.numbers]
        P = FLOAT * sum(sum(widest(stage, job, axes["tp"]).sizes) for stage in mine)
        others = (job.config.vocab - mine[0].job.config.vocab) * job.config.dim * mine[0].is_first
        G += FLOAT * others
    return replace(
        step,
        sent=step.sent + times * one_by_one(row),
        collectives=dict(Counter(step.collectives) + Counter({"all_reduce": times})),
        held=HeldBytes(P=P, G=G, S=optimizer_state(own.chunks)),
    )


def widest(stage: Stage, job: Job, tp: int) -> Stage:
    """Return the same stage of the rank that has the longest parts."""
    config = replace(share(job.config, tp), depth=stage.job.config.depth, tied=False)
    return replace(stage, job=replace(stage.job, config=config))
