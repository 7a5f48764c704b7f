"""Expert parallelism: bytes that a rank sends and holds in a step, for given loads of the experts.

    loads      for each forward of a mixture in the step, [rank][expert]: the rows of each rank along ep for each expert
    config     a labs.moe.MoEConfig; a pair of a token and one of its experts is a row

In a layer, a rank sends its own rows that leave it, and the results of those that came; in backward as many gradients.
If L rows leave and C come, that is 2 (L + C) D elements, and 8 bytes for the count of each expert elsewhere. Even loads
have L = C = (ep-1)/ep of the rank's rows.

Activations are those of the GPT outside of its MLPs, exactly, and of its mixtures; the peak is a closed form, within
5 % unless padding of shards outweighs all else.

Source: [GShard] Lepikhin et al. 2020, arXiv 2006.16668, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.data_parallel import buckets, ddp_sent, in_backward
from labs.cost.fully_sharded import fsdp_moments, fully_shard_sent, groups, rows
from labs.cost.job import Job
from labs.cost.model_states import (
    FLOAT,
    INDEX,
    HeldBytes,
    LayerShapes,
    Moment,
    Prediction,
    Shape,
    gpt_layers,
    held,
    optimizer_state,
    optimizer_step,
)
from labs.cost.saved_activations import High, activations, backward
from labs.cost.split import chunk
from labs.cost.traffic import all_reduce, all_reduce_limit, piece

Loads = Sequence[Sequence[int]]  # [rank along ep][expert]


def own_experts(experts: int, ranks: int, rank: int) -> range:
    """Return the numbers of the experts of one of the ranks along ep; the first ranks have one more."""
    first = sum(piece(experts, ranks, before) for before in range(rank))
    return range(first, first + piece(experts, ranks, rank))


def even_loads(job: Job, ep: int) -> Loads:
    """Return the loads of a mixture in which every rank gives every expert the same number of rows, within one."""
    rows, experts = job.tokens * job.config.top_k, job.config.experts
    return [[piece(rows, experts, expert) for expert in range(experts)]] * ep


def mixture_sent(loads: Loads, rank: int, dim: int, itemsize: int = FLOAT) -> int:
    """Return the bytes that a rank along ep sends for one mixture, in forward and backward."""
    ranks, experts = len(loads), len(loads[0])
    if rank not in range(ranks):
        raise ValueError(f"rank is {rank}: of {ranks} ranks it must be one of 0 to {ranks - 1}")
    own = own_experts(experts, ranks, rank)
    leave = sum(loads[rank]) - sum(loads[rank][expert] for expert in own)
    come = sum(loads[other][expert] for other in range(ranks) if other != rank for expert in own)
    return 2 * itemsize * dim * (leave + come) + INDEX * (experts - len(own))


def mixture_layers(config) -> tuple[LayerShapes, list[LayerShapes], tuple[Shape, ...]]:
    """Return a MoEGPT's root, its layers without their experts, and the shapes of one expert."""
    root, layers = groups(config)
    norm, q, k, *others, gate, up, down = layers[0].trained
    of_heads = ((config.head_size,),) * config.is_normed
    shared = config.shared and groups(replace(config, hidden=config.shared * config.hidden))[1][0].trained[-3:]
    dense = (norm, q, *of_heads, k, *of_heads, *others, (config.experts, config.dim), *(shared or ()))
    return root, [LayerShapes(dense)] * config.depth, (gate, up, down)


def mixture_sizes(config) -> tuple[list[int], list[int]]:
    """Return the elements of each parameter outside of the experts, as DDP finds them, and of each in one expert."""
    root, layers, expert = mixture_layers(config)
    embed, *rest = root.sizes
    return [embed, *chain(*(layer.sizes for layer in layers)), *rest], LayerShapes(expert).sizes


