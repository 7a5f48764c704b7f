"""Tests of `python -m labs`: its list of commands, the flags of each, and the refusal of unknown commands and flags."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import labs
from labs.__main__ import COMMANDS, main


def test_the_commands_are_listed_without_importing_torch():
    script = "import sys; from labs.__main__ import main; main(['--help']); print({'torch', 'tyro'} & {*sys.modules})"
    printed = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert all(f"\n{name:<12}{line}\n" in printed for name, (_, line) in COMMANDS.items())
    assert printed.endswith("\nset()\n")


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 0
    assert "\ndoctor " in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["plant"]) == 2
    names = "tour, doctor, progress, challenges, dryrun, train, plan"
    said = f"command 'plant' is not known: the nearest is 'plan', of {names}\n"
    assert capsys.readouterr().err == said


def test_a_pytorch_that_is_too_old_is_refused_in_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    tap = str(Path(labs.__file__).parent / "kit/watch/c10d_tap.py")  # every command imports it
    monkeypatch.setattr("labs.__main__.import_module", lambda name: runpy.run_path(tap))
    assert main(["doctor"]) == 2
    says = "labs.kit, which starts and watches the ranks, needs PyTorch 2.10 or newer, and this is 2.9.1+cu128: "
    assert capsys.readouterr().err.startswith(says)


FLAGS = {
    "tour": "--ranks --steps --batch --size --device --strategies --json --figure",
    "doctor": "--help",
    "progress": "[FOLDER",
    "challenges": "[FOLDER --no-names",
    "dryrun": "--model --mesh --ranks --rank --strategy --batch --node --dtype --recompute",
    "train": "--strategy --mesh --schedule --model --data --batch --steps --ranks --ledger --dry --plan --job",
    "plan": "[MODEL] --config --gpus --cluster --node --card --software --batch --context --layout --list",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_lists_the_flags_without_colours(name, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m labs {name} [-h]") and "\x1b" not in printed
    assert all(f" {flag} " in printed for flag in FLAGS[name].split())


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("tour --step 3", "Perhaps you meant: --steps INT steps of training (default: 30)"),
        ("tour --steps three", "Error parsing --steps: invalid literal for int() with base 10: 'three'"),
        ("plan llama3-8b --lay tp=8", "--layout STR"),
        ("dryrun --mesh dp=8", "--model STR one of tiny, small"),
        ("challenges --nonames", "--no-names"),
        ("doctor now", "Unrecognized options: now"),
    ],
)
def test_unknown_flags_and_what_is_no_number_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments.split())
    words = capsys.readouterr().err.split()
    assert said in " ".join(word for word in words if word not in ("│", "|"))
