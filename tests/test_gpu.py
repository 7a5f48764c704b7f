"""Tests of `make gpu` without a GPU: each verdict, the report, and that no part hides another."""

import importlib.util
import json

import psutil
import pytest

from labs.kit.ranks.devices import devices_for
from tools import gpu
from tools.gpu import PARTS, Part, main, report

CHILD = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid)"
WALK = [
    Part("good", ("-c", "import os; print('on', os.environ.get('LABS_DEVICE'))"), 60, "none"),
    Part("bad", ("-c", "print('1 < 2'); raise SystemExit(3)"), 60, "all"),
    Part("hangs", ("-uc", f"{CHILD}; import time; time.sleep(300)"), 10, "none"),
    Part("last", ("-c", "print('still here')"), 60, "none", needs_gpu=False),
]


def walked(folder, gpus):
    status = report(WALK, folder, gpus)
    parts = json.loads((folder / "report.json").read_text())["parts"]
    assert [part["name"] for part in parts] == [part.name for part in WALK]
    return status, [part["verdict"] for part in parts], [part["output"].strip() for part in parts]


def running() -> set[int]:
    return {
        process.pid for process in psutil.process_iter(["status"]) if process.info["status"] != psutil.STATUS_ZOMBIE
    }


def test_each_part_has_its_own_verdict(tmp_path, capsys):
    status, verdicts, outputs = walked(tmp_path / "new" / "folder", 1)
    assert status == 1
    assert verdicts == ["passed", "failed", "stopped", "passed"]
    assert outputs[0] == "on cuda" and outputs[1] == "1 < 2" and outputs[3] == "still here"
    assert int(outputs[2]) not in running()  # the process that it had started is gone, too
    page = (tmp_path / "new" / "folder" / "report.html").read_text()
    assert "1 &lt; 2" in page and "<b>hangs</b>: stopped after" in page
    assert "1 < 2" in capsys.readouterr().out


def test_without_a_gpu_only_what_needs_none_runs(tmp_path):
    status, verdicts, outputs = walked(tmp_path, 0)
    assert status == 1
    assert verdicts == ["not run", "not run", "not run", "passed"]
    assert outputs[0] == "there is no GPU"


def test_the_parts_named_and_what_they_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 0)
    assert main(["bench"]) == 1
    assert "There is no GPU here" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["benhc"])
    assert "no part benhc: there are doctor, contract, tour, bench, notebooks" in capsys.readouterr().err
    assert sum(part.limit for part in PARTS) < 600
    for part in PARTS:
        assert part.command[0] == "-m" and importlib.util.find_spec(part.command[1])
        assert all((gpu.ROOT / word).exists() for word in part.command if word.startswith(("tests", "solutions")))


def test_auto_is_what_the_variable_says(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for says, backend in {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}.items():
        monkeypatch.setenv("LABS_DEVICE", says)
        assert devices_for("auto", 4).backend == backend
    monkeypatch.delenv("LABS_DEVICE")
    assert devices_for("auto", 1).backend == "cpu:gloo,cuda:nccl"
    assert devices_for("auto", 4).backend == "gloo"
