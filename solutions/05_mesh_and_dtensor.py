# %% [markdown]
# # Mesh and DTensor: tensors that know how they lie
#
# *You are rank 5 of 8. With whom do you share the parameters, with whom do you average the gradients, and how does a
# tensor know which part of it is yours?*
#
# You need: [Collectives](02_collectives.ipynb) and [ZeRO](04_zero.ipynb). It takes 80 minutes with its four exercises,
# 45 without; the machine works for less than a minute of it, in 1 GB of memory.

# %% [markdown]
# ## Question
#
# Up to here all ranks did the same to each other: one strategy, one group. Now take two nodes of four devices each.
# Inside a node they are joined by a fast link, between the nodes by a slow one. ZeRO's stage 3 gathers parameters all
# the time; over the slow link that is painful. So let each *node* hold the whole model once, sharded over its four
# devices, and let the two nodes be replicas of each other that average gradients. This is **HSDP**, *hybrid sharded
# data parallel*: two strategies at once.
#
# So each rank needs two groups: those with whom it shards, and those with whom it averages. You are rank 5. Who are
# they?

# %%
import inspect
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from labs.algebra import ways
from labs.dtensor import DTensor, distribute_tensor
from labs.kit import check, draw, play
from labs.kit.launch import run
from labs.kit.ranks.link import Link
from labs.kit.record import mark

# %%
from labs.mesh import Mesh
from labs.placement import Partial, Replicate, Shard, Spec
from labs.redistribute import MOVES, plan
from labs.rules import RULES

# %% [markdown]
# ## Picture
#
# Lay the ranks out as a grid, row by row. That is a **mesh**. It has **axes**, each with a name, and a rank's place on
# it is its **coordinate**: rank 5 is at (1, 1). Here the axis `replicate` counts the nodes, and `shard` the devices
# inside of one. A row is a group along `shard`:

# %%
draw.mesh({"replicate": 2, "shard": 4}, along="shard")

# %% [markdown]
# And a column is a group along `replicate`. (All ranks of one tint, and of one letter, talk to each other.)

# %%
draw.mesh({"replicate": 2, "shard": 4}, along="replicate")

# %% [markdown]
# ## Predict
#
# With which other rank does rank 5 average gradients, along `replicate`?

# %%
guess_partner = 1  # your number

# %%
mesh = Mesh((2, 4), ("replicate", "shard"), rank=5)  # the grid as rank 5 sees it: arithmetic, no job
[partner] = [group for group in mesh.groups_of("replicate") if 5 in group]
check.predict("Rank 5 averages with rank", guess_partner, partner[0], tolerance=0)

# %% [markdown]
# ## Build: coordinates and groups
#
# A mesh prints itself: the grid, this rank in brackets, and under it the groups of each axis.

# %%
print(repr(mesh))
assert mesh.get_coordinate() == (1, 1) and mesh.get_local_rank("shard") == 1

# %% [markdown]
# There may be more axes than two. With three, of sizes A × B × C, one step along the last axis is the next rank; one
# along the middle axis is C ranks further; one along the first is B × C ranks further. In general, along an axis the
# step is the product of all sizes behind it.
#
# ### Exercise 1: where am I, and who is with me?
#
# Budget: no message. Everybody can work it out alone.


# %%
def neighbours(shape, rank):
    """The coordinate of a rank on a mesh of this shape (row by row), and for each axis the ranks along it.

    shape: sizes of the axes, outermost first.  Returns ([place on each axis], [ranks along each axis, in order]):
    neighbours((2, 4), 5) is ([1, 1], [[1, 5], [4, 5, 6, 7]])
    """
    ### BEGIN SOLUTION
    coordinate, groups, step = [], [], 1
    for size in reversed(shape):
        place = rank // step % size
        coordinate.insert(0, place)
        groups.insert(0, [rank + (other - place) * step for other in range(size)])
        step *= size
    return coordinate, groups
    ### END SOLUTION


check.neighbours(neighbours)

# %% [markdown]
# In a job, `Mesh` also makes the process groups: one for each row and each column, by all ranks, in the same order.
# `get_group` is what collectives take. `mesh["shard"]` is the part of the mesh along that axis that this rank is in.


