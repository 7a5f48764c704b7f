"""Bytes held by one rank over time, by kind, watched from outside.

    with StorageWatch() as watch: train()
    timeline(watch.tape)        # [(nanoseconds, {"P": bytes, "G": bytes, ...}), ...]

A dispatch mode sees every operator of the rank and notes each storage (the block of memory behind one or several
tensors) when it appears and, through a weak reference, when it goes: nothing is kept alive.  What a storage is
*for* is often known only after its birth, so a kind belongs to the whole life of a storage.  The first that fits:

    P          parameters as modules hold them at rest: when they are registered, and whenever the outermost
               forward begins
    G          what the `.grad` of such a parameter holds
    S          what `optimizer.state` holds, counters included; and master copies, that is, parameters of an
               optimizer that no module has
    A          what autograd keeps for the backward, by itself or through a hook (checkpointing, as it recomputes)
    comm       buffers handed to collectives; parameters gathered for a forward (FSDP's full ones), and their gradients
    temporary  the rest

It counts the bytes that operators of this job ask the allocator for, in every thread that starts while it watches.  Not
counted are copies that a kernel or a backend makes for itself (gloo's), what NumPy holds, and memory that operators
only look at, such as the text of a file.  A fake tensor holds nothing, but in a dry run what it stands for.  Two things
are changed, with a warning: what is compiled runs uncompiled, since generated code has no operators to see; and within
torch.func, which allows no hooks on what autograd keeps, activations count as temporary.

It costs some 15 microseconds per operator, and behind a collective the moment in which the backend lets go of what the
program has let go of.  A step of four Linear(64) with Adam, which has little else to do, takes 5 to 6 times as long
(3 times with a dispatch mode that does nothing); one with work to do, a quarter to a half more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.kit.watch import tap
from labs.kit.watch.kinds import Finders
from labs.kit.watch.ledger import GATHERED, KINDS, Ledger
from labs.kit.watch.loans import Loans
from labs.kit.watch.storages import takes_itself_apart

Tape = dict[str, Any]
COMMUNICATION = "c10d", "_c10d_functional"


class StorageWatch(Ledger):
    """Keeps a ledger of storages while it is entered; `tape` is small and picklable."""

    def __init__(self) -> None:
        super().__init__()
        self.loans = Loans()
        self.stack = ExitStack()

    @property
    def tape(self) -> Tape:
        kinds = ["comm" if kind == GATHERED else kind for kind in self.kinds]
        return {"changes": self.changes, "kinds": kinds}

    def __enter__(self) -> StorageWatch:
        tap.listeners.append(self.loans)
        self.stack.callback(tap.remove, self.loans)
        finders = self.stack.enter_context(Finders(self, self.this_thread))
        self.stack.enter_context(self.this_thread(finders))
        return self

    def __exit__(self, *failure: Any) -> None:
        self.stack.close()
        self.alive.clear()

    def settle(self) -> None:
        """What is over by now is noted as over before anything new begins."""
        self.loans.come_back()
        self.bury()

    @contextmanager
    def this_thread(self, finders: Finders) -> Iterator[None]:
        """Modes and hooks on what autograd keeps belong to a thread."""
        with finders.hooks_on_what_is_kept(), Operators(self):
            yield


class Operators(TorchDispatchMode):
    """Shows a watch the outputs of every operator of one thread."""

    supports_higher_order_operators = True

    def __init__(self, watch: StorageWatch) -> None:
        super().__init__()
        self.watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while a watch is on (kinds.py): no need to guard each operator against it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(takes_itself_apart, types)):
            return NotImplemented
        self.watch.settle()
        kwargs = kwargs or {}
        answer = func(*args, **kwargs) if type(func) is OpOverload else self.inside(func, args, kwargs)
        if func.namespace in COMMUNICATION:
            self.watch.tag((args, answer), "comm")
        elif isinstance(answer, torch.Tensor):
            self.watch.see(func, answer)
        elif isinstance(answer, (tuple, list)):
            for tensor in tree_leaves(answer):
                if isinstance(tensor, torch.Tensor):
                    self.watch.see(func, tensor)
        return answer

    def inside(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """One that is made of operators (flex_attention) shows those, too."""
        kernel = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            return func(*args, **kwargs)
        with Operators(self.watch):
            return kernel(*args, **kwargs)


def timeline(tape: Tape) -> list[tuple[int, dict[str, int]]]:
    """(nanoseconds, bytes by kind) after each change, from the birth of the first storage."""
    held = dict.fromkeys(KINDS, 0)
    moments = []
    for moment, storage, delta in tape["changes"]:
        held[tape["kinds"][storage]] += delta
        moments.append((moment, dict(held)))
    return moments
