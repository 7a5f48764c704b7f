"""Tests of `python -m labs train`: what it prints, what it refuses, and the same under torchrun."""

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from torch.distributed.run import get_args_parser

from labs.clusters.command import head, main
from labs.clusters.settings import Settings, flat

ROOT = Path(__file__).parents[2]


def test_it_says_what_a_rank_will_hold_and_measures_the_same(capsys):
    assert main(["--mesh", "dp=2", "--steps", "1", "--ledger"]) == 0
    out = capsys.readouterr().out
    predicted = re.search(r"a rank will hold P (.*?), G (.*?), S (.*?), A (.*)", out).groups()
    measured = re.search(r"rank 0 held at its peak .*? P (.*?) G (.*?) S (.*?) A (.*?) comm", out).groups()
    assert predicted == measured


def test_bad_settings_end_in_a_sentence(capsys):
    assert main(["--strategy", "fsdb"]) == 2
    assert capsys.readouterr().err.startswith("strategy 'fsdb' is not known: the nearest is 'fsdp'")
    assert main(["missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_torchrun_starts_the_same_training(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "labs"]
    flags = ["--steps", "2", "--sample", "0", "--checkpoints.folder", str(tmp_path)]
    done = subprocess.run([*command, "train", *flags], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step +\d/2 +loss \d\.\d{4} +norm ", done.stdout, re.MULTILINE)) == 2
    assert done.stdout.count("tiny by fsdp on dp=2: 16 × 64 tokens a step") == 1


def test_a_dry_run_and_a_plan_are_of_the_same_settings(capsys):
    assert main(["--mesh", "dp=2", "--batch", "8", "--dry"]) == 0
    assert "fsdp, tiny, 4 × 64 tokens, of 2 ranks in a steady step" in capsys.readouterr().out
    assert main(["--model", "llama3-8b", "--batch", "512", "--ranks", "32", "--plan"]) == 0
    assert "32 × H100, InfiniBand, 512 sequences of 8192 tokens in a step" in capsys.readouterr().out


def test_torchrun_takes_no_flag_of_the_training_for_its_own():
    """Hold that no flag is the beginning of a flag of torchrun, which would call it ambiguous."""
    flags = [f"--{name}" for name in flat(asdict(Settings()))]
    given = ["--nproc-per-node", "2", "-m", "labs", "train", *(word for flag in flags for word in (flag, "1"))]
    assert get_args_parser().parse_args(given).training_script_args[0] == "train"


def test_the_head_leaves_out_a_kind_of_memory_that_has_no_formula():
    _, ours = head(Settings(strategy="fsdp"), {"dp": 4})
    _, theirs = head(Settings(strategy="torch-fsdp"), {"dp": 4})
    assert ", A " in ours and theirs.startswith("a rank will hold P ") and ", A " not in theirs
