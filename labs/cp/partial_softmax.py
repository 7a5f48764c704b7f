"""Attention to a part of the keys, and the merge of two parts: the softmax over all keys, block by block.

A softmax divides by the sum over all keys.  A rank that has only some of the keys divides by their sum, and keeps the
logarithm of that sum, which makes the division undone later.  Let o_a be the output over the keys a, and l_a the
logarithm of the sum of exp(q·k / sqrt(E)) over them, the log-sum-exp.  The output over both parts is their mean,
weighted by their sums:

    l = log(exp(l_a) + exp(l_b))            o = exp(l_a - l) o_a + exp(l_b - l) o_b

Merging is exact, in any order.  A part without a key that the query may see has the smallest number there is as its l,
and so no weight.

Backward needs no merge.  From l of *all* keys it computes any block's probabilities again, p = exp(q·k / sqrt(E) - l).
With the gradient g of the output, and d = o·g, which is one number per query:

    dv = pᵀ g          ds = p (g vᵀ - d) / sqrt(E)          dq = ds k          dk = dsᵀ q

Queries are taken ROWS at a time, so that their scores stay small.  Places are in ascending order, so the keys that such
rows may see come first: all later keys are skipped, and cost no time.

    B batch    T queries    S keys    E width of a head    K heads of keys and values    G query heads for each of them

Everything is computed in float32 at least.  Sources: Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022,
arXiv 2205.14135, section 3.1 and appendix B.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from labs.cp.pieces import Tokens
from labs.rope import at_least_float32

Part = tuple[Tensor, Tensor]  # output [B, K, G, T, E] and log-sum-exp [B, K, G, T]
ROWS = 128


def merge(a: Part, b: Part) -> Part:
    """Return the attention to the keys of both parts."""
    (o_a, l_a), (o_b, l_b) = a, b
    l_both = torch.logaddexp(l_a, l_b)
    return (l_a - l_both).exp()[..., None] * o_a + (l_b - l_both).exp()[..., None] * o_b, l_both


def attend(q_BKGTE: Tensor, pair_2BKSE: Tensor, queries: Tokens, keys: Tokens) -> Part:
    """Return the attention to these keys alone, in float32 at least.

    pair: keys and values.
    queries, keys: the tokens of q, and those of the pair.
    """
    q, (k, v) = at_least_float32(q_BKGTE), at_least_float32(pair_2BKSE)
    output, logsumexp = torch.zeros_like(q), torch.full_like(q[..., 0], torch.finfo(q.dtype).min)
    for rows, seen, hidden in blocks(queries, keys, q.device):
        p = scores_of(q[..., rows, :], k[:, :, seen], hidden)
        logsumexp[..., rows] = p.logsumexp(-1).clamp(min=torch.finfo(q.dtype).min)
        p.sub_(logsumexp[..., rows, None]).exp_()
        output[..., rows, :] = torch.einsum("bkgts,bkse->bkgte", p, v[:, :, seen])
        del p  # before the next block's
    return output, logsumexp


class Output(NamedTuple):
    """The gradient g of the output of all keys, and their l and d, as backward needs them."""

    gradient: Tensor
    logsumexp: Tensor
    dot: Tensor

    @classmethod
    def of(cls, output: Tensor, logsumexp: Tensor, gradient: Tensor) -> Self:
        gradient = at_least_float32(gradient)
        return cls(gradient, logsumexp, (output * gradient).sum(-1))


def attend_backward(
    q_BKGTE: Tensor, pair_2BKSE: Tensor, whole: Output, queries: Tokens, keys: Tokens
) -> tuple[Tensor, Tensor]:
    """Return these keys' part of dq, and the pair of their dk and dv from these queries, in float32 at least."""
    q, pair = at_least_float32(q_BKGTE), at_least_float32(pair_2BKSE)
    dq, d_pair = torch.zeros_like(q), torch.zeros_like(pair, memory_format=torch.contiguous_format)
    (k, v), (dk, dv) = pair, d_pair
    for rows, seen, hidden in blocks(queries, keys, q.device):
        p = scores_of(q[..., rows, :], k[:, :, seen], hidden).sub_(whole.logsumexp[..., rows, None]).exp_()
        g = whole.gradient[..., rows, :]
        dv[:, :, seen] += torch.einsum("bkgts,bkgte->bkse", p, g)
        ds = torch.einsum("bkgte,bkse->bkgts", g, v[:, :, seen]).sub_(whole.dot[..., rows, None]).mul_(p)
        ds *= q.shape[-1] ** -0.5
        dq[..., rows, :] = torch.einsum("bkgts,bkse->bkgte", ds, k[:, :, seen])
        dk[:, :, seen] += torch.einsum("bkgts,bkgte->bkse", ds, q[..., rows, :])
        del p, ds
    return dq, d_pair


def scores_of(q_BKGTE: Tensor, k_BKSE: Tensor, hidden: Tensor) -> Tensor:
    """Return new scores, in which those of hidden keys are -inf."""
    scores = torch.einsum("bkgte,bkse->bkgts", q_BKGTE, k_BKSE).mul_(q_BKGTE.shape[-1] ** -0.5)
    return scores.masked_fill_(hidden, -torch.inf)


def blocks(queries: Tokens, keys: Tokens, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield some queries, the keys up to the last that they may see, and which of these are hidden from which query.

    A key is hidden from a query that stands before it, or in another document.
    """
    for start in range(0, len(queries.places), ROWS):
        rows = slice(start, start + ROWS)
        seen = slice(0, bisect_right(keys.places, queries.places[rows][-1]))
        if seen.stop:
            q_T, k_S = (torch.tensor(places, device=device) for places in (queries.places[rows], keys.places[seen]))
            hidden = k_S > q_T[:, None]
            if queries.documents is not None:
                others = queries.documents[:, rows, None] != keys.documents[:, None, seen]
                hidden = (hidden | others)[:, None, None]
            yield rows, seen, hidden
