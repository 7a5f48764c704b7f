"""The part of a parameter that each rank holds, when a matrix is split over ranks.

Features        cut as torch.chunk cuts: any number of features, with shorter last parts
Queries, Keys   cut between heads: a rank has whole query heads, and the key and value heads that its queries read
Cut             the parts of one parameter along one dim

    8 query heads, 2 of keys and values      2 ranks        4 ranks             8 ranks
        queries of each rank                 4              2                   1
        keys and values                      0 | 1          0 | 0 | 1 | 1       0 | 0 | 0 | 0 | 1 | 1 | 1 | 1

If there are fewer heads of keys and values than ranks, neighbouring ranks have the same head.  Each of these ranks
computes a gradient from its own queries alone, so the ranks' gradients must be added up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from labs import group as groups
from labs.dtensor.placement import piece
from labs.mesh import Mesh


@dataclass(frozen=True)
class Cut:
    """A cut of a tensor along `dim` into parts of the ranks: rank r has the indices from starts[r] up to stops[r].

    copies: the number of neighbours that have the same part.
    parts: the number of matrices that are fused along `dim`, as in q|k|v; a rank has these indices of each of them.
    """

    dim: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    copies: int = 1
    parts: int = 1

    def slices(self, rank: int) -> tuple[slice | Tensor, ...]:
        """Return indices such that whole[cut.slices(rank)] is the rank's part; a list of them for fused matrices."""
        mine = slice(self.starts[rank], self.stops[rank])
        if self.parts > 1:
            mine = torch.arange(self.parts * max(self.stops), device="cpu").view(self.parts, -1)[:, mine].flatten()
        return (*[slice(None)] * self.dim, mine)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return whole[self.slices(rank)]

    def whole(self, part: Tensor, mesh: Mesh) -> Tensor:
        """Gather the parts of all ranks, padded to the longest part, and return the whole tensor."""
        sizes = [self.parts * (stop - start) for start, stop in zip(self.starts, self.stops, strict=True)]
        longest, first = max(sizes), part.detach().movedim(self.dim, 0)
        mine = pad(first, [0, 0] * (part.ndim - 1) + [0, longest - len(first)]).contiguous()
        parts = mine.new_empty(mesh.size(), *mine.shape)
        groups.all_gather(parts.view(-1), mine.view(-1), group=mesh.get_group())
        own = [parts[rank, : sizes[rank]] for rank in range(0, mesh.size(), self.copies)]
        whole = torch.cat(own)
        if self.parts > 1:
            places = [self.slices(rank)[self.dim] for rank in range(0, mesh.size(), self.copies)]
            whole = whole[torch.cat(places).argsort()]
        return whole.movedim(0, self.dim).contiguous()


@dataclass(frozen=True)
class Features:
    """A dim of features, which can be cut between any two of them."""

    def cut(self, size: int, dim: int, ranks: int) -> Cut:
        pieces = [piece(size, ranks, rank) for rank in range(ranks)]
        return Cut(dim, tuple(start for start, _ in pieces), tuple(start + length for start, length in pieces))


@dataclass(frozen=True)
class Queries:
    """A dim of H query heads, which share K heads of keys and values."""

    heads: int
    kv_heads: int

    def cut(self, size: int, dim: int, ranks: int) -> Cut:
        require_heads(self.heads, self.kv_heads, ranks)
        if ranks > self.kv_heads:
            return even(size, dim, ranks, self.heads)
        return even(size, dim, ranks, self.kv_heads)


@dataclass(frozen=True)
class Keys:
    """A dim of K heads of keys, or of values, which H query heads share."""

    heads: int
    kv_heads: int

    def cut(self, size: int, dim: int, ranks: int) -> Cut:
        require_heads(self.heads, self.kv_heads, ranks)
        if ranks <= self.kv_heads:
            return even(size, dim, ranks, self.kv_heads)
        copies, head = ranks // self.kv_heads, width(size, self.kv_heads)
        starts = tuple(rank // copies * head for rank in range(ranks))
        return Cut(dim, starts, tuple(start + head for start in starts), copies)


def even(size: int, dim: int, ranks: int, units: int) -> Cut:
    """Return a cut into whole units, as evenly as possible; with a remainder, the first ranks get one unit more."""
    unit, (least, more) = width(size, units), divmod(units, ranks)
    ends = [(rank * least + min(rank, more)) * unit for rank in range(ranks + 1)]
    return Cut(dim, tuple(ends[:-1]), tuple(ends[1:]))


def width(size: int, units: int) -> int:
    if size % units:
        raise ValueError(f"{size} features are not {units} heads of one width")
    return size // units


def require_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless each rank can have whole query heads, and the heads of keys and values that they read."""
    if not fits(heads, kv_heads, ranks):
        work = [n for n in range(1, heads + 1) if fits(heads, kv_heads, n)]
        nearest = [*[n for n in work if n < ranks][-1:], *[n for n in work if n > ranks][:1]]
        raise ValueError(
            f"{heads} query heads over {kv_heads} of keys and values cannot be split over {ranks} ranks: "
            f"use {' or '.join(map(str, nearest))}"
        )


def fits(heads: int, kv_heads: int, ranks: int) -> bool:
    return ranks <= kv_heads or (ranks % kv_heads == 0 and heads % ranks == 0)
