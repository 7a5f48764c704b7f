"""Tests of the doctor on this machine, which runs the course, and then with one thing at a time taken away."""

import io
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labs.kit.commands import doctor
from labs.kit.launch import RankError

ROOT = Path(__file__).resolve().parents[3]
OLD_PYTHON = SimpleNamespace(version_info=(3, 10, 2), version="3.10.2 (main)")
NO_BACKENDS = SimpleNamespace(is_gloo_available=lambda: False, is_nccl_available=lambda: False)


def test_a_machine_that_runs_the_course(capsys):
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")]
    assert any(line.startswith("ok    4 ranks") for line in lines)


@pytest.mark.parametrize(
    ("change", "check", "status", "message"),
    [
        (("sys", OLD_PYTHON), "versions", "FAIL", "PYTHON=python3.12"),
        (("PACKAGES", ("no-such-package",)), "versions", "FAIL", "no-such-package missing: make learn"),
        (("MEMORY", 2**60), "memory", "warn", "close something"),
        (("limits", lambda: [(2**29, 2**28)]), "memory", "warn", "0.2 of 0.5 GiB free"),
        (
            ("__file__", "/else/labs/kit/commands/doctor.py"),
            "course",
            "FAIL",
            "not run the code of /else/labs: make",
        ),
        (("SCRATCH", 2**60), "scratch", "FAIL", "TMPDIR"),
        (("dist", NO_BACKENDS), "backends", "FAIL", "without gloo"),
        (("find_browser", lambda: None), "browser", "warn", "apt-get install chromium"),
    ],
)
def test_each_problem_comes_with_its_remedy(monkeypatch, capsys, change, check, status, message):
    monkeypatch.setattr(doctor, *change)
    monkeypatch.setattr(doctor, "CHECKS", (getattr(doctor, check),))
    assert doctor.main() == (status == "FAIL")
    out = capsys.readouterr().out
    assert out.count(status) == 1 and message in out


def test_the_limits_of_control_groups(tmp_path):
    for group, limit in {"": "max", "a": "1000", "a/b": "3000"}.items():
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
        (tmp_path / group / "memory.current").write_text("700\n")
        (tmp_path / group / "memory.stat").write_text("anon 100\nactive_file 200\ninactive_file 400\n")
    (tmp_path / "own").write_text("1:cpu:/c\n0::/a/b\n")
    assert list(doctor.limits(tmp_path / "own", tmp_path)) == [(3000, 100), (1000, 100)]
    assert list(doctor.limits(tmp_path / "macOS", tmp_path)) == []


def test_ranks_that_cannot_start_are_reported(monkeypatch):
    def broken(*_, **__):
        raise RankError("died", (0,), "rank 0 was killed by SIGKILL", [])

    monkeypatch.setattr(doctor, "run", broken)
    assert [line.status for line in doctor.ranks()] == ["FAIL", "FAIL"]
    assert "SIGKILL" in next(doctor.ranks()).remedy


def test_a_terminal_that_is_not_utf_8_shows_question_marks(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["labs", "challenges"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "labs/__main__.py"), run_name="__main__")
    terminal.flush()
    assert b"your best: ? (0 tries)" in terminal.buffer.getvalue()
