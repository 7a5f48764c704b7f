"""A grid of ranks: who talks to whom.

In this order:

    grid    arithmetic: ranks as a grid with named axes, its parts, its neighbours
    mesh    the process groups along its axes; PyTorch calls it DeviceMesh

So it is used:

    mesh = Mesh((2, 4), ("dp", "tp"))               # in a job of 8 ranks
    dist.all_reduce(x, group=mesh.get_group("tp"))
"""

# ruff: noqa: F401

from labs.mesh.grid import Grid
from labs.mesh.mesh import Mesh, smaller_group
