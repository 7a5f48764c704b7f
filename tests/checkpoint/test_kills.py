"""Tests that kill any rank at any moment: the training ends bit for bit as if nothing had happened.

The reference is the same training, undisturbed.  The ranks kill themselves (see drill.py), and run() or torchrun's
elastic agent starts them again.
"""

import os
import secrets
import subprocess
from pathlib import Path

import pytest

from labs.checkpoint import Saver, newest
from labs.kit.launch import run
from tests.checkpoint.common import same
from tests.checkpoint.drill import AtOnce, in_fsdp, in_zero, training
from tools import warm

ROOT = Path(__file__).parents[2]
SCRIPT = """
from pathlib import Path
from labs.kit.launch import run
from tests.checkpoint.drill import AtOnce, in_fsdp, training
run(training, Path({folder!r}), {steps}, in_fsdp, AtOnce, {kills}, {seed}, restarts={kills})
"""


def files(checkpoint):
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def require_undisturbed(folder, kills, seed, steps):
    deaths = (folder / "killed.deaths").read_text()
    message = f"seed {seed}:\n{deaths}"
    assert deaths.count("\n") == kills, message
    assert newest(folder / "killed").name == f"step-{steps}", message
    assert files(newest(folder / "killed")) == files(newest(folder / "undisturbed")), message
    assert deaths.count("the end") <= kills / 2, message


def drilled(folder, laid_out, saver, ranks, kills, seed):
    steps = 2 * kills + 5
    expected = run(training, folder / "undisturbed", steps, laid_out, saver, ranks=ranks)
    found = run(training, folder / "killed", steps, laid_out, saver, kills, seed, ranks=ranks, restarts=kills)
    assert found.restarts == kills
    require_undisturbed(folder, kills, seed, steps)
    assert all(map(same, found, expected)), seed


TRAININGS = [(in_zero, AtOnce, 3), (in_fsdp, Saver, 2)]


@pytest.mark.parametrize(
    ("laid_out", "saver", "ranks", "seed"),
    [(*TRAININGS[1], 2), pytest.param(*TRAININGS[0], 0, marks=pytest.mark.depth)],
)
def test_two_kills(laid_out, saver, ranks, seed, tmp_path):
    """Use each of the four kinds of death once."""
    drilled(tmp_path, laid_out, saver, ranks, kills=2, seed=seed)


@pytest.mark.soak
@pytest.mark.parametrize(("laid_out", "saver", "ranks"), TRAININGS)
def test_a_hundred_kills(laid_out, saver, ranks, tmp_path):
    drilled(tmp_path, laid_out, saver, ranks, kills=100, seed=secrets.randbelow(10**6))


@pytest.mark.soak
def test_thirty_kills_under_torchruns_elastic_agent(tmp_path):
    """Kill ranks many times; tests/test_way_out.py kills one once."""
    kills, seed = 30, secrets.randbelow(10**6)
    steps = 2 * kills + 5
    run(training, tmp_path / "undisturbed", steps, in_fsdp, AtOnce, ranks=2)
    (tmp_path / "job.py").write_text(
        SCRIPT.format(folder=str(tmp_path / "killed"), steps=steps, kills=kills, seed=seed)
    )
    torchrun = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, f"--max-restarts={kills}", str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        timeout=300 * (kills + 1),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    require_undisturbed(tmp_path, kills, seed, steps)
