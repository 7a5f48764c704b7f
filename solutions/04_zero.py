# %% [markdown]
# # ZeRO: the spare copies removed
#
# *Four ranks hold the same parameters, the same gradients, the same optimizer state. One copy would do. Which of the
# others can go, and what must then travel?*
#
# You need: [DDP](03_ddp.ipynb), whose copies these are, and from [Collectives](02_collectives.ipynb) the reduce-scatter
# and the all-gather.
# **Minutes**, by estimate: 50 without exercises, 90 with them, 30 more for optional parts, 35 more for the challenge.
# The machine works for about a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("04")

# %% [markdown]
# ## Question
#
# Notebook 03 ended with a bill. In mixed precision every rank pays 16 bytes per parameter: 2 for P, 2 for G, and 12 for
# S (float32 masters and the two moments of AdamW). More ranks do not make that less; each of them pays it again.
#
# **ZeRO**, the *zero redundancy optimizer* (Rajbhandari et al., 2020), asks why. Its authors took a model of 7.5
# billion parameters and 64 GPUs:

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
# No GPU of that time had 120 GB. So with DDP no number of them could train this model.
#
# Here the model is small, and its sequences are short (16 tokens, one sequence on each rank at a time), so that P, G
# and S outweigh the activations: it is the copies that we want to see.

# %%
from labs.kit.train import ADAMW, Training, backward, step, strategies, take_step
from labs.model import GPT, PRESETS

CONFIG = replace(PRESETS["small"], depth=4, context=16)
sizes = cost.parameter_sizes(CONFIG)
loader = Batches(corpus().tokens, 16, CONFIG.context)  # 16: 4 micro-batches on 4 ranks
batches = [loader[step] for step in range(10)]
print(f"{sum(sizes):,} parameters; in the nine tensors of one layer {sum(sizes[1:10]):,}")

# %% [markdown]
# A strategy turns the model into a `Training`: `backward`, which takes the micro-batches of a step through the model
# one by one and adds up their gradients; an `optimizer`, and `trained`, the tensors whose gradients the optimizer uses;
# `finish`, for what is to be done between backward and step; and `full`, which returns the whole parameters by name.
# With it, a step is that of notebook 03:

# %%
print(inspect.getsource(take_step))


# %%
def float32():
    return GPT(CONFIG)


def train(apply, build=float32, steps=3, micro_batches=1, keep=False):
    """This rank's losses, and the parameters after the last step if they are to be kept."""
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
# The course has a table of strategies, ours and PyTorch's; DDP's rows are already in it. With DDP, this is what rank 0
# of four holds during one step:


# %%
def as_in_the_table(name, model):
    """The training of a model, set up as the row of this name says."""
    return strategies.set_up(strategies.ROWS[name], model)[0]


WAYS = {"DDP": partial(as_in_the_table, "ddp-naive")}
watched = {"DDP": job(WAYS["DDP"], ranks=4, record="memory").recording}
draw.memory(watched["DDP"], step=2, ranks=[0])

# %% [markdown]
# The other three ranks show the same picture, with the same numbers in it. All phases are drawn equally wide, however
# long they took. Grey is temporary: what an operation needs for itself while it runs, here AdamW's square roots and
# quotients. (This is DDP at its leanest, with an all-reduce for each gradient: a bucket would be one more block in
# `sync`.)
#
# ## Picture
#
# Let each rank keep a quarter: its **shard**. ZeRO does it in three *stages*; each stage shards one more kind. (In
# float32, 4 + 4 + 8 bytes, as in most jobs here.)
#
# ![What each of four ranks holds, in float32. Under DDP all of P, G and S: 16 bytes per parameter. Stage 1: a quarter
# of S, 10 bytes. Stage 2: a quarter of G and S, 7 bytes. Stage 3: a quarter of each, 4
# bytes.](../images/zero_stages.svg)
#
# Whatever a rank needs and no longer holds must come from the others. The whole art is *when* to fetch it, and when to
# let it go again.

# %% [markdown]
# ## Predict
#
# The ZeRO paper's introduction gives stage 1 a "4x memory reduction" (Rajbhandari et al., 2020). Take mixed precision
# (2 + 2 + 12 bytes) on our four ranks. How many times less of P, G and S does a rank hold in stage 1 than with DDP? (An
# expression will do.)

# %%
guess_less = 16 / (2 + 2 + 12 / 4)  # your number

# %% [markdown]
# And what does it cost? With DDP each rank sends 2 (N − 1)/N times the gradients in a step. In stage 3 no rank keeps a
# whole layer: it must be fetched each time that forward or backward needs it. How many times the model's size does a
# rank of four send in a step?

# %%
guess_times = 3 * 3 / 4  # your number

# %% [markdown]
# Both will be measured below.
#
# ### Exercise 1: on paper (5 minutes)
#
# Before any job: how much must one rank hold? You need to know one more thing. A model is cut layer by layer, and the
# shards of a layer are equally long on all ranks. So a layer whose length is not divisible by N gets zeros at its end,
# its **padding**: on four ranks, 10 elements become 12, and each rank holds 3. That goes for all of the layer's P, G
# and S, even where they are held whole (12 elements, in stages 1 and 2): a layer is kept as *one vector*, which is cut.
# DDP cuts nothing, and pads nothing.


