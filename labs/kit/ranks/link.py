"""Nodes, and a wire between them that is slow for real: a laptop feels what a cluster feels.

    link = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)
    run(train, ranks=4, link=link)                                 # ranks 0 and 1 are node 0, ranks 2 and 3 node 1
    link.seconds("all_reduce", 5_000_000, ranks=4)                 # 0.304: what one such call will take

What stays inside a node is as quick as ever.  What crosses takes as long as on the wire of each node, which carries
`bandwidth` out and as much in at the same time:

    seconds = most bytes out of or into one node x 8 / bandwidth + trips x latency

with the bytes that each operation books (record.py), n of them handed in by each of N members, and as trips how often
the longest way of a byte crosses from one node to another; C is how many neighbours in the ring are on two nodes:

    all_reduce       each member to the next, around a ring: 2 (N-1)/N n     trips 2 min(C, N-1)
    reduce_scatter   likewise                                  (N-1)/N n           min(C, N-1)
    all_gather       likewise                                    (N-1) n           min(C, N-1)
    all_to_all       each member to each other: n/N                          1
    broadcast, send  the root to each other: n                               1
    scatter          the root to each other: n/N, with n all that it deals   1
    reduce, gather   each member to the root: n                              1
    barrier          as an all_reduce of 0 bytes

A collective sets out when its last member has issued it, a message when it is sent, and not before what is on the
same wires already has passed: two at once take the sum.  If members bring different sizes, the largest counts.

It is the completion that is late, not the call, so that overlap still pays.  The process gets a Work (and a future)
that is done when the wire says so, and whoever waits for it waits: Python, functional collectives, DDP in C++.  gloo's
reduce_scatter, send and recv have no future: their Work is late in `wait` (and in `wait_tensor`), which is all that
they offer.  Not slowed: a recv from any source, of which nobody knows what it waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import mmap
import numbers
import re
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from labs.kit.watch import tap

RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)bit/s")
PREFIX = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MESSAGES = "send", "recv"
WITHOUT_FUTURE = "reduce_scatter", *MESSAGES  # on gloo
MOST_NODES = 64
SLOTS = 4096  # transfers that are remembered; far more than are ever under way
SLOT = KEY, MEMBERS, BYTES, DONE = range(4)
SIZE = 8 * (2 * MOST_NODES + len(SLOT) * SLOTS)
POLL = 0.001  # seconds
FAILURE = "failure"  # of a call, in its notes


@dataclass(frozen=True)
class Link:
    """The wire of each of `nodes` nodes: bit/s (a number, or "200 Mbit/s") each way, and seconds of latency.

    Raises ValueError for what is no wire.
    """

    nodes: int
    bandwidth: float | str
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or not 2 <= self.nodes <= MOST_NODES:
            raise ValueError(
                f"Link(nodes={self.nodes!r}): a wire is between nodes, so give 2 to {MOST_NODES} of them; for one "
                "node leave link out"
            )
        object.__setattr__(self, "bandwidth", bits_per_second(self.bandwidth))
        if not isinstance(self.latency, numbers.Real) or not 0 <= self.latency < math.inf:
            raise ValueError(f"Link(latency={self.latency!r}): give a number of seconds, 0 or more")

    def node(self, rank: int, ranks: int) -> int:
        """The node of a rank: consecutive ranks share one.  Raises ValueError when there is no such rank or layout."""
        if ranks % self.nodes:
            raise ValueError(
                f"{self.nodes} nodes for ranks={ranks}: every node has the same number of ranks, so give a multiple of "
                f"{self.nodes} ranks, or as many nodes as divide {ranks}"
            )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank}: a job with ranks={ranks} has ranks 0 to {ranks - 1}")
        return rank // (ranks // self.nodes)

    def crosses(self, group: Sequence[int], ranks: int) -> bool:
        """Whether the members of a group are on more than one node."""
        return len({self.node(rank, ranks) for rank in group}) > 1

    def across(self, rank: int, to: Mapping[int, int], ranks: int) -> int:
        """Of the bytes that `rank` sent `to` each other rank, those that went to other nodes."""
        return sum(size for other, size in to.items() if self.crosses((rank, other), ranks))

    def seconds(
        self, op: str, nbytes: float, ranks: int, group: Sequence[int] | None = None, root: int | None = None
    ) -> float:
        """How long one call takes that has the wire to itself.

        op      "all_reduce", "send", ...
        nbytes  bytes that each member hands in (to a scatter: the root)
        ranks   of the whole job
        group   its members as ranks of the job; all ranks when left out; of a send (sender, receiver)
        root    of a broadcast, reduce, gather or scatter, as a rank of the job; the first member when left out
        """
        group = tuple(range(ranks) if group is None else group)
        return self.duration(*self.loads(op, nbytes, ranks, group, group[0] if root is None else root))

    def duration(self, loads: Mapping[int, float], trips: int) -> float:
        return max(loads.values(), default=0.0) * 8 / self.bandwidth + trips * self.latency  # type: ignore[operator]

    def loads(self, op: str, nbytes: float, ranks: int, group: tuple[int, ...], root: int) -> tuple[Counter[int], int]:
        """Bytes by way, 2 x node for out of it and 2 x node + 1 for into it, and how many trips follow each other."""
        pairs, each, turns = traffic(op, nbytes, group, root)
        ways: Counter[int] = Counter()
        crossing = [pair for pair in pairs if self.crosses(pair, ranks)]
        for source, target in crossing:
            ways[2 * self.node(source, ranks)] += each
            ways[2 * self.node(target, ranks) + 1] += each
        trips = turns * min(len(crossing), len(group) - 1) if turns else min(1, len(crossing))
        return ways, trips


def bits_per_second(bandwidth: Any) -> float:
    match = RATE.fullmatch(bandwidth) if isinstance(bandwidth, str) else None
    rate = float(match[1]) * PREFIX[match[2]] if match else bandwidth
    if not isinstance(rate, numbers.Real) or isinstance(rate, bool) or not rate > 0:
        raise ValueError(
            f'Link(bandwidth={bandwidth!r}): give more than 0 bit/s, as a number or as text such as "200 Mbit/s"'
        )
    return float(rate)


def traffic(op: str, nbytes: float, group: tuple[int, ...], root: int) -> tuple[list[tuple[int, int]], float, int]:
    """Who sends to whom, how many bytes each, and how often around the ring; 0 where all is sent at once."""
    size = len(group)
    ring = list(zip(group, group[1:] + group[:1], strict=True))
    others = [rank for rank in group if rank != root]
    match op:
        case "barrier":
            return ring, 0.0, 2
        case "all_reduce":
            return ring, 2 * (size - 1) / size * nbytes, 2
        case "reduce_scatter":
            return ring, (size - 1) / size * nbytes, 1
        case "all_gather":
            return ring, (size - 1) * nbytes, 1
        case "all_to_all":
            return list(itertools.permutations(group, 2)), nbytes / size, 0
        case "broadcast" | "send" | "recv":
            return [(root, other) for other in others], nbytes, 0
        case "scatter":
            return [(root, other) for other in others], nbytes / size, 0
        case "reduce" | "gather":
            return [(other, root) for other in others], nbytes, 0
    raise ValueError(f"op={op!r}: give one of {', '.join(sorted({op for op, *_ in tap.OPERATORS.values()}))}")


class Wire(tap.Listener):
    """This rank's part in the job's link: it makes its collectives late.

    The ranks share a file: for each node until when (s, monotonic clock) its two ways are taken, and for each transfer
    a slot: its key, how many members have issued it, the most bytes of one, and when it is done.
    """

    def __init__(self, link: Link, ranks: int, file: int) -> None:
        self.link, self.ranks, self.file = link, ranks, file
        self.shared = memoryview(mmap.mmap(file, SIZE)).cast("d")
        self.places: Counter[object] = Counter()  # of transfers issued so far, in each order of them
        self.lock = threading.Lock()
        self.slowed: weakref.WeakSet[dist.Work] = weakref.WeakSet()

    @contextlib.contextmanager
    def slowing(self) -> Iterator[None]:
        tap.install()
        tap.listeners.insert(0, self)  # before those who note when a wait is over
        usual, dist.Work.wait = dist.Work.wait, with_timeout(dist.Work.wait, self.slowed)
        try:
            yield
        finally:
            dist.Work.wait = usual
            tap.remove(self)

    def issued(self, call: tap.Call) -> None:
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
        call.notes[self] = key, 0.0
        if call.op != "recv":
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in call.inputs)
            needed = 1 if call.op == "send" else len(group)
            least = self.issue(key, needed, call.op, nbytes, group, root)
            call.notes[self] = key, least

    def issue(self, key: int, needed: int, op: str, nbytes: int, group: tuple[int, ...], root: int) -> float:
        """Enter one member; with the last, the transfer takes its place on the wires.  The earliest end."""
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

    def due(self, call: tap.Call) -> float:
        """When the call may be over (s, monotonic clock); a root that does not wait for the others, after its share."""
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

    def handed(self, call: tap.Call, work: dist.Work) -> dist.Work:
        """A work that is done when `work` is and its time has passed."""
        if self not in call.notes or call.op in WITHOUT_FUTURE:
            return work
        arrived: torch.futures.Future[Any] = work.get_future()
        passed: torch.futures.Future[None] = torch.futures.Future()

        def hold(_: Any) -> None:
            try:
                arrived.value()
            except RuntimeError as error:  # of the backend, at once; a wait in C++ would not raise it
                call.notes[FAILURE] = error
                passed.set_result(None)
                return
            timer = threading.Timer(self.due(call) - time.monotonic(), passed.set_result, [None])
            timer.daemon = True
            timer.start()

        arrived.add_done_callback(hold)
        late = _create_work_from_future(passed.then(lambda _: arrived.value()))
        self.slowed.add(late)
        return late

    def waited(self, call: tap.Call) -> None:
        if FAILURE in call.notes:
            raise call.notes[FAILURE]
        if self in call.notes:
            time.sleep(max(0.0, self.due(call) - time.monotonic()))


def with_timeout(wait: Callable[..., Any], slowed: weakref.WeakSet[dist.Work]) -> Callable[..., Any]:
    """`Work.wait` that can give up on a slowed work, too: in C++ one that is made of a future cannot."""

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
