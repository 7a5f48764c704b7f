# %% [markdown]
# # Mesh and DTensor: tensors that know their layout
#
# *You are rank 5 of 8. With whom do you share the parameters, with whom do you average the gradients, and how does a
# tensor know which part of it is yours?*
#
# You need: [Collectives](02_collectives.ipynb) and [ZeRO](04_zero.ipynb).
# **Minutes**, by estimate: 40 without exercises, 85 with them, 35 more for the challenge.
# The machine works for less than a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("05")

# %% [markdown]
# ## Question
#
# So far there has been one strategy at a time, and one group: all ranks. Now take two **nodes** (machines) of four
# devices each. Inside a node the devices are joined by a fast link, and the two nodes by a slow one. ZeRO's stage 3
# gathers parameters all the time, and over the slow link that hurts. So let each *node* hold the whole model once,
# sharded over its four devices, and let the two nodes be replicas of each other that average their gradients. This is
# **HSDP**, *hybrid sharded data parallel*: two strategies at once. PyTorch's FSDP has it
# ([pytorch#89915](https://github.com/pytorch/pytorch/pull/89915)) because "expensive all-gathers and reduce-scatters
# are only done within a node".
#
# Each rank now needs two groups: the ranks with which it shards, and those with which it averages. You are rank 5: who
# are they? This notebook is about the two tools that answer questions like these, a *mesh* and a *DTensor*. They are
# the foundation of TorchTitan (Liang et al., 2024, arXiv 2410.06511), which trains Llama 3.1 with 8 to 405 billion
# parameters, on up to 512 GPUs in its experiments.

# %%
import torch
import torch.distributed as dist

from labs.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from labs.dtensor.algebra import ways
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import MOVES, plan
from labs.kit import beat, check, draw, play
from labs.kit.launch import Link, run
from labs.kit.record import mark
from labs.mesh import Mesh

# %% [markdown]
# ## Picture
#
# Arrange the ranks as a grid, row by row. That is a **mesh**. It has **axes**, each with a name, and a rank's place on
# it is its **coordinate**: rank 5 is at (1, 1). Here the axis `replicate` counts the nodes, and `shard` the devices
# inside a node. A row is a group along `shard`: ranks with the same tint and letter talk to each other.

# %%
draw.mesh({"replicate": 2, "shard": 4}, along="shard")

# %% [markdown]
# ## Predict
#
# Along `replicate`, rank 5 averages gradients with one other rank. Which one? (The cell then prints the mesh as rank 5
# sees it: the grid, with rank 5 in brackets, and below it the groups of each axis.)

# %%
guess_partner = 1  # your number

mesh = Mesh((2, 4), ("replicate", "shard"), rank=5)  # with `rank` it is arithmetic: no job
assert mesh.get_coordinate() == (1, 1) and mesh["shard"].mesh.tolist() == [4, 5, 6, 7]
print(repr(mesh))
[partner] = [group for group in mesh.groups_of("replicate") if 5 in group]
check.predict("Rank 5 averages with rank", guess_partner, partner[0], tolerance=0)

# %% [markdown]
# A column is a group along `replicate`:

# %%
draw.mesh({"replicate": 2, "shard": 4}, along="replicate")

# %% [markdown]
# ## Build: coordinates and groups
#
# There may be more than two axes. With three, of sizes A × B × C, one step along the last axis adds 1 to the rank, one
# step along the middle axis adds C, and one step along the first adds B × C.
#
# ### Exercise 1: where am I, and who is with me? (10 minutes)
#
# A mesh here has one to four axes, and an axis may have size 1. `rank` is any rank of the mesh; it is not the number of
# the process that calls your function. Budget: no messages. Every rank can work it out alone.