# %%
def held_per_rank(stage, layers, ranks, size):
    """Bytes of P, G and S that one rank holds from backward to the step, as (P, G, S).

    stage: 1, 2 or 3; 0 is DDP.  layers: the parameters of each layer, such as [10, 8]; ranks: N
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
# All that follows is in this table, from the head of [labs/zero/zero.py](../labs/zero/zero.py). A stage is a column; an
# event of the training step is a line, and so is what a rank holds between the events (`at rest`).

# %%
import labs.zero.zero

_, after = labs.zero.zero.__doc__.split("method of `Zero`:")
print(after.split("The first five")[0].strip("\n"))

# %% [markdown]
# Do not read it all now: we build it column by column. (G is there from backward to the step; `at rest` says how much
# of it then stays.)
#
# ## Build: stage 1, the optimizer state
#
# We begin with the largest kind. AdamW treats each element by itself: its update depends on its own gradient and its
# own two moments, and on nothing else. So four ranks, each with a quarter of the elements, together do what one does
# with all:


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, **ADAMW)


def stepped(values, gradient):
    """What three steps of AdamW make of a vector."""
    p = nn.Parameter(values.clone())
    p.grad, optimizer = gradient, adamw([p])
    for _ in range(3):
        optimizer.step()
    return p.detach()


values, gradient = torch.randn(12), torch.randn(12)
quarters = [stepped(*pair) for pair in zip(values.chunk(4), gradient.chunk(4), strict=True)]
assert torch.equal(torch.cat(quarters), stepped(values, gradient))

# %% [markdown]
# A quarter of what? Cutting every tensor would make many small pieces, some uneven. Instead, the parameters of a layer
# are laid side by side in one **flat vector**, with the padding behind them. Shards cross the borders of tensors. Here
# is a layer of 8 + 2 elements, for four ranks:

# %%
from labs.zero.flat import Layout

layer = Layout({"weight": torch.Size([4, 2]), "bias": torch.Size([2])}, ranks=4)
assert layer.sizes == [8, 2, 2]  # the last two are padding
assert layer.flatten([torch.ones(4, 2), torch.ones(2)]).tolist() == [1] * 10 + [0] * 2

# %% [markdown]
# What does a rank need to update its shard? The *mean gradient of this shard*, and nothing of the rest: that is a
# **reduce-scatter**. And before the next forward it needs everybody else's new parameters: an **all-gather**. Now
# remember notebook 02: one after the other, these two are an all-reduce. DDP sends that anyway.

# %%
n = sum(sizes)
halves = cost.reduce_scatter(n, ranks=4), cost.all_gather(n, ranks=4)
assert halves[0] + halves[1] == cost.all_reduce(n, ranks=4)

# %% [markdown]
# So stage 1 should send what DDP sends, except that the second half is no longer gradients but *parameters*, already
# updated.
#
# ### Exercise 2: partition the optimizer (15 minutes)
#
# You are given `reduce_scatter(vector, None)`, which returns this rank's part of the sum over all ranks (`None` means
# all), and `all_gather(vector, part)`, which fills a vector with everybody's part. Both want plain tensors:
# `full.data`. Whoever calls `step()` clears `full.grad` afterwards; the optimizer is made once. Budget: an N-th of the
# state; and for each rank, the bytes of one all-reduce.

# %%
from labs.group import all_gather, reduce_scatter


def partition_optimizer(full, make):
    """Return `step()`: called on all ranks after backward, it updates all of `full` on each, in
    place.

    full: [n] nn.Parameter, the same on all ranks; N divides n. `full.grad` is this rank's own,
    of its own data
    make: makes an optimizer for a list of nn.Parameters; each rank's may have only n / N
    elements
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
# For a whole model, the course has a class that takes the optimizer's place. Each layer is one flat vector.

# %%
from labs.zero import Zero


def sharded(stage, model, optimizer=adamw):
    """A model under ZeRO."""
    zero, go_back = Zero(model, stage, optimizer), partial(backward, model)
    return Training(go_back, zero, zero.shards, zero.full_state_dict, zero.sync)


WAYS |= {f"stage {stage}": partial(sharded, stage) for stage in (1, 2, 3)}
watched["stage 1"] = job(WAYS["stage 1"], ranks=4, record="memory").recording
beside_ddp = partial(draw.memory, watched["DDP"], step=2, ranks=[0])
beside_ddp(watched["stage 1"], names=("DDP", "stage 1"))

