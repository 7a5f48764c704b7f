"""Every collective and send/recv of one rank, watched from outside through the tap.

    with CommunicationWatch() as watch: train()
    watch.tape                  # a dictionary for each event; labs.kit.record makes Events of them

An event has two kinds of bytes.  `bytes_in` and `bytes_out` are the sizes of the tensors handed to the call.
`sent` is logical: the least that this rank has to send, with c_i the size of the i-th piece when a tensor of
n elements is cut in N pieces as evenly as possible, the longer ones first (torch.tensor_split):

    all_reduce       2n - c_r - c_(r+1)        reduce_scatter, then all_gather, each around a ring
    reduce_scatter   all pieces but its own    all_gather   N - 1 times its piece
    all_to_all       all pieces but its own    send         its tensor
    broadcast, scatter    the root: one copy, or one piece, for each other rank; the others: nothing
    reduce, gather        each rank but the root: its tensor
    recv, barrier         nothing

Around a ring all of it goes to the next member of the group; `to` has the bytes by who gets them.  A tree sends as
much in all, from other ranks.  What a backend really puts on the wire may be more: gloo's reduce_scatter carries an
all_reduce.  The tensors are looked at as the call is issued, and not kept.

gloo's collectives say themselves when they end.  Where nobody says (gloo's reduce_scatter, a send, a recv, and all of
NCCL, which works on behind the host's back), an event ends when the rank has waited for it, or, where it never does,
when the call returned.  `waits` tells when the rank stood still for it in Work.wait or wait_tensor (on a busy machine
it hears of the end some time later); a wait inside C++ (the last one of torch's DDP) is not seen.

What another backend would make of the same calls is asked of labs.kit.nccl; for that an event has the name of its
communicator, the root, the tag, which batch it is a part of, and where its memory lies.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from labs.kit.watch import tap
from labs.kit.watch.frames import KIT, TORCH, is_machinery, learner_frame, short_name
from labs.kit.watch.storages import storages_of

BATCHES = itertools.count()
IN_PLACE = "all_gather", "reduce_scatter"  # where input and output may be parts of each other
ONE_SIDED = "broadcast", "reduce"  # of what one tensor does: the root of the first only reads it, others of the second
TELLS_ITS_END = {
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
}
PIPELINING = os.path.join(TORCH, "distributed", "pipelining", "")
OPERATOR = os.path.join(TORCH, "_ops.py")
IN_PYTHON = os.path.join(TORCH, "distributed", "distributed_c10d.py"), OPERATOR
FAR = 48  # bits: no storage is longer than the way to the next one, where it has no address
Extent = tuple[int, int]  # addresses of memory: the first byte, and the one after the last
SETTING_UP = "_initialize_stage", "_initialize_stages"  # there: what a schedule does before its first step


@dataclass(frozen=True)
class Event:
    """One collective, send or recv of one rank."""

    rank: int
    op: str  # "all_reduce", "send", ...
    dtype: str  # "float32"; "" where there is no tensor
    bytes_in: int
    bytes_out: int
    group: str
    ranks: tuple[int, ...]  # the group's members, as ranks of the job
    peer: int | None  # of a send or recv, as a rank of the job
    start: float  # s on the job's clock
    end: float
    waits: tuple[tuple[float, float], ...]  # s on the job's clock: from when to when the rank stood still for it
    sent: int  # logical bytes
    issuer: str  # "ddp.py:57 ready": the innermost line outside torch and this kit, or "torch (C++)"
    step: int | None = None  # None outside of any step, and for `meta`
    to: dict[int, int] = field(default_factory=dict, hash=False)  # `sent` by whom it goes to, as a rank of the job
    part: tuple[int, int] | None = None  # of a send: the byte of the memory where its tensor begins, of how many
    meta: bool = False  # tells of shapes to come: PyTorch's pipelines send a few such messages as they begin
    communicator: str = ""  # the name of the group that no other one of this rank has
    root: int | None = None  # as a rank of the job
    reduction: str = ""  # "sum", "max", ...; "" where nothing is reduced
    tag: int = 0  # of a send or recv
    batch: int | None = None  # of a send or recv: the number of the batch_isend_irecv that has issued it
    takes: dict[int, int] = field(default_factory=dict, hash=False)  # of an all_to_all: bytes by whom they come from
    reads: tuple[Extent, ...] = ()  # memory, empty where a tensor has none
    writes: tuple[Extent, ...] = ()
    overwritten: bool = False  # what it sends, or receives, was written to before the rank waited for it
    read_at: str = ""  # the line that read what it receives before the rank waited for it (labs.kit.watch.touches)
    unseen: bool = False  # it is waited for where nobody sees that: in C++, which has issued it, or by its future

    @property
    def waited(self) -> float:
        """s."""
        return sum(end - start for start, end in self.waits)


class CommunicationWatch(tap.Listener):
    """Notes the calls of this process while it is entered; `tape` is small and picklable."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.under_way: list[dict[str, Any]] = []  # those that the rank has not waited for, in order
        self.batch = Batch()

    @property
    def tape(self) -> list[dict[str, Any]]:
        """One dictionary for each event, by the fields of Event; times in nanoseconds of the monotonic clock."""
        rows = [{"end": row["returned"]} | row for row in self.rows if "returned" in row]
        unfinished = ("returned", "since", "versions")  # a wait is still open where nobody waited to the end
        return [{key: value for key, value in row.items() if key not in unfinished} for row in rows]

    def __enter__(self) -> CommunicationWatch:
        tap.install()
        tap.listeners.append(self)
        # Called once by each batch_isend_irecv, however it was imported; on gloo nothing else tells of it.
        self.check = distributed_c10d._check_p2p_op_list
        distributed_c10d._check_p2p_op_list = self.batch.begun_by(self.check)
        return self

    def __exit__(self, *failure: Any) -> None:
        distributed_c10d._check_p2p_op_list = self.check
        tap.remove(self)

    def issued(self, call: tap.Call) -> None:
        call.notes[self] = row = describe(call)
        frame = sys._getframe(1)
        row["issuer"], row["meta"] = issuer(frame), sets_up_a_pipeline(frame)
        row["batch"] = self.batch.next() if call.op in ("send", "recv") else None
        row["unseen"] = is_by_cpp(frame)
        row["versions"] = versions_of(call)
        row["waits"] = []
        row["start"] = time.monotonic_ns()
        self.rows.append(row)

    def returned(self, call: tap.Call, work: dist.Work | None) -> None:
        row = call.notes[self]
        row["returned"] = time.monotonic_ns()
        if work is not None and not row["unseen"]:
            self.under_way = [*self.under_way, row][-tap.OUTSTANDING :]
        if work is not None and call.op in TELLS_ITS_END and dist.get_backend(call.group) == "gloo":
            # On one of gloo's threads, before those who wait are woken.
            work.get_future().add_done_callback(lambda _: row.setdefault("end", time.monotonic_ns()))

    def has_future(self, call: tap.Call) -> None:
        if self in call.notes:
            row = call.notes[self]
            row["unseen"] = True
            self.under_way = [other for other in self.under_way if other is not row]

    def waiting(self, call: tap.Call) -> None:
        if self in call.notes:
            row = call.notes[self]
            row["since"] = time.monotonic_ns()
            # What a backend itself does in a wait (gloo divides for an average) is no early touch.
            self.under_way = [other for other in self.under_way if not is_done_with(other, row)]

    def waited(self, call: tap.Call) -> None:
        if self in call.notes:
            row, now = call.notes[self], time.monotonic_ns()
            row["waits"].append((row.pop("since"), now))
            row.setdefault("end", now)
            if versions := row.pop("versions", ()):
                row["overwritten"] = any(now._version != then for it, then in versions if (now := it()) is not None)

    def touched(self, memory: Extent, writes: bool, frame: FrameType) -> None:
        """An operator of the program reads this, or writes to it."""
        for row in self.under_way:
            if overlap(memory, row["writes"] + row["reads"] * writes):
                row |= {"overwritten": True} if writes else {"read_at": issuer(frame)}


