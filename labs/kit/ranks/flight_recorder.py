"""A light flight recorder of every collective a rank issues, in memory that the caller can read while the rank hangs.

    FlightRecorder   runs in the rank: a listener on the tap that writes fixed-size records into a shared file mapping
    Reader           runs in the caller: reads these records, even while the rank is stuck in C

The shared mapping has three parts:

    header    the bytes of text, the number of records, the record that the rank waits for, and whether the function
              has ended
    records   a ring of the newest records: group, number within the group's calls, the call, its line, its time
    texts     each description once, one per line ("all_reduce float32[1024]", "cell line 3: dist.all_reduce(x)")

The recorder is always on.  Recording costs one walk up the stack and one record for each collective; `make bench`
measures it.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import re
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labs.kit.watch import c10d_tap
from labs.kit.watch.stack_frames import LABS, learner_frame, source_line

# The header has five numbers: bytes of text; number of records; 1 + the record that the rank waits for and without
# which the rank cannot continue, or 0; 1 + the record that any thread waits for, or 0; 1 if the function has ended.
HEADER = struct.Struct("<QQQQQ")
TEXT_BYTES, RECORDS, WAITING, WAITING_ANYWHERE, OVER = range(0, HEADER.size, 8)  # offsets in the header
RECORD = struct.Struct("<IIIIiIqd")  # group, place, what, site, peer, match, bytes, time
RING = 1 << 15
MARGIN = 64  # the oldest records of a full ring are not read, since the rank may overwrite them meanwhile
TEXT = 512 * 1024
GROUP_TEXT = 64 * 1024  # the bytes of TEXT that are reserved for the names of groups
RECORDS_AT = HEADER.size
TEXT_AT = RECORDS_AT + RING * RECORD.size
SIZE = TEXT_AT + TEXT

LONGEST = 1 << 15  # the most bytes of one text, enough for the name of a group, which lists all its ranks
MOST_FORMS = 4096
NEW_GROUP = "new_group"
ANY_SOURCE = -1
NOT_P2P = -2
SAME_SHAPE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
)  # the operations whose tensors have one shape on every rank of a group
# For these operators, gloo sends the memory of a tensor in the order of its bytes, and ignores strides.  For all other
# operators, gloo respects strides or raises.
AS_THEY_LIE = {"allreduce_", "broadcast_", "reduce_", "scatter_", "reduce_scatter_", "alltoall_base_"}
PIECES = re.compile(r"\(sends (.*); takes (.*)\)")


@dataclass(frozen=True)
class Entry:
    """One record of a flight recorder, as the Reader returns it.

    place: the number of the call among this rank's collectives on the group, or among its messages to or from `peer`.
    peer: the other rank of a message, as a rank of the group.
    match: a number that must be equal on all ranks: a checksum of op, root and shapes, or the tag of a message.
    """

    index: int
    group: str
    place: int
    what: str
    site: str
    peer: int
    match: int
    bytes: int
    time: float

    @property
    def op(self) -> str:
        return self.what.split()[0]

    @property
    def members(self) -> tuple[int, ...]:
        """Return the global ranks of the group, in the group's order."""
        return members_in(self.group)

    @property
    def awaited(self) -> tuple[int, ...]:
        """Return the ranks without which the call does not end.

        For the creation of a group, these are the members of the group, although all ranks must make the call.
        """
        _, _, members = self.what.partition(f"{NEW_GROUP} ")
        return tuple(json.loads(members)) if members else self.members

    @property
    def is_p2p(self) -> bool:
        return self.peer != NOT_P2P

    @property
    def dtype(self) -> str:
        """Return the dtype of the call's first tensor; "" if it has no tensor, or if there was no room for its text."""
        return self.what.partition(" ")[2].partition("[")[0]

    @property
    def elements(self) -> int:
        """Return the number of elements of the call's first tensor."""
        return elements_in(self.what)

    @property
    def pieces(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return the elements that an all_to_all sends to each member, and the elements that it takes from each.

        For any call but an all_to_all, both dictionaries are empty.
        """
        return pieces_in(self.what, self.group)


class FlightRecorder(c10d_tap.Listener):
    """A writer of flight records about this rank's collectives, sends and receives.

    fd: descriptor of a file of at least SIZE bytes, which the caller maps, too.
    """

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, SIZE)
        self.count = 0
        self.ids: dict[object, int] = {}
        self.text_bytes = 0
        self.places: dict[tuple[object, ...], int] = {}
        self.groups = WeakKeyDictionary[dist.ProcessGroup, str]()  # weak keys, so that a destroyed group is released
        self.sites: dict[tuple[object, ...], str] = {}
        self.forms: dict[tuple[object, ...], tuple[int, int, int]] = {}  # cached results of `form`
        self.waits: dict[int, bool] = {}  # {record that is waited for: whether the whole rank stops}
        self.lock = threading.Lock()  # any thread may issue a collective
        for text in ["", NEW_GROUP, *{op for op, *_ in c10d_tap.OPERATORS.values()}]:
            self.text(text)

    @contextlib.contextmanager
    def listening(self) -> Iterator[FlightRecorder]:
        """Record every collective that this process issues in the body of the with statement."""
        c10d_tap.install()
        c10d_tap.listeners.append(self)
        make = distributed_c10d._new_group_with_tag  # makes every new group, also those of meshes
        distributed_c10d._new_group_with_tag = self.recorded(make)
        try:
            yield self
            self.put(OVER, 1)
        finally:
            distributed_c10d._new_group_with_tag = make
            c10d_tap.remove(self)

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        with self.lock:
            group = self.group_text(call.group)
            peer = call.peer if call.peer is not None else ANY_SOURCE if call.op == "recv" else NOT_P2P
            order = (group,) if peer == NOT_P2P else (group, call.op, peer, call.tag)
            what, same, size = self.form(call)
            match = same if peer == NOT_P2P else call.tag & 0xFFFFFFFF
            call.notes["record"] = self.write(group, order, what, peer, match, size)

    def write(self, group: str, order: tuple[object, ...], what: int, peer: int, match: int, size: int) -> int:
        """Add a flight record; return its number, counted from 1."""
        self.places[order] = place = self.places.get(order, -1) + 1
        at = RECORDS_AT + self.count % RING * RECORD.size
        ids = self.text(group, room=TEXT), place, what, self.text(self.site(sys._getframe(2)))
        self.map[at : at + RECORD.size] = RECORD.pack(*ids, peer, match, size, time.monotonic())
        self.count += 1
        self.put(RECORDS, self.count)
        return self.count

    def recorded(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `make`, a function that makes a process group, so that each call of it is recorded.

        All ranks must make the same groups in the same order.  If the order differs, torch raises no error: two groups
        get the same name, or members wait for a rank that never arrives.
        """

        @wraps(make)
        def make_and_record(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            world = list(range(dist.get_world_size()))
            members = world if ranks is None else sorted(map(int, ranks))
            callers = members if kwargs.get("use_local_synchronization") else world
            if dist.get_rank() not in callers:
                return make(ranks, *args, **kwargs)
            group = f"{NEW_GROUP}|{','.join(map(str, callers))}|"
            text = f"{NEW_GROUP} {members}"
            with self.lock:
                what = self.text(text, NEW_GROUP, room=TEXT)
                record = self.write(group, (group,), what, NOT_P2P, zlib.crc32(text.encode()), 0)
            if dist.get_rank() not in members:
                return make(ranks, *args, **kwargs)
            self.wait(record)
            try:
                return make(ranks, *args, **kwargs)
            finally:
                self.wait_is_over(record)

        return make_and_record

    def form(self, call: c10d_tap.IssuedCall) -> tuple[int, int, int]:
        """Return three fields of a call's flight record: the number of its text, the checksum `match`, its bytes."""
        tensors = call.inputs if call.outputs is call.inputs else call.inputs + call.outputs
        key = (call.raw, call.peer, call.root, call.reduction, len(call.inputs), *[(t.dtype, t.shape) for t in tensors])
        if call.raw in AS_THEY_LIE:
            key += *map(strides, tensors), tuple(call.splits), tuple(call.output_splits)
        if key not in self.forms:
            require_one_order(call, tensors)
            if len(self.forms) == MOST_FORMS:
                self.forms.clear()
            size = sum(t.numel() * t.element_size() for t in call.inputs or call.outputs)
            what = self.text(describe(call), call.op)
            self.forms[key] = what, zlib.crc32(comparable(call).encode()), size
        return self.forms[key]

    def waiting(self, call: c10d_tap.IssuedCall) -> None:
        self.wait(call.notes.get("record", 0))

    def waited(self, call: c10d_tap.IssuedCall) -> None:
        self.wait_is_over(call.notes.get("record", 0))

    def wait(self, record: int) -> None:
        with self.lock:
            if record:  # a call that was issued before this recorder listened has no record
                self.waits[record] = is_alone()
            self.show_waits()

    def wait_is_over(self, record: int) -> None:
        with self.lock:
            self.waits.pop(record, None)
            self.show_waits()

    def show_waits(self) -> None:
        self.put(WAITING, next((record for record, alone in self.waits.items() if alone), 0))
        self.put(WAITING_ANYWHERE, next(iter(self.waits), 0))

    def put(self, at: int, value: int) -> None:
        # pack_into would first fill the field with zeros, and the reader would sometimes see the zeros.
        self.map[at : at + 8] = value.to_bytes(8, "little")

    def group_text(self, group: dist.ProcessGroup) -> str:
        if group not in self.groups:
            ranks = dist.get_process_group_ranks(group)
            self.groups[group] = f"{group.group_name}|{','.join(map(str, ranks))}|{group.group_desc}"
        return self.groups[group]

    def site(self, frame: FrameType | None) -> str:
        """Return the line that issued a call: the innermost line outside torch and this kit.

        If this line is in the course's package, the text also has the line outside the package that called it.
        """
        inner = outer = learner_frame(frame)
        while outer is not None and outer.f_code.co_filename.startswith(LABS):
            outer = learner_frame(outer.f_back)
        key = tuple((f.f_code, f.f_lineno) for f in (inner, outer) if f is not None)
        if key not in self.sites:
            through = outer is not None and outer is not inner
            self.sites[key] = f"{source_line(outer)}  (in {source_line(inner)})" if through else source_line(inner)
        return self.sites[key]

    def text(self, text: str, otherwise: str = "", room: int = TEXT - GROUP_TEXT) -> int:
        """Return the number of a text; a new text is appended to the mapping.

        If all texts together would then have more than `room` bytes, return the number of the text `otherwise`.
        """
        number = self.ids.get(text)
        if number is None:
            line = text.replace("\n", " ").encode()[:LONGEST] + b"\n"
            if self.text_bytes + len(line) > room:
                return self.ids[otherwise]
            start = TEXT_AT + self.text_bytes
            self.map[start : start + len(line)] = line
            self.text_bytes += len(line)
            self.put(TEXT_BYTES, self.text_bytes)
            number = self.ids[text] = len(self.ids)
        return number


class Reader:
    """A reader of one rank's flight records, for the caller's process.

    lost: whether the rank has overwritten records before they were read.
    """

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, SIZE, access=mmap.ACCESS_READ)
        self.seen = 0
        self.lost = False
        self.texts: list[str] = []
        self.text_bytes = 0

    def header(self) -> tuple[int, int | None]:
        """Return the number of flight records, and the index of the record that the rank waits for, or None."""
        _, count, waiting, _, _ = HEADER.unpack_from(self.map, 0)
        return count, (waiting - 1 if waiting else None)

    def waiting_anywhere(self) -> int | None:
        """Return the index of a record that any thread of the rank waits for, or None."""
        waiting = HEADER.unpack_from(self.map, 0)[3]
        return waiting - 1 if waiting else None

    def is_over(self) -> bool:
        """Return whether the rank's function has ended."""
        return bool(HEADER.unpack_from(self.map, 0)[4])

    def new(self) -> list[Entry]:
        """Return the flight records since the last call of `new`; if the ring was too small, only the newest ones."""
        count, _ = self.header()
        first = max(self.seen, count - RING + MARGIN)
        entries = self.entries(range(first, count))
        written_over = self.header()[0] - RING  # the rank may be overwriting this record
        self.lost = self.lost or first > self.seen or written_over >= first
        self.seen = count
        return [entry for entry in entries if entry.index > written_over]

    def entry(self, index: int) -> Entry:
        return self.entries(range(index, index + 1))[0]

    def entries(self, indices: range) -> list[Entry]:
        rows = [(i, *RECORD.unpack_from(self.map, RECORDS_AT + i % RING * RECORD.size)) for i in indices]
        size = HEADER.unpack_from(self.map, 0)[0]  # read after the records, so that their texts exist
        if size > self.text_bytes:
            added = self.map[TEXT_AT + self.text_bytes : TEXT_AT + size].decode(errors="replace")
            self.texts += added.split("\n")[:-1]
            self.text_bytes = size
        return [
            Entry(i, self.texts[group], place, self.texts[what], self.texts[where], peer, match, nbytes, when)
            for i, group, place, what, where, peer, match, nbytes, when in rows
        ]

    def close(self) -> None:
        self.map.close()


def members_in(group: str) -> tuple[int, ...]:
    return tuple(map(int, group.split("|")[1].split(",")))


def elements_in(what: str) -> int:
    return math.prod(json.loads(what[what.index("[") : what.index("]") + 1]))


@lru_cache(MOST_FORMS)
def pieces_in(what: str, group: str) -> tuple[Mapping[int, int], Mapping[int, int]]:
    if not what.startswith("all_to_all "):
        return {}, {}
    members = members_in(group)
    if uneven := PIECES.search(what):
        sent, taken = ([*map(int, side.split(", "))] for side in uneven.groups())
        if not len(sent) == len(taken) == len(members):
            return {}, {}  # torch raises an error for such splits, on the rank that gave them
        return dict(zip(members, sent, strict=True)), dict(zip(members, taken, strict=True))
    return (dict.fromkeys(members, elements_in(what) // len(members)),) * 2


def describe(call: c10d_tap.IssuedCall) -> str:
    """Return the text of a call: "all_reduce float32[4, 8]", "send float32[10] to 1", "broadcast int64[2] from 0"."""
    tensors = call.outputs if call.op in ("recv", "scatter") else call.inputs
    shown = " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:2])
    if order := order_of_memory(call):
        shown += f" of strides {order}"
    if call.raw == "alltoall_" or call.splits or call.output_splits:
        sides = pieces(call, call.inputs, call.splits), pieces(call, call.outputs, call.output_splits)
        shown += " (sends {}; takes {})".format(*(", ".join(map(str, side)) for side in sides))
    more = f" and {len(tensors) - 2} more" if len(tensors) > 2 else ""
    whom = {
        "send": f" to {call.peer}",
        "recv": f" from {'anyone' if call.peer is None else call.peer}",
        "broadcast": f" from {call.root}",
        "scatter": f" from {call.root}",
        "reduce": f" to {call.root}",
        "gather": f" to {call.root}",
    }.get(call.op, "")
    reduction = f" ({call.reduction})" if call.reduction not in ("", "sum") else ""
    return " ".join(filter(None, [call.op, shown])) + more + whom + reduction


def comparable(call: c10d_tap.IssuedCall) -> str:
    """Return the properties of a collective that must be the same on all ranks of its group, as a text."""
    same: list[object] = []
    uneven = call.op == "all_gather" and len({t.numel() for t in call.outputs}) > 1
    if call.op in SAME_SHAPE and not uneven:
        tensors = call.outputs if call.op == "scatter" else call.inputs  # tensors that all ranks pass
        same = [(str(t.dtype), tuple(t.shape)) for t in tensors] + [order_of_memory(call)]
    elif call.op == "all_to_all":  # its sizes may differ between ranks: Entry.pieces compares them
        same = [str(t.dtype) for t in call.inputs[:1]]
    return f"{call.op} {call.root} {call.reduction} {same}"


def pieces(call: c10d_tap.IssuedCall, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> list[int]:
    """Return the number of elements that an all_to_all sends to each member, or takes from each member.

    tensors: one tensor per member, or a single tensor whose rows are split.
    rows: the rows for each member; equal numbers of rows if empty.
    """
    if call.raw == "alltoall_":
        return [tensor.numel() for tensor in tensors]
    ranks = call.group.size()
    return [math.prod(tensors[0].shape[1:]) * n for n in rows] if rows else [tensors[0].numel() // ranks] * ranks


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor's dims that are longer than 1; () for a contiguous tensor."""
    return () if tensor.layout != torch.strided or tensor.is_contiguous() else tensor.squeeze().stride()


def order_of_memory(call: c10d_tap.IssuedCall) -> tuple[int, ...]:
    """Return the strides that all tensors of a collective must have, on all ranks; () if strides do not matter."""
    return strides(call.outputs[-1]) if call.raw in AS_THEY_LIE else ()


def require_one_order(call: c10d_tap.IssuedCall, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if gloo would silently mix up the elements of a tensor.

    gloo sends elements in the order of their memory.  The result is right if every tensor of the call fills its memory
    without gaps, and all tensors have the same order of elements; `comparable` compares this order between ranks.
    """
    if call.raw not in AS_THEY_LIE or tensors[0].device.type != "cpu":
        return
    if call.raw == "reduce_scatter_":  # gloo makes contiguous copies of inputs with gaps
        tensors = [*filter(fills_its_memory, call.inputs), *call.outputs]
    if not all(map(fills_its_memory, tensors)) or len(set(map(strides, tensors))) > 1:
        it = next(filter(strides, tensors))
        raise ValueError(
            f"{call.op} of a tensor of shape {tuple(it.shape)} and strides {it.stride()}, which gloo takes for a "
            "contiguous one, with wrong numbers: pass a .contiguous() copy, and copy the result back"
        )


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor lie in memory without gaps, in any order."""
    if not strides(tensor):
        return True
    tensor = tensor.squeeze()
    return tensor.permute(*sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def is_alone() -> bool:
    """Return whether a wait in this thread stops the whole rank, so that the rank cannot make calls that others need.

    A wait in the main thread stops the rank, and so does a wait in a thread of autograd, for which the main thread
    waits. A rank in which the function runs another thread is not stopped; daemon threads, as of progress bars, do not
    count.
    """
    main, me = threading.main_thread(), threading.current_thread()
    others = (thread for thread in threading.enumerate() if thread is not main and thread is not me)
    return (me is main or isinstance(me, threading._DummyThread)) and all(thread.daemon for thread in others)
