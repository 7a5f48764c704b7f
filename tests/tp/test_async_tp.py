"""Tests of labs.tp.async_tp against gather, multiply, scatter one after the other (labs.tp.conjugate)."""

import re

import pytest
import torch
import torch.distributed as dist

from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.tp.async_tp import gather_linear, linear_scatter
from labs.tp.conjugate import gather, scatter

B, T, D, F = 2, 12, 5, 7


def in_chunks(x, up, gate, down, mesh):
    a, b = gather_linear(x, [up, gate], mesh)
    return linear_scatter(torch.tanh(a) * b, down, mesh)


def one_after_the_other(x, up, gate, down, mesh):
    whole = gather(x, mesh, 1)
    return scatter(torch.tanh(whole @ up.T) * (whole @ gate.T) @ down.T, mesh, 1)


def both():
    torch.manual_seed(dist.get_rank())
    mesh = Mesh((dist.get_world_size(),), ("tp",))
    shapes = (B, T // mesh.size(), D), (F, D), (F, D), (D, F)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    found = []
    for mlp in (in_chunks, one_after_the_other):
        mark("step")
        leaves = [x.clone().requires_grad_() for x in given]
        y = mlp(*leaves, mesh)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        found.append([y.detach(), *(x.grad for x in leaves)])
    mark("end")
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_numbers_and_bytes_are_those_of_one_after_the_other(ranks):
    """Check also that only x's shard is kept, so that it is gathered once more for the gradients of its weights."""
    results = run(both, ranks=ranks, record="communication")
    assert max(results) < 1e-12
    seen, again = results.recording, (ranks - 1) * 8 * B * T // ranks * D
    for rank in range(ranks):
        assert seen.sent(rank, 0) == seen.sent(rank, 1) + again
        assert seen.counts(rank, 0)["send"] == 5 * (ranks - 1)


def test_a_sequence_that_does_not_divide_is_refused():
    def job():
        with pytest.raises(ValueError, match=re.escape("7 positions are not divisible by 2 ranks")):
            linear_scatter(torch.ones(1, 7, 3), torch.ones(2, 3), Mesh((2,), ("tp",)))

    run(job, ranks=2)
