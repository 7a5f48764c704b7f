"""The course's modules in the fork server: imported once, and not in each rank of each job.

before the forks    files = import_course(COURSE)        and torch's operators show each collective from here on: to
                    set that up takes half of the time in which a rank starts
before a job        edited(files)?
in a rank           if so, forget(), and from here on it imports anew: each job sees every edit
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
    "labs.kit.strategies",
]  # with what they import
TAP = "labs.kit.watch.tap"


def import_course(modules: Sequence[str]) -> dict[str, int | None]:
    """Import them; when each file of the course that is in use now was written."""
    with contextlib.suppress(Exception):  # an edit that does not run: the rank that imports it will say so
        for module in modules:
            importlib.import_module(module)
        sys.modules[TAP].install()
    return {path: written(path) for name in names() if (path := getattr(sys.modules[name], "__file__", None))}


def edited(files: Mapping[str, int | None]) -> bool:
    """Whether one of them was, since."""
    return any(written(path) != when for path, when in files.items())


def forget() -> None:
    """All of the course goes, since each module holds names of others."""
    if TAP in sys.modules:
        sys.modules[TAP].uninstall()
    for name in names():
        del sys.modules[name]


def names() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "labs"]


def written(path: str) -> int | None:
    """When (ns); None where the file is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return None
