"""Slow links between nodes, emulated: on one laptop, ranks of different nodes send as slowly as on a cluster.

    link = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)
    run(train, ranks=4, link=link)                    # ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1
    link.seconds("all_reduce", 5_000_000, ranks=4)    # 0.304: the seconds that one such call will take

Transfers inside a node are not slowed.  Each node has one full-duplex link to the other nodes, which carries
`bandwidth` out of the node and as much into the node at the same time.  A transfer between nodes takes

    seconds = most bytes out of or into one node x 8 / bandwidth + trips x latency

The bytes are those that labs.kit.record counts for each operation, where each of N members passes n bytes.  The number
of trips is how often a byte crosses from one node to another on its longest path.  C is the number of pairs of
neighbours in the ring that are on two different nodes:

    all_reduce       each member to the next, around a ring: 2 (N-1)/N n     trips 2 min(C, N-1)
    reduce_scatter   around a ring                             (N-1)/N n           min(C, N-1)
    all_gather       around a ring                               (N-1) n           min(C, N-1)
    all_to_all       each member to each other: n/N                          1
    broadcast, send  the root to each other: n                               1
    scatter          the root to each other: n/N, with n all its input       1
    reduce, gather   each member to the root: n                              1
    barrier          like an all_reduce of 0 bytes

A backend may really send more bytes: gloo implements reduce_scatter as an all_reduce.  On an emulated link, gloo's
reduce_scatter takes as long as a real one would.  Two transfers at once over one link take the sum of their times
(link_delay.py).
"""

from __future__ import annotations

import itertools
import math
import numbers
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labs.kit.watch import c10d_tap

RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]?)bit/s")
PREFIX = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MOST_NODES = 64


@dataclass(frozen=True)
class Link:
    """The network link that each node has to the other nodes, for run(..., link=).

    nodes      number of nodes, among which the ranks are divided evenly
    bandwidth  bit/s out of a node, and as much into the node: a number, or text such as "200 Mbit/s"
    latency    seconds for each trip from one node to another

    Raises ValueError for a value out of range.
    """

    nodes: int
    bandwidth: float | str
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int) or isinstance(self.nodes, bool) or not 2 <= self.nodes <= MOST_NODES:
            raise ValueError(
                f"Link(nodes={self.nodes!r}): a link connects nodes, so give 2 to {MOST_NODES} nodes; for a single "
                "node, leave link out"
            )
        object.__setattr__(self, "bandwidth", bits_per_second(self.bandwidth))
        if not isinstance(self.latency, numbers.Real) or not 0 <= self.latency < math.inf:
            raise ValueError(f"Link(latency={self.latency!r}): give a number of seconds, 0 or more")

    def node(self, rank: int, ranks: int) -> int:
        """Return the node of a rank: consecutive ranks share a node.

        Raises ValueError if the ranks cannot be divided evenly among the nodes, or if there is no such rank.
        """
        if ranks % self.nodes:
            raise ValueError(
                f"{self.nodes} nodes for ranks={ranks}: every node has the same number of ranks, so give a multiple of "
                f"{self.nodes} ranks, or as many nodes as divide {ranks}"
            )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank}: a job with ranks={ranks} has ranks 0 to {ranks - 1}")
        return rank // (ranks // self.nodes)

    def crosses(self, group: Sequence[int], ranks: int) -> bool:
        """Return whether the members of a group are on more than one node."""
        return len({self.node(rank, ranks) for rank in group}) > 1

    def across(self, rank: int, to: Mapping[int, int], ranks: int) -> int:
        """Return how many of the bytes that `rank` sent went to other nodes; to: {receiving rank: bytes}."""
        return sum(size for other, size in to.items() if self.crosses((rank, other), ranks))

    def seconds(
        self, op: str, nbytes: float, ranks: int, group: Sequence[int] | None = None, root: int | None = None
    ) -> float:
        """Return the seconds that one collective, send or recv takes if nothing else uses the links.

        op      "all_reduce", "send", ...
        nbytes  bytes that each member passes to the call; for a scatter, bytes that the root passes
        ranks   number of ranks of the whole job
        group   members as ranks of the job: all ranks by default, (sender, receiver) for a send
        root    root of a broadcast, reduce, gather or scatter, as a rank of the job; the first member by default
        """
        group = tuple(range(ranks) if group is None else group)
        return self.duration(*self.loads(op, nbytes, ranks, group, group[0] if root is None else root))

    def duration(self, loads: Mapping[int, float], trips: int) -> float:
        return max(loads.values(), default=0.0) * 8 / self.bandwidth + trips * self.latency

    def loads(self, op: str, nbytes: float, ranks: int, group: tuple[int, ...], root: int) -> tuple[Counter[int], int]:
        """Return {direction of a node's link: bytes}, and the number of trips that must follow each other.

        The direction out of node n has number 2n, and the direction into node n has number 2n + 1.
        """
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
    """Return the pairs (sender, receiver) of an operation, the bytes of each pair, and the turns around the ring.

    An all_reduce takes 2 turns around the ring.  An operation in which every member sends everything at once takes 0.
    """
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
    raise ValueError(f"op={op!r}: give one of {', '.join(sorted({op for op, *_ in c10d_tap.OPERATORS.values()}))}")