def expert_parallel(job: Job, edp: int, ep: int, loads: Sequence[Loads] | None = None) -> Prediction:
    """Predict a step of `labs.moe.ExpertParallel` in float32: bytes sent, and P, G and S.

    loads: even ones by default
    """
    loads, ranks = loads_of(job, edp, ep, loads), edp * ep
    dense, of_one = mixture_sizes(job.config)
    sizes = of_one * len(own_experts(job.config.experts, ep, job.rank % ep)) * job.config.depth
    rows = sum(mixture_sent(each, job.rank % ep, job.config.dim) for each in loads)
    sums = [(n, ranks) for n in dense] + [(n, edp) for n in sizes]
    averaged = sum(2 * (among - 1) * FLOAT * -(-n // among) for n, among in sums)
    calls = sum(among > 1 for _, among in sums)
    last, at_rest = loads[-job.config.depth :], activations(job)["tokens"]
    in_layer = sum(sum(layer.sizes) for layer in mixture_layers(job.config)[1]) // job.config.depth
    highs = moments_of(job, last, job.rank % ep, in_layer + sum(sizes) // job.config.depth)
    P, largest = FLOAT * sum(dense + sizes), FLOAT * max(dense + sizes)
    moments = [*in_backward(job, P, highs=highs), Moment("average", P, at_rest, 2 * largest, job.losses)]
    moments.append(optimizer_step(at_rest, P, 0, dense + sizes).plus(temporary=job.losses))
    return Prediction(
        sent=rows + averaged,
        collectives={"all_to_all": 5 * len(loads) + calls, "all_gather": calls},
        textbook=textbook(job, edp, ep, sum(dense), sum(sizes)),
        held=replace(held(P, optimizer_state(dense + sizes), moments), comm=None, temporary=None),
    )


def fsdp_experts(job: Job, edp: int, ep: int, loads: Sequence[Loads] | None = None) -> Prediction:
    """Predict a step of `labs.fsdp` that shards experts along edp, and everything else along edp × ep."""
    loads, ranks, depth, times = loads_of(job, edp, ep, loads), edp * ep, job.config.depth, job.accumulation
    root, layers, expert = mixture_layers(job.config)
    experts = LayerShapes(expert * len(own_experts(job.config.experts, ep, job.rank % ep)))
    dense = [shape for group in (root, *layers) for shape in group.trained]
    sharded = [(shape, ranks, job.rank) for shape in dense]
    sharded += [(shape, edp, job.rank // ep) for shape in experts.trained] * depth
    chunks = [chunk(first, among, rank) * prod(others) for (first, *others), among, rank in sharded]
    rows_sent = sum(mixture_sent(each, job.rank % ep, job.config.dim) for each in loads)
    dense_sent = fully_shard_sent(root, layers, ranks, True, times, job.rank)
    experts_sent = fully_shard_sent(LayerShapes(), [experts] * depth, edp, True, times, job.rank // ep)
    whole = sum(map(prod, dense)), depth * sum(experts.sizes)
    even = sum(Fraction(3 * FLOAT * (among - 1) * n, among) for n, among in zip(whole, (ranks, edp), strict=True))
    G = FLOAT * sum(rows(shape, among) // among for shape, among, _ in sharded)
    whole_root, in_layer = (sum(rows(shape, ranks) for shape in group.trained) for group in (root, layers[0]))
    in_layer += sum(rows(shape, edp) for shape in experts.trained)
    highs = moments_of(job, loads[-depth:], job.rank % ep, in_layer)
    moments = [*fsdp_moments(job, whole_root, in_layer, True, G, ranks, highs, ahead=0)]
    gathered, results = FLOAT * sum(experts.sizes), FLOAT * job.tokens * job.config.top_k * job.config.dim
    # A layer's experts are gathered when the gradients of the results, and these, are no longer held.
    moments += [each.plus(comm=gathered, temporary=-4 * results) for each in moments if each.name == "layer"]
    step = optimizer_step(activations(job)["tokens"], G, 0, chunks).plus(temporary=job.losses)
    most = held(FLOAT * sum(chunks), optimizer_state(chunks), [*moments, step])
    return Prediction(
        sent=rows_sent + dense_sent + experts_sent,
        collectives={
            "all_to_all": 5 * len(loads),
            "all_gather": times * (1 + 2 * depth * (1 + (edp > 1))),
            "reduce_scatter": times * (1 + depth * (1 + (edp > 1))),
        },
        textbook=textbook(job, edp, ep, 0, 0) + times * even,
        held=replace(most, comm=None, temporary=None, peak=most.peak + 2 * INDEX * ranks),  # the ranks' numbers
    )


def torch_expert_parallel(job: Job, edp: int, ep: int, loads: Sequence[Loads] | None = None) -> Prediction:
    """Predict a step of `labs.native.expert_parallel`: DDP, and each layer's own experts in three tensors."""
    loads, ranks = loads_of(job, edp, ep, loads), edp * ep
    dense, of_one = mixture_sizes(job.config)
    stacks = [n * (job.config.experts // ep) for n in of_one] * job.config.depth
    rows = sum(mixture_sent(each, job.rank % ep, job.config.dim) for each in loads)
    biases = FLOAT * job.config.depth * job.config.experts * job.config.is_biased  # DDP sends buffers before a forward
    copies = FLOAT * sum(all_reduce(n, edp, job.rank // ep).elements for n in stacks)
    reduced = len(buckets(dense, "torch")) + len(stacks) * (edp > 1)
    return Prediction(
        sent=rows + ddp_sent(dense, ranks, "torch", job.rank, buffer_bytes=biases) + copies,
        collectives={"all_to_all": 5 * len(loads), "all_reduce": reduced},
        textbook=textbook(job, edp, ep, sum(dense), sum(stacks)),
        held=states(dense + stacks),
    )


# ---- activations -----------------------------------------------------------------------------------------


def mixture_activations(job: Job, loads: Loads, rank: int) -> int:
    """Return the bytes that a mixture saves for backward besides its input, on a rank along ep.

    For N tokens, M rows of them and R rows that the rank computes:

        router      scores of all experts, and their sum; the k chosen, as int64, with their scores, sum and weights
        rows        their places, as int64; what the rank received: D; gate, silu(gate), up and their product: 4 F
        results     those that came back: D for each of M; each token's: K D
        shared      4 F per shared expert
    """
    config, N, M = job.config, job.tokens, sum(loads[rank])
    R = sum(each[expert] for each in loads for expert in own_experts(config.experts, len(loads), rank))
    divided = 0 if config.scores == "softmax before top-k" else config.top_k + 1
    router = FLOAT * (N + 1) * config.experts + N * (FLOAT * (1 + config.top_k + divided) + INDEX * config.top_k)
    results = FLOAT * N * (config.top_k * config.dim + 4 * config.shared * config.hidden)
    return router + (INDEX + FLOAT * config.dim) * M + FLOAT * R * (config.dim + 4 * config.hidden) + results


def moments_of(job: Job, loads: Sequence[Loads], rank: int, own: int) -> list[High]:
    """Return the moments of `backward` for a GPT with mixtures: those of one with MLPs of one column, and the rest.

    loads: those of the last micro-batch's mixtures
    own: elements of a layer's parameters on this rank
    """
    thin = replace(job, config=replace(job.config, hidden=1, shared=0))
    of_heads = job.config.is_normed * (job.config.heads + job.config.kv_heads) * (2 * job.config.head_size + 1)
    saved = [mixture_activations(job, each, rank) + FLOAT * job.tokens * (of_heads - 4) for each in loads]
    more, results = (
        own - sum(gpt_layers(thin.config)[1].sizes),
        3 * FLOAT * job.tokens * job.config.top_k * job.config.dim,
    )
    shared, found = 3 * job.config.dim * job.config.shared * job.config.hidden, []
    for at in backward(thin):
        alive = job.config.depth - at.passed - (at.name in ("attention", "norm"))
        changed = {"A": at.A + sum(saved[:alive]), "before": at.before + at.passed * more}
        if at.name == "layer":  # gradients of a token's results, of the weighted ones, and their product
            changed |= {"temporary": at.temporary - 2 * FLOAT * job.tokens + results, "own": shared, "newest": 0}
        if at.name in ("attention", "norm"):
            changed["own"] = at.own + more
        found.append(replace(at, **changed))
    return found


def loads_of(job: Job, edp: int, ep: int, loads: Sequence[Loads] | None) -> Sequence[Loads]:
    """Return the loads of all mixtures of a step.  Raises ValueError for a job that the formulas are not for."""
    job.require("cost.expert_parallel", experts=True, precision=("float32",), recompute=("none",))
    if not hasattr(job.config, "experts") or edp * ep != job.ranks:
        raise ValueError(
            f"ranks is {job.ranks}, with edp {edp} × ep {ep}, and config a {type(job.config).__name__}: give a "
            "labs.moe.MoEConfig, and axes whose product is the number of ranks"
        )
    return loads or [even_loads(job, ep)] * job.config.depth * job.accumulation


def textbook(job: Job, edp: int, ep: int, dense: int, experts: int) -> Fraction:
    """Return the bytes of even loads, as if everything divided evenly."""
    rows = Fraction(4 * (ep - 1) * job.tokens * job.config.top_k * job.config.dim, ep) * job.config.depth
    averaged = all_reduce_limit(dense, edp * ep) + all_reduce_limit(experts, edp)
    return FLOAT * (rows * job.accumulation + averaged)


def states(sizes: Sequence[int]) -> HeldBytes:
    P = FLOAT * sum(sizes)
    return HeldBytes(P=P, G=P, S=optimizer_state(sizes))
