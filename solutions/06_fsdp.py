# %% [markdown]
# # FSDP: stage 3, one parameter at a time
#
# *Stage 3 of notebook 04 waits for every layer that it gathers, and its optimizer no longer knows which parameter is
# which. PyTorch's FSDP does the same arithmetic and has neither problem. What does FSDP do differently?*
#
# You need: stage 3 of [ZeRO](04_zero.ipynb), and from [Mesh and DTensor](05_mesh_and_dtensor.ipynb) the grid of ranks
# and the tensors that know their layout.
# **Minutes**, by estimate: 40 without exercises, 75 with them, 10 more for optional parts, 35 more for the challenge.
# Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("06")

# %% [markdown]
# ## Question
#
# In notebook 04 a layer was one flat vector, cut into N equal shards. This kept the code of stage 3 short. But the next
# cells show the tensors that its optimizer gets:

# %%
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs import cost
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import run
from labs.kit.record import mark

# %%
from labs.kit.train import ADAMW, Training, backward, step, strategies, trainable
from labs.model import GPT, PRESETS
from labs.zero import Zero

CONFIG = replace(PRESETS["small"], depth=4, context=16)  # notebook 04's
sizes = cost.parameter_sizes(CONFIG)
loader = Batches(corpus().tokens, 16, CONFIG.context)
batches = [loader[number] for number in range(6)]
adamw, on_cpu = partial(torch.optim.AdamW, **ADAMW), partial(run, device="cpu")


def vectors():
    """Return the shapes of the tensors that stage 3 passes to its optimizer."""
    return [tuple(shard.shape) for shard in Zero(GPT(CONFIG), 3, adamw).shards]


print(f"a layer of 9 tensors is {on_cpu(vectors, ranks=4)[0][1]}")

# %% [markdown]
# For a whole layer, the optimizer gets one vector. It is a quarter of nine tensors, and it begins and ends anywhere
# inside a tensor. This causes three problems:
#
# - an optimizer cannot treat a norm's scale differently from a matrix, for example to apply weight decay to matrices
#   only;
# - a frozen parameter and a trained parameter cannot share a vector, since a tensor has only one `requires_grad`;
# - a state dict must be assembled by hand, since the shards do not know the names of parameters.
#
# FSDP1 appeared in FairScale in 2021 and in PyTorch 1.11 in 2022. It used such vectors and had these problems; its
# option `use_orig_params=True` later hid some of them. **FSDP2**, which is `fully_shard` of 2024, cuts each parameter
# separately.
#
# ## Picture
#
# ![Two parameters on two ranks. Each rank holds some rows of each parameter, under the parameter's own name. The rank
# copies its pieces side by side, padded with zeros to the same length. One all-gather makes a table of them, with a row
# for each rank. Columns of this table are copied to the full weight and the full bias.](../images/fsdp_table.svg)
#
# A shard is now some *rows* of a parameter. A layer is still gathered by one collective. There are two prices. The
# gathered numbers are ordered by rank, so they must be copied once more to form whole tensors. And each parameter has
# its own padding.
#
# ## Build: parameter by parameter
#
# `fully_shard(module)` makes one *group* of all parameters in `module` that no earlier call has put into a group. So
# call it on each layer first, and on the model last. The last call makes a group of the remaining parameters: the
# *root*, with the embedding, the last norm and the head. A group is gathered by one collective, and dropped as a whole.
#
# How should five rows be divided among four ranks? PyTorch cuts them like `chunk`, into pieces of ⌈5/4⌉ = 2 rows, until
# no rows are left. Ours does the same.

# %%
from labs.fsdp import fully_shard
from labs.mesh import Mesh


def pieces():
    torch.manual_seed(0)  # on every rank: fully_shard refuses replicas that differ
    weight = fully_shard(nn.Linear(3, 5), mesh=Mesh((dist.get_world_size(),), ("dp",))).weight
    return {
        "rank": dist.get_rank(),
        "placements": str(weight.placements),
        "shape": str(tuple(weight.shape)),
        "local shape": str(tuple(weight.to_local().shape)),
    }


draw.table(on_cpu(pieces, ranks=4))

# %% [markdown]
# The last rank holds no rows. An empty shard is legal: this rank joins every collective and contributes only padding.
# The parameter in the module is now a `DTensor` of shape [5, 3] with the placement `Shard(0)`, and its name is still
# `weight`.
#
# ### Exercise 1: unshard and reshard (10 minutes)
#
# Fill the parameters of one group from the shards of all ranks, with **one** collective. `shards` are plain tensors:
# this rank's rows of each parameter. `fulls` are tensors whose storage is empty; allocate it with
# `untyped_storage().resize_`, as in notebook 04. If `fulls` are bfloat16 while the shards are float32, send bfloat16.
# Use `all_gather(vector, part)` of notebook 04. With N ranks a piece of `full` has `-(-len(full) // N)` rows, which is
# the quotient rounded up.
#
# The check compares every number, on 2 to 4 ranks. It tests that each storage has `full.nbytes` bytes after `unshard`
# and none after `reshard`, and that the shards have not changed. Budget: send (N − 1)/N of the group, in one collective
# and without a barrier. Hold at most 2.75 times the size of the group, and nothing after `reshard`. This is enough for
# the table, the full tensors, this rank's own rows and a copy of one parameter, but not for a third copy of the group.

# %%
from labs.group import all_gather, reduce_scatter


