"""A recorder of every collective, send and recv that one rank issues, without a line in the recorded code.

    with CommunicationWatch() as watch: train()
    watch.tape                  # a dictionary for each event; labs.kit.record turns each into an Event

An event has two kinds of bytes.  `bytes_in` and `bytes_out` are the sizes of the input and output tensors of the call.
`sent` is logical: it is the number of bytes that rank r of N must send at least.  A tensor of n elements is cut into N
pieces as evenly as possible, the longer pieces first (torch.tensor_split), and c_i is the size of the i-th piece:

    all_reduce       2n - c_r - c_(r+1)        a reduce_scatter, then an all_gather, each around a ring
    reduce_scatter   all pieces but its own    all_gather   N - 1 times its piece
    all_to_all       all pieces but its own    send         its tensor
    broadcast, scatter    the root: one copy, or one piece, for each other rank; the others: nothing
    reduce, gather        each rank but the root: its tensor
    recv, barrier         nothing

In a ring, each rank sends everything to the next member of the group; `to` has the bytes for each receiver.  A tree
algorithm sends as many bytes in all, but from other ranks.  A backend may really send more bytes: gloo runs a
reduce_scatter as an all_reduce.  The recorder reads the sizes of the tensors when a call is issued, and keeps no tensor
alive.

gloo reports the end of every collective but a reduce_scatter, and no end of a send or recv.  NCCL, which works
asynchronously to the host, reports no end at all.  A call whose end is not reported ends, in the recording, when the
rank has waited for the call, or, without a wait, when the call returned.  `waits` has the times in which the rank was
blocked in Work.wait or wait_tensor; on a busy machine, a rank wakes up some time after the call has ended.  A wait
inside C++, such as the last wait of torch's DDP, is not recorded.

labs.kit.nccl judges how NCCL would run the calls that were recorded on gloo.  An event therefore has the name of its
communicator, the root, the tag, the number of its batch_isend_irecv, and the addresses of its memory.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from labs.kit.watch import c10d_tap
from labs.kit.watch.stack_frames import KIT, TORCH, is_machinery, learner_frame, short_name
from labs.kit.watch.storages import storages_of

BATCHES = itertools.count()
IN_PLACE = "all_gather", "reduce_scatter"  # the input may be a part of the output, or the output a part of the input
ONE_SIDED = "broadcast", "reduce"  # some ranks only read their tensor: the root of a broadcast, all others of a reduce
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
FAR = 48  # bits: a dry run makes up addresses of storages that are 2^48 bytes apart, more than any storage has
Extent = tuple[int, int]  # a range of memory: the address of its first byte, and the address after its last byte
SETTING_UP = "_initialize_stage", "_initialize_stages"  # functions that run before a schedule's first step


@dataclass(frozen=True)
class Event:
    """One recorded collective, send or recv of one rank."""

    rank: int
    op: str  # "all_reduce", "send", ...
    dtype: str  # "float32"; "" if there is no tensor
    bytes_in: int
    bytes_out: int
    group: str
    ranks: tuple[int, ...]  # the group's members, as ranks of the job
    peer: int | None  # the other rank of a send or recv, as a rank of the job
    start: float  # seconds on the job's clock
    end: float
    waits: tuple[tuple[float, float], ...]  # (start, end) of each wait for the call, in seconds on the job's clock
    sent: int  # logical bytes (see above), whatever the backend really sends
    issuer: str  # "ddp.py:57 ready": the innermost line outside torch and this kit, or "torch (C++)"
    step: int | None = None  # the number of the step; None outside of any step, and for `meta`
    to: dict[int, int] = field(default_factory=dict, hash=False)  # `sent` for each receiver, as a rank of the job
    part: tuple[int, int] | None = None  # (first byte of a send's tensor in its storage, bytes of the storage)
    meta: bool = False  # whether this is a message about shapes; PyTorch's pipelines send a few before their first step
    communicator: str = ""  # the name of the group, which no other group of this rank has
    root: int | None = None  # a rank of the job
    reduction: str = ""  # "sum", "max", ...; "" if nothing is reduced
    tag: int = 0  # the tag of a send or recv
    batch: int | None = None  # the number of the batch_isend_irecv that issued the call, if one did
    takes: dict[int, int] = field(default_factory=dict, hash=False)  # an all_to_all's bytes from each sender
    reads: tuple[Extent, ...] = ()  # the memory that the call reads; empty for a tensor without memory
    writes: tuple[Extent, ...] = ()  # the memory that the call writes
    overwritten: bool = False  # whether the program wrote to the call's tensors before the rank waited for the call
    read_at: str = ""  # the line that read the call's output before the rank waited (labs.kit.watch.early_touches)
    unseen: bool = False  # whether a wait for the call cannot be recorded: C++ issued it, or the program uses a future

    @property
    def waited(self) -> float:
        """Return the seconds that the rank waited for the call."""
        return sum(end - start for start, end in self.waits)


class CommunicationWatch(c10d_tap.Listener):
    """A recorder of this process' collectives, sends and recvs in the body of a with statement.

    The recording, `tape`, is small and picklable.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.in_flight: list[dict[str, Any]] = []  # calls that the rank has not waited for yet
        self.batch = Batch()

    @property
    def tape(self) -> list[dict[str, Any]]:
        """Return the recorded events as dictionaries of Event's fields, with times of time.monotonic_ns."""
        rows = [{"end": row["returned"]} | row for row in self.rows if "returned" in row]
        unfinished = ("returned", "since", "versions")  # "since" is still here if a wait has not ended
        return [{key: value for key, value in row.items() if key not in unfinished} for row in rows]

    def __enter__(self) -> CommunicationWatch:
        c10d_tap.install()
        c10d_tap.listeners.append(self)
        # Every batch_isend_irecv calls this check once, however a program imported it; gloo shows batches nowhere else.
        self.check = distributed_c10d._check_p2p_op_list
        distributed_c10d._check_p2p_op_list = self.batch.counting(self.check)
        return self

    def __exit__(self, *failure: Any) -> None:
        distributed_c10d._check_p2p_op_list = self.check
        c10d_tap.remove(self)

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        call.notes[self] = row = describe(call)
        frame = sys._getframe(1)
        row["issuer"], row["meta"] = issuer(frame), sets_up_a_pipeline(frame)
        row["batch"] = self.batch.next() if call.op in ("send", "recv") else None
        row["unseen"] = is_by_cpp(frame)
        row["versions"] = versions_of(call)
        row["waits"] = []
        row["start"] = time.monotonic_ns()
        self.rows.append(row)

    def returned(self, call: c10d_tap.IssuedCall, work: dist.Work | None) -> None:
        row = call.notes[self]
        row["returned"] = time.monotonic_ns()
        if work is not None and not row["unseen"]:
            self.in_flight = [*self.in_flight, row][-c10d_tap.OUTSTANDING :]
        if work is not None and call.op in TELLS_ITS_END and dist.get_backend(call.group) == "gloo":
            # The callback runs on one of gloo's threads, before gloo wakes the threads that wait for the collective.
            work.get_future().add_done_callback(lambda _: row.setdefault("end", time.monotonic_ns()))

    def has_future(self, call: c10d_tap.IssuedCall) -> None:
        if self in call.notes:
            row = call.notes[self]
            row["unseen"] = True
            self.in_flight = [other for other in self.in_flight if other is not row]

    def waiting(self, call: c10d_tap.IssuedCall) -> None:
        if self in call.notes:
            row = call.notes[self]
            row["since"] = time.monotonic_ns()
            # The backend itself writes to the output in a wait, as gloo divides for an average: that is no early touch.
            self.in_flight = [other for other in self.in_flight if not is_done_with(other, row)]

    def waited(self, call: c10d_tap.IssuedCall) -> None:
        if self in call.notes:
            row, now = call.notes[self], time.monotonic_ns()
            row["waits"].append((row.pop("since"), now))
            row.setdefault("end", now)
            if versions := row.pop("versions", ()):
                row["overwritten"] = any(now._version != then for it, then in versions if (now := it()) is not None)

    def touched(self, memory: Extent, writes: bool, frame: FrameType) -> None:
        """Note that an operator of the program reads or writes memory that a call in flight may use."""
        for row in self.in_flight:
            if overlap(memory, row["writes"] + row["reads"] * writes):
                row |= {"overwritten": True} if writes else {"read_at": issuer(frame)}


