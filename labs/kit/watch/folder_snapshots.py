"""Snapshots of a checkpoint folder's files, before each call of this process that changes the folder.

    with watch_folder(folder, newest) as moments: save(folder, …)

A snapshot is also taken before each flush: safetensors writes a file without Python, so that the file first shows when
it is flushed.  An audit hook (sys.addaudithook) cannot be removed from a process, so use `watched` in a rank, which
ends with its job.
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
RANDOM = re.compile(r"\.\w+\.draft")  # the random part in the name of a file that is not complete yet


@dataclass(frozen=True)
class FolderSnapshot:
    """A snapshot of a checkpoint folder before a call that changes the folder.

    next: the call that follows, in words.
    files: the files in the folder.
    newest: the checkpoint that would be loaded if the process died at this moment; "" for none.
    """

    next: str
    files: tuple[str, ...]
    newest: str


@contextmanager
def watch_folder(folder: Path, newest: Callable[[Path], Path | None]) -> Iterator[list[FolderSnapshot]]:
    moments, watching, flush = [], [True], os.fsync

    def note(what: str) -> None:
        found = tuple(plain(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
        last = newest(folder)
        moments.append(FolderSnapshot(what, found, last.name if last else ""))

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