# %%
def add_along():
    """The sum of the ranks' numbers, along each axis of a 2 × 2 mesh."""
    mesh = Mesh((2, 2), ("replicate", "shard"))
    sums = {}
    for axis in mesh.mesh_dim_names:
        x = torch.tensor([dist.get_rank()])
        dist.all_reduce(x, group=mesh.get_group(axis))
        sums[axis] = x.item()
    return sums | {"along shard": mesh["shard"].mesh.tolist()}


sums = run(add_along, ranks=4, device="cpu")
draw.table([{"rank": rank, **{name: str(value) for name, value in each.items()}} for rank, each in enumerate(sums)])

# %% [markdown]
# ## Build: why the order of the axes matters
#
# `Mesh((2, 2), ("replicate", "shard"))` or `Mesh((2, 2), ("shard", "replicate"))`? On paper it is the same strategy.
# But ranks with neighbouring numbers share a node, and the *last* axis is made of neighbours.
#
# Here is what HSDP sends for one layer of 1 MB: along `shard` the layer is gathered twice (forward and backward) and
# its gradient reduce-scattered; along `replicate` the shard's gradient, half a layer, is all-reduced. The job runs on
# two nodes, with a wire between them that is slow for real: 200 Mbit/s, and 1 ms of latency.

# %%
from labs.group import all_gather, reduce_scatter

LAYER = 250_000  # elements of float32
SLOW = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)


