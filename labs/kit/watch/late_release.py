"""Tensors lent to the backend for collectives, and the moment in which the backend has released them.

One of gloo's threads holds the tensors of a collective until the thread runs again.  On a busy machine this may be
long after the program has continued, so the memory of a step would depend on the machine.  Therefore the backend gets
other tensors on the same memory, which nobody else holds.  The next operator waits until the backend has released
those of every collective that is over.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from labs.kit.watch import tap

SLICE = 5e-5  # s between two checks
PATIENCE = 10.0  # s: a machine may be that busy. A backend that never releases its tensors is waited for only once.


class Loan:
    """The tensors that one collective got, and the Work with which the program waits for it.

    A weak reference only reports the end of its tensor, and is never dereferenced: C++ may be destroying the tensor.
    """

    def __init__(self) -> None:
        self.tensors: list[weakref.ref] = []
        self.back: list[weakref.ref] = []
        self.handle: weakref.ref | None = None

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:  # the backend may give the tensor other memory, which the program must see
            return tensor
        other = tensor.detach()
        self.tensors.append(weakref.ref(other, self.back.append))
        return other

    def out(self) -> bool:
        return len(self.back) < len(self.tensors)


class Loans(tap.Listener):
    """All loans of one watch."""

    def __init__(self) -> None:
        self.waited_for: list[Loan] = []
        self.is_overdue = False  # the backend has once held a tensor for longer than PATIENCE

    def lent(self, call: tap.Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
        loan = call.notes[self] = Loan()
        return tree_map_only(torch.Tensor, loan.lend, args)

    def returned(self, call: tap.Call, work: dist.Work | None) -> None:
        loan = call.notes.get(self)  # a call that was issued before this watch began has none
        if loan and work is not None:
            loan.handle = weakref.ref(work)

    def waited(self, call: tap.Call) -> None:
        if loan := call.notes.pop(self, None):
            tap.let_go(call)
            self.waited_for.append(loan)

    def wait_for_release(self) -> None:
        """Wait until the backend has released each loan whose Work the program has waited for and released."""
        over = [loan for loan in self.waited_for if loan.handle() is None]
        if over:
            self.waited_for = [loan for loan in self.waited_for if loan not in over]
            deadline = time.monotonic() + (0 if self.is_overdue else PATIENCE)
            while any(loan.out() for loan in over):
                if time.monotonic() > deadline:
                    self.is_overdue = True
                    break
                time.sleep(SLICE)
