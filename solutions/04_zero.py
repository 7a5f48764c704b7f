# %% [markdown]
# # ZeRO: the spare copies removed
#
# *Four ranks hold the same parameters, the same gradients and the same optimizer state. One copy would be enough. Which
# of the other copies can be removed, and what must the ranks send instead?*
#
# You need: [DDP](03_ddp.ipynb), which makes these copies, and the reduce-scatter and the all-gather of
# [Collectives](02_collectives.ipynb).
# **Minutes**, by estimate: 50 without exercises, 90 with them, 35 more for optional parts, 35 more for the challenge.
# Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("04")

# %% [markdown]
# ## Question
#
# Notebook 03 ended with the memory that DDP needs. In mixed precision every rank holds 16 bytes per parameter: 2 for P,
# 2 for G, and 12 for S, which consists of float32 masters and the two moments of AdamW. More ranks do not lower this
# number: each of them holds all 16 bytes.
#
# **ZeRO**, the *zero redundancy optimizer* (Rajbhandari et al., 2020), removes the copies. The paper's example is a
# model of 7.5 billion parameters on 64 GPUs:

# %%
import inspect
import statistics
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs import cost, ddp
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import run
from labs.kit.record import mark

# %%
psi = 7.5e9  # parameters
each = psi * sum(cost.PIE["mixed"].values()) / 1e9
print(f"{each:.0f} GB on each rank, {64 * each:,.0f} GB on all, {63 * each:,.0f} of it copies")

# %% [markdown]
# No GPU of that time had 120 GB. So with DDP this model could not be trained on any number of GPUs.
#
# This notebook trains a small model on short sequences: each rank reads one sequence of 16 tokens at a time. So P, G
# and S take more memory than the activations, and the copies are easy to see.

# %%
from labs.kit.train import ADAMW, Training, backward, step, strategies, take_step
from labs.model import GPT, PRESETS

CONFIG = replace(PRESETS["small"], depth=4, context=16)
sizes = cost.parameter_sizes(CONFIG)
loader = Batches(corpus().tokens, 16, CONFIG.context)  # 16: 4 micro-batches on 4 ranks
batches = [loader[step] for step in range(10)]
print(f"{sum(sizes):,} parameters; in the nine tensors of one layer {sum(sizes[1:10]):,}")

# %% [markdown]
# A strategy turns the model into a `Training`, which has five fields. `backward` runs the micro-batches of a step
# through the model one by one and adds up their gradients. `optimizer` is the optimizer, and `trained` are the tensors
# whose gradients it uses. `finish` runs between backward and the optimizer's step. `full` returns the full parameters
# by name. With these fields, a step looks like that of notebook 03:

# %%
from labs.kit.train import compute_gradients

print(inspect.getsource(compute_gradients), inspect.getsource(take_step), sep="\n")


# %%
def float32():
    return GPT(CONFIG)


def train(apply, build=float32, steps=3, micro_batches=1, keep=False):
    """Return this rank's losses, and, if `keep` is set, the parameters after the last step."""
    training, losses = apply(build()), []
    first = dist.get_rank() * micro_batches
    for x, y in batches[:steps]:
        mark("step")
        mine = slice(first, first + micro_batches)  # a micro-batch is one sequence
        losses.append(step(training, x[mine].clone(), y[mine].clone(), micro_batches))
    mark("end")
    return losses, {name: p.detach() for name, p in training.full().items()} if keep else {}


job = partial(run, train, device="cpu")  # so that whoever reads this gets the same bytes

# %% [markdown]
# The course has a table of strategies, its own and PyTorch's, and DDP is one of them. The next cell draws the memory
# that rank 0 of four holds during one step with DDP:


# %%
def as_in_the_table(name, model):
    """Return the training of a model, set up as the row of this name says."""
    return strategies.set_up(strategies.ROWS[name], model)[0]


WAYS = {"DDP": partial(as_in_the_table, "ddp-naive")}
watched = {"DDP": job(WAYS["DDP"], ranks=4, record="memory").recording}
draw.memory(watched["DDP"], step=2, ranks=[0])

# %% [markdown]
# On the other three ranks the figure is the same, with the same numbers. All phases are drawn equally wide, however
# long they took. Grey is temporary memory, which an operation needs only while it runs; here it holds AdamW's square
# roots and quotients. This is the DDP that needs the least memory, with one all-reduce for each gradient: a bucket
# would be one more block in `sync`.
#
# ## Picture
#
# ZeRO lets each of four ranks keep only a quarter of a copy, its **shard**. It has three *stages*, and each stage
# shards one more kind. The picture shows float32, with 4 + 4 + 8 bytes per parameter, as in most jobs of this notebook.
#
# ![What each of four ranks holds, in float32. Under DDP all of P, G and S: 16 bytes per parameter. Stage 1: a quarter
# of S, 10 bytes. Stage 2: a quarter of G and S, 7 bytes. Stage 3: a quarter of each, 4
# bytes.](../images/zero_stages.svg)
#
# A rank has to fetch from the other ranks everything that it needs and no longer holds. The main question is *when* to
# fetch it, and when to free it again.

# %% [markdown]
# ## Predict
#
# The ZeRO paper's introduction gives stage 1 a "4x memory reduction" (Rajbhandari et al., 2020). Take mixed precision
# (2 + 2 + 12 bytes) on our four ranks. By what factor is the memory of a rank for P, G and S smaller in stage 1 than
# with DDP? You may type an expression.

# %%
guess_less = 16 / (2 + 2 + 12 / 4)  # your number

# %% [markdown]
# How much must a rank send in stage 3? With DDP each rank sends 2 (N − 1)/N times the size of the gradients in a step.
# In stage 3 no rank keeps a whole layer, so a rank has to fetch a layer each time that forward or backward needs it.
# With four ranks, how many times the model's size does a rank send in a step?

# %%
guess_times = 3 * 3 / 4  # your number

# %% [markdown]
# Both predictions will be measured below.
#
# ### Exercise 1: on paper (5 minutes)
#
# How much must one rank hold? Compute it before you run any job. You need to know one more fact. A model is cut layer
# by layer, and the shards of a layer are equally long on all ranks. So a layer whose length is not divisible by N gets
# zeros at its end, its **padding**: on four ranks, a layer of 10 elements is padded to 12, and each shard has 3
# elements. The padding belongs to P, G and S of the layer. P and G are padded even in the stages that hold them whole,
# because a layer is kept as *one vector*. DDP shards nothing, and pads nothing.


