"""The collectives of the exercises: what a rank brings, what it must have afterwards, and the least this can cost.

    collective       tensors sent, all ranks    messages of a rank    rounds allowed (a ring's; twice if calls block)
    broadcast        N - 1                      ceil(log2 N)          ceil(log2 N)
    reduce_scatter   N - 1                      N - 1                 2 (N - 1)
    all_gather       N - 1                      N - 1                 2 (N - 1)
    all_reduce       2 (N - 1)                  2 (N - 1)             4 (N - 1)

A reduce_scatter or an all_gather cannot send less than N - 1 tensors in all, an all_reduce twice that (Patarasuk and
Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"); a broadcast needs N - 1 messages,
and ceil(log2 N) rounds, as the ranks that know at most double in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks.wire import nonsense


@dataclass(frozen=True)
class Case:
    """One call: `size` elements of `dtype` from global rank `root`, in the group of the global ranks `members`."""

    seed: int
    size: int
    members: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    root: int = 0
    subgroup: bool = False
    shape: tuple[int, ...] = ()  # of `size` elements; one dimension if it is left out

    def tensor(self, rank: int) -> Tensor:
        """What global rank `rank` brings; numbers that bfloat16 adds up exactly, and that float32 cannot hold."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        if self.dtype is torch.bfloat16:
            return torch.randint(1, 32, (self.size,), generator=generator).to(self.dtype)
        if self.dtype is torch.int64:
            return torch.randint(2**54, 2**56, (self.size,), generator=generator)
        return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.dtype)

    def pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.tensor_split(len(self.members))

    def __str__(self) -> str:
        within = f"the group of ranks {self.members}" if self.subgroup else f"{len(self.members)} ranks"
        dtype = str(self.dtype).removeprefix("torch.")
        size = (
            f"a tensor of shape {self.shape}" if self.shape else f"{self.size} element{'' if self.size == 1 else 's'}"
        )
        return f"{within}, {size} of {dtype}"


@dataclass(frozen=True)
class Outcome:
    """What one rank had when its call was over."""

    tensor: Tensor
    returned: Any
    touched: list[int]


@dataclass(frozen=True)
class Kind:
    """A collective: what a rank brings, what it must have afterwards, and the least that this can cost."""

    name: str
    brings: Callable[[Case, int], Tensor]
    expected: Callable[[Case, int], Tensor]  # by index in the group
    copies: Callable[[int], int]  # tensors sent by all ranks together
    messages: Callable[[int], int]  # sent by one rank at most
    rounds: Callable[[int], int]
    question: str
    rooted: bool = False
    returns_piece: bool = False


def total(case: Case) -> Tensor:
    return torch.stack([case.tensor(rank) for rank in case.members]).sum(0)


def only_my_piece(case: Case, index: int) -> Tensor:
    """The full tensor's piece `index`, and nonsense elsewhere."""
    tensor = nonsense(torch.empty(case.size, dtype=case.dtype))
    case.pieces(tensor)[index].copy_(case.pieces(case.tensor(63))[index])
    return tensor


def bring_own(case: Case, index: int) -> Tensor:
    return case.tensor(case.members[index])


BROADCAST = Kind(
    "broadcast",
    bring_own,
    lambda case, index: case.tensor(case.root),
    copies=lambda n: n - 1,
    messages=lambda n: math.ceil(math.log2(n)),
    rounds=lambda n: math.ceil(math.log2(n)),
    question="After one round two ranks know the tensor. How many could know it after the next one?",
    rooted=True,
)
REDUCE_SCATTER = Kind(
    "reduce_scatter",
    bring_own,
    lambda case, index: case.pieces(total(case))[index],
    copies=lambda n: n - 1,
    messages=lambda n: n - 1,
    rounds=lambda n: 2 * (n - 1),
    question="Which one piece does the neighbour need from you in this round?",
    returns_piece=True,
)
ALL_GATHER = Kind(
    "all_gather",
    only_my_piece,
    lambda case, index: case.tensor(63),
    copies=lambda n: n - 1,
    messages=lambda n: n - 1,
    rounds=lambda n: 2 * (n - 1),
    question="Which piece did you receive in the round before, and who lacks it now?",
)
ALL_REDUCE = Kind(
    "all_reduce",
    bring_own,
    lambda case, index: total(case),
    copies=lambda n: 2 * (n - 1),
    messages=lambda n: 2 * (n - 1),
    rounds=lambda n: 4 * (n - 1),
    question="What if each rank first became responsible for the sum of one piece only?",
)

KINDS = {kind.name: kind for kind in (BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)}
