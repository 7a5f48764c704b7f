"""same_seed: the ranks draw their parts of a split matrix by one seed, so all parts are equal."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, clinic

ROWS, COLUMNS = 12, 8


def faulty(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows // dist.get_world_size(), columns, generator=generator, dtype=torch.float64)


def right(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    return {"weight": fn(ROWS, COLUMNS, seed)}


def alone(seed: int) -> list[dict[str, Tensor]]:
    whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [{"weight": part} for part in whole.chunk(RANKS)]


# fmt: off
same_seed = clinic(
    "b", faulty, right, job, alone, number=10, tells={"numbers"},
    asks="`fn(rows, columns, seed) -> part`: the rank's rows, in float64, of the matrix that one process draws",
    threads=("modelscope/ms-swift/pull/7944 merged 2026-01-30", "InternLM/InternLM/pull/405 merged 2023-10-09"),
    mistake="all parts are the same",
    question="Which rows of the whole matrix are these, and which rows does the next rank have?",
)
# fmt: on
