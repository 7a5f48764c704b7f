"""A limit on the bytes of a rank's tensors: an operator that would exceed the limit raises MemoryError.

    def job():
        with budget(64 * MiB):        # in this block, this rank's tensors may take 64 MiB more than before
            train()

A budget counts a storage (the memory behind tensors) from the operator that allocates it until it is freed, as a
recording of memory does (memory.py), on every system and device.  Python's own objects, NumPy's arrays, mapped files
and the memory that a library allocates for itself do not count.

The MemoryError states the budget, the request and the line of the request.  The limit ends with the block.  Counting
costs time, so do not measure the speed of what runs under a budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch.utils._pytree import tree_leaves

from labs.kit.drawing.tables import short
from labs.kit.watch.memory import StorageWatch
from labs.kit.watch.stack_frames import is_machinery, show_line
from labs.kit.watch.storages import storages_of


@contextmanager
def budget(size: int) -> Iterator[None]:
    """Let this process's tensors take at most `size` bytes more in the block than they take when it begins.

    Raises MemoryError as soon as an operator exceeds this limit, and ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"a budget of {size} bytes holds no tensor: give at least 1 byte")
    try:
        with Limited(size):
            yield
    except Exceeded as error:
        text = f"this process exceeded its budget of {short(size)} of tensors: {error}{place(error)}"
        raise MemoryError(text).with_traceback(error.__traceback__) from None


class Exceeded(MemoryError):
    """The error of an allocation that does not fit into the budget."""


def place(error: BaseException) -> str:
    """Return the line of an error in words: the innermost line of its traceback outside torch and the kit."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [show_line(*line) for line in lines if not is_machinery(line[0])]
    return f" at {own[-1]}" if own else ""


class Limited(StorageWatch):
    """A StorageWatch that raises Exceeded if tensors take over `size` bytes more than when the watch was entered."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.held = size, 0

    def tag(self, values: Any, kind: str) -> None:
        """Add the bytes of storages that are older than the budget to its size, so that only new storages count."""
        for value in tree_leaves(values):
            for storage in storages_of(value):
                if storage._cdata not in self.alive:
                    self.size += storage.nbytes()
                    self.born(storage)

    def change(self, number: int, size: int) -> None:
        more = size - self.sizes[number]
        super().change(number, size)
        self.held += more
        if more > 0 and self.held > self.size:
            held, asked = short(self.held - more), short(more)
            raise Exceeded(f"it held {held} and asked for {asked} more")