# %%
def neighbours(shape, rank):
    """The coordinate of a rank on a mesh of this shape (row by row), and for each axis the
    ranks along it.

    shape: sizes of the axes, outermost first.  Returns ([place on each axis], [ranks along each
    axis, in order]): neighbours((2, 4), 5) is ([1, 1], [[1, 5], [4, 5, 6, 7]])
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
# ## Build: why the order of the axes matters
#
# In a job, `Mesh` also makes a process group for each row and each column. Every rank must take part in creating every
# group, in the same order, even those to which it does not belong. `mesh.get_group("shard")` is the one that this rank
# is in.
#
# `Mesh((2, 2), ("replicate", "shard"))` or `Mesh((2, 2), ("shard", "replicate"))`? On paper it is the same strategy.
# But ranks with neighbouring numbers share a node, and the *last* axis is made of neighbours.
#
# Here is what HSDP sends for one layer of 1 MB. Along `shard` the layer is gathered twice (forward and backward) and
# its gradient is reduce-scattered; along `replicate` the rank's shard of the gradient is all-reduced. `Link` treats
# ranks 0 and 1 as one node, ranks 2 and 3 as another, and delays whatever crosses between them, as a wire of 200 Mbit/s
# with 1 ms of latency would.

# %%
from labs.group import all_gather, reduce_scatter

LAYER = 250_000  # elements of float32
SLOW = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)


# %%
def one_layer(shape, names, steps=5):
    """What travels for one layer in each step, on a mesh with the axes "shard" and
    "replicate"."""
    mesh, full = Mesh(shape, names), torch.zeros(LAYER)
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    piece = full[: LAYER // mesh.size("shard")].clone()
    for _ in range(steps):
        dist.barrier()
        mark("step")
        for _ in ("forward", "backward"):
            all_gather(full, piece, group=shard)
        gradient = reduce_scatter(full, shard)
        dist.all_reduce(gradient, group=replicate)
        mark("end")


# %% [markdown]
# The job runs three times: with all four ranks along `shard`, which is ZeRO 3, and as HSDP in both orders of its axes.
# The bytes are worked out from the sizes of the `dist` calls, as in notebook 02, here and wherever this notebook says
# "measured"; `recording.across(rank, step)` is the part of a rank's bytes that goes to the other node. Compare the two
# orders: when `shard` comes first instead of last, by what factor does the number of bytes that leave a node grow?

# %%
guess_crossing = 3  # your number

grids = {
    "ZeRO 3, replicate 1 × shard 4": ((1, 4), ("replicate", "shard")),
    "HSDP, replicate 2 × shard 2": ((2, 2), ("replicate", "shard")),
    "HSDP, shard 2 × replicate 2": ((2, 2), ("shard", "replicate")),
}
on_slow = {"ranks": 4, "device": "cpu", "record": "communication", "link": SLOW}
slow = {name: run(one_layer, *grid, **on_slow).recording for name, grid in grids.items()}
leaving = {name: sum(x.across(rank, 0) for rank in (0, 1)) for name, x in slow.items()}
_, shard_last, shard_first = leaving.values()
grow = shard_first / shard_last
check.predict("Bytes that leave a node grow by a factor of", guess_crossing, grow, tolerance=0)


# %%
def quickest(recording):
    """Seconds of the quickest step, from the first rank's start to the last rank's end."""
    steps = zip(*(recording.step_spans(rank) for rank in range(4)), strict=True)
    return min(max(x.end for x in step) - min(x.start for x in step) for step in steps)


for name, recording in slow.items():
    took, wire = 1000 * quickest(recording), 8000 * leaving[name] / SLOW.bandwidth
    told = f"the quickest step took {took:.0f} ms; on paper, {wire:.0f} ms of it on the wire"
    print(f"{name}: {told}")
sends = {name: recording.sent(rank=0, step=0) for name, recording in slow.items()}
columns = "rank 0 sends, bytes", "leave node 0, bytes"
draw.table([{"": name, columns[0]: sends[name], columns[1]: leaving[name]} for name in slow])

# %% [markdown]
# Where do these bytes come from? An all-gather is a ring: each rank sends 3/4 of the layer to the next one. In ZeRO 3
# that is a ring of all four ranks, and of node 0 only rank 1 has its next rank on the other node: 2 × 750,000 bytes for
# the two gathers. The reduce-scatter is no ring: on CPUs it is an all-to-all ([labs/group.py](../labs/group.py) says
# why), in which ranks 0 and 1 each send a quarter of the layer to both ranks of the other node, 4 × 250,000 bytes. As
# HSDP with `shard` last, only the all-reduce crosses: each of the two ranks sends half of the layer. With `shard`
# first, only the all-reduce does not: each rank sends half of the layer three times.
#
# With `shard` last, HSDP sends much less over the slow wire than ZeRO 3. With `shard` first, it sends *more* than ZeRO
# 3, although each rank sends the same number of bytes in either order. The time of the quickest of five steps follows
# the bytes that cross. (Not exactly: a step also has latency, copies, and the traffic inside a node.) So the rule is:
# *what talks most goes last.* On a cluster the last axis is the one inside a node (HSDP's shards, or tensor
# parallelism, which you will meet below), and the first is the one across nodes (replicas).
#
# ## Build: a tensor that knows its layout
#
# In notebook 04 every strategy had its own code: cut this, gather that. All of that code answered one question: *who
# holds which part of a tensor?* So let the tensor say so. On each axis of the mesh it has one of three **placements**:
#
# * `Shard(dim)`: each rank along the axis has a piece, cut along that dim;
# * `Replicate()`: each has all of it;
# * `Partial()`: each has a tensor of the full *shape*, but its values are only one summand. The tensor is the sum of
#   all the summands. (PyTorch prints `Partial(sum)`; it has other reductions, too.)
#
# A tensor with a mesh and placements is a **DTensor** (distributed tensor). It has the shape of the whole, and on each
# rank it holds a **block**, its `to_local()`. `distribute_tensor` makes one from a whole tensor.


# %%
def layout(shape, mesh_shape, placements):
    """The layout of a DTensor, and this rank's block."""
    mesh = Mesh(mesh_shape, ("a", "b")[: len(mesh_shape)])
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = distribute_tensor(whole, mesh, placements)
    assert torch.equal(x.full_tensor(), whole)  # whatever the placements are
    return x.spec, x.to_local()


