# %% [markdown]
# # Mesh and DTensor: tensors that know their layout
#
# *You are rank 5 of 8. With which ranks do you share the parameters, with which ranks do you average the gradients, and
# how does a tensor know which part of it you hold?*
#
# You need: [Collectives](02_collectives.ipynb) and [ZeRO](04_zero.ipynb).
# **Minutes**, by estimate: 40 without exercises, 85 with them, 35 more for the challenge.
# Running all cells takes less than a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("05")

# %% [markdown]
# ## Question
#
# So far each job used one strategy and one group, which was all ranks. Now take two **nodes** of four devices each; a
# node is a machine. A fast link joins the devices inside a node, and a slow link joins the two nodes. ZeRO's stage 3
# gathers parameters all the time, and over the slow link this takes long. So let each *node* hold the whole model once,
# sharded over its four devices, and let the two nodes be replicas of each other that average their gradients. This
# combination of two strategies is **HSDP**, *hybrid sharded data parallel*. PyTorch's FSDP offers HSDP
# ([pytorch#89915](https://github.com/pytorch/pytorch/pull/89915)) because "expensive all-gathers and reduce-scatters
# are only done within a node".
#
# Each rank now needs two groups: the ranks with which it shares the shards, and the ranks with which it averages
# gradients. Which ranks are in the two groups of rank 5? This notebook builds two tools that answer such questions, a
# *mesh* and a *DTensor*. Both are the foundation of TorchTitan (Liang et al., 2024, arXiv 2410.06511), which trains
# Llama 3.1 with 8 to 405 billion parameters, on up to 512 GPUs in its experiments.

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
# A **mesh** is a grid of ranks, filled row by row. A mesh has **axes**, each with a name. The place of a rank on the
# mesh is its **coordinate**: rank 5 is at (1, 1). In this picture the axis `replicate` counts the nodes, and the axis
# `shard` counts the devices inside a node. A row is a group along `shard`: ranks with the same tint and letter talk to
# each other.

# %%
draw.mesh({"replicate": 2, "shard": 4}, along="shard")

# %% [markdown]
# ## Predict
#
# Along `replicate`, rank 5 averages gradients with one other rank. Which rank is it? The cell then prints the mesh as
# rank 5 sees it: the grid, with rank 5 in brackets, and below it the groups of each axis.

# %%
guess_partner = 1  # your number

mesh = Mesh((2, 4), ("replicate", "shard"), rank=5)  # with `rank` it is arithmetic: no job
assert mesh.get_coordinate() == (1, 1) and mesh["shard"].mesh.tolist() == [4, 5, 6, 7]
print(repr(mesh))
[partner] = [group for group in mesh.groups_of("replicate") if 5 in group]
check.predict("Rank 5 averages with rank", guess_partner, partner[0], tolerance=0)

# %% [markdown]
# Each column of the mesh is a group along `replicate`:

# %%
draw.mesh({"replicate": 2, "shard": 4}, along="replicate")

# %% [markdown]
# ## Build: coordinates and groups
#
# A mesh may have more than two axes. On a mesh with three axes, of sizes A × B × C, one step along the last axis adds 1
# to the rank, one step along the middle axis adds C, and one step along the first adds B × C.
#
# ### Exercise 1: where am I, and who is with me? (10 minutes)
#
# In this exercise a mesh has one to four axes, and an axis may have size 1. `rank` is any rank of the mesh; it is not
# the number of the process that calls your function. Budget: no messages, since every rank can compute the result
# alone.


