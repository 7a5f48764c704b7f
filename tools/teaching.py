"""The table in teaching/mistakes.md, printed from the rows with which the checks recognise them.

    python -m tools.teaching

A row is printed if it says what a teacher sees.  The rows follow the order of the course; those that hold everywhere
come last.  The table stands between two marks; mistakes that no check can recognise stand below it.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from labs import exercises
from labs.exercises.engine.answer import Mistake

PAGE = Path(__file__).resolve().parent.parent / "teaching/mistakes.md"
BEGIN, END = "<!-- printed by `python -m tools.teaching`: from here -->", "<!-- to here -->"


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


def rows() -> list[Mistake]:
    """Return the rows of all tables, each once, in the order in which they are tried."""
    values = (value for name in dict.fromkeys(modules()) for value in vars(import_module(name)).values())
    return list({row.name: row for value in values for row in rows_in(value) if row.symptom}.values())


def table() -> str:
    lines = ["| what you see | what the check calls it | a question that leads on |", "|---|---|---|"]
    lines += [f"| {row.symptom} | {row.name} | {row.question} |" for row in rows()]
    return "\n".join(lines)


def printed(text: str) -> str:
    """Return `text` with the current table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
