"""Tensors in files that are mapped into memory, so that they use no memory of the process.

The operating system caches as much of a file as it has room for, and reads the rest from the disk again.  The tensors
lie in a file one after the other:

    describe    returns the layout, with the name, dtype and shape of each tensor, which the file itself does not have
    allocated   makes a file with room for tensors of a layout
    mapped      returns the tensors in a file: in place, or as a copy that uses memory only where it is changed
    checksum    returns the checksum of all bytes of a file
    flush       waits until a file is on the disk
"""

import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; each tensor of a file begins at a multiple of it
BLOCK = 2**20  # bytes; a checksum reads this many at a time
Values = dict[str, Tensor]  # one parameter's tensors: "master", and the optimizer's state under its own names
Layout = list[list[Any]]  # a file's layout: name, dtype and shape of each tensor, in order; made for JSON


def to_file(tensor: Tensor, path: str | Path) -> Tensor:
    """Copy a tensor to a new file, and return the copy, which is mapped into memory.

    `p.data = to_file(p.data, "0")` moves a parameter, or a shard of one, to a file.
    """
    layout = describe({"tensor": tensor})
    return mapped(allocated(Path(path), layout), layout, shared=True)["tensor"].copy_(tensor.detach())


def describe(values: Values) -> Layout:
    """Return the layout of a file with these tensors.  Raises TypeError for a value that is no tensor."""
    for name, x in values.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"state {name!r} is {x!r:.60}: files hold tensors, so make it one: torch.tensor(...)")
    return [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in values.items()]


def mapped(path: Path, layout: Layout, shared: bool) -> Values:
    """Return the tensors in a file, mapped into memory; if `shared`, writing to them changes the file."""
    flat = torch.from_file(str(path), shared, path.stat().st_size, dtype=torch.uint8, device="cpu")
    values = {}
    for (name, dtype, shape), (start, end) in zip(layout, places(layout), strict=True):
        values[name] = flat[start:end].view(getattr(torch, dtype)).view(shape)
    return values


def allocated(path: Path, layout: Layout) -> Path:
    """Make a file with room for these tensors, and return its path.

    Raises OSError if the disk is full: at once, and not when the mapped memory is first written to.
    """
    room = max(end for _, end in [(0, 1), *places(layout)])
    path.unlink(missing_ok=True)  # tensors that are mapped to an old file keep it
    with open(path, "wb") as file:
        file.truncate(room)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, room)
    return path


def places(layout: Layout) -> list[tuple[int, int]]:
    """Return, for each tensor in a file, the index of its first byte, and of the byte after its last."""
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
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