# %% [markdown]
# The dashed outline on the right is DDP's. S (green) is a quarter of what it was. G (amber) is not: this rank makes the
# gradient of the whole model and keeps it until `sync`, where it melts, layer by layer, into this rank's shards of it.
#
# ## Build: stage 2, the gradients
#
# Three quarters of this gradient are for other ranks. Why keep them until the end of backward? Each layer's gradient is
# ready when backward leaves that layer, and can go to its owners at once. Notebook 03 has the hook for this, the
# post-accumulate hook: it is called as soon as all uses of a parameter have been added up in `.grad`.
#
# ### Exercise 3: to its owner only (10 minutes)
#
# Budget: at any moment the shards' gradients plus one layer's, with a copy or two of that on its way; each gradient
# travels once, (N − 1)/N of it. The function is called on every rank for every layer, even where that rank's gradient
# is all zeros.


# %%
def gradient_ready(full, shard):
    """Add this rank's part of the mean gradient to `shard.grad`, and let `full.grad` go.

    Called by autograd each time `full.grad` is complete: for each layer, in each micro-batch.

    full: [n] nn.Parameter, a layer; `full.grad` is this rank's own
    shard: [n / N] nn.Parameter; `shard.grad` is None, or what earlier micro-batches have added
    up to
    """
    ### BEGIN SOLUTION
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad + mean
    ### END SOLUTION


to_its_owner = check.gradient_ready(gradient_ready)
to_its_owner

# %% [markdown]
# In the timeline of the course's stage 2, look at the amber strip: it is a layer thick for a moment, then it is
# reduced, and only the shard stays. (Red-orange: a buffer, in which the other ranks' parts of the layer arrive.)

# %%
watched["stage 2"] = job(WAYS["stage 2"], ranks=4, record="memory").recording
beside_ddp(watched["stage 2"], names=("DDP", "stage 2"))

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: no error, no warning, and a training that was right before an upgrade
# > diverges after it. With ZeRO stage 2 in bfloat16, an encoder that the model uses *twice* in a step lost the gradient
# > of one of its two uses on the way to the owners; release 0.18.2 was right, 0.18.3 to 0.19.3 were not
# > ([DeepSpeed#8224](https://github.com/deepspeedai/DeepSpeed/issues/8224), August 2026). What has been reduced too
# > early is not reduced again: so `labs/zero/zero.py` waits until all uses of a layer have been added up.
#
# There is a price. A rank in stage 1 adds up its micro-batches in `.grad`, and reduces once per step. Here nobody has
# room for a whole gradient, so *every micro-batch* is reduced. We will count that below.
#
# ## Build: stage 3, the parameters
#
# What is left is P (blue), the whole of it, on every rank, from the first to the last moment of the step. Yet a layer
# is used only twice: in its forward, and in its backward. In between, other layers compute.
#
# ![One layer on four ranks. At rest each rank has a quarter of P. An all-gather makes it whole for forward, then it is
# dropped; it is gathered again for backward. The gradient, whole, but from each rank's own data, is reduce-scattered;
# each rank keeps a quarter of the mean, and of P.](../images/stage3_layer.svg)
#
# To **gather** is to fill the flat vector from everybody's shard; to **drop** is to give its memory back. But the
# layer's own tensors are views of this vector. How can it go, and come back, without them noticing? In PyTorch the
# memory behind a tensor and all its views is one **storage**, and that can be resized:

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
# `full` may be bfloat16 while the shards are float32: this is how FSDP, PyTorch's own stage 3, computes in low
# precision and keeps the masters as shards. (The course's `Zero` leaves masters to the optimizer.) What travels must
# then be bfloat16, too. Write through `full.data`: autograd notices what is written into `full` or `full.detach()`, and
# backward would refuse what forward has kept. Budget: hold an N-th of P, and all of the layer in use (within `gather`,
# a second copy of it for a moment); send (N − 1)/N of the layer, in the dtype of `full`.


# %%
def gather(full, shard):
    """Fill `full` from the shards of all ranks, in its own dtype; its memory comes back in the
    same storage.

    full: [n] nn.Parameter, its storage is empty; shard: [n / N] nn.Parameter, perhaps of
    another dtype
    """
    ### BEGIN SOLUTION
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.data.to(full.dtype))
    ### END SOLUTION


def drop(full):
    """Give the memory of `full` back; [n]."""
    ### BEGIN SOLUTION
    full.untyped_storage().resize_(0)
    ### END SOLUTION


gathered = check.gather_and_drop(gather, drop)
gathered

# %% [markdown]
# And here is the timeline of stage 3. What is gathered counts as communication, not as P: the thin red-orange band in
# forward. In backward there are teeth.

# %%
watched["stage 3"] = job(WAYS["stage 3"], ranks=4, record="memory").recording
beside_ddp(watched["stage 3"], names=("DDP", "stage 3"))

# %% [markdown]
# You may read that full sharding puts the whole model together on every rank. It does not. In forward it is one layer
# at a time; in backward three times as much, namely the layer, its gradient (held for a moment only, so it is drawn
# red-orange with the buffers, not amber), and the buffer in which the others' parts of that gradient arrive:

# %%
steady = {name: recording.steady(rank=0) for name, recording in watched.items()}
teeth, a_layer = steady["stage 3"]["comm"], 4 * sum(sizes[1:10])
assert teeth == 3 * a_layer
row = {"communication, at most": teeth, "one layer": a_layer, "the model": 4 * sum(sizes)}
draw.table([row], caption="bytes")

