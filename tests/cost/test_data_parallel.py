"""Tests of labs.cost on data parallelism: buckets and bytes by hand, and what ranks of labs.ddp send and hold."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import cost, native
from labs.cost import Job
from labs.ddp import Bucketed, Naive, Overlapped
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.training import strategies
from labs.model import GPT
from tests.cost.common import CONFIGS
from tests.depth import deepen
from tests.recordings import as_predicted, held


def test_buckets_by_hand():
    sizes = [50, 40, 30, 20, 10]
    assert cost.buckets(sizes, "single") == []
    assert cost.buckets(sizes, "naive") == sizes
    assert cost.buckets(sizes, "bucketed", bucket_bytes=120) == [30, 30, 40, 50]
    assert cost.buckets(sizes, "overlapped", bucket_bytes=10**9) == [150]
    assert cost.buckets([2**19, 2**18, 2**17], "torch") == [2**18 + 2**17, 2**19]
    with pytest.raises(ValueError, match="variant is 'zero': it must be 'single', 'naive', 'bucketed'"):
        cost.buckets(sizes, "zero")


def test_sent_by_hand():
    # buckets of 3 and 4 elements on 3 ranks: rank 0 sends (6 - 1 - 1) + (8 - 2 - 1) = 9 elements, rank 2 8
    sizes = [4, 3]
    assert [cost.ddp_sent(sizes, 3, "bucketed", rank, bucket_bytes=1) for rank in range(3)] == [36, 40, 36]
    assert cost.ddp_sent(sizes, 3, "overlapped", 1) == 4 * 10  # one bucket of 7 elements: (14 - 2 - 2)
    assert cost.ddp_sent(sizes, 3, "naive", 0, find_unused=True) == 36 + 4 * (4 - 1 - 1)
    assert [cost.ddp_sent(sizes, 3, "single", rank, buffer_bytes=100) for rank in (0, 1)] == [200, 0]


WRAP = {
    "single": lambda model, **options: model,
    "naive": Naive,
    "bucketed": lambda model, **options: Bucketed(model, bucket_bytes=9_000, **options),
    "overlapped": lambda model, **options: Overlapped(model, bucket_bytes=9_000, **options),
    "torch": native.ddp,
}
BUCKET = {"bucketed": 9_000, "overlapped": 9_000}


def train(variant, config, batch=2, accumulation=1, steps=3, **options):
    """Train with AdamW, as the predictions assume."""
    model = GPT(config)
    module = WRAP[variant](model, **options)
    backward = partial(strategies.backward, module, no_sync=getattr(module, "no_sync", nullcontext))
    training = strategies.replicated(model, backward, finish=getattr(module, "sync", lambda: None))
    for _ in range(steps):
        mark("step")
        batches = torch.randint(config.vocab, (2, accumulation * batch, config.context))
        strategies.step(training, *batches, accumulation)
    mark("end")


@pytest.mark.parametrize("variant", WRAP)
def test_ranks_send_what_was_predicted(variant):
    def body():
        train(variant, config, steps=3)
        if variant != "single":
            train(variant, config, steps=3, find_unused=True)

    config = CONFIGS["one layer, one head of keys"]
    sizes, bucket_bytes = cost.parameter_sizes(config), BUCKET.get(variant, 25 * cost.MiB)
    recording = run(body, ranks=3, record="communication").recording
    for rank in range(3):
        prediction = cost.ddp(Job(config, 2, 3, rank), variant, bucket_bytes)
        assert recording.sent(rank, step=2) == prediction.sent
        assert recording.counts(rank, step=2)["all_reduce"] == prediction.all_reduces
        assert prediction.sent == pytest.approx(float(prediction.textbook), rel=0.01)
        if variant != "single":
            bitmap = cost.ddp_sent(sizes, 3, variant, rank, bucket_bytes, find_unused=True)
            assert recording.sent(rank, step=5) == bitmap
            assert recording.counts(rank, step=5)["all_reduce"] == prediction.all_reduces + 1


HELD = [  # config, batch, accumulation
    ("tiny", 2, 2),
    ("one layer, one head of keys", 9, 1),
    ("tied, as many heads of keys", 3, 1),
    ("wide mlp", 1, 1),
    ("wide mlp", 1, 2),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("jobs", [HELD[:2], *deepen(HELD[2:])], ids=["two", "others"])
def test_ranks_hold_what_was_predicted(jobs, ranks):
    cases = [(variant, *case) for variant in WRAP if (variant == "single") == (ranks == 1) for case in jobs]

    def body():
        for variant, name, batch, accumulation in cases:
            train(variant, CONFIGS[name], batch, accumulation)
            gc.collect()

    recording = run(body, ranks=ranks, record="memory").recording
    for number, (variant, name, batch, accumulation) in enumerate(cases):
        job = Job(CONFIGS[name], batch, ranks, accumulation=accumulation)
        prediction = cost.ddp(job, variant, BUCKET.get(variant, 25 * cost.MiB))
        found, known = as_predicted(held(recording, 0, number, 3), prediction.held)
        assert found == known, cases[number]


def test_buffers_are_predicted():
    def body():
        torch.manual_seed(0)
        model = Naive(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        mark("step")
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
        model.sync()
        mark("end")

    recording = run(body, ranks=2, record="communication").recording
    sizes, buffers = [12, 4, 4, 4], 4 * 4 + 4 * 4 + 8
    for rank in range(2):
        assert recording.sent(rank, step=0) == cost.ddp_sent(sizes, 2, "naive", rank, buffer_bytes=buffers)
