"""TEACHING.md's table of frequent mistakes, printed from the rows by which the checks know them.

    python -m tools.teaching

A row is printed if it says what a teacher sees.  The table stands between two marks; mistakes of exercises whose checks
have no table yet, and those that no check can see, stand below it.
"""

from pathlib import Path

from labs.kit.checks import job, left, messages, mixed, offloading, stage3
from labs.kit.checks.answer import Mistake
from labs.kit.checks.collectives import mistakes as collectives
from labs.kit.checks.fsdp import mistakes as fsdp
from labs.kit.checks.gradients import mistakes as gradients
from labs.kit.checks.gradients import overlap
from labs.kit.checks.meshes import neighbours, order, scatter
from labs.kit.checks.meshes import table as placements
from labs.kit.checks.pencil import layer_bytes, step_seconds
from labs.kit.checks.pipeline import mistakes as pipeline
from labs.kit.checks.tensor import mistakes as tensor

MODULES = (messages, mixed, gradients, overlap, collectives, stage3, fsdp, neighbours, scatter, order, placements)
MODULES += (layer_bytes, offloading, step_seconds, tensor, pipeline, left, job)
TEACHING = Path(__file__).resolve().parent.parent / "TEACHING.md"
BEGIN, END = "<!-- printed by `python -m tools.teaching`: from here -->", "<!-- to here -->"


def rows() -> list[Mistake]:
    """Those of all tables, each once, in the order in which they are tried."""
    tables = [value for module in MODULES for value in vars(module).values()]
    found = [row for table in tables if isinstance(table, tuple) for row in table if isinstance(row, Mistake)]
    return list({row.name: row for row in found if row.shows}.values())


def table() -> str:
    lines = ["| what you see | what the check calls it | a question that leads on |", "|---|---|---|"]
    lines += [f"| {row.shows} | {row.name} | {row.question} |" for row in rows()]
    return "\n".join(lines)


def printed(text: str) -> str:
    """`text` with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    TEACHING.write_text(printed(TEACHING.read_text(encoding="utf-8")), encoding="utf-8")
