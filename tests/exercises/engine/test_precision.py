"""A test of what the check of notebook 01 says; its answers are in tests/exercises/one_device."""

import torch

from labs.kit import check
from tests.exercises.one_device.mixed_precision import adamw, remember


def test_the_words():
    @torch.no_grad()
    def in_the_parameters_dtype(p, kept, t, **settings):
        if p.grad is not None:
            weight = p.float()
            adamw(weight, kept["mean"], kept["square"], p.grad.float(), t, **settings)
            p.copy_(weight)
            kept["master"].copy_(p)

    answer = check.mixed_precision(remember, in_the_parameters_dtype, seed=3)
    assert answer.mistake == "small steps are lost" and "of the master is" in answer.text
