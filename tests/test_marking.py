"""Tests of the marking: what is handed out, what of a submission runs, and what the judge says.

`make soak` also takes a class through the real nbgrader, and marks the hostile submissions of tests/hostile.py.
"""

import ast
import csv
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.hostile import HONEST, SUBMISSIONS
from tools.marking import sandbox
from tools.marking.__main__ import ROOT, mark, release
from tools.marking.handing import NotMarked, Submission, handed_out, read, submissions
from tools.marking.slices import exercises, slice_of

NBGRADER = ROOT / "build/marking-env/bin/nbgrader"
IMPORTS = "import torch\nimport torch.distributed as dist\nfrom labs.kit import check\n"
SHARD = """
import numpy

def my_shard(elements, ranks, rank):
    start, stop = numpy.minimum(numpy.array([rank, rank + 1]) * -(-elements // ranks), elements)
    return start, stop
"""

BODY = HONEST.replace("    if rank > 0:", "    if rank > 0:\n        dist.send(x, dst=0)")
BODY = BODY.replace("        dist.recv(theirs, src=other)", "        dist.recv(theirs, src=other)\n" * 2)
TWICE = f"def mean_on_rank_0(x):{BODY}\ncheck.mean_on_rank_0(mean_on_rank_0)\n"  # right, with twice the messages


def request(name, *cells):
    return {"name": name, "functions": [name], "cells": [IMPORTS, *cells]}


# ---- what runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "solutions").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_slice_has_what_the_functions_need_and_starts_nothing(path):
    notebook = nbformat.read(path, as_version=4)
    for exercise in exercises(notebook.cells):
        cells = [cell.source for cell in notebook.cells[: exercise.cell + 1] if cell.cell_type == "code"]
        source = slice_of(cells, exercise.name, exercise.functions)
        assert all(f"def {fn}(" in source or f"class {fn}" in source for fn in exercise.functions), source
        started = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
        assert not started & {"run", "job", "corpus", "recall.ask"}, f"{exercise.name} starts {started}"
        assert f"check.{exercise.name}(" not in source


def test_a_slice_follows_names_through_cells():
    cells = [
        "import torch\nK = 1\nK = K + 1\nsize = 3",
        "%matplotlib inline\ndef helper():\n    return later() + K\nprint(size)",
        "this is no Python",
        "later = lambda: 5\nsize = 4\nok = check.first(helper)\nhelper = helper if ok.ok else check.first.expected",
        "def fn(size):\n    return helper() + size\ncheck.second(fn)\nfn = None",
    ]
    source = slice_of(cells, "second", ["fn"])
    names = {"check": type("check", (), {"first": type("first", (), {"expected": lambda: 0})})}
    exec(source, names)
    assert names["fn"](1) == 1 and "size = " not in source and "torch" not in source


# ---- what is handed out, and comes back --------------------------------------------------------------------


@pytest.fixture
def released(tmp_path):
    return {"00_start_here": handed_out(ROOT / "notebooks/00_start_here.ipynb")}


def test_a_learner_gets_the_notebook_and_a_marked_cell_for_each_exercise(released):
    notebook, own = released["00_start_here"], nbformat.read(ROOT / "notebooks/00_start_here.ipynb", as_version=4)
    marked = [cell for cell in notebook.cells if "nbgrader" in cell.metadata]
    assert [cell for cell in notebook.cells if cell not in marked] == own.cells
    assert [cell.metadata.nbgrader.grade_id for cell in marked] == ["mean_on_rank_0", "my_shard"]


def test_only_a_notebook_as_it_was_built_is_handed_out(tmp_path):
    notebook = nbformat.read(ROOT / "notebooks/00_start_here.ipynb", as_version=4)
    notebook.cells[-1].source += "!"
    nbformat.write(notebook, tmp_path / "00_start_here.ipynb")
    with pytest.raises(NotMarked, match=r"00_start_here.ipynb was edited: `git restore"):
        handed_out(tmp_path / "00_start_here.ipynb")


def test_bad_input_is_named_and_the_rest_is_marked(released, tmp_path):
    def hand_in(where, notebook):
        path = tmp_path / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(notebook if isinstance(notebook, str) else nbformat.writes(notebook))

    with pytest.raises(NotMarked, match="has no folders: it needs one for each learner"):
        submissions(tmp_path, released)
    notebook = released["00_start_here"]
    hand_in("ada/00_start_here.ipynb", notebook)
    for twice in ("bob/00_start_here.ipynb", "bob/old/00_start_here.ipynb"):
        hand_in(twice, notebook)
    hand_in("cleo/00_start_here.ipynb", '{"cells"')
    hand_in("dan/notes.ipynb", notebook)
    (tmp_path / "dan/00_start_here.ipynb").symlink_to(tmp_path / "ada/00_start_here.ipynb")
    shorter = nbformat.from_dict({**notebook, "cells": [c for c in notebook.cells if "my_shard" not in c.source]})
    shorter.metadata = {}
    hand_in("eve/notebooks/00_start_here.ipynb", shorter)
    found, sentences = submissions(tmp_path, released)
    assert [each.learner for each in found] == ["ada", "eve"]
    assert f"{tmp_path}/bob has two submissions" in sentences[0]
    assert f"{tmp_path}/cleo/00_start_here.ipynb cannot be read as a notebook" in sentences[1]
    assert f"{tmp_path}/dan has none of the notebooks that were handed out" in sentences[2]
    assert [each["name"] for each in found[1].requests()] == ["mean_on_rank_0"]
    assert [sentence.partition(".ipynb ")[2] for sentence in found[1].remarks] == [
        "is of another version of the notebook: it is marked as this version's",
        "has no cell that calls check.my_shard, which has 0 points",
    ]
    points = found[1].with_points({"mean_on_rank_0": {"ok": True, "lines": ["✓"], "measured": False}})
    assert points["mean_on_rank_0"]["points"] == 10 and points["my_shard"]["points"] == 0