# %%
def neighbours(shape, rank):
    """Return the coordinate of a rank on a mesh of this shape, filled row by row, and for each
    axis the ranks along it.

    shape: the sizes of the axes, outermost first

    Returns ([place on each axis], [ranks along each axis, in order]): neighbours((2, 4), 5) is
    ([1, 1], [[1, 5], [4, 5, 6, 7]]).
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
# group, in the same order, even groups to which it does not belong. `mesh.get_group("shard")` returns this rank's own
# group along `shard`.
#
# Does it matter whether we write `Mesh((2, 2), ("replicate", "shard"))` or `Mesh((2, 2), ("shard", "replicate"))`? Both
# describe the same strategy. But ranks with neighbouring numbers are on the same node, and a group along the *last*
# axis consists of neighbouring numbers.
#
# The next cells make the collectives of HSDP for one layer of 1 MB. Along `shard` the layer is gathered twice, for
# forward and for backward, and its gradient is reduce-scattered. Along `replicate` each rank's shard of the gradient is
# all-reduced. `Link` treats ranks 0 and 1 as one node and ranks 2 and 3 as another. It delays every message between the
# two nodes, as a wire of 200 Mbit/s with 1 ms of latency would.

# %%
from labs.group import all_gather, reduce_scatter

LAYER = 250_000  # elements of float32
SLOW = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)


# %%
def one_layer(shape, names, steps=5):
    """Make the collectives of one layer in each step, on a mesh with the axes "shard" and
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
# Wherever this notebook says "measured", the bytes are computed from the sizes of the `dist` calls, as in notebook 02.
# `recording.across(rank, step)` returns the number of a rank's bytes that go to the other node. Compare the two orders:
# when `shard` comes first instead of last, by what factor does the number of bytes that leave a node grow?

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
    """Return the seconds of the fastest step, from the first rank's start to the last rank's
    end."""
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
# Where do these bytes come from? An all-gather is a ring. In ZeRO 3 it is a ring of all four ranks, and each rank sends
# 3/4 of the layer to the next rank. On node 0 only rank 1 has its next rank on the other node, so the two all-gathers
# send 2 × 750,000 bytes across. The reduce-scatter is not a ring: on CPUs it is an all-to-all, for reasons that
# [labs/group.py](../labs/group.py) explains. In it, ranks 0 and 1 each send a quarter of the layer to both ranks of the
# other node, which makes 4 × 250,000 bytes. In HSDP with `shard` last, only the all-reduce crosses between the nodes:
# each of the two ranks sends half of the layer. In HSDP with `shard` first, the all-reduce stays inside a node, and the
# other three collectives cross: in each of them, each rank sends half of the layer.
#
# With `shard` last, HSDP sends much less over the slow wire than ZeRO 3. With `shard` first, it sends *more* than ZeRO
# 3, although each rank sends the same number of bytes in either order. The time of the fastest of five steps grows with
# the bytes that cross. It is not proportional to them, since a step also takes time for latency, for copies, and for
# messages inside a node. So the rule is: *the axis that sends most goes last.* On a cluster the last axis is inside a
# node: it may hold HSDP's shards, or tensor parallelism, which you will meet below. The first axis is across nodes, and
# holds replicas.
#
# ## Build: a tensor that knows its layout
#
# In notebook 04 every strategy had its own code to cut and gather tensors. All of this code answered one question:
# *which rank holds which part of a tensor?* A tensor can store the answer itself. On each axis of the mesh it has one
# of three **placements**:
#
# * `Shard(dim)`: each rank along the axis holds a piece of the tensor, cut along this dim;
# * `Replicate()`: each rank holds the whole tensor;
# * `Partial()`: each rank holds a tensor of the full *shape*, but its values are only one summand. The tensor is the
#   sum of the summands of all ranks. PyTorch prints `Partial(sum)`, since it has other reductions, too.
#
# A tensor with a mesh and placements is a **DTensor**, a distributed tensor. It has the shape of the whole tensor, and
# on each rank it holds a **block**, which `to_local()` returns. `distribute_tensor` makes a DTensor from a whole
# tensor.


# %%
def layout(shape, mesh_shape, placements):
    """Return the layout of a DTensor, and this rank's block."""
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
# The dashed outline is the whole tensor, and the filled part is the block that the rank holds. In these pictures,
# blocks with the same tint are equal.
#
# Now cut the tensor along the other dim, on the same four ranks. Six is not divisible by 4. How many columns does rank
# 3 hold?

# %%
guess_columns = 0  # your number

