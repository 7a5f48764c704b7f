"""Tests of the environment's files, of broken ones, and of make itself."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from nbconvert import HTMLExporter
from packaging.requirements import Requirement
from packaging.version import Version
from traitlets.config.loader import PyFileConfigLoader

from tools import environment, learn

FILES = ["environment.yml", "pyproject.toml", "constraints.txt"]


def test_the_files_agree():
    assert environment.problems() == []


def test_setuptools_is_one_that_each_pytorch_takes():
    """Check its limits: PyTorch 2.11 takes none from 82 on, later ones none before 77.0.3."""
    pins = dict(line.split("==") for line in (environment.ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert Version("77.0.3") <= Version(pins["setuptools"]) < Version("82")


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("environment.yml", "python >=3.11,<3.14", "python==>3", "environment.yml has Python None"),
        ("environment.yml", "python >=3.11", "python >=3.12", "has Python >=3.12,<3.14, pyproject.toml >=3.11"),
        ("environment.yml", "channels:", "prefix: /home/me\nchannels:", "prefix"),
        ("environment.yml", "  - pip  ", "  - zip  ", "does not ask for pip"),
        ("environment.yml", "--constraint constraints.txt", "torch", "the versions that are tested"),
        ("environment.yml", "# those versions", "", "no reason given"),
        ("constraints.txt", "torch==2.13.0", "torch>=2.13.0", "does not pin one version in 'torch>=2.13.0'"),
        ("constraints.txt", "torch==2.13.0", "torch==2.9.0", "pyproject.toml needs 'torch>=2.11,<2.16'"),
        ("pyproject.toml", '"tqdm",', '"tqqdm",', "'tqqdm'; constraints.txt pins None"),
        ("pyproject.toml", "# progress bars", "", 'no reason given for \'"tqdm"'),
    ],
)
def test_what_is_broken_is_reported(tmp_path, file, right, wrong, message):
    for name in FILES:
        shutil.copy(environment.ROOT / name, tmp_path / name)
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong, 1))
    assert any(message in sentence for sentence in environment.problems(tmp_path)), environment.problems(tmp_path)


@pytest.mark.parametrize(
    ("variables", "platform", "seen"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "10.0.0.1 22"}, "linux", False),
        ({}, "darwin", True),
        ({"SSH_CONNECTION": "10.0.0.1 22"}, "darwin", False),
    ],
)
def test_a_browser_is_opened_only_where_it_would_be_seen(variables, platform, seen):
    command = learn.command(variables, platform, root=False)
    assert ("--no-browser" in command) is not seen
    assert "--ServerApp.ip=127.0.0.1" in command


@pytest.mark.parametrize(("before", "after"), [({}, ""), ({"JUPYTER_CONFIG_PATH": "/mine"}, ":/mine")])
def test_jupyter_reads_the_configuration_of_the_course_besides_the_readers(before, after):
    """Check only the path; test_browser shows the effect: saving an untouched notebook changes nothing."""
    assert learn.settings(before)["JUPYTER_CONFIG_PATH"] == f"{learn.ROOT}/tools/jupyter{after}"


def test_an_exported_page_carries_its_pictures_with_it():
    """Export a page with JupyterLab's own configuration, as JupyterLab does."""
    config = PyFileConfigLoader("jupyter_server_config.py", path=f"{learn.ROOT}/tools/jupyter").load_config()
    page, _ = HTMLExporter(config=config).from_filename(learn.ROOT / learn.FIRST)
    pictures = (learn.ROOT / learn.FIRST).read_text(encoding="utf-8").count("../images/")
    assert page.count('src="data:image/svg+xml;base64,') == pictures > 0 and "../images/" not in page


def test_a_terminal_of_the_course_finds_torchrun():
    path = learn.settings({"PATH": "/bin"})["PATH"]
    assert shutil.which("torchrun", path=path) == str(Path(sys.executable).with_name("torchrun"))
    assert path.endswith(f"{os.pathsep}/bin")


def test_a_home_that_cannot_be_written_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not learn.AT_HOME.keys() & learn.settings({}, tmp_path).keys()
    found = learn.settings({"IPYTHONDIR": "/mine"}, tmp_path / "gone")
    assert found["IPYTHONDIR"] == "/mine" and found["JUPYTER_RUNTIME_DIR"] == str(tmp_path / "home/runtime")
    assert (tmp_path / "home/runtime").is_dir()


def test_make_learn_opens_a_notebook_that_is_there():
    assert (Path(learn.ROOT) / learn.FIRST).exists()


