"""Exercises are discovered: a folder per notebook, a file per exercise or challenge, its answers at the same place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from labs import exercises
from labs.exercises.engine.challenge import Challenge

ROOT = Path(__file__).resolve().parents[1]
CALLS = {"check": exercises.of_kind(), "beat": exercises.of_kind(Challenge)}


def test_each_folder_bears_the_name_of_a_notebook():
    notebooks = [path.stem.partition("_")[2] for path in sorted((ROOT / "solutions").glob("*.py"))]
    assert notebooks == exercises.CHAPTERS
    folders = {path.parent.name for path in (ROOT / "labs/exercises").glob("*/*.py")}
    assert folders == {*notebooks, "engine"}


def test_each_notebook_calls_what_its_folder_has():
    for source in sorted((ROOT / "solutions").glob("*.py")):
        text = source.read_text(encoding="utf-8")
        called = {name for face in CALLS for name in re.findall(rf"\b{face}\.(\w+)\(", text) if name in CALLS[face]}
        assert called == set(exercises.names(source.stem.partition("_")[2])), source.name


def test_each_exercise_has_answers_at_the_same_place():
    for chapter in exercises.CHAPTERS:
        answered = {path.stem for path in (ROOT / "tests/exercises" / chapter).glob("[a-z]*.py")}
        assert answered == set(exercises.names(chapter)) & CALLS["check"].keys(), chapter


def test_the_text_of_an_answer_stands_in_its_notebook_and_nowhere_else():
    """Compare functions without names and docstrings; answers of one or two lines may be the same by chance."""
    answers = {
        body: f"{path.stem}: {name}"
        for path in sorted((ROOT / "solutions").glob("*.py"))
        for name, body, text in functions(path)
        if "### BEGIN SOLUTION" in text and body.count("\n") >= 2
    }
    for folder in ("labs/exercises", "tests/exercises"):
        for path in (ROOT / folder).rglob("*.py"):
            again = [f"{name} is {answers[body]}" for name, body, _ in functions(path) if body in answers]
            assert not again, f"{path}: {again}; tests.answers.from_notebook reads it there"


def functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each function in a file, its body without a docstring, and its text."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield (
                node.name,
                "\n".join(map(ast.unparse, body)),
                "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]),
            )
