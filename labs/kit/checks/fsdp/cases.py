"""What the checks of FSDP are tried on: groups of parameters cut by rows, walks over layers, gradients on a grid.

Group     parameters of a layer; rank r holds rows r·R to (r + 1)·R of each, R = ceil(rows / N), the last ranks less
Walk      layers in the order in which they are used, there and back
Grid      a gradient on a mesh of replicas × shards
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks import case as shared

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
WIDE = 64  # rows of the parameters whose bytes held are measured


@dataclass(frozen=True)
class Group(shared.Case):
    """`dtype` is the one that the layer computes in; the shards are of dtype `rest`."""

    shapes: tuple[tuple[int, ...], ...] = ((5, 3), (3,))
    rest: torch.dtype = FP64
    steps: int = 2
    held: bool = False  # bytes held are measured: nothing else is noted

    def wholes(self, step: int) -> list[Tensor]:
        """All of each parameter as it is in this step: every rank knows it, and the learner's function does not."""
        generator = self.generator(step=step)
        draws = [torch.randn(shape, generator=generator, dtype=FP64) for shape in self.shapes]
        return [draw.to(self.rest) for draw in draws]

    def shards(self, step: int, rank: int) -> list[Tensor]:
        rows = [self.rows(shape) for shape in self.shapes]
        return [whole[rank * n : (rank + 1) * n].clone() for whole, n in zip(self.wholes(step), rows, strict=True)]

    def rows(self, shape: tuple[int, ...]) -> int:
        """Of a piece."""
        return -(-shape[0] // self.ranks)

    @property
    def nbytes(self) -> int:
        """Of all parameters, whole."""
        return sum(map(prod, self.shapes)) * self.dtype.itemsize

    @property
    def row(self) -> int:
        """Bytes that a rank brings, padding included."""
        return sum(self.rows(shape) * prod(shape[1:]) for shape in self.shapes) * self.dtype.itemsize

    def __str__(self) -> str:
        if self.held:
            return f"{self.who}, {self.dtype_name}, {len(self.shapes)} parameters"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.who}, {self.dtype_name}, parameters {shapes}"


@dataclass(frozen=True)
class Walk(shared.Case):
    """`order`: the number of the layer that is used first, second, ...; one may be used more than once."""

    sizes: tuple[int, ...] = (6, 6, 6)  # elements of each layer
    order: tuple[int, ...] = (0, 1, 2)

    def piece(self, call: int, number: int, rank: int) -> Tensor:
        """This rank's, in this call."""
        generator = self.generator(rank, 8 * call + number)
        return torch.randn(self.sizes[number], generator=generator, dtype=FP64).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.who}, layers {', '.join(map(str, self.order))}"


@dataclass(frozen=True)
class Grid(shared.Case):
    """`shape`: replicas, shards; `n`: elements of the gradient, a multiple of the shards."""

    shape: tuple[int, int] = (2, 2)
    n: int = 12
    held: bool = False

    def gradient(self, call: int, rank: int) -> Tensor:
        return torch.randn(self.n, generator=self.generator(rank, call), dtype=FP64).to(self.dtype)

    @property
    def places(self) -> Tensor:
        """The ranks: [replicas, shards]."""
        return torch.arange(self.ranks).view(self.shape)

    def __str__(self) -> str:
        return f"{self.shape[0]} × {self.shape[1]} ranks, {self.n} elements of {self.dtype_name}"


class Draw:
    """Cases by chance, by number of ranks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    @property
    def seed(self) -> int:
        return self.random.randrange(2**40)

    def groups(self) -> dict[int, list[Group]]:
        def shapes(*rows: int) -> tuple[tuple[int, ...], ...]:
            return tuple((n, *self.random.choice(((2,), (3,), (2, 3), ()))) for n in rows)

        pick = self.random.choice
        return {
            3: [Group(self.seed, 3, shapes=shapes(7, 4, 3)), Group(self.seed, 3, shapes=shapes(1, pick((5, 8)), 2))],
            2: [
                Group(self.seed, 2, shapes=shapes(pick((3, 5)), 1), dtype=BF16, rest=FP32),
                Group(self.seed, 2, shapes=((4, 3), (2,)), dtype=FP32, rest=FP32, steps=1),
            ],
            4: [
                Group(self.seed, 4, shapes=shapes(5, pick((6, 7)), 1, 2), steps=3),
                Group(self.seed, 4, shapes=((8, 3), *shapes(pick((9, 11)))), dtype=BF16, rest=FP32),
                Group(self.seed, 4, shapes=shapes(8, 4), steps=1),  # nothing to pad: the line of success is of it
            ],
        }

    def wide(self) -> Group:
        shapes = (*((WIDE, WIDE // 2),) * 16, (WIDE,))  # many: a copy of one of them is no copy of the group
        return Group(self.seed, 4, shapes=shapes, dtype=BF16, rest=FP32, steps=4, held=True)

    def walks(self) -> dict[int, list[Walk]]:
        def walk(ranks: int, layers: int, *again: int, **options: Any) -> Walk:
            sizes = tuple(self.random.randrange(3, 9) for _ in range(layers))
            only = "right only where no layer comes twice" if again else ""
            return Walk(self.seed, ranks, sizes=sizes, order=(*range(layers), *again), only=only, **options)

        return {
            2: [walk(2, 2), walk(2, self.random.randrange(4, 7)), walk(2, 1), walk(2, 3, 0)],
            4: [walk(4, 5, dtype=BF16), walk(4, 3, 1)],
        }

    def grids(self) -> dict[int, list[Grid]]:
        def grid(*shape: int, by: int = 0, **options: Any) -> Grid:
            n = shape[1] * (by or self.random.randrange(7, 12))
            return Grid(self.seed, prod(shape), shape=shape, n=n, **options)

        return {
            6: [grid(2, 3, by=2 * self.random.randrange(4, 7)), grid(3, 2, by=9, dtype=FP32)],
            2: [grid(1, 2), grid(2, 1)],
            4: [
                grid(2, 2),
                grid(2, 2, dtype=BF16),
                grid(4, 1),
                grid(1, 4, dtype=FP32),
                grid(2, 2, by=1000, dtype=BF16),
                grid(2, 2, by=30),
            ],
        }

    def wide_grid(self) -> Grid:
        return Grid(self.seed, 4, shape=(2, 2), n=40_000, dtype=FP32, held=True)


def places(cases: list[Any]) -> Iterator[tuple[int, Any]]:
    """(number of its first step in the recording, case)."""
    first = 0
    for case in cases:
        yield first, case
        first += case.steps if isinstance(case, Group) else 2
