"""The collectives of the exercises: the least that each can cost, and the inputs on which it is measured.

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

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks import case as shared
from labs.kit.checks.wire import nonsense

BUDGET = 4096  # float32 elements; the same in every call, so that the line of success is
LARGE = 1 << 16  # elements of the case whose bytes held are measured
POWERS_ONLY = "right only when the number of ranks is a power of two"
ALL_RANKS_ONLY = "right only on the group of all ranks"


@dataclass(frozen=True)
class Case(shared.Case):
    """One call: `size` elements from global rank `root`, in the group of the global ranks `members`."""

    size: int
    root: int = 0
    group: tuple[int, ...] = ()  # all ranks if it is left out
    shape: tuple[int, ...] | None = None  # of `size` elements; one dimension if it is left out
    strided: bool = False  # not contiguous: an error is a right answer, too

    @property
    def members(self) -> tuple[int, ...]:
        return self.group or tuple(range(self.ranks))

    def tensor(self, rank: int) -> Tensor:
        """What global rank `rank` brings; numbers that bfloat16 adds up exactly, and that float32 cannot hold."""
        generator = self.generator(rank)
        if self.dtype is torch.bfloat16:
            return torch.randint(1, 32, (self.size,), generator=generator).to(self.dtype)
        if self.dtype is torch.int64:
            return torch.randint(2**54, 2**56, (self.size,), generator=generator)
        return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.dtype)

    def pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.tensor_split(len(self.members))

    def laid_out(self, values: Tensor) -> Tensor:
        """`values` in this case's shape, and in its order in memory."""
        x = values.view(self.shape if self.shape is not None else (-1,))
        return x.t().contiguous().t() if self.strided else x

    def __str__(self) -> str:
        within = f"the group of ranks {self.members}" if self.group else self.who
        elements = f"{self.size} element{'s' * (self.size != 1)}"
        size = elements if self.shape is None else f"a tensor of shape {self.shape}"
        return f"{within}, {size} of {self.dtype_name}{', not contiguous' * self.strided}"


@dataclass(frozen=True)
class Kind:
    """A collective: what a rank brings, what it must have afterwards, and the least that this can cost."""

    name: str
    brings: Callable[[Case, int], Tensor]  # by index in the group
    expected: Callable[[Case, int], Tensor]
    question: str
    rooted: bool = False
    sums: bool = False
    returns_piece: bool = False
    halves: int = 1  # of an all-reduce

    def copies(self, n: int) -> int:
        """Tensors sent by all ranks together."""
        return self.halves * (n - 1)

    def messages(self, n: int) -> int:
        """Sent by one rank at most."""
        return math.ceil(math.log2(n)) if self.rooted else self.copies(n)

    def rounds(self, n: int) -> int:
        return math.ceil(math.log2(n)) if self.rooted else 2 * self.copies(n)


def total(case: Case) -> Tensor:
    return torch.stack([case.tensor(rank) for rank in case.members]).sum(0)


def only_my_piece(case: Case, index: int) -> Tensor:
    """The full tensor's piece `index`, and nonsense elsewhere."""
    tensor = nonsense(torch.empty(case.size, dtype=case.dtype))
    case.pieces(tensor)[index].copy_(case.pieces(case.tensor(63))[index])
    return tensor


def bring_own(case: Case, index: int) -> Tensor:
    return case.tensor(case.members[index])


def bring_own_or_infinity(case: Case, index: int) -> Tensor:
    """Of float32 all but the root bring infinity, which must leave no trace."""
    own = bring_own(case, index)
    return own.fill_(torch.inf) if case.dtype is torch.float32 and case.members[index] != case.root else own


BROADCAST = Kind(
    "broadcast",
    bring_own_or_infinity,
    lambda case, index: case.tensor(case.root),
    "After one round two ranks know the tensor. How many could know it after the next one?",
    rooted=True,
)
REDUCE_SCATTER = Kind(
    "reduce_scatter",
    bring_own,
    lambda case, index: case.pieces(total(case))[index],
    "Which one piece does the neighbour need from you in this round?",
    sums=True,
    returns_piece=True,
)
ALL_GATHER = Kind(
    "all_gather",
    only_my_piece,
    lambda case, index: case.tensor(63),
    "Which piece did you receive in the round before, and who lacks it now?",
)
ALL_REDUCE = Kind(
    "all_reduce",
    bring_own,
    lambda case, index: total(case),
    "What if each rank first became responsible for the sum of one piece only?",
    sums=True,
    halves=2,
)
KINDS = {kind.name: kind for kind in (BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)}


def drawn(kind: Kind, seed: int) -> dict[int, list[Case]]:
    """The cases by number of ranks; those of 4 ranks begin with the idea itself, and the budget's."""
    draw = random.Random(seed)
    seeds = itertools.count(draw.randrange(2**40))

    def case(ranks: int, size: int, only: str = "", **options: Any) -> Case:
        return Case(next(seeds), ranks, size, only=only, **options)

    def odd(n: int) -> int:
        return n * draw.randrange(3, 9) + draw.randrange(1, n)

    def on(ranks: int, *sizes: int, only: str) -> list[Case]:
        return [case(ranks, size, only, root=root % ranks) for root, size in enumerate(sizes)]

    even, many = 4 * draw.randrange(6, 12), draw.choice((5, 6, 7, 8))
    whole = "right only for some sizes" if kind.rooted else "right only when the number of ranks divides the size"
    one_dimension, root_0 = "right only in one dimension", "right only from root 0"
    four = [
        case(4, even),
        case(4, BUDGET, dtype=torch.float32),
        case(4, even, "right only in the first call"),
        *(case(4, size, whole) for size in (odd(4), 4 * draw.randrange(3, 9) + 2, 3, 1, 0)),
        *(case(4, math.prod(shape), one_dimension, shape=shape) for shape in ((3, 5), (7, 5), ())),
        *(case(4, odd(4), root_0, root=root) for root in (2, 1, 3) if kind.rooted),
        *(
            case(4, odd(4), "right only in some dtypes", dtype=dtype)
            for dtype in (torch.float32, torch.int64, torch.bfloat16)
        ),
        *(case(4, size, ALL_RANKS_ONLY, root=root, group=(1, 2, 3)) for size, root in ((12, 2), (odd(3), 1))),
        # In a group of its own: what it sends before it refuses is nobody else's.
        case(4, 15, "right only for contiguous tensors", shape=(3, 5), strided=True, group=(0, 1, 2, 3)),
    ]
    return {
        4: four,
        # Large comes where what is right by luck has been told: a large message that nobody waits for may hang.
        3: [
            *on(3, 3 * draw.randrange(2, 7), odd(3), 2, only=POWERS_ONLY),
            case(3, LARGE, "right only for small tensors", dtype=torch.float32),
        ],
        2: on(2, 2 * draw.randrange(2, 7), odd(2), 1, only="right only on more than two ranks"),
        1: on(1, draw.randrange(2, 7), 0, only="right only on more than one rank"),
        many: on(many, odd(many), many, many - 1, only="right only on up to four ranks"),
    }


def held(seed: int) -> Case:
    """The case whose bytes held are measured."""
    return Case(seed, 4, LARGE, dtype=torch.float32)
