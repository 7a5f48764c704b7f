"""Tests of the voice that docstrings have, as far as a program can hear it: how they begin.

ruff's D401 hears whether a function begins with a verb in the imperative.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HELD = (
    "bench",
    "tools",
    "tests",
    "labs/zero",
    "labs/fsdp",
    "labs/pp",
    "labs/tp",
    "labs/cp",
    "labs/plan",
    "labs/kit",
    "labs/exercises",
)
WORDS = """of by where what which who whom whose how its in on for with as so at to from that this these those it they
here none else under within beside besides after before until while when if"""
ELIDED = frozenset(WORDS.split())


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first paragraph of each docstring."""
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.split("\n\n")[0]


def is_elided(paragraph: str) -> bool:
    """Return whether a paragraph that is no question begins with a word that stands for its subject."""
    first = paragraph.split()[0].strip("\"'`.,:;()").lower()
    return first in ELIDED and "?" not in paragraph


@pytest.mark.parametrize("folder", HELD)
def test_no_docstring_begins_with_a_word_for_its_subject(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {paragraph}"
        for path in files(folder)
        for line, paragraph in docstrings(path.read_text(encoding="utf-8"))
        if is_elided(paragraph)
    ]
    assert found == []


@pytest.mark.parametrize("folder", HELD)
def test_a_functions_docstring_begins_with_a_verb(folder: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "D401", "--output-format", "concise"]
    done = subprocess.run([*command, *map(str, files(folder))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_heard() -> None:
    assert is_elided("Of time.") and is_elided("By member.") and is_elided("What is put for another rank travels")
    assert not is_elided("Return the time.") and not is_elided("What does a rank send?")
