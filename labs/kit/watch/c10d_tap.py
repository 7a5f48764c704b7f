"""A tap on all communication of a process: listeners are called for every collective, send, recv and wait.

Every collective, send and recv runs one of PyTorch's `c10d::*` operators, whether this course's code, torch's DDP in
C++, FSDP2, DTensor or pipelining issues it.  `install` adds a kernel for the dispatch key BackendSelect, just above the
backends.  The kernel shows each call to the listeners and passes it on to the backend.

    call      the op, tensors, group, and peer or root of a collective, send or recv
    listener  issued(call)          is called before the operator runs
              lent(call, args)      returns the arguments for the backend: `args`, or others in their place
              handed(call, work)    returns the work for the program: `work`, or another in its place
              returned(call, work)  is called when the call is queued; most backends queue it and run it later
              has_future(call)      is called when the program takes the work's future: its wait may not be seen
              waiting(call)         is called when a wait begins, in Work.wait or wait_tensor
              waited(call)          is called when that wait has ended

A GPU's direct reads and writes of another GPU's memory (symmetric memory, `symm_mem::*`) are not seen.

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

# Operators of older versions do not name their reduction.
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
    raise ImportError(
        f"labs.kit, which starts and watches the ranks, needs PyTorch 2.10 or newer, and this is {torch.__version__}: "
        "`make learn` installs 2.13; the algorithms, such as labs.fsdp, need no labs.kit"
    )

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
NO_COMMUNICATION = {"check_for_nan"}  # c10d operators that send nothing: check_for_nan only reads a tensor
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
OUTSTANDING = 64  # the most works without a wait that are remembered; beyond 64, the oldest is forgotten
HELD_HERE = 3  # the reference count that the loop in _remember sees for a work that only _outstanding holds


class IssuedCall:
    """One collective, send or recv as this rank issued it.

    inputs, outputs: flat tuples of tensors.
    peer, root: ranks of the group, or None; only a send or recv has a peer.
    splits, output_splits: the sizes of an uneven all_to_all.
    reduction: "sum", "max" or another name; "" if nothing is reduced.
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
        self.notes: dict[str, Any] = {}  # a listener may store values here for its own later methods


class Listener:
    """A listener whose methods are called for every collective, send and recv in the body of a with statement.

    Override the methods that you need, and keep them fast: they run inside every call.
    """

    def __enter__(self) -> Self:
        listeners.append(self)
        return self

    def __exit__(self, *failure: object) -> None:
        listeners.remove(self)

    def issued(self, call: IssuedCall) -> None: ...

    def lent(self, call: IssuedCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    def handed(self, call: IssuedCall, work: dist.Work) -> dist.Work:
        return work

    def returned(self, call: IssuedCall, work: dist.Work | None) -> None: ...

    def has_future(self, call: IssuedCall) -> None: ...

    def waiting(self, call: IssuedCall) -> None: ...

    def waited(self, call: IssuedCall) -> None: ...


listeners: list[Listener] = []
_libraries: list[torch.library.Library] = []
_outstanding: dict[int, tuple[dist.Work, IssuedCall, int]] = {}  # {id(work): (work, call, thread)}
_by_storage: dict[int, IssuedCall] = {}  # {storage of an output: call}: wait_tensor gives only the tensor


def install() -> None:
    """Install the tap in this process, so that listeners are called; a second `install` does nothing."""
    if _libraries:
        return
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library = torch.library.Library("c10d", "IMPL")
    for raw in OPERATORS:
        if torch._C._dispatch_has_kernel(f"c10d::{raw}"):  # versions of torch differ a little in their operators
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
    """Remove the tap that `install` has installed."""
    if _libraries:
        for kind in WORKS:
            kind.wait = kind.wait.__wrapped__
        dist.Work.get_future = dist.Work.get_future.__wrapped__
    _libraries.clear()  # a library without references removes its kernels


def remove(listener: Listener) -> None:
    """Remove a listener; after the last one, forget all calls that were stored for listeners."""
    listeners.remove(listener)
    if not listeners:
        _outstanding.clear()
        _by_storage.clear()


def let_go(call: IssuedCall) -> None:
    """Forget the work of a call now, instead of at the next collective, since the program has waited for it."""
    for key, (_, other, _) in list(_outstanding.items()):
        if other is call:
            _outstanding.pop(key, None)


def _collective_kernel(raw: str, operator: Any, below: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        if not listeners:
            return operator.redispatch(keyset & below, *args)
        call = IssuedCall(raw, args)
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
        # The call is kept until the program has waited for it.  Without this, it would keep tensors alive beyond their
        # step, and a group beyond the interpreter's end, where a group aborts the process.
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


def _tell_waited(calls: list[IssuedCall]) -> None:
    """Call every listener's `waited` for these calls, in order, and then raise the first exception, if any."""
    failure = None
    for call, listener in itertools.product(calls, listeners):
        try:
            listener.waited(call)
        except BaseException as error:
            failure = failure or error
    if failure:
        raise failure


def _remember(work: dist.Work, call: IssuedCall) -> None:
    # A work keeps its tensors alive.  A work that only _outstanding holds cannot be waited for in Python, so forget it.
    # Another thread may run this function at the same time, hence list() and pop().  The program may not hold that
    # thread's newest work yet, so forget only works of this thread.
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
    """Return the name of a reduction, such as "sum"; a c10d operator gets it as a C++ object that has only a number."""
    number = op._get_method("op")() if isinstance(op, torch.ScriptObject) else int(op.op)
    return dist.ReduceOp.RedOpType(number).name.lower()


def flatten(value: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(tensor for part in value for tensor in flatten(part))
