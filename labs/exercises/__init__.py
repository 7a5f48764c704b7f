"""The exercises and challenges of the notebooks: one file each, in a folder per notebook, beside their engine.

Each folder bears the name of its notebook, in the course's order:

    start_here  one_device  collectives  ddp  zero  mesh_and_dtensor  fsdp  memory  offload  checkpoint  resume
    tensor_parallel  plan_and_wire  pipeline  three_dimensions  clusters  long_context  experts  gspmd  deepspeed
    plan_a_run  bug_clinic

A file `<chapter>/<name>.py` defines `<name>`: the check of an exercise, a function, which `labs.kit.check` offers as
`check.<name>`; or a `Challenge`, which `labs.kit.beat` offers as `beat.<name>`.  The exercises of a folder share the
files whose names begin with `_`.  What else a notebook uses of an exercise is an attribute of its check: the function
that computes the expected answers is `check.<name>.expected`, and stands in for a learner's that is not right yet.  The
engine that runs all of them is in `engine/`.
"""

import re
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

HERE = Path(__file__).parent
CHAPTERS = re.findall(r"\w+", re.search(r"order:\n\n(.*?)\n\n", __doc__, re.DOTALL)[1])


def names(chapter: str) -> list[str]:
    """Return the names of a chapter's exercises and challenges, in alphabetical order."""
    return sorted(path.stem for path in (HERE / chapter).glob("[a-z]*.py"))


@cache
def found() -> dict[str, Any]:
    """Import all files; return `{name: what the file defines by its own name}` in the order of the course."""
    return {
        name: getattr(import_module(f"{__name__}.{chapter}.{name}"), name)
        for chapter in CHAPTERS
        for name in names(chapter)
    }


def of_kind(kind: type = FunctionType) -> dict[str, Any]:
    """Return `{name: value}` for the values of one kind: checks, which are functions, or `Challenge`s."""
    return {name: value for name, value in found().items() if isinstance(value, kind)}


def listed(chosen: Collection[str]) -> str:
    """Return a line for each chapter that has some of these names, for the docstring of a face."""
    rows = [(chapter, [name for name in names(chapter) if name in chosen]) for chapter in CHAPTERS]
    return "".join(f"    {chapter:<20}{', '.join(own)}\n" for chapter, own in rows if own)
