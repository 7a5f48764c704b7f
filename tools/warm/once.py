"""A job that one notebook of a suite has run is not run again by another, which takes the values of the first.

Each notebook runs solved and as shipped, and most of its time goes into jobs that are the same in both.  The same: the
function with all that it uses and is given, byte by byte; what else `run` was told; and the how manieth of these in its
notebook it is, so that what runs twice does.  What has printed, warned or failed is run again.
"""

import hashlib
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import ipykernel.compiler

from labs.kit import launch
from labs.kit.ranks.output import FIRST
from labs.kit.ranks.team import Team


class Once(Team):
    """What `run` takes for a Team in a kernel of the suite."""

    place: ClassVar[Path]
    asked: ClassVar[Counter[str]] = Counter()

    def __enter__(self) -> Team:
        told = repr((self.devices, self.ranks, self.record, self.link, self.restarted)).encode()
        key = hashlib.sha256(told + self.payload).hexdigest()
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


def in_this_kernel(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    Once.place, launch.Team = folder, Once
    # The files that cells' functions are said to be from; usually with the number of the process.
    ipykernel.compiler.get_tmp_directory = lambda: f"{tempfile.gettempdir()}/ipykernel_0"