# %%
def held_per_rank(stage, layers, ranks, size):
    """Return (P, G, S), the bytes that one rank holds from backward to the step.

    stage: 1, 2 or 3; 0 is DDP
    layers: the number of parameters of each layer, such as [10, 8]
    ranks: the number of ranks, N
    size: bytes per parameter of P, G and S, such as (2, 2, 12)
    """
    ### BEGIN SOLUTION
    if stage == 0:
        ranks = 1  # one part: nothing is cut, nothing padded
    shard = sum(-(-n // ranks) for n in layers)  # rounded up, layer by layer
    whole = ranks * shard
    p, g, s = size
    P = p * (shard if stage >= 3 else whole)
    G = g * (shard if stage >= 2 else whole)
    S = s * (shard if stage >= 1 else whole)
    return P, G, S
    ### END SOLUTION


on_your_paper = check.held_per_rank(held_per_rank)
on_your_paper

# %% [markdown]
# ## Build: the plan
#
# The table at the head of [labs/zero/zero.py](../labs/zero/zero.py) holds the whole algorithm. Each column is a stage,
# and each line is an event of the training step. The line `at rest` lists the kinds that a rank holds between the
# events.

# %%
import labs.zero.zero

_, after = labs.zero.zero.__doc__.split("method of `Zero`:")
print(after.split("The first five")[0].strip("\n"))

# %% [markdown]
# Do not read the whole table now: we build it column by column. G exists from backward to the optimizer's step; the
# line `at rest` says how much of G a rank holds in between.
#
# ## Build: stage 1, the optimizer state
#
# We begin with the largest kind, S. AdamW treats each element by itself: the update of an element depends only on its
# own gradient and its own two moments. So if each of four ranks updates a quarter of the elements, together they
# compute the same as one rank that updates all:


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, **ADAMW)


def stepped(values, gradient):
    """Return a vector after three steps of AdamW."""
    p = nn.Parameter(values.clone())
    p.grad, optimizer = gradient, adamw([p])
    for _ in range(3):
        optimizer.step()
    return p.detach()


values, gradient = torch.randn(12), torch.randn(12)
quarters = [stepped(*pair) for pair in zip(values.chunk(4), gradient.chunk(4), strict=True)]
assert torch.equal(torch.cat(quarters), stepped(values, gradient))

# %% [markdown]
# How should we cut a layer into quarters? If we cut every tensor, we get many small pieces, and some are uneven.
# Instead, the parameters of a layer are copied side by side into one **flat vector**, followed by the padding. A shard
# of this vector may hold parts of several tensors. The next cell builds the vector of a layer of 8 + 2 elements, for
# four ranks:

# %%
from labs.zero.flat import Layout

layer = Layout({"weight": torch.Size([4, 2]), "bias": torch.Size([2])}, ranks=4)
assert layer.sizes == [8, 2, 2]  # the last two are padding
assert layer.flatten([torch.ones(4, 2), torch.ones(2)]).tolist() == [1] * 10 + [0] * 2

# %% [markdown]
# To update its shard, a rank needs only the *mean gradient of this shard*: a **reduce-scatter** computes it. Before the
# next forward, the rank needs the new parameters of all other shards: an **all-gather** fetches them. Notebook 02
# showed that a reduce-scatter and an all-gather together send as much as an all-reduce, and DDP makes an all-reduce
# anyway.

# %%
n = sum(sizes)
halves = cost.reduce_scatter(n, ranks=4), cost.all_gather(n, ranks=4)
assert halves[0] + halves[1] == cost.all_reduce(n, ranks=4)

# %% [markdown]
# So stage 1 should send as many bytes as DDP, but in the second half a rank sends *updated parameters* instead of
# gradients.
#
# ### Exercise 2: partition the optimizer (15 minutes)
#
# Use two functions. `reduce_scatter(vector, None)` returns this rank's part of the sum over all ranks, where `None`
# means all ranks. `all_gather(vector, part)` fills a vector with the parts of all ranks. Both need plain tensors, such
# as `full.data`. The caller of `step()` clears `full.grad` afterwards. Make the optimizer once. Budget: each rank holds
# 1/N of the optimizer state, and sends the bytes of one all-reduce.

# %%
from labs.group import all_gather, reduce_scatter


def partition_optimizer(full, make):
    """Return `step()`, which updates all of `full`, in place. All ranks call `step()` after
    backward.

    full: [n] nn.Parameter, the same on all ranks; N divides n. `full.grad` is computed from
        this rank's own data
    make: makes an optimizer for a list of nn.Parameters; each rank's optimizer may have only n
        / N elements
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    shard = nn.Parameter(full.detach().chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step
    ### END SOLUTION


check.partition_optimizer(partition_optimizer)

# %% [markdown]
# For a whole model, the course's class `Zero` takes the place of the optimizer. It keeps each layer as one flat vector.

# %%
from labs.zero import Zero


def sharded(stage, model, optimizer=adamw):
    """Return the training of a model under ZeRO."""
    zero, go_back = Zero(model, stage, optimizer), partial(backward, model)
    return Training(go_back, zero, zero.shards, zero.full_state_dict, zero.sync)


WAYS |= {f"stage {stage}": partial(sharded, stage) for stage in (1, 2, 3)}
watched["stage 1"] = job(WAYS["stage 1"], ranks=4, record="memory").recording
beside_ddp = partial(draw.memory, watched["DDP"], step=2, ranks=[0])
beside_ddp(watched["stage 1"], names=("DDP", "stage 1"))

# %% [markdown]
# The dashed outline on the right repeats the figure of DDP. S, in green, is a quarter of that of DDP. G, in amber, is
# as large as before: a rank computes the gradient of the whole model and keeps it until `sync`, which reduces it, layer
# by layer, to the rank's shards.
#
# ## Build: stage 2, the gradients
#
# A rank needs only a quarter of this gradient for its own update, so it need not keep the rest until the end of
# backward. Each layer's gradient is ready when backward leaves the layer, and can be sent at once to the ranks that own
# its shards. The post-accumulate hook of notebook 03 does this: autograd calls it as soon as the gradients of all uses
# of a parameter have been added up in `.grad`.
#
# ### Exercise 3: to its owner only (10 minutes)
#
# Budget: at any moment, hold the shards' gradients and one layer's gradient, and while it is being reduced at most two
# copies of it. Each rank sends each gradient once, which is (N − 1)/N of it. All ranks call the function for every
# layer, even if a rank's gradient is all zeros.


# %%
def gradient_ready(full, shard):
    """Add this rank's part of the mean gradient to `shard.grad`, and free `full.grad`.

    Autograd calls this each time `full.grad` is complete: for each layer, in each micro-batch.

    full: [n] nn.Parameter, a layer; `full.grad` is computed from this rank's own data
    shard: [n / N] nn.Parameter; `shard.grad` is None, or the sum of earlier micro-batches
    """
    ### BEGIN SOLUTION
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad + mean
    ### END SOLUTION


to_its_owner = check.gradient_ready(gradient_ready)
to_its_owner

# %% [markdown]
# In the timeline of the course's stage 2, look at the amber strip. For a moment it holds the gradient of one layer;
# then this gradient is reduced, and only the shard remains. The red-orange block is a buffer that receives the other
# ranks' parts of the layer's gradient.

# %%
watched["stage 2"] = job(WAYS["stage 2"], ranks=4, record="memory").recording
beside_ddp(watched["stage 2"], names=("DDP", "stage 2"))

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: without an error or a warning, a training that was right before an
# > upgrade diverges after the upgrade. With ZeRO stage 2 in bfloat16, an encoder that the model uses *twice* in a step
# > lost the gradient of one of its two uses on the way to the owners; release 0.18.2 was right, 0.18.3 to 0.19.3 were
# > not ([DeepSpeed#8224](https://github.com/deepspeedai/DeepSpeed/issues/8224), August 2026). A gradient that is
# > reduced too early lacks the later uses of its layer: so `labs/zero/zero.py` reduces a gradient only when all uses of
# > the layer have been added up.
#
# Stage 2 has a price. In stage 1 a rank adds up the gradients of its micro-batches in `.grad`, and reduces them once
# per step. In stage 2 no rank holds a whole gradient, so the gradients of *every micro-batch* must be reduced. We will
# count these bytes below.
#
# ## Build: stage 3, the parameters
#
# In stage 2 every rank still holds all parameters, P in blue, throughout the step. Yet a layer's parameters are used
# only twice, in the layer's forward and in its backward. In between, other layers compute.
#
# ![One layer on four ranks. At rest each rank has a quarter of P. An all-gather makes P whole for forward, and
# afterwards P is dropped; P is gathered again for backward. Each rank computes the whole gradient from its own data.
# The gradient is reduce-scattered, and each rank keeps a quarter of the mean, and a quarter of
# P.](../images/stage3_layer.svg)
#
# To **gather** is to fill the flat vector from the shards of all ranks; to **drop** is to free its memory. But the
# layer's own tensors are views of this vector. How can its memory be freed and allocated again while the views stay
# valid? In PyTorch the memory behind a tensor and all its views is one **storage**, and a storage can be resized:

# %%
full = torch.arange(4.0)
view = full[1:3]
full.untyped_storage().resize_(0)  # no bytes behind it; both still have their shapes
assert full.untyped_storage().nbytes() == 0 and view.shape == (2,)
full.untyped_storage().resize_(full.nbytes)
full.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
assert view.tolist() == [6, 7]

# %% [markdown]
# ### Exercise 4: gather and drop (10 minutes)
#
# `full` may be bfloat16 while the shards are float32: in this way FSDP, PyTorch's own stage 3, computes in low
# precision and keeps the masters as shards. The course's `Zero` leaves masters to the optimizer. If `full` is bfloat16,
# the ranks must send bfloat16, too. Write through `full.data`: autograd would notice a change of `full` or
# `full.detach()`, and backward would then refuse the activations that forward has kept. Budget: hold 1/N of P, and the
# whole layer that is in use; during `gather` you may hold a second copy of this layer. Send (N − 1)/N of the layer, in
# the dtype of `full`.


# %%
def gather(full, shard):
    """Fill `full` from the shards of all ranks, in its own dtype; allocate its memory in the
    same storage.

    full: [n] nn.Parameter, whose storage is empty
    shard: [n / N] nn.Parameter, perhaps of another dtype
    """
    ### BEGIN SOLUTION
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.data.to(full.dtype))
    ### END SOLUTION


def drop(full):
    """Free the memory of `full`, which is [n]."""
    ### BEGIN SOLUTION
    full.untyped_storage().resize_(0)
    ### END SOLUTION


gathered = check.gather_and_drop(gather, drop)
gathered

# %% [markdown]
# The next cell draws the timeline of stage 3. A gathered layer counts as communication, not as P: it is the thin
# red-orange band in forward. In backward the band has teeth, one for each layer.

# %%
watched["stage 3"] = job(WAYS["stage 3"], ranks=4, record="memory").recording
beside_ddp(watched["stage 3"], names=("DDP", "stage 3"))

# %% [markdown]
# Some texts say that full sharding assembles the whole model on every rank. It does not. In forward a rank assembles
# one layer at a time. In backward it holds three times as much: the layer, the layer's gradient, and the buffer that
# receives the other ranks' parts of this gradient. The whole gradient is drawn red-orange, with the buffers, since a
# rank holds it only for a moment:

# %%
steady = {name: recording.steady(rank=0) for name, recording in watched.items()}
teeth, a_layer = steady["stage 3"]["comm"], 4 * sum(sizes[1:10])
assert teeth == 3 * a_layer
row = {"communication, at most": teeth, "one layer": a_layer, "the model": 4 * sum(sizes)}
draw.table([row], caption="bytes")

# %% [markdown]
# ## Build: all three
#
# You have now built every operation in the table. It remains to decide *when* each of them happens. Go back to the
# table, and read its last column until you know it by heart. Then write it as code.
#
# ### Exercise 5 (optional): the events of stage 3 (15 minutes)
#
# In this exercise a model is a chain of layers, and each layer has six methods. The methods do real work: two or three
# ranks gather and reduce.
#
# | | |
# |---|---|
# | `gather()` | gathers its full parameters from all ranks' shards |
# | `forward(x)` | returns its output; needs the full parameters |
# | `backward(dy)` | takes its output's gradient, returns its input's, and computes its parameters' full gradient |
# | `reduce()` | reduce-scatters its gradient, and keeps a shard of the mean |
# | `drop()` | frees its full parameters |
# | `update()` | takes the optimizer's step on this rank's shard |
#
# Budget: at any time at most one full layer and one full gradient. So the last layer may stay gathered from its forward
# to its backward. Return nothing.


# %%
def stage_3(layers, x, loss):
    """Run one training step.

    layers: the layers in the order of forward; do not change the list
    x: this rank's input
    loss: loss(y) returns the gradient of the last layer's output
    """
    ### BEGIN SOLUTION
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    dy = loss(x)
    for layer in reversed(layers):
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
    for layer in layers:
        layer.update()
    ### END SOLUTION


check.stage_3(stage_3)

# %% [markdown]
# In a real model no loop calls these methods: *hooks* call them. A module has a hook before its forward and a hook
# after it. A tensor has a hook that autograd calls when the tensor's gradient is ready: for a layer's output this is
# when the layer's backward begins, and for its input and parameters when it ends. The picture shows the three stages in
# time:
#
# ![One step of three layers, by stage, one thing after the other. Stage 1: forward, backward, then reduce-scatter of
# all gradients; update a quarter, then all-gather of the parameters. Stage 2: a reduce-scatter after each layer's
# backward; the step as before. Stage 3: an all-gather before each layer's forward, and a drop after it; an all-gather
# before each backward, after it a reduce-scatter, then a drop; update a quarter.](../images/zero_step.svg)
#
# Now open [labs/zero/zero.py](../labs/zero/zero.py). The class has one method for each event, in the order of the
# table, and the stage decides at most one line in each method. The file [labs/zero/flat.py](../labs/zero/flat.py) turns
# a layer into a vector. In it, find out why a vector counts its `users`, and is not simply dropped after each forward.
# The reason is that something else may still need the vector: another layer, if weights are tied, or the same layer, if
# it recomputes its forward in backward.
#
# Do your functions of exercises 3 and 4 work in a whole training? In the next job they replace the course's:

# %%
from labs.zero.flat import Unit


def yours(model):
    """Set up stage 3 with those of your functions that passed their checks."""
    dropped = Unit.drop
    if gathered:
        Unit.gather = lambda unit: gather(unit.full, unit.shard)
        Unit.drop = lambda unit: (drop(unit.full), dropped(unit))
    if to_its_owner:
        Unit.reduce = lambda unit: gradient_ready(unit.full, unit.shard)
    return sharded(3, model)


mine, courses = job(yours, ranks=4), job(WAYS["stage 3"], ranks=4)
assert [losses for losses, _ in mine] == [losses for losses, _ in courses]
print("stage 3, with the exercises that passed in their places: the same losses, bit for bit")

# %% [markdown]
# ### Optional: how `Zero` reports mistakes
#
# A rank in stage 3 holds no full parameters that you could read, and a step of `Zero` frees its gradients. So two
# mistakes are easily made. The next cell makes them and prints the errors:


# %%
def said(mistake):
    """Return the text of an exception."""
    try:
        mistake()
    except RuntimeError as error:
        return str(error)


def two_mistakes():
    model = float32()
    zero = Zero(model, stage=3, optimizer=adamw)
    model(*batches[0]).backward()
    zero.step()
    return said(zero.step), said(lambda: model.head.weight.norm())


print("\n\n".join(run(two_mistakes, ranks=2, device="cpu")[0]))

# %% [markdown]
# To read the parameters, call `zero.full_state_dict()`: it returns full tensors on every rank, under the model's own
# names.
#
# ## Build: one norm for all shards
#
# Gradients are often *clipped*: if the whole gradient, read as one vector, is longer than some bound, it is scaled down
# to that bound. The length of this vector is the **global norm**. With DDP each rank can compute it alone. With shards,
# each rank knows only the norm of its own shards, which is smaller, and different on each rank. But the sums of squares
# can be added up over ranks. In the next cell, `groups` are the groups over which the parameters are sharded; `None`
# means all ranks.

# %%
from labs.clip import clip_gradients


def norms():
    """Return the norm of this rank's shards, and the global norm."""
    model = float32()
    zero = Zero(model, stage=2, optimizer=adamw)
    model(*batches[0]).backward()
    zero.sync()
    alone = torch.cat([shard.grad for shard in zero.shards]).double().norm()
    return alone.item(), clip_gradients(zero.shards, max_norm=1.0, groups=(None,)).item()


alone, together = zip(*run(norms, ranks=4, device="cpu"), strict=True)
assert len(set(alone)) == 4 and len(set(together)) == 1 and max(alone) < together[0]
assert abs(sum(norm**2 for norm in alone) ** 0.5 / together[0] - 1) < 1e-5

# %% [markdown]
# ### Exercise 6 (optional): clip (15 minutes)
#
# Between `zero.sync()` and `zero.step()` the shards hold the mean gradients. Budget: each rank contributes one number,
# however many shards it has. Add up in float32 or better, even if the gradients are bfloat16.


# %%
def clip(shards, max_norm):
    """Scale the gradients of all shards, in place, so that their global norm is at most
    `max_norm`. Return the norm before scaling, as a float or a tensor of one number.

    shards: this rank's shards, 1-D; any `.grad` may be None, even all of them
    """
    ### BEGIN SOLUTION
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    squares = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        squares += gradient.double().square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient *= min(1, max_norm / norm)
    return norm
    ### END SOLUTION


check.clip(clip)

# %% [markdown]
# ## Measure: numbers
#
# The next cells repeat the test of notebook 03 for each stage: they compare with one process that computes the ranks'
# parts of the batch one after the other. On two ranks we require the same bits, and on four ranks, in float64,
# agreement within 1e-12. Will four ranks even give the same bits?


# %%
def float64():
    return GPT(CONFIG).double()


def all_of(ways, build):
    """Return the parameters after three steps of each way, one way after the other."""
    return {name: train(apply, build, keep=True)[1] for name, apply in ways.items()}


def off(ranks, name, expected):
    """Return the largest difference, on any rank, between a parameter and its expected
    value."""
    pairs = [(trained[name][p], due) for trained in ranks for p, due in expected.items()]
    return max((found - due).abs().max().item() for found, due in pairs)


# %%
one_process = partial(job, partial(as_in_the_table, "one device"), keep=True, ranks=1)
builds = {2: float32, 4: float64}  # by ranks, which are as many micro-batches
expected = {m: one_process(build, micro_batches=m)[0][1] for m, build in builds.items()}


def verdicts_on(ways):
    """Test whether each way ends with one process's parameters."""
    trained = partial(run, all_of, ways, device="cpu", tell=", ".join(ways))
    two, four = trained(float32, ranks=2), trained(float64, ranks=4)
    return {
        name: {
            "2 ranks, float32: same bits": off(two, name, expected[2]) == 0,
            "4 ranks, float64: within 1e-12": off(four, name, expected[4]) < 1e-12,
            "4 ranks, float64: same bits": off(four, name, expected[4]) == 0,
        }
        for name in ways
    }


# %%
verdicts = verdicts_on({name: WAYS[name] for name in ("stage 1", "stage 2", "stage 3")})
assert all(all(each.values()) for each in verdicts.values())
draw.table([{"": name, **each} for name, each in verdicts.items()])

# %% [markdown]
# Every stage gives the same training, bit for bit even on four ranks: our reduce-scatter adds up in the order of the
# ranks, and so does the one process.
#
# ## Measure: bytes sent
#
# The column of predictions comes from the formula in [labs/cost/zero_stages.py](../labs/cost/zero_stages.py), which
# knows the shapes and the collectives of each stage and uses no measurement. The column of measurements comes from the
# recording of the third step.

# %%
STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3}
on_paper = cost.Job(CONFIG, batch=1, ranks=4)
predicted = {"DDP": cost.ddp(on_paper, "naive")}
predicted |= {name: cost.zero(on_paper, stage) for name, stage in STAGES.items()}
communicates = partial(job, ranks=4, record="communication")
talk = {name: communicates(apply, tell=name).recording for name, apply in WAYS.items()}
sent = {name: recording.sent(rank=0, step=2) for name, recording in talk.items()}

