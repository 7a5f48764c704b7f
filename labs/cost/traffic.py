"""Traffic of one rank in a collective, and seconds of an all-reduce.

    elements and messages    all_reduce(n, ranks, rank), reduce_scatter, all_gather, all_to_all, broadcast, reduce, ...
    seconds                  ring_seconds(size, ranks, latency, bandwidth), tree_seconds, doubling_seconds

Sources: [Hockney] 1994, "The communication challenge for MPP"; [Thakur] Thakur, Rabenseifner and Gropp 2005,
"Optimization of collective communication operations in MPICH", sections 3 and 4.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Traffic:
    """The elements that one rank sends, and the number of messages that are not empty."""

    elements: int
    messages: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.elements + other.elements, self.messages + other.messages)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.elements * times, self.messages * times)


def message(n: int) -> Traffic:
    return Traffic(n, int(n > 0))


def piece(n: int, ranks: int, index: int) -> int:
    """Return c_index, the number of elements in a piece of n elements cut into N pieces; `index` counts modulo N."""
    return n // ranks + (index % ranks < n % ranks)


def pieces_but(n: int, ranks: int, kept: int) -> Traffic:
    """Return the traffic if each of the N pieces of n elements is sent once, except piece number `kept`."""
    own = piece(n, ranks, kept)
    return Traffic(n - own, min(n, ranks) - (own > 0))


def reduce_scatter(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Return the traffic of a ring: n - c_r, in the limit (N-1)/N n [Thakur, 4.2]."""
    return pieces_but(n, ranks, rank)


def all_gather(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Return the traffic of a ring that gathers n elements: n - c_(r+1), in the limit (N-1)/N n [Thakur, 4.1]."""
    return pieces_but(n, ranks, rank + 1)


def all_reduce(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Return the traffic of a ring: reduce_scatter, then all_gather; its limit 2 (N-1)/N n is the least possible."""
    return reduce_scatter(n, ranks, rank) + all_gather(n, ranks, rank)


def all_to_all(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Return the traffic of pairwise messages: all of n elements but the own piece, in the limit (N-1)/N n.

    Source: [Thakur, 4.4].
    """
    return pieces_but(n, ranks, rank)


def broadcast(n: int, ranks: int, rank: int = 0, src: int = 0) -> Traffic:
    """Return the traffic of a binomial tree: n to each child, and (N-1) n by all ranks together [Thakur, 4.3]."""
    place = (rank - src) % ranks
    distances = (1 << k for k in range(place.bit_length(), ranks.bit_length()))
    return message(n) * sum(place + distance < ranks for distance in distances)


def reduce(n: int, ranks: int, rank: int = 0, dst: int = 0) -> Traffic:
    """Return the traffic of the same tree, upwards: every rank but the root sends n to its parent."""
    return message(n) * (rank != dst)


def all_reduce_doubling(n: int, ranks: int, rank: int = 0) -> Traffic:
    """Return the traffic of recursive doubling: n log2 N [Thakur, 4.5].

    If N is no power of two, each extra rank first sends its input to another rank, and receives the result at the end.
    """
    doublings = ranks.bit_length() - 1
    power = 1 << doublings
    return message(n) * (1 if rank >= power else doublings + (rank < ranks - power))


def barrier(ranks: int) -> Traffic:
    """Return the traffic of dissemination: one element per round, in ceil(log2 N) rounds."""
    return message(1) * (ranks - 1).bit_length()


def all_reduce_limit(n: int, ranks: int) -> Fraction:
    """Return 2 (N-1)/N n, the textbook's ring all-reduce, as if every n divided evenly."""
    return Fraction(2 * (ranks - 1) * n, ranks)


# Seconds of an all-reduce of `size` bytes. A message of m bytes takes latency + m / bandwidth [Hockney], in s, and in
# bytes/s out of each rank while it receives as many. The additions themselves take no time here.


def ring_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of 2 (N-1) rounds that move 2 (N-1)/N S."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def tree_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of a reduce, then a broadcast: 2 ceil(log2 N) rounds, each of S."""
    return 2 * (ranks - 1).bit_length() * (latency + size / bandwidth)


def doubling_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of log2 N rounds, each of S, and two more if N is no power of two [Thakur, 4.5]."""
    doublings = ranks.bit_length() - 1
    rounds = doublings + 2 * (ranks != 1 << doublings)
    return rounds * (latency + size / bandwidth)
