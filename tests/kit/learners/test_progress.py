"""Tests of progress against a small course written here, and the checks that the notebooks call."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from labs.__main__ import main
from labs.exercises.engine import scores
from labs.exercises.engine.answer import Wrong, answered
from labs.kit import check
from labs.kit.learners import progress
from tools import notebooks
from tools.imports import ROOT

WHEN = "2026-11-20 14:05"
NOTED = ("progress.json", "tries.json")


def cell(kind, *lines):
    return {"cell_type": kind, "source": list(lines)}


def write(path, *cells):
    path.write_text(json.dumps({"cells": cells}))


def tries(course):
    return progress.read(course, progress.TRIES, progress.is_tried)


@answered
def broadcast(fn, seed):
    if fn() != 1:
        raise Wrong("untouched" if fn() is None else f"it is {fn()}", mistake="a rank is left out")
    return "fine"


def right():
    return 1


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Make a course whose first notebook has two exercises, open in one of its notebooks."""
    folder = tmp_path / "course"
    (folder / "notebooks").mkdir(parents=True)
    write(
        folder / "notebooks/02_talk.ipynb",
        cell("markdown", "# Talk: from send\n", "\n", "`check.nothing(x)` is no call."),
        cell("code", "check.broadcast(mine)\n", "check.predict('How many?', 1, 1)"),
        cell("code", "answer = check.reduce(mine)\n", "check.broadcast(again)"),
    )
    write(folder / "notebooks/03_ddp.ipynb", cell("markdown", "# DDP"), cell("code", "check.average(mine)"))
    write(folder / "notebooks/03_ddp-Copy1.ipynb", cell("code", "check.average(mine)"))
    write(folder / "notebooks/03b_more.ipynb", cell("markdown", "# More of it"), cell("code", "check.clip(mine)"))
    write(folder / "notebooks/04_rest.ipynb", cell("markdown", "# Rest"))
    monkeypatch.chdir(folder / "notebooks")
    return folder


def test_a_passed_check_is_noted_with_its_time_and_the_first_time_stays(course):
    before = datetime.now().replace(second=0, microsecond=0)
    assert broadcast(right)
    when = progress.read(course)["broadcast"]
    assert before <= datetime.fromisoformat(when) <= datetime.now()
    progress.write(course, {"broadcast": WHEN, "other": WHEN})
    assert broadcast(right)
    assert progress.read(course) == {"broadcast": WHEN, "other": WHEN}
    assert {path.name for path in course.iterdir() if path.is_file()} == {*NOTED}, "no draft is left"


def test_tries_are_counted_until_one_passes_and_the_last_mistake_is_kept_by_its_name(course):
    progress.write(course, {"reduce": {"tries": 7, "mistake": "", "last": WHEN}}, progress.TRIES)
    assert broadcast(lambda: None).ok is None
    check.predict("How many?", 1, 1)
    assert "broadcast" not in tries(course), "an untouched stub is no try"
    for number in (1, 2):
        assert broadcast(lambda: "anna's secret").ok is False
        assert tries(course)["broadcast"].items() >= {"tries": number, "mistake": "a rank is left out"}.items()
    assert not (course / "progress.json").exists()
    progress.add(course, "reduce", ok=False)
    assert list(tries(course)) == ["broadcast", "reduce"], "the exercise tried last stands last"
    assert broadcast(right) and broadcast(right) and not broadcast(lambda: 2)
    assert list(tries(course).items())[-1] == (
        "broadcast",
        {"tries": 3, "mistake": "", "last": progress.read(course)["broadcast"]},
    )
    assert "secret" not in (course / "tries.json").read_text()


@pytest.mark.parametrize("value", ["off", "0", "no", ""])
def test_one_switch_keeps_nothing(course, monkeypatch, capsys, value):
    monkeypatch.setenv("LABS_PROGRESS", value)
    assert broadcast(right) and not broadcast(lambda: 2)
    assert scores.noted("toy", 3.0) == [3.0]
    assert not list(course.glob("*.json*"))
    assert progress.OFF in str(progress.course_map()) and main(["progress"]) == 0
    assert progress.OFF in capsys.readouterr().out
    monkeypatch.setenv("LABS_PROGRESS", "on")
    assert broadcast(right) and progress.read(course)