def unshard(shards, fulls):
    """Fill each of `fulls` from the shards of all ranks. The storage of each is empty; allocate
    its bytes again.

    shards: this rank's rows of each parameter, [rows, ...], fewer or none on the last ranks;
        perhaps of another dtype
    """
    ranks = dist.get_world_size()
    ### BEGIN SOLUTION
    widths = [-(-len(full) // ranks) * full.shape[1:].numel() for full in fulls]
    table = torch.zeros(ranks, sum(widths), dtype=fulls[0].dtype)
    row = torch.zeros_like(table[0])
    for shard, place in zip(shards, row.split(widths), strict=True):
        place[: shard.numel()] = shard.flatten()
    all_gather(table.view(-1), row)
    for full, piece in zip(fulls, table.split(widths, 1), strict=True):
        full.untyped_storage().resize_(full.nbytes)
        full.copy_(piece.flatten()[: full.numel()].view(full.shape))
    ### END SOLUTION


# %%
def reshard(fulls):
    """Free the memory of each of `fulls`."""
    ### BEGIN SOLUTION
    for full in fulls:
        full.untyped_storage().resize_(0)
    ### END SOLUTION


unsharded = check.unshard_and_reshard(unshard, reshard)
unsharded

# %% [markdown]
# In [labs/fsdp/parameter_group.py](../labs/fsdp/parameter_group.py) the class `ParameterGroup` does this in three
# methods: `gather` starts the gather, `arrive` waits for it and fills the tensors, and `drop` frees them. From here on,
# a gather starts at one moment, and a rank waits for it at a later one.
#
# ## Build: before it is needed
#
# In the timeline of notebook 04, in its section *Measure: time*, each rank waited for each gather. The next cells run
# this job once more: six layers only pretend to compute, for 5 ms in forward and 10 ms in backward. The layers are
# smaller, so that copying them takes little time. The two ranks are on two nodes, and a
# [link](../labs/kit/ranks/link.py) delays the messages between them. So a gather takes at least as long as the link
# says, and longer on a busy machine.

# %%
from labs.kit.launch import Link

SIDE, wire = 256, Link(nodes=2, bandwidth="350 Mbit/s")
a_layer = 4 * SIDE**2  # bytes
gather = wire.seconds("all_gather", a_layer / 2, ranks=2)
print(f"the gather of a layer: {1000 * gather:.1f} ms at least")


class Busy(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        time.sleep(0.005)
        y.register_hook(lambda _: time.sleep(0.01))
        return y.view_as(y)  # the hooks on what comes out are called before that one


def six_layers():
    torch.manual_seed(0)
    return [Busy(SIDE, SIDE, bias=False) for _ in range(6)]


# %%
def pretend(prepare, steps=6):
    """Run a few steps. prepare(layers) returns the model, and a function to call between
    backward and the next forward."""
    model, finish = prepare(six_layers())
    for _ in range(steps):
        dist.barrier()  # so that the ranks begin together
        mark("step")
        mark("forward")
        loss = model(torch.ones(1, SIDE, requires_grad=True)).sum()
        mark("backward")
        loss.backward()
        mark("optimizer")
        finish()
        mark("end")


# %%
def stage_3(layers):
    model = nn.Sequential(*layers)
    return model, Zero(model, 3, partial(torch.optim.SGD, lr=0.1)).step


def waited(recording, number):
    """Return how long rank 0 waited in a step, in ms."""
    return 1000 * sum(event.waited for event in recording.select(0, number))


def took(recording, number):
    """Return how long a step of rank 0 took, in ms."""
    start, end = recording.window(0, number)
    return 1000 * (end - start)


def quickest(recording):
    """Return the number of the fastest step: other programs on this machine can only slow a
    step down."""
    return min(range(1, recording.steps), key=partial(took, recording))


# %%
timed = partial(on_cpu, pretend, ranks=2, record="communication", link=wire)
in_turns = timed(stage_3).recording
best = quickest(in_turns)
taken, idle = (f"{of(in_turns, best):.0f} ms" for of in (took, waited))
print(f"stage 3: a step took {taken}, and in it rank 0 waited {idle}")

# %% [markdown]
# While a layer computes, the wire is idle. In this time it could carry the parameters of the next layer:
#
# ![Forward of four layers. Above, each gather starts when its layer is needed: gathers and layers take turns, and one
# layer is held at a time. Below, the gather of layer 2 is in flight while layer 1 computes, and so on: the rank waits
# only for the first gather, and holds two layers at a time.](../images/fsdp_prefetch.svg)
#
# ### Exercise 2: prefetch, by hooks (15 minutes)
#
# `model` is an `nn.Sequential`. `fully_shard` has added hooks to each layer. They gather the layer when its forward or
# its backward begins, wait for the gather, and drop the layer afterwards, even the last layer; they gather nothing
# ahead. Add hooks of your own, which return None. With them, the gather of the next layer is already in flight while a
# layer computes, in forward and in backward. Backward goes through every layer and needs its weights, even those of a
# frozen layer.
#
# `layer.unshard(async_op=True)` starts a layer's gather and returns at once. If the layer is gathered already, or its
# gather is in flight, the call does nothing. PyTorch's FSDP2 has the same method. The hooks of `fully_shard` still wait
# and drop.
#
# The check trains, evaluates without gradients, and trains again, on models of one to six layers. One model has a
# frozen layer, and in some models a layer is used twice, though not twice in a row. Your hooks must not change the
# numbers. Budget: a rank may wait for the whole time of only two gathers, the first of forward and the first of
# backward. Gathers begin in the order in which the layers are used, and each gathered layer is used. Never more than
# **two** layers are gathered or in flight.
#
# <details><summary>Which hooks?</summary><code>module.register_forward_pre_hook(hook)</code> calls <code>hook(module,
# arguments)</code> as a forward begins, and <code>module.register_full_backward_pre_hook(hook)</code> calls
# <code>hook(module, gradients)</code> as a backward begins. If a hook returns a value other than None, this value
# replaces the arguments or gradients.</details>
#
# <details><summary>And if a layer is used twice?</summary>Then the layer alone does not determine which layer comes
# next. But a step uses the layers in one order in forward, and in the reverse order in backward. How could your hooks
# count how far the step is, and when does the count begin anew?</details>
#
# <details><summary>Which gather must come first when backward begins?</summary>Your hook on the last layer is called
# before the hook of <code>fully_shard</code>. If your hook starts only the gather of the previous layer, that gather is
# on the wire first, and the last layer waits for both. Which gather should your hook start before it?</details>


# %%
def prefetching(model):
    """Add hooks that gather the next layer while a layer computes, in forward and in
    backward."""
    ### BEGIN SOLUTION
    uses = []

    def begins(*_):
        uses[:] = [*model, *reversed(model)]

    def computes(layer, *_):
        uses.pop(0)
        for soon in (layer, *uses[:1]):
            soon.unshard(async_op=True)

    model.register_forward_pre_hook(begins)
    for layer in set(model):
        layer.register_forward_pre_hook(computes)
        layer.register_full_backward_pre_hook(computes)
    ### END SOLUTION


hooked = check.prefetching(prefetching)
hooked

# %% [markdown]
# A real model is not a list of layers: its forward may be any Python code. How does `fully_shard` know which layer
# comes next? Ours remembers the order of the last forward, in [labs/fsdp/order.py](../labs/fsdp/order.py). PyTorch's
# need not remember it in forward: on a GPU, Python runs ahead of the device, and issues the next gather on a *stream*
# of its own. A stream is a queue of work, and two streams run side by side. In backward, both use this step's forward
# order in reverse. The reduce-scatters overlap, too: the gradients of layer 4 are in flight while layer 3 computes its
# own.
#
# You can also tell `fully_shard` which layers to gather ahead. The next cells run the same job with your hooks, and
# with no layer, one, two and all five other layers gathered ahead. In these jobs the last layer stays gathered after
# its forward, since backward begins with it; in the exercise it was dropped.


# %%
def ahead(number, layers):
    """Set up fully_shard, with `number` layers gathered before they are needed."""
    mesh = Mesh((dist.get_world_size(),), ("dp",))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not layers[-1])
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + number])
        layer.set_modules_to_backward_prefetch(layers[max(i - number, 0) : i][::-1])
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda: (optimizer.step(), optimizer.zero_grad())