layouts = run(layout, (4, 6), (4,), [Shard(1)], ranks=4, device="cpu")
spec, block = layouts[3]
check.predict("Columns of rank 3:", guess_columns, block.shape[1], tolerance=0)

# %%
draw.blocks(spec, ("a",))

# %% [markdown]
# A dim is cut into pieces of length ⌈size/N⌉ for N ranks. The last piece may be shorter, and ranks for which nothing is
# left get an **empty** block. A rank with an empty block takes part in every collective, like any other rank.
#
# On a mesh of two axes a tensor has a placement for each axis. The next two cells draw a tensor that is cut along both
# axes, and a tensor that is copied along `a` and cut along `b`:

# %%
layouts = run(layout, (4, 6), (2, 2), [Shard(0), Shard(1)], ranks=4, device="cpu")
draw.blocks(layouts[0][0], ("a", "b"))

# %%
layouts = run(layout, (4, 6), (2, 2), [Replicate(), Shard(0)], ranks=4, device="cpu")
draw.blocks(layouts[0][0], ("a", "b"))

# %% [markdown]
# HSDP keeps each parameter in the second layout, with `replicate` for `a` and `shard` for `b`. When both axes cut the
# *same* dim, the second axis cuts the pieces of the first.
#
# `Partial()` differs most from the other two placements. You have met it often: before the all-reduce of DDP, each rank
# has a gradient of the right shape, but the gradient of the batch is the sum of all of them. In the next cell every
# rank contributes rank + 1, and the tensor is 1 + 2 + 3 + 4:


# %%
def summands():
    """Return this rank's summand, and the whole tensor."""
    mesh = Mesh((4,), ("a",))
    x = DTensor.from_local(torch.tensor([dist.get_rank() + 1.0]), mesh, [Partial()])
    return x.to_local().item(), x.full_tensor().item()


run(summands, ranks=4, device="cpu")

# %% [markdown]
# ## Build: from one placement to another
#
# `x.redistribute(placements=...)` gives the same tensor with another layout. To go from one placement to another takes
# at most one collective. Cover the right half of the table that the next cell prints, and say which collective each row
# needs. N is the number of ranks along the axis, and n is the size of the tensor in bytes. The last row occurs only
# inside operations; `redistribute` refuses Partial as a target. The cells after the table test it on four ranks, and
# compare the predicted bytes with the recorded bytes.

# %%
print(MOVES)

# %%
SHARE = {"Shard(0) → Replicate()": 3 / 4, "Partial() → Replicate()": 2 * 3 / 4}
SHARE |= {"Partial() → Shard(0)": 3 / 4, "Shard(0) → Shard(1)": 3 / 16}
SHARE |= {"Replicate() → Shard(1)": 0}  # what a rank sends, as a fraction of the tensor


def move_each(tensor, mesh, moves):
    """Redistribute 16 × 24 elements, once per step; `tensor` is labs.dtensor or
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
# Two rows send fewer bytes than you might expect. `Replicate()` → `Shard(j)` sends nothing: each rank cuts its piece
# out of the tensor that it already holds. And in `Shard(i)` → `Shard(j)` a rank sends only (N − 1)/N² · n bytes, since
# it holds only n/N bytes and keeps 1/N of them.
#
# ### Exercise 2: from Partial to Shard (10 minutes)
#
# ZeRO depends on the step from `Partial()` to `Shard(j)`, a reduce-scatter. Write this step. `reduce_scatter(vector,
# group)`, imported above from [labs/group.py](../labs/group.py), takes a 1-D tensor whose size is divisible by N, and
# returns this rank's piece of the sum, 1/N of it. But a piece along dim 1 is not contiguous in memory, and the size of
# a dim may not be divisible by N. So pad the dim with zeros to N equal pieces, copy the pieces one after another into a
# 1-D tensor, reduce-scatter this tensor, and cut the padding off your piece.
#
# The check tries several dtypes, any strides, a group of only some of the ranks, and empty pieces. The piece has the
# dtype of the summand. Budget: send (N − 1)/N of the padded tensor. Besides the summand, hold at most 4.5 times its
# size during the call, and after the call nothing but the piece, perhaps with its padding. The piece belongs to the
# caller, so no later call may write into it. Do not change the summand.


# %%
def partial_to_shard(summand, dim, group=None):
    """Return this rank's piece, along `dim`, of the sum of all ranks' summands.

    summand: this rank's tensor, of the same shape on all ranks
    dim: the dim to cut, counted from 0
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
# On a mesh of several axes, a redistribution takes one step for each axis, one after another. Which order of the steps
# is best? Take a tensor on 2 × 2 ranks whose placements are `(Partial(), Replicate())` and should become `(Replicate(),
# Shard(0))`. Along the first axis the tensor must be all-reduced. Along the second axis each rank only cuts out its
# half. A plan needs no data, only a `Spec`, which describes a layout: the shape of the whole tensor, the sizes of the
# mesh, and a placement for each axis. The next cell prints the course's plan, which is also PyTorch 2.13's default
# plan:

