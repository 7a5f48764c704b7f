"""A store of jobs: a job that one notebook of a suite has run is not run again by another, which takes its values.

Each notebook runs solved and as shipped, and most of its time goes into jobs that are the same in both.  Two jobs are
the same if these are equal: the function with everything that it uses and is given, byte by byte; the other arguments
of `run`; and how many such jobs their notebook ran before, so a job that runs twice still does.  A job that printed,
warned or failed is run again.  So that bytes are equal, a class of a cell is sent under its name, not under a random
one.
"""

import hashlib
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import ipykernel.compiler
from cloudpickle import cloudpickle as cloudpickle_parts

from labs.kit.ranks import run
from labs.kit.ranks.output import FIRST
from labs.kit.ranks.team import Team

classes: Counter[str] = Counter()  # how many classes of each name cells have sent


class Once(Team):
    """A Team for `run` in a kernel of the suite, which takes the values of a job that ran before."""

    place: ClassVar[Path]
    asked: ClassVar[Counter[str]] = Counter()

    def __enter__(self) -> Team:
        settings = repr((self.devices, self.ranks, self.record, self.link, self.restarted)).encode()
        key = hashlib.sha256(settings + self.payload).hexdigest()
        self.asked[key] += 1
        self.file = self.place / f"{key}-{self.asked[key]}"
        self.known = self.file.exists()
        return self if self.known else super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        if not self.known:
            super().__exit__(*failure)

    def finish(self) -> list[Any]:
        if self.known:
            return cloudpickle.loads(self.file.read_bytes())
        values = super().finish()
        if not self.warnings and self.lines.room == [FIRST] * self.ranks:
            half = self.place / f"{os.getpid()}"
            half.write_bytes(cloudpickle.dumps(values))
            half.rename(self.file)
        return values


def name_class(cls: Any) -> str:
    """Return the name under which cloudpickle sends a class of a cell, which would otherwise be drawn at random."""
    known = cloudpickle_parts._DYNAMIC_CLASS_TRACKER_BY_CLASS
    if cls not in known:
        classes[cls.__name__] += 1
        known[cls] = f"{cls.__name__} {classes[cls.__name__]}"
        cloudpickle_parts._DYNAMIC_CLASS_TRACKER_BY_ID[known[cls]] = cls
    return known[cls]


def in_this_kernel(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    Once.place, run.Team = folder, Once
    cloudpickle_parts._get_or_create_tracker_id = name_class
    # Set the folder that the functions in cells seem to come from; its name usually contains the process's number.
    ipykernel.compiler.get_tmp_directory = lambda: f"{tempfile.gettempdir()}/ipykernel_0"
