"""Optimizer state on disk that no crash can damage; files that were damaged in another way are detected.

A file of optimizer state that has been committed is never overwritten.  Each commit makes a new generation of the
state, which has its own files:

    fetch     copy the parameter's file to one of the next generation, and map that into memory
    (update)  the caller changes the numbers in place, like those of any tensor
    store     take the file's checksum, and flush it
    commit    after all parameters are stored: write a record that names the valid files, flush and rename the record

    rank-0-of-2/  generation-11.json  parameter-0.11  parameter-1.11 ...      the commit before the last
                  generation-12.json  parameter-0.12  parameter-1.12 ...      the last commit

A rename is atomic: after a crash it has either happened, or not.  So a process that is killed at any moment leaves one
complete generation, and perhaps some files of the next generation, which are removed when the folder is opened again.

Each rank commits for itself, so a rank may have committed a step while another was killed before its commit.  When
ranks open the folder again, they take the last generation that all of them have.  Since no rank can finish a step
without the others, ranks are one commit apart at most, and the generation before the last is still there.

Disks fail, and people copy files.  So the record of a generation has the rank, the step, and the checksums of each file
and of the record itself.  Ranks that open a folder together also agree on a random word, which all their later records
contain.  Opening a folder checks all its records and files before any file is removed.

`labs.memory.mapped_files` explains the format of a file.
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

OURS = re.compile(r"parameter-\d+\.\d+|generation-\d+\.(json|draft)")  # all other files in the folder are not ours
Entry = tuple[str, Layout, int]  # an entry of a record: a parameter's file, its layout, and its checksum
Record = dict[str, Any]
Origin = tuple[int, str]  # the origin of a record: the number of its step, and the random word


class Disk:
    """A tier on disk: a folder for each rank, whose newest record names the file and the layout of each parameter.

    where: the folder in which each rank's folder lies

    Raises ValueError, on all ranks, for a file that is missing, damaged or of another rank; for files without a record;
    for a file in place of a folder; and if the ranks' last commits are more than one step apart, or of different
    trainings.  No file is removed if an error is raised.
    """

    def __init__(self, where: Path) -> None:
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.folder = where / f"rank-{self.rank}-of-{self.ranks}"
        self.steps, self.entries, self.fetched = 0, {}, {}
        records: dict[int, Record] = {}  # {generation: record}

        def look() -> tuple[str, dict[int, Origin]]:
            records.update(self.records(where))
            return secrets.token_hex(4), {each: (it["steps"], it["opening"]) for each, it in records.items()}

        words, found = zip(*on_all_ranks(look), strict=True)
        self.opening, self.generation = words[0], agreed(found, where)
        if self.generation >= 0:
            self.steps = records[self.generation]["steps"]
            self.entries = dict(enumerate(records[self.generation]["parameters"]))
        on_all_ranks(self.require_files)
        on_all_ranks(self.keep)  # all ranks have cleaned up before any rank begins to write

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, i: int) -> Values:
        """Return parameter i's tensors as they were committed.  Writing to these tensors changes no file."""
        name, layout, _ = self.entries[i]
        return mapped(self.folder / name, layout, shared=False)

    def fetch(self, i: int) -> Values:
        """Return a copy of parameter i's tensors, in the file that the next commit will name."""
        name, layout, _ = self.entries[i]
        shutil.copyfile(self.folder / name, self.next(i))
        self.fetched[i] = mapped(self.next(i), layout, shared=True)
        return self.fetched[i]

    def store(self, i: int, values: Values) -> Entry:
        """Flush the file of parameter i, and return the file's entry for the record.

        Tensors that the optimizer made anew, in its first step or in every step, are written to the file first.
        """
        file, layout = self.fetched.pop(i, {}), describe(values)
        if describe(file) != layout:
            file = mapped(allocated(self.next(i), layout), layout, shared=True)
        for name, value in values.items():
            if file[name].data_ptr() != value.data_ptr():
                file[name].copy_(value)
        flush(self.next(i))
        return self.next(i).name, layout, checksum(self.next(i))

    def commit(self, steps: int, stored: dict[int, Entry]) -> None:
        """Make the stored files valid: up to the rename an opening finds the old files, and after it the new ones."""
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
        """Remove our files that the current record does not name, except those in `before`; other files stay."""
        valid = self.files().union(before)
        for path in self.ours():
            if path.name not in valid and path.is_file():
                path.unlink()

    def ours(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if OURS.fullmatch(path.name)]

    def files(self) -> set[str]:
        return {f"generation-{self.generation}.json", *(name for name, *_ in self.entries.values())}

    def next(self, i: int) -> Path:
        return self.folder / f"parameter-{i}.{self.generation + 1}"

    # ---- records and files on the disk ---------------------------------------------------------------------------

    def whose(self, generation: int) -> Record:
        return {"rank": self.rank, "ranks": self.ranks, "generation": generation}

    def records(self, where: Path) -> dict[int, Record]:
        """Read this rank's records, and return `{generation: record}`."""
        for path in (where, self.folder):
            if path.exists() and not path.is_dir():
                raise ValueError(f"{path} is a file, where the state's folder should be: give another name")
        if others := [other for other in where.glob("rank-*-of-*") if not other.name.endswith(f"-of-{self.ranks}")]:
            raise ValueError(
                f"{others[0]} was not left by {self.ranks} ranks: give another folder, or start as many ranks"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        records, files = {}, [path for path in self.ours() if path.suffix != ".draft"]
        for path in [path for path in files if path.suffix == ".json"]:
            number = int(path.stem.removeprefix("generation-"))
            records[number] = record = unsealed(path)
            if record != record | self.whose(number):
                whose = "generation {generation} of rank {rank} of {ranks}".format_map(record)
                raise not_as_written(path, f"is the record of {whose}")
        if not records and any(path.suffix != ".0" for path in files):  # a crash in the first commit leaves such files
            raise not_as_written(self.folder, "has files of a training, and no record of them")
        return records

    def require_files(self) -> None:
        for name, _, written in self.entries.values():
            if not (path := self.folder / name).is_file():
                raise not_as_written(path, "is missing")
            if checksum(path) != written:
                raise not_as_written(path, "does not hold what was written there")


def sealed(record: Record) -> Record:
    """Return a record together with its checksum, in the form in which both are written."""
    return {"checksum": zlib.crc32(json.dumps(record).encode()), "record": record}


def unsealed(path: Path) -> Record:
    try:
        found = json.loads(path.read_bytes())
        if found != sealed(found["record"]):
            raise ValueError("its checksum does not match")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise not_as_written(path, "is no record that was written there") from error
    return found["record"]


def agreed(found: Sequence[dict[int, Origin]], where: Path) -> int:
    """Return the last generation that all ranks have committed, or -1.

    found: for each rank, the origin of each of its generations

    The ranks' last generations may differ by one, since a crash may come between two ranks' commits.  Raises ValueError
    for ranks that are more than one commit apart.
    """
    generation = max(set.intersection(*map(set, found)), default=-1)
    newest = [max(each, default=-1) for each in found]
    if max(newest) - generation > 1:
        raise not_as_written(where, f"is not of one training (by rank, the last commits there are {newest})")
    origins = [each.get(generation) for each in found]
    if any(origin != origins[0] for origin in origins):
        listed = ", ".join(f"step {steps} of {opening}" for steps, opening in origins)
        raise not_as_written(where, f"is not of one training (by rank, generation {generation} is {listed})")
    return generation


def not_as_written(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} {what}: put back what was there, or give another folder")