def is_done_with(row: dict[str, Any], waited: dict[str, Any]) -> bool:
    """Return whether the call `row` has ended when the call `waited` has.

    The call `row` has ended if both calls are in one batch, or if `row` is an earlier call of the same communicator,
    since a communicator runs its calls in order.  A send or recv outside a batch may have a communicator of its two
    ranks.
    """
    if waited["batch"] is not None and row["batch"] == waited["batch"]:
        return True
    keys = [(each["communicator"], each["peer"] if each["batch"] is None else None) for each in (row, waited)]
    return keys[0] == keys[1] and row["start"] <= waited["start"]


def overlap(memory: Extent, others: Iterable[Extent]) -> bool:
    return any(memory[0] < until and start < memory[1] for start, until in others)


class Batch(threading.local):
    """The number of the batch_isend_irecv that issues the next send or recv of this thread."""

    number, left = -1, 0

    def counting(self, check: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """Wrap PyTorch's check of a batch_isend_irecv, so that this object notes how many messages the batch has."""

        def noted(messages: list[Any]) -> None:
            check(messages)
            self.number, self.left = next(BATCHES), len(messages)

        return noted

    def next(self) -> int | None:
        if not self.left:
            return None
        self.left -= 1
        return self.number


def versions_of(call: c10d_tap.IssuedCall) -> list[tuple[Callable[[], torch.Tensor | None], int]]:
    """Return (weak reference, version) of each tensor of a call whose version counter shows only the program's writes.

    An inference tensor has no version counter, and a slice shares the counter of the memory beside it.  An all_gather's
    write to its output raises the counter of its input if the input is a part of the output; the same holds for a
    reduce_scatter whose output is a part of its input.  gloo's writes also raise the counter when gloo divides for an
    average or copies coalesced tensors back.
    """
    if call.reduction == "avg" or "coalesced" in call.raw:
        return []
    written = {storage._cdata for x in call.outputs for storage in storages_of(x)} if call.op in IN_PLACE else ()
    tensors = (x for x in call.inputs or call.outputs if not x.is_inference() and is_whole(x))
    return [(ref(x), x._version) for x in tensors if not any(storage._cdata in written for storage in storages_of(x))]


def is_whole(x: torch.Tensor) -> bool:
    return sum(storage.nbytes() for storage in storages_of(x)) <= x.numel() * x.element_size()


def describe(call: c10d_tap.IssuedCall) -> dict[str, Any]:
    tensors = call.inputs or call.outputs
    ranks, is_root = shared(tuple(dist.get_process_group_ranks(call.group))), call.group.rank() == call.root

    def of_the_job(member: int | None) -> int | None:
        """Return the rank in the job of a group's member; a number without a member, which is an error, is kept."""
        return ranks[member] if member is not None and 0 <= member < len(ranks) else member

    to = by_rank(tuple((of_the_job(member), size) for member, size in destinations(call).items() if size))
    return {
        "rank": dist.get_rank(),
        "op": call.op,
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "bytes_in": nbytes(call.inputs),
        "bytes_out": nbytes(call.outputs),
        "group": call.group.group_desc if call.group.group_desc != "undefined" else call.group.group_name,
        "ranks": ranks,
        "peer": of_the_job(call.peer),
        "sent": sum(to.values()),
        "to": to,
        "part": part(*call.inputs) if call.op == "send" else None,
        "communicator": call.group.group_name,
        "root": of_the_job(call.root),
        "reduction": call.reduction,
        "tag": call.tag,
        "takes": by_rank(tuple((ranks[member], size) for member, size in sources(call).items() if size)),
        "reads": () if call.op == "broadcast" and not is_root else extents(call.inputs),
        "writes": () if call.op in ONE_SIDED and is_root == (call.op == "broadcast") else extents(call.outputs),
    }


@lru_cache(8)
def shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return one tuple object for all equal tuples of ranks: each event has one, of thousands of ranks in a dry run."""
    return ranks


@lru_cache(8)
def by_rank(sizes: tuple[tuple[int, int], ...]) -> dict[int, int]:
    """Return one dictionary object for all equal dictionaries {rank: bytes}; no event writes to its dictionary."""
    return dict(sizes)


def extents(tensors: Iterable[torch.Tensor]) -> tuple[Extent, ...]:
    """Return the range of memory of each tensor, from its first byte to its last, gaps between elements included."""
    return tuple(filter(None, map(extent, tensors)))


def extent(tensor: torch.Tensor) -> Extent | None:
    if tensor.layout != torch.strided or not tensor.numel() or not (storages := storages_of(tensor)):
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if isinstance(tensor, FakeTensor):  # a dry run's tensor has no address, so one is made up
        begin = (storages[0]._cdata << FAR) + tensor.storage_offset() * tensor.element_size()
    else:
        begin = tensor.data_ptr()
    return (begin, begin + (last + 1) * tensor.element_size()) if begin else None


def part(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.element_size() * tensor.storage_offset(), tensor.untyped_storage().nbytes()


def destinations(call: c10d_tap.IssuedCall) -> dict[int, int]:
    """Return {member of the group: bytes that this rank must send to it}, by the table at the head of this file."""
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
            return without(rank, cuts(call, call.inputs, call.splits))
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
    """Return the number of elements of the piece `index` if torch.tensor_split cuts a tensor into `pieces` pieces."""
    size, longer = divmod(tensor.numel(), pieces)
    return size + (index < longer)


def sources(call: c10d_tap.IssuedCall) -> dict[int, int]:
    """Return {member: bytes that this rank receives from it} for an all_to_all, and {} for any other call."""
    if call.op != "all_to_all":
        return {}
    return without(call.group.rank(), cuts(call, call.outputs, call.output_splits))


def without(rank: int, sizes: list[int]) -> dict[int, int]:
    """Return {member: size} for all members of a group but this rank."""
    return {member: size for member, size in enumerate(sizes) if member != rank}


def cuts(call: c10d_tap.IssuedCall, tensors: tuple[torch.Tensor, ...], splits: Sequence[int]) -> list[int]:
    """Return the bytes that an all_to_all sends to each member, or receives from it.

    tensors: one tensor per member, or a single tensor whose rows are split.
    splits: the rows for each member; equal numbers of rows if empty.
    """
    if call.raw == "alltoall_":
        return [nbytes([tensor]) for tensor in tensors]
    rows, size, ranks = tensors[0].shape[0], nbytes(tensors), call.group.size()
    if splits:
        return [its * size // max(1, rows) for its in splits]
    return [rows // ranks * size // max(1, rows)] * ranks


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # a sparse tensor has no .nbytes


def issuer(frame: FrameType | None) -> str:
    """Return the line that issued a call: the innermost line outside torch and this kit, or "torch (C++)".

    A call directly below the Python frame of autograd's engine, which is C++, was issued in C++, as by DDP's reducer.
    """
    frame = program_frame(frame)
    if frame is None or frame.f_code.co_name == "_engine_run_backward" or not (line := learner_frame(frame)):
        return "torch (C++)"
    return f"{short_name(line.f_code.co_filename)}:{line.f_lineno} {line.f_code.co_name}"


def is_by_cpp(frame: FrameType | None) -> bool:
    """Return whether C++ issued a call: the innermost frame is torch's, but not of torch's code for collectives."""
    frame = program_frame(frame)
    return frame is None or (frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_filename not in IN_PYTHON)


def program_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program: a frame that is not in this kit, nor below the kit's dispatch modes.

    A dispatch mode of this kit, such as the dry run's, calls operators for the program.
    """
    inner = frame
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_code.co_filename.startswith(KIT):
            inner = frame
        frame = frame.f_back
    while inner is not None and inner.f_code.co_filename.startswith(KIT):
        inner = inner.f_back
    return inner


def sets_up_a_pipeline(frame: FrameType | None) -> bool:
    """Return whether torch.distributed.pipelining issued a call to tell other stages the shapes of later messages."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        if frame.f_code.co_name in SETTING_UP and frame.f_code.co_filename.startswith(PIPELINING):
            return True
        frame = frame.f_back
    return False
