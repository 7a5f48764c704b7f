"""A grid of ranks with named axes.  A grid is arithmetic alone; `labs.mesh.mesh` adds the process groups.

With one strategy, every rank communicates with every other one.  With two strategies, a rank communicates with some
ranks for the first strategy, and with other ranks for the second.  So the ranks are laid out as a grid, row by row,
with a name for each axis:

    Grid((2, 4), ("dp", "tp"))            tp 0   1   2   3       groups along tp: 0 1 2 3 · 4 5 6 7
                                   dp 0      0   1   2   3                    dp: 0 4 · 1 5 · 2 6 · 3 7
                                      1      4   5   6   7

    get_coordinate     returns this rank's place on the grid: rank 5 is at (1, 1)
    groups_of          returns the ranks along an axis, for every place on the other axes
    grid["tp"]         the part of the grid along these axes that this rank is in: a grid, too
    _flatten           joins several axes into one: the data-parallel ranks of HSDP are replicas times shards

**The order of the axes is a decision.**  Ranks with neighbouring numbers share a node, and the last axis consists of
such neighbours.  So the axis that sends the most bytes, such as that of tensor parallelism, goes last, and the one that
sends the fewest goes first.

The methods of a grid have the names and results of torch's DeviceMesh; `groups_of` alone is ours.
"""

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import Self

import torch

Axes = tuple[str, ...]
ROWS, COLUMNS, GROUPS = 16, 8, 8  # the most that a picture of a mesh shows


class Grid:
    """A grid of ranks with named axes; its attribute `mesh` is the tensor of the ranks.

    shape: number of ranks along each axis
    mesh_dim_names: names of the axes, outermost first
    rank: the rank whose view of the grid this is: `get_coordinate` and parts of the grid are this rank's

    Raises ValueError for sizes and names that do not fit each other, and for a rank that is not on the grid.
    """

    def __init__(self, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...], rank: int | None = None):
        require_grid(shape, mesh_dim_names)
        if rank is not None and (type(rank) is not int or not 0 <= rank < prod(shape)):
            raise ValueError(
                f"rank {rank!r} is not on the mesh {equation(shape, mesh_dim_names)}: give 0 to {prod(shape) - 1}"
            )
        self.mesh = torch.arange(prod(shape), device="cpu").view(shape)
        self.mesh_dim_names = tuple(mesh_dim_names)
        self.rank = rank
        self.coordinate = place_of(self.rank, self.mesh)
        self.part_of: Self | None = None
        self.made_of = {name: (name,) for name in mesh_dim_names}  # for each axis, the axes of the root that it joins

    @property
    def root(self) -> Self:
        """Return the whole grid.  An attribute for the root would be a reference cycle, which Python frees late."""
        return self if self.part_of is None else self.part_of

    # ---- the grid ----------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks, of the whole grid or along an axis."""
        return self.mesh.numel() if mesh_dim is None else self.shape[self.number(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...]:
        """Return this rank's place on the grid, one number per axis."""
        self.require_rank()
        return self.coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's place along one axis."""
        return self.get_coordinate()[self.number(mesh_dim)]

    def groups_of(self, mesh_dim: int | str | None = None) -> list[list[int]]:
        """Return the ranks along an axis, one list for every place on the other axes."""
        return along(self.mesh, [self.number(mesh_dim)]).tolist()

    # ---- parts of it -------------------------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | Axes) -> Self:
        """Return the part of the grid along these axes that this rank is in; name the axes in the order of the mesh."""
        several = isinstance(mesh_dim_names, tuple | list)
        names = tuple(mesh_dim_names) if several else (mesh_dim_names,)
        if not all(isinstance(name, str) for name in names):
            raise KeyError(f"axes {names} are not all names: choose from {', '.join(map(repr, self.mesh_dim_names))}")
        numbers = [self.number(name) for name in names]
        if not names or numbers != sorted(set(numbers)):
            raise KeyError(f"axes {names}: name each once, in the order of the mesh, {self.mesh_dim_names}")
        return self.part(along(self.mesh, numbers), {name: self.made_of[name] for name in names})

    def _flatten(self, mesh_dim_name: str | None = None) -> Self:
        """Join all axes into one, named after them by default."""
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if name in self.root.mesh_dim_names and (name,) != self.mesh_dim_names:
            raise ValueError(f"axis {name!r} exists in {self.root!s}: give the flattened axis another name")
        axes = tuple(axis for name in self.mesh_dim_names for axis in self.made_of[name])
        return self.part(self.mesh.reshape(1, -1), {name: axes})

    def part(self, meshes: torch.Tensor, made_of: dict[str, Axes]) -> Self:
        """Return the grid that this rank is in, out of several parts of the whole grid.

        meshes: the ranks of each part, [number of parts, *shape of a part]
        made_of: for each axis of the part, the axes of the root grid that it joins
        """
        mine = (meshes == self.require_rank()).flatten(1).any(1)
        part = object.__new__(type(self))
        part.__dict__ |= self.__dict__ | {
            "mesh": meshes[mine][0],
            "coordinate": place_of(self.rank, meshes[mine][0]),
            "mesh_dim_names": tuple(made_of),
            "made_of": made_of,
            "part_of": self.root,
        }
        return part

    # ---- the rest ----------------------------------------------------------------------------------------

    def number(self, mesh_dim: int | str | None) -> int:
        """Return the number of the axis with this name; a grid's only axis need not be named."""
        if mesh_dim is None and self.ndim == 1:
            return 0
        names = self.mesh_dim_names
        if mesh_dim in names:
            return names.index(mesh_dim)
        if isinstance(mesh_dim, int) and -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim % self.ndim
        if mesh_dim is None:
            raise KeyError(f"which axis of {self!s}? say one of {', '.join(map(repr, names))}")
        raise KeyError(f"axis {mesh_dim!r}: the axes of this mesh are {', '.join(map(repr, names))}")

    def require_rank(self) -> int:
        if self.rank is None:
            raise RuntimeError(f"no job runs here: say as which rank to look, as in Mesh({self.shape}, ..., rank=0)")
        return self.rank

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Grid) and self.key() == other.key())

    def __deepcopy__(self, memo: dict) -> Self:
        return self  # a copy of a model is on the same mesh

    def __hash__(self) -> int:
        return hash(self.key())

    def key(self) -> tuple:
        return self.mesh_dim_names, self.shape, tuple(self.mesh.flatten().tolist()), self.rank

    def __str__(self) -> str:
        axes = (f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"{type(self).__name__}({', '.join(axes)})"

    def __repr__(self) -> str:
        """Draw the grid, with this rank in brackets, and the groups along each axis."""
        return "\n".join([str(self), "", *draw_grid(self), "", *draw_groups(self)])


def place_of(rank: int | None, mesh: torch.Tensor) -> tuple[int, ...] | None:
    return None if rank is None else tuple((mesh == rank).nonzero()[0].tolist())


def along(mesh: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """Return the ranks along some axes: [number of places on the other axes, *sizes of these axes]."""
    first = mesh.movedim(axes, list(range(-len(axes), 0)))
    return first.reshape(-1, *(mesh.shape[axis] for axis in axes))


# ---- what a grid must be ---------------------------------------------------------------------------------


def require_grid(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    if isinstance(names, str) or not isinstance(shape, tuple | list):
        raise ValueError(
            f'Mesh({shape!r}, {names!r}): give sizes and names as tuples, as in Mesh((2, 4), ("dp", "tp"))'
        )
    if not shape or len(shape) != len(names):
        raise ValueError(f"{len(shape)} sizes and {len(names)} names: each axis of a mesh needs one of each")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"axis {twice!r} appears twice in {tuple(names)}: give each axis its own name")
    for name, size in zip(names, shape, strict=True):
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"axis {name!r}: give it a name of one word, such as dp or dp_shard")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"axis {name!r} of size {size!r}: give it 1 rank or more")


