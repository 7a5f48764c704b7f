"""A checkpoint on disk: its files, and an index that says which file holds which piece of a tensor.

    step-12/  rank-0-of-4.safetensors    the pieces that rank 0 wrote (format: github.com/huggingface/safetensors)
              rank-1-of-4.safetensors
              ...
              index.json                 each tensor's shape, and the file of each of its pieces; the optimizer's
                                         options; the checksum of each file; the values saved for all ranks, and for
                                         each rank; and the checksum of the index itself

While a save writes a checkpoint, its folder is called `step-12.<a random word>.draft`, and no rank loads a draft.  A
complete draft is renamed to `step-12`.  A draft's index is locked while the job that writes it is alive, and the next
save removes the drafts that killed jobs have left.  A checkpoint holds no code: tensors are in the safetensors format,
the rest in JSON.
"""

import fcntl
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from labs.checkpoint.tensor_blocks import as_slices, require_whole
from labs.dtensor.placement import Block
from labs.memory.disk import sealed
from labs.memory.mapped_files import checksum, flush

FORMAT, INDEX = 1, "index.json"
FILE = re.compile(r"rank-\d+-of-\d+\.safetensors")
STEP, DRAFT = re.compile(r"step-(\d+)"), re.compile(r"step-\d+\.\w+\.draft")


@dataclass(frozen=True)
class Stored:
    """An entry of the index: a tensor in a checkpoint.

    key: the name of the tensor's pieces in the files: the first key, if the tensor has several
    files: for each block of the tensor, the name of the file in which it lies
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    files: dict[Block, str]

    def as_json(self) -> dict[str, Any]:
        pieces = [[block.offset, block.shape, name] for block, name in self.files.items()]
        return {"key": self.key, "shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."), "pieces": pieces}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Stored":
        """Read an entry of the index.  Raises ValueError if the pieces in the entry do not make up the whole tensor."""
        dtype = getattr(torch, fields["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{fields['dtype']!r} is no dtype of torch's")
        files = {Block(sizes(offset), sizes(shape)): name for offset, shape, name in fields["pieces"]}
        require_whole(fields["key"], sizes(fields["shape"]), {*files})
        return cls(fields["key"], sizes(fields["shape"]), dtype, files)


def sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers!r} is neither a shape nor an offset")
    return tuple(numbers)


Index = dict[str, Stored]


def newest(folder: str | Path) -> Path | None:
    """Return the checkpoint of the last step in a folder, or None if there is none, as before the first save.

    Raises OSError if `folder` is a file, or cannot be read.
    """
    try:
        named = [(found, path) for path in Path(folder).expanduser().iterdir() if (found := STEP.fullmatch(path.name))]
        steps = {int(found[1]): path for found, path in named if (path / INDEX).is_file()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(f"{folder} cannot be listed ({error}): give the folder that was given to save()") from error
    return steps[max(steps)] if steps else None


def numbered(step: Any) -> int:
    """Return a step as an integer.  Raises ValueError for any other step, whose checkpoint `newest` would not find."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step= is {step!r}: give an integer, 0 or more")
    return number


def entry(key: str, block: Block) -> str:
    """Return the name that a piece of a tensor has in its file."""
    return f"{key}{as_slices(block)}"


