"""What a tensor-parallel rank has of the GPT: how many heads, how much of the MLP's width and of the vocabulary.

    share(config, ranks, rank)      a Share: what `gpt_layers` and `activations` read of a Config, for one rank

The MLP's width and the vocabulary are cut as torch.chunk cuts: in chunks of ceil(size / N), the last ones shorter, or
empty. Heads stay whole, and a rank has the head of keys and values that its query heads read: where there are fewer of
those than ranks, neighbours have the same one.
"""

from dataclasses import dataclass
from typing import Any

from labs.cost.traffic import piece


@dataclass(frozen=True)
class Share:
    """The widths that a rank computes with; those of x, and of a head, are everybody's.

    copies: how many neighbours have the same heads of keys and values.  shards: into how many x is cut, along the
    sequence, where no rank has it whole.
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
    """Raises ValueError for heads that cannot be dealt out to this many ranks."""
    if isinstance(config, Share):
        return config
    heads, kv_heads, copies = dealt_heads(config.heads, config.kv_heads, ranks, rank)
    vocab, hidden = (chunk(size, ranks, rank) for size in (config.vocab, config.hidden))
    everybodys = (config.context, config.tied, config.head_size)
    shards = ranks if sequence_parallel else 1
    return Share(vocab, config.dim, config.depth, heads, kv_heads, hidden, *everybodys, ranks, copies, shards)


def chunk(size: int, pieces: int, number: int) -> int:
    """The size of a piece of a dim that is cut as torch.chunk cuts."""
    longest = -(-size // pieces)
    return max(0, min(longest, size - number * longest))


def dealt_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """Heads of queries, and of keys and values; and how many ranks have the latter."""
    if not can_be_dealt(heads, kv_heads, ranks):
        work = [n for n in range(1, heads + 1) if can_be_dealt(heads, kv_heads, n)]
        nearest = [*[n for n in work if n < ranks][-1:], *[n for n in work if n > ranks][:1]]
        raise ValueError(
            f"{heads} query heads over {kv_heads} of keys and values cannot be dealt out to {ranks} ranks: "
            f"use {' or '.join(map(str, nearest))}"
        )
    if ranks > kv_heads:
        return heads // ranks, 1, ranks // kv_heads
    own = piece(kv_heads, ranks, rank)
    return own * heads // kv_heads, own, 1


def can_be_dealt(heads: int, kv_heads: int, ranks: int) -> bool:
    return ranks <= kv_heads or (ranks % kv_heads == 0 and heads % ranks == 0)