# %% [markdown]
# ## Build: all three
#
# You have now built what each entry of the table does. What is left is *when*. Go back to the table, and read its last
# column until you can say it from memory. Then write it down.
#
# ### Exercise 5 (optional): the events of stage 3 (15 minutes)
#
# Here a model is a chain of layers, and each layer has six methods. They do real work: two or three ranks gather and
# reduce.
#
# | | |
# |---|---|
# | `gather()` | its parameters become whole, from all ranks' shards |
# | `forward(x)` | returns its output; needs whole parameters |
# | `backward(dy)` | turns its output's gradient into its input's; makes the whole gradient of its parameters |
# | `reduce()` | its gradient goes to the owners; a shard of the mean stays |
# | `drop()` | gives its whole parameters back |
# | `update()` | the optimizer's step, on this rank's shard |
#
# Budget: one whole layer at any time, and one whole gradient. (So the last layer may stay whole from its forward to its
# backward.) Nothing is returned.


# %%
def stage_3(layers, x, loss):
    """One training step.

    layers: in the order of forward; the list stays as it is
    x: this rank's input; loss(y) returns the gradient of the last layer's output
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
# In a real model nobody calls these in a loop. *Hooks* decide when: a module has one before its forward and one after,
# and a tensor has one that is called when its gradient is there (that of a layer's output when its backward begins;
# those of its input and its parameters when it is over). Here is the same, laid out in time:
#
# ![One step of three layers, by stage, one thing after the other. Stage 1: forward, backward, then reduce-scatter of
# all gradients; update a quarter, then all-gather of the parameters. Stage 2: a reduce-scatter after each layer's
# backward; the step as before. Stage 3: an all-gather before each layer's forward, and a drop after it; an all-gather
# before each backward, after it a reduce-scatter, then a drop; update a quarter.](../images/zero_step.svg)
#
# Now open [labs/zero/zero.py](../labs/zero/zero.py). The class has one method for each event, in the order of the
# table, and the stage decides at most one line in each. How a layer becomes a vector has its own file,
# [labs/zero/flat.py](../labs/zero/flat.py). Look there for one more thing: why does a vector know its `users`, instead
# of simply being dropped after each forward? (Another layer may still use it, as with tied weights; or the same layer,
# when it computes something again in backward.)
#
# Do your functions of exercises 3 and 4 carry the whole of it? In this job they take the places of the course's:

# %%
from labs.zero.flat import Unit


def yours(model):
    """Stage 3; where your functions passed their checks, they gather, drop and reduce."""
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
# ### What it says about mistakes
#
# A rank in stage 3 has no whole parameters to look at, and a step uses its gradients up. So two mistakes are easily
# made; here is what comes of them:


# %%
def said(mistake):
    """What an exception says."""
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
# To look at parameters there is `zero.full_state_dict()`: whole tensors on every rank, by the model's own names.
#
# ## Build: one norm for all shards
#
# Gradients are often *clipped*: where the whole gradient, read as one vector, is longer than some bound, it is scaled
# down to that bound. With DDP each rank can work out this length, the **global norm**, by itself. The norm of a shard
# is smaller, and different on each rank. But squares add up over ranks just as they do over elements. (`groups` are the
# groups over which the parameters are sharded; `None` is all ranks.)

# %%
from labs.clip import clip_gradients


def norms():
    """The norm of this rank's shards, and the global one."""
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
# Between `zero.sync()` and `zero.step()` the shards' gradients are those of the mean. Budget: each rank hands over one
# number, however many shards it has. Add up in float32 or better, even if the gradients are bfloat16.