layouts = run(layout, (4, 6), (4,), [Shard(0)], ranks=4, device="cpu")
spec, block = layouts[2]
print(f"rank 2 holds {block.tolist()}")
draw.blocks(spec, ("a",))

# %% [markdown]
# The dashed outline is the whole tensor, and the filled part is the block that the rank holds. In these pictures, the
# same tint means the same block.
#
# Now cut along the other dim, on the same four ranks. Six is not divisible by 4. How many columns does rank 3 hold?

# %%
guess_columns = 0  # your number

layouts = run(layout, (4, 6), (4,), [Shard(1)], ranks=4, device="cpu")
spec, block = layouts[3]
check.predict("Columns of rank 3:", guess_columns, block.shape[1], tolerance=0)

# %%
draw.blocks(spec, ("a",))

# %% [markdown]
# A dim is cut into pieces of ⌈size/N⌉; the last piece may be shorter, and any ranks left over get an **empty** block
# (`torch.chunk` would return fewer pieces). An empty block is a block like any other: its rank takes part in every
# collective.
#
# On a mesh of two axes there is a placement for each axis. Here is a tensor that is cut along both, and then one that
# is copied along `a` and cut along `b`:

# %%
layouts = run(layout, (4, 6), (2, 2), [Shard(0), Shard(1)], ranks=4, device="cpu")
draw.blocks(layouts[0][0], ("a", "b"))

# %%
layouts = run(layout, (4, 6), (2, 2), [Replicate(), Shard(0)], ranks=4, device="cpu")
draw.blocks(layouts[0][0], ("a", "b"))

# %% [markdown]
# The second one is how HSDP keeps a parameter, with `replicate` for `a` and `shard` for `b`. (When both axes cut the
# *same* dim, the second cuts what the first has left.)
#
# `Partial()` is the odd one out. You have met it often: before the all-reduce of DDP, each rank has a gradient of the
# right shape, and none of them is *the* gradient. Here every rank contributes rank + 1, and the tensor is
# 1 + 2 + 3 + 4:


# %%
def summands():
    """This rank's summand, and the tensor."""
    mesh = Mesh((4,), ("a",))
    x = DTensor.from_local(torch.tensor([dist.get_rank() + 1.0]), mesh, [Partial()])
    return x.to_local().item(), x.full_tensor().item()


run(summands, ranks=4, device="cpu")

# %% [markdown]
# ## Build: from one placement to another
#
# `x.redistribute(placements=...)` gives the same tensor with another layout. Going from one placement to another takes
# at most one collective. Cover the right half of this table, and say which one each row needs. (N is the number of
# ranks along the axis, n the size of the tensor in bytes. The last row is used only inside operations; `redistribute`
# refuses Partial as a target.) The cells after the table test it on four ranks: they show what the table predicts
# beside what was recorded.

# %%
print(MOVES)

# %%
SHARE = {"Shard(0) → Replicate()": 3 / 4, "Partial() → Replicate()": 2 * 3 / 4}
SHARE |= {"Partial() → Shard(0)": 3 / 4, "Shard(0) → Shard(1)": 3 / 16}
SHARE |= {"Replicate() → Shard(1)": 0}  # what a rank sends, as a fraction of the tensor


def move_each(tensor, mesh, moves):
    """One redistribution of 16 × 24 elements per step; `tensor` is labs.dtensor, or
    torch.distributed.tensor."""
    placements = {"Replicate()": tensor.Replicate(), "Partial()": tensor.Partial()}
    placements |= {f"Shard({dim})": tensor.Shard(dim) for dim in (0, 1)}
    for move in moves:
        source, target = (placements[word] for word in move.split(" → "))
        block = torch.ones(4 if source.is_shard() else 16, 24)
        x = tensor.DTensor.from_local(block, mesh, [source])
        mark("step")
        x.redistribute(placements=[target])
        mark("end")


# %%
def our_moves():
    import labs.dtensor

    move_each(labs.dtensor, Mesh((4,), ("a",)), SHARE)


n = 16 * 24 * 4  # bytes
moved = run(our_moves, ranks=4, device="cpu", record="communication").recording
our_bytes = {move: moved.sent(rank=0, step=step) for step, move in enumerate(SHARE)}
draw.ledger({move: (SHARE[move] * n, our_bytes[move]) for move in SHARE}, within=0)