rows = {f"{name}: sent": (predicted[name].sent, sent[name]) for name in WAYS}
ledger = draw.ledger(rows, within=0)
agreed = 3 * 8  # once a step, a rank tells three others, in 8 bytes, the order of its layers
assert ledger.agrees and sent["DDP"] == sent["stage 1"] - agreed == sent["stage 2"] - agreed
ledger

# %%
times = (sent["stage 3"] - agreed) / (4 * n)
check.predict("Stage 3: how many times the model's size does it send?", guess_times, times)

# %% [markdown]
# Stages 1 and 2 send as many bytes as DDP, plus 24. With these 24 bytes the ranks check that they used the same layers
# in the same order: if one reduce-scatter added up two different layers of equal size, nothing would fail, and both
# gradients would be wrong. So stages 1 and 2 save memory at no cost in bytes. Stage 3 sends 2.25 times the model's
# size, half as much again as DDP with 1.5: stage 3 gathers P twice, and stages 1 and 2 gather it once.
#
# These numbers hold for one micro-batch per step. The next cell counts the bytes for four micro-batches:

# %%
four = {}
for name in STAGES:
    recording = communicates(WAYS[name], micro_batches=4, steps=2, tell=name).recording
    four[name] = recording.sent(rank=0, step=1)
with_four = replace(on_paper, accumulation=4)
assert four == {name: cost.zero(with_four, stage).sent for name, stage in STAGES.items()}
times = {name: (four[name] - agreed) / sent["DDP"] for name in four}
assert times == {"stage 1": 1, "stage 2": 2.5, "stage 3": 6}
rows = [{"": name, "sent, bytes": four[name], "× DDP": times[name]} for name in four]
draw.table(rows, caption="with four micro-batches")

