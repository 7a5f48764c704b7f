"""Generation: the cache that a rank holds, and the time of a token on ranks that have split the model between them.

    kv_cache(config, tokens)                    bytes: 2 x layers x K x E x tokens x batch x itemsize, on 1 rank
    token_sent(config, ranks)                   elements and messages for one more token of each sequence
    token_seconds(config, ranks, link)          seconds for one more token of each sequence

For every token a rank reads its weights and its cache once, and does very little arithmetic with each number.  So
memory bandwidth sets the pace: N ranks, each of which reads 1/N, would be N times as fast without communication.  But
each layer has two all-reduces, one after the other, of D numbers for each sequence.  One more follows the embedding,
which is split by its vocabulary, and the V logits are gathered.

    compute     max(bytes read / memory, operations / flops)
    messages    the time of an all-reduce of no bytes: `begin`, and its rounds x latency
    bytes       the additional time for its bytes: bytes / bandwidth

The formula leaves out the launch time of other kernels, which counts if they are short: on many ranks, or in a small
model.

Sources: [Pope] et al. 2022, "Efficiently Scaling Transformer Inference", arXiv 2211.05102, sections 2 and 3; for the
links, those of `labs.cost.cluster`.
"""

from dataclasses import dataclass

from labs.cost.cluster import FLOPS, LINKS, MEMORY, LinkClass, all_gather_seconds, all_reduce_seconds
from labs.cost.model_states import FLOAT, parameter_sizes
from labs.cost.split import share
from labs.cost.traffic import Traffic, all_gather, all_reduce


def kv_cache(config, tokens: int, batch: int = 1, ranks: int = 1, itemsize: int = FLOAT, rank: int = 0) -> int:
    """Return the bytes of the cache on a rank for sequences of this many tokens, as in `labs.generate`.

    Heads of keys and values are divided among the ranks as evenly as possible; if there are fewer heads than ranks,
    each rank has one. Raises ValueError if the query heads cannot be divided in the same way.
    """
    kv_heads = share(config, ranks, rank).kv_heads
    return 2 * config.depth * kv_heads * config.head_size * tokens * batch * itemsize


def token_sent(config, ranks: int, rank: int = 0, batch: int = 1, tokens: int = 1) -> Traffic:
    """Return what a rank sends while this many tokens of each sequence pass through a model that `labs.tp` has split.

    A prompt has several tokens, and logits only for its last one.  The vocabulary is cut into equal pieces with
    padding, and the padding is gathered, too.
    """
    x, v = batch * tokens * config.dim, batch * -(-config.vocab // ranks)
    return all_reduce(x, ranks, rank) * (2 * config.depth + 1) + all_gather(ranks * v, ranks, rank)


# ---- seconds ---------------------------------------------------------------------------------------------


# The links that a model split for generation may run over.
LINK_CLASSES = {name: LINKS[name] for name in ("NVLink 4", "PCIe 5", "Ethernet, 10 Gb/s")}


@dataclass(frozen=True)
class Token:
    """Seconds of a token: for computation, for starting messages, and for the messages' bytes."""

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
    """Return the time of one more token for each sequence, after `past` others, in numbers of `itemsize` bytes."""
    numbers = sum(parameter_sizes(config)) - (0 if config.tied else config.vocab * config.dim)  # only one row is read
    read = itemsize * numbers / ranks + kv_cache(config, past, batch, ranks, itemsize)
    attention = 4 * config.depth * config.dim * past  # q times k, and the softmax times v
    compute = max(read / memory, batch * (2 * numbers + attention) / ranks / flops)
    if ranks == 1:
        return Token(compute)
    reduced, gathered = batch * config.dim * itemsize, batch * config.vocab * itemsize
    times = 2 * config.depth + 1
    messages = times * all_reduce_seconds(0, ranks, link) + all_gather_seconds(0, ranks, link)
    whole = times * all_reduce_seconds(reduced, ranks, link) + all_gather_seconds(gathered, ranks, link)
    return Token(compute, messages, whole - messages)
