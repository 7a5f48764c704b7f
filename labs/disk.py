"""Numbers on disk that no crash can spoil.

What is stored never lands on what is committed.  Each round of changes, a generation, has its own files:

    fetch     copy the parameter's file to one of the next generation, and map that into memory
    (update)  whoever fetched it changes the numbers in place, as they would any tensor
    store     flush the file
    commit    when all are stored: write down which files count, flush that, and rename it to a name that counts

    rank-0-of-2/  generation-11.json  0.11  1.11 ...      the commit before
                  generation-12.json  0.12  1.12 ...      the last one

To whoever looks, a rename has either happened or not.  So a process killed at any moment leaves one generation that
is whole, and perhaps some files of the next, which the next opening removes.

Each rank commits for itself, and one may have done so when another was killed.  The next opening takes the last
generation that all have: since no rank can finish a step without the others, they are one commit apart at most, and
the one before the last is still there.

Mapped files cost no memory of the process: the system holds what it has room for, and reads the rest again.
"""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 64  # bytes; each tensor of a file begins at a multiple
Values = dict[str, Tensor]  # of one parameter: "master", and whatever the optimizer calls its state
Layout = list[list[Any]]  # of a file: name, dtype and shape of each tensor, in order; as JSON has it
Entry = tuple[str, Layout]  # of a record: a parameter's file


class Disk:
    """A folder for each rank.  A record says which file a parameter is in, and how; the newest record counts.

    Raises ValueError if the ranks' last steps are further apart than the one step of a crash.
    """

    def __init__(self, where: Path) -> None:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if others := [other for other in where.glob("rank-*-of-*") if not other.name.endswith(f"-of-{ranks}")]:
            raise ValueError(f"{others[0]} was not left by {ranks} ranks: give another folder, or start as many")
        self.folder = where / f"rank-{rank}-of-{ranks}"
        self.folder.mkdir(parents=True, exist_ok=True)
        found = [int(path.stem.removeprefix("generation-")) for path in self.folder.glob("generation-*.json")]
        self.generation = agreed(max(found, default=-1), ranks, where)
        self.steps, self.entries = 0, {}
        if self.generation >= 0:
            record = json.loads((self.folder / f"generation-{self.generation}.json").read_text())
            self.steps, self.entries = record["steps"], dict(enumerate(record["parameters"]))
        self.fetched: dict[int, Values] = {}
        self.keep(self.files())

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, i: int) -> Values:
        """As it was committed.  Writing to these tensors changes no file."""
        name, layout = self.entries[i]
        return mapped(self.folder / name, layout, shared=False)

    def fetch(self, i: int) -> Values:
        """A copy, in the file that the next commit is to name."""
        name, layout = self.entries[i]
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
        return self.next(i).name, layout

    def commit(self, steps: int, stored: dict[int, Entry]) -> None:
        """From the rename on, and not before, what was stored is what will be found."""
        before = self.files()
        self.generation += 1
        self.steps, self.entries = steps, self.entries | stored
        flush(self.folder)
        record = self.folder / f"generation-{self.generation}.json"
        draft = record.with_suffix(".draft")
        draft.write_text(json.dumps({"steps": steps, "parameters": [self.entries[i] for i in range(len(self))]}))
        flush(draft)
        os.replace(draft, record)
        flush(self.folder)
        self.keep(self.files() | before)

    def keep(self, names: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink()

    def files(self) -> set[str]:
        return {f"generation-{self.generation}.json", *(name for name, _ in self.entries.values())}

    def next(self, i: int) -> Path:
        return self.folder / f"{i}.{self.generation + 1}"


def agreed(generation: int, ranks: int, where: Path) -> int:
    """The last generation that all ranks have committed: a crash may come between one rank's commit and another's."""
    generations = [generation]
    if ranks > 1:
        generations = [0] * ranks
        dist.all_gather_object(generations, generation)
    if max(generations) - min(generations) > 1:
        raise ValueError(f"{where}: by rank, the last commits there are {generations}: they are not of one training")
    return min(generations)


# ---- numbers in files ------------------------------------------------------------------------------------


def to_file(tensor: Tensor, path: str | Path) -> Tensor:
    """The same numbers in a memory-mapped file: the system holds what it has room for, and reads the rest again.

    `p.data = to_file(p.data, "0")` does so to a parameter, or to a shard of one.
    """
    layout = describe({"tensor": tensor})
    return mapped(allocated(Path(path), layout), layout, shared=True)["tensor"].copy_(tensor.detach())


def describe(values: Values) -> Layout:
    """Raises TypeError for what is not a tensor."""
    for name, x in values.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"state {name!r} is {x!r:.60}: files hold tensors, so make it one: torch.tensor(...)")
    return [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in values.items()]


def mapped(path: Path, layout: Layout, shared: bool) -> Values:
    """The tensors that lie in a file; if shared, to change them changes it."""
    flat = torch.from_file(str(path), shared, path.stat().st_size, dtype=torch.uint8, device="cpu")
    values = {}
    for (name, dtype, shape), (start, end) in zip(layout, places(layout), strict=True):
        values[name] = flat[start:end].view(getattr(torch, dtype)).view(shape)
    return values


def allocated(path: Path, layout: Layout) -> Path:
    """A new file with room for these tensors.  Raises OSError now if the disk is full, and not when it is touched."""
    room = max(end for _, end in [(0, 1), *places(layout)])
    path.unlink(missing_ok=True)  # a mapping of the old one stays what it is
    with open(path, "wb") as file:
        file.truncate(room)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, room)
    return path


def places(layout: Layout) -> list[tuple[int, int]]:
    """Where each tensor of a file begins and ends (bytes)."""
    found, end = [], 0
    for _, dtype, shape in layout:
        start = end + -end % ALIGNMENT
        end = start + math.prod(shape) * getattr(torch, dtype).itemsize
        found.append((start, end))
    return found


def flush(path: Path) -> None:
    """Wait until it is on the disk: a file's content, or which files a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