def is_done_with(row: dict[str, Any], waited: dict[str, Any]) -> bool:
    """A communicator runs its calls in order; a single message may have one of its pair."""
    if waited["batch"] is not None and row["batch"] == waited["batch"]:
        return True
    keys = [(each["communicator"], each["peer"] if each["batch"] is None else None) for each in (row, waited)]
    return keys[0] == keys[1] and row["start"] <= waited["start"]


def overlap(memory: Extent, others: Iterable[Extent]) -> bool:
    return any(memory[0] < until and start < memory[1] for start, until in others)


class Batch(threading.local):
    """Which batch_isend_irecv the next send or recv of this thread is a part of."""

    number, left = -1, 0

    def begun_by(self, check: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """The same check of a batch's messages, which notes that so many come now."""

        def noted(messages: list[Any]) -> None:
            check(messages)
            self.number, self.left = next(BATCHES), len(messages)

        return noted

    def next(self) -> int | None:
        if not self.left:
            return None
        self.left -= 1
        return self.number


def versions_of(call: tap.Call) -> list[tuple[Callable[[], torch.Tensor | None], int]]:
    """Each tensor, not kept, and how often it has been written to, where that is told.

    An inference tensor does not count it, and a slice counts what is written beside it.  An all_gather counts itself,
    for its output, of which its input may be a part; likewise a reduce_scatter, whose output may be a part of its
    input.  So does gloo where it divides for an average, and where it copies back what was coalesced.
    """
    if call.reduction == "avg" or "coalesced" in call.raw:
        return []
    written = {storage._cdata for x in call.outputs for storage in storages_of(x)} if call.op in IN_PLACE else ()
    tensors = (x for x in call.inputs or call.outputs if not x.is_inference() and is_whole(x))
    return [(ref(x), x._version) for x in tensors if not any(storage._cdata in written for storage in storages_of(x))]


def is_whole(x: torch.Tensor) -> bool:
    return sum(storage.nbytes() for storage in storages_of(x)) <= x.numel() * x.element_size()


def describe(call: tap.Call) -> dict[str, Any]:
    tensors = call.inputs or call.outputs
    ranks, is_root = tuple(dist.get_process_group_ranks(call.group)), call.group.rank() == call.root
    of_the_job = dict(enumerate(ranks))  # a message may be for a rank that does not exist: the launcher tells of it
    to = {of_the_job.get(member, member): size for member, size in destinations(call).items() if size}
    return {
        "rank": dist.get_rank(),
        "op": call.op,
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "bytes_in": nbytes(call.inputs),
        "bytes_out": nbytes(call.outputs),
        "group": call.group.group_desc if call.group.group_desc != "undefined" else call.group.group_name,
        "ranks": ranks,
        "peer": of_the_job.get(call.peer, call.peer),
        "sent": sum(to.values()),
        "to": to,
        "part": part(*call.inputs) if call.op == "send" else None,
        "communicator": call.group.group_name,
        "root": of_the_job.get(call.root, call.root),
        "reduction": call.reduction,
        "tag": call.tag,
        "takes": {ranks[member]: size for member, size in sources(call).items() if size},
        "reads": () if call.op == "broadcast" and not is_root else extents(call.inputs),
        "writes": () if call.op in ONE_SIDED and is_root == (call.op == "broadcast") else extents(call.outputs),
    }


def extents(tensors: Iterable[torch.Tensor]) -> tuple[Extent, ...]:
    """Where they lie, from the first byte to the last, with what may be in between."""
    return tuple(filter(None, map(extent, tensors)))


def extent(tensor: torch.Tensor) -> Extent | None:
    if tensor.layout != torch.strided or not tensor.numel() or not (storages := storages_of(tensor)):
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if isinstance(tensor, FakeTensor):  # of a dry run: without an address, but not without memory
        begin = (storages[0]._cdata << FAR) + tensor.storage_offset() * tensor.element_size()
    else:
        begin = tensor.data_ptr()
    return (begin, begin + (last + 1) * tensor.element_size()) if begin else None


def part(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.element_size() * tensor.storage_offset(), tensor.untyped_storage().nbytes()


def destinations(call: tap.Call) -> dict[int, int]:
    """Bytes that this rank has to send for this call, as the table at the head of this file has it, by member."""
    ranks, rank = call.group.size(), call.group.rank()
    given, received = nbytes(call.inputs), nbytes(call.outputs)
    following = (rank + 1) % ranks
    others = [other for other in range(ranks) if other != rank]
    match call.op:
        case "all_reduce":
            pieces = ((t, piece(t, rank, ranks) + piece(t, following, ranks)) for t in call.inputs)
            return {following: sum((2 * t.numel() - own) * t.element_size() for t, own in pieces)}
        case "reduce_scatter":
            return {following: given - received}
        case "all_gather":
            return {following: (ranks - 1) * given}
        case "all_to_all":
            return {other: cut(call, call.inputs, call.splits, other) for other in others}
        case "broadcast" if rank == call.root:
            return dict.fromkeys(others, given)
        case "scatter" if rank == call.root:
            return {other: nbytes(call.inputs[other : other + 1]) for other in others}
        case "reduce" | "gather" if rank != call.root:
            return {call.root: given}
        case "send":
            return {call.peer: given}
    return {}


def piece(tensor: torch.Tensor, index: int, pieces: int) -> int:
    """Elements of a piece, as torch.tensor_split cuts."""
    size, longer = divmod(tensor.numel(), pieces)
    return size + (index < longer)


def sources(call: tap.Call) -> dict[int, int]:
    """Bytes of an all_to_all that this rank takes, by member."""
    if call.op != "all_to_all":
        return {}
    ranks, rank = call.group.size(), call.group.rank()
    return {other: cut(call, call.outputs, call.output_splits, other) for other in range(ranks) if other != rank}


def cut(call: tap.Call, tensors: tuple[torch.Tensor, ...], splits: Sequence[int], member: int) -> int:
    """Bytes of an all_to_all that are for a member, or from it: a tensor of a list, or rows."""
    if call.raw == "alltoall_":
        return nbytes(tensors[member : member + 1])
    rows = tensors[0].shape[0]
    its = splits[member] if splits else rows // call.group.size()
    return its * nbytes(tensors) // max(1, rows)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # a sparse one has no .nbytes


def issuer(frame: FrameType | None) -> str:
    """Who issued the call: the innermost line outside torch and this kit.

    Autograd's engine is C++: what stands right below its Python frame was called from there (DDP's reducer).
    """
    frame = program_frame(frame)
    if frame is None or frame.f_code.co_name == "_engine_run_backward" or not (line := learner_frame(frame)):
        return "torch (C++)"
    return f"{short_name(line.f_code.co_filename)}:{line.f_lineno} {line.f_code.co_name}"


def is_by_cpp(frame: FrameType | None) -> bool:
    """Whether torch's Python has called something of C++ that issued it, and not a collective as such."""
    frame = program_frame(frame)
    return frame is None or (frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_filename not in IN_PYTHON)


def program_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost one outside this kit, its dispatch modes, and what they hand an operator to (a dry run's fakes)."""
    inner = frame
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_code.co_filename.startswith(KIT):
            inner = frame
        frame = frame.f_back
    while inner is not None and inner.f_code.co_filename.startswith(KIT):
        inner = inner.f_back
    return inner


def sets_up_a_pipeline(frame: FrameType | None) -> bool:
    """Whether PyTorch's pipelining tells its neighbours what shapes will come."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_name in SETTING_UP and frame.f_code.co_filename.startswith(PIPELINING):
            return True
        frame = frame.f_back
    return False