# %%
def by_hooks(layers):
    """Gather ahead with your hooks, if they passed; otherwise one layer ahead with
    fully_shard."""
    model, finish = ahead(0 if hooked else 1, layers)
    if hooked:
        prefetching(model)
    return model, finish


AHEAD = (0, 1, 2, 5)
hooks = timed(by_hooks).recording
talk = {n: timed(partial(ahead, n)).recording for n in AHEAD}
weighed = partial(on_cpu, pretend, steps=3, ranks=2, record="memory")
held = {n: weighed(partial(ahead, n)).recording for n in AHEAD}

# %%
steps = {n: quickest(each) for n, each in talk.items()}
names = ("stage 3", "one layer ahead")
draw.timeline(in_turns, talk[1], step=(best, steps[1]), names=names)

# %% [markdown]
# For each job, the figure shows rank 0's fastest step. The numbers in the boxes count a rank's all-gathers, `ag`, and
# reduce-scatters, `rs`, within the step; where there is no room, the number is left out. The narrow phase at the end is
# the optimizer's. The next table shows the times in numbers; they mean little if other programs keep your machine busy:

# %%
jobs = {"stage 3": in_turns, "your hooks, if they passed": hooks}
jobs |= {f"fully_shard, {n} ahead": talk[n] for n in AHEAD}
rows = []
for name, each in jobs.items():
    times = [f"{of(each, quickest(each)):.0f} ms" for of in (took, waited)]
    rows.append({"": name, "the step took, and in it rank 0 waited": ", ".join(times)})
draw.table(rows)

# %% [markdown]
# With no layer ahead, the gradients of a layer are in flight while backward computes the previous layer, but every
# gather begins only when its layer is needed. With one layer ahead, a gather overlaps with the computation of one
# layer: the gather takes 3 ms on the wire, and a layer computes for 5 ms or more. Nothing can hide the first gather and
# the last reduce-scatter, since the rank has nothing to compute while they are in flight. The ranks also wait for each
# other, and longer on a busy machine. A second layer ahead helps only if a gather takes longer than a layer's
# computation. How much memory does it cost to gather ahead? Move the slider, and look at the memory below the timeline,
# where all phases are drawn equally wide.

# %%
play.prefetch(talk, held, steps, begin=2)


# %%
def in_flight(recording, phase):
    """Return the most that rank 0 holds of gathered layers and of gradients in flight, in a
    steady step, counted in layers."""
    spans = [span for span in recording.spans if (span.rank, span.name) == (0, phase)][1:]
    line = recording.during(0, None, ["comm", "temporary"])
    most = min(max(size for at, size in line if span.start <= at < span.end) for span in spans)
    return round(most / a_layer, 1)


rows = []
for n, each in held.items():
    most = {phase: in_flight(each, phase) for phase in ("forward", "backward")}
    rows.append({"layers ahead": n} | most)
draw.table(rows, caption="most in flight at once, in layers")

# %% [markdown]
# Forward needs memory for two layers even with no layer ahead: while a layer is being gathered, a rank holds it twice
# for a moment, in the table and as full tensors. With one layer ahead, the next layer uses the memory of the second
# copy. Each further layer ahead needs memory for one more layer. With five layers ahead a rank holds the whole model,
# which stage 3 was meant to avoid. In backward a rank also holds gradients: those of the current layer, and those of
# the layer whose gradients are being reduced, both in the buffer that is sent and in the buffer that receives.
#
# ## Build: over two axes
#
# With 512 ranks, every gather is a ring of 512 ranks, most of which are on other nodes. **Hybrid sharding**, HSDP,
# shards the model over the ranks of one node only, and keeps a copy on each node. It uses the grid of *replicas* ×
# *shards* of notebook 05. Parameters are gathered along `shard`. But each gradient must be the mean over *all* ranks,
# since each rank has read its own part of the batch.
#
# ### Exercise 3: the gradient of HSDP (10 minutes)
#
# You get this rank's whole gradient. Return this rank's piece of the mean over both axes. `mesh.get_group("shard")` is
# the group of an axis, and `mesh.size("shard")` is its number of ranks; `reduce_scatter(vector, group)` is that of
# notebook 04. Keep the dtype, and return a tensor with its own memory: not a view, and not a buffer that the next call
# writes into.
#
# The check tries grids of up to 6 ranks, and n × 1 and 1 × n with n up to 4, in three dtypes. In bfloat16 you may
# divide between the axes, or at the end. All replicas must get the same bits. Budget for each rank: the bytes of a
# reduce-scatter along `shard` and of an all-reduce of a piece along `replicate`. On 2 × 2 ranks this is 1.00 times the
# gradient, half of it along `replicate`. Hold at most 2.75 times the gradient, including the given one.


# %%
def hsdp_gradient(gradient, mesh):
    """Return this rank's piece of the mean gradient over all ranks: [n] -> [n / shards].

    gradient: [n], this rank's whole gradient; do not change it
    mesh: R replicas × S shards, with the axes "replicate" and "shard"; S divides n

    No rank may send more than (S - 1) / S n numbers along "shard", and 2 (R - 1) / R n / S
    along "replicate".
    """
    ### BEGIN SOLUTION
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()
    ### END SOLUTION


check.hsdp_gradient(hsdp_gradient)

# %% [markdown]
# ### A published bug
#
# > **What went wrong in the wild.** *Symptom*: training runs without an error, with only a `UserWarning`, and yet the
# > ranks' parameters differ. *Cause*: somebody had asked for `HYBRID_SHARD` on a mesh of n × 1. FSDP1 switched to
# > `NO_SHARD`, and no longer synchronized gradients between the replicas
# > ([pytorch#154888](https://github.com/pytorch/pytorch/issues/154888), June 2025). When somebody asked for `NO_SHARD`
# > itself, the ranks agreed. In August 2026 the same bug was reported from production
# > ([verl#7493](https://github.com/verl-project/verl/issues/7493)).
#
# The next cells repeat the bug in miniature: there are two replicas and *one* shard, and the gradient is averaged along
# `shard` only.


# %%
def two_replicas(average, steps=5):
    """Return the parameters after a few steps, and whether this rank's loss has fallen."""
    mesh, losses = Mesh((2, 1), ("replicate", "shard")), []
    w = torch.zeros(4, requires_grad=True)
    x = torch.arange(4.0) + dist.get_rank()  # each rank has its own data
    for _ in range(steps):
        losses.append((x @ w - 1).square())
        losses[-1].backward()
        w.data -= 0.01 * average(w.grad, mesh)
        w.grad = None
    return w.tolist(), losses[0].item() > losses[-1].item()


# %%
def as_it_was(gradient, mesh):
    return reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")


(one, falls), (other, falls_too) = on_cpu(two_replicas, as_it_was, ranks=2)
both = falls and falls_too
print(f"the loss falls on both ranks: {both}; they have the same parameters: {one == other}")

