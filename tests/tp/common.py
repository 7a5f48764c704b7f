"""Shared code of several tests of labs.tp: shapes, a batch, and how far a split model differs."""

import re

import pytest
import torch
import torch.distributed as dist

from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.tp import (
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
    """Return the largest difference of this rank's part of every gradient."""
    cuts, rank = model.tensor_parallel.cuts, dist.get_rank()
    whole = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    parts = {name: cuts[name].part(g, rank) if name in cuts else g for name, g in whole.items()}
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == parts.keys() and all(own[name].shape == parts[name].shape for name in own)
    return max((own[name] - parts[name]).abs().max().item() for name in own if own[name].numel())


def refuse(make, text, kind=ValueError):
    with pytest.raises(kind, match=re.escape(text)):
        make()


def split(plan, model=None, mesh=None):
    return parallelize(GPT(SMALL) if model is None else model, mesh or tp_mesh(), plan)
