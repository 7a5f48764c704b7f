"""What several tests of labs.tp use: shapes, a batch, and how far a split model is off."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from labs import native
from labs.fsdp import fully_shard
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.tp import (
    gpt_plan,
    parallelize,
)

SMALL = Config(vocab=23, dim=24, depth=2, heads=6, kv_heads=3, hidden=41, context=16)


def tp_mesh():
    return Mesh((dist.get_world_size(),), ("tp",))


def batch(vocabulary, tokens=8, seed=0):
    x, y = torch.randint(0, vocabulary, (2, 2, tokens), generator=torch.Generator().manual_seed(seed))
    y[0, 1] = -100
    return x, y


def largest_difference(model, reference):
    """Of every gradient, this rank's part."""
    cuts, rank = model.tensor_parallel.cuts, dist.get_rank()
    whole = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    parts = {name: cuts[name].part(g, rank) if name in cuts else g for name, g in whole.items()}
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == parts.keys() and all(own[name].shape == parts[name].shape for name in own)
    return max((own[name] - parts[name]).abs().max().item() for name in own if own[name].numel())


def sharded(model, mesh):
    optimizer = torch.optim.SGD(fully_shard(model, mesh=mesh).parameters(), 0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(config, sequence, side):
    mesh, plan, model = tp_mesh(), gpt_plan(config, sequence), GPT(config)
    if side == "ours":
        parallelize(model, mesh, plan)
    else:
        native.tp(model, native.device_mesh(mesh), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch(config.vocab)
    for _ in range(2):
        mark("step")
        with loss_parallel():
            model(x, y.abs() % config.vocab).backward()
        optimizer.step()
        optimizer.zero_grad()
    mark("end")


def refuse(make, text, kind=ValueError):
    with pytest.raises(kind, match=re.escape(text)):
        make()


def split(plan, model=None, mesh=None):
    return parallelize(GPT(SMALL) if model is None else model, mesh or tp_mesh(), plan)


def whole(size):
    torch.manual_seed(0)
    return nn.Linear(size, size)
