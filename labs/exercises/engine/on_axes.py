"""Worlds on a mesh of several axes: the tensor of each rank, and sums and means of the tensors along some axes."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.on_ranks import F64
from labs.exercises.engine.scripts import World
from labs.mesh import Mesh


@cache
def mesh_of(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    return Mesh(shape, axes)


@dataclass(frozen=True)
class OnMesh(World):
    """A world whose ranks each have a tensor; ranks that differ only along the axes `alike` have the same tensor."""

    shape: tuple[int, ...] = (2, 2)
    axes: tuple[str, ...] = ("dp", "tp")
    alike: tuple[str, ...] = ()
    size: tuple[int, ...] = (5,)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def mesh(self) -> Mesh:
        """The mesh that the learner's function gets, made on a rank."""
        return mesh_of(self.shape, self.axes)

    def process_group(self) -> dict[str, Any]:
        mesh_of(self.shape, self.axes)  # a mesh makes groups, so it is made before a step begins
        return {}

    def place(self, rank: int) -> tuple[int, ...]:
        return Mesh(self.shape, self.axes, rank=rank).get_coordinate()

    def first_alike(self, rank: int, alike: tuple[str, ...]) -> int:
        """Return the first of the ranks that differ from this one at most along these axes."""
        place = [0 if axis in alike else i for axis, i in zip(self.axes, self.place(rank), strict=True)]
        return int(Mesh(self.shape, self.axes, rank=rank).mesh[tuple(place)])

    def tensor(self, rank: int) -> Tensor:
        generator = self.generator(self.first_alike(rank, self.alike))
        return torch.randn(self.size, generator=generator, dtype=F64).to(self.dtype)

    @cached_property
    def brought(self) -> Tensor:
        """The tensors of all ranks in float64: [sizes of the axes, size of the tensor]."""
        return torch.stack([self.tensor(rank).double() for rank in range(prod(self.shape))]).view(*self.shape, -1)

    def combined(self, how: dict[str, str]) -> list[Tensor]:
        """Return for each rank the sum, or mean, of the tensors along these axes: {"dp": "mean", "tp": "sum"}."""
        found = self.brought
        for axis, by in how.items():
            number = self.axes.index(axis)
            added = found.sum(number, keepdim=True) / (self.sizes[axis] if by == "mean" else 1)
            found = added.expand_as(found)
        return [each.view(self.size).to(self.dtype) for each in found.reshape(-1, found.shape[-1])]

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{' × '.join(f'{axis} {size}' for axis, size in self.sizes.items())}, {self.dtype_name}"


def ring(part: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a reduce-scatter, or an all-gather, of `part` bytes."""
    return part * (ranks - 1) / ranks
