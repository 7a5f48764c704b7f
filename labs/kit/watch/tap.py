"""A tap on the one place that every collective of a process passes through.

Every collective and every send/recv ends in one of PyTorch's `c10d::*` operators, whether this course's code issues
it, torch's DDP in C++, FSDP2, DTensor or pipelining.  A kernel for the dispatch key BackendSelect, just above the
backends, shows each call to the listeners and passes it on.  Nothing is replaced, and nothing else is slowed.

    call      the op, tensors, group, and peer or root of a call
    listener  issued(call)          is called before the operator runs
              lent(call, args)      returns the arguments for the backend: these, or others in their place
              handed(call, work)    returns the work for the process: this one, or another in its place
              returned(call, work)  is called when the operation is queued; most backends return before it is done
              has_future(call)      is called when the process takes the future, by which it may wait unseen
              waiting(call)         is called when a wait begins, in Work.wait or wait_tensor
              waited(call)          is called when that wait has ended

A GPU's direct reads and writes of another GPU's memory (symmetric memory, `symm_mem::*`) do not pass here.

The kernel calls `redispatch`, since a boxed call would hold the GIL, and then gloo's own threads would never finish.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

# c10d operator: (op, index of the inputs, index of the outputs, index of the group)
OPERATORS = {
    "allreduce_": ("all_reduce", 0, 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 0, 1),
    "broadcast_": ("broadcast", 0, 0, 1),
    "reduce_": ("reduce", 0, 0, 1),
    "_allgather_base_": ("all_gather", 1, 0, 2),
    "allgather_": ("all_gather", 1, 0, 2),
    "allgather_coalesced_": ("all_gather", 1, 0, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 0, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 0, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 0, 2),
    "alltoall_base_": ("all_to_all", 1, 0, 2),
    "alltoall_": ("all_to_all", 1, 0, 2),
    "gather_": ("gather", 1, 0, 2),
    "gather_into_tensor_": ("gather", 1, 0, 2),
    "scatter_": ("scatter", 1, 0, 2),
    "send": ("send", 0, None, 1),
    "recv_": ("recv", None, 0, 1),
    "recv_any_source_": ("recv", None, 0, 1),
    "barrier": ("barrier", None, None, 1),
    "monitored_barrier_": ("barrier", None, None, 1),
}
NO_COMMUNICATION = {"check_for_nan"}  # c10d operators that send nothing: this one only reads a tensor
ROOT = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "gather_into_tensor_": 3, "scatter_": 3}  # index of the root
WAITS = "wait_tensor", "wait_tensors"  # the waits of functional collectives, for one tensor or for a list
WORKS = dist.Work, FakeWork  # the classes that have a wait of their own
REDUCTION = {  # index of the reduction
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "reduce_": 2,
    "_reduce_scatter_base_": 3,
    "reduce_scatter_": 3,
    "reduce_scatter_tensor_coalesced_": 3,
}
OUTSTANDING = 64  # most works without a wait that are remembered; beyond that, the oldest is forgotten
HELD_HERE = 3  # the reference count of a work that only _outstanding holds, seen from the loop in _remember


class Call:
    """One collective or send/recv as this rank issued it.

    `inputs` and `outputs` are flat tuples of tensors. `peer` (send, recv) and `root` are ranks of the group, or None.
    `splits` and `output_splits` are the sizes of an uneven all_to_all. `reduction` is "sum", "max" or another name,
    and "" if nothing is reduced.
    """

    __slots__ = (
        "group",
        "inputs",
        "notes",
        "op",
        "output_splits",
        "outputs",
        "peer",
        "raw",
        "reduction",
        "root",
        "splits",
        "start_ns",
        "tag",
    )

    def __init__(self, raw: str, args: tuple[Any, ...]) -> None:
        self.op, inputs, outputs, group = OPERATORS[raw]
        self.raw = raw
        self.inputs = flatten(args[inputs]) if inputs is not None else ()
        if outputs == inputs:
            self.outputs = self.inputs
        else:
            self.outputs = flatten(args[outputs]) if outputs is not None else ()
        self.group = unbox(dist.ProcessGroup, args[group])
        self.peer = args[2] if raw in ("send", "recv_") else None
        self.tag = args[-1] if self.op in ("send", "recv") else 0
        self.root = args[ROOT[raw]] if raw in ROOT else None
        self.reduction = reduction(args[REDUCTION[raw]]) if raw in REDUCTION else ""
        self.output_splits, self.splits = args[3:5] if raw == "alltoall_base_" else ((), ())
        self.start_ns = time.monotonic_ns()
        self.notes: dict[str, Any] = {}  # a listener may leave something here for its own later events


class Listener:
    """A listener, which hears every call in the body of a with statement.

    Override the methods that you need, and keep them fast: they run inside every collective.
    """

    def __enter__(self) -> Self:
        listeners.append(self)
        return self

    def __exit__(self, *failure: object) -> None:
        listeners.remove(self)

    def issued(self, call: Call) -> None: ...

    def lent(self, call: Call, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    def handed(self, call: Call, work: dist.Work) -> dist.Work:
        return work

    def returned(self, call: Call, work: dist.Work | None) -> None: ...

    def has_future(self, call: Call) -> None: ...

    def waiting(self, call: Call) -> None: ...

    def waited(self, call: Call) -> None: ...


listeners: list[Listener] = []
_libraries: list[torch.library.Library] = []
_outstanding: dict[int, tuple[dist.Work, Call, int]] = {}  # id(work): (work, which keeps the id valid, call, thread)
_by_storage: dict[int, Call] = {}  # calls by their output's storage: functional collectives are waited for by tensor


def install() -> None:
    """Start to listen in this process; a second call does nothing."""
    if _libraries:
        return
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library = torch.library.Library("c10d", "IMPL")
    for raw in OPERATORS:
        if torch._C._dispatch_has_kernel(f"c10d::{raw}"):  # the operators differ a little between versions of torch
            operator = getattr(torch.ops.c10d, raw).default
            library.impl(raw, _collective_kernel(raw, operator, below), "BackendSelect", with_keyset=True)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    for raw in WAITS:
        if torch._C._dispatch_has_kernel(f"_c10d_functional::{raw}"):
            operator = getattr(torch.ops._c10d_functional, raw).default
            functional.impl(raw, _wait_kernel(operator, below), "BackendSelect", with_keyset=True)
    _libraries.extend([library, functional])
    for kind in WORKS:
        kind.wait = _watched_wait(kind.wait)
    dist.Work.get_future = _watched_future(dist.Work.get_future)


def uninstall() -> None:
    """Undo `install`."""
    if _libraries:
        for kind in WORKS:
            kind.wait = kind.wait.__wrapped__
        dist.Work.get_future = dist.Work.get_future.__wrapped__
    _libraries.clear()  # a library without references removes its kernels


def remove(listener: Listener) -> None:
    """Remove a listener; with the last one, forget everything that was stored for them."""
    listeners.remove(listener)
    if not listeners:
        _outstanding.clear()
        _by_storage.clear()


def let_go(call: Call) -> None:
    """Forget the work of a call that has been waited for at once, rather than at the next collective."""
    for key, (_, other, _) in list(_outstanding.items()):
        if other is call:
            _outstanding.pop(key, None)


def _collective_kernel(raw: str, operator: Any, below: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        if not listeners:
            return operator.redispatch(keyset & below, *args)
        call = Call(raw, args)
        for listener in listeners:
            listener.issued(call)
        for listener in listeners:
            args = listener.lent(call, args)
        answer = operator.redispatch(keyset & below, *args)
        work = theirs = find_work(answer)
        if work is not None:
            for listener in listeners:
                work = listener.handed(call, work)
            if work is not theirs:
                answer = (*answer[:-1], work.boxed()) if isinstance(answer, (tuple, list)) else work.boxed()
        for listener in listeners:
            listener.returned(call, work)
        if work is not None:
            _remember(work, call)
        # The listeners have seen these. A longer life here would keep tensors beyond their step, and a group beyond the
        # interpreter's end, where it aborts the process.
        call.inputs = call.outputs = ()
        call.group = None
        return answer

    return kernel


def _wait_kernel(operator: Any, below: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, tensors: Any) -> Any:
        calls = [_by_storage.pop(_storage_key(tensor), None) for tensor in flatten(tensors)]
        calls = list(dict.fromkeys(call for call in calls if call))
        for call in calls:
            for listener in listeners:
                listener.waiting(call)
        try:
            return operator.redispatch(keyset & below, tensors)
        finally:
            _tell_waited(calls)

    return kernel


def _watched_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def watched(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        _, call, _ = _outstanding.get(id(work), (None, None, None))
        for listener in listeners if call else ():
            listener.waiting(call)
        try:
            return wait(work, *args, **kwargs)
        finally:  # a timeout counts, too: the program may catch the exception and continue
            _outstanding.pop(id(work), None)
            _tell_waited([call] if call else [])

    return watched


def _watched_future(get_future: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_future)
    def watched(work: dist.Work) -> Any:
        _, call, _ = _outstanding.get(id(work), (None, None, None))
        for listener in listeners if call else ():
            listener.has_future(call)
        return get_future(work)

    return watched


def _tell_waited(calls: list[Call]) -> None:
    """Tell every listener, in order, that the waits have ended; raise the first exception after all were told."""
    failure = None
    for call, listener in itertools.product(calls, listeners):
        try:
            listener.waited(call)
        except BaseException as error:
            failure = failure or error
    if failure:
        raise failure


def _remember(work: dist.Work, call: Call) -> None:
    # A work keeps its tensors alive.  A work that nobody else holds will not be waited for in Python: it is forgotten.
    # Another thread may be here, too, hence list() and pop(), and its newest work may not have reached its owner yet.
    mine, entries = threading.get_ident(), list(_outstanding.items())
    for key in [key for key, (other, _, its) in entries if its == mine and sys.getrefcount(other) <= HELD_HERE]:
        _outstanding.pop(key, None)
    _outstanding[id(work)] = (work, call, mine)
    if len(_outstanding) > OUTSTANDING:
        _outstanding.pop(next(iter(list(_outstanding))), None)
    if call.raw in ("allreduce_", "alltoall_base_", "broadcast_") or call.raw.endswith("coalesced_"):
        for tensor in call.outputs:
            _by_storage[_storage_key(tensor)] = call
        while len(_by_storage) > OUTSTANDING:
            _by_storage.pop(next(iter(list(_by_storage))), None)


def _storage_key(tensor: torch.Tensor) -> int:
    has_one = tensor.device.type != "meta" and tensor.layout == torch.strided  # a sparse tensor has two storages
    return tensor.untyped_storage().data_ptr() if has_one else 0


def find_work(answer: Any) -> dist.Work | None:
    last = answer[-1] if isinstance(answer, (tuple, list)) and answer else answer
    return unbox(dist.Work, last) if isinstance(last, (torch.ScriptObject, dist.Work)) else None


def unbox(kind: Any, value: Any) -> Any:
    return kind.unbox(value) if isinstance(value, torch.ScriptObject) else value


def reduction(op: torch.ScriptObject | dist.ReduceOp) -> str:
    """Return the name of a reduction, which at this depth is a C++ object that gives only its number."""
    number = op._get_method("op")() if isinstance(op, torch.ScriptObject) else int(op.op)
    return dist.ReduceOp.RedOpType(number).name.lower()


def flatten(value: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(tensor for part in value for tensor in flatten(part))
