"""Expert parallelism: bytes that a rank sends and holds in a step, for given loads of the experts.

    loads      for each forward of a mixture in the step, [rank][expert]: the rows of each rank along ep for each expert
    config     a labs.moe.MoEConfig; a pair of a token and one of its experts is a row

In a layer, a rank sends its own rows that leave it, and the results of those that came; in backward as many gradients.
If L rows leave and C come, that is 2 (L + C) D elements, and 8 bytes for the count of each expert elsewhere. Even loads
have L = C = (ep-1)/ep of the rank's rows.

Source: [GShard] Lepikhin et al. 2020, arXiv 2006.16668, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import prod

from labs.cost.data_parallel import buckets, ddp_sent
from labs.cost.fully_sharded import fully_shard_sent, groups, rows
from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, HeldBytes, LayerShapes, Prediction, Shape, optimizer_state
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
    return Prediction(
        sent=rows + averaged,
        collectives={"all_to_all": 5 * len(loads) + calls, "all_gather": calls},
        textbook=textbook(job, edp, ep, sum(dense), sum(sizes)),
        held=states(dense + sizes),
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
    return Prediction(
        sent=rows_sent + dense_sent + experts_sent,
        collectives={
            "all_to_all": 5 * len(loads),
            "all_gather": times * (1 + 2 * depth * (1 + (edp > 1))),
            "reduce_scatter": times * (1 + depth * (1 + (edp > 1))),
        },
        textbook=textbook(job, edp, ep, 0, 0) + times * even,
        held=HeldBytes(
            P=FLOAT * sum(chunks),
            G=FLOAT * sum(rows(shape, among) // among for shape, among, _ in sharded),
            S=optimizer_state(chunks),
        ),
    )


def torch_expert_parallel(job: Job, edp: int, ep: int, loads: Sequence[Loads] | None = None) -> Prediction:
    """Predict a step of `labs.native.expert_parallel`: DDP, and each layer's own experts in three tensors."""
    loads, ranks = loads_of(job, edp, ep, loads), edp * ep
    dense, of_one = mixture_sizes(job.config)
    stacks = [n * (job.config.experts // ep) for n in of_one] * job.config.depth
    rows = sum(mixture_sent(each, job.rank % ep, job.config.dim) for each in loads)
    copies = FLOAT * sum(all_reduce(n, edp, job.rank // ep).elements for n in stacks)
    reduced = len(buckets(dense, "torch")) + len(stacks) * (edp > 1)
    return Prediction(
        sent=rows + ddp_sent(dense, ranks, "torch", job.rank) + copies,
        collectives={"all_to_all": 5 * len(loads), "all_reduce": reduced},
        textbook=textbook(job, edp, ep, sum(dense), sum(stacks)),
        held=states(dense + stacks),
    )


def loads_of(job: Job, edp: int, ep: int, loads: Sequence[Loads] | None) -> Sequence[Loads]:
    """Return the loads of all mixtures of a step.  Raises ValueError for a job that the formulas are not for."""
    job.require("cost.expert_parallel", precision=("float32",), recompute=("none",))
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
