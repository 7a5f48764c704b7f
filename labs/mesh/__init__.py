"""A grid of ranks, which decides which ranks communicate with each other.

In this order:

    grid    arithmetic: ranks as a grid with named axes, its parts, and the ranks along each axis
    mesh    a grid with a process group along each axis; PyTorch calls it DeviceMesh

Example:

    mesh = Mesh((2, 4), ("dp", "tp"))               # in a job of 8 ranks
    dist.all_reduce(x, group=mesh.get_group("tp"))
"""

# ruff: noqa: F401

from labs.mesh.grid import Grid
from labs.mesh.mesh import Mesh, smaller_group
