"""Tests of labs.optimizer_probe with PyTorch's own optimizers, and some that look at more than an element."""

from functools import partial

import pytest
import torch
from torch import nn

from labs.optimizer_probe import require_elementwise, shapeless

INSTEAD = "Take SGD"


class Trust(torch.optim.Optimizer):
    """LARS: each parameter takes a step proportional to its own norm."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.norm() / p.grad.norm() * p.grad


class OneVariance(torch.optim.Optimizer):
    """Adam-mini: one second moment for a whole parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.square().mean().sqrt()


@pytest.mark.parametrize("make", [Trust, OneVariance])
def test_an_optimizer_that_looks_at_more_than_an_element_is_refused(make):
    optimizer = make([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"looks at more than one element: .* Take SGD"):
        require_elementwise(optimizer, INSTEAD)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.AdamW, amsgrad=True, foreach=True),
        partial(torch.optim.Adam, fused=True),
        *(torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_elementwise_optimizer_passes_and_takes_no_step(make, dtype):
    p, q = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    optimizer = make([{"params": [p], "lr": 0.5}, {"params": [q]}])
    before = optimizer.state_dict()
    require_elementwise(optimizer, INSTEAD)
    assert optimizer.state_dict() == before and p.grad is None and torch.equal(p, torch.ones_like(p))


def test_the_ndim_of_a_piece_cannot_be_read():
    p = nn.Parameter(torch.ones(3))
    with shapeless([p], "use layers"):
        for ask in (lambda: p.ndim, lambda: p.dim(), lambda: p.ndimension(), lambda: len(p.shape)):
            with pytest.raises(TypeError, match="the ndim of a parameter, and is given flat shards: use layers"):
                ask()
        torch.optim.AdamW([p], fused=True)
        assert tuple(p.shape) == (3,) and torch.zeros(p.shape).shape == (3,)  # others may read it
    assert type(p) is nn.Parameter and p.ndim == 1 and p.shape == (3,)
