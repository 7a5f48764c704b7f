"""Tests of the three ways to attend to other ranks' keys, against one process that has the whole sequence.

The reference writes out the softmax over all keys.  Each rank computes it, and compares its own tokens.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.cp import (
    Pieces,
    contiguous,
    gathered_attention,
    partial_softmax,
    ring_attention,
    striped,
    ulysses_attention,
    zigzag,
)
from labs.kit.launch import run
from labs.kit.nccl.would_hang import SOUND, would_hang
from tests.depth import deepen

WAYS = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}
CUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
# Heads of queries, heads of keys and values, and tokens: 16 are the fewest that eight ranks cut in zigzag, and nothing
# divides the others.
SIZES = (8, 8, 16), (16, 8, 23), (9, 9, 37)
E = 6


def drawn(heads, kv_heads, tokens, dtype=torch.float64, batch=2, width=E):
    """Return q, k, v and the output's gradient, of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = heads, kv_heads, kv_heads, heads
    made = [torch.randn(batch, each, tokens, width, generator=generator, dtype=torch.float64) for each in sizes]
    return [x.to(dtype).requires_grad_(at < 3) for at, x in enumerate(made)]


def packed(tokens, batch=2):
    """Return documents of other lengths in each row, one of which is one token long."""
    starts = [{1, tokens // 3, tokens // 3 + 1, tokens - 2}, {tokens // 2}]
    rows = [[int(place in starts[row % 2]) for place in range(tokens)] for row in range(batch)]
    return torch.tensor(rows).cumsum(1)


def reference(q, k, v, documents=None):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, :, None] != documents[:, None, :])[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def off(found, expected):
    return (found - expected).detach().abs().max().item()


def of_one(way, cut, sizes, documents):
    """Return how far a rank's output, dq, dk and dv are off those of one process."""
    tokens, whole = sizes[2], drawn(*sizes)
    documents = packed(tokens) if documents else None
    rank, pieces = dist.get_rank(), Pieces(CUTS[cut](tokens, dist.get_world_size()), documents)
    expected = reference(*whole[:3], documents)
    expected.backward(whole[3])
    q, k, v, gradient = (pieces.split(x.detach(), 2)[rank].requires_grad_(x.requires_grad) for x in whole)
    output = WAYS[way](q, k, v, pieces)
    output.backward(gradient)
    pairs = zip((output, q.grad, k.grad, v.grad), (expected, *(x.grad for x in whole[:3])), strict=True)
    return [off(mine, pieces.split(all_of_it, 2)[rank]) for mine, all_of_it in pairs]


def compare(rows):
    partial_softmax.ROWS = rows
    cases = product(WAYS, CUTS, SIZES, (False, True))
    return {case: errors for case in cases if not max(errors := of_one(*case)) <= 1e-12}


@pytest.mark.parametrize("ranks", [3, *deepen(1, 2, 4, 5, 8)])
def test_equals_one_process(ranks):
    """Check all ways, cuts, heads, lengths and masks; queries are taken a few at a time, so that there are blocks."""
    assert run(compare, 5, ranks=ranks) == [{}] * ranks


def test_no_backend_would_hang():
    job = run(lambda: [of_one(way, "zigzag", SIZES[0], False) for way in WAYS], ranks=3, record="communication")
    assert would_hang(job.recording).name == SOUND


# ---- rounding --------------------------------------------------------------------------------------------


def on_one_device(q, k, v, pieces):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def squares(way, dtype):
    """Return the squares of the errors of output, dq, dk and dv, added up over this rank's tokens."""
    whole = drawn(4, 2, 300, dtype, width=32)
    exact = [x.detach().double().requires_grad_(at < 3) for at, x in enumerate(whole)]
    expected = reference(*exact[:3])
    expected.backward(exact[3])
    rank, ranks = (0, 1) if way is None else (dist.get_rank(), dist.get_world_size())
    pieces = Pieces(zigzag(300, ranks))
    q, k, v, gradient = (pieces.split(x.detach(), 2)[rank].requires_grad_(x.requires_grad) for x in whole)
    output = (way or on_one_device)(q, k, v, pieces)
    output.backward(gradient)
    pairs = zip((output, q.grad, k.grad, v.grad), (expected, *(x.grad for x in exact[:3])), strict=True)
    with torch.no_grad():
        return torch.tensor([(mine.double() - pieces.split(it.detach(), 2)[rank]).square().sum() for mine, it in pairs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_at_most_twice_as_coarsely_as_one_device(dtype):
    def body():
        return squares(None, dtype), {name: squares(way, dtype) for name, way in WAYS.items()}

    job = run(body, ranks=2)
    alone = job[0][0].sqrt()
    for name in WAYS:
        together = sum(of_rank[1][name] for of_rank in job).sqrt()
        assert (together <= 2 * alone).all(), (name, together / alone)


# ---- refusals --------------------------------------------------------------------------------------------


def test_ulysses_refuses_more_ranks_than_heads():
    def body():
        with pytest.raises(ValueError, match=r"2 heads of keys and values are fewer than 3 ranks.*ring_attention"):
            of_one("ulysses", "zigzag", (4, 2, 16), False)

    run(body, ranks=3)
