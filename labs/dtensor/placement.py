"""The layout of a tensor on a mesh: one of three placements for each axis of the mesh.

    Shard(dim)     each rank along the axis holds a piece of the tensor, cut along `dim`
    Replicate()    each rank along the axis holds all of it
    Partial()      each rank along the axis holds a summand with the whole's shape: their sum is the tensor

    a 2-D tensor on 4 ranks        Shard(0)     Shard(1)     Replicate()    Partial()
    rank 1 holds                   ┌───────┐    ┌─┬─┬─┬─┐    ┌───────┐      ┌───────┐
                                   ├───────┤    │ │█│ │ │    │███████│      │░░░░░░░│  + the others'
                                   │███████│    │ │█│ │ │    │███████│      │░░░░░░░│  = the tensor
                                   └───────┘    └─┴─┴─┴─┘    └───────┘      └───────┘

A dim is cut as `torch.chunk` cuts it: into pieces of ceil(size / N), of which the last may be shorter; any pieces after
it are empty.  If two axes of the mesh cut the same dim, the second axis cuts the pieces of the first.

This file is arithmetic, without tensors or processes.  Its names and results are those of torch.distributed.tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


class Placement:
    """A placement: Shard, Replicate or Partial.  Two placements are equal if they have the same kind and dim."""

    def is_shard(self, dim: int | None = None) -> bool:
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        return isinstance(self, Partial)


@dataclass(frozen=True)
class Shard(Placement):
    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise TypeError(f"Shard({self.dim!r}): give the number of a dim, as in Shard(0)")

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Replicate(Placement):
    pass


@dataclass(frozen=True)
class Partial(Placement):
    """The placement of a tensor as a sum, with a summand on each rank; torch's also has avg, min, max and product."""


@dataclass(frozen=True)
class Spec:
    """A layout without data: the tensor's shape, the mesh's, and a placement for each of the mesh's axes."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def block(self, coordinate: Sequence[int]) -> "Block":
        """Return the block that the rank at this place of the mesh holds."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for placement, ranks, place in zip(self.placements, self.mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                start, shape[placement.dim] = piece(shape[placement.dim], ranks, place)
                offset[placement.dim] += start
        return Block(tuple(offset), tuple(shape))

    def pieces(self, dim: int) -> int:
        """Return the number of pieces into which a dim of the tensor is cut."""
        cuts = zip(self.placements, self.mesh, strict=True)
        return prod(ranks for placement, ranks in cuts if placement.is_shard(dim))

    def but(self, placements: Sequence[Placement]) -> "Spec":
        return Spec(self.shape, self.mesh, tuple(placements))


@dataclass(frozen=True)
class Block:
    """A block of a tensor: the block's offset and its size in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return slices that select the block: full[block.slices]."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


def piece(size: int, pieces: int, number: int) -> tuple[int, int]:
    """Return the offset and the size of a piece of a dim, as torch.chunk cuts it; pieces beyond the end are empty.

    Raises ValueError for a piece that does not exist, or a negative size.
    """
    if size < 0 or not 0 <= number < pieces:
        raise ValueError(
            f"piece {number} of {pieces} of a dim of size {size}: give a size of 0 or more, and count pieces from 0"
        )
    longest = longest_piece(size, pieces)
    start = min(number * longest, size)
    return start, min(longest, size - start)


def longest_piece(size: int, pieces: int) -> int:
    return -(-size // pieces)


def whole_shape(local: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the whole tensor's shape, if all blocks are equal: each cut dim is multiplied by the ranks that cut it."""
    shape = list(local)
    for placement, ranks in zip(placements, mesh, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= ranks
    return tuple(shape)


def normalised(placements: Sequence[Placement] | None, ndim: int, axes: int) -> tuple[Placement, ...]:
    """Return one placement per axis, with non-negative dims; the default is Replicate().

    Raises ValueError, TypeError or IndexError for placements that do not fit the mesh or the tensor.
    """
    if placements is None:
        return (Replicate(),) * axes
    if isinstance(placements, Placement):
        raise TypeError(f"placements={placements!r}: give one for each axis of the mesh, as in [{placements!r}]")
    if len(placements) != axes:
        raise ValueError(f"{len(placements)} placements {list(placements)}: a mesh of {axes} axes needs {axes}")
    for placement in placements:
        if not isinstance(placement, Placement):
            raise TypeError(f"{placement!r} is no placement: give Shard(dim), Replicate() or Partial()")
        if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
            has = f"has the dims 0 to {ndim - 1}" if ndim else "of 0 dims cannot be cut"
            raise IndexError(f"{placement!r}: a tensor {has}")
    return tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements)
