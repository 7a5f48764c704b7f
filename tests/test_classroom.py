"""Tests of the class' pages: made-up learners, whose progress the real code has kept."""

import html
import json
import os
import re
from datetime import datetime

import pytest

from labs.exercises.engine.answer import Wrong, answered
from labs.kit.learners import progress
from tools import classroom
from tools.imports import ROOT

COURSE = progress.notebooks(ROOT)
ORDER = [name for each in COURSE for name in each.exercises]
WHEN = "2026-11-21 14:05"
LEFT_OUT = "a rank is left out"
QUESTIONS = {LEFT_OUT: "Which ranks does your loop visit?"}


def tried(number, mistake="", last=WHEN):
    return {"tries": number, "mistake": mistake, "last": last}


def judged(name):
    def judge(fn, seed):
        if mistake := fn():
            raise Wrong("it differs", mistake=mistake)
        return "fine"

    judge.__name__ = name
    return answered(judge)


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """Return a function that makes a learner's folder: exercises with their mistakes, "" for an answer that passes."""

    def make(name, **answers):
        folder = tmp_path / name
        (folder / "notebooks").mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.chdir(folder / "notebooks")
            for exercise, mistakes in answers.items():
                for mistake in mistakes:
                    judged(exercise)(lambda mistake=mistake: mistake)
        return folder

    return make


def pages(tmp_path, folders):
    """Return both pages, and the sentences about what is wrong."""
    learners, wrong = classroom.read_class(folders, ORDER, datetime.now())
    classroom.write(classroom.summary(learners, COURSE, QUESTIONS), wrong, tmp_path / "out")
    return *((tmp_path / "out" / page).read_text(encoding="utf-8") for page in classroom.PAGES), wrong


def rows(page):
    """Return the cells of each learner's row of the large table, as text."""
    body = page.split('class="wide"')[1].split("<tbody>")[1].split("</tbody>")[0]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in body.split("</tr>")[:-1]]
    return {
        name.split("<br>")[0]: [html.unescape(" ".join(re.sub("<.*?>", " ", each).split())) for each in rest]
        for name, *rest in cells
    }


def test_the_pages_of_a_class(learner, tmp_path):
    folders = [learner(f"learner-{n}", my_shard=[""], broadcast=["no", LEFT_OUT]) for n in range(4)]
    folders += [learner(f"learner-{n}", broadcast=["", "no"], my_shard=[LEFT_OUT, ""]) for n in range(4, 7)]
    folders += [learner("learner-7"), learner("<i>&", reduce_scatter=["<script>"])]
    named, projected, wrong = pages(tmp_path, folders)
    assert wrong == []
    text = " ".join(named.split())
    at = "<code>broadcast</code> (02 Collectives): 4 of 9; 4 of them at the mistake “a rank is left out”."
    assert f"The class stands at {at}" in text and f"→ {QUESTIONS[LEFT_OUT]}" in text
    shown = rows(named)
    columns = ["my_shard", "mixed_precision", "broadcast", "reduce_scatter"]
    assert re.findall(r"<code>(.*?)</code>", named.split('class="wide"')[1].replace("<wbr>", "")) == columns
    assert list(shown) == ["&lt;i&gt;&amp;", *(f"learner-{n}" for n in range(8))]
    assert re.fullmatch(r"✓ \d\d \w\w\w, \d\d:\d\d 1 try", shown["learner-0"][0])
    assert shown["learner-0"][1:] == ["", "✗ 2 tries a rank is left out", ""]
    assert shown["learner-4"][0].endswith("2 tries") and shown["learner-4"][1] == "not tried yet"
    assert shown["learner-7"] == ["", "", "", ""] and "not begun" in named
    assert "✗ 1 try <script>" in shown["&lt;i&gt;&amp;"] and "<script" not in named
    assert "7 of 9" in named.split("<tfoot>")[1]
    assert "learner" not in projected.replace("learners", "") and "script" not in projected
    assert projected.count("<li><code>") == 2
    assert "7 of 9" not in projected, "two of nine are too few"
    assert "nearly all passed; fewer than 3 trying" in projected and "3 of 9 passed; 4 of 9 trying" in projected
    assert QUESTIONS[LEFT_OUT] in projected