# %% [markdown]
# Two rows are cheaper than you might expect. `Replicate()` → `Shard(j)` is free: each rank cuts its piece out of what
# it already has. And `Shard(i)` → `Shard(j)` sends only (N − 1)/N² n, since no rank ever holds more than one piece.
#
# ### Exercise 2: from Partial to Shard (10 minutes)
#
# ZeRO depends on the reduce-scatter row. Write it. `reduce_scatter(vector, group)`, imported above from
# [labs/group.py](../labs/group.py), takes a 1-D tensor whose size is divisible by N, and returns this rank's N-th of
# the sum. But a piece along dim 1 is not contiguous in memory, and the size of a dim may not be divisible by N. So pad
# the dim with zeros to N equal pieces, put the pieces one after another in a 1-D tensor, reduce-scatter it, then trim
# your piece to its true size.
#
# The check tries several dtypes (keep the summand's), any strides, a group of only some of the ranks, and empty pieces.
# Budget: send (N − 1)/N of the padded tensor; hold at most 4.5 × the summand besides the summand itself, and after the
# call nothing but the piece, perhaps with its padding. The piece is the caller's: no later call may write into it.
# Leave the summand as it was.


# %%
def partial_to_shard(summand, dim, group=None):
    """This rank's piece, along `dim`, of the sum of all ranks' summands.

    summand: the same shape on all ranks; dim: counted from 0
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = summand.shape[dim]
    longest = -(-size // ranks)  # rounded up
    mine = max(0, min(longest, size - rank * longest))  # how long this rank's piece is
    ### BEGIN SOLUTION
    shape = *summand.shape[:dim], ranks * longest, *summand.shape[dim + 1 :]
    padded = torch.zeros(shape, dtype=summand.dtype)
    padded.narrow(dim, 0, size).copy_(summand)
    pieces = padded.unflatten(dim, (ranks, longest)).movedim(dim, 0)
    piece = reduce_scatter(pieces.flatten(), group).view(pieces.shape[1:])
    return piece.narrow(dim, 0, mine)
    ### END SOLUTION


check.partial_to_shard(partial_to_shard)

# %% [markdown]
# ### Two axes: a path
#
# On a mesh of several axes, each axis takes its own step, one after another. In which order? Take a tensor on 2 × 2
# ranks whose placements are `(Partial(), Replicate())` and should become `(Replicate(), Shard(0))`. Along the first
# axis it must be all-reduced; along the second each rank only cuts out its half. To plan, no data is needed: a `Spec`
# is a layout alone, that is the shape of the whole tensor, the sizes of the mesh, and a placement for each axis. Here
# is our plan for it, which is also PyTorch 2.13's default plan:

# %%
start, goal = Spec((16, 12), (2, 2), (Partial(), Replicate())), (Replicate(), Shard(0))
plan(start, goal)

# %% [markdown]
# It all-reduces the whole tensor, and then throws half of the result away. In the other order, only half as much would
# have been sent. Both give the right result. To send less, make the block *smaller* as early as possible, and *larger*
# as late as possible. What there is to beat at the end of this notebook is a plan like this one.
#
# Now play. Choose a tensor, a mesh, and placements before and after; look at who holds what, and at what a rank sends.
# Find a redistribution that sends nothing, and one in which a rank sends more bytes than the tensor has (8 × 6 elements
# of 4 bytes are 192). On a mesh of one axis, the controls of `b` have no effect.

# %%
play.placements()

# %% [markdown]
# ## Build: the algebra
#
# Now compute with these tensors. In `y = x @ w` each rank has only blocks of x and w. What can it compute from them,
# and what is the layout of y? Give each dim a letter, and give the same letter to dims that belong together: a matrix
# product is `ik,kj->ij`. The letters then tell you every way to compute it. And a product is *linear in each* input: if
# one of the two is a summand on each rank and the other is whole, the product is a summand, too. `ways` is told so by
# `linear="each"`. Here are all ways along one axis of the mesh, inputs → output:

# %%
cases = ["all whole", "i is cut", "k is cut", "j is cut", "x is a summand", "w is a summand"]
for case, way in zip(cases, ways("ik,kj->ij", linear="each"), strict=True):
    print(f"{case + ':':16} {way}")

# %% [markdown]
# If `i` is cut (the rows of x: the batch), each rank computes its rows of y. If `k` is cut, in both inputs, each rank
# multiplies what it has, and that is a *summand* of y. **This is where Partial comes from**: a letter that is cut and
# does not appear in the output. If `j` is cut (the columns of w), each rank has some columns of y. And a summand times
# a whole matrix is a summand of the product.
#
# An operation on a DTensor picks the way that needs the cheapest redistribution of its inputs, redistributes them, and
# computes with the blocks. That is all. The letters of all operations are a short table,
# [labs/dtensor/rules.py](../labs/dtensor/rules.py). Now try two layers, the first weight cut by columns and the second
# by rows:


# %%
def two_layers(tensor, mesh, x_BD, up_DF, down_FD):
    """relu(x @ up) @ down, with F cut over the ranks; `tensor` is labs.dtensor or
    torch.distributed.tensor.

    B: batch, D: width, F: hidden width.  Returns the placements of the hidden layer and of the
    result, and the whole result.
    """
    x = tensor.distribute_tensor(x_BD, mesh, [tensor.Replicate()])
    up = tensor.distribute_tensor(up_DF, mesh, [tensor.Shard(1)])
    down = tensor.distribute_tensor(down_FD, mesh, [tensor.Shard(0)])
    mark("step")
    hidden = (x @ up).relu()
    y = hidden @ down
    mark("step")
    whole = y.full_tensor()
    mark("end")
    return hidden.placements[0], y.placements[0], whole


# %%
torch.manual_seed(0)
x, up, down = torch.randn(6, 8), torch.randn(8, 20), torch.randn(20, 8)


def with_ours():
    import labs.dtensor

    return two_layers(labs.dtensor, Mesh((4,), ("a",)), x, up, down)


result = run(with_ours, ranks=4, device="cpu", record="communication")
hidden, y, whole = result[0]
assert torch.allclose(whole, (x @ up).relu() @ down, atol=1e-5)
print(f"hidden layer: {hidden}, result: {y}")
ours = result.recording
on_paper = {"the two layers": 0, "full_tensor()": 2 * 3 / 4 * whole.nbytes}
steps = list(enumerate(on_paper.items()))
draw.ledger({name: (sent, ours.sent(0, step)) for step, (name, sent) in steps}, within=0)

# %% [markdown]
# Both products are computed without sending a byte; then one all-reduce makes the result whole. You have just met
# **tensor parallelism**, which has [a notebook of its own](09_tensor_parallel.ipynb). Had the first weight been cut by
# rows instead, `x @ up` would be `Partial()`, and `relu` would have to reduce it first: the relu of a sum is not the
# sum of relus.
#
# ### Exercise 3: rows that are missing (10 minutes)
#
# Five operations of PyTorch have no row in the table, so a DTensor refuses them:
#
# | | | takes | returns |
# |---|---|---|---|
# | `cumsum` | `x.cumsum(1)`, sums of a row up to each place | a matrix | a matrix |
# | `logsumexp` | `x.logsumexp(1)`, log of the sum of exp of a row | a matrix | a vector |
# | `trace` | `x.trace()`, the sum of the diagonal | a matrix | a number |
# | `linalg_cross` | `torch.linalg.cross(x, y, dim=1)`, row by row | two of [rows, 3] | one of [rows, 3] |
# | `convolution` | `F.conv1d(x, w)` | [batch, channel, place], [new, channel, tap] | [batch, new, place] |
#
# Write their rows. A row is letters, with a dot for a dim that must stay whole, and one word on what the operation is
# linear in: `"each"` input as long as the others stay as they are, all inputs `"together"`, the `"first"` alone, or
# nothing, `""`. With one input, the first three mean the same. A row that allows too much makes results wrong without a
# word; one that allows too little makes traffic that nobody needs. The check computes by your rows, on three ranks,
# with every layout the inputs can have.
#
# <details><summary>To begin with</summary>Two ranks and small numbers: cut one dim, and do the operation on each
# block. Is what a rank has then a piece of the result, a summand of it, or neither?</details>
#
# <details><summary>On letters</summary>What does one element of the result depend on? A dim along which it needs what
# lies beside it must stay whole. And does <code>trace</code> of rows 2 and 3 find their part of the
# diagonal?</details>
#
# <details><summary>On linear</summary>f is linear if f(a + b) is f(a) + f(b). A logarithm is not. A product is, in one
# factor as long as the other stays as it is; but what is (a + b)(c + d)?</details>


# %%
def rules():
    """{"cumsum": (letters, linear), ...}: rows for the five operations.

    Every way that a row allows gives the numbers of whole tensors, and no other way would.
    """
    ### BEGIN SOLUTION
    return {
        "cumsum": ("a.->a.", "together"),
        "logsumexp": ("a.->a", ""),
        "trace": ("..->", "together"),
        "linalg_cross": ("a.,a.->a.", "each"),
        "convolution": ("nc.,oc.->no.", "each"),
    }
    ### END SOLUTION


check.rules(rules)

# %% [markdown]
# ### What is redistributed in *your* model?
#
# `redistributed` runs any module forward and backward on tensors laid out as you say. It has a row for each operation
# that had something moved first, with the rule for which it did. The column `in` tells forward from backward. Here the
# first weight is cut along its inputs, and so is the batch. Cut another dim, or put in a module of yours:

# %%
from labs.kit.record import redistributed

module = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.GELU(), torch.nn.Linear(20, 8))
layouts = {"0.weight": [Shard(1)], "x": [Shard(0)]}  # all else is whole
draw.table(run(redistributed, module, layouts, torch.ones(16, 8), ranks=4, device="cpu")[0])

# %% [markdown]
# ### Gradients have a layout, too
#
# Backward is made of operations, so the same algebra gives the layout of gradients. Let the batch be cut, so that x is
# `Shard(0)`, and let the weight be whole. The gradient of w is xᵀ @ (gradient of y), and the letter of the batch does
# not appear in it:


# %%
def batch_cut():
    """The layout of a whole weight's gradient when the batch is cut."""
    mesh = Mesh((4,), ("a",))
    x = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    w = distribute_tensor(torch.nn.Parameter(torch.ones(3, 5)), mesh, [Replicate()])
    (x @ w).sum().backward()
    return w.grad.placements


