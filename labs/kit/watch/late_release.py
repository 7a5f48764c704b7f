"""Tensors that gloo still holds after a collective has ended: wait until gloo has released them, so that memory counts.

One of gloo's threads holds the tensors of a collective until that thread runs again.  On a busy machine, gloo may hold
the tensors long after the program has continued, so the recorded memory of a step would depend on the machine.  So gloo
gets other tensor objects on the same memory (a loan), which nobody else holds.  The next operator of the program waits
until gloo has released the loans of every collective that has ended.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from labs.kit.watch import c10d_tap

SLICE = 5e-5  # seconds between two checks
PATIENCE = 10.0  # seconds: longest wait for a busy machine; after one such wait, no loan is waited for again


class Loan:
    """The tensors that the backend got for one collective, and the Work with which the program waits for it.

    A weak reference reports the end of a tensor.  This reference is never dereferenced, since C++ may be destroying the
    tensor.
    """

    def __init__(self) -> None:
        self.tensors: list[weakref.ref] = []
        self.back: list[weakref.ref] = []
        self.handle: weakref.ref | None = None

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:  # the backend may replace a sparse tensor's memory
            return tensor
        other = tensor.detach()
        self.tensors.append(weakref.ref(other, self.back.append))
        return other

    def out(self) -> bool:
        return len(self.back) < len(self.tensors)


class Loans(c10d_tap.Listener):
    """The loans of all collectives that the backend runs during one recording of memory."""

    def __init__(self) -> None:
        self.waited_for: list[Loan] = []
        self.is_overdue = False  # whether the backend has held a tensor for longer than PATIENCE

    def lent(self, call: c10d_tap.IssuedCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
        loan = call.notes[self] = Loan()
        return tree_map_only(torch.Tensor, loan.lend, args)

    def returned(self, call: c10d_tap.IssuedCall, work: dist.Work | None) -> None:
        loan = call.notes.get(self)  # a call that was issued before the recording began has no loan
        if loan and work is not None:
            loan.handle = weakref.ref(work)

    def waited(self, call: c10d_tap.IssuedCall) -> None:
        if loan := call.notes.pop(self, None):
            c10d_tap.let_go(call)
            self.waited_for.append(loan)

    def wait_for_release(self) -> None:
        """Wait until the backend has released the tensors of each collective that the program has waited for."""
        over = [loan for loan in self.waited_for if loan.handle() is None]
        if over:
            self.waited_for = [loan for loan in self.waited_for if loan not in over]
            deadline = time.monotonic() + (0 if self.is_overdue else PATIENCE)
            while any(loan.out() for loan in over):
                if time.monotonic() > deadline:
                    self.is_overdue = True
                    break
                time.sleep(SLICE)
