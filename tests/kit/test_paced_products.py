"""A test of products that take longer: each function's result, and how long its steps took."""

import sys

import cloudpickle
import torch

from labs.kit.launch import run
from labs.kit.train import paced

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def product(x, w):
    return x @ w


def twice(x, w):
    return (x @ w).matmul(w)


def both():
    x, w = torch.ones(1, 10, 4), torch.eye(4)
    return [result.sum().item() for result in paced((product, twice), (x, w), times=2, seconds=1e-3)]


def test_each_step_takes_as_long_as_its_products():
    job = run(both, ranks=2, device="cpu", record="communication")
    assert list(job) == [[40.0, 40.0]] * 2
    assert job.recording.steps == 4
    assert all(job.recording.took(step) >= 0.01 * (1 + step // 2) for step in range(4))