run(batch_cut, ranks=4, device="cpu")[0]

# %% [markdown]
# No line here averages gradients, and yet this is DDP: *the gradient of a replicated weight is Partial, and making it
# Replicate is an all-reduce.* Make it `Shard(0)` instead and you have ZeRO's reduce-scatter.
#
# ## Build: strategies as three placements
#
# All of notebook 04 fits in one table. A strategy gives placements to P, G and S: the parameters between two steps, the
# gradients when backward is over, the optimizer state. All traffic follows from these. P goes to `Replicate()` for
# forward and for backward; the gradient, which begins as `Partial()`, goes to G's placement, and then to S's for the
# update; and the updated parameters go back to P's.
#
# ### Exercise 4: write the table (15 minutes)
#
# Return a dict with the keys "DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3", "HSDP". A value is three lists, for P, G and S, with
# a placement for each axis of the mesh: one axis for all but HSDP, which has `("replicate", "shard")`. Any `Shard(dim)`
# of a matrix will do. The check runs your table on six ranks, HSDP as 2 × 3, and compares the bytes held of each kind,
# the bytes sent in a step, what is in `.grad`, and the new weights with the strategy's own. In ZeRO 1, what is in a
# rank's `.grad` when backward is over: the mean, or only its own contribution?


# %%
def placements():
    """{strategy: (P, G, S)}, each a list with a placement for each axis of the mesh."""
    whole, summand, piece = Replicate(), Partial(), Shard(0)
    ### BEGIN SOLUTION
    return {
        "DDP": ([whole], [whole], [whole]),
        "ZeRO 1": ([whole], [summand], [piece]),
        "ZeRO 2": ([whole], [piece], [piece]),
        "ZeRO 3": ([piece], [piece], [piece]),
        "HSDP": ([whole, piece], [whole, piece], [whole, piece]),
    }
    ### END SOLUTION