# %%
start, goal = Spec((16, 12), (2, 2), (Partial(), Replicate())), (Replicate(), Shard(0))
plan(start, goal)

# %% [markdown]
# This plan all-reduces the whole tensor, and then throws half of the result away. In the other order, the ranks would
# send only half as many bytes, with the same result. To send less, make the block *smaller* as early as possible, and
# *larger* as late as possible. In the challenge at the end of this notebook you beat a plan like this one.
#
# Now try your own layouts. Choose a tensor, a mesh, and the placements before and after. The picture shows which block
# each rank holds, and how many bytes a rank sends. Find a redistribution that sends nothing. Then find one in which a
# rank sends more bytes than the tensor has: 8 × 6 elements of 4 bytes are 192 bytes. On a mesh of one axis, the
# controls of `b` have no effect.

# %%
play.placements()

# %% [markdown]
# ## Build: the algebra
#
# Now compute with these tensors. In `y = x @ w` each rank holds only blocks of x and w. What can a rank compute from
# its blocks, and what is the layout of y? Give each dim a letter, and give the same letter to dims that belong
# together: a matrix product is `ik,kj->ij`. From the letters follow all ways to compute the product. A product is also
# *linear in each* input: if one input is `Partial()`, so that each rank holds a summand, and the other input is whole,
# then the product is `Partial()`, too. The argument `linear="each"` states this. The next cell prints all ways along
# one axis of the mesh, as inputs → output:

# %%
cases = ["all whole", "i is cut", "k is cut", "j is cut", "x is a summand", "w is a summand"]
for case, way in zip(cases, ways("ik,kj->ij", linear="each"), strict=True):
    print(f"{case + ':':16} {way}")

# %% [markdown]
# The letter `i` stands for the rows of x, which are the batch. If `i` is cut, each rank computes some rows of y. If
# `j`, the columns of w, is cut, each rank computes some columns of y. If `k` is cut in both inputs, each rank
# multiplies its blocks, and the result is a *summand* of y. **So Partial arises** when a letter is cut that does not
# appear in the output. And a summand times a whole matrix is a summand of the product.
#
# An operation on a DTensor chooses the way that needs the cheapest redistribution of its inputs. It redistributes the
# inputs, and computes with the blocks. The short table [labs/dtensor/rules.py](../labs/dtensor/rules.py) lists the
# letters of all operations. Now try two layers, with the first weight cut by columns and the second cut by rows:


# %%
def two_layers(tensor, mesh, x_BD, up_DF, down_FD):
    """Compute relu(x @ up) @ down, with F cut over the ranks; `tensor` is labs.dtensor or
    torch.distributed.tensor.

    B: batch, D: width, F: hidden width. Returns the placements of the hidden layer and of the
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
# The ranks compute both products without sending a byte; then one all-reduce makes the result whole. This is **tensor
# parallelism**, which has [a notebook of its own](09_tensor_parallel.ipynb). If the first weight were cut by rows
# instead, `x @ up` would be `Partial()`, and it would have to be reduced before `relu`, since the relu of a sum is not
# the sum of relus.
#
# ### Exercise 3: rows that are missing (10 minutes)
#
# The table of rules has no row for five operations of PyTorch, so a DTensor refuses these operations:
#
# | | | takes | returns |
# |---|---|---|---|
# | `cumsum` | `x.cumsum(1)`: for each place, the sum of the row up to it | a matrix | a matrix |
# | `logsumexp` | `x.logsumexp(1)`, log of the sum of exp of a row | a matrix | a vector |
# | `trace` | `x.trace()`, the sum of the diagonal | a matrix | a number |
# | `linalg_cross` | `torch.linalg.cross(x, y, dim=1)`, row by row | two of [rows, 3] | one of [rows, 3] |
# | `convolution` | `F.conv1d(x, w)` | [batch, channel, place], [new, channel, tap] | [batch, new, place] |
#
# Write their rows. A row has letters and one word. A dot in place of a letter marks a dim that must stay whole. The
# word says in which inputs the operation is linear. It is `"each"` if the operation is linear in each input while the
# others are fixed, `"together"` if it is linear only in all inputs together, `"first"` if only in the first input, and
# `""` if in none. With one input, the first three mean the same. A row that allows too much gives wrong results
# without an error, and a row that allows too little sends bytes that nobody needs. The check computes with your rows,
# on three ranks, with every layout that the inputs can have.
#
# <details><summary>How to begin</summary>Take two ranks and small numbers. Cut one dim, and apply the operation to each
# block. Is the result on each rank a piece of the whole result, a summand of it, or neither?</details>
#
# <details><summary>A hint on letters</summary>On which elements of the inputs does one element of the result depend? If
# it depends on several elements along a dim, this dim may have to stay whole. And does <code>trace</code> of a block
# with rows 2 and 3 find these rows' part of the diagonal?</details>
#
# <details><summary>A hint on linear</summary>An operation f is linear if f(a + b) = f(a) + f(b). A logarithm is not
# linear. A product is linear in one factor while the other factor is fixed; but what is (a + b)(c + d)?</details>


# %%
def rules():
    """Return {"cumsum": (letters, linear), ...}, the rows for the five operations.

    Every way that a row allows must give the numbers of whole tensors, and a row must allow all
    such ways.
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
# ### Which tensors are redistributed in *your* model?
#
# `redistributed` runs forward and backward of any module, on tensors with the layouts that you choose. Its table has a
# row for each operation whose inputs had to be redistributed first, with the rule that the operation used. The column
# `in` says whether the operation belongs to forward or to backward. In the next cell the first weight is cut along its
# inputs, and x is cut along the batch. Try to cut another dim, or use a module of your own:

# %%
from labs.kit.record import redistributed

module = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.GELU(), torch.nn.Linear(20, 8))
layouts = {"0.weight": [Shard(1)], "x": [Shard(0)]}  # all else is whole
draw.table(run(redistributed, module, layouts, torch.ones(16, 8), ranks=4, device="cpu")[0])

# %% [markdown]
# ### Gradients have a layout, too
#
# Backward consists of operations, too, so the same algebra gives the layout of gradients. Let the batch be cut, so that
# x is `Shard(0)`, and let the weight w be whole. The gradient of w is xᵀ @ (gradient of y), and its letters do not
# include the letter of the batch:


# %%
def batch_cut():
    """Return the layout of a whole weight's gradient when the batch is cut."""
    mesh = Mesh((4,), ("a",))
    x = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
    w = distribute_tensor(torch.nn.Parameter(torch.ones(3, 5)), mesh, [Replicate()])
    (x @ w).sum().backward()
    return w.grad.placements


run(batch_cut, ranks=4, device="cpu")[0]