@pytest.mark.parametrize("folder", ["solutions", "tests", "."])
def test_outside_of_a_learners_notebook_nothing_is_noted(course, monkeypatch, folder):
    (course / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(course / folder)
    assert broadcast(right)
    assert not list(course.rglob("*.json*"))


@pytest.mark.parametrize("value", ['{"tries": 2}', '{"tries": 0, "mistake": "", "last": ""}', "3"])
def test_broken_tries_are_reported_and_begin_anew(course, capsys, value):
    progress.write(course, {"reduce": WHEN})
    (course / "tries.json").write_text(f'{{"broadcast": {value}}}')
    assert main(["progress"]) == 1
    assert "tries.json is broken: delete it" in capsys.readouterr().err
    assert not broadcast(lambda: 2)
    assert tries(course)["broadcast"]["tries"] == 1 and progress.read(course) == {"reduce": WHEN}


@pytest.mark.parametrize("broken", [b"{", b"", b"[]", b'{"broadcast": 3}', b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_reported_and_begins_anew(course, capsys, broken):
    (course / "progress.json").write_bytes(broken)
    assert main(["progress"]) == 1
    assert "progress.json is broken: delete it" in capsys.readouterr().err
    assert "progress.json is broken" in progress.course_map()._repr_html_()
    assert str(broadcast(right)) == "✓ broadcast: fine"
    assert list(progress.read(course)) == ["broadcast"]


def test_a_folder_that_cannot_be_written_does_not_disturb_a_check(course, monkeypatch):
    def refused(*_):
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        assert str(broadcast(right)) == "✓ broadcast: fine"
    assert not list(course.glob("*.json*"))
    (course / "progress.json").mkdir()  # a file that cannot be one
    assert broadcast(right)
    monkeypatch.setattr("pathlib.Path.cwd", refused)  # a folder that is gone
    assert broadcast(right)


def test_the_report_has_every_exercise_of_the_notebooks_and_no_copy(course, monkeypatch, capsys):
    progress.write(course, {"broadcast": WHEN, "of_a_later_course": WHEN})
    tried = {"tries": 2, "mistake": "a rank is left out", "last": WHEN}
    progress.write(course, {"reduce": tried, "of_a_later_course": tried}, progress.TRIES)
    for folder in (course, course / "notebooks"):
        monkeypatch.chdir(folder)
        assert main(["progress"]) == 0
        lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        rows = [[word.strip() for word in line if word.strip()] for line in lines[2:]]
        assert rows == [
            ["02 Talk", "broadcast", WHEN, "–"],
            ["02 Talk", "reduce", "not yet", "2", "a rank is left out"],
            ["03 DDP", "average", "not yet", "–"],
            ["03b More of it", "clip", "not yet", "–"],
            ["1 of 4 exercises passed"],
            [],
            *([line] for line in progress.KEPT.split("\n")),
        ]


def test_a_teacher_sees_how_many_each_learner_has_passed(course, tmp_path, monkeypatch, capsys):
    for name, passed in {"anna": ["broadcast", "reduce"], "ben": []}.items():
        (tmp_path / name).mkdir()
        progress.write(tmp_path / name, dict.fromkeys(passed, WHEN))
    monkeypatch.chdir(course)
    assert main(["progress", "../anna", "../ben"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^passed +02 +03 +03b$", out, re.MULTILINE)
    assert re.search(r"^../anna +2 of 2 +0 of 1 +0 of 1$", out, re.MULTILINE)
    assert re.search(r"^../ben +0 of 2 +0 of 1 +0 of 1$", out, re.MULTILINE)
    assert main(["progress", "../nobody"]) == 1
    assert capsys.readouterr().err == "there is no folder ../nobody: name the folder of each learner's course\n"


def test_no_course_and_a_broken_notebook_are_reported(course, tmp_path, monkeypatch, capsys):
    (course / "notebooks/03_ddp.ipynb").write_text('{"cells": [')
    assert main(["progress"]) == 1
    assert "03_ddp.ipynb is broken: `git restore notebooks/03_ddp.ipynb`" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["progress"]) == 1
    assert f"there are no notebooks in {tmp_path}" in capsys.readouterr().err


def test_the_map_links_to_the_notebooks_and_shows_what_is_passed(course, monkeypatch):
    progress.write(course, {"broadcast": WHEN})
    drawn = progress.course_map()
    files = ["02_talk.ipynb", "03_ddp.ipynb", "03b_more.ipynb", "04_rest.ipynb"]
    assert re.findall('href="(.*?)"', drawn._repr_html_()) == files
    assert "<b>✓ broadcast</b>, reduce</td>" in drawn._repr_html_()
    assert str(drawn) == "02 Talk: 1 of 2\n03 DDP: 0 of 1\n03b More of it: 0 of 1\n04 Rest: –"
    (course / "solutions").mkdir()
    monkeypatch.chdir(course / "solutions")
    assert str(progress.course_map()).startswith("02 Talk: 0 of 2"), "the solutions are nobody's"


def test_the_courses_own_exercises_are_checks_that_answer_by_their_names():
    found = progress.notebooks(notebooks.ROOT)
    assert [each.file for each in found] == [f"{source.stem}.ipynb" for source in notebooks.sources(notebooks.ROOT)]
    names = [name for each in found for name in each.exercises]
    assert len(names) == len(set(names)) >= 25
    assert all(getattr(check, name).__name__ == name for name in names)


def test_tries_noted_at_the_same_time_are_all_counted(tmp_path):
    """Check threads and processes: the notebooks of one learner are processes of their own."""
    names = [f"exercise {n}" for n in range(10)]
    other = "from labs.kit.learners.progress import *; [add(Path('.'), 'elsewhere', False) for _ in range(40)]"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", other], cwd=tmp_path, env=environment) as job:
        while not (tmp_path / "tries.json").exists() and job.poll() is None:
            time.sleep(0.001)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda name: progress.add(tmp_path, name, ok=False), 3 * names))
            list(threads.map(lambda name: progress.add(tmp_path, name), names))
    assert job.returncode == 0
    assert progress.read(tmp_path).keys() == {*names}
    counts = {name: tried["tries"] for name, tried in tries(tmp_path).items()}
    assert counts == dict.fromkeys(names, 4) | {"elsewhere": 40}
    assert {path.name for path in tmp_path.iterdir()} == {*NOTED}