# %% [markdown]
# DDP and stage 1 send only after the last micro-batch. Stage 2 makes four reduce-scatters and one all-gather, which
# send (4 + 1)/2 = 2.5 times as much as an all-reduce. Stage 3 makes its two all-gathers and its reduce-scatter four
# times, which send 4 × 3/2 = 6 times as much. Expect this cost if you accumulate many micro-batches.
#
# ## Measure: bytes held
#
# The next figure sums up the four timelines from above. Each kind is drawn at its own maximum, and the mark is the peak
# of all kinds together.

# %%
draw.bars(steady)


# %%
def beside(name, kind):
    """Return the predicted and the measured bytes."""
    return getattr(predicted[name].held, kind), steady[name][kind]


rows = {f"{name}: {kind}": beside(name, kind) for name in STAGES for kind in "PGS"}
ledger = draw.ledger(rows, within=0)
peaks = draw.ledger({f"{name}: peak": beside(name, "peak") for name in WAYS}, within=0.05)
assert ledger.agrees and peaks.agrees
ledger

# %%
peaks

# %% [markdown]
# P, G and S agree to the byte. Let Ψ be the number of parameters. Some values are a little larger than you may expect.
# In stage 1, G is a little more than 4Ψ bytes, since the first gradient shard exists before the last full gradient is
# freed. In stage 2, G is 4Ψ/N bytes plus the gradient of the layer that is being reduced; at that moment the
# embedding's shard does not exist yet. S includes 4 bytes for each vector, in which AdamW counts its steps. Apart from
# these counters, does your function of exercise 1 return the measured bytes?


