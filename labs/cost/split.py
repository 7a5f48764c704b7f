"""A tensor-parallel rank's share of the GPT: its heads, and its part of the MLP's width and of the vocabulary.

    share(config, ranks, rank)      a Share: the fields of a Config that `gpt_layers` and `activations` read, per rank

The MLP's width and the vocabulary are cut as torch.chunk cuts: into chunks of ceil(size / N), of which the last may be
shorter, or empty. Heads stay whole. A rank has the heads of keys and values that its query heads read; if there are
fewer of those than ranks, neighbours have copies of the same one.
"""

from dataclasses import dataclass
from typing import Any

from labs.cost.traffic import piece


@dataclass(frozen=True)
class Share:
    """The widths that a rank computes with; the widths of x and of a head are the same on every rank.

    copies: number of neighbours that have the same heads of keys and values
    shards: number of shards into which x is cut along the sequence, outside of split layers
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    tied: bool
    head_size: int
    ranks: int = 1
    copies: int = 1
    shards: int = 1


def share(config: Any, ranks: int = 1, rank: int = 0, sequence_parallel: bool = False) -> Share:
    """Return a rank's share of the GPT.  Raises ValueError for heads that this many ranks cannot share."""
    if isinstance(config, Share):
        return config
    heads, kv_heads, copies = count_heads(config.heads, config.kv_heads, ranks, rank)
    vocab, hidden = (chunk(size, ranks, rank) for size in (config.vocab, config.hidden))
    everybodys = (config.context, config.tied, config.head_size)
    shards = ranks if sequence_parallel else 1
    return Share(vocab, config.dim, config.depth, heads, kv_heads, hidden, *everybodys, ranks, copies, shards)


def chunk(size: int, pieces: int, number: int) -> int:
    """Return the size of a piece of a dim that is cut as torch.chunk cuts."""
    longest = -(-size // pieces)
    return max(0, min(longest, size - number * longest))


def count_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """Return a rank's number of query heads, of heads of keys and values, and the number of ranks that have these."""
    if not can_be_dealt(heads, kv_heads, ranks):
        work = [n for n in range(1, heads + 1) if can_be_dealt(heads, kv_heads, n)]
        nearest = [*[n for n in work if n < ranks][-1:], *[n for n in work if n > ranks][:1]]
        raise ValueError(
            f"{heads} query heads over {kv_heads} of keys and values cannot be split over {ranks} ranks: "
            f"use {' or '.join(map(str, nearest))}"
        )
    if ranks > kv_heads:
        return heads // ranks, 1, ranks // kv_heads
    own = piece(kv_heads, ranks, rank)
    return own * heads // kv_heads, own, 1


def can_be_dealt(heads: int, kv_heads: int, ranks: int) -> bool:
    return ranks <= kv_heads or (ranks % kv_heads == 0 and heads % ranks == 0)
