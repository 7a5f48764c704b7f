"""A checkpoint on disk: its files, and the index that says what lies in which.

    step-12/  rank-0-of-4.safetensors    the pieces that rank 0 wrote, as github.com/huggingface/safetensors has them
              rank-1-of-4.safetensors
              ...
              index.json                 of each tensor, the shape, and which piece lies in which file; the optimizer's
                                         options; the checksum of each file; what else is to be remembered, by all ranks
                                         and by each of them; and the checksum of the index

A checkpoint is a folder that has been renamed to `step-12`, and until then it was `step-12.<a random word>.draft`,
which nobody loads.  A draft's index is locked while its owner lives; what a job that was killed has left, the next save
removes.  Nothing from a file is ever run: tensors in the safetensors format, the rest in JSON.
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

from labs.checkpoint.extents import require_whole, said
from labs.dtensor.placement import Block
from labs.memory.disk import sealed
from labs.memory.mapped_files import checksum, flush

FORMAT, INDEX = 1, "index.json"
FILE = re.compile(r"rank-\d+-of-\d+\.safetensors")
STEP, DRAFT = re.compile(r"step-(\d+)"), re.compile(r"step-\d+\.\w+\.draft")


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint: in which file each piece lies, under this key, the first of those that it has."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    files: dict[Block, str]

    def as_json(self) -> dict[str, Any]:
        pieces = [[block.offset, block.shape, name] for block, name in self.files.items()]
        return {"key": self.key, "shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."), "pieces": pieces}

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> "Stored":
        """Raises ValueError where the pieces are not the whole."""
        dtype = getattr(torch, told["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{told['dtype']!r} is no dtype of torch's")
        files = {Block(sizes(offset), sizes(shape)): name for offset, shape, name in told["pieces"]}
        require_whole(told["key"], sizes(told["shape"]), {*files})
        return cls(told["key"], sizes(told["shape"]), dtype, files)


def sizes(told: Any) -> tuple[int, ...]:
    if not isinstance(told, list) or not all(type(n) is int and n >= 0 for n in told):
        raise ValueError(f"{told!r} is no shape, and no offset")
    return tuple(told)


Index = dict[str, Stored]


def newest(folder: str | Path) -> Path | None:
    """The checkpoint of the last step in a folder; None where there is none, as before the first save.

    Raises OSError for what is no folder, or cannot be looked into.
    """
    try:
        named = [(found, path) for path in Path(folder).expanduser().iterdir() if (found := STEP.fullmatch(path.name))]
        steps = {int(found[1]): path for found, path in named if (path / INDEX).is_file()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(f"{folder} cannot be looked into ({error}): give the folder that was given to save()") from error
    return steps[max(steps)] if steps else None


def numbered(step: Any) -> int:
    """Raises ValueError for what no folder is called by, so that `newest` would not find it."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step= is {step!r}: give an integer, 0 or more")
    return number


def entry(key: str, block: Block) -> str:
    """The name of a piece in its file."""
    return f"{key}{said(block)}"


def to_json(name: str, value: Any) -> str:
    """The same for equal values.  A tuple comes back as a list.

    Raises ValueError for what JSON cannot have, and for a key that is no string, which it would bring back as one.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}= is not for JSON ({error}): give numbers, strings, lists and dicts") from error
    for key in keys_in(value):
        if not isinstance(key, str):
            raise ValueError(f"{name}= has a key {key!r}, which JSON would bring back as a string: make it one before")
    return json.dumps(value, sort_keys=True)


def keys_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for each in value if isinstance(value, list | tuple) else ():
        yield from keys_in(each)


def opened(where: Path) -> tuple[dict[str, Any], Index]:
    """What was recorded, and of that the index.  Raises ValueError for what is none, though its checksum may fit."""
    try:
        if (where / INDEX).is_symlink():
            raise ValueError("its index is a link to another file")
        found = json.loads((where / INDEX).read_bytes())
        record = found["record"]
        if found != sealed(record):
            raise ValueError("its checksum is another")
        if record["format"] == FORMAT:
            return record, indexed(record)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{where} is no checkpoint, or not a whole one ({why}): load another one") from error
    raise ValueError(f"{where} has format {record['format']}, and this course reads {FORMAT}: update it")


def indexed(record: dict[str, Any]) -> Index:
    numbered(record["step"]), record["values"], [*record["own"]]
    for name, options in record["options"].items():
        if not isinstance(options["optimizer"], str):
            raise ValueError(f"the optimizer of {name!r} has no name")
    index = {key: Stored.of_json(told) for key, told in record["tensors"].items()}
    for name in [*record["files"], *(name for stored in index.values() for name in stored.files.values())]:
        if not FILE.fullmatch(name) or name not in record["files"]:
            raise ValueError(f"{name!r} is no file of a checkpoint, or has no checksum")
    return index


def require_as_written(path: Path, written: int) -> None:
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing, or no file of a checkpoint: put back what was there, or load another one")
    if checksum(path) != written:
        raise ValueError(f"{path} does not hold what was written there: put back what was there, or load another one")


@contextmanager
def drafted(final: Path, draft: Path) -> Iterator[None]:
    """Until it is renamed, or removed at the end, its index is locked: the system unlocks it when a process dies."""
    if final.exists():
        raise ValueError(f"{final} is there already: give another folder, or go on from it")
    made = [parent for parent in draft.parents if not parent.exists()]
    try:
        draft.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{final.parent} is a file, or lies in one: give a folder") from error
    try:
        with open(draft / INDEX, "w") as index:
            with suppress(OSError):  # a file system without locks: there, nobody can take one either
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
    """Write the index, flush it, and rename the folder."""
    (draft / INDEX).write_text(json.dumps(sealed(record)))
    flush(draft / INDEX)
    rename(draft, final, record["files"])
    with suppress(OSError):  # it has happened, whatever is left behind
        for other in final.parent.iterdir():
            if DRAFT.fullmatch(other.name):
                remove_unless_alive(other)


def remove_unless_alive(draft: Path) -> None:
    """Of a job that was killed while it saved; the lock of one that lives cannot be taken."""
    with suppress(OSError), open(draft / INDEX, "r+") as index:
        lock(index)
        remove(draft)


def remove(draft: Path) -> None:
    """Take as few open files as can be: they may have run out, which is why it is removed."""
    with suppress(OSError):  # none for a look into it: then it is empty
        for path in [*draft.iterdir()]:
            path.unlink()
    draft.rmdir()


def rename(draft: Path, final: Path, files: Iterable[str]) -> None:
    """To whoever looks, that has happened or not.  files: those that other ranks have flushed."""
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
