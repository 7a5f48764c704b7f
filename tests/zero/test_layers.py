"""Tests of labs.zero on layers of all kinds, used in all ways: equal to one process, within 1e-12."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from labs.kit.launch import run
from labs.zero import Zero
from tests.models import batch
from tests.zero.common import ADAMW, SGD, STAGES, Inner, said, train

# ---- harder cases for stage 3 ----------------------------------------------------------------------------


class Odd(nn.Module):
    """A model with layers in unusual positions."""

    def __init__(self, dtype=torch.float64, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.low = Product(5)
        self.twice = nn.Linear(5, 5)
        self.blind = Blind(5)
        self.last = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.0), nn.Linear(5, 5))
        self.recompute = recompute
        self.to(dtype)

    def forward(self, tokens):
        x = torch.nn.functional.one_hot(tokens % 5, 5).to(self.blind.dtype)
        x = self.low(self.base(self.twice(x)))
        skip = x
        for layer in (self.twice, self.blind, *self.last):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return (x * skip).square().mean()


class Product(nn.Module):
    """A layer whose weight is a product, with a frozen one: their gradients need them after the input's is known."""

    def __init__(self, dim):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(dim, dim) / dim) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(dim, dim) / dim, requires_grad=False)

    def forward(self, x):
        return x @ self.frozen + torch.tanh(x) + (self.a @ self.b @ self.frozen).sum(0)


class Blind(nn.Module):
    """A layer that gives no gradient to its input."""

    def __init__(self, dim):
        super().__init__()
        self.inside = nn.Linear(dim, dim)
        self.dtype = torch.float64

    def forward(self, x):
        return {"answer": self.inside(x.detach())}["answer"]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_layers_in_unusual_positions(recompute):
    def body():
        make = partial(Odd, recompute=recompute)
        return [train(stage, torch.float64, ADAMW, steps=4, make=make) for stage in STAGES]

    model = Odd()
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        (model(batch(step, 0)) / 2).backward()
        (model(batch(step, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for of_stages in run(body, ranks=2):
        for ours in of_stages:
            for name, p in model.state_dict().items():
                torch.testing.assert_close(ours[name], p, rtol=1e-12, atol=1e-12)


# ---- odd models ------------------------------------------------------------------------------------------


@dataclass
class Answer:
    hidden: torch.Tensor
    count: int = 1


class Unknown(OrderedDict):
    """A dict that torch's pytree does not know."""


class GivesUnknownDict(Inner):
    def forward(self, x):
        return Unknown(hidden=self.compute(x))


class TakesDataclass(Inner):
    def forward(self, answer):
        return self.compute(answer.hidden)


class FillsAList(Inner):
    def forward(self, x, penalties):
        y = self.compute(x)
        penalties.append(self.trained(x.tanh()).square().mean())
        return y


class UnusedMask(Inner):
    def forward(self, x, mask=None):
        return self.compute(x)


CALLS = {  # calls besides the odd trainings (tests/odd.py): how a layer is called, and its output read
    "dataclass taken": (TakesDataclass, lambda layer, x: layer(Answer(x))),
    "unknown dict": (GivesUnknownDict, lambda layer, x: layer(x)["hidden"]),
    "fills a list": (FillsAList, lambda layer, x: layer(x, penalties := []) + sum(penalties)),
    "unused mask": (UnusedMask, lambda layer, x: layer(x, mask=x * 2)),
    "never": (UnusedMask, lambda layer, x: x),
}


class Around(nn.Module):
    """A layer between two others."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        make, self.call = CALLS[case]
        self.below, self.inner, self.above = nn.Linear(5, 5), make(), nn.Linear(5, 5)
        self.double()

    def forward(self, x):
        return self.above(self.call(self.inner, self.below(x))).square().mean()


def inputs(step, rank):
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def test_odd_layers_equal_one_process():
    def body():
        trained = {}
        for case in CALLS:
            for stage in STAGES:
                zero = Zero(model := Around(case), stage, SGD)
                for step in range(2):
                    model(inputs(step, dist.get_rank())).backward()
                    held = [unit.name for unit in zero.units if unit.full.untyped_storage().nbytes()]
                    assert stage < 3 or not held, f"{case}: {held} is still gathered after backward"
                    zero.step()
                trained[case, stage] = zero.full_state_dict()
        return trained

    for ours in run(body, ranks=2):
        for case, stage in ours:
            model = Around(case)
            optimizer = SGD([p for p in model.parameters() if p.requires_grad])
            for step in range(2):
                for rank in range(2):
                    (model(inputs(step, rank)) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            for name, p in model.state_dict().items():
                at = f"{case}, stage {stage}: {name}"
                torch.testing.assert_close(
                    ours[case, stage][name], p, rtol=1e-12, atol=1e-12, msg=lambda m, at=at: at + m
                )


class Experts(nn.Module):
    """A model in which each rank uses another expert, of equal size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.experts = nn.Linear(5, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x):
        return self.experts[dist.get_rank()](self.below(x)).square().mean()


def test_an_evaluation_with_different_layers_is_refused_before_its_loss_is_used():
    def body():
        Zero(model := Experts(), 3, SGD)
        with torch.no_grad():
            model(torch.ones(3, 5))

    words = said(body)
    assert "where rank 0 gathers the layer of 'experts.0.weight', rank 1 gathers the layer of 'experts.1.w" in words
