"""Tests of labs.dtensor.pointwise: with stock optimizers, a model of DTensors becomes what it does in one process."""

from functools import partial
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labs import dtensor as ours
from labs.kit.launch import run
from labs.mesh import Mesh
from tests.dtensor.common import NAMES, TOKENS, placements


class Tied(nn.Module):
    """An embedding that is also the head; its sizes are odd."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
        self.mix = nn.Linear(3, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, tokens):
        x = F.embedding(tokens, self.embedding)
        x = F.gelu(self.mix(x)) * self.scale
        return F.linear(x, self.embedding).log_softmax(-1).pow(2).mean()


OPTIMIZERS = [
    partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, eps=1e-3, foreach=False),
    partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, eps=1e-3, foreach=True),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
]
OTHERS = [  # optimizers that write with out=, or all parameters at once
    *(partial(torch.optim.AdamW, lr=0.1, eps=1e-3, amsgrad=True, foreach=foreach) for foreach in (False, True)),
    *(partial(torch.optim.Adamax, lr=0.1, eps=1e-3, foreach=foreach) for foreach in (False, True)),
    *(partial(torch.optim.AdamW, lr=0.1, eps=1e-3, amsgrad=amsgrad, fused=True) for amsgrad in (False, True)),
    partial(torch.optim.Adagrad, lr=0.1, fused=True),
]


def trained(lie, mesh, optimizer, data):
    """Return the model after 3 steps of two backwards each. lie: placements of all parameters, or None to
    leave them.
    """
    model = Tied()
    for module in list(model.modules()) if lie else ():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(ours.distribute_tensor(p.detach(), mesh, placements(ours, lie))))
    tokens = TOKENS if lie is None else ours.distribute_tensor(TOKENS, mesh, placements(ours, data))
    optimizer = optimizer(model.parameters())
    for step in range(3):
        for _ in range(2):
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return [p.detach() if lie is None else p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize(
    ("shape", "layouts"),
    [
        ((2, 2), [("R0", "0R"), ("00", "0R")]),
        pytest.param((2,), [("0", "R"), ("0", "0"), ("R", "0")], marks=pytest.mark.depth),
        pytest.param((3,), [("0", "1")], marks=pytest.mark.depth),
    ],
)
def test_a_model_of_dtensors_trains_with_stock_optimizers(shape, layouts):
    def body():
        mesh = Mesh(shape, NAMES[: len(shape)])
        for optimizer in OPTIMIZERS + OTHERS if shape == (3,) else OPTIMIZERS:
            one = trained(None, mesh, optimizer, "")
            for lie, data in layouts:
                for p, q in zip(trained(lie, mesh, optimizer, data), one, strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)

    run(body, ranks=prod(shape))
