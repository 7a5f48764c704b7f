"""Numbers on disk that no crash can spoil, and that are told when they are no longer what was written.

What is stored never lands on what is committed.  Each round of changes, a generation, has its own files:

    fetch     copy the parameter's file to one of the next generation, and map that into memory
    (update)  whoever fetched it changes the numbers in place, as they would any tensor
    store     take the file's checksum, and flush it
    commit    when all are stored: write down which files count, flush that, and rename it to a name that counts

    rank-0-of-2/  generation-11.json  parameter-0.11  parameter-1.11 ...      the commit before
                  generation-12.json  parameter-0.12  parameter-1.12 ...      the last one

To whoever looks, a rename has either happened or not.  So a process killed at any moment leaves one generation that
is whole, and perhaps some files of the next, which the next opening removes.

Each rank commits for itself, and one may have done so when another was killed.  The next opening takes the last
generation that all have: since no rank can finish a step without the others, they are one commit apart at most, and
the one before the last is still there.

Disks decay, and people copy files.  So a record says whose it is, of which step, and what the checksum of each file
is, its own included; and ranks that open a folder together agree on a random word, which their records have in common
from then on.  The next opening reads all of it before it removes anything.

`labs.memory.mapped_files` says how tensors lie in a file.
"""

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labs.agree import on_all_ranks
from labs.memory.mapped_files import Layout, Values, allocated, checksum, describe, flush, mapped

OURS = re.compile(r"parameter-\d+\.\d+|generation-\d+\.(json|draft)")  # all other files are somebody else's
Entry = tuple[str, Layout, int]  # of a record: a parameter's file, and its checksum
Record = dict[str, Any]
Origin = tuple[int, str]  # of a record: the number of its step, and the random word


