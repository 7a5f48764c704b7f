"""Ranks as a grid with named axes: who talks to whom.

With one strategy, every rank talks to every other one.  With two, a rank talks to some about one thing and to others
about another, and so the ranks are laid out as a grid, row by row, with a name for each axis:

    Mesh((2, 4), ("dp", "tp"))            tp 0   1   2   3       groups along tp: 0 1 2 3 · 4 5 6 7
                                   dp 0      0   1   2   3                    dp: 0 4 · 1 5 · 2 6 · 3 7
                                      1      4   5   6   7

    get_coordinate     where on the grid this rank is: rank 5 at (1, 1)
    groups_of          the ranks along an axis, for every place on the other axes
    get_group          the process group of those that this rank is among: all collectives of a strategy go to one axis
    mesh["tp"]         the part of the grid that this rank shares with those along these axes: a Mesh, too
    _flatten           several axes as one: the data-parallel ranks of HSDP are replicas times shards

**The order of the axes is a decision.**  Ranks that are neighbours in number share a node, and the last axis is made of
neighbours: so what talks most goes last (tensor parallelism), and what talks least goes first.

All but `get_group` and `_flatten` is arithmetic, and needs no job: `Mesh((2, 4), ("dp", "tp"), rank=5)` is the grid as
rank 5 sees it.  Names and answers are those of torch's DeviceMesh; `groups_of` alone is ours.
"""

from collections.abc import Iterable
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from labs.group import everybodys

Axes = tuple[str, ...]
ROWS, COLUMNS, GROUPS = 16, 8, 8  # what a picture of a mesh has room for


