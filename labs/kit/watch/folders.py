"""What is in a folder after each call of this process that changes it, or flushes something in it.

    with watched(folder, newest) as moments: save(folder, …)

A file that is written beyond Python (by safetensors) is seen when it is flushed.  A hook on what Python is about to do
(sys.addaudithook) stays until the process ends: so this is for a rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAMES = {"os.mkdir": "make", "os.rename": "rename", "os.rmdir": "remove", "os.remove": "remove"}
RANDOM = re.compile(r"\.\w+\.draft")  # the word in a draft's name


@dataclass(frozen=True)
class Moment:
    """What is about to be done; the files that are there; the checkpoint that would be loaded, if any."""

    next: str
    files: tuple[str, ...]
    newest: str


@contextmanager
def watched(folder: Path, newest: Callable[[Path], Path | None]) -> Iterator[list[Moment]]:
    moments, watching, flush = [], [True], os.fsync

    def note(what: str) -> None:
        found = tuple(plain(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
        last = newest(folder)
        moments.append(Moment(what, found, last.name if last else ""))

    def about_to(event: str, args: tuple) -> None:
        if watching and event in NAMES and folder in Path(str(args[0])).parents:
            note(f"{NAMES[event]} {plain(Path(args[0]).relative_to(folder))}")

    def flushing(file: int) -> None:
        note("flush")
        flush(file)

    sys.addaudithook(about_to)
    os.fsync = flushing
    try:
        yield moments
    finally:
        os.fsync = flush
        watching.clear()
        note("nothing more")


def plain(path: Path) -> str:
    return RANDOM.sub(".draft", str(path))