def test_the_projected_page_of_a_few_says_nothing_about_them(learner, tmp_path):
    few = [learner(f"learner-{n}", my_shard=[""], broadcast=[LEFT_OUT]) for n in range(5)]
    empty = pages(tmp_path, [learner("another")])[1]
    assert all(pages(tmp_path, few[:number])[1] == empty for number in (1, 3, 5))
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0, "others on the machine cannot read the page with names"


def test_progress_without_tries_is_an_older_courses(tmp_path):
    progress.write(tmp_path, {"my_shard": WHEN, "broadcast": WHEN})
    named, _, wrong = pages(tmp_path, [tmp_path])
    assert wrong == [] and "The class stands at <code>reduce_scatter</code>" in named
    assert rows(named)[tmp_path.name] == ["✓ 21 Nov, 14:05", "✓ 21 Nov, 14:05", "not tried yet"]


def test_learners_are_called_as_the_folder_around_where_all_folders_have_one_name(learner, tmp_path):
    folders = [learner(f"{name}/training-labs") for name in ("ben", "anna")]
    assert list(rows(pages(tmp_path, [*folders, folders[0] / "."])[0])) == ["anna", "ben"]


@pytest.mark.parametrize(
    "files, sentence",
    [
        ({"progress.json": "{"}, "progress.json is broken, and counts as empty."),
        ({"tries.json": {"broadcast": 3}}, "tries.json is broken, and counts as empty."),
        (
            {"progress.json": dict.fromkeys(["my_shard", *"abcd"], WHEN)},
            "progress.json has exercises that are not in this course, a, b, c and 1 more: it was written by another",
        ),
        ({"tries.json": {"gone": tried(1)}}, "tries.json has exercises that are not in this course, gone: "),
        (
            {"progress.json": {"my_shard": "2031-01-01 10:00"}},
            "progress.json has times that cannot be right, and they are shown: my_shard, 2031-01-01 10:00, is later",
        ),
        ({"tries.json": {"my_shard": tried(1, last="1970-01-01 00:00+00:00")}}, "is earlier than the course's first"),
        ({"progress.json": {"my_shard": "yesterday"}}, "the time of my_shard cannot be read."),
        (
            {"progress.json": {"broadcast": "2026-11-22 10:00", "my_shard": WHEN}},
            "my_shard was noted after broadcast, with an earlier time.",
        ),
        ({}, "is no course: neither notebooks nor a file of progress is in it."),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_and_the_rest_is_shown(learner, tmp_path, files, sentence):
    other, folder = learner("other", broadcast=[LEFT_OUT]), tmp_path / "strange"
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    named, projected, wrong = pages(tmp_path, [folder, other])
    assert len(wrong) == 1 and wrong[0].startswith(str(folder / next(iter(files), ""))) and sentence in wrong[0]
    assert html.escape(sentence, quote=False) in html.unescape(named) and "strange" not in projected
    assert "✗ 1 try a rank is left out" in rows(named)["other"]
    assert ("strange" in rows(named)) == bool(files)


def test_a_clock_that_was_set_back_does_not_change_where_a_learner_stands(tmp_path):
    earlier = {"broadcast": tried(1, last="2026-11-23 10:00"), "my_shard": tried(2, LEFT_OUT)}
    progress.write(tmp_path, earlier, progress.TRIES)
    named, _, (sentence,) = pages(tmp_path, [tmp_path])
    assert "The class stands at <code>my_shard</code>" in named and "my_shard was noted after broadcast" in sentence


def test_of_two_folders_of_one_learner_the_one_used_last_is_shown(learner, tmp_path):
    old, new, other = learner("round1/anna"), learner("round2/anna", broadcast=[""]), learner("ben")
    progress.write(old, {"my_shard": WHEN})
    for folders in ([old, new, other], [new, old, other]):
        named, _, (sentence,) = pages(tmp_path, folders)
        assert str(old) in sentence and str(new) in sentence and "the one used last is shown" in sentence
        assert rows(named)["anna"][0].endswith("1 try") and "<code>my_" not in named


def test_the_command_writes_pages_or_says_what_to_name(learner, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(classroom, "hints", dict)
    folder = learner("learner-1", broadcast=[LEFT_OUT])
    assert classroom.main([os.fspath(folder), "/home/*/nobody"], tmp_path / "out") == 0
    said = capsys.readouterr()
    assert "with names, 1: " in said.out and said.err.startswith("/home/*/nobody is no course")
    assert classroom.main([], tmp_path / "none") == 1 and capsys.readouterr().err == f"{classroom.USAGE}\n"
    assert not (tmp_path / "none").exists()
