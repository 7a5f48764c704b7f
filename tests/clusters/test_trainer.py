"""Tests of the trainer: every kind of strategy is the same training, which stops, is saved and goes on exactly."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labs.clusters.report import flops_per_token, peak_flops
from labs.clusters.settings import Checkpoints, Optimizer, Settings
from labs.clusters.trainer import STOP, learning_rate, train
from labs.kit.launch import RankError, run
from labs.kit.training.strategies import EXPERTS, ROWS
from labs.model import GPT, PRESETS
from tests.depth import deepen

SHORT = Settings(steps=4, sample=0, evaluate=4, evaluations=1, optimizer=Optimizer(warmup=2, decay="cosine", clip=0.5))
SOME = ["ddp-overlapped", "zero-2", "fsdp", "torch-fsdp", "hsdp", "fsdp-tp", "pp-1f1b", "pp-fsdp", "torch-pp-fsdp"]
REST = sorted(ROWS.keys() - {*SOME, "one device", *(row.name for row in EXPERTS)})


def told(logs: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (logs / "steps.jsonl").read_text().splitlines()]


def ranks_of(name: str) -> int:
    return ROWS[name].ranks(4) if ROWS[name].fits(4) else 2


def trained_by_each(names: Sequence[str], folder: Path) -> None:
    for name in names:
        own = folder / name
        train(replace(SHORT, strategy=name, report=own, checkpoints=Checkpoints(own / "saved")))


@pytest.mark.parametrize("names", [SOME, *deepen(REST)], ids=["some", "rest"])
def test_losses_norms_and_the_evaluation_are_those_of_one_device(names, tmp_path):
    run(trained_by_each, ["one device"], tmp_path, ranks=1, timeout=200)
    for ranks in {ranks_of(name) for name in names}:
        run(trained_by_each, [name for name in names if ranks_of(name) == ranks], tmp_path, ranks=ranks, timeout=600)
    alone = told(tmp_path / "one device")
    assert len(alone) == 5  # four steps and an evaluation
    for name in names:
        found = told(tmp_path / name)
        close = 1e-4 if ROWS[name].computes == torch.float32 else 2e-2
        for ours, theirs in zip(found, alone, strict=True):
            for key in theirs.keys() & {"loss", "norm", "held_out_loss", "learning_rate"}:
                assert ours[key] == pytest.approx(theirs[key], rel=close), (name, key)
        assert list((tmp_path / name).glob("events.out.tfevents.*"))


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been_on_any_mesh(tmp_path):
    base = replace(SHORT, evaluate=0, micro_batches=2, checkpoints=Checkpoints(tmp_path / "whole"))
    whole = run(train, replace(base, strategy="fsdp", sample=4), ranks=2, timeout=200)[0]
    assert whole.text.startswith("def ") and whole.step == 4
    own = replace(base, checkpoints=Checkpoints(tmp_path / "parts"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / STOP).touch()
    losses = []
    for name, ranks in (("fsdp", 2), ("fsdp", 2), ("zero-3", 4)):
        stopped = run(train, replace(own, strategy=name), ranks=ranks, timeout=200)[0]
        losses += stopped.losses
        assert stopped.step == len(losses)
    (tmp_path / "parts" / STOP).unlink()
    last = run(train, replace(own, strategy="fsdp"), ranks=2, timeout=200)[0]
    losses += last.losses
    assert losses[:2] == whole.losses[:2]  # bit for bit: the same layout
    assert losses == pytest.approx(whole.losses, rel=1e-6)
    with pytest.raises(RankError, match=r"is of a training with seed 0, and this one has 1: give it a folder"):
        run(train, replace(own, strategy="fsdp", seed=1), ranks=2, timeout=200)


def test_a_model_with_experts_goes_on_in_another_layout_as_on_one_device(tmp_path):
    base = replace(SHORT, model="tiny-moe", evaluate=0, sample=4)
    one = replace(base, strategy="one device", micro_batches=2, checkpoints=Checkpoints(tmp_path / "one"))
    [alone] = run(train, one, ranks=1, timeout=200)
    own = replace(base, checkpoints=Checkpoints(tmp_path / "parts"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / STOP).touch()
    first = run(train, replace(own, strategy="ep"), ranks=2, timeout=200)[0]
    (tmp_path / "parts" / STOP).unlink()
    last = run(train, replace(own, strategy="fsdp-ep"), ranks=2, timeout=200)[0]
    assert first.step == 1 and first.losses + last.losses == pytest.approx(alone.losses, rel=1e-6)
    assert last.text == alone.text
    with pytest.raises(RankError, match="MoEGPT has a forward of its own, which no stage would call: cut a GPT"):
        run(train, replace(own, strategy="pp-1f1b"), ranks=2, timeout=200)


SAVED = [
    "torch-fsdp-tp",
    *deepen("torch-ddp", "torch-fsdp", "torch-hsdp", "torch-tp-sp", "torch-pp-zbv", "torch-pp-fsdp-tp"),
]


def with_breaks(settings: Settings, twin: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses of a training without a break, and of one with breaks, which `twin` ends after two steps."""
    whole = train(replace(settings, checkpoints=Checkpoints(folder / "whole"))).losses
    own = replace(settings, checkpoints=Checkpoints(folder / "parts"))
    stop = folder / "parts" / STOP
    if dist.get_rank() == 0:
        stop.parent.mkdir()
        stop.touch()
    parts = train(own).losses + train(own).losses
    if dist.get_rank() == 0:
        stop.unlink()
    assert len(parts) == 2
    return whole, parts + train(replace(own, strategy=twin)).losses


