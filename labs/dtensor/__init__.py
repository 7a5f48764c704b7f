"""Tensors that know their layout on a mesh, and compute as if they were whole.

In this order:

    placement      the layout of a tensor on a mesh: sharded, replicated, or as summands
    redistribute   the change from one placement to another: one collective for each pair
    algebra        the placements of an operation's result, given those of its inputs
    letters        letters for the dims of an operation on any shapes, equal where the dims are the same
    rules          the table of operations
    copied         parts that are copies, although in one process they would share the whole's memory
    operation      one operation: prepared by its rule, and carried out on blocks
    pointwise      an optimizer's operations, which need no preparation
    dtensor        the tensor
    distribute     a DTensor made of the whole tensor

Example:

    mesh = Mesh((4,), ("tp",))
    w = distribute_tensor(w, mesh, [Shard(0)])
    y = x @ w.t()                                   # y.placements: (Shard(1),); nothing was sent
"""

# ruff: noqa: F401

from labs.dtensor.distribute import distribute_tensor
from labs.dtensor.dtensor import DTensor
from labs.dtensor.placement import Partial, Placement, Replicate, Shard