# %%
def yours_and_measured():
    """Draw P and S of rank 0, in bytes, as the function of exercise 1 returns them and as
    measured."""
    layers, rows = [sum(layer.sizes) for layer in cost.gpt_layers(CONFIG)], {}
    for name, stage in STAGES.items():
        P, _, S = held_per_rank(stage, layers, 4, (4, 4, 8))
        rows[f"{name}: P"] = P, steady[name]["P"]
        rows[f"{name}: S, without counters"] = S, steady[name]["S"] - 4 * len(layers)
    return draw.ledger(rows, within=0)


yours_and_measured() if on_your_paper else on_your_paper

# %% [markdown]
# The next figure has sliders. Thick bars show the formula, and thin bars show the bytes that rank 0 of your job held:
# at first they agree. When you move a slider, the thick bars change, and the term of the formula that has changed is
# marked. Before each change, guess which bars will change: for 64 ranks, for sequences of 128 tokens, and for mixed
# precision.

# %%
play.memory(watched, CONFIG, precision="float32", ranks=4, batch=1, context=16)

# %%
assert len({steady[name]["A"] for name in ("DDP", *STAGES)}) == 1

# %% [markdown]
# The activations A are the same with DDP and in all three stages: **ZeRO does not shard activations**. Each rank reads
# its own part of the batch, and keeps the activations that its backward will need.
#
# ## Measure: mixed precision, and the famous 4 and 8
#
# `Masters` of [labs/memory/precision.py](../labs/memory/precision.py) keeps a float32 master of each bfloat16
# parameter, and updates the masters. `Masters` is an optimizer, so you can pass it to `Zero`, or use it with DDP.

# %%
from labs.memory.precision import Masters

masters = partial(Masters, optimizer=adamw)


def low(model):
    """Return the training of DDP in mixed precision."""
    module = ddp.Bucketed(model.bfloat16())
    optimizer = masters(model.parameters())
    return Training(partial(backward, module), optimizer, (), model.state_dict, module.sync)


def low_sharded(stage, model):
    """Return the training of ZeRO in mixed precision."""
    return sharded(stage, model.bfloat16(), masters)


# %%
def bytes_per_parameter(name, apply):
    """Return P, G and S of rank 0, and their sum; counters and padding are too small to
    show."""
    held = job(apply, ranks=4, record="memory", tell=name).recording.steady(rank=0)
    each = {kind: round(held[kind] / sum(sizes), 1) for kind in "PGS"}
    return each | {"together": sum(each.values())}


mixed = {"DDP": bytes_per_parameter("DDP", low)}
for name, stage in STAGES.items():
    mixed[name] = bytes_per_parameter(name, partial(low_sharded, stage))
draw.table([{"": name, **each} for name, each in mixed.items()], caption="bytes per parameter")

# %%
less = mixed["DDP"]["together"] / mixed["stage 1"]["together"]
check.predict("Stage 1 on four ranks: how many times less?", guess_less, round(less, 2))

# %% [markdown]
# The factor is not 4. The formula gives 16/7 = 2.29. The measured factor differs a little, since G is larger than its
# formula says, which is 2 bytes per parameter, or 2/4 from stage 2 on. `Masters` casts gradients to float32, one tensor
# or one shard at a time, and stage 2 also holds the gradient of the layer that is being reduced.
#
# The formula, `cost.bytes_held`, is short: it divides the kinds that a stage shards by N, and the other kinds not.


# %%
def bytes_in(stage, ranks, precision="mixed"):
    """Return the bytes per parameter of P, G and S together, on each rank; stage 0 is DDP."""
    return sum(cost.bytes_held(1, ranks, stage, precision).values())


