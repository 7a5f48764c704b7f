"""Generation: the cache that a rank holds, and the time of a token on ranks that have split the model between them.

    kv_cache(config, tokens)                    bytes: 2 x layers x K x E x tokens x batch x itemsize, on 1 rank
    token_sent(config, ranks)                   elements and messages, of one more token for each sequence of the batch
    token_seconds(config, ranks, link)          how long it takes
    token_table(config)                         the same for classes of links and numbers of ranks: rows for a table

For every token a rank reads its weights and its cache once, and computes next to nothing with each number of them.
So memory sets the pace, and N ranks, each of which reads 1/N, would be N times as quick if they had nothing to tell
each other.  They have: two all-reduces a layer, one after the other, of D numbers for each sequence; one more behind
the embedding, which is split by its vocabulary; and a gather of V logits.

    compute     max(bytes read / memory, operations / flops)
    messages    what an all-reduce takes however short it is: `begin`, and its rounds x latency
    bytes       what its bytes take besides: bytes / bandwidth

Left out is the time that other kernels take to begin, which counts where they are short: on many ranks, or in a small
model.

Sources: [Pope] et al. 2022, "Efficiently Scaling Transformer Inference", arXiv 2211.05102, sections 2 and 3; [NCCL]
its own model of latencies, src/graph/tuning.cc, the same in NCCL 2.20 (2024) and 2.28 (2025), protocol LL; [Larsen] et
al. 2009, "Architectural Breakdown of End-to-End Latency in a TCP/IP Network"; [H100] NVIDIA's data sheet (2023), SXM;
[Llama] Llama Team 2024, arXiv 2407.21783, table 4; [Thakur] as in `labs.cost.collectives`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from labs.cost.collectives import Traffic, all_gather, all_reduce, doubling_seconds, ring_seconds, tree_seconds
from labs.cost.memory import FLOAT, parameter_sizes
from labs.cost.split import share


def kv_cache(config, tokens: int, batch: int = 1, ranks: int = 1, itemsize: int = FLOAT, rank: int = 0) -> int:
    """Bytes on a rank for sequences of so many tokens: `labs.generate`.

    Heads of keys and values are dealt out as evenly as possible; where there are fewer than ranks, each rank has one.
    Raises ValueError where the query heads cannot follow.
    """
    kv_heads = share(config, ranks, rank).kv_heads
    return 2 * config.depth * kv_heads * config.head_size * tokens * batch * itemsize


def token_sent(config, ranks: int, rank: int = 0, batch: int = 1, tokens: int = 1) -> Traffic:
    """What a rank sends while so many tokens of each sequence go through a model that `labs.tp` has split; more than
    one for a prompt, of which only the last has logits.  The vocabulary is cut in equal pieces, with a padding that is
    gathered along."""
    x, v = batch * tokens * config.dim, batch * -(-config.vocab // ranks)
    return all_reduce(x, ranks, rank) * (2 * config.depth + 1) + all_gather(ranks * v, ranks, rank)


# ---- seconds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkClass:
    """Seconds to begin a collective, and of each message; bytes per second out of each rank while as many come in.

    algorithms: for an all-reduce; the quickest for its size is taken.
    """

    begin: float
    latency: float
    bandwidth: float
    algorithms: tuple[Callable[..., float], ...] = (ring_seconds, tree_seconds, doubling_seconds)


LINK_CLASSES = {
    "NVLink 4": LinkClass(6.6e-6, 0.6e-6, 450e9),  # [NCCL]; [H100]: 900 GB/s, both ways together
    "PCIe 5": LinkClass(6.6e-6, 1.0e-6, 50e9),  # [NCCL]; 16 lanes, 63 GB/s each way, of which some 50 arrive
    "Ethernet, 10 Gb/s": LinkClass(6.6e-6, 10e-6, 1.25e9),  # [Larsen]: through Linux' TCP, at best
}
MEMORY = 3.35e12  # bytes a second that an H100 reads [H100]
FLOPS = 400e12  # operations a second that an H100 reaches in practice, in bfloat16 [Llama]


@dataclass(frozen=True)
class Token:
    """Seconds, by what they go to."""

    compute: float
    messages: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.messages + self.bytes


def token_seconds(
    config,
    ranks: int = 1,
    link: LinkClass = LINK_CLASSES["NVLink 4"],
    past: int = 0,
    batch: int = 1,
    itemsize: int = 2,
    memory: float = MEMORY,
    flops: float = FLOPS,
) -> Token:
    """One more token for each sequence, behind `past` others, in numbers of `itemsize` bytes."""
    numbers = sum(parameter_sizes(config)) - (0 if config.tied else config.vocab * config.dim)  # no row but one is read
    read = itemsize * numbers / ranks + kv_cache(config, past, batch, ranks, itemsize)
    attention = 4 * config.depth * config.dim * past  # q k, and its softmax by v
    compute = max(read / memory, batch * (2 * numbers + attention) / ranks / flops)
    if ranks == 1:
        return Token(compute)
    reduced, gathered = batch * config.dim * itemsize, batch * config.vocab * itemsize
    times = 2 * config.depth + 1
    messages = times * all_reduce_seconds(0, ranks, link) + all_gather_seconds(0, ranks, link)
    whole = times * all_reduce_seconds(reduced, ranks, link) + all_gather_seconds(gathered, ranks, link)
    return Token(compute, messages, whole - messages)


def all_reduce_seconds(size: int, ranks: int, link: LinkClass) -> float:
    return link.begin + min(seconds(size, ranks, link.latency, link.bandwidth) for seconds in link.algorithms)


def all_gather_seconds(size: int, ranks: int, link: LinkClass) -> float:
    """Ring: N-1 rounds that move (N-1)/N S, which is half of an all-reduce [Thakur, 4.1]."""
    return link.begin + ring_seconds(size, ranks, link.latency, link.bandwidth) / 2


def token_table(config, ranks: Iterable[int] = (1, 2, 4, 8), **given: Any) -> list[dict[str, Any]]:
    """Milliseconds a token; `given` as for `token_seconds`."""
    rows = []
    for name, link in LINK_CLASSES.items():
        for n in ranks:
            token = token_seconds(config, n, link, **given)
            parts = {"compute": token.compute, "messages": token.messages, "bytes": token.bytes, "all": token.seconds}
            rows.append({"link": name, "ranks": n} | {f"{part}, ms": 1e3 * s for part, s in parts.items()})
    return rows
