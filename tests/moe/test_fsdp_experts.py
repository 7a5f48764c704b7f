"""Tests of experts under labs.fsdp, sharded along their own axis, against one process in float64."""

import math

import pytest
import torch
import torch.distributed as dist

from labs.agree import everybodys
from labs.clip import global_norm, shorten
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.mesh import Mesh
from labs.moe import MoEGPT, split_experts
from labs.moe.expert_parallel import AXES
from tests.moe.test_expert_parallel import ODD, STEPS, batch

MOST = 0.5  # the norm that is not clipped


def trained(shape):
    """Return this rank's norms, and the whole parameters after clipped steps."""
    mesh, model, norms = Mesh(shape, AXES), MoEGPT(ODD).double(), []
    dp, experts = mesh._flatten("dp"), split_experts(model, mesh)
    for layer, its in zip(model.layers.values(), experts, strict=True):
        fully_shard(its, mesh=mesh["edp"]).set_gradient_divide_factor(mesh.size())
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    split = {p for its in experts for p in its.parameters()}
    rest = [p for p in model.parameters() if p not in split]
    for step in range(STEPS):
        model(*batch(step, dist.get_rank())).backward()
        both = global_norm(rest, [dp.get_group()]), global_norm(list(split), mesh.get_all_groups())
        norms.append(torch.stack(both).norm())
        shorten(model.parameters(), norms[-1], MOST)
        optimizer.step()
        optimizer.zero_grad()
    own = {name: p.full_tensor() for name, p in model.named_parameters()}
    full = {name: p for its in everybodys(own, mesh.get_group("ep")).values() for name, p in its.items()}
    return norms, full


def alone(ranks):
    model, norms = MoEGPT(ODD).double(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        for part in range(ranks):
            (model(*batch(step, part)) / ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MOST))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=str)
def test_experts_sharded_along_their_own_axis_equal_one_process(shape):
    job = run(trained, shape, ranks=math.prod(shape), record="communication")
    [(expected_norms, expected)] = run(alone, math.prod(shape), ranks=1)
    for norms, full in job:
        assert torch.allclose(torch.stack(norms), torch.stack(expected_norms), rtol=1e-12)
        assert full.keys() == expected.keys()
        assert max((full[name] - p).abs().max().item() for name, p in expected.items()) < 1e-12
    verdict = would_hang(job.recording)
    assert verdict.name == SOUND, verdict
