"""A grid of ranks (labs.mesh.grid), and the process groups along its axes.

    mesh = Mesh((2, 4), ("dp", "tp"))     in a job of 8 ranks, all of which make it at the same point
    get_group          returns this rank's process group along an axis; a strategy's collectives use one axis
    _flatten           joins all axes into one, and makes the process groups along the new axis
    smaller_group      returns a group of a given number of neighbours along the last axis

The rest of a mesh is arithmetic, and needs no job: `Mesh((2, 4), ("dp", "tp"), rank=5)` is the grid as rank 5 sees it.
The methods of a mesh have the names and results of torch's DeviceMesh.
"""

from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from labs.agree import require_same
from labs.mesh.grid import Axes, Grid, along, equation, require_grid


class Mesh(Grid):
    """A grid of ranks with a process group along each axis.

    shape: number of ranks along each axis
    mesh_dim_names: names of the axes, outermost first
    rank: the rank whose view of the grid this is, without process groups; by default, this process' rank in the job

    In a job, all ranks must make the mesh at the same point of the program, since its groups are made with it.  With
    `rank`, or outside of a job, a mesh is arithmetic alone.

    Raises ValueError, on every rank, for sizes and names that do not fit each other, or if the world has another size.
    """

    def __init__(self, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...], rank: int | None = None):
        in_job = rank is None and dist.is_initialized()
        if in_job:
            require_grid(shape, mesh_dim_names)
            require_world(shape, mesh_dim_names)
        super().__init__(shape, mesh_dim_names, dist.get_rank() if in_job else rank)
        self.groups: dict[Axes, ProcessGroup] | None = {} if in_job else None  # shared with all parts of the grid
        if in_job:
            for axes in self.made_of.values():
                self.make_groups(axes)

    def _flatten(self, mesh_dim_name: str | None = None) -> "Mesh":
        """Join all axes into one, named after them by default.

        In a job, this method makes the groups along the new axis, so all ranks must call it at the same point.
        """
        flat = super()._flatten(mesh_dim_name)
        (axes,) = flat.made_of.values()
        if self.groups is not None and axes not in self.groups:
            self.root.make_groups(axes)
        return flat

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the process group along an axis that this rank is in."""
        axes = self.made_of[self.mesh_dim_names[self.number(mesh_dim)]]
        if self.groups is None:
            raise RuntimeError(
                f"{self!s} has no process groups: make it in a job (run(...), torchrun) and without rank="
            )
        return self.groups[axes]

    def get_all_groups(self) -> list[ProcessGroup]:
        return [self.get_group(name) for name in self.mesh_dim_names]

    def __reduce_ex__(self, protocol: int) -> Any:
        """Raise TypeError for a mesh with process groups, and so for a DTensor, which holds its mesh."""
        if self.groups is not None:
            raise TypeError(
                f"{self!s} has process groups, which live in this process alone, so it cannot be pickled, nor can a "
                "DTensor on it: return or save the DTensor's full_tensor(), or to_local() for this rank's part "
                "(labs.checkpoint.save writes a model in parts), and make a mesh anew from its shape and mesh_dim_names"
            )
        return super().__reduce_ex__(protocol)

    def make_groups(self, axes: Axes) -> None:
        """Make a group along these axes for every place on the others; all ranks make all groups, in one order."""
        for ranks in along(self.mesh, [self.number(name) for name in axes]).flatten(1).tolist():
            whole = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if whole else dist.new_group(ranks, group_desc=f"mesh_{'_'.join(axes)}")
            if self.rank in ranks:
                self.groups[axes] = group


def smaller_group(mesh: Mesh, ranks: int) -> ProcessGroup:
    """Return this rank's group of `ranks` neighbours along the last axis.

    The group is made once per mesh, so all ranks must call this function at the same point.
    """
    axes = mesh.made_of[mesh.mesh_dim_names[-1]]
    key = (*axes, f"by {ranks}")
    if key not in mesh.groups:
        for line in along(mesh.root.mesh, [mesh.root.number(axis) for axis in axes]).flatten(1):
            for part in line.split(ranks):
                group = dist.new_group(part.tolist())
                if mesh.rank in part:
                    mesh.groups[key] = group
    return mesh.groups[key]


def require_world(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """Raise ValueError if ranks make different meshes, or if the mesh is not the whole world.

    Ranks that made different groups would wait for each other for ever.
    """
    require_same(
        (tuple(shape), tuple(names)),
        None,
        lambda rank, its, other, others: (
            f"ranks make different meshes: {equation(*its)} on rank {rank}, {equation(*others)} on rank {other}"
        ),
    )
    if prod(shape) != dist.get_world_size():
        is_not = f"world size {dist.get_world_size()} is not {equation(shape, names)}"
        raise ValueError(f"{is_not}: start {prod(shape)} ranks, or change a size")
