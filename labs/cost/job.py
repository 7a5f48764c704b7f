"""The job that a prediction is about.

job = cost.Job(PRESETS["tiny"], batch=3, ranks=4)
cost.zero(job, stage=2).held.peak
cost.zero(replace(job, accumulation=4), stage=2).sent         # dataclasses.replace changes one field
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from labs.cost.model_states import FLOAT, bytes_of
from labs.cost.sense import checked
from labs.cost.split import Share, share

RECOMPUTE = ("none", "selective", "all but attention", "full")


@checked
@dataclass(frozen=True)
class Job:
    """A step of `GPT(config)` with AdamW on one of its ranks; any step but the first.

    config          the shape of the model, a `labs.model.Config`
    batch           sequences that the rank reads at a time
    ranks, rank     number of ranks, and the rank that the prediction is for
    context         tokens of a sequence; the config's by default
    accumulation    micro-batches in a step, each of `batch` sequences
    precision       a name in PIE
    recompute       a name in RECOMPUTE: the part of a layer that is recomputed (`labs.memory.recompute`)
    fused_norms     whether RMSNorm is one kernel (CUDA), which saves fewer activations

    Raises ValueError for a job that cannot be run.
    """

    config: Any
    batch: int
    ranks: int = 1
    rank: int = 0
    context: int | None = None
    accumulation: int = 1
    precision: str = "float32"
    recompute: str = "none"
    fused_norms: bool = False

    def __post_init__(self) -> None:
        if self.config.context < self.T:
            raise ValueError(
                f"context is {self.T}, more than the model's {self.config.context}: "
                "shorten it, or give a config with dataclasses.replace(config, context=...)"
            )
        if self.config.head_size == 2:
            raise ValueError(
                f"head size 2 (dim {self.config.dim} / {self.config.heads} heads): PyTorch does not fuse attention of "
                "heads that are single pairs, and there is no formula for that; make them 4 wide or wider"
            )
        bytes_of(self.precision)
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}: it must be one of {', '.join(map(repr, RECOMPUTE))}")

    @property
    def T(self) -> int:
        return self.config.context if self.context is None else self.context

    @property
    def tokens(self) -> int:
        """Return the number of tokens that pass through the model at a time."""
        return self.batch * self.T

    @property
    def own(self) -> Share:
        """Return the rank's share of the model: the whole model, unless the config is a Share already."""
        return share(self.config)

    @property
    def between(self) -> int:
        """Return the rank's tokens between split layers: its shard, if x is cut along the sequence there."""
        return self.tokens // self.own.shards

    @property
    def size(self) -> Mapping[str, int]:
        """Return the bytes per parameter of P, G and S."""
        return bytes_of(self.precision)

    @property
    def itemsize(self) -> int:
        """Return the bytes of an activation's element."""
        return self.size["P"]

    @property
    def losses(self) -> int:
        """Return the bytes of the losses of earlier micro-batches, which are held until the step is over."""
        return FLOAT * (self.accumulation - 1)

    @property
    def masters(self) -> bool:
        """Return whether the optimizer steps float32 copies of the parameters."""
        return self.precision != "float32"

    def require(self, by: str, experts: bool = False, **only: Collection) -> None:
        """Raise ValueError if a field has another value than those that the formula `by` is for.

        experts: whether the formula is for models with experts; others would take them for one MLP
        """
        if hasattr(self.config, "experts") and not experts:
            raise ValueError(
                f"the model has {self.config.experts} experts, and {by} predicts models without any: use "
                "cost.expert_parallel, cost.fsdp_experts or cost.torch_expert_parallel"
            )
        for name, values in only.items():
            if getattr(self, name) not in values:
                known = " or ".join(map(repr, values))
                raise ValueError(f"{name} is {getattr(self, name)!r}: {by} predicts jobs with {known} only")
