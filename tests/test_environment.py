"""Reference: conda's own grammar (py-rattler) and pip's own resolver; then files broken on purpose."""

import shutil
from pathlib import Path

import pytest

from tools import environment, learn

FILES = ["environment.yml", "pyproject.toml", "constraints.txt"]


def test_the_files_agree():
    assert environment.problems() == []


def test_pip_finds_a_solution():
    environment.resolve()


@pytest.mark.parametrize(
    ("file", "right", "wrong", "told"),
    [
        ("environment.yml", "python >=3.11,<3.14", "python==>3", "conda cannot read 'python==>3'"),
        ("environment.yml", "python >=3.11", "python >=3.12", "3.11.0 tells them apart"),
        ("environment.yml", "channels:", "prefix: /home/me\nchannels:", "prefix"),
        ("environment.yml", "  - pip  ", "  - zip  ", "does not ask for pip"),
        ("environment.yml", "--constraint constraints.txt", "torch", "the versions that are tested"),
        ("environment.yml", "# those versions", "", "no reason given"),
        ("constraints.txt", "torch==2.13.0", "torch>=2.13.0", "does not pin one version in 'torch>=2.13.0'"),
        ("constraints.txt", "torch==2.13.0", "torch==2.9.0", "pyproject.toml needs 'torch>=2.11,<2.14'"),
        ("pyproject.toml", '"tqdm",', '"tqqdm",', "'tqqdm'; constraints.txt pins None"),
        ("pyproject.toml", "# progress bars", "", 'no reason given for \'"tqdm"'),
    ],
)
def test_what_is_broken_is_told(tmp_path, file, right, wrong, told):
    for name in FILES:
        shutil.copy(environment.ROOT / name, tmp_path / name)
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong, 1))
    assert any(told in sentence for sentence in environment.problems(tmp_path)), environment.problems(tmp_path)


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


def test_make_learn_opens_a_notebook_that_is_there():
    assert (Path(learn.ROOT) / learn.FIRST).exists()
