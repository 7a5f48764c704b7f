"""A recorder of the bytes that one rank holds over time, by kind, without a line in the recorded code.

    with StorageWatch() as watch: train()
    timeline(watch.tape)        # [(nanoseconds, {"P": bytes, "G": bytes, ...}), ...]

A dispatch mode sees every operator of the rank.  The recorder notes when a storage (the block of memory behind one or
several tensors) is allocated and, by a weak reference, when the storage is freed; it keeps no tensor alive.  The kind
of a storage is often known only some time after it is allocated, so a storage has one kind from its allocation to its
end.  The kind of a storage is the first of these that fits:

    P          parameters as modules hold them between steps: when they are registered, and whenever the outermost
               forward begins
    G          the `.grad` of such a parameter
    S          `optimizer.state`, counters included, and master copies: parameters of an optimizer that no module has
    A          tensors that autograd saves for the backward, by itself or through a hook (checkpointing, as it
               recomputes)
    comm       buffers passed to collectives; parameters gathered for a forward (FSDP's full ones), and their gradients
    temporary  the rest

The recorder counts the bytes that operators of this job request from the allocator, in every thread that starts during
the recording.  The recorder does not count copies that a kernel or a backend (gloo) makes for itself, NumPy's memory,
or memory that operators only view, such as the text of a file.  A fake tensor holds nothing, except in a dry run, where
it counts as the tensor that it stands for.  The recorder changes two things, with a warning.  Compiled code runs
uncompiled, since generated code has no operators to see.  Inside torch.func, which allows no hooks on the tensors that
autograd saves, activations count as temporary.

The recorder costs some 15 microseconds per operator, and a wait after each collective until the backend has released
the tensors that the program has released.  A recorded step of four Linear(64) with Adam, which computes little, takes 5
to 6 times as long as without the recorder, and 3 times as long with a dispatch mode that does nothing.  A step that
computes more takes a quarter to a half longer.
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

from labs.kit.watch import c10d_tap
from labs.kit.watch.kinds_of_memory import Finders
from labs.kit.watch.late_release import Loans
from labs.kit.watch.storage_ledger import GATHERED, KINDS, Ledger
from labs.kit.watch.storages import takes_itself_apart

Tape = dict[str, Any]
COMMUNICATION = "c10d", "_c10d_functional"


class StorageWatch(Ledger):
    """A recorder of the storages that are allocated and freed in the body of a with statement.

    The recording, `tape`, is small and picklable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loans = Loans()
        self.stack = ExitStack()

    @property
    def tape(self) -> Tape:
        kinds = ["comm" if kind == GATHERED else kind for kind in self.kinds]
        return {"changes": self.changes, "kinds": kinds}

    def __enter__(self) -> StorageWatch:
        c10d_tap.listeners.append(self.loans)
        self.stack.callback(c10d_tap.remove, self.loans)
        finders = self.stack.enter_context(Finders(self, self.this_thread))
        self.stack.enter_context(self.this_thread(finders))
        return self

    def __exit__(self, *failure: Any) -> None:
        self.stack.close()
        self.alive.clear()

    def settle(self) -> None:
        """Wait until the backend has released its tensors, and record all storages that are freed."""
        self.loans.wait_for_release()
        self.bury()

    @contextmanager
    def this_thread(self, finders: Finders) -> Iterator[None]:
        """Enter the dispatch mode and the hooks on saved tensors, which each thread needs for itself."""
        with finders.hooks_on_saved_tensors(), Operators(self):
            yield


class Operators(TorchDispatchMode):
    """A dispatch mode that shows a StorageWatch the outputs of every operator of one thread."""

    supports_higher_order_operators = True

    def __init__(self, watch: StorageWatch) -> None:
        super().__init__()
        self.watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled during a recording (kinds_of_memory.py), so no guard is needed

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
        """Run a higher-order operator (flex_attention) so that the operators inside it are recorded, too."""
        kernel = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            return func(*args, **kwargs)
        with Operators(self.watch):
            return kernel(*args, **kwargs)


def timeline(tape: Tape) -> list[tuple[int, dict[str, int]]]:
    """Return (nanoseconds, {kind: bytes held}) after each change, from the allocation of the first storage on."""
    held = dict.fromkeys(KINDS, 0)
    moments = []
    for moment, storage, delta in tape["changes"]:
        held[tape["kinds"][storage]] += delta
        moments.append((moment, dict(held)))
    return moments