check.placements(placements)

# %% [markdown]
# Memory can be read off your table: a kind that is `Shard` along an axis is divided by the number of ranks along it. So
# can traffic: P is gathered twice if it is sharded, the gradient goes to G's and then S's placement, and the update
# goes back to P's. Here it is for six ranks, three on each node, in float32 with AdamW. What is sent is divided by the
# group in which it is sent: all of its ranks are on one node, or they are on both. (In a group on both nodes, only some
# of the bytes cross: in a ring of all six, one rank of each node has its next rank on the other.)

# %%
from labs import cost

both = {"DDP": 2 * 5 / 6, "ZeRO 1": 2 * 5 / 6, "ZeRO 2": 2 * 5 / 6, "ZeRO 3": 3 * 5 / 6}
both["HSDP"] = 2 * 1 / 2 * 1 / 3  # an all-reduce of a third
inside = {"HSDP": 3 * 2 / 3}  # two gathers and a reduce-scatter
sizes = {"DDP": (6, 0), "ZeRO 1": (6, 1), "ZeRO 2": (6, 2), "ZeRO 3": (6, 3)}  # ranks, stage
sizes["HSDP"] = 3, 3
rows = []
for name, size in sizes.items():
    held = {kind: nbytes / 4 for kind, nbytes in cost.bytes_held(1, *size, "float32").items()}
    held["sent in a group on one node"] = inside.get(name, 0)
    held["in a group on both"] = both[name]
    rows.append({"": name, **{column: round(value, 2) for column, value in held.items()}})
draw.table(rows, caption="by formula, × the model, per rank; the check measures the same")

# %% [markdown]
# HSDP holds more than ZeRO 3, and sends most of its bytes inside a node, where the link is fast. The next notebook
# rebuilds stage 3 on these tools: its parameters are DTensors, made by `fully_shard`.
#
# ## Measure and native
#
# PyTorch has all of it, under the same names: `init_device_mesh` makes the mesh, `torch.distributed.tensor` has
# `DTensor`, `distribute_tensor` and the placements. So the functions of the cells above run with PyTorch's, unchanged.
# Do they send the same bytes? First the redistributions, all but one: on CPUs PyTorch goes from `Shard(0)` to
# `Shard(1)` with an all-gather, issues a warning, and sends N times as much. (2.13 still assumes that gloo has no
# all-to-all; ours calls it.) Then the two layers, where placements and numbers are compared, too.