# %%
def clip(shards, max_norm):
    """Scale the gradients of all shards, in place, so that their global norm is at most
    `max_norm`; return what it was.

    shards: this rank's, 1-D; any `.grad` may be None, even all of them. The norm: a float, or a
    tensor of one number
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
# This is the test of notebook 03 for each stage, against one process that takes the ranks' parts one after the other:
# on two ranks the same bits; on four ranks, in float64, within 1e-12. Perhaps the same bits there, too?


# %%
def float64():
    return GPT(CONFIG).double()


def all_of(ways, build):
    """The parameters after three steps of each way, one after the other."""
    return {name: train(apply, build, keep=True)[1] for name, apply in ways.items()}


def off(ranks, name, expected):
    """The largest difference, on any rank, between a parameter and what is expected."""
    pairs = [(trained[name][p], due) for trained in ranks for p, due in expected.items()]
    return max((found - due).abs().max().item() for found, due in pairs)


# %%
one_process = partial(job, partial(as_in_the_table, "one device"), keep=True, ranks=1)
builds = {2: float32, 4: float64}  # by ranks, which are as many micro-batches
expected = {m: one_process(build, micro_batches=m)[0][1] for m, build in builds.items()}


def verdicts_on(ways):
    """Whether each way ends where one process ends."""
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
# It is the same training in every stage, bit for bit even on four ranks: our reduce-scatter adds up in the order of the
# ranks, and so does the one process.
#
# ## Measure: bytes sent
#
# On the left the formula, which knows the shapes and what each stage sends, and has seen no run
# ([labs/cost/zero_stages.py](../labs/cost/zero_stages.py)); on the right, what the recording saw in the third step.

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
# Stages 1 and 2 send what DDP sends, plus 24 bytes, in which the ranks agree that they used the same layers in the same
# order: if two different layers of equal size met in one reduce-scatter, nothing would fail, and both would be wrong.
# So the memory that stages 1 and 2 save costs nothing here. Stage 3 sends 2.25 times the model where DDP sends 1.5,
# half as much again: P is gathered twice where stages 1 and 2 gather it once.
#
# That was for one micro-batch per step. With four:

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
# DDP and stage 1 wait for the last micro-batch. Stage 2 reduce-scatters four times and gathers once: (4 + 1)/2 of an
# all-reduce. Stage 3 does its two gathers and its reduce-scatter four times: 4 × 3/2. If you accumulate many
# micro-batches, budget for it.
#
# ## Measure: bytes held
#
# Here are the four timelines from above in one picture, each kind at its own maximum; the mark is the peak of all
# together.

# %%
draw.bars(steady)


# %%
def beside(name, kind):
    """What the formula says and what was measured, bytes."""
    return getattr(predicted[name].held, kind), steady[name][kind]


rows = {f"{name}: {kind}": beside(name, kind) for name in STAGES for kind in "PGS"}
ledger = draw.ledger(rows, within=0)
peaks = draw.ledger({f"{name}: peak": beside(name, "peak") for name in WAYS}, within=0.05)
assert ledger.agrees and peaks.agrees
ledger

# %%
peaks

# %% [markdown]
# P, G and S agree to the byte, with some small print. G is a little more than 4Ψ in stage 1, as a shard's gradient is
# there before all whole ones are gone; in stage 2 it is 4Ψ/N, plus a layer on its way (at that moment the embedding's
# shard is still missing). S has a counter of 4 bytes for each vector: how many steps there were. But for these
# counters, is it what you worked out in exercise 1?


# %%
def yours_and_measured():
    """P and S of rank 0, bytes: by the function of exercise 1, and measured."""
    layers, rows = [sum(layer.sizes) for layer in cost.gpt_layers(CONFIG)], {}
    for name, stage in STAGES.items():
        P, _, S = held_per_rank(stage, layers, 4, (4, 4, 8))
        rows[f"{name}: P"] = P, steady[name]["P"]
        rows[f"{name}: S, without counters"] = S, steady[name]["S"] - 4 * len(layers)
    return draw.ledger(rows, within=0)


yours_and_measured() if on_your_paper else on_your_paper

# %% [markdown]
# Now with sliders. Thick bars are what the formula says, thin ones what rank 0 of your job held: at first they agree.
# Move a slider, and the thick bars move away from the thin ones; in the lines above them, the term that has changed is
# marked. Each time, guess first which bars will change: 64 ranks? Sequences of 128 tokens? Mixed precision?

# %%
play.memory(watched, CONFIG, precision="float32", ranks=4, batch=1, context=16)

# %%
assert len({steady[name]["A"] for name in ("DDP", *STAGES)}) == 1

# %% [markdown]
# The activations (A) are the same in all four: **ZeRO does not touch activations**. Each rank reads its own part of the
# batch, and keeps what its backward will need.
#
# ## Measure: mixed precision, and the famous 4 and 8
#
# `Masters` of [labs/memory/precision.py](../labs/memory/precision.py) keeps float32 masters of parameters in bfloat16,
# and steps them. It is an optimizer, so it goes where optimizers go: into `Zero`, or beside DDP.

# %%
from labs.memory.precision import Masters

masters = partial(Masters, optimizer=adamw)


def low(model):
    """DDP in mixed precision."""
    module = ddp.Bucketed(model.bfloat16())
    optimizer = masters(model.parameters())
    return Training(partial(backward, module), optimizer, (), model.state_dict, module.sync)


def low_sharded(stage, model):
    """ZeRO in mixed precision."""
    return sharded(stage, model.bfloat16(), masters)


# %%
def bytes_per_parameter(name, apply):
    """P, G and S of rank 0, and their sum; counters and padding are too small to show."""
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
# Not 4 times. (The formula says 16/7, or 2.29. In each row G is more than its formula says, which is 2 bytes, or 2/4
# from stage 2 on: `Masters` turns gradients into float32, a tensor or a shard at a time; and stage 2 has a layer on its
# way.)
#
# The formula is short (`cost.bytes_held`): the kinds that a stage shards are divided by N, the others are not.


# %%
def bytes_in(stage, ranks, precision="mixed"):
    """Bytes per parameter of P, G and S together, on each rank; stage 0 is DDP."""
    return sum(cost.bytes_held(1, ranks, stage, precision).values())


assert bytes_in(1, ranks=4) == 2 + 2 + 12 / 4
table = []
for n in (2, 4, 8, 64, 1024):
    times = {name: bytes_in(0, n) / bytes_in(stage, n) for name, stage in STAGES.items()}
    table.append({"ranks": n, **{name: round(less, 2) for name, less in times.items()}})
draw.table(table, caption="how many times less than with DDP")

# %% [markdown]
# "4 times" for stage 1 and "8 times" for stage 2 are the *limits* for very many ranks: 16/(2 + 2) and 16/2. On 8 ranks,
# they are 2.9 and 4.3. Only stage 3 has no limit: N times less, whatever N is.
#
# Another saying is "memory is 20 times the number of parameters". You know from notebook 01 where the 20 comes from: a
# float32 copy of all gradients is counted as well, which `Masters` makes for only one tensor at a time. So before you
# compare two figures, ask by which convention each was counted. On 64 ranks:

# %%
table, stages = [], {"DDP": 0} | STAGES
for name in cost.PIE:
    held = {each: round(bytes_in(stage, 64, name), 2) for each, stage in stages.items()}
    table.append({"": name, **held})
draw.table(table, caption="bytes per parameter, on each of 64 ranks")

# %% [markdown]
# ## Measure: time
#
# In stage 3 a layer cannot begin before its parameters are there. For a clear picture, here are six layers that only
# pretend to compute, as in notebook 03: forward *sleeps* 5 ms, backward 10 ms, as if another device did the work. The
# parameters, 4 MB per layer, and all that travels are real. For each rank: its phases; what is on its way (`ag 3`: the
# third all-gather); and what the rank does, hatched where it waits.


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
    """Two steps; the first one also connects."""
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
# Six all-gathers in forward, each with a rank that does nothing but wait; in backward an all-gather and a
# reduce-scatter for every layer; and one small all-gather, in which the ranks agree on the order of the layers. No
# collective hides behind a layer's compute:

# %%
events = waits.select(rank=0, step=1)
_, span = waits.step_spans(rank=0)
waited, took = sum(event.waited for event in events), span.end - span.start
times = f"{1000 * waited:.0f} ms of {1000 * took:.0f} ms"
print(f"{len(events)} collectives; rank 0 waited {times}")

# %% [markdown]
# It need not be so. The all-gather of the next layer could start while this one computes (that is **prefetch**), and
# the reduce-scatter of the last one could travel meanwhile (**overlap**, as in notebook 03). Then two layers are in
# memory, not one: again time is paid for in bytes. That is for notebook 06, on FSDP; `labs/zero/zero.py` leaves it out,
# to remain one table.

# %% [markdown]
# ## Native
#
# PyTorch has the three stages under other names. Stage 1 is `ZeroRedundancyOptimizer`, beside DDP. Stage 3 is
# `fully_shard` (FSDP2, the second *fully sharded data parallel*). With `reshard_after_forward=False` it is about stage
# 2 (it does not drop a layer after its forward); the older FSDP called that `SHARD_GRAD_OP`. All of them are in
# [labs/native](../labs/native/__init__.py), and have rows in the table of strategies. First, the same test.

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
# Then come the ledgers, side by side. What PyTorch's ways send, and hold of P, G and S, is predicted from their
# layouts. Their buffers and their peak depend on PyTorch's version: they are measured only.

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
# None of the three is its stage to the letter.
#
# **`ZeroRedundancyOptimizer`** leaves DDP as it is: it all-reduces all gradients, though each rank uses only a part,
# and keeps them all. Then each rank *broadcasts* the parameters that it has stepped: 1.5 times the bytes, on average
# over the ranks. And it deals out whole parameters, not elements, so the shards are only roughly equal:

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
# **`fully_shard`** sends *less* than stage 3. The embedding, the last norm and the head belong to the model itself, its
# root, and the root is not dropped between forward and backward, since backward begins with it. So they are gathered
# once. What it saves in bytes sent it pays in bytes held: look at its `comm`. There are the root and its gradient, and
# almost four times a layer: the layer in use, its gradient, the next layer, gathered ahead, and the gradient of the one
# before, still being reduced. (Stage 3 has three. In a model of only four layers, that is as much as all of them.)
#
# **Without resharding** no layer is dropped after forward. It sends what stage 2 sends. But it is not stage 2: at rest
# P is sharded, and every step gathers it *in forward* (stage 2 gathers after the update). "No reshard" does not mean
# that nothing is gathered. (Its maxima are compared with the formula, but not shown: from PyTorch 2.15 on, one buffer
# is freed earlier. To read the next table: ours has seven vectors, which are the embedding, four layers, the norm and
# the head, and one all-gather more, in which the ranks agree. `fully_shard` has five: four layers and the root. The
# model has 39 tensors.)

# %%
calls = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast")
seen = {name: talk[name].counts(rank=0, step=2) for name in order}
rows = [{"": name, **{call: seen[name][call] for call in calls}} for name in order]
draw.table(rows, caption="collectives in a step")

# %% [markdown]
# ### What the wire carried
#
# All these bytes are *logical*: the least that a collective must send. You know from notebook 02 that gloo has no
# reduce-scatter. It runs an all-reduce, and throws most of it away. So ours goes another way: each rank sends every
# other rank its part (an all-to-all) and adds up what it gets. Here is what Linux counted on the connections in one
# step:

# %%
from labs.kit.sockets import delivered


def on_the_wire(ways):
    """Bytes that this rank really sent in the second step of each; None on systems that do not
    count."""
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
    """Bytes on the wire, as a multiple of the logical ones."""
    nbytes = carried[name]
    return "not counted here" if nbytes is None else f"{nbytes / sent[name]:.2f} ×"


rows = []
for name in WAYS:
    both = {"logical, bytes": sent[name], "on the wire": times_logical(name)}
    rows.append({"rank 0, per step": name, **both})
draw.table(rows)

# %% [markdown]
# On gloo `fully_shard` carries more than it logically sends, and ours hardly does. On GPUs NCCL has a real
# reduce-scatter, and should not show this.
#
# And here is the time of a step, both sides in turn:


# %%
def milliseconds(apply):
    """The median step of rank 0, of ten."""
    recording = job(apply, steps=10, ranks=4, record="time").recording
    return 1000 * statistics.median(span.end - span.start for span in recording.step_spans(0))


for ours, theirs in (("stage 1", "ZeroRedundancyOptimizer"), ("stage 3", "fully_shard")):
    mine, torchs = milliseconds(WAYS[ours]), milliseconds(WAYS[theirs])
    print(f"{ours}: {mine:.1f} ms, or {mine / torchs:.2f} × {theirs}'s time")

# %% [markdown]
# Mind what is compared: ranks that share a few cores, a wire that is memory, and a model so small that calls count more
# than bytes. Stage 1 begins to reduce when backward is over; PyTorch's all-reduce has begun by then. And on GPUs
# `fully_shard` prefetches, so its all-gathers hide behind compute.
#
# ## Why, and why not
#
# **Why**: memory. This is the picture that the paper became known for (its figure 1), 7.5 billion parameters on 64
# GPUs, from the formula that you have measured on four:


# %%
def gigabytes(stage):
    """P, G and S of 7.5 billion parameters, on each of 64 ranks."""
    return {kind: size / 1e9 for kind, size in cost.bytes_held(psi, 64, stage).items()}


published = {name: gigabytes(stage) for name, stage in ({"DDP": 0} | STAGES).items()}
together = [float(f"{sum(kinds.values()):.3g}") for kinds in published.values()]
assert together == [120, 31.4, 16.6, 1.88]
draw.chart(published, "GB", caption="7.5 billion parameters, mixed precision, a rank of 64")

# %% [markdown]
# Now all of it, activations too, for a model of 70 billion parameters; the grey strip is a card of 80 GB. Does stage 1
# fit into it on any number of ranks? From how many on does stage 3? Then make the sequences longer, and look for the
# kind that no stage makes smaller. (`recompute` is what [Memory](07_memory.ipynb) is about, `offload` what
# [Offload](07b_offload.ipynb) is.)

# %%
play.memory(model="llama3-70b", context=1024)

# %% [markdown]
# **What it costs**: in bytes sent, stage 1 costs nothing, so it is hardly ever wrong. For stage 3 with prefetch (ours
# has none), ask as in notebook 03 what can hide behind compute. A layer's forward takes 2ψT/R seconds (for its ψ
# parameters, T tokens, and R operations per second), and the gather of the next one 2ψ/W (2 bytes each, W bytes per
# second). Backward takes 4ψT/R, gather and reduce-scatter 4ψ/W. In both, ψ cancels, and it is DDP's border again:
# **T > R/W**.

# %%
R = cost.FLOPS  # operations per second of an H100 (Llama 3, arXiv 2407.21783, table 4)
LINKS = {name: link.bandwidth for name, link in cost.LINKS.items()}  # bytes per s, each way
least = {name: round(R / W) for name, W in LINKS.items()}
draw.table([{"link": name, "tokens on a device, at least": T} for name, T in least.items()])

# %% [markdown]
# But mind what T is. DDP and stage 1 communicate once a step: what cannot be hidden is paid once for all its
# micro-batches. Stage 3 communicates in each micro-batch: its T is what fits into memory *at once*. So it wants large
# micro-batches; and on slow links, DDP's copies may still be the better bargain.
#
# **Why not**, then? Stage 2 hardly has a place of its own: with many micro-batches it sends more than stage 1, and it
# keeps P, which stage 3 does not. Stage 3 sends many messages, a few for each layer; small layers drown in latency. And
# none of them makes activations smaller. That takes other means: computing them twice, or cutting the model itself.

# %% [markdown]
# ## Say it back
#
# The table of events, from memory: what happens at each of them, in stages 1, 2 and 3? (The optimizer's own update, in
# `step`, is left out.)


# %%
def stages_by_event():
    """{event: (stage 1, stage 2, stage 3)}, of "all_gather", "drop", "reduce_scatter" and ""
    for nothing."""
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
# Answer each aloud before you unfold it.
#
# <details><summary>For each stage: what does a rank hold at rest, and what travels when?</summary>
#
# Stage 1: P, G, S/N; the gradients are reduce-scattered once a step, the updated parameters all-gathered. Stage 2: P,
# G/N, S/N; the same, but each layer's gradient goes as soon as it is ready, in each micro-batch. Stage 3: everything
# /N; each layer is gathered for its forward, and again for its backward, dropped after both, and its gradient
# reduce-scattered.
# </details>
#
# <details><summary>"In stage 3 the whole model is on every rank at some moment. So at the peak, nothing is saved." What
# do you answer?</summary>
#
# It never is. One layer at a time is (two with prefetch), and in backward its gradient and a receive buffer as well.
# Besides these there are only shards, an N-th of everything.
# </details>
#
# <details><summary>70 billion parameters, mixed precision, 512 ranks of 80 GB. Which stages fit, without
# activations?</summary>
#
# Stage 1: 4 + 12/512 bytes, 282 GB. Stage 2: 2 + 14/512, 142 GB. In both, what is not sharded is already over 80, on
# any number of ranks. Stage 3: 16/512 bytes, 2.2 GB; and in backward a layer, its gradient and a receive buffer.
# </details>
#
# <details><summary>A step has 16 micro-batches. How much do the stages send, against DDP with
# <code>no_sync</code>?</summary>
#
# Stage 1: the same. Stage 2: 16 reduce-scatters and one all-gather, 8.5 times. Stage 3: 16 times three halves, 24
# times.
# </details>
#
# For Ψ parameters in float32 with AdamW, on N ranks, per rank and step; one all-reduce is 2 (N − 1)/N × 4Ψ bytes:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | stage 1: sent | one all-reduce | that, and 8 (N − 1) B | `ZeroRedundancyOptimizer`: 1.5 of them, on average |
# | stage 1: P, G, S | 4Ψ, 4Ψ and a little more, 8Ψ/N | as predicted | S by whole parameters |
# | stage 2: sent | one all-reduce, with one micro-batch | that, and 8 (N − 1) B | `fully_shard`, no reshard: the same |
# | stage 2: P, G, S | 4Ψ, 4Ψ/N and a layer, 8Ψ/N | as predicted | P at rest 4Ψ/N, and whole from forward to backward |
# | stage 3: sent | 1.5 of them | that, and 8 (N − 1) B | `fully_shard`: the root is gathered once |
# | stage 3: P, G, S | 4Ψ/N, 4Ψ/N, 8Ψ/N | as predicted | as predicted |
# | numbers | one process's | same bits, on 2 ranks and on 4 | same bits on 2 ranks |

# %% [markdown]
# ## Beat it: the largest model in 4 MB a rank (30 minutes)
#
# Here it is open: four ranks, 4 MB each, and the largest model that they can train. You choose its width and its depth,
# and how the state is sharded; stages 1 to 3 are one way, and not the only one. The job is a real one: three batches of
# 32 rows with 32 features, 8 rows to a rank. The mean of the ranks' losses must be the loss of one process with AdamW
# in float32. No rank may hold more than 4 MB at any moment from the second batch until your function returns, whatever
# it is for: state, gradients, a layer that is whole, activations, buffers.
#
# **The bound.** From one step to the next, AdamW must keep a parameter and its two means somewhere, 12 bytes in all.
# Four ranks of 4 MB keep them for 1,333,333 parameters, if there is room for nothing else: 100 points. With copies, as
# in DDP, 206,496 parameters fit: 15.5 points. Which of the 16 bytes of stage 3 is not among these 12?
# A score is 100 × parameters / bound.


# %%
def train_largest(make, batches, settings):
    """Train the largest model that four ranks hold in 4 MB each; return the loss of each batch.

    make(width, depth): the model; call it once.  It is x = tanh(first(x)), then for each of
        `layers` x = x + tanh(layer(x)), then last(x): nn.Linear, width × width in between.
    batches: yields this rank's (x, y) of each step.  settings: of AdamW.
    The loss is the mean square of model(x) - y, as a float.  A job that takes over two
    minutes is ended.
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
# <details><summary>Where is there room?</summary>
#
# In when a gradient goes: a shard could take its step as soon as its gradient is reduced. In what is kept for backward,
# for each row and layer. And in the shape: a narrow layer is quickly gathered, a wide one has fewer activations for its
# parameters.
# </details>
#
# **Read on**: [labs/zero/zero.py](../labs/zero/zero.py), most of which you can now read. Rajbhandari, Rasley, Ruwase
# and He, 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (arXiv 1910.02054), sections 3, 5
# and 7. Zhao et al., 2023, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (arXiv 2304.11277).
#
# **Next.** Stage 3 gathers over one group of all ranks, even where some of them are joined by a slow link, and each
# strategy so far has code of its own. [05 Mesh and DTensor](05_mesh_and_dtensor.ipynb) arranges ranks as a grid, and
# gives tensors a layout.
#
# A clean copy of this notebook: `git restore notebooks/04_zero.ipynb`, then *File > Reload Notebook from Disk*.
