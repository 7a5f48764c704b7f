"""The course's modules in the fork server: imported once, and not in each rank of each job.

before the forks    files = import_course(COURSE) imports the course, and installs the tap on torch's collectives
                    (labs.kit.watch.c10d_tap).  These two take half of the time in which a rank starts: do them once.
before a job        The fork server asks edited(files) whether a file of the course has changed.
in a rank           If a file has changed, the rank calls forget() and imports the course again: each job sees every
                    edit.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

COURSE = [
    "labs.kit.ranks.worker",
    "labs.kit.check",
    "labs.kit.beat",
    "labs.kit.train",
]  # the modules that import all other modules of the course
TAP = "labs.kit.watch.c10d_tap"


def import_course(modules: Sequence[str]) -> dict[str, int | None]:
    """Import the modules; return {path: time of the last change in ns} of every imported file of the course."""
    with contextlib.suppress(Exception):  # the rank that imports a broken edit will report it
        for module in modules:
            importlib.import_module(module)
        sys.modules[TAP].install()
    return {path: written(path) for name in names() if (path := getattr(sys.modules[name], "__file__", None))}


def edited(files: Mapping[str, int | None]) -> bool:
    """Return whether a file of the course has changed since `import_course`; files: its result."""
    return any(written(path) != when for path, when in files.items())


def forget() -> None:
    """Remove every module of the course from sys.modules, edited or not, since each holds names of other modules."""
    if TAP in sys.modules:
        sys.modules[TAP].uninstall()
    for name in names():
        del sys.modules[name]


def names() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "labs"]


def written(path: str) -> int | None:
    """Return the time of the file's last change (ns), or None if the file is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return None
