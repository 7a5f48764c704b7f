"""The emulation of slow links between nodes in one rank: transfers between nodes complete late.

    with Wire(link, ranks, file).slowing(): train()

A collective starts when its last member has issued it, and a message starts when it is sent.  A transfer starts only
after the earlier transfers over the same links have ended, so two transfers at once take the sum of their times.
`Link` computes how long a transfer takes once it has started (link.py).  If the members pass different sizes, the
largest counts.

A transfer completes late, but its call returns at once, so overlap still pays.  The program gets a Work (and a future)
that completes when the transfer has ended.  Python, functional collectives and DDP in C++ all wait for this Work.
gloo's reduce_scatter, send and recv have no future, so only `Work.wait` and `wait_tensor` return late, the only ways to
wait for them.  A recv from any source is not slowed, since its sender is not known beforehand.

All ranks share one file.  For each direction of each node's link, this file has the time until which the link is busy,
in seconds of time.monotonic.  Each transfer has a slot in the file, with the transfer's key, the number of members that
have issued it, the most bytes of a member, and the time at which it is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from labs.kit.ranks.link import MOST_NODES, Link
from labs.kit.watch import c10d_tap

MESSAGES = "send", "recv"
WITHOUT_FUTURE = "reduce_scatter", *MESSAGES  # operations whose Works have no future on gloo
SLOTS = 1 << 15  # number of slots for transfers, far more than transfers are ever in flight
SLOT = KEY, MEMBERS, BYTES, DONE = range(4)
SIZE = 8 * (2 * MOST_NODES + len(SLOT) * SLOTS)
POLL = 0.001  # seconds between two looks at whether a Work has completed
FAILURE = "failure"  # the key in Call.notes for the error of a call


class Wire(c10d_tap.Listener):
    """A listener that delays the transfers of one rank over slow links; `file` is SIZE bytes that all ranks share."""

    def __init__(self, link: Link, ranks: int, file: int) -> None:
        self.link, self.ranks, self.file = link, ranks, file
        self.shared = memoryview(mmap.mmap(file, SIZE)).cast("d")
        self.places: Counter[object] = Counter()  # {key of a group or of a pair of ranks: transfers so far}
        self.lock = threading.Lock()
        self.slowed: weakref.WeakSet[dist.Work] = weakref.WeakSet()

    @contextlib.contextmanager
    def slowing(self) -> Iterator[None]:
        c10d_tap.install()
        c10d_tap.listeners.insert(0, self)  # before the listeners that note the end of a wait
        usual, dist.Work.wait = dist.Work.wait, with_timeout(dist.Work.wait, self.slowed)
        try:
            yield
        finally:
            dist.Work.wait = usual
            c10d_tap.remove(self)

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        group = tuple(dist.get_process_group_ranks(call.group))
        root = group[call.root or 0]
        order: tuple[object, ...] = call.group.group_name, group
        if call.op in MESSAGES:
            if call.peer is None:
                return
            me, peer = dist.get_rank(), group[call.peer]
            root, group = (me, (me, peer)) if call.op == "send" else (peer, (peer, me))
            order += call.tag, group
        if not self.link.crosses(group, self.ranks):
            return
        self.places[order] += 1
        key = zlib.crc32(repr((order, self.places[order])).encode())
        least = 0.0
        if call.op != "recv":
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in call.inputs)
            needed = 1 if call.op == "send" else len(group)
            least = self.issue(key, needed, call.op, nbytes, group, root)
        call.notes[self] = key, least

    def issue(self, key: int, needed: int, op: str, nbytes: int, group: tuple[int, ...], root: int) -> float:
        """Note in a transfer's slot that this member has issued the transfer; return the earliest time of its end.

        The last member to issue a transfer reserves the links for the transfer.
        """
        with self.alone():
            slot, now = self.slot(key), time.monotonic()
            if slot[KEY] != key:
                slot[KEY], slot[MEMBERS], slot[BYTES], slot[DONE] = key, 0, 0, 0
            slot[MEMBERS] += 1
            slot[BYTES] = max(slot[BYTES], nbytes)
            ways, trips = self.link.loads(op, slot[BYTES], self.ranks, group, root)
            took = self.link.duration(ways, trips)
            if slot[MEMBERS] == needed:
                begin = max(now, *(self.shared[way] for way in ways))
                for way, load in ways.items():
                    self.shared[way] = begin + load * 8 / self.link.bandwidth
                slot[DONE] = begin + took
        return now + took

    def slot(self, key: int) -> memoryview:
        at = 2 * MOST_NODES + len(SLOT) * (key % SLOTS)
        return self.shared[at : at + len(SLOT)]

    def completion_time(self, call: c10d_tap.IssuedCall) -> float:
        """Return the time at which a call may complete, in seconds of time.monotonic.

        If some members have not issued the call yet, return its earliest end, since a root need not wait for them.
        """
        key, least = call.notes[self]
        with self.alone():
            slot = self.slot(key)
            return slot[DONE] if slot[KEY] == key and slot[DONE] else least

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self.lock:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def handed(self, call: c10d_tap.IssuedCall, work: dist.Work) -> dist.Work:
        """Return a Work that is done once `work` is done and the emulated transfer has ended."""
        if self not in call.notes or call.op in WITHOUT_FUTURE:
            return work
        arrived: torch.futures.Future[Any] = work.get_future()
        passed: torch.futures.Future[None] = torch.futures.Future()

        def hold(_: Any) -> None:
            try:
                arrived.value()
            except RuntimeError as error:  # `waited` raises it; a wait in C++ would not
                call.notes[FAILURE] = error
                passed.set_result(None)
                return
            timer = threading.Timer(self.completion_time(call) - time.monotonic(), passed.set_result, [None])
            timer.daemon = True
            timer.start()

        arrived.add_done_callback(hold)
        late = _create_work_from_future(passed.then(lambda _: arrived.value()))
        self.slowed.add(late)
        return late

    def waited(self, call: c10d_tap.IssuedCall) -> None:
        if FAILURE in call.notes:
            raise call.notes[FAILURE]
        if self in call.notes:
            time.sleep(max(0.0, self.completion_time(call) - time.monotonic()))


def with_timeout(wait: Callable[..., Any], slowed: weakref.WeakSet[dist.Work]) -> Callable[..., Any]:
    """Return a `Work.wait` whose timeout also works for delayed Works: a Work made of a future ignores it in C++."""

    def waiting(work: dist.Work, timeout: timedelta = timedelta(0)) -> Any:
        if not timeout or work not in slowed:
            return wait(work, timeout)
        end = time.monotonic() + timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for a collective")
            time.sleep(POLL)
        return wait(work)

    return waiting
