"""Tests of rotary positions by their definition: lengths stay, and products depend on distances alone.

The reference is the numbers before they were turned.  tests/test_model.py has the formula, written out as complex
numbers, and tests/llama compares RopeScaling with transformers.
"""

import math

import torch

from labs.rope import rotate


def test_rotation_keeps_lengths_and_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def product(q_position: int, k_position: int) -> float:
        turned_q, turned_k = (rotate(x, torch.tensor([p]), 10_000.0) for x, p in ((q, q_position), (k, k_position)))
        assert math.isclose(turned_q.norm(), q.norm(), rel_tol=1e-12)
        return (turned_q * turned_k).sum().item()

    assert math.isclose(product(5, 2), product(105, 102), rel_tol=1e-12)
    assert math.isclose(product(0, 0), (q * k).sum().item(), rel_tol=1e-12)
    assert not math.isclose(product(5, 2), product(6, 2), rel_tol=1e-3)