# ---- the Makefile ----------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path):
    """Return make, in a folder with the files for setting up, and names of tests; it returns what was printed."""
    for name in ["Makefile", "pyproject.toml", "constraints.txt"]:
        shutil.copy(environment.ROOT / name, tmp_path / name)
    notebooks = "solutions/07b_b.ipynb", "solutions/07_a.ipynb", "notebooks/07b_b.ipynb"
    for name in [*notebooks, "tests/test_ddp.py", "tests/fsdp/test_order.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    # Remove the variables of the make that runs these tests.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    clean = {key: value for key, value in clean.items() if key not in {"PYTHON", "TORCH", "CPU", "CUDA", "VENV"}}

    def run(*arguments, status=0):
        done = subprocess.run(["make", *arguments], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout + (done.stderr if status else "")  # otherwise stderr may mention clocks

    return run


def ready(folder, version):
    """Make the stamps, as if setting up had ended a moment from now."""
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    for name in ["bin/python", f"course-{version}"]:
        (folder / ".venv" / name).touch()
        os.utime(folder / ".venv" / name, (2**32, 2**32))


def test_an_unsuitable_python_is_refused(make, tmp_path):
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 || echo 3 9\n')
    old.chmod(0o755)
    bare = tmp_path / "python3.12"
    bare.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.12.1 || exit 1\n')
    bare.chmod(0o755)
    printed = make("learn", "PYTHON=no-such-python ./python3.9 ./python3.12", status=2)
    assert "needs Python 3.11, 3.12 or 3.13 with venv" in printed
    assert (
        "no-such-python (not there), ./python3.9 (Python 3.9.1), ./python3.12 (Python 3.12.1 without venv)" in printed
    )
    assert "make learn PYTHON=" in printed


def test_the_second_time_nothing_is_set_up(make, tmp_path):
    assert "tools.setup 2.13.0" in make("-n", "learn")
    assert "tools.setup 2.13.0 test" in make("-n", "module", "M=ddp")
    ready(tmp_path, "2.13.0")
    assert make("-n", "learn").split() == [".venv/bin/python", "-m", "tools.learn"]
    assert "tools.setup 2.13.0 test" in make("-n", "module", "M=ddp")
    assert "tools.setup 2.11.0" in make("-n", "learn", "TORCH=2.11.0")
    os.utime(tmp_path / "constraints.txt", (2**32 + 9, 2**32 + 9))
    assert "tools.setup" in make("-n", "learn")


def test_the_other_build_is_set_up_when_asked_for(make, tmp_path):
    assert "CPU=1 CUDA= .venv/bin/python -m tools.setup" in make("-n", "learn", "CPU=1")
    ready(tmp_path, "2.13.0")
    ready(tmp_path, "2.13.0-cpu")
    assert "tools.setup" not in make("-n", "learn")
    assert "tools.setup" not in make("-n", "learn", "CPU=1")
    assert "CPU= CUDA=1 .venv/bin/python -m tools.setup" in make("-n", "learn", "CUDA=1")


def test_the_newest_has_an_environment_of_its_own(make):
    printed = make("-n", "newest", "CPU=1")
    newest = re.search(r"VENV=build/newest CPU=1 CUDA= build/newest/bin/python -m tools.setup (\S+) test", printed)[1]
    project = tomllib.loads((environment.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [torch] = [Requirement(text) for text in project["dependencies"] if text.startswith("torch")]
    major, minor, _ = map(int, newest.split("."))
    assert newest in torch.specifier and f"{major}.{minor + 1}.0" not in torch.specifier


def test_what_the_newest_is_tried_on_is_there():
    printed = subprocess.run(["make", "-n", "part"], cwd=environment.ROOT, capture_output=True, text=True).stdout
    paths = re.findall(r"(?:tests|solutions)/\S+", printed)
    assert len(paths) > 5 and all((environment.ROOT / path).exists() for path in paths)


def test_an_extra_is_set_up_when_asked_for(make, tmp_path):
    ready(tmp_path, "2.13.0")
    assert make("-n", "learn", "EXTRA=gspmd").split()[-7:-3] == ["-m", "tools.setup", "2.13.0", "gspmd"]
    (tmp_path / ".venv/gspmd-2.13.0").touch()
    os.utime(tmp_path / ".venv/gspmd-2.13.0", (2**32, 2**32))
    assert make("-n", "learn", "EXTRA=gspmd") == make("-n", "learn")
    assert "tools.setup" not in make("-n", "learn")


def test_files_that_do_not_exist_are_not_tested(make):
    """Check names: without a file to test, pytest would take all of them."""
    assert make("-n", "notebook", "N=07b").split()[-2:] == ["solutions/07b_b.ipynb", "notebooks/07b_b.ipynb"]
    assert "N=99 is no notebook: there are 07 07b." in make("-n", "notebook", "N=99", status=2)
    for name, tests in (
        ("ddp", "tests/./test_ddp.py"),
        ("fsdp", "tests/fsdp"),
        ("fsdp/order", "tests/fsdp/test_order.py"),
    ):
        assert make("-n", "module", f"M={name}").split()[-1] == tests
    assert "M=nope is no module with tests: there are ddp fsdp." in make("-n", "module", "M=nope", status=2)


def test_make_alone_lists_every_command(make):
    listed = [line.split()[1] for line in make().splitlines()]
    commands = "learn tour test bench soak images notebooks clean doctor progress"
    assert set(commands.split()) <= set(listed)
