"""Tests of labs.deepspeed.engine: sentences, and a step worked out by hand; tests/test_contract.py checks all
numbers.
"""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.deepspeed import engine
from labs.deepspeed.configuration import ACCUMULATION, MICRO, TRAIN, from_fsdp, like_zero
from labs.kit.commands import tour
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.model import GPT, PRESETS, parameters
from tests.extras import need_deepspeed


@pytest.fixture
def version(monkeypatch):
    """Return a function that pretends that this version of DeepSpeed is installed, or none at all."""
    true = metadata.version

    def pretend(number):
        def answer(name):
            if name != "deepspeed":
                return true(name)
            if number is None:
                raise metadata.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(metadata, "version", answer)

    return pretend


def test_without_deepspeed_a_sentence_says_how_to_install_it(version):
    version(None)
    assert engine.missing() == "DeepSpeed is not installed: `make learn EXTRA=deepspeed` adds it"
    with pytest.raises(ImportError, match="make learn EXTRA=deepspeed"):
        engine.initialize(nn.Linear(2, 2), like_zero(1))
    with pytest.raises(ValueError, match="deepspeed-2 cannot have --ranks 4: DeepSpeed is not installed"):
        tour.choose("deepspeed-2", 4)
    assert not any(row.name.startswith("deepspeed") for row in tour.choose("all", 4))
    assert not any(name.startswith("deepspeed") for name in tour.shown())


def test_a_deepspeed_that_is_too_old_is_refused(version):
    version("0.9.5")
    assert engine.missing() == "DeepSpeed 0.9.5 is older than 0.19: `make learn EXTRA=deepspeed` brings a newer one"
    version("0.20.0+abc")
    assert engine.missing() == ""


def test_the_course_is_imported_without_it():
    sentences = "import sys, labs.kit.train, labs.deepspeed.configuration; print('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", sentences], capture_output=True, text=True).stdout == "False\n"


def test_without_a_compiler_the_optimizer_must_be_pytorchs(monkeypatch):
    monkeypatch.setattr(engine, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"compiles its Adam when it is first used, and there is no C\+\+ compiler"):
        engine.require_compiler({"optimizer": {"type": "Adam"}})
    engine.require_compiler({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}})


REFUSED = {
    "'stag' is no key of zero_optimization in a configuration of DeepSpeed: did you mean 'stage'?": {
        "zero_optimization": {"stag": 2}
    },
    "'zero_optimisation' is no key of a configuration": {"zero_optimisation": {"stage": 2}},
    "leave one of the three out": {TRAIN: 8, MICRO: 2, ACCUMULATION: 3},
}
NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}
TOLD = [*REFUSED, "offload to NVMe takes DeepSpeed's async_io, which cannot be compiled here"]


def all_of_it():
    """Collect the refusals and what else a learner meets, in one job: starting DeepSpeed takes a second per rank."""
    sentences = []
    for config in REFUSED.values():
        try:
            engine.initialize(nn.Linear(2, 2), {MICRO: 1} | config, torch.optim.SGD)
        except ValueError as error:
            sentences.append(str(error))
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    AsyncIOBuilder.is_compatible = lambda self, verbose: False
    try:
        engine.initialize(nn.Linear(2, 2), {MICRO: 1, "zero_optimization": NVME}, torch.optim.SGD)
    except RuntimeError as error:
        sentences.append(str(error))
    before = nn.functional.linear
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    weight = model.weight.detach().clone()
    made = engine.initialize(model, like_zero(3) | {MICRO: 1, ACCUMULATION: 2}, lambda ps: torch.optim.SGD(ps, lr=0.5))
    whole, empty = engine.full(made)["weight"], model.weight.numel() == 0
    x = torch.full((1, 3), dist.get_rank() + 1.0)
    for _ in range(2):
        made.backward(made(x).sum())
        made.step()
    step = engine.full(made)["weight"] - weight
    sizes = made.train_batch_size(), made.train_micro_batch_size_per_gpu(), made.gradient_accumulation_steps()
    return sentences, torch.equal(whole, weight), empty, step, sizes, nn.functional.linear is before


def test_the_engine_refuses_and_leaves_nothing():
    need_deepspeed()
    for sentences, same, empty, step, sizes, untouched in run(all_of_it, ranks=2, device="cpu"):
        assert len(sentences) == len(TOLD)
        assert all(part in sentence and "\n" not in sentence for part, sentence in zip(TOLD, sentences, strict=True))
        assert same and empty and untouched and sizes == (4, 1, 2)
        assert torch.allclose(step, torch.full((5, 3), -0.5 * 1.5))  # the mean of x over ranks 0 and 1


def hangs():
    made = engine.initialize(nn.Linear(2, 2), like_zero(2) | {MICRO: 1}, torch.optim.SGD)
    if dist.get_rank() == 0:
        made.backward(made(torch.ones(1, 2)).sum())
        made.step()
    else:
        dist.recv(torch.ones(1), 0)


def test_a_job_that_hangs_is_ended():
    need_deepspeed()
    with pytest.raises(RankError, match=r"all_reduce|recv"):
        run(hangs, ranks=2, device="cpu", timeout=60)


# {settings of fully_shard: bytes per parameter that are gathered and reduced in a step}, times (N - 1)/N
SENDS = {
    (True, torch.float32, None): 4 + 4 + 4,
    (False, torch.float32, None): 4 + 4,
    (True, torch.bfloat16, torch.float32): 2 + 2 + 4,
    (True, torch.bfloat16, None): 2 + 2 + 2,
}
CONFIG = replace(PRESETS["tiny"], context=16, depth=1)


def steps_under_each():
    for settings in SENDS:
        made = engine.initialize(GPT(CONFIG), from_fsdp(*settings) | {MICRO: 1}, partial(torch.optim.AdamW, lr=1e-3))
        for _ in range(3):  # DeepSpeed observes the order of parameters in the first two steps
            mark("step")
            x = torch.arange(16)[None] + dist.get_rank()
            made.backward(made(x, x))
            made.step()
        mark("end")


def test_the_settings_of_fully_shard_send_what_they_say():
    need_deepspeed()
    recording = run(steps_under_each, ranks=2, device="cpu", record="communication").recording
    norm = 8
    for number, size in enumerate(SENDS.values()):
        assert recording.sent(0, 3 * number + 2) == size * parameters(CONFIG) // 2 + norm
