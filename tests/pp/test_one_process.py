"""Tests of labs.pp.one_process.

References: the same model on one device, bit by bit; for the lists, that only one rank ever works.
"""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from labs.kit.launch import run
from labs.model import GPT
from labs.pp import alive, cut, simulate
from labs.pp.one_process import Placed, naive
from tests.pp.trainings import SMALL, batch, expected, largest_difference, piped

GPUS = [f"cuda:{number % torch.cuda.device_count()}" for number in range(3)] if torch.cuda.is_available() else None


def gradients(model, forward, to="cpu"):
    for x, y in zip(*(each.chunk(2) for each in batch(0, 4)), strict=True):
        (model.loss(forward(x.to(to)), y.to(to)) / 2).backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


ON_GPUS = pytest.param(GPUS, marks=pytest.mark.skipif(not GPUS, reason="no GPU"))


@pytest.mark.parametrize("devices", [["cpu"] * 3, ON_GPUS])
def test_one_device_has_the_same_bits(devices):
    whole, model = GPT(SMALL).to(devices[0]), GPT(SMALL)
    placed = Placed(cut(model, 3), devices)
    mine, reference = gradients(model, placed, devices[-1]), gradients(whole, whole, devices[0])
    assert mine.keys() == reference.keys() and all(torch.equal(mine[name], reference[name]) for name in mine)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8)])
def test_one_rank_works_at_a_time(p, m):
    of = simulate(naive(p, m), F=1, B=2)
    spans = sorted((of.start[x], of.end[x]) for x in of.end)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert of.time == sum(of.busy) == 3 * p * m and of.bubble == p - 1
    assert alive(of.lists) == [[1, 0] * m] * p


def obeyed(reference):
    assert largest_difference(piped(SMALL, torch.float32, naive(2, 3)), reference) == 0


def test_the_lists_run():
    case = SMALL, torch.float32, 3
    run(obeyed, expected(case)[case], ranks=2)


def test_what_cannot_be_placed_is_reported_in_a_sentence():
    tied = GPT(replace(SMALL, tied=True))
    for stages, devices, text in [
        (cut(tied, 2), ["cpu"], "2 stages and 1 devices: give each stage its device"),
        (
            cut(tied, 2),
            ["cpu", "meta"],
            "stages 0 and 1 share 'head.weight', but are on cpu and meta: put them on one device, or give each its own",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            Placed(stages, devices)
    Placed(cut(tied, 2), ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"^microbatches is 0: naive takes 1 or more$"):
        naive(2, 0)
