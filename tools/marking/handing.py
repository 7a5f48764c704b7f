"""Handing out and in: the notebooks that learners get, and the part of a submission that is marked.

handed_out(notebook)            the learner's notebook, with a marked cell after each exercise
submissions(folder, released)   the notebooks in a folder with one folder a learner, and a sentence for each that
                                cannot be marked
Submission.merged(released)     what is handed out, with the learner's answers: nothing else of a submission is kept
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tools.answers import digest
from tools.marking.slices import Exercise, exercises

POINTS, MEASURED = 10, 5  # for an answer that is right, and for one whose numbers are right and whose bytes are not
MOST = 50 << 20  # bytes of a submitted notebook


class NotMarked(Exception):
    """The reason why something is not marked: one sentence that names the file."""


def read(path: Path) -> NotebookNode:
    """Return a notebook.  Raises NotMarked for a file that is none."""
    try:
        if path.stat().st_size > MOST:
            raise NotMarked(f"{path} has more than {MOST >> 20} MB: clear its outputs")
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        return notebook
    except (
        OSError,
        RecursionError,
        ValueError,
        nbformat.ValidationError,
        AttributeError,
        KeyError,
        TypeError,
    ) as error:
        text = str(error).partition("\n")[0]
        raise NotMarked(f"{path} cannot be read as a notebook ({type(error).__name__}: {text:.80})") from None


def marked_cell(exercise: Exercise) -> NotebookNode:
    points = 0 if exercise.optional else POINTS
    text = f"# check.{exercise.name} marks the exercise above, once you have handed it in: {points} points"
    grade = {"grade": True, "grade_id": exercise.name, "locked": True, "points": points, "solution": False}
    metadata = {"nbgrader": grade | {"schema_version": 3, "task": False, "cell_type": "code"}}
    return new_code_cell(text + ", optional" * exercise.optional, id=f"mark-{exercise.name}"[:64], metadata=metadata)


def handed_out(path: Path) -> NotebookNode:
    """Return the learner's notebook at `path`, with a marked cell after each exercise.

    Raises NotMarked if the notebook was edited, or has no exercises.
    """
    notebook = read(path)
    if notebook.metadata.get("labs", {}).get("made_as") != digest(notebook.cells):
        raise NotMarked(f"{path} was edited: `git restore {path.parent.name}/{path.name}` brings a clean copy back")
    found = exercises(notebook.cells)
    if not found:
        raise NotMarked(f"{path} has no exercises")
    for exercise in reversed(found):
        notebook.cells.insert(exercise.cell + 1, marked_cell(exercise))
    return notebook


@dataclass
class Submission:
    """A learner's notebook, for one of those that were handed out."""

    learner: str
    path: Path
    notebook: NotebookNode
    released: NotebookNode
    remarks: list[str] = field(default_factory=list)  # sentences for the teacher

    def __post_init__(self) -> None:
        if self.notebook.metadata.get("labs") != self.released.metadata.get("labs"):
            self.remarks.append(f"{self.path} is of another version of the notebook: it is marked as this version's")

    def cell_of(self, exercise: Exercise) -> int | None:
        """Return the number of the learner's cell for an exercise: by its id, or by the check that it calls."""
        known, call = self.released.cells[exercise.cell].id, f"check.{exercise.name}("
        code = [(at, cell) for at, cell in enumerate(self.notebook.cells) if cell.cell_type == "code"]
        by_id = [at for at, cell in code if cell.get("id") == known]
        return next(iter(by_id or [at for at, cell in reversed(code) if call in cell.source]), None)

    def requests(self) -> list[dict[str, Any]]:
        """Return what the judge is given; add a remark for each exercise whose cell is missing."""
        found = []
        for exercise in exercises(self.released.cells):
            if (at := self.cell_of(exercise)) is None:
                self.remarks.append(f"{self.path} has no cell that calls check.{exercise.name}, which has 0 points")
                continue
            cells = [cell.source for cell in self.notebook.cells[: at + 1] if cell.cell_type == "code"]
            found.append({"name": exercise.name, "functions": exercise.functions, "cells": cells})
        return found

    def merged(self) -> NotebookNode:
        """Return the notebook as it was handed out, with the learner's answers in the exercises' cells."""
        notebook = copy.deepcopy(self.released)
        for exercise in exercises(self.released.cells):
            if (at := self.cell_of(exercise)) is not None:
                notebook.cells[exercise.cell].source = self.notebook.cells[at].source
        return notebook

    def with_points(self, verdicts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return {name: {"points", "lines"}} of all exercises, by the judge's verdicts."""
        missing = {"ok": None, "lines": ["this submission has no cell for this exercise"], "measured": False}
        found = {}
        for exercise in exercises(self.released.cells):
            verdict = verdicts.get(exercise.name, missing)
            points = POINTS if verdict["ok"] else MEASURED if verdict["measured"] else 0
            found[exercise.name] = {"points": 0 if exercise.optional else points, "lines": verdict["lines"]}
        return found


def submissions(folder: Path, released: Mapping[str, NotebookNode]) -> tuple[list[Submission], list[str]]:
    """Return the submissions in `folder`, and a sentence for each file or folder that is not marked.

    released: the notebooks that were handed out, by their names.
    Raises NotMarked if `folder` has no folder of a learner.
    """
    learners = sorted(each for each in folder.glob("*") if each.is_dir() and not each.name.startswith("."))
    if not learners:
        raise NotMarked(f"{folder} has no folders: it needs one for each learner, with the learner's notebooks")
    found: list[Submission] = []
    sentences = []
    for learner in learners:
        paths = [path for path in sorted(learner.rglob("*.ipynb")) if path.is_file() and not path.is_symlink()]
        paths = [path for path in paths if path.stem in released and ".ipynb_checkpoints" not in path.parts]
        if not paths:
            sentences.append(
                f"{learner} has none of the notebooks that were handed out ({', '.join(sorted(released))})"
            )
        for name in sorted({path.stem for path in paths}):
            same = [path for path in paths if path.stem == name]
            try:
                if len(same) > 1:
                    raise NotMarked(f"{learner} has two submissions, {same[0]} and {same[1]}: leave one of them")
                found.append(Submission(learner.name, same[0], read(same[0]), released[name]))
            except NotMarked as sentence:
                sentences.append(str(sentence))
    return found, sentences
