"""A light flight recorder of every collective a rank issues, in memory that the caller can read while the rank hangs.

    FlightRecorder   in the rank: a listener on the tap, writes fixed-size records into a shared file mapping
    Reader    in the caller: reads them from outside, also when the rank is stuck in C

    header    how many bytes of text, how many records, which of them is being waited for
    records   a ring of the newest ones: group, place in that group's order, what was issued, from which line, when
    texts     each distinct description once, one a line ("all_reduce float32[1024]", "cell line 3: dist.all_reduce(x)")

Always on; the cost is one stack walk and one record for each collective (`make bench` shows it).
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from labs.kit.watch import tap
from labs.kit.watch.frames import LABS, learner_frame, source_line

HEADER = struct.Struct("<QQQ")  # bytes of text, records, waiting for (record + 1, or 0)
TEXT_BYTES, RECORDS, WAITING = 0, 8, 16  # where in the header
RECORD = struct.Struct("<IIIIiIqd")  # group, place, what, site, peer, match, bytes, time
RING = 1 << 15
MARGIN = 64  # the oldest records may be written over while they are read
TEXT = 512 * 1024
GROUP_TEXT = 64 * 1024  # of these, kept free for the names of groups
RECORDS_AT = HEADER.size
TEXT_AT = RECORDS_AT + RING * RECORD.size
SIZE = TEXT_AT + TEXT

MOST_FORMS = 4096
ANY_SOURCE = -1
NOT_P2P = -2
SAME_SHAPE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
)  # on every rank of a group


@dataclass(frozen=True)
class Entry:
    """One record as the reader gives it back.

    `place` counts this rank's collectives on that group, or its messages to or from that `peer` (a rank of the group).
    `match` is what must be equal on the other side: a checksum of op, root and shapes, or a message's tag.
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
        """Global ranks of the group, in the group's order."""
        return tuple(map(int, self.group.split("|")[1].split(",")))

    @property
    def is_p2p(self) -> bool:
        return self.peer != NOT_P2P


class FlightRecorder(tap.Listener):
    """Writes this rank's records into the mapping of `fd` (a file of at least SIZE bytes)."""

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, SIZE)
        self.count = 0
        self.ids: dict[object, int] = {}
        self.text_bytes = 0
        self.places: dict[tuple[object, ...], int] = {}
        self.groups: dict[dist.ProcessGroup, str] = {}
        self.sites: dict[tuple[object, ...], str] = {}
        self.forms: dict[tuple[object, ...], tuple[int, int, int]] = {}  # what is told of calls that look alike
        self.lock = threading.Lock()  # a collective may be issued in any thread
        for text in ["", *{op for op, *_ in tap.OPERATORS.values()}]:
            self.text(text)

    def issued(self, call: tap.Call) -> None:
        with self.lock:
            self.write(call)

    def write(self, call: tap.Call) -> None:
        group = self.group_text(call.group)
        peer = call.peer if call.peer is not None else ANY_SOURCE if call.op == "recv" else NOT_P2P
        is_p2p = peer != NOT_P2P
        order = (group, call.op, peer, call.tag) if is_p2p else (group,)
        self.places[order] = place = self.places.get(order, -1) + 1
        what, same, size = self.form(call)
        match = call.tag & 0xFFFFFFFF if is_p2p else same
        at = RECORDS_AT + self.count % RING * RECORD.size
        ids = self.text(group, room=TEXT), place, what, self.text(self.site(sys._getframe(1)))
        self.map[at : at + RECORD.size] = RECORD.pack(*ids, peer, match, size, time.monotonic())
        self.count += 1
        call.notes["record"] = self.count
        self.put(RECORDS, self.count)

    def form(self, call: tap.Call) -> tuple[int, int, int]:
        """The number of its description, the checksum of what must be equal on all ranks, and its bytes."""
        tensors = call.inputs if call.outputs is call.inputs else call.inputs + call.outputs
        key = (call.raw, call.peer, call.root, len(call.inputs), *[(t.dtype, t.shape) for t in tensors])
        if key not in self.forms:
            if len(self.forms) == MOST_FORMS:
                self.forms.clear()
            size = sum(t.numel() * t.element_size() for t in call.inputs or call.outputs)
            what = self.text(describe(call), call.op)
            self.forms[key] = what, zlib.crc32(comparable(call).encode()), size
        return self.forms[key]

    def waiting(self, call: tap.Call) -> None:
        if is_alone():
            self.put(WAITING, call.notes.get("record", 0))

    def waited(self, call: tap.Call) -> None:
        self.put(WAITING, 0)

    def put(self, at: int, value: int) -> None:
        # Not by pack_into: it fills with zeros first, and the reader would now and then see those.
        self.map[at : at + 8] = value.to_bytes(8, "little")

    def group_text(self, group: dist.ProcessGroup) -> str:
        if group not in self.groups:
            ranks = dist.get_process_group_ranks(group)
            self.groups[group] = f"{group.group_name}|{','.join(map(str, ranks))}|{group.group_desc}"
        return self.groups[group]

    def site(self, frame: FrameType | None) -> str:
        """The first line outside torch and this kit; where that is the course's own, also the line that called it."""
        inner = outer = learner_frame(frame)
        while outer is not None and outer.f_code.co_filename.startswith(LABS):
            outer = learner_frame(outer.f_back)
        key = tuple((f.f_code, f.f_lineno) for f in (inner, outer) if f is not None)
        if key not in self.sites:
            called = f"  (called from {source_line(outer)})" if outer is not None and outer is not inner else ""
            self.sites[key] = source_line(inner) + called
        return self.sites[key]

    def text(self, text: str, otherwise: str = "", room: int = TEXT - GROUP_TEXT) -> int:
        """The number of this text; a new one is appended, or, when there is no room left, `otherwise` stands for it."""
        number = self.ids.get(text)
        if number is None:
            line = text.replace("\n", " ").encode()[:400] + b"\n"
            if self.text_bytes + len(line) > room:
                return self.ids[otherwise]
            start = TEXT_AT + self.text_bytes
            self.map[start : start + len(line)] = line
            self.text_bytes += len(line)
            self.put(TEXT_BYTES, self.text_bytes)
            number = self.ids[text] = len(self.ids)
        return number