# %% [markdown]
# The loss falls on both ranks, so nothing looks wrong. But the gradient was averaged only over the shard group, which
# is one rank. The check of exercise 3 tried your function on n × 1, too. With any library, compare a parameter between
# replicas once, after a few steps. And compare the replicas before the first step: our `fully_shard` does so, PyTorch's
# does not.
#
# ## Build: the whole model
#
# Now shard the whole GPT, with each layer as a group. The function `train` is that of notebook 04.


# %%
def float32():
    return GPT(CONFIG)


def fully(shape, parts, model, reshard=True, **options):
    """Return the training of a model: each of parts(model) is a group, and the rest of the
    model is one more."""
    mesh = Mesh(shape, ("replicate", "shard")[-len(shape) :])
    for part in parts(model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = adamw(trainable(model))  # after fully_shard: the parameters are shards now
    return Training(partial(backward, model), optimizer, trainable(model), partial(full, model))


def full(model):
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def by_layer(model):
    return model.layers.values()


# %%
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


on_four = partial(on_cpu, ranks=4)
job = partial(on_four, train)
FSDP = partial(fully, (4,), by_layer)

# %% [markdown]
# Can your functions of exercise 1 train this model? If they passed, they replace the course's in the next job. Then
# nothing is gathered ahead, since your `unshard` waits for its gather.

# %%
from labs.kit.train import unshard_with


def yours(model):
    """Set up FSDP with the functions of exercise 1, if they passed."""
    if unsharded:
        unshard_with(unshard, reshard)
    return FSDP(model)


mine, courses = job(yours), job(FSDP)
assert [losses for losses, _ in mine] == [losses for losses, _ in courses]
print("with exercise 1, if it passed, in the course's place: the same losses, to the last bit")

# %% [markdown]
# ## Measure: numbers
#
# The next cells repeat the test of notebooks 03 and 04, in float64: they compare four ranks with one process that
# computes their parts of the batch one after the other. FSDP1 had names for four settings. In FSDP2 each setting is a
# mesh and a value of `reshard_after_forward`:

# %%
SETTINGS = {  # FSDP1's name: replicas × shards, reshard_after_forward
    "FULL_SHARD": ((1, 4), True),
    "SHARD_GRAD_OP": ((1, 4), False),
    "NO_SHARD": ((4, 1), False),
    "HYBRID_SHARD": ((2, 2), True),
}


def setting(name, model, **options):
    shape, reshard = SETTINGS[name]
    return fully(shape, by_layer, model, reshard, **options)


# %%
def float64():
    return GPT(CONFIG).double()


def as_in_the_table(name, model):
    """Return the training of a model, set up as the row of this name says."""
    return strategies.set_up(strategies.ROWS[name], model)[0]


def all_of(apply, names):
    """Return the parameters that each of these settings gives."""
    return {name: train(partial(apply, name), float64, keep=True)[1] for name in names}


alone = partial(as_in_the_table, "one device")
[(_, expected)] = on_cpu(train, alone, float64, micro_batches=4, keep=True, ranks=1)


# %%
def as_alone(parameters):
    """Return whether parameters are those of one process, to within 1e-12."""
    return all((p - expected[key]).abs().max() < 1e-12 for key, p in parameters.items())


found = on_four(all_of, setting, list(SETTINGS))[0]
rows = [{"": name, "within 1e-12 of one process": as_alone(found[name])} for name in SETTINGS]
draw.table(rows)

# %% [markdown]
# ## Measure: bytes
#
# How many bytes does a rank send and hold in each setting? Take a group of n bytes, S shards and R replicas. Each
# gather sends (S − 1)/S · n bytes, the reduce-scatter sends as many, and the all-reduce between replicas sends 2 (R −
# 1)/R · n/S bytes. A layer is gathered twice if it is resharded after forward. The root is gathered once in every
# setting, since it stays gathered from forward to backward. [labs/cost/fully_sharded.py](../labs/cost/fully_sharded.py)
# adds up these numbers, and also computes the bytes held. As in notebook 02, *measured* bytes sent are computed from
# the sizes of the calls. The ledgers also show stage 3 of notebook 04. `NO_SHARD` is a mesh of four replicas and one
# shard, so every rank holds the whole model.
#
# In backward, with one layer ahead, the job above held five times the size of a layer in flight. Stage 3 of notebook 04
# held three times the size of a layer: the layer, its gradient, and the buffer that receives the other ranks' parts of
# the gradient. The difference, two layers, is the price of overlap. Is it the same in a GPT?


# %%
def in_turn(ways, micro_batches):
    """Run two steps of each way, one way after the other."""
    for apply in ways.values():
        train(apply, steps=2, micro_batches=micro_batches)


def ledgers(ways, micro_batches=1):
    """Return for each way how much rank 0 sends in its second step, in how many collectives,
    and what it holds in a steady step."""
    talk = on_four(in_turn, ways, micro_batches, record="communication", tell="all: sent")
    found = {}
    for number, (name, apply) in enumerate(ways.items()):
        events = talk.recording.select(rank=0, step=2 * number + 1)
        sent = [event.sent for event in events if event.sent]
        watched = job(apply, micro_batches=micro_batches, record="memory", tell=f"{name}: held")
        held = watched.recording.steady(rank=0)
        found[name] = {"sent": sum(sent), "collectives": len(sent)} | held
    return found


# %%
ways = {name: partial(setting, name) for name in SETTINGS}
ours = ledgers(ways | {"stage 3": partial(as_in_the_table, "zero-3")})
on_paper = cost.Job(CONFIG, batch=1, ranks=4)
predicted = {"stage 3": cost.zero(on_paper, stage=3)}
for name, ((replicas, _), reshard) in SETTINGS.items():
    predicted[name] = cost.fsdp(on_paper, reshard, replicas)


# %%
def beside(name, kind):
    """Return the predicted and the measured bytes."""
    formula = predicted[name]
    said = formula.sent if kind == "sent" else getattr(formula.held, kind)
    return said, ours[name][kind]


exact = [beside(name, kind) for name in ours for kind in ("sent", "P", "G", "S", "comm")]
assert all(said == measured for said, measured in exact)
print(f"{len(exact)} figures by the formula, {len(exact)} measured: the same, to the byte")

# %% [markdown]
# The next figure shows the bytes as bars. P, G and S are sharded as in notebook 04. `comm` is memory for communication:
# gathered layers, and gradients in flight. The mark above a bar is the number of bytes that the rank sends in a step.


# %%
def bars(found):
    """Draw what rank 0 holds, and as a mark what it sends in a step."""
    kinds = ("P", "G", "S", "comm", "sent")
    shown = {name: {kind: each[kind] for kind in kinds} for name, each in found.items()}
    return draw.bars(shown)


bars(ours)

# %%
layer, whole = 4 * sum(sizes[1:10]), 4 * sum(sizes)  # bytes, in float32
root = whole - 4 * layer
worth = (ours["FULL_SHARD"]["comm"] - root) // layer
print(f"FULL_SHARD: {worth} layers' worth in flight, besides the root")

# %% [markdown]
# ![Backward, while layer 3 computes. A rank holds layer 3, its gradient, layer 2, which is being gathered, and the
# gradient of layer 4 twice, in the buffer that is sent and in the buffer that receives: five times the size of a
# layer.](../images/fsdp_flight.svg)
#
# Compare the bars with strategies that you know:
#
# - `NO_SHARD` sends as many bytes as DDP, in five all-reduces, one for each group. It does not replace DDP, since it
#   holds a second copy of the parameters: each group is still copied from its single shard into full tensors. This copy
#   is two thirds of `comm`. The other third is gradients in flight, of two layers and the head.
# - `SHARD_GRAD_OP` sends as few bytes as DDP, and holds a quarter of P, G and S. Its price is in `comm`: from forward
#   to backward a rank holds the whole model. It is not ZeRO's stage 2, which holds all of P at rest. Llama 3 was
#   trained with `SHARD_GRAD_OP` (arXiv 2407.21783, section 3.3.2). [A reader
#   asked](https://github.com/meta-llama/llama3/issues/303) why one should shard at all if every rank holds the whole
#   model anyway. The reason is that G and S stay sharded, and here they are three quarters of P, G and S.
# - `FULL_SHARD` sends nearly 1.5 times as many bytes. In backward it holds five times the size of a layer, as in the
#   picture, and the root. This is two layers and the root more than stage 3 holds: this memory is the price of overlap.
# - `HYBRID_SHARD` holds twice as much of P, G and S as `FULL_SHARD`. The optional part measures when it pays.
#
# Our model has only four layers, so memory for five layers is more than for the whole model. In a deeper model it is a
# small part:


# %%
def in_comm(depth):
    """Return `comm` of FULL_SHARD as a share of a model with this many layers, by the
    formula."""
    config = replace(CONFIG, depth=depth)
    held = cost.fsdp(cost.Job(config, batch=1, ranks=4)).held
    return held.comm / (4 * sum(cost.parameter_sizes(config)))


print("comm: " + ", ".join(f"{in_comm(depth):.0%} of {depth} layers" for depth in (4, 16, 80)))

# %% [markdown]
# ## Measure: how large is a group?
#
# The setting `FULL_SHARD` alone does not determine the memory: it also matters on which modules you call `fully_shard`.
# We compare three choices: the model alone; each layer; and modules by size, which selects each attention and each MLP,
# since these have more than 30,000 parameters.
#
# Predict again. If you call `fully_shard` on the model alone, the whole model is gathered at once, and all of its
# gradients are reduced at once. The parameters are dropped before the gradients are exchanged. How many times the
# model's size does a rank hold in `comm`, at most?

# %%
guess_models = 1 + 1  # your number


# %%
def by_size(model, least=30_000):
    parts = [part for layer in model.layers.values() for part in layer.children()]
    return [part for part in parts if sum(p.numel() for p in part.parameters()) >= least]


WRAPS = {"root only": lambda model: (), "by size": by_size}
wrapped = ledgers({name: partial(fully, (4,), parts) for name, parts in WRAPS.items()})
wrapped["each layer"] = ours["FULL_SHARD"]
assert wrapped["root only"]["peak"] > wrapped["each layer"]["peak"] > wrapped["by size"]["peak"]
bars({name: wrapped[name] for name in ("root only", "each layer", "by size")})

# %%
models = wrapped["root only"]["comm"] / whole
why = "Parameters and gradients; then gradients twice, as they are sent and as they arrive."
check.predict("All at once: how many times the model?", guess_models, models, reason=why)

# %% [markdown]
# P, G and S are the same in all three cases: *at rest* they are equally sharded. With the root only, nothing can
# overlap. A rank then holds the model's size twice in `comm`, and not three times: when gradients are sent, they have
# been copied into the message, and the gradients of backward have been freed. With the root only, a rank even sends
# less, since a single group is gathered once, as under `SHARD_GRAD_OP`. So neither the bytes sent nor the bytes held at
# rest reveal the problem. PyTorch's docstring warns: "Users generally should *not* call `fully_shard` only on the
# topmost root module." Small groups have low peaks, but many short messages. PyTorch's tutorial makes each layer of a
# transformer a group, and so does this course.

# %% [markdown]
# ## Why, and why not
#
# **Why**: FSDP trains models that do not fit on one device, and sends as many bytes as stage 3. With prefetch it takes
# hardly any extra time, as long as a layer's computation takes longer than a gather. As in notebook 04, this needs more
# than R/W tokens in a micro-batch, where R is the operations of a device per second and W is the bytes of its wire per
# second. And the parameters keep their names, so optimizers, checkpoints and other code around the model hardly have to
# know that the model is sharded. [torchtitan's notes](https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md)
# compare FSDP2 with FSDP1 for Llama-7B on 8 H100s. They report a higher MFU, which is the share of the GPUs' speed that
# is used, 7% lower peak memory, and the same loss curve.
#
# **Why not**: with micro-batches of few tokens, computation is too short to hide the gathers. With many ranks each
# gather has many steps of latency: then use HSDP, or fewer data-parallel ranks and another axis of parallelism. If
# ranks take different paths through the model, for example through different experts, collectives of different layers
# are matched with each other. PyTorch's FSDP does not notice this when the layers have the same size; ours compares the
# order of the layers, and raises an error. And FSDP does not make activations smaller.

# %% [markdown]
# ## Say it back
#
# Answer from memory: how much of the parameters does a rank hold between forward and backward, and how much does it
# send in a step, both as a multiple of the model's size? Leave out the root, which is gathered once instead of twice.
# `FULL_SHARD` and `SHARD_GRAD_OP` have `shards` ranks, `HYBRID_SHARD` has `shards` × `replicas`.


# %%
def held_and_sent(shards, replicas):
    """Return {"FULL_SHARD": (held, sent), "SHARD_GRAD_OP": (held, sent), "HYBRID_SHARD": (held,
    sent)}."""
    ### BEGIN SOLUTION
    half = (shards - 1) / shards  # an all-gather, or a reduce-scatter
    return {
        "FULL_SHARD": (1 / shards, 3 * half),
        "SHARD_GRAD_OP": (1, 2 * half),
        "HYBRID_SHARD": (1 / shards, 3 * half + 2 * (replicas - 1) / replicas / shards),
    }
    ### END SOLUTION


check.held_and_sent(held_and_sent)

# %% [markdown]
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Compared with one flat vector, what does sharding by parameter cost, and what does it
# gain?</summary>
#
# It costs padding for each parameter, and a copy of the gathered numbers into full tensors. In return each parameter
# keeps its name and its own place in the optimizer and in the state dict, and frozen and trained parameters can share a
# gather. The number of messages is the same.
# </details>
#
# <details><summary>With prefetch, when does the gather of layer 3 start, in forward and in backward, and how many
# layers does a rank then hold?</summary>
#
# In forward the gather of layer 3 starts when layer 2 begins, and in backward when layer 4 begins. A rank then holds
# two layers. In backward the gradients of layer 4 are reduced while layer 3 computes its own.
# </details>
#
# <details><summary>HSDP runs on two nodes of eight ranks each. Which axis of the mesh comes last, which bytes cross
# between the nodes, and what does it cost in memory?</summary>
#
# The last axis is `shard`, since the eight ranks of a node have consecutive numbers. Gradients cross between the nodes,
# an eighth of them from each rank, and parameters do not. P, G and S are divided by eight, and not by sixteen.
# </details>
#
# The table shows the bytes of each rank and step, for n bytes of parameters on S shards × R replicas, with AdamW in
# float32:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | `FULL_SHARD`: sent | 3 (S − 1)/S n, less one gather of the root | as predicted | as predicted |
# | `SHARD_GRAD_OP`: sent | 2 (S − 1)/S n | as predicted | as predicted |
# | `HYBRID_SHARD`: sent | that of `FULL_SHARD`, and 2 (R − 1)/R n/S | as predicted | as predicted |
# | `NO_SHARD`: sent | 2 (R − 1)/R n | as predicted | DDP |
# | P, G, S | 4n/S together | as predicted | as predicted |
# | numbers | equal to one process's | within 1e-12, in float64 | within 1e-12, in float64 |
#
# The optional part measures the last column of this table.

# %% [markdown]
# ## Beat it: gathered in time, within a budget (30 minutes)
#
# This challenge is open. You write a step as a list of instructions: `("gather", 3)`, `("forward", 3)`, `("drop", 3)`,
# `("backward", 3)`, each with the number of a layer. A gather returns at once, and its layer counts as held from then
# until it is dropped. A forward and a backward wait until their layer is gathered. Each backward starts a
# reduce-scatter of its gradient by itself, and the gradient counts as held until the reduce-scatter is over. The wire
# carries one message at a time, and a message takes latency + bytes/W. A layer that is not dropped after its forward
# need not be gathered again for backward, but it uses memory in which other layers could be prefetched.
# `measured(instructions, given)` returns how long a step takes, and how many bytes it holds at most.
#
# **The bound.** Let D be the number of layers, M the bytes of all layers, m_first and m_last those of the first and the
# last layer, C the time of all forwards and backwards, B the budget, α the latency and W the bandwidth. X = max(0, M +
# m_last − B) is what does not fit.
#
# time ≥ max(C + 2 (α + m_first/W), 2Dα + (2M + X)/W)
#
# No step can beat the first term: the first layer must be gathered before anything is computed, and its gradient is
# reduced after everything is computed. And none can beat the second. The wire must carry one gather and one
# reduce-scatter of every layer. While the last layer's gradient is held, only B − m_last bytes of layers can stay from
# forward to backward, so the other X bytes must be gathered a second time.
#
# The score of a model is 100 × bound / time, and your score is the mean over five models. If you gather each layer when
# it is needed, and drop it after each use, you score 49.6.
#
# Both ranks call your function, and must get the same list: if you search at random, fix the seed, and do not stop the
# search by the clock. The check stops after 120 s of processor time. The ranks really execute your lists, and the
# gradients must be those of one process.

# %%
measured = beat.in_time.measured
rows = []
for name, given in beat.in_time.cases.items():
    row = {"": name, "kB, by layer": " ".join(str(n // 1000) for n in given.nbytes)}
    row["budget"] = given.budget // 1000
    row["forward, ms"] = " ".join(f"{1000 * each:.0f}" for each in given.forward)
    rows.append(row)
draw.table(rows)


# %%
def alike(depth, ahead, kept):
    """Gather each layer `ahead` uses ahead, and keep the last `kept` layers from forward to
    backward."""
    uses = [("forward", i) for i in range(depth)]
    uses += [("backward", i) for i in reversed(range(depth))]
    found, here = [], set()
    for n, (what, layer) in enumerate(uses):
        needed = dict.fromkeys(i for _, i in uses[n : n + 1 + ahead])  # each once, in order
        soon = [i for i in needed if i not in here]
        found += [("gather", i) for i in soon] + [(what, layer)]
        here.update(soon)
        if what == "backward" or layer < depth - kept:
            found.append(("drop", layer))
            here.remove(layer)
    return found


# %%
for each in alike(depth=2, ahead=1, kept=1):
    print(*each)


# %%
def gathered_in_time(nbytes, forward, backward, budget, latency, bandwidth):
    """Return the instructions of a step, forward and backward: [("gather", 0), ("forward", 0),
    …].

    nbytes, forward, backward: lists with one number per layer, the first layer first: the bytes
        of the layer, and the seconds of its forward and of its backward
    budget: the bytes that may be held at any moment; none may be held at the end
    latency: seconds per message
    bandwidth: bytes per second

    measured(instructions, (nbytes, forward, …)) returns (seconds, most bytes held). You may
    search for up to ten seconds per call.
    """
    ### BEGIN SOLUTION
    given = nbytes, forward, backward, budget, latency, bandwidth
    depth = len(nbytes)
    tried = [alike(depth, ahead, kept) for ahead in range(4) for kept in range(depth)]
    fitting = [each for each in tried if measured(each, given)[1] <= budget]
    return min(fitting, key=lambda each: measured(each, given)[0])
    ### END SOLUTION


beat.in_time(gathered_in_time)

# %% [markdown]
# The course's answer treats all layers alike: it gathers every layer a fixed number of uses ahead, and keeps a fixed
# number of the last layers from forward to backward.
#
# <details><summary>Where can time be saved?</summary>
#
# Choose better which layers stay. Each byte that stays saves the same time on the wire, in any layer. But a late layer
# is held for a shorter time, and a small layer saves a whole latency for few bytes. Also choose for each layer how far
# ahead to gather: the computation before a large layer can hide more than one gather.
# </details>
#
# The required part of the notebook ends here. **The rest is optional**: it compares PyTorch's `fully_shard` with ours,
# tries its options and hybrid sharding on two nodes, and lists the names of FSDP1 and a script. After it come the
# reading list and the next notebook.
#
# ## Optional: PyTorch's own
#
# All names of our `fully_shard` are PyTorch's, so the same lines work with PyTorch's own function and mesh. The next
# cells compare the numbers and then the same ledgers. In place of `NO_SHARD` you would use DDP.

# %%
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh


def torchs(name, model):
    """Set up a setting of PyTorch's fully_shard."""
    shape, reshard = SETTINGS[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for layer in model.layers.values():
        fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fsdp.fully_shard(model, mesh=mesh)
    optimizer = adamw(trainable(model))
    return Training(partial(backward, model), optimizer, trainable(model), partial(full, model))


names = [name for name in SETTINGS if name != "NO_SHARD"]
assert all(as_alone(parameters) for parameters in on_four(all_of, torchs, names)[0].values())
print(f"PyTorch's {', '.join(names)}: within 1e-12 of one process")


# %%
def in_models(value):
    """Return bytes as a multiple of the model's, in float32; return words unchanged."""
    return value if isinstance(value, str) else round(value / whole, 2)


def table(found):
    """Draw the ledgers, in multiples of the model."""
    kinds, rows = ("sent", "P", "G", "S", "comm", "peak"), []
    for name, each in found.items():
        times = {kind: in_models(each[kind]) for kind in kinds}
        rows.append({"× the model": name} | times | {"collectives": each["collectives"]})
    return draw.table(rows)


# %%
theirs = ledgers({name: partial(torchs, name) for name in names})
same = ("sent", "collectives", "P", "G", "S")
assert all(theirs[name][kind] == ours[name][kind] for name in names for kind in same)
assert (theirs["FULL_SHARD"]["comm"] - root) // layer == worth - 1
theirs["SHARD_GRAD_OP"] |= {"comm": "(version)", "peak": "(version)"}
pairs = ({f"{name}: ours": ours[name], f"{name}: PyTorch's": theirs[name]} for name in names)
table({who: each for pair in pairs for who, each in pair.items()})

# %% [markdown]
# The bytes sent, the number of collectives, P, G and S are the same. PyTorch's holds about one layer less in `comm`: it
# reduces from one buffer, whereas our all-to-all needs two. Without resharding, `comm` depends on PyTorch's version:
# from 2.15 on one buffer is freed earlier.
#
# ## Optional: the options of `fully_shard`
#
# **Mixed precision** is set by a policy. In the next cell, shards are float32, so that the optimizer has its masters;
# gathers send bfloat16, and gradients are reduced in float32. A parameter then takes (4 + 4 + 8)/N bytes at rest. A
# gather sends 2 bytes per parameter, and a reduce-scatter 4.

# %%
from labs.fsdp import MixedPrecisionPolicy

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# %%
low = ledgers({"bfloat16": partial(setting, "FULL_SHARD", mp_policy=bf16)})["bfloat16"]
assert low["sent"] == cost.fsdp(on_paper, itemsize=2).sent
assert all(low[kind] == ours["FULL_SHARD"][kind] for kind in "PGS")
table({"float32": ours["FULL_SHARD"], "bfloat16": low})

# %% [markdown]
# **float16** also needs a scaled loss, since small gradients would otherwise become zero. Only the rank that holds a
# shard can see an overflow in it, but all ranks must skip the step: `LossScale` in
# [labs/memory/precision.py](../labs/memory/precision.py) asks every rank.
#
# A *sum* of float16 gradients overflows even earlier: the largest number in float16 is 65,504, and 40,000 from each of
# two ranks adds up to more, although their mean does not. So `fully_shard` does a part of the division before the sum:
# on N ranks it divides by about √N, and on two ranks by 2. In return, very small gradients become zero. The next cell
# sends a large and a small gradient in both dtypes:


# %%
def gradient(dtype, value):
    """Train y = w·x on two ranks, and return the mean of both ranks' gradients, which is x."""
    line = nn.Linear(1, 1, bias=False)
    nn.init.ones_(line.weight)
    fully_shard(line, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    line(torch.full((1, 1), value)).sum().backward()
    return line.weight.grad.full_tensor().item()


# %%
ends = {"largest": 4e4, "smallest": 6e-8}
kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def gradients():
    return {k: {e: gradient(dtype, x) for e, x in ends.items()} for k, dtype in kinds.items()}


found = on_cpu(gradients, ranks=2)[0]
rows = {kind: {end: f"{x:.0e}" for end, x in row.items()} for kind, row in found.items()}
draw.table([{"": kind} | row for kind, row in rows.items()])

# %% [markdown]
# In float16 the mean of the large gradient is right, and the small gradient has become 0, since half of 6e-8 is smaller
# than the smallest number in float16. PyTorch's `fully_shard` makes the same choice. bfloat16 has the range of float32,
# so both gradients are right.
#
# **Accumulation.** The gradients of each micro-batch are reduced, unless you call `set_requires_gradient_sync(False)`.
# Then each rank holds whole gradients until the last micro-batch. The next cell does this with two micro-batches:


# %%
def last_only(model):
    """Reduce gradients only in the last micro-batch."""
    training = setting("FULL_SHARD", model)

    def every(x, y, micro_batches, over=None):
        losses = []
        pairs = zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        for number, pair in enumerate(pairs):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            losses += training.backward(*pair, 1)
        return losses

    return replace(training, backward=every)


WAYS = {"reduced each time": partial(setting, "FULL_SHARD"), "reduced the last time": last_only}
two = ledgers(WAYS, micro_batches=2)
assert two["reduced each time"]["sent"] - two["reduced the last time"]["sent"] == whole * 3 / 4
table(two)

# %% [markdown]
# Each group makes one reduce-scatter instead of two, and a rank holds whole gradients, which count as `comm`. The
# number of gathers is the same, since they do not depend on gradients. To keep P gathered as well, set
# `reshard_after_forward=False` and call `set_reshard_after_backward(False)`.
#
# **CPU offload** keeps shards, their gradients and the optimizer's state in the CPU's memory: `CPUOffloadPolicy()`.
# Each gather then begins with a copy to the device, and the step itself runs on the CPU. Our device *is* the CPU, so
# there is nothing to measure here; [Offload](07b_offload.ipynb) offloads to a slower kind of memory.
#
# ## Optional: two nodes
#
# Four ranks run on two nodes, and the slow link of notebook 05 joins the nodes. The next cells compute from the link's
# bandwidth and latency how long a step keeps the wire busy at least; both groups along an axis share the wire. Then
# they run the real jobs:

# %%
slow = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)
LAYOUTS = {  # the groups of ranks along `shard`, and along `replicate`
    "FULL_SHARD": ([(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]),
    "HYBRID_SHARD": ([(0, 1), (2, 3)], [(0, 2), (1, 3)]),
}


def on_the_wire(shard, replicate):
    """Return the seconds that a step keeps the wire busy."""
    seconds = 0
    for size, gathers in ((root, 1), *[(layer, 2)] * 4):
        for ranks in shard:
            gather = slow.seconds("all_gather", size / len(ranks), 4, ranks)
            seconds += gathers * gather + slow.seconds("all_to_all", size, 4, ranks)
        for ranks in replicate:
            seconds += slow.seconds("all_reduce", size / len(shard[0]), 4, ranks)
    return seconds


# %%
rows = []
for name, layout in LAYOUTS.items():
    seen = job(partial(setting, name), link=slow, record="communication", tell=name).recording
    leaves = seen.across(0, 2) + seen.across(1, 2)  # all that leaves node 0
    felt = min(span.end - span.start for span in seen.step_spans(0)[1:])
    row = {"": name, "leaves a node, bytes": leaves, "× the model": round(leaves / whole, 2)}
    row["wire busy, at least"] = f"{on_the_wire(*layout):.2f} s"
    row["a step took"] = f"{felt:.2f} s"
    rows.append(row)
draw.table(rows)

# %% [markdown]
# Under `HYBRID_SHARD` a node sends as many bytes as the model has: each of its two ranks all-reduces half of the
# gradients. In both, a step takes longer than the wire is busy: the ranks also compute, and wait for each other.
# Notebook 05 measured the mesh with its axes in the other order: the axis that sends most goes last.
#
# Hybrid sharding is faster if P, G and S of the model fit on the ranks of one node, and the link between nodes is
# slower than the links inside. It needs more memory, since P, G and S are divided by the ranks of a node and not by all
# ranks. If all links are equally fast, it gains little.
#
# ## Optional: from FSDP1 to FSDP2
#
# | FSDP1, `FullyShardedDataParallel` | FSDP2, `fully_shard` |
# |---|---|
# | `FSDP(model, auto_wrap_policy=...)` | a loop: `fully_shard(layer)` for each layer, then `fully_shard(model)` |
# | `transformer_auto_wrap_policy`, `size_based_auto_wrap_policy` | the condition in that loop |
# | `sharding_strategy=FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD`, `NO_SHARD` | a mesh of two axes, replicas first; such a mesh with a single shard |
# | `MixedPrecision(param_dtype, reduce_dtype, ...)` | `MixedPrecisionPolicy(param_dtype, reduce_dtype, ...)` |
# | `CPUOffload(offload_params=True)` | `CPUOffloadPolicy()` |
# | `with model.no_sync():` | `model.set_requires_gradient_sync(False)` |
# | `backward_prefetch=BACKWARD_PRE` | the default; or `set_modules_to_backward_prefetch` |
# | `forward_prefetch=True` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=True` | not needed |
# | `ignored_states` | `ignored_params` |
# | `use_orig_params=True` | always |
# | `model.clip_grad_norm_(1.0)` | `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `param_init_fn` | build on `meta`, shard, `model.to_empty(device=...)`, then initialize |
# | `sync_module_states=True` | `set_model_state_dict` with `full_state_dict=True, broadcast_from_rank0=True` |
# | `FSDP.state_dict_type(model, ...)` | `model.state_dict()`, of DTensors |
# | `FSDP.summon_full_params(model)` | a parameter's `full_tensor()`, or a module's `unshard()` |
#
# `set_model_state_dict` is in `torch.distributed.checkpoint.state_dict`, and takes the last two options as
# `StateDictOptions`. `fully_shard` changes the model in place, so you may ignore the model that it returns. Make the
# optimizer *after* calling `fully_shard`.
#
# ## Optional: outside Jupyter
#
# The ordinary script [scripts/fsdp.py](../scripts/fsdp.py) uses PyTorch's `fully_shard`; only the data and the model
# are the course's. In the root of the repository, run `torchrun --nproc-per-node 4 scripts/fsdp.py`:
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# dist.init_process_group()
# rank, ranks = dist.get_rank(), dist.get_world_size()
# device = "cuda" if torch.cuda.is_available() else "cpu"
# if device == "cuda":
#     torch.cuda.set_device(rank % torch.cuda.device_count())
#
# mesh = init_device_mesh(device, (1, ranks), mesh_dim_names=("replicate", "shard"))
# low = torch.bfloat16 if device == "cuda" else None
# options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}
#
# config = PRESETS["small"]
# model = GPT(config).to(device)
# for layer in model.layers.values():
#     fully_shard(layer, **options)
# fully_shard(model, **options)
#
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# batches = Batches(corpus().tokens, 16, config.context)
# for step in range(10):
#     x, y = (part.chunk(ranks)[rank].to(device) for part in batches[step])
#     loss = model(x, y)
#     loss.backward()
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#     mean = loss.detach().clone()
#     dist.all_reduce(mean)
#     if rank == 0:
#         print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```
#
# ## Optional: differences between PyTorch's `fully_shard` and ours
#
# | | PyTorch's | ours | why |
# |---|---|---|---|
# | a list of modules as one group | yes | yes | norm and head are gathered together |
# | `ignored_params`, `register_fsdp_forward_method` | yes | yes | a method such as `generate` is not forward |
# | `set_gradient_divide_factor` | yes | yes | a loss that is a sum needs no mean |
# | `set_is_last_backward` | yes | changes nothing | each of our backwards waits for its gradients |
# | `shard_placement_fn` | yes | no | ours cuts only the first dim, so that pieces are contiguous |
# | parameters that are DTensors already | yes | refused | `labs.parallel` combines FSDP with tensor parallelism |
# | `set_requires_all_reduce(False)` | yes | no | `set_requires_gradient_sync(False)` saves both collectives |
# | tensors with a gather of their own, as for float8 | yes | refused | their hooks would be ignored |
# | `torch.func` transforms | yes | refused | they do not call the hooks that gather |
# | `torch.save`, DCP | yes | refused | they do not know our DTensor: `labs.checkpoint` saves it |
# | shards changed after an evaluation | may be missed | noticed | a checkpoint is often loaded there |
# | `backward(inputs=shards)`, `autograd.grad` | no gradient, no error | refused | nothing would be trained |
# | writes between `unshard()` and `reshard()` | lost | refused | they change a tensor that is dropped |
# | `model.zero_grad()` after a forward | may miss the root's shards | finds them | many loops call it there |
# | `create_graph=True` | a second backward fails | refused | it would read dropped tensors |
#
# **Read on**: [labs/fsdp/module_events.py](../labs/fsdp/module_events.py), whose head has a table that compares it with
# stage 3, event by event; then [labs/fsdp/parameter_group.py](../labs/fsdp/parameter_group.py) and
# [labs/fsdp/sharded_parameter.py](../labs/fsdp/sharded_parameter.py). Zhao et al., 2023, *PyTorch FSDP: Experiences on
# Scaling Fully Sharded Data Parallel* (arXiv 2304.11277), describe FSDP1. PyTorch's tutorial is *Getting Started with
# Fully Sharded Data Parallel (FSDP2)*.
#
# **Next.** P, G and S are now divided by the number of ranks, but the activations have not become smaller. [07
# Memory](07_memory.ipynb) counts the activations, and recomputes them to save memory.
#
# To get a clean copy of this notebook, run `git restore notebooks/06_fsdp.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