def test_nothing_of_a_submission_but_its_answers_reaches_the_gradebook(released):
    notebook = nbformat.from_dict(released["00_start_here"])
    theirs = nbformat.from_dict(json.loads(nbformat.writes(notebook)))
    for cell in theirs.cells:
        cell.source = f"print('mine')\n{cell.source}"
        cell.metadata = {"nbgrader": {"points": 1000}}
    merged = Submission("eve", Path("eve.ipynb"), theirs, notebook).merged()
    changed = [new.source for new, old in zip(merged.cells, notebook.cells, strict=True) if new != old]
    assert len(changed) == 2 and all("check." in source and source.startswith("print") for source in changed)


# ---- the judge -------------------------------------------------------------------------------------------


def test_points_follow_the_judge():
    """Check a right answer, right numbers with too many messages, no Python, and a right answer after that."""
    asked = [request("mean_on_rank_0", TWICE), request("broadcast", "def broadcast(:"), request("my_shard", SHARD)]
    found = sandbox.verdicts(asked, isolated=not sandbox.missing())
    assert {name: (verdict["ok"], verdict["measured"]) for name, verdict in found.items()} == {
        "mean_on_rank_0": (False, True),
        "broadcast": (False, False),
        "my_shard": (True, False),
    }
    assert found["mean_on_rank_0"]["lines"][0] == "✗ mean_on_rank_0: more messages than needed"
    assert "the cell is not valid Python" in found["broadcast"]["lines"][0]


def test_where_nothing_is_isolated_the_marker_says_so(tmp_path):
    command = [sys.executable, "-m", "tools.marking", "mark", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    for words in ("bwrap is not installed", "solutions/", "network", "UNSAFE=1"):
        assert words in done.stderr


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("hostile", SUBMISSIONS, ids=lambda each: each.does)
def test_a_hostile_submission_gets_its_points_and_others_keep_theirs(hostile, monkeypatch):
    if reason := sandbox.missing():
        pytest.skip(reason)
    monkeypatch.setattr(sandbox, "SECONDS", 30)
    monkeypatch.setattr(sandbox, "MEMORY", 3 * sandbox.GB)
    asked = [request("mean_on_rank_0", hostile.cell), request("my_shard", SHARD)]
    found = sandbox.verdicts(asked)
    assert bool(found["mean_on_rank_0"]["ok"]) == bool(hostile.points)
    assert hostile.words in "\n".join(found["mean_on_rank_0"]["lines"])
    assert found["my_shard"]["ok"], found["my_shard"]["lines"]


# ---- with nbgrader ---------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.alone
def test_a_round_trip_of_thirty_with_nbgrader(tmp_path, capsys):
    """Take a class from the release to the feedback: right answers, none, too many messages, and a broken file."""
    if not NBGRADER.exists():
        pytest.skip("nbgrader is not installed: `make soak` installs it")
    course, folder = tmp_path / "course", tmp_path / "submitted"
    path = release("00", course)
    answers = {cell.id: cell.source for cell in read(ROOT / "solutions/00_start_here.ipynb").cells}
    for number in range(30):
        notebook = read(path)
        for cell in notebook.cells:
            if number % 3:
                cell.source = answers.get(cell.id, cell.source)
            if number % 3 == 2 and "check.mean_on_rank_0(" in cell.source:
                cell.source = TWICE
        (folder / f"learner{number:02}").mkdir(parents=True)
        nbformat.write(notebook, folder / f"learner{number:02}" / path.name)
    (folder / "broken").mkdir()
    (folder / "broken" / path.name).write_text("{")
    mark(folder, course, isolated=not sandbox.missing())
    assert f"{folder}/broken/00_start_here.ipynb cannot be read" in capsys.readouterr().out
    with (course / "grades.csv").open() as file:
        scores = {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}
    assert scores == {f"learner{number:02}": ((0, 20, 15)[number % 3], 20) for number in range(30)}
    for number, words in enumerate(
        ("not yet: my_shard (the stub is", "✓ mean_on_rank_0: 3", "more messages than needed")
    ):
        assert words in (course / f"feedback/learner{number:02}/00_start_here/00_start_here.html").read_text()
        autograded = read(course / f"autograded/learner{number:02}/00_start_here/00_start_here.ipynb")
        assert not any("execution" in cell.metadata for cell in autograded.cells)  # nbgrader itself has run nothing