class Reader:
    """The caller's view of one rank's flight recorder.

    lost: the rank was quicker than its reader, and records are gone.
    """

    def __init__(self, fd: int) -> None:
        self.map = mmap.mmap(fd, SIZE, access=mmap.ACCESS_READ)
        self.seen = 0
        self.lost = False
        self.texts: list[str] = []
        self.text_bytes = 0

    def header(self) -> tuple[int, int | None]:
        """How many records there are, and the index of the one being waited for, or None."""
        _, count, waiting = HEADER.unpack_from(self.map, 0)
        return count, (waiting - 1 if waiting else None)

    def new(self) -> list[Entry]:
        """The records since the last call, or, when they were more than the ring holds, the newest of them."""
        count, _ = self.header()
        first = max(self.seen, count - RING + MARGIN)
        entries = self.entries(range(first, count))
        written_over = self.header()[0] - RING  # this one may be half new, those before it are new
        self.lost = self.lost or first > self.seen or written_over >= first
        self.seen = count
        return [entry for entry in entries if entry.index > written_over]

    def entry(self, index: int) -> Entry:
        return self.entries(range(index, index + 1))[0]

    def entries(self, indices: range) -> list[Entry]:
        rows = [(i, *RECORD.unpack_from(self.map, RECORDS_AT + i % RING * RECORD.size)) for i in indices]
        size = HEADER.unpack_from(self.map, 0)[0]  # after the records: their texts are there
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


def describe(call: tap.Call) -> str:
    """What a person is told: "all_reduce float32[4, 8]", "send float32[10] to 1", "broadcast int64[2] from 0"."""
    tensors = call.outputs if call.op in ("recv", "scatter") else call.inputs
    shown = " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:2])
    more = f" and {len(tensors) - 2} more" if len(tensors) > 2 else ""
    whom = {
        "send": f" to {call.peer}",
        "recv": f" from {'anyone' if call.peer is None else call.peer}",
        "broadcast": f" from {call.root}",
        "scatter": f" from {call.root}",
        "reduce": f" to {call.root}",
        "gather": f" to {call.root}",
    }.get(call.op, "")
    return " ".join(filter(None, [call.op, shown])) + more + whom


def comparable(call: tap.Call) -> str:
    """What must be the same on every rank of a group for its nth collective."""
    shapes: list[object] = []
    uneven = call.op == "all_gather" and len({t.numel() for t in call.outputs}) > 1
    if call.op in SAME_SHAPE and not uneven:
        shapes = [(str(t.dtype), tuple(t.shape)) for t in call.inputs]
    return f"{call.op} {call.root} {shapes}"


def is_alone() -> bool:
    """Whether no other thread of the function may still call what the others need; daemons (progress bars) do not."""
    main = threading.main_thread()
    return all(thread.daemon or thread is main for thread in threading.enumerate())
