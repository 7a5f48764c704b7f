"""Tests of labs.moe.mixture against a loop over tokens, in float64."""

import math

import pytest
import torch
from torch import nn

from labs.moe import Experts, Mixture, Router

DIM = 4
CASES = [  # tokens, experts, k, capacity, is there a shared expert
    (7, 5, 2, None, False),
    (7, 5, 2, None, True),
    (9, 3, 3, None, False),
    (8, 4, 1, 1.0, False),
    (8, 4, 2, 0.5, True),
    (1, 6, 2, None, False),
    (0, 3, 2, None, True),
    (0, 3, 2, 1.0, False),
]


def mixture(experts, k, capacity=None, shared=False, seed=0):
    torch.manual_seed(seed)
    each = {str(e): nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, DIM)) for e in range(experts)}
    router = Router(DIM, experts, k, "softmax before top-k", False)
    return Mixture(router, Experts(each), nn.Linear(DIM, DIM) if shared else None, capacity).double()


def token_by_token(layer, x):
    """Return the layer's output and the number of dropped rows: tokens come in order, and an expert may be full."""
    experts, k = len(layer.experts), layer.router.top_k
    room = [math.inf if layer.capacity is None else math.ceil(layer.capacity * len(x) * k / experts)] * experts
    chosen, weights = layer.router(x)
    out, dropped = [], 0
    for token, its, ws in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for e, w in zip(its, ws, strict=True):
            if room[e] > 0:
                total = total + w * layer.experts[str(e)](token)
            else:
                dropped += 1
            room[e] -= 1
        out.append(total if layer.shared is None else total + layer.shared(token))
    return torch.stack(out) if out else x * 1.0, dropped


def gradients(layer, out, x):
    found = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, [x, *layer.parameters()], strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_gradients_and_dropped_rows_are_those_of_a_loop_over_tokens(case):
    tokens, experts, k, capacity, shared = case
    layer = mixture(experts, k, capacity, shared)
    x = torch.randn(tokens, DIM, dtype=torch.float64, requires_grad=True)
    expected, dropped = token_by_token(layer, x)
    out = layer(x.unsqueeze(0)).squeeze(0)
    assert torch.allclose(out, expected, atol=1e-13)
    assert layer.dropped == dropped and (capacity is None) <= (dropped == 0)
    for ours, its in zip(gradients(layer, out, x), gradients(layer, expected, x), strict=True):
        assert torch.allclose(ours, its, atol=1e-12)


def test_all_tokens_may_choose_one_expert_and_the_others_get_zeros():
    layer, x = mixture(4, 1), torch.rand(6, DIM, dtype=torch.float64) + 0.1
    nn.init.zeros_(layer.router.gate.weight)
    with torch.no_grad():
        layer.router.gate.weight[2] = 1.0
    out = layer(x)
    assert torch.allclose(out, token_by_token(layer, x)[0])
    out.sum().backward()
    used = [name for name, p in layer.experts.named_parameters() if p.grad.any()]
    assert all(name.startswith("2.") for name in used) and len(used) == 4
    assert all(p.grad is not None for p in layer.parameters())


def test_results_are_added_in_the_order_of_the_experts():
    """Check the bits in float32, for three results of which the sum depends on the order."""
    layer = mixture(3, 3).float()
    x = torch.randn(50, DIM)
    _, weights = layer.router(x)
    a, b, c = (weights[:, e : e + 1] * layer.experts[str(e)](x) for e in range(3))
    assert torch.equal(layer(x), (a + b) + c) and not torch.equal(layer(x), a + (b + c))


def test_a_router_that_returns_nan_is_refused():
    for weight in (math.nan, math.inf):
        layer = mixture(3, 2)
        with torch.no_grad():
            layer.router.gate.weight[1, 0] = weight
        with pytest.raises(ValueError, match="router's weights are NaN, and NaN chooses no experts: end the training"):
            layer(torch.ones(2, DIM, dtype=torch.float64))
