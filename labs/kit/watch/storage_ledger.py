"""A record of a process' storages (blocks of tensor memory): when each was allocated and freed, its size and kind."""

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
GATHERED = "gathered"  # the kind of parameters that were gathered for a forward: counts as comm, and is final
STRENGTH = {kind: strength for strength, kind in enumerate([*reversed(KINDS), GATHERED])}


class Life(weakref.ref):
    """A weak reference to a storage, with the number and the address under which the storage is recorded."""

    number: int
    key: int


class Ledger:
    """A record of when storages are allocated, resized and freed, with each storage's kind; it keeps no storage alive.

    A storage may be freed in any thread, in the middle of a line, and a Python callback may run too late, after another
    thread has acted.  So the weak reference of a freed storage appends itself to the list `dead`, and every read of the
    ledger first records the storages in that list as freed.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, int, int]] = []
        self._alive: dict[int, Life] = {}
        self.dead: list[Life] = []
        self.reading = threading.RLock()
        self.kinds: list[str] = []  # the kind of each storage, by its number
        self.sizes: list[int] = []
        self.warned: set[str] = set()

    @property
    def changes(self) -> list[tuple[int, int, int]]:
        """Return (nanoseconds, number of the storage, change in bytes) for each change of a storage's size."""
        self.bury()
        return self._changes

    @property
    def alive(self) -> dict[int, Life]:
        """Return the storages that are not freed, as {address: weak reference}."""
        self.bury()
        return self._alive

    def bury(self) -> None:
        """Record all storages that have been freed up to now."""
        with self.reading:
            while self.dead:
                life = self.dead.pop(0)
                if self._alive.get(life.key) is life:
                    del self._alive[life.key]
                    self.change(life.number, 0)

    def warn(self, text: str) -> None:
        """Warn once per text; the launcher passes the warning on to the caller of `run`."""
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
        """Give this kind to every storage under the tensors in `values`, unless a stronger kind (STRENGTH) is known."""
        for value in (values,) if isinstance(values, torch.Tensor) else tree_leaves(values):
            for storage in storages_of(value):
                number = self.born(storage)
                if STRENGTH[kind] > STRENGTH[self.kinds[number]]:
                    self.kinds[number] = kind

    def kind(self, tensor: torch.Tensor) -> str | None:
        """Return the strongest known kind of the storages under a tensor; None for a tensor that was never seen."""
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
            # append is atomic, so several threads may record a change at once.
            self._changes.append((time.monotonic_ns(), number, delta))