# %% [markdown]
# No line of this cell averages gradients, and yet this is DDP: *the gradient of a replicated weight is Partial, and the
# step from Partial to Replicate is an all-reduce.* The step from Partial to `Shard(0)` is ZeRO's reduce-scatter.
#
# ## Build: strategies as three placements
#
# One table can describe all strategies of notebook 04. A strategy chooses placements for P, the parameters between two
# steps, for G, the gradients when backward is over, and for S, the optimizer state. All messages follow from these
# placements. P is redistributed to `Replicate()` for forward and for backward. The gradient begins as `Partial()`, and
# is redistributed to the placement of G, and then to that of S for the update. The updated parameters are redistributed
# to the placement of P.
#
# ### Exercise 4: write the table (15 minutes)
#
# Return a dict with the keys "DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3" and "HSDP". A value is three lists, for P, G and S,
# with a placement for each axis of the mesh. HSDP has the axes `("replicate", "shard")`, and the other strategies have
# one axis. For a matrix, any `Shard(dim)` is right. The check runs your table on six ranks, and HSDP on a mesh of 2
# × 3. It compares the bytes held of each kind, the bytes sent in a step, the values in `.grad`, and the new weights
# with those of the strategy itself. In ZeRO 1, does a rank's `.grad` hold the mean when backward is over, or only the
# rank's own contribution?


# %%
def placements():
    """Return {strategy: (P, G, S)}, each a list with a placement for each axis of the mesh."""
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
# Your table tells how much memory a strategy needs: a kind that is `Shard` along an axis is divided by the number of
# ranks along that axis. It also tells how many bytes are sent: P is gathered twice if it is sharded, the gradient is
# redistributed to the placements of G and S, and the updated parameters to that of P. The next cell computes both for
# six ranks, three on each node, in float32 with AdamW. It lists bytes that are sent in groups on one node apart from
# bytes that are sent in groups on both nodes. In a group on both nodes only some of the bytes cross: in a ring of all
# six ranks, one rank of each node has its next rank on the other node.

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
# HSDP holds more than ZeRO 3, but sends most of its bytes inside a node, where the link is fast. The next notebook
# builds stage 3 again with these tools: there `fully_shard` makes the parameters DTensors.
#
# ## Measure and native
#
# PyTorch has the same tools under the same names: `init_device_mesh` makes a mesh, and `torch.distributed.tensor` has
# `DTensor`, `distribute_tensor` and the placements. So the functions of the cells above run with PyTorch's tensors,
# unchanged. Do PyTorch's tensors send the same bytes? The next cell compares the redistributions, all but one. On CPUs
# PyTorch goes from `Shard(0)` to `Shard(1)` with an all-gather, prints a warning, and sends N times as much, since
# PyTorch 2.13 still assumes that gloo has no all-to-all. The cell after it compares the two layers, including
# placements and numbers.

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
# [tests/dtensor/test_dtensor.py](../tests/dtensor/test_dtensor.py) compares our DTensor with PyTorch's in many more
# cases, forward and backward. Where PyTorch's behaves differently, the row of the test says so.
#
# ### A published bug
#
# > **What went wrong in the wild.** *Symptom*: under FSDP2, gradient clipping runs without an error, but its *factor*
# > is slightly wrong. *Cause*: the line was `clip_coef = max_norm / (total_norm + 1e-6)`. `total_norm` was still not
# > reduced: each rank held one local norm, much like a summand of Partial. Each rank added 1e-6 to its own norm,
# > although 1e-6 should be added only once ([pytorch#149768](https://github.com/pytorch/pytorch/issues/149768), March
# > 2025).
#
# The issue is closed: in PyTorch 2.13, `Partial + number` reduces first. The next cell makes the same mistake by hand,
# with a larger number:


# %%
def plus_one():
    """Add 1 to a tensor of four summands: by hand, and with our +."""
    mesh = Mesh((4,), ("a",))
    x = DTensor.from_local(torch.ones(1), mesh, [Partial()])  # four summands of 1: it is 4
    by_hand = DTensor.from_local(x.to_local() + 1, mesh, [Partial()])
    return by_hand.full_tensor().item(), (x + 1).full_tensor().item(), (x + 1).placements


run(plus_one, ranks=4, device="cpu")[0]