# %%
from torch.distributed.device_mesh import init_device_mesh

four = [move for move in SHARE if move != "Shard(0) → Shard(1)"]


def their_moves():
    import torch.distributed.tensor

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    move_each(torch.distributed.tensor, mesh, four)


moved = run(their_moves, ranks=4, device="cpu", record="communication").recording
theirs = {move: moved.sent(0, step) for step, move in enumerate(four)}
rows = {move: (SHARE[move] * n, our_bytes[move], theirs[move]) for move in four}
ledger = draw.ledger(rows, within=0, caption="bytes that rank 0 sends")
assert ledger.agrees
ledger


# %%
def with_torchs():
    import torch.distributed.tensor

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    return two_layers(torch.distributed.tensor, mesh, x, up, down)


result = run(with_torchs, ranks=4, device="cpu", record="communication")
hidden, y, again = result[0]
assert hidden.is_shard(1) and y.is_partial() and torch.allclose(again, whole)
theirs = result.recording
rows = {name: (sent, ours.sent(0, step), theirs.sent(0, step)) for step, (name, sent) in steps}
ledger = draw.ledger(rows, within=0, caption="bytes that rank 0 sends")
assert ledger.agrees
ledger

# %% [markdown]
# [tests/dtensor/test_dtensor.py](../tests/dtensor/test_dtensor.py) compares ours with PyTorch's in many more cases,
# forward and backward; where PyTorch does it differently, the test's row says so.
#
# ### A bug that was published
#
# > **What went wrong in the wild.** *Symptom*: under FSDP2, gradient clipping runs without an error, and its *factor*
# > is slightly wrong. The line was `clip_coef = max_norm / (total_norm + 1e-6)`. `total_norm` was still in pieces, one
# > local norm per rank (a relative of Partial), and each rank added 1e-6 to its own piece, where it should be added
# > once ([pytorch#149768](https://github.com/pytorch/pytorch/issues/149768), March 2025).
#
# The issue is closed; in 2.13 `Partial + number` reduces first. Here is the same mistake by hand, with a number that is
# large enough to see:


# %%
def plus_one():
    """Add 1 to a tensor of four summands: by hand, and by our +."""
    mesh = Mesh((4,), ("a",))
    x = DTensor.from_local(torch.ones(1), mesh, [Partial()])  # four summands of 1: it is 4
    by_hand = DTensor.from_local(x.to_local() + 1, mesh, [Partial()])
    return by_hand.full_tensor().item(), (x + 1).full_tensor().item(), (x + 1).placements


run(plus_one, ranks=4, device="cpu")[0]

# %% [markdown]
# By hand we get 8, where 4 + 1 = 5 is right. Our `+` finds no way to add the number to summands: a sum is linear only
# in all of its inputs *together*, and the number is not a summand. So it all-reduces first. A single wrong entry in the
# table of rules makes results *silently wrong*. That is why the table is short, and why every way of every rule is
# tested against the whole tensors ([tests/dtensor/test_algebra.py](../tests/dtensor/test_algebra.py)).
#
# ### A way out
#
# None of this needs a notebook. Here `two_layers` goes into a script that uses PyTorch alone, and is started the way
# you would start it at work:

# %%
SCRIPT = """
import torch, torch.distributed as dist, torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh

def mark(name): pass

{function}
dist.init_process_group("gloo")
torch.manual_seed(0)
x, up, down = torch.randn(6, 8), torch.randn(8, 20), torch.randn(20, 8)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
hidden, y, whole = two_layers(torch.distributed.tensor, mesh, x, up, down)
if dist.get_rank() == 0:
    print("as on one process:", torch.allclose(whole, (x @ up).relu() @ down, atol=1e-5))
dist.destroy_process_group()
"""

# %%
import inspect
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen

