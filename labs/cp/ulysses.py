"""Ulysses: an all-to-all turns a part of the sequence with all heads into the whole sequence with a part of the heads.

Each head attends by itself.  So before attention every rank sends every other rank the heads that are the other's, and
receives its own heads of all other tokens.  Attention is then that of one device, on fewer heads, and may be any kernel
there is.  Afterwards the outputs go back, each to the rank that has its token.

    q, k, v    [B, H, T/N, E]  --all_to_all-->  [B, H/N, T, E]
    output     [B, H, T/N, E]  <--all_to_all--  [B, H/N, T, E]

In backward the same moves are made in the other direction.  A rank sends (N-1)/N of its q, k, v and output, once in
forward and once in backward: this becomes less with more ranks, while a ring sends all keys and values N - 1 times
1/N.  But the ranks share out whole heads: there can be no more ranks than heads of keys and values.

Source: Jacobs et al. 2023, arXiv 2309.14509, which names it after its project, DeepSpeed-Ulysses.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.collectives import place
from labs.cp.pieces import Pieces


def ulysses_attention(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, pieces: Pieces, group: ProcessGroup | None = None
) -> Tensor:
    """Return causal attention to the keys and values of all ranks; each rank computes some heads for all tokens.

    q, k, v: heads of this rank's tokens; each head of keys and values serves H / K heads of queries.

    Raises ValueError for fewer heads of keys and values than ranks.
    """
    kv_heads, swap = k_BKTE.shape[1], Swap(k_BKTE.shape[1], pieces, group)
    q, k, v = (Move.apply(x.unflatten(1, (kv_heads, -1)), swap, True).flatten(1, 2) for x in (q_BHTE, k_BKTE, v_BKTE))
    if pieces.documents is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        mask = visible(pieces.documents)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return Move.apply(y.unflatten(1, (k.shape[1], -1)), swap, False).flatten(1, 2)


class Swap:
    """The exchange of heads for tokens; x has the dims [B, K, G, T, E]."""

    def __init__(self, kv_heads: int, pieces: Pieces, group: ProcessGroup | None):
        self.rank, ranks = place(group)
        if kv_heads < ranks:
            raise ValueError(
                f"{kv_heads} heads of keys and values are fewer than {ranks} ranks, and Ulysses gives each rank whole "
                "heads: use as many ranks as heads at most, or ring_attention or gathered_attention"
            )
        self.heads = [len(part) for part in torch.arange(kv_heads, device="cpu").tensor_split(ranks)]
        self.pieces, self.group = pieces, group

    def to_heads(self, x: Tensor) -> Tensor:
        """Return this rank's heads of all tokens, given all heads of this rank's tokens."""
        shapes = [(len(x), self.heads[self.rank], x.shape[2], len(places), x.shape[4]) for places in self.pieces.places]
        return self.pieces.join(exchange(x.split(self.heads, 1), shapes, self.group), 3)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, given this rank's heads of all tokens."""
        own = len(self.pieces.places[self.rank])
        shapes = [(len(x), heads, x.shape[2], own, x.shape[4]) for heads in self.heads]
        return torch.cat(exchange(self.pieces.split(x, 3), shapes, self.group), 1)


class Move(torch.autograd.Function):
    """One direction of a swap; its backward is the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, swap: Swap, to_heads: bool) -> Tensor:
        ctx.swap, ctx.to_heads = swap, to_heads
        return swap.to_heads(x) if to_heads else swap.to_tokens(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Move.apply(gradient, ctx.swap, not ctx.to_heads), None, None


def exchange(parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: ProcessGroup | None) -> list[Tensor]:
    """Send each rank its part, and return the parts that the ranks sent here, which have these shapes."""
    sizes = [prod(shape) for shape in shapes]
    received = parts[0].new_empty(sum(sizes))
    sent = torch.cat([part.flatten() for part in parts])
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group=group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def visible(documents_BT: Tensor) -> Tensor:
    """Return which keys a query may see, [B, 1, T, T]: those of its document that do not come after it."""
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same.tril()[:, None]
