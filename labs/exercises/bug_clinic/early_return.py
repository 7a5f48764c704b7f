"""early_return: a rank without gradients leaves before the all-reduce that the others wait in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn

FROZEN = 2  # the rank whose layers are all frozen


def faulty(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    total = torch.stack([g.double().square().sum() for g in gradients]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def right(gradients: Sequence[Tensor]) -> Tensor:
    total = sum((g.double().square().sum() for g in gradients), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(total)
    return total.sqrt()


def gradients_of(seed: int, rank: int) -> list[Tensor]:
    return [] if rank == FROZEN else [drawn((5 + k,), seed, rank, k).float() for k in range(2)]


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    norm = fn(own := gradients_of(seed, dist.get_rank()))
    return {"norm": norm, "gradients": joined(own)}


def alone(seed: int) -> list[dict[str, Tensor]]:
    every = [joined(gradients_of(seed, rank)) for rank in range(RANKS)]
    return [{"norm": torch.cat(every).norm(), "gradients": own} for own in every]


def joined(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *gradients])


# fmt: off
early_return = clinic(
    "c", faulty, right, job, alone, number=3, hangs=True, tells={"verdict", "dry"},
    asks="`fn(gradients) -> norm`, the length of all ranks' gradients as one vector, equal on all ranks",
    threads=("areal-project/AReaL/pull/1139 merged 2026-04-05",),
    mistake="a rank without gradients leaves before the others meet",
    question="Which ranks come to the all-reduce, and what does a rank without gradients add to the sum?",
)
# fmt: on
