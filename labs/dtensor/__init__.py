"""Tensors that know their layout on a mesh, and compute as if they were whole.

In this order:

    placement      the layout of a tensor on a mesh: sharded, replicated, or partial (a summand on each rank)
    redistribute   the change from one placement to another: one collective for each pair
    algebra        the placements of an operation's result, given those of its inputs
    letters        the letters of an operation's dims, if they depend on shapes; dims with one letter are cut alike
    rules          the table of rules: the letters of each operation, and the inputs in which it is linear
    copied         slices and views that are copies, although those of a plain tensor would share its memory
    operation      one operation on DTensors: prepared by its rule, and carried out on blocks
    pointwise      an optimizer's operations, which need no preparation
    dtensor        the class DTensor
    distribute     makes a DTensor of a whole tensor

Example:

    mesh = Mesh((4,), ("tp",))
    w = distribute_tensor(w, mesh, [Shard(0)])
    y = x @ w.t()                                   # y.placements: (Shard(1),); nothing was sent
"""

# ruff: noqa: F401

from labs.dtensor.distribute import distribute_tensor
from labs.dtensor.dtensor import DTensor
from labs.dtensor.placement import Partial, Placement, Replicate, Shard