def equation(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """Return the sizes of the axes as text, such as "dp 2 × tp 4"."""
    return " × ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


# ---- the picture of a grid -------------------------------------------------------------------------------


def draw_grid(mesh: Grid) -> list[str]:
    """Draw a line for each place on all axes but the last, with the ranks along the last axis side by side."""
    *outer, last = mesh.mesh_dim_names
    ranks = [
        [f"[{r}]" if r == mesh.rank else f"{r} " for r in row] for row in along(mesh.mesh, [mesh.ndim - 1]).tolist()
    ]
    places = [
        " ".join(f"{name} {i}" for name, i in zip(outer, place, strict=True))
        for place in product(*map(range, mesh.shape[:-1]))
    ]
    head = [f"{last} {0} ", *(f"{i} " for i in range(1, mesh.size(last)))]
    width, margin = len(str(mesh.mesh.max().item())) + 3, max(map(len, places))
    first = max(width, len(head[0]))
    lines = [
        "    " + f"{place:{margin}}   " + cells[0].rjust(first) + "".join(cell.rjust(width) for cell in cells[1:])
        for place, cells in zip(["", *places], [shortened(row, COLUMNS) for row in (head, *ranks)], strict=True)
    ]
    return [line.rstrip() for line in shortened(lines, ROWS + 1)]


def draw_groups(mesh: Grid) -> list[str]:
    margin = max(map(len, mesh.mesh_dim_names))
    return [
        f"    {name:{margin}}   "
        + " · ".join(
            shortened([" ".join(shortened(map(str, group), COLUMNS)) for group in mesh.groups_of(name)], GROUPS)
        )
        for name in mesh.mesh_dim_names
    ]


def shortened(items: Iterable[str], most: int) -> list[str]:
    """Return the items; if there are more than `most`, the middle ones become an ellipsis."""
    items = list(items)
    return items if len(items) <= most else [*items[: most - 2], "…", items[-1]]
