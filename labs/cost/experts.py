"""Expert parallelism: bytes that a rank sends and holds in a step, for given loads of the experts.

    loads      for each forward of a mixture in the step, [rank][expert]: the rows of each rank along ep for each expert
    config     a labs.moe.MoEConfig; a pair of a token and one of its experts is a row

In a layer, a rank sends its own rows that leave it, and the results of those that came; in backward as many gradients.
If L rows leave and C come, that is 2 (L + C) D elements, and 8 bytes for the count of each expert elsewhere. Even loads
have L = C = (ep-1)/ep of the rank's rows.

Source: [GShard] Lepikhin et al. 2020, arXiv 2006.16668, section 3.2.
"""

from collections.abc import Sequence
from fractions import Fraction

from labs.cost.data_parallel import buckets, ddp_sent
from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, HeldBytes, Prediction, gpt_layers, optimizer_state
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


def mixture_sizes(config) -> tuple[list[int], list[int]]:
    """Return the elements of each parameter outside of the experts, and of each in one expert of every layer."""
    matrix = config.dim * config.hidden
    embed, *layers = gpt_layers(config)
    dense = embed.sizes
    for layer in layers[: config.depth]:
        dense += [*layer.sizes[:-3], config.experts * config.dim, *([config.shared * matrix] * 3 * (config.shared > 0))]
    return dense + [size for layer in layers[config.depth :] for size in layer.sizes], [matrix] * 3


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