# %% [markdown]
# By hand we get 8, although 4 + 1 = 5 is right. The `+` of our DTensor finds no way to add the number to summands: a
# sum is linear only in all of its inputs *together*, and the number is not a summand. So `+` all-reduces first. A
# single wrong entry in the table of rules would make results *silently wrong*. So the table is short, and the tests
# compare every way of every rule with whole tensors
# ([tests/dtensor/test_algebra.py](../tests/dtensor/test_algebra.py)).
#
# ### Outside Jupyter
#
# You can use DTensors without a notebook. The next cells write `two_layers` into a script that uses only PyTorch, and
# start the script with `torchrun`, as on a cluster:

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
# **Why**: a strategy is described by one layout per tensor, instead of by code. The same model file runs under DDP,
# FSDP, tensor parallelism and any combination of them. A checkpoint knows the layout of its tensors, and can be loaded
# on another mesh.
#
# **GSPMD** (Xu et al., 2021) uses layouts for a whole program. JAX used GSPMD for years; its successor in JAX is
# [Shardy](https://docs.jax.dev/en/latest/shardy_jax_migration.html). You give the layout of a *few* tensors. The
# compiler finds placements for all the other tensors, with the same algebra of letters, and inserts the collectives.
# The compiler sees the whole program, whereas DTensor decides one operation at a time. The price is that you have to
# read a compiled program to find out what is sent; with DTensor you can step through your program with a debugger.
#
# **Why not**: each operation on a DTensor must first look up its rule, ours in Python and recent PyTorch's in a C++
# cache, and with a small model this takes a noticeable share of the time. FSDP2 keeps parameters as DTensors between
# uses, but forward and backward compute with plain tensors. The optimizer still computes with DTensors: in
# [pytorch#134191](https://github.com/pytorch/pytorch/issues/134191), still open, AdamW is limited by the CPU under
# FSDP2, and one of FSDP2's authors names DTensor's "own dispatch overhead" as one of two causes. A DTensor refuses an
# operation that has no rule and cannot be broken down into operations with rules. A placement that you did not intend
# gives no error, but one more collective in every step, so look at the bytes that are sent. And PyTorch's documentation
# still calls `torch.distributed.tensor` "in alpha state".

# %% [markdown]
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>A mesh of 2 × 4 × 2 ranks has the axes a, b and c. Which ranks are in rank 5's group along b, and
# which axis should be inside a node?</summary>
#
# Rank 5 is at (0, 2, 1). One step along b adds 2 to the rank, so the group is ranks 1, 3, 5 and 7. Groups along the
# last axis, c, consist of neighbouring ranks. So c should be the axis that sends most, and it should be inside a node.
# </details>
#
# <details><summary>How does <code>Partial()</code> arise, and which collectives turn it into another
# placement?</summary>
#
# It arises when an operation sums over a cut dim, whose letter does not appear in the output. An all-reduce turns
# Partial() into Replicate(), and a reduce-scatter turns it into Shard(). The reduce-scatter sends half as much.
# </details>
#
# <details><summary>Which three placements describe ZeRO 2? And which three describe HSDP, on two axes?</summary>
#
# In ZeRO 2, P is Replicate(), and G and S are Shard(0). In HSDP all three are (Replicate(), Shard(0)): each node holds
# P, G and S once, sharded over its ranks.
# </details>
#
# The table shows the bytes that each rank sends, for a tensor of n bytes on N ranks along one axis:
#
# | from → to | collective | predicted | ours | PyTorch's |
# |---|---|---|---|---|
# | Shard(i) → Replicate() | all_gather | (N − 1)/N n | exactly | exactly |
# | Partial() → Replicate() | all_reduce | 2 (N − 1)/N n | exactly | exactly |
# | Partial() → Shard(j) | reduce_scatter | (N − 1)/N n | exactly | exactly |
# | Shard(i) → Shard(j) | all_to_all | (N − 1)/N² n | exactly | on CPUs N times as much |
# | Replicate() → Shard(j) | none | 0 | 0 | 0 |

