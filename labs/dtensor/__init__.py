"""Tensors that know their layout on a mesh, and compute as if they were whole.

In this order:

    placement      the layout of a tensor on a mesh: cut, whole, or as summands
    redistribute   from one placement to another: the one collective between each pair
    algebra        what becomes of placements in an operation
    letters        which dim belongs to which, in operations on any shapes
    rules          the table of operations
    copied         parts that share no memory with the whole, as they would in one process
    operation      one operation: prepared by its rule, carried out on blocks
    pointwise      an optimizer's operations, for which nothing has to be prepared
    dtensor        the tensor
    distribute     one made of the whole

So it is used:

    mesh = Mesh((4,), ("tp",))
    w = distribute_tensor(w, mesh, [Shard(0)])
    y = x @ w.t()                                   # y.placements: (Shard(1),); nothing was sent
"""

# ruff: noqa: F401

from labs.dtensor.distribute import distribute_tensor
from labs.dtensor.dtensor import DTensor
from labs.dtensor.placement import Partial, Placement, Replicate, Shard