def hsdp_layer(names):
    """What travels for one layer in one step, on a 2 × 2 mesh whose axes have these names."""
    mesh, full = Mesh((2, 2), names), torch.zeros(LAYER)
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    dist.barrier()
    mark("step")
    for _ in ("forward", "backward"):
        all_gather(full, full[: LAYER // 2].clone(), group=shard)
    gradient = reduce_scatter(full, shard)
    dist.all_reduce(gradient, group=replicate)
    mark("end")


# %% [markdown]
# With `shard` first instead of last, how many times as many bytes cross between the nodes?

# %%
guess_crossing = 3  # your number

# %%
orders = {" × ".join(names): names for names in (("replicate", "shard"), ("shard", "replicate"))}
slow = {
    name: run(hsdp_layer, names, ranks=4, device="cpu", record="communication", link=SLOW).recording
    for name, names in orders.items()
}
sent = {name: recording.sent(rank=0, step=0) for name, recording in slow.items()}
crossing = {name: recording.across(rank=0, step=0) for name, recording in slow.items()}
draw.table(
    [{"rank 0, a step": name, "sent, bytes": sent[name], "of it to the other node": crossing[name]} for name in orders]
)

# %%
inside, outside = crossing.values()
check.predict("How many times as many bytes cross?", guess_crossing, outside / inside, tolerance=0)

# %%
for name, recording in slow.items():
    [span] = recording.step_spans(rank=0)
    print(f"{name}: the step took {1000 * (span.end - span.start):.0f} ms")

# %% [markdown]
# The same job and the same bytes; but three times as many over the slow wire, and the time follows it. So the rule:
# *what talks most goes last.* On a cluster the last axis is the one inside a node (tensor parallelism, or HSDP's
# shards), the first the one across nodes (replicas).

# %% [markdown]
# ## Build: a tensor that knows how it lies
#
# In notebook 04 every strategy had code of its own: cut this, gather that. What it all came to was *who holds which
# part of a tensor*. So let the tensor say so. On each axis of the mesh it has one of three **placements**:
#
# * `Shard(dim)`: each rank along the axis has a piece, cut along that dim;
# * `Replicate()`: each has all of it;
# * `Partial()`: each has all of its *shape*, but only a summand of its numbers. The tensor is their sum.
#
# A tensor with a mesh and placements is a **DTensor** (distributed tensor). It has the shape of the whole, and on each
# rank holds a **block**, its `to_local()`. `distribute_tensor` deals a whole tensor out.


# %%
def lay(shape, mesh_shape, placements):
    """How a DTensor lies, and this rank's block."""
    mesh = Mesh(mesh_shape, ("a", "b")[: len(mesh_shape)])
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = distribute_tensor(whole, mesh, placements)
    assert torch.equal(x.full_tensor(), whole)  # whatever the placements are
    return x.spec, x.to_local()


lies = run(lay, (4, 6), (4,), [Shard(0)], ranks=4, device="cpu")
spec, block = lies[2]
print(f"rank 2 holds {block.tolist()}")
draw.blocks(spec, ("a",))

# %% [markdown]
# The dashed outline is the whole tensor, the filled part what the rank holds. Now cut along the other dim, on the same
# four ranks; 6 columns do not divide by 4. How many columns does rank 3 hold?

# %%
guess_columns = 0  # your number

# %%
lies = run(lay, (4, 6), (4,), [Shard(1)], ranks=4, device="cpu")
check.predict("Columns of rank 3:", guess_columns, lies[3][1].shape[1], tolerance=0)

# %%
draw.blocks(lies[0][0], ("a",))

# %% [markdown]
# A dim is cut as `torch.chunk` cuts it: the pieces are ⌈size/N⌉ long, the last one is shorter, and behind it they are
# **empty**. An empty block is a block like any other: its rank takes part in every collective.
#
# On a mesh of two axes there is a placement for each. Cut along both, or cut along one and copied along the other:

# %%
lies = run(lay, (4, 6), (2, 2), [Shard(0), Shard(1)], ranks=4, device="cpu")
draw.blocks(lies[0][0], ("a", "b"))

# %%
lies = run(lay, (4, 6), (2, 2), [Replicate(), Shard(0)], ranks=4, device="cpu")
draw.blocks(lies[0][0], ("a", "b"))

# %% [markdown]
# That last one is how HSDP keeps a parameter: copied along `a`, sharded along `b`. (When both axes cut the *same* dim,
# the second one cuts what the first has left.)
#
# `Partial()` is the odd one. You have met it often: before the all-reduce of DDP, each rank has a gradient of the right
# shape, and none of them is *the* gradient. Here every rank brings rank + 1, and the tensor is 1 + 2 + 3 + 4:


# %%
def summands():
    mesh = Mesh((4,), ("a",))
    x = DTensor.from_local(torch.tensor([dist.get_rank() + 1.0]), mesh, [Partial()])
    return x.to_local().item(), x.full_tensor().item()


assert run(summands, ranks=4, device="cpu") == [(1, 10), (2, 10), (3, 10), (4, 10)]

# %% [markdown]
# ## Build: from one placement to another
#
# `x.redistribute(placements=...)` is the same tensor, lying otherwise. Between each pair of placements there is *one*
# collective. Cover the right half of this table, and say which. (N ranks along the axis, a tensor of n bytes; what
# each rank sends.)

# %%
print(MOVES)

# %% [markdown]
# Predicted by the table, and measured by a recording, on four ranks:

# %%
MOVED = ["Shard(0) → Replicate()", "Partial() → Replicate()", "Partial() → Shard(0)", "Shard(0) → Shard(1)"]
MOVED += ["Replicate() → Shard(1)"]


def move_each(tensor, mesh, moves):
    """One redistribution of 16 × 24 elements a step; `tensor` is labs.dtensor, or torch.distributed.tensor."""
    lies = {"Replicate()": tensor.Replicate(), "Partial()": tensor.Partial()}
    lies |= {f"Shard({dim})": tensor.Shard(dim) for dim in (0, 1)}
    for move in moves:
        source, target = (lies[word] for word in move.split(" → "))
        x = tensor.DTensor.from_local(torch.ones(4 if source.is_shard() else 16, 24), mesh, [source])
        mark("step")
        x.redistribute(placements=[target])
        mark("end")


# %%
def our_moves():
    import labs.dtensor

    move_each(labs.dtensor, Mesh((4,), ("a",)), MOVED)


n = 16 * 24 * 4  # bytes
share = dict(zip(MOVED, (3 / 4, 2 * 3 / 4, 3 / 4, 3 / 16, 0), strict=True))
moves = run(our_moves, ranks=4, device="cpu", record="communication").recording
draw.ledger({name: (share[name] * n, moves.sent(rank=0, step=step)) for step, name in enumerate(MOVED)}, within=0)

# %% [markdown]
# Two rows cost least where you might not expect it. `Replicate()` → `Shard(j)` is free: everybody cuts out a piece of
# what is already there. And `Shard(i)` → `Shard(j)` sends only (N − 1)/N² n, as no rank ever holds more than a piece.
#
# ### Exercise 2: from Partial to Shard
#
# The row that ZeRO lives on. Which collective is it? `reduce_scatter(vector, group)` of
# [labs/group.py](../labs/group.py) takes a 1-D tensor whose size divides by N, and returns this rank's N-th of the sum.
# But a piece along dim 1 is not one run of memory, and a dim may not divide. Lay out N equal pieces one behind the
# other, with zeros where there is nothing; afterwards cut your piece to its size.
#
# Budget: (N − 1)/N of the (padded) tensor. The summand stays as it was.


# %%
def partial_to_shard(summand, dim, group=None):
    """This rank's piece, along `dim`, of the sum of all ranks' summands; cut as torch.chunk cuts.

    summand: the same shape on all ranks; dim: counted from 0
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = summand.shape[dim]
    longest = -(-size // ranks)  # rounded up
    mine = max(0, min(longest, size - rank * longest))  # how long this rank's piece is
    ### BEGIN SOLUTION
    padded = torch.zeros(*summand.shape[:dim], ranks * longest, *summand.shape[dim + 1 :], dtype=summand.dtype)
    padded.narrow(dim, 0, size).copy_(summand)
    pieces = padded.unflatten(dim, (ranks, longest)).movedim(dim, 0)
    piece = reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:])
    return piece.narrow(dim, 0, mine)
    ### END SOLUTION


check.partial_to_shard(partial_to_shard)

# %% [markdown]
# ### Two axes: a path
#
# On a mesh each axis has a step of its own, and the steps follow each other. In which order? Take a tensor that is
# `(Partial(), Replicate())` on 2 × 2 ranks, and shall become `(Replicate(), Shard(0))`. Along `a` it must be
# all-reduced; along `b` each rank only cuts out its half. This is what our plan does, and that of PyTorch 2.13:

# %%
start, goal = Spec((16, 12), (2, 2), (Partial(), Replicate())), (Replicate(), Shard(0))
plan(start, goal)

# %% [markdown]
# It all-reduces the whole tensor, and then throws half of the result away. The other way round, only half of it would
# have travelled. Both are right; the rule is to make the block *smaller* as early, and *larger* as late as possible.
#
# ### Exercise 3: the path that sends least
#
# You are given how a tensor lies (`spec.placements`, `spec.mesh`, `spec.shape`) and the placements that it shall have.
# Each axis goes to its new placement in one step; no dim is cut along two axes, so every order is right. Return the
# axes in the order in which the ranks send least. The table tells which steps make a block smaller, which leave it, and
# which make it larger; of two that make it smaller, which is free?


# %%
def order_of_axes(spec, target):
    """The numbers of the axes, in the order in which to take them from spec.placements to target."""

    def late(axis):
        """The smaller, the earlier."""
        now, then = spec.placements[axis], target[axis]
        ### BEGIN SOLUTION
        if then.is_shard() and not now.is_shard():
            return 1 if now.is_partial() else 0  # smaller: to cut is free, to reduce-scatter is not
        return 3 if now.is_shard() and then.is_replicate() else 2  # larger; or of the same size
        ### END SOLUTION

    return sorted(range(len(target)), key=late)


check.order_of_axes(order_of_axes)

# %% [markdown]
# Now play. Set a tensor, a mesh, and placements before and after; look who holds what, and what a rank sends. Find a
# redistribution that sends nothing, and one that sends more than the tensor has bytes. (On a mesh of one axis `b` does
# not count.)

# %%
play.placements()

# %% [markdown]
# ## Build: the algebra
#
# Now compute with such tensors. `y = x @ w`, and each rank has only blocks: what can it do with them? And how does the
# result lie? Give each dim a letter, the same where it is the same dim. A matrix product is `ik,kj->ij`. Then all there
# is to say follows from the letters. These are the ways to compute it along one axis of the mesh, inputs → output:

# %%
for way in ways("ik,kj->ij", linear="each"):
    print(way)

# %% [markdown]
# Line by line. On whole inputs: nothing to say. If `i` is cut (the rows of x: the batch), each rank computes its rows
# of y. If `k` is cut, in both, each rank multiplies what it has: that is a *summand* of y. **This is where Partial
# comes from**: a letter that is cut, and that the output does not have. If `j` is cut (the columns of w), each rank has
# some columns of y. And a product of a summand with a whole matrix is a summand, since a product is linear in each
# input.
#
# An operation on a DTensor looks for the way whose inputs cost least to come by, redistributes them, and multiplies
# blocks. Nothing else. With two layers, cut the first one's columns and the second one's rows:


# %%
def two_layers(tensor, mesh, x_BD, up_DF, down_FD, batch=None):
    """relu(x @ up) @ down, the hidden dim F cut along "tp"; `tensor` is labs.dtensor or torch.distributed.tensor."""
    lie = {"x": tensor.Replicate(), "up": tensor.Shard(1), "down": tensor.Shard(0)}
    x, up, down = (
        tensor.distribute_tensor(whole, mesh, [lie[name]])
        for name, whole in {"x": x_BD, "up": up_DF, "down": down_FD}.items()
    )
    mark("step")
    hidden = (x @ up).relu()
    y = hidden @ down
    mark("step")
    whole = y.full_tensor()
    mark("end")
    return {"x @ up": hidden.placements, "hidden @ down": y.placements}, whole


# %%
def with_ours():
    import labs.dtensor

    torch.manual_seed(0)
    x, up, down = torch.randn(6, 8), torch.randn(8, 20), torch.randn(20, 8)
    lie, whole = two_layers(labs.dtensor, Mesh((4,), ("tp",)), x, up, down)
    assert torch.allclose(whole, (x @ up).relu() @ down, atol=1e-5)
    return {name: repr(placements[0]) for name, placements in lie.items()}


result = run(with_ours, ranks=4, device="cpu", record="communication")
ours = result.recording
print(result[0])
on_paper = {"the two layers": 0, "full_tensor()": 2 * 3 / 4 * 6 * 8 * 4}
draw.ledger({name: (sent, ours.sent(0, step)) for step, (name, sent) in enumerate(on_paper.items())}, within=0)

# %% [markdown]
# Both products without a single byte, and then one all-reduce of the result. You have just met **tensor parallelism**;
# it is a notebook of its own, later. Had the first layer been cut by rows instead, `x @ up` would be `Partial()`, and
# `relu` would have to reduce it first: the relu of a sum is not the sum of relus.
#
# What an operation is linear in decides what it may do with summands. All rules are one table of letters; here are the
# first lines:

# %%
print("\n".join(repr(RULES).splitlines()[:8]))

# %% [markdown]
# ### Gradients lie, too
#
# Backward is made of operations, so the same algebra tells how gradients lie. Let the batch be cut, `x: Shard(0)`, and
# the weight whole. The gradient of w is xᵀ @ (gradient of y), and the letter of the batch is not in it:


# %%
def batch_cut():
    """How the gradient of a whole weight lies, if the batch is cut."""
    mesh = Mesh((4,), ("dp",))
    x = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(3, 5), mesh, [Replicate()])
    return (x.t() @ (x @ w)).placements  # as backward has it


assert run(batch_cut, ranks=4, device="cpu")[0] == (Partial(),)

# %% [markdown]
# `Partial()`. Nobody has mentioned DDP, and here it is: *the gradient of a replicated weight is Partial, and to make it
# Replicate is an all-reduce.* Make it `Shard(0)` instead and you have ZeRO's reduce-scatter.
#
# ## Build: strategies as three placements
#
# So here is what a whole notebook comes to. A strategy says how P, G and S lie: the parameters between two steps; the
# gradients when backward is over; the optimizer state. Everything that travels follows: P to `Replicate()` for forward
# and backward; the gradient, which begins as `Partial()`, to G's placement, and to S's for the update; and what was
# updated, back to P's.
#
# ### Exercise 4: fill in the table
#
# On a mesh with the axis `dp`; HSDP on one with the axes `("replicate", "shard")`. The check obeys your table in a job,
# and compares what it holds and what it sends with the strategy of that name. (Careful with ZeRO 1: its gradients are
# whole on each rank, but it does not all-reduce them.)


# %%
def placements():
    """{strategy: (P, G, S)}, each a list with a placement for each axis of the mesh."""
    R, P, S = Replicate(), Partial(), Shard(0)
    ### BEGIN SOLUTION
    return {
        "DDP": ([R], [R], [R]),
        "ZeRO 1": ([R], [P], [S]),
        "ZeRO 2": ([R], [S], [S]),
        "ZeRO 3": ([S], [S], [S]),
        "HSDP": ([R, S], [R, S], [R, S]),
    }
    ### END SOLUTION


check.placements(placements)

# %% [markdown]
# Look what the table says of memory: a kind with a shard in its column is divided by the ranks of that axis, the others
# are not. And of what travels: P twice, if it is sharded; the summands to G and S; and what was updated. On six ranks,
# HSDP as 2 × 3, float32 with AdamW:

# %%
from labs import cost

on_all = {"DDP": 2 * 5 / 6, "ZeRO 1": 2 * 5 / 6, "ZeRO 2": 2 * 5 / 6, "ZeRO 3": 3 * 5 / 6}
sent = on_all | {"HSDP": 3 * 2 / 3 + 2 * 1 / 2 * 1 / 3}  # inside of a node; and a third of it, between the two
sizes = {"DDP": (6, 0), "ZeRO 1": (6, 1), "ZeRO 2": (6, 2), "ZeRO 3": (6, 3), "HSDP": (3, 3)}  # ranks, stage
rows = {name: {k: v / 4 for k, v in cost.bytes_held(1, *each, "float32").items()} for name, each in sizes.items()}
draw.table(
    [{"": name, **{k: round(v, 2) for k, v in (rows[name] | {"sent": sent[name]}).items()}} for name in rows],
    caption="held of P, G and S, and sent in a step, by each rank; × the model",
)

# %% [markdown]
# The next notebook builds stage 3 anew on this: parameters that are DTensors, and `fully_shard`.
#
# ## Measure and native
#
# PyTorch has all of it, under the same names: `init_device_mesh` makes the mesh, `torch.distributed.tensor` has
# `DTensor`, `distribute_tensor` and the placements. So the functions of the cells above run with PyTorch's, word for
# word. The same placements, the same collectives, the same bytes? First the redistributions, all but
# one: from `Shard(0)` to `Shard(1)` PyTorch goes by an all-gather on CPUs, warns of it, and sends N times as much.

# %%
from torch.distributed.device_mesh import init_device_mesh

four = [move for move in MOVED if move != "Shard(0) → Shard(1)"]


def their_moves():
    import torch.distributed.tensor

    move_each(torch.distributed.tensor, init_device_mesh("cpu", (4,), mesh_dim_names=("a",)), four)


theirs = run(their_moves, ranks=4, device="cpu", record="communication").recording
rows = {
    move: (share[move] * n, moves.sent(0, MOVED.index(move)), theirs.sent(0, step)) for step, move in enumerate(four)
}
draw.ledger(rows, within=0, caption="bytes that rank 0 sends")

# %% [markdown]
# And the two layers:


# %%
def with_torchs():
    import torch.distributed.tensor

    torch.manual_seed(0)
    x, up, down = torch.randn(6, 8), torch.randn(8, 20), torch.randn(20, 8)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    lie, whole = two_layers(torch.distributed.tensor, mesh, x, up, down)
    return {name: repr(placements[0]) for name, placements in lie.items()}, whole


native = run(with_torchs, ranks=4, device="cpu", record="communication").recording

# %%
draw.table(
    [
        {"": name, "ours": str(dict(ours.counts(0, step))), "PyTorch's": str(dict(native.counts(0, step)))}
        for step, name in enumerate(("the two layers", "full_tensor()"))
    ],
    caption="collectives of rank 0",
)

# %%
rows = {
    name: (predicted, ours.sent(0, step), native.sent(0, step))
    for step, (name, predicted) in enumerate(on_paper.items())
}
ledger = draw.ledger(rows, within=0, caption="bytes that rank 0 sends")
assert ledger.agrees
ledger

# %% [markdown]
# The course's tests hold ours and PyTorch's together on many more such cases, forward and backward; where PyTorch goes
# another way, the test's row says so.
#
# ### A bug that was published
#
# In March 2025 it was found that clipping gradients under FSDP2 gave norms that were a little wrong, on every rank, and
# without an error ([pytorch#149768](https://github.com/pytorch/pytorch/issues/149768)). The line was
# `total_norm + 1e-6`. The norm was a summand on each rank, and a sum *with a number* was taken for linear: every rank
# added 1e-6 to its own summand. You can do the same by hand, with a number that is large enough to see:


# %%
def plus_one():
    mesh = Mesh((4,), ("a",))
    x = DTensor.from_local(torch.ones(1), mesh, [Partial()])  # four summands of 1: the tensor is 4
    wrong = DTensor.from_local(x.to_local() + 1, mesh, [Partial()])
    return wrong.full_tensor().item(), (x + 1).full_tensor().item(), repr((x + 1).placements)


assert run(plus_one, ranks=4, device="cpu")[0] == (8, 5, "(Replicate(),)")

# %% [markdown]
# By hand 8, where 4 + 1 is due. Our `+` finds no way for summands there (a sum is linear only in all of its inputs
# *together*, and the number is not a summand), so it all-reduces first. *Silently wrong* is the price of an algebra
# whose table has one wrong entry; which is why the table is short, and every way of every rule is tested against the
# whole tensors.
#
# ### A way out
#
# None of this needs a notebook. This writes a script with PyTorch's modules alone, and starts it as one does at work:

# %%
SCRIPT = """
import torch, torch.distributed as dist, torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh

def mark(name): pass

{function}
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
torch.manual_seed(0)
x, up, down = torch.randn(6, 8), torch.randn(8, 20), torch.randn(20, 8)
lie, whole = two_layers(torch.distributed.tensor, mesh, x, up, down)
if dist.get_rank() == 0:
    print("as on one process:", torch.allclose(whole, (x @ up).relu() @ down, atol=1e-5))
dist.destroy_process_group()
"""

# %%
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "two_layers.py"
    script.write_text(SCRIPT.format(function=inspect.getsource(two_layers)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
print(f"torchrun --standalone --nproc-per-node 4 two_layers.py\n{done.stdout or done.stderr[-2000:]}")

# %% [markdown]
# ## Why, and why not
#
# **Why**: a strategy is then no longer code, but a few words about each tensor. The same model file runs under DDP,
# FSDP, tensor parallelism and any of them together; checkpoints know what they hold, and can be loaded on another mesh.
#
# **GSPMD** (Xu et al., 2021) takes this to its end, and is what JAX and XLA do: you say how a *few* tensors lie, and
# the compiler finds placements for all the others, with the same algebra of letters, and inserts the collectives. It
# sees the whole program where DTensor decides one operation at a time: remember the `(Partial(), Replicate())` that
# was all-reduced before it was cut. In return you read a compiled program to find out what travels, and here you can
# step through it with a debugger.
#
# **Why not**: each operation on a DTensor is looked up, in Python, before anything is computed. A
# small model notices that; FSDP2 therefore keeps parameters as DTensors, and computes with plain
# tensors. An operation without a rule is refused. And a placement that you did not intend is no error: it is a
# collective more, in every step. So look at what is sent.

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>A mesh of 2 × 4 × 2 ranks with the axes pp, dp, tp. Which ranks are along dp with rank 5, and which
# axis should be inside a node?</summary>
#
# Rank 5 is at (0, 2, 1). Along dp the step is 2: ranks 1, 3, 5, 7. The last axis, tp, is made of neighbours: it should
# be what talks most, and it stays inside.
# </details>
#
# <details><summary>Where does <code>Partial()</code> come from, and what gets rid of it?</summary>
#
# From an operation that sums over a dim that is cut: a letter that the output does not have. An all-reduce makes it
# Replicate(), a reduce-scatter Shard(); the second sends half as much.
# </details>
#
# <details><summary>What is ZeRO 2, in three placements? And what do you change for HSDP's stage 3 on two
# axes?</summary>
#
# P Replicate(), G and S Shard(0). For HSDP all three are (Replicate(), Shard(0)): P, too, is sharded inside of a node,
# and everything is there once for each node.
# </details>
#
# For a tensor of n bytes on N ranks, along one axis, each rank:
#
# | from → to | collective | predicted | ours | PyTorch's |
# |---|---|---|---|---|
# | Shard(i) → Replicate() | all_gather | (N − 1)/N n | exactly | exactly |
# | Partial() → Replicate() | all_reduce | 2 (N − 1)/N n | exactly | exactly |
# | Partial() → Shard(j) | reduce_scatter | (N − 1)/N n | exactly | exactly |
# | Shard(i) → Shard(j) | all_to_all | (N − 1)/N² n | exactly | on CPUs N times that |
# | Replicate() → Shard(j) | none | 0 | 0 | 0 |
#
# **Read on**, in this order, each short: [labs/mesh.py](../labs/mesh.py), [labs/placement.py](../labs/placement.py),
# [labs/redistribute.py](../labs/redistribute.py), [labs/algebra.py](../labs/algebra.py),
# [labs/rules.py](../labs/rules.py), [labs/dtensor.py](../labs/dtensor.py). Xu et al., 2021, *GSPMD: General and
# Scalable Parallelization for ML Computation Graphs* (arXiv 2105.04663), section 3.
#
# A clean copy of this notebook: `git restore notebooks/05_mesh_and_dtensor.ipynb`, then *File > Reload Notebook from
# Disk*.
