"""Attention to gathered keys and values: each rank keeps its queries, and all-gathers everybody's keys and values.

This is the plain way, which Llama 3 took.  With few heads of keys and values, these are small beside the queries and
the rest of a layer, and gathering them takes one collective, which any mask and any cut of the sequence allows.  In
backward a reduce-scatter adds up the gradients, and leaves each rank those of its own tokens.

    forward     all_gather of k and v
    backward    all_gather of k and v, reduce_scatter of dk and dv

A rank sends as many bytes as in a ring, but they wait for no computation, and none hides them.  Each rank holds all
keys and values of one layer at a time: they are dropped after the layer's forward, and gathered again in its backward.

Collectives gather pieces of one size, so shorter pieces are padded to the longest.

Source: Llama Team 2024, arXiv 2407.21783, section 3.3.2.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.collectives import place
from labs.cp.partial_softmax import Output, attend, attend_backward
from labs.cp.pieces import Pieces
from labs.group import all_gather, reduce_scatter


def gathered_attention(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, pieces: Pieces, group: ProcessGroup | None = None
) -> Tensor:
    """Return causal attention to the keys and values of all ranks, which each rank gathers.

    q, k, v: heads of this rank's tokens; each head of keys and values serves H / K heads of queries.
    """
    q_BKGTE = q_BHTE.unflatten(1, (k_BKTE.shape[1], -1))
    return GatheredAttention.apply(q_BKGTE, k_BKTE, v_BKTE, pieces, group).flatten(1, 2)


class GatheredAttention(torch.autograd.Function):
    """Attention to gathered keys and values, which backward gathers again, and whose gradients it scatters."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, group: ProcessGroup | None) -> Tensor:
        mine = pieces[place(group)[0]]
        output, logsumexp = attend(q, gather(torch.stack((k, v)), pieces, group), mine, pieces.whole)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.pieces, ctx.group = pieces, group
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        pieces, group = ctx.pieces, ctx.group
        pair = gather(torch.stack((k, v)), pieces, group)
        whole, mine = Output.of(output, logsumexp, gradient), pieces[place(group)[0]]
        dq, d_pair = attend_backward(q, pair, whole, mine, pieces.whole)
        return dq.to(q.dtype), *scatter(d_pair, pieces, group).to(k.dtype), None, None


def gather(pair_2BKTE: Tensor, pieces: Pieces, group: ProcessGroup | None) -> Tensor:
    """Gather all ranks' keys and values, and return them for the whole sequence."""
    longest = max(map(len, pieces.places))
    padded = pad(pair_2BKTE.movedim(3, 0), longest)
    gathered = padded.new_empty(dist.get_world_size(group) * longest, *padded.shape[1:])
    all_gather(gathered, padded, group=group)
    parts = [part[: len(places)] for part, places in zip(gathered.split(longest), pieces.places, strict=True)]
    return pieces.join(parts, 0).movedim(0, 3)


def scatter(pair_2BKTE: Tensor, pieces: Pieces, group: ProcessGroup | None) -> Tensor:
    """Add up all ranks' gradients of the whole sequence's keys and values, and return those of this rank's tokens."""
    longest, own = max(map(len, pieces.places)), len(pieces.places[place(group)[0]])
    parts = [pad(part, longest) for part in pieces.split(pair_2BKTE.movedim(3, 0), 0)]
    mine = reduce_scatter(torch.cat(parts).flatten(), group)
    return mine.view_as(parts[0])[:own].movedim(0, 3)


def pad(x: Tensor, longest: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, longest - len(x))).contiguous()
