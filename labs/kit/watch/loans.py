"""What the backend was lent for collectives, and when it has let go of it.

A thread of gloo's holds the tensors of a collective until it runs again, which on a busy machine may be long after the
program has gone on: what a step holds would depend on the machine.  So the backend gets other tensors on the same
memory, which nobody else holds, and the next operator waits until it has let go of those of every collective that is
over.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from labs.kit.watch import tap

SLICE = 5e-5  # s, between two looks
PATIENCE = 10.0  # s: a machine may be that busy; a backend that keeps what it got is waited for once


class Loan:
    """What one collective got, and what the program waits for it with.

    A weak reference tells of its tensor's end, and is never asked for it: C++ may be about to destroy that.
    """

    def __init__(self) -> None:
        self.tensors: list[weakref.ref] = []
        self.back: list[weakref.ref] = []
        self.handle: weakref.ref | None = None

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:  # the backend may give it other memory, which the program has to see
            return tensor
        other = tensor.detach()
        self.tensors.append(weakref.ref(other, self.back.append))
        return other

    def out(self) -> bool:
        return len(self.back) < len(self.tensors)


class Loans(tap.Listener):
    """All of one watch."""

    def __init__(self) -> None:
        self.due: list[Loan] = []
        self.kept = False  # by the backend, for longer than that

    def lent(self, call: tap.Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
        loan = call.notes[self] = Loan()
        return tree_map_only(torch.Tensor, loan.lend, args)

    def returned(self, call: tap.Call, work: dist.Work | None) -> None:
        loan = call.notes.get(self)  # none, if it was issued before this watch began
        if loan and work is not None:
            loan.handle = weakref.ref(work)

    def waited(self, call: tap.Call) -> None:
        if loan := call.notes.pop(self, None):
            tap.let_go(call)
            self.due.append(loan)

    def come_back(self) -> None:
        """Wait for the backend to let go of what the program has let go of, the handle to wait for included."""
        over = [loan for loan in self.due if loan.handle() is None]
        if over:
            self.due = [loan for loan in self.due if loan not in over]
            deadline = time.monotonic() + (0 if self.kept else PATIENCE)
            while any(loan.out() for loan in over):
                if time.monotonic() > deadline:
                    self.kept = True
                    break
                time.sleep(SLICE)
