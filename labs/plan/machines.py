"""A cluster in numbers: its GPUs, their memory and operations, and the links inside a node and between nodes.

    CLUSTERS["H100, InfiniBand"].of(32)       32 GPUs of a kind
    dataclasses.replace(cluster, card=40e9)   the same cluster with less memory

These are best cases from data sheets.  `labs.plan.constants` has the fractions of them that a training program reaches.

Sources: NVIDIA's data sheets of V100 (2018), A100 (2021), H100 (2023), H200 (2024), B200, GB200, B300 and GB300 (2025),
dense 16-bit operations; [NCCL] its own model of latencies, src/graph/tuning.cc, protocol LL128, which long messages
take; [EFA] AWS' p5.48xlarge, 3,200 Gb/s for eight GPUs, of which rings reached 56 % on 2 to 64 nodes in the Ultra-Scale
Playbook's own measurement; NVIDIA's Ada and Ampere white papers for the GeForce cards (16-bit operations that are added
up in 32 bits).
"""

from dataclasses import dataclass, replace
from typing import Any

from labs import cost

MISSING: Any = None  # a field that is not given is refused, with its unit


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal GPUs.

    gpus: the number of GPUs.
    node: the number of GPUs that share the inner link.
    card: bytes of a GPU's memory.
    memory: bytes per second that a GPU reads from it.
    flops: 16-bit operations per second of a GPU.
    inside, between: bytes per second that leave each GPU, inside a node and between nodes.
    power: the fraction of its usual power that a card gets; large products draw all power, so they are as much slower.
        B300 and GB300 compute at most as fast as B200 and GB200, but get 1,100 and 1,400 W instead of 1,000 and 1,200.

    Raises ValueError for a field that is not given, or is outside of sensible limits.
    """

    name: str = MISSING
    gpus: int = MISSING
    node: int = MISSING
    card: float = MISSING
    memory: float = MISSING
    flops: float = MISSING
    inside: float = MISSING
    between: float = MISSING
    power: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name is {describe(self.name)}: give the cluster one, such as 'ours'")
        for field in ("gpus", "node"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} is {describe(value)}: a cluster has a whole number of them, and at least 1")
        if self.gpus > self.node and self.gpus % self.node:
            raise ValueError(
                f"{self.gpus} GPUs are {self.gpus / self.node:.2f} nodes of {self.node}: give a multiple of {self.node}"
            )
        for field, (least, most, unit, example) in SENSIBLE.items():
            value = getattr(self, field)
            if not isinstance(value, int | float) or not least <= value <= most:
                sensible = f"in {unit}, between {least:.0e} and {most:.0e}; an H100 has {example}"
                raise ValueError(f"{field} is {describe(value)}: it is {sensible}")

    @property
    def sustained(self) -> float:
        """Return the operations per second that the power of the card allows."""
        return self.power * self.flops

    def of(self, gpus: int) -> "Cluster":
        return replace(self, gpus=gpus)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node)

    def local(self, ranks: int, stride: int) -> int:
        """Return the number of a group's ranks on one node, if neighbours in the group are `stride` ranks apart."""
        return max(1, min(ranks, self.node // stride))

    def link(self, ranks: int, stride: int, reached: float = 1.0) -> cost.LinkClass:
        """Return the link of a ring over these ranks; between nodes, it uses the links of all its ranks on a node.

        reached: the fraction of the bandwidth between nodes that a job gets.
        """
        local = self.local(ranks, stride)
        if local >= ranks:
            return cost.LinkClass(BEGIN, INNER_LATENCY, self.inside)
        hops = ((local - 1) * INNER_LATENCY + OUTER_LATENCY) / local  # one hop in `local` leaves the node
        return cost.LinkClass(BEGIN, hops, min(self.inside, local * self.between * reached))


def describe(value: Any) -> str:
    return "missing" if value is MISSING else repr(value)


BEGIN, INNER_LATENCY, OUTER_LATENCY = 14.0e-6, 1.9e-6, 4.0e-6  # [NCCL], rings
SENSIBLE = {  # field: (least, most, unit, example)
    "card": (1e9, 1e13, "bytes", "80e9"),
    "memory": (1e10, 1e14, "bytes per second", "3.35e12"),
    "flops": (1e11, 1e17, "operations per second", "989e12"),
    "inside": (1e8, 1e13, "bytes per second out of a GPU", "450e9"),
    "between": (1e7, 1e13, "bytes per second out of a GPU", "50e9"),
}
H100 = {"card": 80 * 2**30, "memory": 3.35e12, "flops": 989e12, "inside": 450e9, "between": 50e9}
A100 = {"card": 80 * 2**30, "memory": 2.0e12, "flops": 312e12, "inside": 300e9, "between": 25e9}
CLUSTERS = {
    each.name: each
    for each in (
        Cluster("H100, InfiniBand", 32, 8, **H100),
        Cluster("H100, EFA", 32, 8, **H100 | {"between": 0.56 * 50e9}),
        Cluster("H100, 96 GB, 500 W", 32, 8, **H100 | {"card": 96e9, "memory": 2.4e12}, power=500 / 700),
        Cluster("H200", 32, 8, **H100 | {"card": 141e9, "memory": 4.8e12}),
        Cluster("A100, 80 GB", 32, 8, **A100),
        Cluster("A100, 40 GB", 32, 8, **A100 | {"card": 40 * 2**30, "memory": 1.555e12}),
        Cluster("V100", 16, 16, 32 * 2**30, 0.9e12, 125e12, 150e9, 12.5e9),
        Cluster("B200", 32, 8, 180e9, 8e12, 2250e12, 900e9, 50e9),
        Cluster("GB200", 64, 64, 186e9, 8e12, 2500e12, 900e9, 50e9),
        Cluster("B300", 32, 8, 270e9, 8e12, 2250e12, 900e9, 100e9, power=1100 / 1000),
        Cluster("GB300", 64, 64, 278e9, 8e12, 2500e12, 900e9, 100e9, power=1400 / 1200),
        Cluster("RTX 4090", 4, 8, 24 * 2**30, 1.008e12, 165e12, 25e9, 1.25e9),  # PCIe 4.0 x16; 10 Gb/s between
        Cluster("RTX 3090", 4, 8, 24 * 2**30, 0.936e12, 71e12, 25e9, 1.25e9),
    )
}
