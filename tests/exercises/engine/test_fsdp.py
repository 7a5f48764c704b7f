"""Tests of notebook 06's exercises: an answer in the place of the course's own function, and the script at its end.

The right and wrong answers to its checks are in tests/exercises/fsdp.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labs.data import Batches, corpus
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.kit.train import unshard_with
from labs.model import GPT, PRESETS
from tests.exercises.fsdp.unshard_and_reshard import reshard, unshard

ROOT = Path(__file__).resolve().parents[3]


# ---- an exercise in the course's place -------------------------------------------------------------------


def losses_of(by_hand, steps=3):
    """Train a model whose parameters leave some ranks without a row; return its losses and the calls of `unshard`.

    by_hand: whether the answer gathers the parameters, and not the course
    """
    calls = []
    if by_hand:
        unshard_with(lambda *given: (calls.append(given), unshard(*given)), reshard)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    for layer in model:
        fully_shard(layer) if list(layer.parameters()) else None
    fully_shard(model)
    optimizer, x, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 5) * dist.get_rank(), []
    for _ in range(steps):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, len(calls)


def test_an_exercise_carries_a_training_bit_for_bit():
    by_hand, by_course = (run(losses_of, by_hand, ranks=3, device="cpu") for by_hand in (True, False))
    assert [losses for losses, _ in by_hand] == [losses for losses, _ in by_course]
    assert len(set(by_course[1][0])) == 3, "it learns"
    assert {calls for _, calls in by_hand} == {3 * 2 * 2}, "in each step each layer, forward and backward"


# ---- the script at the notebook's end --------------------------------------------------------------------


def one_process(steps=10):
    config = PRESETS["small"]
    model, batches = GPT(config), Batches(corpus().tokens, 16, config.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        loss = model(*batches[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.soak
def test_the_script_under_torchrun_prints_the_curve_of_one_process(tmp_path):
    source = (ROOT / "solutions/06_fsdp.py").read_text(encoding="utf-8")
    block = re.search(r"^# ```python\n(.*?)^# ```$", source, re.DOTALL | re.MULTILINE)[1]
    script = tmp_path / "train.py"
    script.write_text(re.sub("^# ?", "", block, flags=re.MULTILINE), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", told.stdout)]
    assert losses == pytest.approx(list(one_process()), abs=2e-4)