assert bytes_in(1, ranks=4) == 2 + 2 + 12 / 4
table = []
for n in (2, 4, 8, 64, 1024):
    times = {name: bytes_in(0, n) / bytes_in(stage, n) for name, stage in STAGES.items()}
    table.append({"ranks": n, **{name: round(less, 2) for name, less in times.items()}})
draw.table(table, caption="how many times less than with DDP")

# %% [markdown]
# The paper's factors, 4 for stage 1 and 8 for stage 2, are the *limits* for very many ranks: 16/(2 + 2) and 16/2. On 8
# ranks the factors are 2.9 and 4.3. Only stage 3 has no limit: its factor is N on any number N of ranks.
#
# Some texts count 20 bytes per parameter. As in notebook 01, this count includes a float32 copy of all gradients;
# `Masters` makes such a copy for only one tensor at a time. So before you compare two figures, ask how each of them was
# counted. The table shows the counts on 64 ranks:

# %%
table, stages = [], {"DDP": 0} | STAGES
for name in cost.PIE:
    held = {each: round(bytes_in(stage, 64, name), 2) for each, stage in stages.items()}
    table.append({"": name, **held})
draw.table(table, caption="bytes per parameter, on each of 64 ranks")

# %% [markdown]
# ## Measure: time
#
# In stage 3 a layer cannot begin before its parameters have been gathered. To show this clearly, the next cells use six
# layers that only pretend to compute, as in notebook 03: forward *sleeps* 5 ms and backward 10 ms per layer, as if
# another device did the work. The parameters, 4 MB per layer, and all messages are real. The timeline shows, for each
# rank, its phases, the messages in flight, and whether the rank computes or, hatched, waits. `ag 3` is the third
# all-gather.


# %%
def six_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    for layer in layers:
        layer.register_forward_hook(lambda *_: time.sleep(0.005))
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.01))
    return nn.Sequential(*layers)


# %%
def pretend(stage):
    """Run two steps; the first one also connects."""
    model = six_layers()
    zero = Zero(model, stage, partial(torch.optim.SGD, lr=0.1))
    for _ in range(2):
        dist.barrier()
        mark("step")
        mark("forward")
        loss = model(torch.ones(1, 1024, requires_grad=True)).sum()
        mark("backward")
        loss.backward()
        mark("optimizer")
        zero.step()
    mark("end")


# %%
waits = run(pretend, 3, ranks=2, device="cpu", record="communication").recording
draw.timeline(waits, step=1)

# %% [markdown]
# In forward there are six all-gathers, and the ranks do nothing but wait for each of them. In backward there are an
# all-gather and a reduce-scatter for every layer. In one more small all-gather the ranks check the order of the layers.
# No collective overlaps with computation:

# %%
events = waits.select(rank=0, step=1)
_, span = waits.step_spans(rank=0)
waited, took = sum(event.waited for event in events), span.end - span.start
times = f"{1000 * waited:.0f} ms of {1000 * took:.0f} ms"
print(f"{len(events)} collectives; rank 0 waited {times}")

# %% [markdown]
# The ranks need not wait so much. While a layer computes, the all-gather of the next layer could already be in flight:
# this is called **prefetch**. The reduce-scatter of the previous layer could be in flight, too: this is **overlap**, as
# in notebook 03. Then a rank holds two layers at a time instead of one: it saves time at the price of memory. Notebook
# 06, on FSDP, does so; `labs/zero/zero.py` does not, to stay short.

# %% [markdown]
# ## Native
#
# PyTorch has the three stages under other names. Stage 1 is `ZeroRedundancyOptimizer`, used together with DDP. Stage 3
# is `fully_shard`, also called FSDP2, the second *fully sharded data parallel*. With `reshard_after_forward=False`,
# `fully_shard` does not drop a layer after its forward, and is similar to stage 2; the older FSDP called this
# `SHARD_GRAD_OP`. All of them are in [labs/native](../labs/native/__init__.py), and in the table of strategies. The
# next cell runs the same test of the numbers.

# %%
NATIVE = {
    "ZeroRedundancyOptimizer": "torch-zero-1",
    "fully_shard, no reshard": "torch-fsdp-no-reshard",
    "fully_shard": "torch-fsdp",
}
native = {name: partial(as_in_the_table, row) for name, row in NATIVE.items()}
WAYS, verdicts = WAYS | native, verdicts | verdicts_on(native)
draw.table([{"": name, **each} for name, each in verdicts.items()])

# %% [markdown]
# The next cell compares bytes. The bytes that PyTorch's strategies send, and those that they hold of P, G and S, are
# predicted from their layouts. Their buffers and their peak depend on PyTorch's version, so they are only measured.

# %%
for name, row in NATIVE.items():
    talk[name] = communicates(WAYS[name], tell=f"{name}, sent").recording
    watched[name] = job(WAYS[name], ranks=4, record="memory", tell=f"{name}, held").recording
    predicted[name] = strategies.ROWS[row].predict(on_paper)
    sent[name], steady[name] = talk[name].sent(rank=0, step=2), watched[name].steady(rank=0)
    assert sent[name] == predicted[name].sent
    both = [beside(name, kind) for kind in "PGS"]
    assert all(predict == measured for predict, measured in both)

kinds = ("P", "G", "S", "comm", "peak")
order = [name for pair in zip(STAGES, NATIVE, strict=True) for name in pair]
held = {name: {kind: steady[name][kind] for kind in kinds} for name in order}
table = {name: {"": name, "sent": sent[name], **held[name]} for name in order}
table["fully_shard, no reshard"] |= {"comm": "(version)", "peak": "(version)"}
draw.table(list(table.values()), caption="bytes, on rank 0 of four")

# %% [markdown]
# None of PyTorch's three strategies is exactly one of the stages.
#
# **`ZeroRedundancyOptimizer`** does not change DDP, which all-reduces all gradients and keeps them, although each
# rank's optimizer uses only a part. Then each rank *broadcasts* the parameters that it has updated. So a rank sends 1.5
# times the bytes of DDP, on average over the ranks. And it gives whole parameters to the ranks, so the shards are only
# roughly equal:

# %%
rows, mean = [], {}
for name in ("stage 1", "ZeroRedundancyOptimizer"):
    sends = [talk[name].sent(rank=rank, step=2) for rank in range(4)]
    holds = [watched[name].steady(rank)["S"] for rank in range(4)]
    for kind, counts in (("sent", sends), ("S", holds)):
        mean[name, kind] = statistics.mean(counts)
        by_rank = {f"rank {rank}": count for rank, count in enumerate(counts)}
        rows.append({"bytes": f"{name}, {kind}", **by_rank, "mean": mean[name, kind]})
times = mean["ZeroRedundancyOptimizer", "sent"] / mean["stage 1", "sent"]
print(f"sent: {times:.2f} × stage 1's")
draw.table(rows)