class Mesh:
    """A grid of ranks; mesh_dim_names: the names of its axes, outermost first.

    In a job, all ranks must make it, at the same point of the program, since its groups are made with it.  With
    `rank`, or outside of a job, it is arithmetic alone.

    mesh: the ranks, a tensor of shape `shape`.

    Raises ValueError, on every rank, for sizes and names that do not fit each other, or a world of another size.
    """

    def __init__(self, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...], rank: int | None = None):
        require_grid(shape, mesh_dim_names)
        in_job = rank is None and dist.is_initialized()
        if in_job:
            require_world(shape, mesh_dim_names)
        elif rank is not None and not 0 <= rank < prod(shape):
            raise ValueError(f"rank {rank}: {equation(shape, mesh_dim_names)} is numbered 0 to {prod(shape) - 1}")
        self.mesh = torch.arange(prod(shape), device="cpu").view(shape)
        self.mesh_dim_names = tuple(mesh_dim_names)
        self.rank = dist.get_rank() if in_job else rank
        self.coordinate = place_of(self.rank, self.mesh)
        self.part_of: Mesh | None = None
        self.made_of = {name: (name,) for name in mesh_dim_names}  # each axis: of which axes of the root
        self.groups: dict[Axes, ProcessGroup] | None = {} if in_job else None  # shared with all parts of the grid
        if in_job:
            for axes in self.made_of.values():
                self.make_groups(axes)

    @property
    def root(self) -> "Mesh":
        """The whole grid.  (Not an attribute: what knows itself is freed late.)"""
        return self if self.part_of is None else self.part_of

    # ---- the grid ----------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, mesh_dim: int | str | None = None) -> int:
        """How many ranks there are, in all or along an axis."""
        return self.mesh.numel() if mesh_dim is None else self.shape[self.number(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...]:
        """This rank's place on the grid, by axis."""
        self.require_rank()
        return self.coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's place along one axis."""
        return self.get_coordinate()[self.number(mesh_dim)]

    def groups_of(self, mesh_dim: int | str | None = None) -> list[list[int]]:
        """The ranks along an axis, once for every place on the other axes."""
        return along(self.mesh, [self.number(mesh_dim)]).tolist()

    # ---- parts of it -------------------------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | Axes) -> "Mesh":
        """The part of the grid along these axes, in the order in which the mesh has them, that this rank is in."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        numbers = [self.number(name) for name in names]
        if not names or numbers != sorted(set(numbers)):
            raise KeyError(f"axes {names}: name each once, in the order of the mesh, {self.mesh_dim_names}")
        return self.part(along(self.mesh, numbers), {name: self.made_of[name] for name in names})

    def _flatten(self, mesh_dim_name: str | None = None) -> "Mesh":
        """All axes as one, named after them by default.  In a job, its group is made: by all ranks, as with a Mesh."""
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if name in self.root.mesh_dim_names and (name,) != self.mesh_dim_names:
            raise ValueError(f"axis {name!r} exists in {self.root!s}: give the flattened axis another name")
        axes = tuple(axis for name in self.mesh_dim_names for axis in self.made_of[name])
        if self.groups is not None and axes not in self.groups:
            self.root.make_groups(axes)
        return self.part(self.mesh.reshape(1, -1), {name: axes})

    def part(self, meshes: torch.Tensor, made_of: dict[str, Axes]) -> "Mesh":
        """Of several grids the one that this rank is in, as a Mesh."""
        mine = (meshes == self.require_rank()).flatten(1).any(1)
        part = object.__new__(Mesh)
        part.__dict__ |= self.__dict__ | {
            "mesh": meshes[mine][0],
            "coordinate": place_of(self.rank, meshes[mine][0]),
            "mesh_dim_names": tuple(made_of),
            "made_of": made_of,
            "part_of": self.root,
        }
        return part

    # ---- its process groups ------------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The process group of the ranks along an axis that this rank is among."""
        axes = self.made_of[self.mesh_dim_names[self.number(mesh_dim)]]
        if self.groups is None:
            raise RuntimeError(
                f"{self!s} has no process groups: make it in a job (run(...), torchrun) and without rank="
            )
        return self.groups[axes]

    def get_all_groups(self) -> list[ProcessGroup]:
        return [self.get_group(name) for name in self.mesh_dim_names]

    def make_groups(self, axes: Axes) -> None:
        """One along these axes for every place on the others; every rank takes part in making each, in this order."""
        for ranks in along(self.mesh, [self.number(name) for name in axes]).flatten(1).tolist():
            whole = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if whole else dist.new_group(ranks, group_desc=f"mesh_{'_'.join(axes)}")
            if self.rank in ranks:
                self.groups[axes] = group

    # ---- the rest ----------------------------------------------------------------------------------------

    def number(self, mesh_dim: int | str | None) -> int:
        """Of the axis that goes by this name; by none, where there is one axis."""
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
        return self is other or (isinstance(other, Mesh) and self.key() == other.key())

    def __deepcopy__(self, memo: dict) -> "Mesh":
        return self  # a copy of a model is on the same mesh

    def __hash__(self) -> int:
        return hash(self.key())

    def key(self) -> tuple:
        return self.mesh_dim_names, self.shape, tuple(self.mesh.flatten().tolist()), self.rank

    def __str__(self) -> str:
        return (
            f"Mesh({', '.join(f'{name}={size}' for name, size in zip(self.mesh_dim_names, self.shape, strict=True))})"
        )

    def __repr__(self) -> str:
        """The grid, this rank in brackets, and the groups along each axis."""
        return "\n".join([str(self), "", *draw_grid(self), "", *draw_groups(self)])


def place_of(rank: int | None, mesh: torch.Tensor) -> tuple[int, ...] | None:
    return None if rank is None else tuple((mesh == rank).nonzero()[0].tolist())


def along(mesh: torch.Tensor, axes: list[int]) -> torch.Tensor:
    """[every place on the other axes, *sizes of these]: the ranks along some axes."""
    first = mesh.movedim(axes, list(range(-len(axes), 0)))
    return first.reshape(-1, *(mesh.shape[axis] for axis in axes))


def smaller_group(mesh: Mesh, ranks: int) -> ProcessGroup:
    """The group of this many neighbours along the last axis that this rank is among; made once for a mesh, by all."""
    axes = mesh.made_of[mesh.mesh_dim_names[-1]]
    key = (*axes, f"by {ranks}")
    if key not in mesh.groups:
        for line in along(mesh.root.mesh, [mesh.root.number(axis) for axis in axes]).flatten(1):
            for part in line.split(ranks):
                group = dist.new_group(part.tolist())
                if mesh.rank in part:
                    mesh.groups[key] = group
    return mesh.groups[key]


# ---- what a grid must be ---------------------------------------------------------------------------------


def require_grid(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    if isinstance(names, str) or not isinstance(shape, tuple | list):
        raise ValueError(
            f'Mesh({shape!r}, {names!r}): give sizes and names as tuples, as in Mesh((2, 4), ("dp", "tp"))'
        )
    if not shape or len(shape) != len(names):
        raise ValueError(f"{len(shape)} sizes and {len(names)} names: each axis of a mesh needs one of both")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"axis {twice!r} appears twice in {tuple(names)}: give each axis a name of its own")
    for name, size in zip(names, shape, strict=True):
        if not isinstance(name, str):
            raise ValueError(f"axis {name!r}: a name is a word")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"axis {name!r} of size {size!r}: an axis has 1 rank or more")


def require_world(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Before any group is made: ranks that made different ones would wait for each other."""
    ranks, (first, *others) = everybodys((tuple(shape), tuple(names)), None)
    for rank, other in zip(ranks[1:], others, strict=True):
        if other != first:
            raise ValueError(
                f"ranks make different meshes: {equation(*first)} on rank 0, {equation(*other)} on rank {rank}"
            )
    if prod(shape) != len(ranks):
        is_not = f"world size {len(ranks)} is not {equation(shape, names)}"
        raise ValueError(f"{is_not}: start {prod(shape)} ranks, or change a size")


def equation(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """dp 2 × tp 4"""
    return " × ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


# ---- its picture -----------------------------------------------------------------------------------------


def draw_grid(mesh: Mesh) -> list[str]:
    """A line for each place on all axes but the last, whose ranks stand side by side; this rank in brackets."""
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


def draw_groups(mesh: Mesh) -> list[str]:
    margin = max(map(len, mesh.mesh_dim_names))
    return [
        f"    {name:{margin}}   "
        + " · ".join(
            shortened([" ".join(shortened(map(str, group), COLUMNS)) for group in mesh.groups_of(name)], GROUPS)
        )
        for name in mesh.mesh_dim_names
    ]


def shortened(items: Iterable[str], most: int) -> list[str]:
    """Without its middle, where there are more than `most`."""
    items = list(items)
    return items if len(items) <= most else [*items[: most - 2], "…", items[-1]]
