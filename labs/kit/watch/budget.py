"""A limit on the tensors of a job: one that would hold more fails, and says so.

    def job():
        with budget(64 * MiB):        # from here on this rank's tensors may take this many bytes more
            train()

A budget counts storages as the memory ledger does, on every system and device: when an operator allocates one, until it
is freed.  Python's own objects, NumPy's arrays, mapped files and what a library allocates for itself do not count.

Whoever asks for more gets a MemoryError that states the budget, the request and its line.  The limit ends with the
block.  Counting costs time: a budget is no place to measure speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch.utils._pytree import tree_leaves

from labs.kit.drawing.tables import short
from labs.kit.watch.frames import is_machinery, show_line
from labs.kit.watch.memory import StorageWatch
from labs.kit.watch.storages import storages_of


@contextmanager
def budget(size: int) -> Iterator[None]:
    """Let this process's tensors take at most `size` bytes in the block, beyond those that it holds as it enters.

    Raises MemoryError as soon as an operator would hold more, and ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"a budget of {size} bytes: give it at least 1")
    try:
        with Limited(size):
            yield
    except Exceeded as error:
        text = f"this process exceeded its budget of {short(size)} of tensors: {error}{place(error)}"
        raise MemoryError(text).with_traceback(error.__traceback__) from None


class Exceeded(MemoryError):
    """The request that does not fit, in words."""


def place(error: BaseException) -> str:
    """Return the innermost line of the traceback that is neither torch's nor the kit's, in words."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [show_line(*line) for line in lines if not is_machinery(line[0])]
    return f" at {own[-1]}" if own else ""


class Limited(StorageWatch):
    """A StorageWatch that raises Exceeded if more than `size` bytes are held beyond those held as it was entered."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.held = size, 0

    def tag(self, values: Any, kind: str) -> None:
        """Note storages that are met for the first time: they were there before, and take nothing from the budget."""
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