# %% [markdown]
# **`fully_shard`** sends *less* than stage 3. The embedding, the last norm and the head belong to the root, which is
# the model itself. The root is not dropped between forward and backward, since backward begins with it, so its
# parameters are gathered only once. In return `fully_shard` holds more: look at its `comm`. It holds the root and the
# root's gradient, and almost four times the size of a layer: the layer in use, its gradient, the next layer, which has
# been prefetched, and the gradient of the previous layer, which is still being reduced. Our stage 3 holds three times
# the size of a layer.
#
# **`fully_shard` without resharding** drops no layer after forward, and sends as many bytes as stage 2. But it is not
# stage 2: between steps P is sharded, and every step gathers P *in forward*, whereas stage 2 gathers P after the
# update. Its `comm` and its peak depend on the version, since PyTorch 2.15 frees one buffer earlier, so the table
# leaves them out.
#
# The next table counts collectives. Our `Zero` has seven vectors, which are the embedding, four layers, the norm and
# the head, and makes one more all-gather, in which the ranks check the order. `fully_shard` has five vectors, for four
# layers and the root. The model has 39 tensors.

# %%
calls = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
seen = {name: talk[name].counts(rank=0, step=2) for name in order}
rows = [{"": name, **{call: seen[name][call] for call in calls}} for name in order]
draw.table(rows, caption="collectives in a step")

# %% [markdown]
# ### Optional: the bytes that really travelled
#
# All these bytes are *logical bytes*, the fewest that a collective must send. Notebook 02 showed that gloo has no
# reduce-scatter: it runs an all-reduce, and throws most of the result away. So our reduce-scatter uses an all-to-all:
# each rank sends every other rank its part of the tensor, and adds up the parts that it receives. The next cells show
# how many bytes Linux counted on the connections in one step:

# %%
from labs.kit.sockets import delivered


def on_the_wire(ways):
    """Return the bytes that this rank really sent in the second step of each way, or None on
    systems that do not count them."""
    carried = {}
    for name, apply in ways.items():
        training = apply(float32())
        for x, y in batches[:2]:
            dist.barrier()
            before = delivered()
            step(training, x[:1], y[:1])
            dist.barrier()
            carried[name] = None if before is None else delivered() - before
    return carried


# %% tags=["nbval-ignore-output"]
carried = run(on_the_wire, WAYS, ranks=4, device="cpu", tell="all of them")[0]


def times_logical(name):
    """Return the bytes on the wire, as a multiple of the logical bytes."""
    nbytes = carried[name]
    return "not counted here" if nbytes is None else f"{nbytes / sent[name]:.2f} ×"


rows = []
for name in WAYS:
    both = {"logical, bytes": sent[name], "on the wire": times_logical(name)}
    rows.append({"rank 0, per step": name, **both})
draw.table(rows)

# %% [markdown]
# On gloo, `fully_shard` really sends more than its logical bytes, and ours hardly more. On GPUs NCCL has a real
# reduce-scatter, so there `fully_shard` should not send more than its logical bytes.
#
# The next cell measures the time of a step, first with ours and then with PyTorch's:


# %%
def milliseconds(apply):
    """Return the median time of five steps on rank 0."""
    recording = job(apply, steps=5, ranks=4, record="time").recording
    return 1000 * statistics.median(span.end - span.start for span in recording.step_spans(0))


for ours, theirs in (("stage 1", "ZeroRedundancyOptimizer"), ("stage 3", "fully_shard")):
    mine, torchs = milliseconds(WAYS[ours]), milliseconds(WAYS[theirs])
    print(f"{ours}: {mine:.1f} ms, or {mine / torchs:.2f} × {theirs}'s time")

# %% [markdown]
# These times say little about a cluster. Here the ranks share a few cores, messages go through memory, and the model is
# so small that the number of calls matters more than the number of bytes. Our stage 1 begins to reduce when backward is
# over; PyTorch's all-reduce begins earlier. And on GPUs `fully_shard` prefetches, so its all-gathers overlap with
# computation.
#
# ## Why, and why not
#
# **Why**: ZeRO saves memory. The next chart is figure 1 of the ZeRO paper, its best-known picture: 7.5 billion
# parameters on 64 GPUs. It is drawn from the formula that you have tested on four ranks:


# %%
def gigabytes(stage):
    """Return P, G and S of 7.5 billion parameters, on each of 64 ranks."""
    return {kind: size / 1e9 for kind, size in cost.bytes_held(psi, 64, stage).items()}


published = {name: gigabytes(stage) for name, stage in ({"DDP": 0} | STAGES).items()}
together = [float(f"{sum(kinds.values()):.3g}") for kinds in published.values()]
assert together == [120, 31.4, 16.6, 1.88]
draw.chart(published, "GB", caption="7.5 billion parameters, mixed precision, a rank of 64")

# %% [markdown]
# The next chart shows all kinds, activations too, for a model of 70 billion parameters; the grey strip is the memory of
# a device of 80 GB. Does stage 1 fit on any number of ranks? From how many ranks on does stage 3 fit? Then make the
# sequences longer, and look for the kind that no stage makes smaller. Later notebooks explain `recompute`
# ([Memory](07_memory.ipynb)) and `offload` ([Offload](07b_offload.ipynb)).

# %%
play.memory(model="llama3-70b", context=1024)

# %% [markdown]
# **What ZeRO costs**: stage 1 sends no more bytes than DDP, so it is almost always a good choice. For stage 3 with
# prefetch, ask as in notebook 03 when computation hides communication. Let a layer have ψ parameters of 2 bytes, let a
# device read T tokens and do R operations per second, and let the link carry W bytes per second. In forward, the layer
# takes 2ψT/R seconds, and the all-gather of the next layer takes 2ψ/W seconds. In backward, the layer takes 4ψT/R
# seconds, and an all-gather and a reduce-scatter take 4ψ/W seconds. In both cases ψ cancels, and the condition is the
# same as for DDP: **T > R/W**.

# %%
R = cost.FLOPS  # operations per second of an H100 (Llama 3, arXiv 2407.21783, table 4)
LINKS = {name: link.bandwidth for name, link in cost.LINKS.items()}  # bytes per s, each way
least = {name: round(R / W) for name, W in LINKS.items()}
draw.table([{"link": name, "tokens on a device, at least": T} for name, T in least.items()])

# %% [markdown]
# But T means different things. DDP and stage 1 communicate once per step, so the time that is not hidden is lost once
# per step. Stage 3 communicates in each micro-batch, so its T is the number of tokens in one micro-batch, which must
# fit into memory. So stage 3 needs large micro-batches, and on slow links DDP may still be faster.
#
# **Why not**: stage 2 is rarely the best choice, since with many micro-batches it sends more than stage 1, and it still
# holds all of P. Stage 3 sends a few messages for each layer, so with small layers latency dominates. And no stage
# makes activations smaller. To do that, a rank can compute activations twice, or the model itself can be split.

