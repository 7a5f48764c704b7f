"""Shared code of several tests of labs.zero: optimizers, a training, and the words of a failure."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.clip import clip_gradients
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.zero import Zero
from tests.models import Awkward, batch

STAGES = (1, 2, 3)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(stage, dtype, optimizer, micro_batches=1, norm=None, steps=5, make=Awkward, **options):
    model = make(dtype)
    zero = Zero(model, stage, optimizer, **options)
    for step in range(steps):
        mark("step")
        for i in range(micro_batches):
            (model(batch(step, dist.get_rank() * micro_batches + i)) / micro_batches).backward()
        if norm is not None:
            zero.sync()
            clip_gradients(zero.shards, norm, groups=(None,))
        zero.step()
    mark("end")
    return zero.full_state_dict()


def said(body, ranks=2):
    """Return the first line of a job's failure."""
    with pytest.raises(RankError) as error:
        run(body, ranks=ranks)
    return str(error.value).splitlines()[0]


def words_of(function):
    """Return the words of the error that a function raises on this rank."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)


class Inner(nn.Module):
    """A module that uses a trained and a frozen weight; subclasses say what it takes and returns."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)

    def compute(self, x):
        return torch.tanh(self.trained(x)) + self.frozen(torch.tanh(x))


def one_step(stage, model, before=lambda model: None, after=lambda model, loss: None):
    zero = Zero(model, stage, SGD)
    before(model)
    loss = model(torch.ones(3, 5))
    loss.backward(retain_graph=True)
    zero.step()
    after(model, loss)


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()