with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "two_layers.py"
    script.write_text(SCRIPT.format(function=inspect.getsource(two_layers)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    print("torchrun --standalone --nproc-per-node 2 two_layers.py")
    job = Popen([sys.executable, *command], stdout=PIPE, stderr=PIPE, text=True)
    for line in job.stdout:  # as they come
        print(line, end="")
    print(job.stderr.read()[-2000:] if job.wait() else "", end="")

# %% [markdown]
# ## Why, and why not
#
# **Why**: a strategy becomes a layout per tensor instead of code. The same model file runs under DDP, FSDP, tensor
# parallelism and any of them together; checkpoints know what they hold, and can be loaded on another mesh.
#
# **GSPMD** (Xu et al., 2021) takes this to its conclusion. JAX used it for years; its successor there is
# [Shardy](https://docs.jax.dev/en/latest/shardy_jax_migration.html). You give the layout of a *few* tensors, and the
# compiler finds placements for all the others, with the same algebra of letters, and inserts the collectives. It sees
# the whole program, whereas DTensor decides one operation at a time. The price is that you read a compiled program to
# find out what travels; here you can step through it with a debugger.
#
# **Why not**: each operation on a DTensor must first be looked up (here in Python; in recent PyTorch through a C++
# cache), and with a small model that shows. FSDP2 keeps parameters as DTensors between uses, but forward and backward
# compute with plain tensors. The optimizer does not: in
# [pytorch#134191](https://github.com/pytorch/pytorch/issues/134191), still open, AdamW is limited by the CPU under
# FSDP2, and one of FSDP2's authors names DTensor's "own dispatch overhead" as one of two causes. An operation that has
# no rule, and cannot be broken down into operations that do, is refused. A placement that you did not intend is not an
# error; it is one more collective in every step, so look at what is sent. And PyTorch's documentation still calls
# `torch.distributed.tensor` "in alpha state".

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>A mesh of 2 × 4 × 2 ranks with the axes a, b, c. Which ranks are in rank 5's group along b, and
# which axis should be inside a node?</summary>
#
# Rank 5 is at (0, 2, 1). Along b the step is 2: ranks 1, 3, 5, 7. The last axis, c, is made of neighbours. It should be
# the axis that talks most, and it stays inside a node.
# </details>
#
# <details><summary>Where does <code>Partial()</code> come from, and what gets rid of it?</summary>
#
# From an operation that sums over a cut dim: a letter that does not appear in the output. An all-reduce makes it
# Replicate(), a reduce-scatter Shard(); the second sends half as much.
# </details>
#
# <details><summary>What is ZeRO 2, in three placements? And what are the three for HSDP, on two axes?</summary>
#
# P is Replicate(), G and S are Shard(0). For HSDP all three are (Replicate(), Shard(0)): P, too, is sharded inside a
# node, and each node has everything once.
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

# %% [markdown]
# ## Beat it: the fewest bytes from layout to layout (30 minutes)
#
# Here is a puzzle, with bytes to be saved. Twelve tensors on 2 × 2 × 2 ranks go from one layout to another, and
# PyTorch's plan takes each of them the straight way. You may stop on the way, at any layouts you like: a detour can
# send less than the straight way does. All paths are walked in a real job, and what all ranks send together is counted.
#
# **The bound**, element by element: a rank that needs one and does not have it must be sent it once. Where everybody
# has only summands, k different ones, the sum is complete somewhere after k − 1 messages at the least, and each further
# rank that needs it must be sent something after that. All of it together is 100 points, and the score is the mean of
# the twelve. The straight way scores 53.9.
# A score is 100 × bound / bytes.

# %%
ways, bound = beat.stops.cases, beat.stops.bound
draw.table([{"from": str(a), "to": str(b), "bytes at least": bound(a, b)} for a, b in ways])


# %%
def stops(spec, target):
    """The layouts to go through: a list of tuples, one placement for each axis; the last is
    target.

    spec: a Spec of shape (24, 16) on 2 × 2 × 2 ranks; spec.but(placements) is another layout of
    it.
    From stop to stop it goes by plan(spec, placements).  What the rank at a coordinate then
    sends is sent(spec, placements, coordinate), in elements; it raises RuntimeError where no
    move leads, as from Shard to Partial.  All twelve together may take two minutes.
    """
    ### BEGIN SOLUTION
    now = spec.placements
    pairs = zip(now, target, strict=True)
    free = [then if p.is_replicate() and then.is_shard() else p for p, then in pairs]
    return [tuple(free), target]
    ### END SOLUTION


beat.stops(stops)

# %% [markdown]
# The course first cuts what can be cut for nothing, and then goes straight on.
#
# <details><summary>Is there more to win?</summary>There are 64 layouts, and every way from one to another has its
# price. So a shortest path through them gives the best stops for each of the twelve: 82.1 points, and no list of stops
# has more.</details>
#
# **Read on**, in this order, each short: [labs/mesh/mesh.py](../labs/mesh/mesh.py),
# [labs/dtensor/placement.py](../labs/dtensor/placement.py),
# [labs/dtensor/redistribute.py](../labs/dtensor/redistribute.py),
# [labs/dtensor/algebra.py](../labs/dtensor/algebra.py), [labs/dtensor/rules.py](../labs/dtensor/rules.py),
# [labs/dtensor/dtensor.py](../labs/dtensor/dtensor.py). Xu et al., 2021, *GSPMD: General and Scalable Parallelization
# for ML Computation Graphs* (arXiv 2105.04663), section 3.
#
# **Next.** A layout says who holds what, but not when it travels: stage 3 still waits for each layer that it gathers.
# [06 FSDP](06_fsdp.ipynb) shards parameter by parameter, and gathers ahead.
#
# A clean copy of this notebook: `git restore notebooks/05_mesh_and_dtensor.ipynb`, then *File > Reload Notebook from
# Disk*.