# %% [markdown]
# ## Say it back
#
# Write the table of events from memory: what happens at each event, in stages 1, 2 and 3? Leave out the optimizer's own
# update in `step`.


# %%
def stages_by_event():
    """Return {event: (stage 1, stage 2, stage 3)}. Each stage is "all_gather", "drop",
    "reduce_scatter", or "" for nothing."""
    ### BEGIN SOLUTION
    return {
        "before_forward": ("", "", "all_gather"),
        "after_forward": ("", "", "drop"),
        "before_backward": ("", "", "all_gather"),
        "after_backward": ("", "", "drop"),
        "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
        "sync": ("reduce_scatter", "", ""),
        "step": ("all_gather", "all_gather", ""),
    }
    ### END SOLUTION


check.stages_by_event(stages_by_event)

# %% [markdown]
# Answer each question aloud before you unfold its answer.
#
# <details><summary>For each stage: what does a rank hold at rest, and what do the ranks send, and when?</summary>
#
# In stage 1 a rank holds P, G and S/N. Once per step the gradients are reduce-scattered, and the updated parameters
# are all-gathered. In stage 2 a rank holds P, G/N and S/N. Each layer's gradient is reduce-scattered as soon as it is
# ready, in each micro-batch, and the parameters are all-gathered once per step. In stage 3 a rank holds P/N, G/N and
# S/N. Each layer is gathered twice, for its forward and for its backward, and dropped each time. Its gradient is
# reduce-scattered.
# </details>
#
# <details><summary>Somebody says: "In stage 3 the whole model is on every rank at some moment, so stage 3 does not
# lower the peak." What do you answer?</summary>
#
# The whole model is never on one rank. A rank holds one full layer at a time, or two with prefetch, and in backward
# also the layer's gradient and a receive buffer. Besides these it holds only its shards, which are 1/N of P, G and S.
# </details>
#
# <details><summary>A model of 70 billion parameters is trained in mixed precision on 512 ranks of 80 GB. Which stages
# fit, without activations?</summary>
#
# Only stage 3 fits. Stage 1 takes 4 + 12/512 bytes per parameter, which is 282 GB, and stage 2 takes 2 + 14/512 bytes,
# which is 142 GB. In both, the kinds that are not sharded alone take more than 80 GB, on any number of ranks. Stage 3
# takes 16/512 bytes per parameter, which is 2.2 GB, and in backward a layer, its gradient and a receive buffer.
# </details>
#
# <details><summary>A step has 16 micro-batches. How much does each stage send, compared with DDP and
# <code>no_sync</code>?</summary>
#
# Stage 1 sends as much as DDP. Stage 2 makes 16 reduce-scatters and one all-gather, and sends 8.5 times as much. Stage
# 3 makes two all-gathers and a reduce-scatter for each micro-batch, and sends 16 × 3/2 = 24 times as much.
# </details>
#
# The table is for Ψ parameters in float32 with AdamW, on N ranks. It shows the bytes of each rank and step; one
# all-reduce sends 2 (N − 1)/N × 4Ψ bytes:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | stage 1: sent | one all-reduce | 8 (N − 1) B more | `ZeroRedundancyOptimizer`: 1.5 all-reduces, on average |
# | stage 1: P, G, S | 4Ψ, 4Ψ and a little more, 8Ψ/N | as predicted | S by whole parameters |
# | stage 2: sent | one all-reduce, with one micro-batch | 8 (N − 1) B more | `fully_shard`, no reshard: as predicted |
# | stage 2: P, G, S | 4Ψ, 4Ψ/N and a layer, 8Ψ/N | as predicted | P 4Ψ/N at rest, full from forward to backward |
# | stage 3: sent | 1.5 all-reduces | 8 (N − 1) B more | `fully_shard`: less, as the root is gathered once |
# | stage 3: P, G, S | 4Ψ/N, 4Ψ/N, 8Ψ/N | as predicted | as predicted |
# | numbers | equal to one process's | same bits on 2 ranks and on 4 | same bits on 2 ranks |

# %% [markdown]
# ## Beat it: the largest model in 4 MB a rank (30 minutes)
#
# This challenge is open: train the largest model that fits on four ranks with 4 MB each. You choose the width and the
# depth of the model, and how its state is sharded; stages 1 to 3 are not the only ways. The check runs a real job with
# three batches of 32 rows and 32 features, 8 rows for each rank. The mean of the ranks' losses must equal the loss of
# one process with AdamW in float32. From the second batch until your function returns, no rank may ever hold more than
# 4 MB. This limit includes state, gradients, gathered layers, activations and buffers.
#
# **The bound.** Let Ψ be the number of parameters, N = 4 the number of ranks and M = 4 MB the memory of each rank.
#
# 12Ψ ≤ N · M, so Ψ ≤ 1,333,333
#
# No program can beat this bound: from one step to the next, AdamW must remember a parameter and its two means, which
# take 12 bytes in float32, and some rank has to hold them.
#
# The score is 100 × Ψ / 1,333,333. With copies, as in DDP, 206,496 parameters fit, which scores 15.5. Stage 3 holds 16
# bytes per parameter: which 4 of them are not among the 12?


# %%
def train_largest(make, batches, settings):
    """Train the largest model that four ranks hold in 4 MB each; return the loss of each batch.

    make: make(width, depth) returns the model; call it once. The model computes x =
        tanh(first(x)), then x = x + tanh(layer(x)) for each of `layers`, then last(x). All are
        nn.Linear, and those in between are width × width.
    batches: yields this rank's (x, y) of each step
    settings: the settings of AdamW

    The loss is the mean square of model(x) - y, as a float. The check ends a job after two
    minutes.
    """
    ### BEGIN SOLUTION
    model, losses = make(192, 22), []
    zero = Zero(model, stage=3, optimizer=partial(torch.optim.AdamW, **settings))
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses
    ### END SOLUTION


# %%
beat.large_model(train_largest)

# %% [markdown]
# <details><summary>Where can memory be saved?</summary>
#
# A shard could take its step as soon as its gradient is reduced, so that the gradient can be freed at once. Forward
# could keep fewer activations for each row and layer. And the shape of the model matters: a narrow layer needs less
# memory when it is gathered, and a wide layer has fewer activations per parameter.
# </details>
#
# **Read on**: [labs/zero/zero.py](../labs/zero/zero.py): you can now read most of this file. Rajbhandari, Rasley,
# Ruwase and He, 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (arXiv 1910.02054),
# sections 3, 5 and 7. Zhao et al., 2023, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (arXiv
# 2304.11277).
#
# **Next.** Stage 3 gathers over one group of all ranks, even if a slow link joins some of them, and each strategy so
# far has code of its own. [05 Mesh and DTensor](05_mesh_and_dtensor.ipynb) arranges ranks in a grid, and gives tensors
# a layout.
#
# To get a clean copy of this notebook, run `git restore notebooks/04_zero.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