# %% [markdown]
# ## Beat it: the fewest bytes from layout to layout (30 minutes)
#
# In this challenge you save bytes. Twelve tensors on 2 × 2 × 2 ranks are redistributed from one layout to another.
# PyTorch's plan redistributes each of them directly. You may choose intermediate layouts: a path through other layouts
# can send fewer bytes than the direct one. The check runs all paths in a real job, and counts the bytes that all ranks
# send together.
#
# **The bound.** For each element, let m be the number of ranks that need the element and do not hold it at the start.
# If ranks hold only summands of the element, let k be the number of different summands and r the number of ranks that
# need the sum. Then the number of messages with this element is at least m, or, with summands, k − 1 + (r − 1). No path
# can beat this: each rank must receive an element that it lacks, a sum of k summands is complete on some rank only
# after k − 1 messages, and each of the other r − 1 ranks must then receive a message. The bound adds up these numbers
# over all elements, times the 8 bytes of a float64.
#
# The score of a tensor is 100 × bound / bytes, and your score is the mean over the twelve. The direct path scores 53.9.

# %%
ways, bound = beat.stops.cases, beat.stops.bound
draw.table([{"from": str(a), "to": str(b), "bytes at least": bound(a, b)} for a, b in ways])

# %% [markdown]
# `beat.stops.measured(fn, source, target)` runs the path of one tensor, and returns the bytes that all ranks send
# together. Add tries of your own to these two:


# %%
def direct(spec, target):
    return [target]


def by_copies(spec, target):
    return [(Replicate(),) * 3, target]


way = ways[4]
bars = {fn.__name__: beat.stops.measured(fn, *way) for fn in (direct, by_copies)}
what = "fifth row of the table: the bytes that all ranks send"
draw.chart({"the bound": bound(*way)} | bars, caption=what)


# %%
def stops(spec, target):
    """Return the layouts to go through, as a list of tuples with one placement for each axis.
    The last is target.

    spec: a Spec of shape (24, 16) on 2 × 2 × 2 ranks; spec.but(placements) is another layout of
        it

    Each step goes by plan(spec, placements). sent(spec, placements, coordinate) returns how
    many elements the rank at a coordinate sends in it, and raises RuntimeError if no step leads
    there, as from Shard to Partial. You have two minutes for all twelve together.
    """
    ### BEGIN SOLUTION
    now = spec.placements
    pairs = zip(now, target, strict=True)
    free = [then if p.is_replicate() and then.is_shard() else p for p, then in pairs]
    return [tuple(free), target]
    ### END SOLUTION


beat.stops(stops)

# %% [markdown]
# The course's answer first cuts the tensor along each axis where this sends nothing, and then goes directly to the
# target.
#
# <details><summary>What is the best possible score?</summary>There are 64 layouts, and every step from one layout to
# another has its price in bytes. So a search for the shortest path through the layouts gives the best path for each of
# the twelve tensors. These paths score 82.1 points, and no other paths score more.</details>
#
# **Read on**: the following files are short; read them in this order. [labs/mesh/mesh.py](../labs/mesh/mesh.py),
# [labs/dtensor/placement.py](../labs/dtensor/placement.py),
# [labs/dtensor/redistribute.py](../labs/dtensor/redistribute.py),
# [labs/dtensor/algebra.py](../labs/dtensor/algebra.py), [labs/dtensor/rules.py](../labs/dtensor/rules.py),
# [labs/dtensor/dtensor.py](../labs/dtensor/dtensor.py). Xu et al., 2021, *GSPMD: General and Scalable Parallelization
# for ML Computation Graphs* (arXiv 2105.04663), section 3.
#
# **Next.** A layout says which rank holds which part, but not when the ranks send it: stage 3 still waits for each
# layer that it gathers. [06 FSDP](06_fsdp.ipynb) shards parameter by parameter, and gathers ahead.
#
# To get a clean copy of this notebook, run `git restore notebooks/05_mesh_and_dtensor.ipynb`, and then choose *File >
# Reload Notebook from Disk*.
