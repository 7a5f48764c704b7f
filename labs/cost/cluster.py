"""A cluster in numbers: the speed of its GPUs' memory and arithmetic, and of its links; seconds of collectives.

    LINKS                                       seconds per message and bytes per second of each link, by its name
    all_reduce_seconds(size, ranks, link)       seconds of one all-reduce of `size` bytes
    all_gather_seconds(size, ranks, link)       seconds of one all-gather whose result has `size` bytes

This is the course's only table of such numbers: its picture of a cluster, and every "why, and why not", take them from
here.  They are best cases, as manufacturers and models give them; a real cluster reaches only a part.

Sources: [H100] NVIDIA's data sheet (2023), SXM; [NCCL] its own model of latencies, src/graph/tuning.cc, the same in
NCCL 2.20 (2024) and 2.28 (2025), protocol LL; [Larsen] et al. 2009, "Architectural Breakdown of End-to-End Latency in a
TCP/IP Network"; [Llama] Llama Team 2024, arXiv 2407.21783, section 3.3 and table 4; [Thakur] the source of that name
in `labs.cost.traffic`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from labs.cost.sense import checked
from labs.cost.traffic import doubling_seconds, ring_seconds, tree_seconds

NODE = 8  # GPUs that share NVLink [Llama]
CARD = 80e9  # bytes that an H100 holds [H100]
MEMORY = 3.35e12  # bytes per second that an H100 reads [H100]
FLOPS = 400e12  # operations per second that an H100 reaches in practice, in bfloat16 [Llama]


@checked
@dataclass(frozen=True)
class LinkClass:
    """A class of links between ranks.

    begin: seconds to start a collective
    latency: seconds for each message
    bandwidth: bytes per second out of each rank, while it receives as many
    reach: the most ranks that such links can join
    algorithms: the algorithms for an all-reduce, of which the fastest for its size is used
    """

    begin: float
    latency: float
    bandwidth: float
    reach: float = float("inf")
    algorithms: tuple[Callable[..., float], ...] = (ring_seconds, tree_seconds, doubling_seconds)


LINKS = {
    "NVLink 4": LinkClass(6.6e-6, 0.6e-6, 450e9, NODE),  # [NCCL]; [H100]: 900 GB/s, both directions together
    "PCIe 5": LinkClass(6.6e-6, 1.0e-6, 50e9, NODE),  # [NCCL]; 16 lanes: 63 GB/s per direction, some 50 of them usable
    "InfiniBand, 400 Gb/s": LinkClass(6.6e-6, 2.7e-6, 50e9),  # [NCCL]; [Llama]: one such link for each GPU
    "Ethernet, 10 Gb/s": LinkClass(6.6e-6, 10e-6, 1.25e9),  # [Larsen]: through Linux' TCP, at best
}


def all_reduce_seconds(size: int, ranks: int, link: LinkClass) -> float:
    return link.begin + min(seconds(size, ranks, link.latency, link.bandwidth) for seconds in link.algorithms)


def all_gather_seconds(size: int, ranks: int, link: LinkClass) -> float:
    """Return the seconds of a ring: N-1 rounds that move (N-1)/N S, half of an all-reduce [Thakur, 4.1]."""
    return link.begin + ring_seconds(size, ranks, link.latency, link.bandwidth) / 2