def to_json(name: str, value: Any) -> str:
    """Return a value as JSON: equal values give equal text.  JSON turns a tuple into a list.

    Raises ValueError for a value that JSON cannot hold, and for a dict's key that JSON would turn into a string.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}= cannot be JSON ({error}): give numbers, strings, lists and dicts") from error
    for key in keys_in(value):
        if not isinstance(key, str):
            raise ValueError(f"{name}= has a key {key!r}, which JSON would load as a string: make it a string before")
    return json.dumps(value, sort_keys=True)


def keys_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for each in value if isinstance(value, list | tuple) else ():
        yield from keys_in(each)


def opened(where: Path) -> tuple[dict[str, Any], Index]:
    """Read the record in a checkpoint's index file; return the record, and the index of tensors in it.

    Raises ValueError for a record that is damaged or makes no sense, even if its checksum is right.
    """
    try:
        if (where / INDEX).is_symlink():
            raise ValueError("its index is a link to another file")
        found = json.loads((where / INDEX).read_bytes())
        record = found["record"]
        if found != sealed(record):
            raise ValueError("its checksum does not match")
        if record["format"] == FORMAT:
            return record, indexed(record)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{where} is no checkpoint, or not a whole one ({why}): load another one") from error
    raise ValueError(f"{where} has format {record['format']}, and this course reads {FORMAT}: update the course")


def indexed(record: dict[str, Any]) -> Index:
    numbered(record["step"]), record["values"], [*record["own"]]
    for name, options in record["options"].items():
        if not isinstance(options["optimizer"], str):
            raise ValueError(f"the optimizer of {name!r} has no name")
    index = {key: Stored.of_json(each) for key, each in record["tensors"].items()}
    for name in [*record["files"], *(name for stored in index.values() for name in stored.files.values())]:
        if not FILE.fullmatch(name) or name not in record["files"]:
            raise ValueError(f"{name!r} is no file of a checkpoint, or has no checksum")
    return index


def require_as_written(path: Path, written: int) -> None:
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing, or no file of a checkpoint: restore the file, or load another checkpoint")
    if checksum(path) != written:
        raise ValueError(f"{path} does not hold what was written there: put back what was there, or load another one")


@contextmanager
def drafted(final: Path, draft: Path) -> Iterator[None]:
    """Make a draft, and remove it at the end of this context unless it was renamed.

    The draft's index is locked until the end; the system removes the lock if this process dies.
    """
    if final.exists():
        raise ValueError(f"{final} is there already: give another folder, or load it and go on")
    made = [parent for parent in draft.parents if not parent.exists()]
    try:
        draft.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{final.parent} is a file, or lies in one: give a folder") from error
    try:
        with open(draft / INDEX, "w") as index:
            with suppress(OSError):  # on a file system without locks, no other job can take one either
                lock(index)
            for folder in made:
                flush(folder.parent)
            yield
    finally:
        with suppress(OSError):
            remove(draft)


def lock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def commit(draft: Path, final: Path, record: dict[str, Any]) -> None:
    """Write the index, flush it, rename the folder, and remove the drafts that killed jobs have left."""
    (draft / INDEX).write_text(json.dumps(sealed(record)))
    flush(draft / INDEX)
    rename(draft, final, record["files"])
    with suppress(OSError):  # the save is complete, even if old drafts cannot be removed
        for other in final.parent.iterdir():
            if DRAFT.fullmatch(other.name):
                remove_unless_alive(other)


def remove_unless_alive(draft: Path) -> None:
    """Remove the draft of a job that was killed while it saved; if the job is alive, its lock cannot be taken."""
    with suppress(OSError), open(draft / INDEX, "r+") as index:
        lock(index)
        remove(draft)


def remove(draft: Path) -> None:
    """Remove a draft with as few open files as possible: the save may have failed because too many were open."""
    with suppress(OSError):  # without a file for the listing, only an empty folder can be removed
        for path in [*draft.iterdir()]:
            path.unlink()
    draft.rmdir()


def rename(draft: Path, final: Path, files: Iterable[str]) -> None:
    """Rename a draft in one atomic step.

    files: names of the files that must be in the draft, since other ranks have written and flushed them
    """
    for name in files:
        if not (draft / name).exists():
            raise ValueError(f"rank 0 does not see {draft / name}: save to a folder that all ranks have in common")
    flush(draft)
    try:
        os.rename(draft, final)
    except OSError as error:
        if final.exists():
            raise ValueError(f"{final} is there already, by another job: give another folder, or load it") from error
        raise
    flush(final.parent)
