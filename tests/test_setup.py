"""Tests of tools.setup with a real server for the index, real processes as installers, and pip's and uv's real
output.
"""

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools import setup


@pytest.mark.parametrize(
    ("asked", "remembered", "platform", "nvidia", "index", "build", "said"),
    [
        ({"CUDA": "1"}, "cpu", "linux", False, True, "cuda", "with CUDA"),
        ({"CPU": "1"}, "cuda", "linux", True, True, "cpu", "without CUDA"),
        ({"CPU": "1"}, "", "linux", False, False, "cpu", "without CUDA, where pip finds it: .* does not answer"),
        ({"CPU": "", "CUDA": ""}, "cpu", "linux", True, False, "cpu", "without CUDA"),
        ({}, "cuda", "linux", False, True, "cuda", "with CUDA"),
        ({}, "", "linux", True, True, "", ""),
        ({}, "", "darwin", False, True, "", ""),
        ({}, "", "linux", False, True, "cpu", "without CUDA, as there is no NVIDIA GPU here .CUDA=1 asks for .*"),
        ({}, "", "linux", False, False, "", "as pip finds it: there is no NVIDIA GPU here, but .* does not answer"),
    ],
)
def test_which_build(monkeypatch, asked, remembered, platform, nvidia, index, build, said):
    monkeypatch.setattr(setup, "has_nvidia", lambda: nvidia)
    monkeypatch.setattr(setup, "cpu_index", lambda: setup.CPU_INDEX if index else "")
    chosen, why = setup.choose_build(asked, remembered, platform)
    assert chosen == build
    assert re.fullmatch(said, why.strip())


@pytest.fixture
def index():
    """Start a server, and return its address: /there/ answers, /gone/ is an error, /late/ answers when the test is
    over.
    """
    over = threading.Event()

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/late/":
                over.wait()
            self.send_response(404 if self.path == "/gone/" else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
        server.shutdown()
        thread.join()


def test_an_index_answers_or_does_not(index, monkeypatch):
    assert setup.answers(f"{index}/there/")
    assert not setup.answers(f"{index}/gone/")
    assert not setup.answers("http://127.0.0.1:1/")
    monkeypatch.setattr(setup, "PATIENCE", 0.2)
    assert not setup.answers(f"{index}/late/")


def test_uv_gets_the_settings_of_pip(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "VENV", Path(sys.prefix))
    monkeypatch.setattr(setup, "cpu_index", lambda: setup.CPU_INDEX)
    for name in setup.PIP_TO_UV.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    settings = setup.pip_settings()
    assert settings["find-links"] == "/wheels /more/wheels"
    variables = setup.uv_settings(settings, "cpu")
    assert variables["UV_FIND_LINKS"] == "/wheels,/more/wheels"
    assert variables["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert variables["UV_INDEX"] == setup.CPU_INDEX
    assert setup.uv_settings({"extra-index-url": "a b"}, "") == {"UV_INDEX": "a b"}
    monkeypatch.setenv("UV_INDEX", "mine")
    assert setup.uv_settings({"extra-index-url": "a b"}, "") == {"UV_INDEX": "mine"}
    assert setup.uv_settings({}, "cpu") == {"UV_INDEX": f"{setup.CPU_INDEX} mine"}
    monkeypatch.setattr(setup, "cpu_index", lambda: "")
    assert setup.uv_settings({}, "cpu") == {}


def test_uv_is_taken_where_it_is_found_and_pip_stands_behind_it(monkeypatch):
    monkeypatch.setattr(setup, "pip_settings", dict)
    monkeypatch.setattr(setup, "cpu_index", lambda: setup.CPU_INDEX)
    monkeypatch.setattr(setup.shutil, "which", {"uv": "/bin/uv"}.get)
    (uv, _), (pip, _) = setup.installers(("test",), "cpu")
    assert uv[:3] == ["/bin/uv", "pip", "install"]
    assert pip[1:3] == ["-m", "pip"] and setup.CPU_INDEX in pip
    assert uv[-1] == pip[-1] == ".[test]"
    monkeypatch.setattr(setup.shutil, "which", {}.get)
    [(pip, _)] = setup.installers((), "")
    assert pip[1:3] == ["-m", "pip"] and setup.CPU_INDEX not in pip and pip[-1] == "."
    monkeypatch.setattr(setup, "cpu_index", lambda: "")  # otherwise pip would ask it, and wait, for every package
    [(pip, _)] = setup.installers((), "cpu")
    assert "--extra-index-url" not in pip


@pytest.mark.parametrize(
    ("build", "cuda", "said"),
    [
        ("cpu", "", ""),
        ("cuda", "13.0", ""),
        ("", "13.0", ""),
        ("cpu", "13.0", "CPU=1 asks for PyTorch without CUDA, and pip has found the build with CUDA 13.0: .*"),
        ("cuda", "", "CUDA=1 asks for PyTorch with CUDA, and pip has found the build without: .*"),
    ],
)
def test_another_build_than_the_one_asked_for_is_reported(monkeypatch, tmp_path, build, cuda, said):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f"#!/bin/sh\necho {cuda}\n")
    (tmp_path / "bin/python").chmod(0o755)
    monkeypatch.setattr(setup, "VENV", tmp_path)
    assert re.fullmatch(said, setup.other_build(build))


# ---- output ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", "   41 s  "),
        ("Collecting torch\n  Downloading torch.whl (196 MB)\nCollecting numpy\n", "   41 s  Collecting numpy"),
        ("Collecting a\nInstalling collected packages: six, b\n", "   41 s  Installing collected packages: six, b"),
        ("Resolved 127 packages\nDownloading b (2MiB)\n Downloaded b\n", "   41 s  Downloading b (2MiB)"),
        ("Collecting " + "x" * 99, "   41 s  Collecting " + "x" * 39),
    ],
)
def test_progress_is_one_line_of_the_terminal(monkeypatch, log, line):
    monkeypatch.setenv("COLUMNS", "60")
    assert setup.progress(log, 41.3) == line


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """Make an empty .venv in a folder of its own, and return a list of installers for it."""
    found = []
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "choose_build", lambda asked, remembered: ("cpu", " without CUDA"))
    monkeypatch.setattr(setup, "installers", lambda extras, build: ((command, {}) for command in found))
    monkeypatch.setattr(setup, "other_build", lambda build: "")
    return found


