"""Tests of progress against a small course written here, and the checks that the notebooks call."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from labs.__main__ import main
from labs.exercises.engine.answer import Wrong, answered
from labs.kit import check
from labs.kit.learners import progress
from tools import notebooks

WHEN = "2026-11-20 14:05"


def cell(kind, *lines):
    return {"cell_type": kind, "source": list(lines)}


def write(path, *cells):
    path.write_text(json.dumps({"cells": cells}))


@answered
def broadcast(fn, seed):
    if fn() != 1:
        raise Wrong("untouched" if fn() is None else "no")
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
    assert [path.name for path in course.iterdir() if path.is_file()] == ["progress.json"], "no draft is left"


def test_what_is_not_passed_is_not_noted(course):
    assert broadcast(lambda: 2).ok is False
    assert broadcast(lambda: None).ok is None
    check.predict("How many?", 1, 1)
    assert not (course / "progress.json").exists()


@pytest.mark.parametrize("folder", ["solutions", "tests", "."])
def test_outside_of_a_learners_notebook_nothing_is_noted(course, monkeypatch, folder):
    (course / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(course / folder)
    assert broadcast(right)
    assert not list(course.rglob("progress.json*"))


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
    assert not list(course.glob("progress.json*"))
    (course / "progress.json").mkdir()  # a file that cannot be one
    assert broadcast(right)
    monkeypatch.setattr("pathlib.Path.cwd", refused)  # a folder that is gone
    assert broadcast(right)


def test_the_report_has_every_exercise_of_the_notebooks_and_no_copy(course, monkeypatch, capsys):
    progress.write(course, {"broadcast": WHEN, "of_a_later_course": WHEN})
    for folder in (course, course / "notebooks"):
        monkeypatch.chdir(folder)
        assert main(["progress"]) == 0
        lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        rows = [[word.strip() for word in line if word.strip()] for line in lines[2:]]
        assert rows == [
            ["02 Talk", "broadcast", WHEN],
            ["02 Talk", "reduce", "not yet"],
            ["03 DDP", "average", "not yet"],
            ["03b More of it", "clip", "not yet"],
            ["1 of 4 exercises passed"],
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


def test_exercises_noted_at_the_same_time_are_all_kept(tmp_path):
    names = [f"exercise {n}" for n in range(40)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: progress.add(tmp_path, name), names))
    assert progress.read(tmp_path).keys() == {*names}
    assert [path.name for path in tmp_path.iterdir()] == [progress.FILE]
