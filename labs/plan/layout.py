"""The question of a plan, and one answer: the part of the model, of its state and of the batch that each rank has.

    Setup(config, cluster, batch=512)         this model, on these machines
    Layout(tp=8, shards=4, zero=3)            a value; replicas × shards × cp × tp × pp ranks

The axes are ordered as pp, replicas, shards, cp, tp: the axis that sends most comes last, so that its ranks are
neighbours.  Experts use the same ranks otherwise: ep of the replicas × shards × cp × tp ranks of a stage, neighbours,
share the experts of a layer, and the others have copies of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

from labs.model import Config
from labs.plan.constants import FITTED, Constants
from labs.plan.machines import Cluster
from labs.plan.sparse import Shape, SparseConfig


@dataclass(frozen=True, eq=False)
class Setup:
    """The question: a model on a cluster, with `batch` sequences of `context` tokens in a step.

    context: tokens per sequence; by default the config's.
    constants: by default those of the software.
    software: the training software, a name in FITTED; the default has the most cautious constants.
    bits: of the numbers that matrix products multiply, 16 or 8.

    Raises ValueError for a field of another type, or a number below 1.
    """

    config: Shape
    cluster: Cluster
    batch: int
    context: int | None = None
    constants: Constants | None = None
    software: str = "pytorch"
    bits: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config | SparseConfig):
            raise ValueError(f"config is {self.config!r}: it must be a Config, such as PRESETS['llama3-8b']")
        if self.bits not in (8, 16):
            raise ValueError(f"bits is {self.bits!r}: a plan is for products of 16 or 8 bits")
        if not isinstance(self.cluster, Cluster):
            raise ValueError(f"cluster is {self.cluster!r}: it must be a Cluster, such as CLUSTERS['H200'].of(32)")
        if self.context is None:
            object.__setattr__(self, "context", self.config.context)
        for name in ("batch", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number, and at least 1")
        if self.software not in FITTED:
            known = ", ".join(map(repr, FITTED))
            raise ValueError(f"software is {self.software!r}: there are constants for {known}")
        if self.constants is None:
            object.__setattr__(self, "constants", FITTED[self.software])


class Layout(NamedTuple):
    """A layout: tp ranks split each layer, pp ranks have its stages, replicas × shards ranks split the batch.

    cp: ranks that split each sequence, for attention in a ring.
    ep: ranks that share the experts of a layer.
    zero: the stage of ZeRO, 0 to 3, over `shards` ranks; HSDP is stage 3 with replicas.
    batch: sequences in a micro-batch.
    accumulation: micro-batches per rank and step.
    """

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    replicas: int = 1
    shards: int = 1
    zero: int = 0
    batch: int = 1
    accumulation: int = 1
    recompute: str = "none"
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        return self.replicas * self.shards

    @property
    def staged(self) -> bool:
        return self.pp > 1

    @property
    def ranks(self) -> int:
        return self.pp * self.replicas * self.shards * self.cp * self.tp

    @property
    def axes(self) -> str:
        """Return the axes in words, such as pp 2 × dp 4 × tp 8."""
        data = (
            {"replicas": self.replicas, "shards": self.shards} if self.replicas > 1 < self.shards else {"dp": self.dp}
        )
        sizes = {"pp": self.pp} | data | {"cp": self.cp, "tp": self.tp}
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"

    def __str__(self) -> str:
        words = [self.axes, ("plain data parallelism", "ZeRO-1", "ZeRO-2", "FSDP")[self.zero] if self.dp > 1 else ""]
        words += ["sequence parallel" * self.sequence_parallel]
        words += [f"experts over {self.ep} ranks" if self.ep > 1 else ""]
        if self.pp > 1:
            words += [self.schedule + f" with {self.stages_per_rank} stages a rank" * (self.stages_per_rank > 1)]
        words += [f"{self.accumulation} micro-batch{'es' * (self.accumulation > 1)} of {self.batch}"]
        words += [f"recompute {self.recompute}" if self.recompute != "none" else ""]
        return ", ".join(word for word in words if word)
