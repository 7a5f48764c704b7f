"""The tables in teaching/: the mistakes that checks recognise, and each track's plan, with where its classes get lost.

    python -m tools.teaching

A mistake is printed if its row says what a teacher sees.  The rows follow the order of the course; those that hold
everywhere come last.  A page's tables stand between two marks; mistakes that no check can recognise stand below.  The
minutes that a teacher has noted in a plan stay.
"""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_notebook

from labs import exercises
from labs.exercises.engine.answer import Mistake
from labs.kit.learners.progress import CHECK, notebook
from tools import tracks
from tools.minutes import minutes, near

FOLDER = tracks.ROOT / "teaching"
BEGIN, END = "<!-- printed by `python -m tools.teaching`: from here -->", "<!-- to here -->"
NOTED = re.compile(r"^(\| \[.*?\) \|) \d+ \|([^|]*)\|", re.MULTILINE)  # a notebook of a plan, and a class' own minutes


# ---- mistakes --------------------------------------------------------------------------------------------


def modules() -> Iterator[str]:
    """Yield the modules that have rows: each exercise's own and what its chapter shares; then the engine's."""
    for chapter in exercises.CHAPTERS:
        package = f"{exercises.__name__}.{chapter}"
        yield from (f"{package}.{each.name}" for each in iter_modules(exercises_in(chapter)))
    yield from (f"{exercises.__name__}.engine.{each.name}" for each in iter_modules(exercises_in("engine")))


def exercises_in(folder: str) -> list[str]:
    return [str(exercises.HERE / folder)]


def rows_in(value: Any) -> Iterator[Mistake]:
    """Yield the rows in a value: a row, a tuple of such values, or an exercise, whose fields are searched."""
    if isinstance(value, Mistake):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from rows_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from rows_in(getattr(value, each.name))


def rows(names: Iterator[str] | None = None) -> list[Mistake]:
    """Return the rows of these modules, of all by default, each once, in the order in which they are tried."""
    values = (value for name in dict.fromkeys(names or modules()) for value in vars(import_module(name)).values())
    return list({row.name: row for value in values for row in rows_in(value) if row.symptom}.values())


def mistakes() -> str:
    lines = ["| what you see | what the check calls it | a question that leads on |", "|---|---|---|"]
    lines += [f"| {row.symptom} | {row.name} | {row.question} |" for row in rows()]
    return "\n".join(lines)


# ---- tracks ----------------------------------------------------------------------------------------------


def plan(track: str) -> str:
    """Return a track's tables: its notebooks, session by session, and the mistakes that its exercises' checks name."""
    folded = {name: kept(each) for name, each in tracks.folded(track).items()}
    board, lost = tracks.BOARD, []
    lines = ["## The plan", "", "| | minutes, estimated | minutes that your class needed | on the board | left out |"]
    lines += ["|---|---|---|---|---|"]
    for session, names in tracks.sessions(track).items():
        lines.append(f"| **{session}** | {near(sum(length(folded[name]) for name in names))} | | | |")
        for name in names:
            own = [heading for heading in names[name] if heading not in tracks.TRACKS[track]["always"]]
            left_out = "; ".join(f"“{heading}”" for heading in own)
            lines.append(f"| {link(name)} | {near(length(folded[name]))} | | {board[name]} | {left_out} |")
            lost += [f"| {link(name)} | `{check}` | {named} |" for check, named in by_check(name, folded[name])]
    always = ", ".join(f"“{heading}”" for heading in tracks.TRACKS[track]["always"])
    lines += ["", f"In all notebooks, what begins with {always} is left out, too.", "", "## Where classes get lost", ""]
    lines += ["The checks name these mistakes. [Frequent mistakes](mistakes.md) has a question for each."]
    return "\n".join([*lines, "", "| notebook | exercise | mistakes |", "|---|---|---|", *lost])


def kept(notebook: NotebookNode) -> NotebookNode:
    return new_notebook(cells=[cell for cell in notebook.cells if not tracks.is_left_out(cell)])


def length(notebook: NotebookNode) -> float:
    """Return the minutes of all that is left of a notebook."""
    return sum(vars(minutes(notebook)).values())


def link(name: str) -> str:
    path = tracks.ROOT / f"notebooks/{name}.ipynb"
    return f"[{notebook(path).title}](../notebooks/{path.name})"


def by_check(name: str, kept: NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield the checks of a notebook that name mistakes, each with these names."""
    chapter = name.partition("_")[2]
    for check in dict.fromkeys(CHECK.findall("\n".join(cell.source for cell in kept.cells if "outputs" in cell))):
        if named := rows(iter([f"{exercises.__name__}.{chapter}.{check}"])):
            yield check, "; ".join(row.name for row in named)


# ---- pages -----------------------------------------------------------------------------------------------


def printed(text: str, tables: str) -> str:
    """Return a page's text with the current tables, in which a class' own minutes stay."""
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    noted = dict(NOTED.findall(old))
    tables = NOTED.sub(lambda row: row[0].removesuffix(f"{row[2]}|") + noted.get(row[1], row[2]) + "|", tables)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the text of each page, with its current tables."""
    tables = {"mistakes": mistakes()} | {track: plan(track) for track in tracks.TRACKS}
    paths = {FOLDER / f"{name}.md": each for name, each in tables.items()}
    return {path: printed(path.read_text(encoding="utf-8"), each) for path, each in paths.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
