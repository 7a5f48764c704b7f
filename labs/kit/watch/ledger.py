"""The storages of a process: when each came and went, how large it is, and what it is for."""

from __future__ import annotations

import time
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labs.kit.watch.storages import allocates, storages_of

KINDS = ("P", "G", "S", "A", "comm", "temporary")
GATHERED = "gathered"  # comm, whatever else is found out about it
STRENGTH = {kind: strength for strength, kind in enumerate([*reversed(KINDS), GATHERED])}


class Ledger:
    """Births, changes of size and deaths of storages, each of a kind; no storage is kept alive."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, int, int]] = []  # (nanoseconds, number of the storage, bytes more)
        self.kinds: list[str] = []  # by number of storage
        self.sizes: list[int] = []
        self.alive: dict[int, tuple[int, weakref.ref]] = {}  # address of a storage: its number, its death
        self.warned: set[str] = set()

    def warn(self, text: str) -> None:
        """Once; it reaches whoever has called `run`."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(f'record="memory": {text}', stacklevel=2)

    def see(self, func: Any, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            if known := self.alive.get(storage._cdata):
                self.change(known[0], storage.nbytes())
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
        known = [self.alive[s._cdata][0] for s in storages_of(tensor) if s._cdata in self.alive]
        return max((self.kinds[number] for number in known), key=STRENGTH.__getitem__, default=None)

    def born(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if known := self.alive.get(key):
            return known[0]
        number = len(self.kinds)
        self.kinds.append("temporary")
        self.sizes.append(0)
        self.alive[key] = number, weakref.ref(storage, partial(self.died, key))
        self.change(number, storage.nbytes())
        return number

    def resized(self, storage: torch.UntypedStorage) -> None:
        if known := self.alive.get(storage._cdata):
            self.change(known[0], storage.nbytes())

    def died(self, key: int, _: weakref.ref) -> None:
        if key in self.alive:
            self.change(self.alive.pop(key)[0], 0)

    def change(self, number: int, size: int) -> None:
        if delta := size - self.sizes[number]:
            self.sizes[number] = size
            # In one piece: a storage may die in any thread, and whenever the garbage collector runs.
            self.changes.append((time.monotonic_ns(), number, delta))