@pytest.mark.parametrize("name", SAVED)
def test_pytorchs_strategies_go_on_bit_for_bit_and_the_courses_go_on_from_theirs(name, tmp_path):
    # On more ranks, DDP adds up the first step's gradients in other buckets, and so in another order.
    ranks = 2 if name == "torch-ddp" else ROWS[name].ranks(4)
    settings = replace(SHORT, strategy=name, evaluate=0)
    twin = "ddp-overlapped" if name == "torch-ddp" else name.removeprefix("torch-")
    for whole, parts in run(with_breaks, settings, twin, tmp_path, ranks=ranks, timeout=200):
        assert parts[:2] == whole[:2]
        assert parts == pytest.approx(whole, rel=1e-5)


def test_a_strategy_that_cannot_be_saved_is_refused_before_it_trains(tmp_path):
    settings = replace(SHORT, strategy="torch-zero-1", checkpoints=Checkpoints(tmp_path, every=1))
    with pytest.raises(RankError, match=r"on one rank only: save under zero-1"):
        run(train, settings, ranks=2, timeout=200)
    assert not list(tmp_path.iterdir())


def test_gradients_that_are_no_numbers_end_the_training_before_they_are_saved(tmp_path):
    wild = replace(SHORT, strategy="fsdp", evaluate=0, optimizer=Optimizer(lr=1e30))
    with pytest.raises(RankError, match="the norm of the gradients is nan, so no step was made"):
        run(train, replace(wild, checkpoints=Checkpoints(tmp_path, every=1)), ranks=2, timeout=200)
    kept = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".draft")}
    assert kept == {"step-1"}


def test_learning_rates_rise_and_fall():
    chosen = Optimizer(lr=1.0, warmup=2, decay="cosine", last=0.2)
    assert [learning_rate(chosen, step, 5) for step in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2])
    assert [learning_rate(Optimizer(lr=1.0, decay="linear", last=0.5), n, 3) for n in range(3)] == [1.0, 0.75, 0.5]
    assert learning_rate(Optimizer(lr=1.0), 7, 9) == 1.0


def test_flops_are_counted_as_the_head_of_the_file_says():
    config = PRESETS["tiny"]
    model = GPT(config)
    numbers = sum(p.numel() for name, p in model.named_parameters() if name != "embed.weight")
    assert flops_per_token(config, 64) == 6 * numbers + 6 * 4 * 64 * 64
    assert peak_flops("NVIDIA GB200") == 2500e12 and peak_flops("NVIDIA B200") == 2250e12
    assert peak_flops("") is None or torch.cuda.is_available()
