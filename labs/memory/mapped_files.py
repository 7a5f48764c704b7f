"""Tensors in files that are mapped into memory, so that they cost no memory of the process.

The system holds what it has room for, and reads the rest again.  A file is its tensors one after the other:

    describe    name, dtype and shape of each: the layout, which is kept elsewhere
    allocated   a new file with room for them
    mapped      the tensors that lie in it; in place, or as a copy that costs memory only where it is changed
    checksum    of all its bytes
    flush       wait until they are on the disk
"""

import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; each tensor of a file begins at a multiple
BLOCK = 2**20  # bytes that are read at a time for a checksum
Values = dict[str, Tensor]  # of one parameter: "master", and whatever the optimizer calls its state
Layout = list[list[Any]]  # of a file: name, dtype and shape of each tensor, in order; as JSON has it


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


def checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            found = zlib.crc32(block, found)
    return found


def flush(path: Path) -> None:
    """Wait until it is on the disk: a file's content, or which files a folder has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
