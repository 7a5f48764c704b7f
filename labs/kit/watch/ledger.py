"""The storages of a process: when each came and went, how large it is, and what it is for."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labs.kit.watch.storages import allocates, storages_of

KINDS = ("P", "G", "S", "A", "comm", "temporary")
GATHERED = "gathered"  # comm, whatever else is found out about it
STRENGTH = {kind: strength for strength, kind in enumerate([*reversed(KINDS), GATHERED])}


class Life(weakref.ref):
    """Of a storage: the number and the address it has while it lives."""

    number: int
    key: int


class Ledger:
    """Births, changes of size and deaths of storages, each of a kind; no storage is kept alive.

    A storage may die in any thread, in the middle of a line.  A line of Python about it could be overtaken by what
    another thread does next, so the interpreter itself puts it on a list, and whoever looks at the ledger reads that
    first.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, int, int]] = []
        self._alive: dict[int, Life] = {}
        self.dead: list[Life] = []
        self.reading = threading.RLock()
        self.kinds: list[str] = []  # by number of storage
        self.sizes: list[int] = []
        self.warned: set[str] = set()

    @property
    def changes(self) -> list[tuple[int, int, int]]:
        """(nanoseconds, number of the storage, bytes more)"""
        self.bury()
        return self._changes

    @property
    def alive(self) -> dict[int, Life]:
        """By address."""
        self.bury()
        return self._alive

    def bury(self) -> None:
        """Note the deaths up to now."""
        with self.reading:
            while self.dead:
                life = self.dead.pop(0)
                if self._alive.get(life.key) is life:
                    del self._alive[life.key]
                    self.change(life.number, 0)

    def warn(self, text: str) -> None:
        """Once; it reaches whoever has called `run`."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(f'record="memory": {text}', stacklevel=2)

    def see(self, func: Any, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            if known := self.alive.get(storage._cdata):
                self.change(known.number, storage.nbytes())
            elif allocates(func):
                self.born(storage)

    def tag(self, values: Any, kind: str) -> None:
        """Every storage under `values` is of this kind, unless a stronger kind is known."""
        for value in (values,) if isinstance(values, torch.Tensor) else tree_leaves(values):
            for storage in storages_of(value):
                number = self.born(storage)
                if STRENGTH[kind] > STRENGTH[self.kinds[number]]:
                    self.kinds[number] = kind

    def kind(self, tensor: torch.Tensor) -> str | None:
        """The strongest kind known of the storages under a tensor; None for one that was never seen."""
        alive = self.alive
        known = [alive[s._cdata].number for s in storages_of(tensor) if s._cdata in alive]
        return max((self.kinds[number] for number in known), key=STRENGTH.__getitem__, default=None)

    def born(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if known := self.alive.get(key):
            return known.number
        life = self._alive[key] = Life(storage, self.dead.append)
        life.key, life.number = key, len(self.kinds)
        self.kinds.append("temporary")
        self.sizes.append(0)
        self.change(life.number, storage.nbytes())
        return life.number

    def resized(self, storage: torch.UntypedStorage) -> None:
        if known := self.alive.get(storage._cdata):
            self.change(known.number, storage.nbytes())

    def change(self, number: int, size: int) -> None:
        if delta := size - self.sizes[number]:
            self.sizes[number] = size
            # In one piece: threads may do so at once.
            self._changes.append((time.monotonic_ns(), number, delta))
