"""Context parallelism: bytes that a rank sends and holds in a step, as `labs.cp` cuts the GPT's sequences in zigzag.

There are N ranks, and B sequences of T tokens at a time, of which rank r computes c_r.  Let n be the elements of keys
and values of one token in all B sequences, n = 2 B K E.  For each layer and micro-batch, rank r sends:

                 forward                                   backward
    "ring"       n (T - c_(r+1))                           n (T - c_(r+1)), and the gradients n (T - c_r)
    "gather"     all_gather n N c_max                      all_gather n N c_max, reduce_scatter n N c_max
    "ulysses"    all_to_all of q, k and v to their         the same, in the other direction
                 heads, and of y to its tokens

In the limit, ring and gather send 6 (N-1)/N B T K E in all.  Ulysses sends 4 (N-1)/N B T/N (H + K) E: that is less if
N > 2/3 (H + K) / K.  Once in a step, the gradients of all parameters are averaged over the ranks, as in data
parallelism.

Activations are those of c_r tokens; in "ulysses", those between the exchanges are of T tokens, for the rank's heads.
"gather" adds the keys and values of one layer at a time, for the whole sequences: 2 B T K E, and in backward their
gradients.

Sources: Liu, Zaharia and Abbeel 2023, arXiv 2310.01889, section 3; Jacobs et al. 2023, arXiv 2309.14509, section 3;
Llama Team 2024, arXiv 2407.21783, section 3.3.2.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

from labs.cost.data_parallel import buckets, ddp_held, ddp_sent
from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, HeldBytes, Prediction, parameter_sizes
from labs.cost.saved_activations import activations, layer_terms
from labs.cost.split import Share
from labs.cost.traffic import all_reduce_limit, piece

PHASES = "forward", "backward"
ROWS = 128  # queries that labs.cp takes at a time
WAYS = "ring", "gather", "ulysses"


def cp(job: Job, way: str = "ring") -> Prediction:
    """Predict a step in float32 on CPU in which all ranks read the same batch; way: a name in WAYS."""
    job.require("cost.cp", precision=("float32",), recompute=("none",))
    sizes, times = parameter_sizes(job.config), job.accumulation * job.config.depth
    attention = sum(attention_sent(job, way).values())
    counts = {op: number * times for op, number in calls(job, way).items()}
    averaged = len(buckets(sizes, "overlapped"))
    return Prediction(
        sent=ddp_sent(sizes, job.ranks, "overlapped", job.rank) + times * attention,
        collectives=counts | {"all_reduce": averaged},
        textbook=FLOAT * all_reduce_limit(sum(sizes), job.ranks) + times * textbook(job, way),
        held=cp_held(job, way),
    )


# ---- sent ------------------------------------------------------------------------------------------------


def zigzag_places(job: Job) -> list[list[int]]:
    """Return the places of each rank's tokens: two chunks of the sequence, one from either end."""
    ends = [job.T * n // (2 * job.ranks) for n in range(2 * job.ranks + 1)]
    chunks = [range(start, end) for start, end in pairwise(ends)]
    return [[*chunks[rank], *chunks[-1 - rank]] for rank in range(job.ranks)]


def attention_sent(job: Job, way: str) -> dict[str, int]:
    """Return the bytes that the rank sends for a layer and a micro-batch, as {"forward": bytes, "backward": bytes}.

    Raises ValueError for another way, and for fewer heads of keys and values than ranks under "ulysses".
    """
    tokens, ranks, rank = [*map(len, zigzag_places(job))], job.ranks, job.rank
    each = FLOAT * job.batch * job.config.head_size  # bytes of a head, per token
    own, kv_heads, group = tokens[rank], job.config.kv_heads, job.config.heads // job.config.kv_heads
    match way:
        case "ring":
            passed = job.T - tokens[(rank + 1) % ranks] if ranks > 1 else 0
            sizes = passed, passed + job.T - own
            return {phase: 2 * kv_heads * each * n for phase, n in zip(PHASES, sizes, strict=True)}
        case "gather":
            padded = (ranks - 1) * max(tokens)
            return {phase: 2 * kv_heads * each * n * padded for phase, n in zip(PHASES, (1, 2), strict=True)}
        case "ulysses":
            if ranks > kv_heads:
                raise ValueError(f"{kv_heads} heads of keys and values are fewer than {ranks} ranks: use {kv_heads}")
            heads = piece(kv_heads, ranks, rank)
            to_heads, to_tokens = (kv_heads - heads) * own, heads * (job.T - own)
            there, back = (group + 2, group)  # q, k and v, and the output
            sizes = there * to_heads + back * to_tokens, back * to_heads + there * to_tokens
            return {phase: each * n for phase, n in zip(PHASES, sizes, strict=True)}
    raise ValueError(f"way is {way!r}: it must be one of {', '.join(map(repr, WAYS))}")


def textbook(job: Job, way: str) -> Fraction:
    """Return the bytes for a layer and a micro-batch as if everything divided evenly."""
    config, N = job.config, job.ranks
    row = FLOAT * job.tokens * config.head_size * Fraction(N - 1, N)
    return 4 * row * (config.heads + config.kv_heads) / N if way == "ulysses" else 6 * row * config.kv_heads


def calls(job: Job, way: str) -> dict[str, int]:
    """Return the collectives of a layer and a micro-batch, as {name: calls}."""
    if way == "ring":
        return {"send": 3 * (job.ranks - 1), "recv": 3 * (job.ranks - 1)}
    return {"all_gather": 2, "reduce_scatter": 1} if way == "gather" else {"all_to_all": 8}


# ---- held ------------------------------------------------------------------------------------------------


def cp_held(job: Job, way: str) -> HeldBytes:
    """Return the bytes of data parallelism on the rank's tokens, or more while attention's backward runs."""
    own = replace(job, context=len(zigzag_places(job)[job.rank]))
    most = ddp_held(own, "overlapped")
    in_attention = most.P + most.S + most.P + attention_held(job, own, way)
    swapped = job.config.depth * in_heads(job, own) if way == "ulysses" else 0
    peak = max(most.peak, in_attention) + 2 * INDEX * job.tokens * job.accumulation + swapped  # the whole batch
    # One micro-batch's pieces are there at a time, and the number of tokens that count is saved, too, as a float.
    less = INDEX if isinstance(job.config, Share) else 2 * INDEX * own.tokens * (job.accumulation - 1)
    return replace(most, A=most.A - less + FLOAT + swapped, comm=None, peak=peak)


def in_heads(job: Job, own: Job) -> int:
    """Return by how much the q, k, v, y and log-sum-exps of the rank's heads exceed those of its tokens, in a layer."""
    heads = piece(job.config.kv_heads, job.ranks, job.rank)
    more = job.T * heads - own.T * job.config.kv_heads  # heads of keys times tokens
    of_queries = more * job.config.heads // job.config.kv_heads
    return FLOAT * job.batch * (2 * job.config.head_size * (of_queries + more) + of_queries)


def attention_held(job: Job, own: Job, way: str) -> int:
    """Return the bytes besides P, G and S while backward passes through the last layer's attention.

    Besides the layer's activations and the gradients of x and y, it holds:

        ring      a part of dq and the sum so far; keys and values that are here, leave and arrive, and the same of
                  their gradients, which with more than two ranks are in flight meanwhile; two blocks of scores, and a
                  mask
        gather    dq; all keys and values, and their gradients, with two blocks of scores and a mask, or with the
                  copies that are cut, padded and sent
        ulysses   q, k, v and y with other heads

    own: the job on the rank's tokens alone
    """
    config, terms = job.config, layer_terms(own, "none")
    widths = config.dim, config.heads * config.head_size, 2 * config.kv_heads * config.head_size
    x, y, pair = (FLOAT * own.tokens * n for n in widths)
    layer = terms["attention"] - y * (config.heads > 1 and own.T > 1) + terms["rotary"] + terms["norms"] // 2
    saved = activations(own)["tokens"] + (config.depth - 1) * sum(terms.values()) + layer + x + y
    whole, several, pieces = pair * job.T // own.T, job.ranks > 2, zigzag_places(job)
    scores = partial(block_bytes, job, pieces[job.rank])
    match way:
        case "ring":
            others = max((scores(keys) for rank, keys in enumerate(pieces) if rank != job.rank), default=0)
            later = (2 + several) * y + (5 + 2 * several) * pair + others
            return saved + max(y + 4 * pair + scores(pieces[job.rank]), later if job.ranks > 1 else 0)
        case "gather":
            return saved + y + max(3 * whole + scores(range(job.T)), 5 * whole + 2 * pair)
    return saved + 4 * y + 2 * pair


def block_bytes(job: Job, queries: Sequence[int], keys: Sequence[int]) -> int:
    """Return the most bytes of two blocks of scores and a mask; a block has ROWS queries, and the keys before them."""
    blocks = [queries[start : start + ROWS] for start in range(0, len(queries), ROWS)]
    scores = max(len(block) * bisect_right(keys, block[-1]) for block in blocks)
    return (2 * FLOAT * job.batch * job.config.heads + 1) * scores
