"""Shared code of several tests of labs.fsdp: awkward or small models, and ways to shard them."""

from functools import partial

import torch
from torch import nn

from labs.dtensor import DTensor
from labs.fsdp import fully_shard
from tests.models import Awkward

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def awkward(dtype=torch.float64):
    model = Awkward(dtype)
    model.scale = nn.Parameter(model.scale.data.view(1))  # a parameter without dims has nothing to cut
    return model


def layers_of(model):
    return [*model.layers, model.mixed["norm"]]


def sharded(model, mesh, layers=layers_of, **options):
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def full(model):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def seeded(make):
    torch.manual_seed(0)
    return make()


def linear():
    return seeded(lambda: nn.Linear(3, 3))