class Disk:
    """A folder for each rank.  A record says which file a parameter is in, and how; the newest record counts.

    Raises ValueError, on all ranks, for a file that is missing, damaged or another one's; for files without a record;
    for a file where a folder should be; and if the ranks' last steps are further apart than the one step of a crash,
    or not of one training.  Nothing is removed then.
    """

    def __init__(self, where: Path) -> None:
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.folder = where / f"rank-{self.rank}-of-{self.ranks}"
        self.steps, self.entries, self.fetched = 0, {}, {}
        records: dict[int, Record] = {}  # by generation

        def look() -> tuple[str, dict[int, Origin]]:
            records.update(self.records(where))
            return secrets.token_hex(4), {each: (it["steps"], it["opening"]) for each, it in records.items()}

        words, found = zip(*on_all_ranks(look), strict=True)
        self.opening, self.generation = words[0], agreed(found, where)
        if self.generation >= 0:
            self.steps = records[self.generation]["steps"]
            self.entries = dict(enumerate(records[self.generation]["parameters"]))
        on_all_ranks(self.require_files)
        on_all_ranks(self.keep)  # before any of them begins to write

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, i: int) -> Values:
        """As it was committed.  Writing to these tensors changes no file."""
        name, layout, _ = self.entries[i]
        return mapped(self.folder / name, layout, shared=False)

    def fetch(self, i: int) -> Values:
        """A copy, in the file that the next commit is to name."""
        name, layout, _ = self.entries[i]
        shutil.copyfile(self.folder / name, self.next(i))
        self.fetched[i] = mapped(self.next(i), layout, shared=True)
        return self.fetched[i]

    def store(self, i: int, values: Values) -> Entry:
        """Flush the file; what an optimizer made anew, in its first step or in each, is written first."""
        file, layout = self.fetched.pop(i, {}), describe(values)
        if describe(file) != layout:
            file = mapped(allocated(self.next(i), layout), layout, shared=True)
        for name, value in values.items():
            if file[name].data_ptr() != value.data_ptr():
                file[name].copy_(value)
        flush(self.next(i))
        return self.next(i).name, layout, checksum(self.next(i))

    def commit(self, steps: int, stored: dict[int, Entry]) -> None:
        """From the rename on, and not before, what was stored is what will be found."""
        before = self.files()
        self.generation += 1
        self.steps, self.entries = steps, self.entries | stored
        flush(self.folder)
        place = self.folder / f"generation-{self.generation}.json"
        draft = place.with_suffix(".draft")
        record = {"steps": steps, "opening": self.opening, "parameters": [self.entries[i] for i in range(len(self))]}
        draft.write_text(json.dumps(sealed(record | self.whose(self.generation))))
        flush(draft)
        os.replace(draft, place)
        flush(self.folder)
        self.keep(before)

    def keep(self, before: Collection[str] = ()) -> None:
        """Remove what no longer counts, but for these files; what others have put there stays."""
        kept = self.files().union(before)
        for path in self.ours():
            if path.name not in kept and path.is_file():
                path.unlink()

    def ours(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if OURS.fullmatch(path.name)]

    def files(self) -> set[str]:
        return {f"generation-{self.generation}.json", *(name for name, *_ in self.entries.values())}

    def next(self, i: int) -> Path:
        return self.folder / f"parameter-{i}.{self.generation + 1}"

    # ---- what lies there -----------------------------------------------------------------------------------------

    def whose(self, generation: int) -> Record:
        return {"rank": self.rank, "ranks": self.ranks, "generation": generation}

    def records(self, where: Path) -> dict[int, Record]:
        """Those of this rank, by generation."""
        for path in (where, self.folder):
            if path.exists() and not path.is_dir():
                raise ValueError(f"{path} is a file, where the state's folder should be: give another name")
        if others := [other for other in where.glob("rank-*-of-*") if not other.name.endswith(f"-of-{self.ranks}")]:
            raise ValueError(f"{others[0]} was not left by {self.ranks} ranks: give another folder, or start as many")
        self.folder.mkdir(parents=True, exist_ok=True)
        records, files = {}, [path for path in self.ours() if path.suffix != ".draft"]
        for path in [path for path in files if path.suffix == ".json"]:
            number = int(path.stem.removeprefix("generation-"))
            records[number] = record = unsealed(path)
            if record != record | self.whose(number):
                whose = "generation {generation} of rank {rank} of {ranks}".format_map(record)
                raise not_as_written(path, f"is the record of {whose}")
        if not records and any(path.suffix != ".0" for path in files):  # those a crash in the first commit may leave
            raise not_as_written(self.folder, "has files of a training, and no record of them")
        return records

    def require_files(self) -> None:
        for name, _, written in self.entries.values():
            if not (path := self.folder / name).is_file():
                raise not_as_written(path, "is missing")
            if checksum(path) != written:
                raise not_as_written(path, "does not hold what was written there")


def sealed(record: Record) -> Record:
    """With its checksum, as it is written down."""
    return {"checksum": zlib.crc32(json.dumps(record).encode()), "record": record}


def unsealed(path: Path) -> Record:
    try:
        found = json.loads(path.read_bytes())
        if found != sealed(found["record"]):
            raise ValueError("its checksum is another")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise not_as_written(path, "is no record that was written there") from error
    return found["record"]


def agreed(found: Sequence[dict[int, Origin]], where: Path) -> int:
    """The last generation that all ranks have committed: a crash may come between one rank's commit and another's."""
    generation = max(set.intersection(*map(set, found)), default=-1)
    newest = [max(each, default=-1) for each in found]
    if max(newest) - generation > 1:
        raise not_as_written(where, f"is not of one training (by rank, the last commits there are {newest})")
    origins = [each.get(generation) for each in found]
    if any(origin != origins[0] for origin in origins):
        said = ", ".join(f"step {steps} of {opening}" for steps, opening in origins)
        raise not_as_written(where, f"is not of one training (by rank, generation {generation} is {said})")
    return generation


def not_as_written(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}: put back what was there, or give another folder")