def saying(text, status):
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"]


def test_two_lines_are_all_that_is_seen(empty, tmp_path, capfd):
    empty += [saying("no such option", 2), saying("Collecting torch\nmany more", 0)]
    (tmp_path / "course-2.11.0").touch()
    assert setup.main("2.15.0", "test") == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"Setting up {tmp_path.name}, once: PyTorch 2.15.0 without CUDA"
    assert re.fullmatch(rf"Ready after \d+ s; all of it is in {tmp_path}/setup.log", second)
    assert "no such option" in (log := (tmp_path / "setup.log").read_text()) and "many more" in log
    stamps = {path.name for path in [*tmp_path.glob("course-*"), *tmp_path.glob("tests-*")]}
    assert stamps == {"course-2.15.0", "course-2.15.0-cpu", "tests-2.15.0", "tests-2.15.0-cpu"}
    assert setup.remembered_build() == "cpu"
    assert "torch==2.15.0\n" in (tmp_path / "constraints.txt").read_text()


def test_a_failure_ends_with_what_was_said_last_and_the_name_of_the_log(empty, tmp_path, capfd):
    empty += [saying("\n".join([*map(str, range(100)), "ERROR: no matching distribution"]), 1)]
    assert setup.main("2.15.0") == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 13 and lines[-2] == "ERROR: no matching distribution"
    assert str(tmp_path / "setup.log") in lines[-1]
    assert not list(tmp_path.glob("course-*"))


def test_without_a_network_there_is_one_sentence(empty, tmp_path, capfd):
    empty += [saying("WARNING: Retrying after connection broken by 'NewConnectionError(...)'\nERROR: no torch", 1)]
    assert setup.main("2.15.0") == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line == f"No package index answers: is there a network? {tmp_path}/setup.log has the details"


def test_the_other_build_leaves_no_stamp(empty, tmp_path, capfd, monkeypatch):
    empty.append(saying("Collecting torch", 0))
    monkeypatch.setattr(setup, "other_build", lambda build: "not the one asked for")
    assert setup.main("2.15.0") == 1
    assert capfd.readouterr().err == "not the one asked for\n"
    assert not [*tmp_path.glob("course-*"), *tmp_path.glob("build")]


def test_pip_unpacks_inside_and_installs_for_nobody_else(empty, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_USER", "1")
    empty.append([sys.executable, "-c", "import os; print(os.environ['TMPDIR'], os.environ['PIP_USER'])"])
    assert setup.main("2.15.0") == 0
    folder, user = (tmp_path / "setup.log").read_text().splitlines()[-1].rsplit(" ", 1)
    assert Path(folder).parent == tmp_path and not Path(folder).exists() and user == "0"


def test_the_tests_bring_the_other_extras_along(empty, tmp_path, capfd):
    empty.append(saying("Collecting jax", 0))
    (tmp_path / "gspmd-2.11.0").touch()
    assert setup.main("2.13.0", "test") == 0
    stamps = {path.name for path in tmp_path.glob("*-2.*")}
    assert {f"{kind}-2.13.0" for kind in ("course", "tests", *setup.OPTIONAL)} <= stamps
    assert "gspmd-2.11.0" not in stamps
    assert len(capfd.readouterr().out.splitlines()) == 2


def only_without(*refused):
    def installers(extras, build):
        yield saying(f"installing {extras}", bool({*refused} & {*extras})), {}

    return installers


@pytest.mark.parametrize("refused", [("gspmd",), ("clusters",), ("gspmd", "deepspeed")])
def test_the_tests_do_without_an_extra_that_cannot_be_installed(empty, tmp_path, capfd, monkeypatch, refused):
    monkeypatch.setattr(setup, "installers", only_without(*refused))
    assert setup.main("2.13.0", "test") == 0
    *_, line, _ = capfd.readouterr().out.splitlines()
    assert line == f"Without {', '.join(refused)}, which cannot be installed here: {tmp_path}/setup.log says why"
    there = {name for name in ("tests", *setup.OPTIONAL) if (tmp_path / f"{name}-2.13.0").exists()}
    assert there == {"tests", *setup.OPTIONAL} - {*refused}


def test_an_extra_that_was_asked_for_must_be_installed(empty, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "installers", only_without("gspmd"))
    assert setup.main("2.13.0", "gspmd") == 1
    assert not list(tmp_path.glob("*-2.13.0"))


def test_an_unknown_extra_is_refused(empty, tmp_path, capfd):
    assert setup.main("2.13.0", "gpsmd") == 2
    assert capfd.readouterr().err == "EXTRA=gpsmd: there is gspmd, deepspeed, clusters, types\n"
    assert not (tmp_path / "setup.log").exists()


def test_it_runs_before_anything_is_installed():
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import runpy; runpy.run_path('tools/setup.py')"],
        cwd=setup.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
