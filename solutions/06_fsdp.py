# %% [markdown]
# # FSDP: stage 3, one parameter at a time
#
# *Stage 3 waits for every layer that it gathers, and its optimizer no longer knows which parameter is which. PyTorch's
# FSDP does the same arithmetic and has neither problem. What does it do differently?*
#
# You need: [ZeRO](04_zero.ipynb), whose stage 3 this continues, and [Mesh and DTensor](05_mesh_and_dtensor.ipynb), for
# the grid of ranks and a tensor that knows how it is cut.
# **Minutes**, by estimate: 40 without exercises, 75 with them, 10 more for optional parts, 35 more for the challenge.
# The machine works for about a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("06")

# %% [markdown]
# ## Question
#
# In notebook 04 a layer was one flat vector, cut into N equal shards. That kept stage 3 short. But look at what its
# optimizer is given:

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
    """What stage 3 hands to its optimizer."""
    return [tuple(shard.shape) for shard in Zero(GPT(CONFIG), 3, adamw).shards]


print(f"a layer of 9 tensors is {on_cpu(vectors, ranks=4)[0][1]}")

# %% [markdown]
# It is one vector, a quarter of nine tensors, cut wherever a quarter ends. So:
#
# - an optimizer cannot treat a norm's scale differently from a matrix (weight decay for matrices only, say);
# - a frozen parameter cannot share a vector with a trained one, since a tensor has one `requires_grad`;
# - a state dict must be put together by hand, since nothing in the shards has a name.
#
# FSDP1 (FairScale in 2021, PyTorch 1.11 in 2022) had vectors like this one, and these problems; its
# `use_orig_params=True` later hid some of them. **FSDP2** (`fully_shard`, 2024) cuts each parameter separately.
#
# ## Picture
#
# ![Two parameters on two ranks. Each rank holds some rows of each, under the parameter's own name. It lays its pieces
# side by side, padded with zeros to the same length; one all-gather makes a table of them, a row for each rank; and
# columns of this table are copied to the full weight and the full bias.](../images/fsdp_table.svg)
#
# A shard is now some *rows* of a parameter. What travels is still one message for a whole layer. The price: what
# arrives lies rank by rank, so it must be copied once more to become whole tensors; and each parameter has its own
# padding.
#
# ## Build: parameter by parameter
#
# `fully_shard(module)` makes one *group* of all parameters in `module` that no earlier call has taken. So call it on
# each layer first, and on the model last: that call takes the rest, the *root* (embedding, last norm and head). A group
# is gathered by one collective, and dropped as a whole.
#
# Five rows on four ranks: whose are they? PyTorch's answer, and so ours, is `chunk`: pieces of ⌈5/4⌉ rows, for as long
# as there are rows left.

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
# The last rank has none of it. An empty shard is legal: this rank joins every collective and brings only padding. The
# parameter in the module is now a `DTensor` of shape [5, 3] with the placement `Shard(0)`, and `layer.weight` is still
# its name.
#
# ### Exercise 1: unshard and reshard (10 minutes)
#
# Fill the parameters of one group from everybody's shards, with **one** collective. `shards` are plain tensors: this
# rank's rows of each parameter. `fulls` are tensors whose storage is empty (notebook 04: `untyped_storage().resize_`).
# They may be bfloat16 while the shards are float32; then bfloat16 travels. Use `all_gather(vector, part)` of notebook
# 04; with N ranks a piece of `full` has `-(-len(full) // N)` rows (that is, rounded up).
#
# The check looks at every number, on 2 to 4 ranks; at the storages (each has `full.nbytes` bytes, and later none) and
# the shards, which must stay as they were; at the traffic: (N − 1)/N of the group, in one collective, and no barrier;
# and at the memory: 2.75 × the group at most, and nothing after `reshard`. That is the table, the full tensors, and
# room for this rank's own rows and for a copy of one parameter, but not for a third copy of the group.

# %%
from labs.group import all_gather, reduce_scatter


def unshard(shards, fulls):
    """Fill each of `fulls` from everybody's shards; its storage, which is empty, gets its bytes
    again.

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
    """Give the memory of each of `fulls` back."""
    ### BEGIN SOLUTION
    for full in fulls:
        full.untyped_storage().resize_(0)
    ### END SOLUTION


unsharded = check.unshard_and_reshard(unshard, reshard)
unsharded

# %% [markdown]
# (In [labs/fsdp/parameter_group.py](../labs/fsdp/parameter_group.py) these are three methods of `ParameterGroup`:
# `gather`, `arrive` and `drop`. In what follows, a gather is started at one moment, and waited for at another.)
#
# ## Build: before it is needed
#
# In notebook 04's timeline (*Measure: time*) each rank waited for each gather. Here is that job once more: six layers
# that only pretend to compute, 5 ms in forward and 10 ms in backward. The layers are smaller, so that copying them
# takes little time, and the wire is one between two nodes. Now a gather takes at least as long as the
# [link](../labs/kit/ranks/link.py) says; a busy machine only adds to that.

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
    """A few steps; prepare(layers) -> model, and what to call between backward and the next
    forward."""
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
    """How long rank 0 waited in a step, in ms."""
    return 1000 * sum(event.waited for event in recording.select(0, number))


def took(recording, number):
    """How long a step of rank 0 took, in ms."""
    start, end = recording.window(0, number)
    return 1000 * (end - start)


def quickest(recording):
    """Whatever else runs on this machine can only add."""
    return min(range(1, recording.steps), key=partial(took, recording))


# %%
timed = partial(on_cpu, pretend, ranks=2, record="communication", link=wire)
in_turns = timed(stage_3).recording
best = quickest(in_turns)
taken, idle = (f"{of(in_turns, best):.0f} ms" for of in (took, waited))
print(f"stage 3: a step took {taken}, and in it rank 0 waited {idle}")

# %% [markdown]
# While a layer computes, the wire is idle. It could carry the next layer:
#
# ![Forward of four layers. Above, each gather starts when its layer is needed: gathers and layers take turns, and one
# layer is held at a time. Below, the gather of layer 2 is under way while layer 1 computes, and so on: only the first
# gather is waited for, and two layers are held at a time.](../images/fsdp_prefetch.svg)
#
# ### Exercise 2: prefetch, by hooks (15 minutes)
#
# `model` is an `nn.Sequential`. `fully_shard` has put hooks on each layer: they gather it when its forward or its
# backward begins, wait, and drop it afterwards, the last layer too; nothing is gathered ahead. Add hooks of your own,
# which return None: while a layer computes, the gather of the next one is already on its way, in forward and in
# backward. Backward reaches every layer, the frozen one too, which needs its weights for that.
#
# `layer.unshard(async_op=True)` starts a layer's gather and returns at once. If the layer is here, or on its way, it
# does nothing. PyTorch's FSDP2 has it, too. Waiting and dropping stay with `fully_shard`.
#
# The check trains, evaluates without gradients, and trains again, on models of one to six layers; one has a frozen
# layer, and in some a layer comes twice, though not twice in a row. The numbers must stay as they are. A rank may wait
# for the whole of two gathers only: the first of forward, and the first of backward. Gathers begin in the order in
# which layers are used; none is in vain; and there are never more than **two** layers here or on their way.
#
# <details><summary>Which hooks?</summary><code>module.register_forward_pre_hook(hook)</code> calls
# <code>hook(module, arguments)</code> as a forward begins, and
# <code>module.register_full_backward_pre_hook(hook)</code> calls <code>hook(module, gradients)</code> as a backward
# begins. What a hook returns takes the place of what it was given, unless it is None.</details>
#
# <details><summary>And if a layer comes twice?</summary>Then it is no use to ask a layer what comes next. But a step
# has one order of uses, there and back. Who could note where in it the model is, and when does it begin
# anew?</details>
#
# <details><summary>What comes first, as backward begins?</summary>Your hook on the last layer is called before
# <code>fully_shard</code>'s. If it starts only the gather of the layer before, that one is on the wire first, and the
# last layer waits for both. What could your hook start before it?</details>


# %%
def prefetching(model):
    """Add hooks: while a layer computes, the next one is on its way, there and back."""
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
# A real model is no list: its forward is any Python code. How does `fully_shard` know what comes next? Ours remembers
# the order of the last forward ([labs/fsdp/order.py](../labs/fsdp/order.py)). PyTorch's needs no such memory in
# forward: on a GPU, Python runs ahead of the device, and issues the next gather on a *stream* of its own (a queue of
# work; two streams run side by side). In backward both follow this step's forward order in reverse. The
# reduce-scatters overlap, too: layer 4's gradients travel while layer 3 computes its own.
#
# You may also tell `fully_shard` what to gather ahead. Here is the same job with your hooks, and with no layer, one,
# two and all five others gathered ahead. Here the last layer stays gathered after its forward, since backward begins
# with it; in the exercise it was dropped.


# %%
def ahead(number, layers):
    """fully_shard, with `number` layers gathered before they are needed."""
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
    """Gathered ahead by your hooks, if they passed; else one layer ahead by fully_shard's."""
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
# For each job, the figure shows rank 0's quickest step. The numbers in the boxes count a rank's all-gathers (ag) and
# reduce-scatters (rs) within the step; where there is no room, the number is left out. The narrow phase at the end is
# the optimizer's. In numbers, which say little while something else keeps this machine busy:

# %%
jobs = {"stage 3": in_turns, "your hooks, if they passed": hooks}
jobs |= {f"fully_shard, {n} ahead": talk[n] for n in AHEAD}
rows = []
for name, each in jobs.items():
    times = [f"{of(each, quickest(each)):.0f} ms" for of in (took, waited)]
    rows.append({"": name, "the step took, and in it rank 0 waited": ", ".join(times)})
draw.table(rows)

# %% [markdown]
# With none ahead, the gradients of a layer travel while the one before it computes, but every gather begins only when
# its layer is needed. One layer ahead, a gather has as long as a layer computes: the wire needs 3 ms for it, and a
# layer computes for 5 ms or more. What must remain is the first gather and the last reduce-scatter: while they travel,
# this rank has nothing to compute. The ranks wait for each other, too, and longer on a busy machine. A second layer
# ahead can help only where a gather is on its way for longer than a layer computes. And what does it cost? Move the
# slider, and look at the memory below the timeline. (There, all phases are drawn equally wide.)

# %%
play.prefetch(talk, held, steps, begin=2)


# %%
def in_flight(recording, phase):
    """The most that rank 0 holds of gathered layers and of gradients in flight, in a steady
    step, counted in layers."""
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
# Forward needs room for two layers even with none ahead: as a layer arrives, it is there twice for a moment, in the
# table and in full. With one ahead, the next layer takes the second place. Each further layer ahead adds one more, and
# with five the whole model is there: just what stage 3 was meant to avoid. In backward there are gradients as well: the
# layer's own, and those of the one before, both as they are sent and as they arrive.
#
# ## Build: over two axes
#
# With 512 ranks, every gather is a ring of 512 ranks, most of which are on other nodes. **Hybrid sharding** (HSDP) cuts
# over the ranks of one node only, and keeps a copy on each node: notebook 05's grid of *replicas* × *shards*.
# Parameters are gathered along `shard`. But a gradient is to be the mean over *all* ranks, since each has read its own
# part of the batch.
#
# ### Exercise 3: the gradient of HSDP (10 minutes)
#
# You get this rank's whole gradient. Return its piece of the mean over both axes. `mesh.get_group("shard")` is the
# group of an axis, `mesh.size("shard")` how many ranks it has; `reduce_scatter(vector, group)` is notebook 04's. Keep
# the dtype, and return a tensor with its own memory: not a view, and not a buffer that the next call writes into.
#
# The check tries grids of up to 6 ranks, also n × 1 and 1 × n with n up to 4, in three dtypes. In bfloat16 you may
# divide between the axes, or at the end. All replicas must get the same bits. Budget for each rank: the bytes of a
# reduce-scatter along `shard` and of an all-reduce of a piece along `replicate` (on 2 × 2 ranks 1.00 × the gradient,
# half of it along `replicate`); and hold at most 2.75 × the gradient, the given one included.


# %%
def hsdp_gradient(gradient, mesh):
    """This rank's piece of the mean gradient over all ranks: [n] -> [n / shards].

    mesh: R replicas × S shards, of the axes "replicate" and "shard"; S divides n.  The gradient
    stays as it is.
    No rank sends more than (S - 1) / S n numbers along "shard", and 2 (R - 1) / R n / S along
    "replicate".
    """
    ### BEGIN SOLUTION
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()
    ### END SOLUTION


check.hsdp_gradient(hsdp_gradient)

# %% [markdown]
# ### A bug from the field
#
# > **What went wrong in the wild.** *Symptom*: training runs without an error, with only a `UserWarning`, and yet the
# > ranks' parameters differ. Somebody had asked for `HYBRID_SHARD` on a mesh of n × 1. FSDP1 switched to `NO_SHARD`,
# > and gradients were no longer synchronized between the replicas
# > ([pytorch#154888](https://github.com/pytorch/pytorch/issues/154888), June 2025; when `NO_SHARD` itself was
# > requested, the ranks agreed). In August 2026 the same was reported from production
# > ([verl#7493](https://github.com/verl-project/verl/issues/7493)).
#
# Here is what happened, in miniature: two replicas, *one* shard, and the gradient averaged along `shard` only.


# %%
def two_replicas(average, steps=5):
    """Parameters after a few steps, and whether this rank's loss has fallen."""
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
# The loss falls on both ranks, so nothing looks wrong: the gradient was averaged over the shard group, which is one
# rank. Your function of exercise 3 was tried on n × 1, too. Whatever you use, compare a parameter between replicas
# once, after a few steps. And compare them before the first step: our `fully_shard` does, PyTorch's does not.
#
# ## Build: all of it
#
# Now the whole GPT, each layer a group. `train` is notebook 04's.


# %%
def float32():
    return GPT(CONFIG)


def fully(shape, parts, model, reshard=True, **options):
    """The training of a model: each of parts(model) is its own group, and the model is the
    group for the rest."""
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
    """This rank's losses, and the parameters after the last step if they are to be kept."""
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
# Can your functions of exercise 1 train it? If they passed, they replace the course's in this job. Nothing is then
# gathered ahead, since your `unshard` waits.

# %%
from labs.kit.train import unshard_with


def yours(model):
    """FSDP, gathered and dropped by the functions of exercise 1, if they passed."""
    if unsharded:
        unshard_with(unshard, reshard)
    return FSDP(model)


mine, courses = job(yours), job(FSDP)
assert [losses for losses, _ in mine] == [losses for losses, _ in courses]
print("with exercise 1, if it passed, in the course's place: the same losses, to the last bit")

# %% [markdown]
# ## Measure: numbers
#
# The test of notebooks 03 and 04, in float64: four ranks against one process that takes their parts one after the
# other. FSDP1 had names for four settings. In FSDP2 they are a mesh and `reshard_after_forward`:

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
    """The training of a model as the table's row of this name sets it up."""
    return strategies.set_up(strategies.ROWS[name], model)[0]


def all_of(apply, names):
    """The parameters that each of them gives."""
    return {name: train(partial(apply, name), float64, keep=True)[1] for name in names}


alone = partial(as_in_the_table, "one device")
[(_, expected)] = on_cpu(train, alone, float64, micro_batches=4, keep=True, ranks=1)


# %%
def as_alone(parameters):
    """Whether they are those of one process, to within 1e-12."""
    return all((p - expected[key]).abs().max() < 1e-12 for key, p in parameters.items())


found = on_four(all_of, setting, list(SETTINGS))[0]
rows = [{"": name, "within 1e-12 of one process": as_alone(found[name])} for name in SETTINGS]
draw.table(rows)

# %% [markdown]
# ## Measure: bytes
#
# What does each setting send, and what does it hold? With S shards and R replicas, for a group of n bytes: each gather
# sends (S − 1)/S n, the reduce-scatter the same, and the all-reduce between replicas 2 (R − 1)/R n/S. A layer is
# gathered twice where it is resharded after forward; the root is gathered once in any case, since it stays there from
# forward to backward. [labs/cost/fully_sharded.py](../labs/cost/fully_sharded.py) adds this up, and computes what is
# held. Where bytes sent are called *measured*, they are worked out from the sizes of the calls, as in notebook 02.
# Stage 3 of notebook 04 stands beside the four. `NO_SHARD` is a mesh of four replicas and one shard: every rank has
# all.
#
# In backward, with one layer ahead, five layers' worth were in flight above. Stage 3 of notebook 04 held three: the
# layer, its gradient, and the buffer in which the others' parts of that gradient arrive. The two more are the price of
# overlap. Is that so in a GPT?


# %%
def in_turn(ways, micro_batches):
    """Two steps of each, one after the other."""
    for apply in ways.values():
        train(apply, steps=2, micro_batches=micro_batches)


def ledgers(ways, micro_batches=1):
    """For each: what rank 0 sends in its second step, in how many collectives, and what it
    holds in a steady one."""
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
    """What the formula says and what was measured, in bytes."""
    formula = predicted[name]
    said = formula.sent if kind == "sent" else getattr(formula.held, kind)
    return said, ours[name][kind]


exact = [beside(name, kind) for name in ours for kind in ("sent", "P", "G", "S", "comm")]
assert all(said == measured for said, measured in exact)
print(f"{len(exact)} figures by the formula, {len(exact)} measured: the same, to the byte")

# %% [markdown]
# Now as bars. P, G and S, which are notebook 04's letters, are held at rest. `comm` is what a rank holds for the sake
# of communication: layers that are gathered, and gradients on their way. The mark above a bar is what the rank sends in
# a step.


# %%
def bars(found):
    """What rank 0 holds; and as a mark, what it sends in a step."""
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
# ![Backward, while layer 3 computes. Held are: layer 3; its gradient; layer 2, which is on its way; and the gradient of
# layer 4 twice, as it is sent and as it arrives. Five layers' worth.](../images/fsdp_flight.svg)
#
# In the bars, begin with what you know:
#
# - `NO_SHARD` sends what DDP sends, in five all-reduces, one for each group. It is no substitute for DDP: it holds a
#   second copy of the parameters, since each group is still copied from its "shard" into full tensors: see `comm`,
#   whose other third is gradients on their way, of two layers and the head.
# - `SHARD_GRAD_OP` sends just as little, and holds a quarter of P, G and S; its price is in `comm`: from forward to
#   backward the whole model is there. It is not ZeRO's stage 2, which holds P whole at rest. Llama 3 was trained this
#   way (arXiv 2407.21783, section 3.3.2). If every rank has the whole model anyway, why shard,
#   [a reader asked](https://github.com/meta-llama/llama3/issues/303). Because G and S, which are three quarters of P, G
#   and S here, stay sharded: no rank ever has all of them.
# - `FULL_SHARD` sends nearly 1.5 times as much. In backward five layers are in flight, as in the picture, and the root.
#   That is two layers and the root more than stage 3 holds: the price of overlap.
# - `HYBRID_SHARD` holds twice as much of P, G and S as `FULL_SHARD`. The optional part measures where it
#   pays.
#
# Our model has four layers, so five in flight are more than the whole model. In a deeper one they are a small part:


# %%
def in_comm(depth):
    """`comm` of FULL_SHARD as a part of a model with this many layers, by the formula."""
    config = replace(CONFIG, depth=depth)
    held = cost.fsdp(cost.Job(config, batch=1, ranks=4)).held
    return held.comm / (4 * sum(cost.parameter_sizes(config)))


print("comm: " + ", ".join(f"{in_comm(depth):.0%} of {depth} layers" for depth in (4, 16, 80)))

# %% [markdown]
# ## Measure: how large is a group?
#
# `FULL_SHARD` by itself says little: what counts is which modules you call `fully_shard` on. Three ways: on the model
# alone; on each layer; and by size, on each attention and each MLP, since these have more than 30,000 parameters.
#
# Predict again. On the model alone, all of it is gathered at once, and all of its gradients are reduced at once. The
# parameters are dropped before the gradients are exchanged. How many times the model's size is in flight, at most?

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
# P, G and S are the same in all three: *at rest* they are equally sharded. With the root only, nothing can overlap. The
# model is in flight twice, and not three times: when gradients are sent, they have been copied into the message, and
# what backward made is freed. It even sends less, since a single group is gathered once, as under `SHARD_GRAD_OP`; so
# neither what is sent nor what is held at rest gives it away. PyTorch's docstring warns: "Users generally should *not*
# call `fully_shard` only on the topmost root module." Small groups have low peaks and many short messages. PyTorch's
# tutorial makes each layer of a transformer a group, and so does this course.

# %% [markdown]
# ## Why, and why not
#
# **Why**: it trains a model that does not fit, at stage 3's price in bytes. With prefetch it costs hardly any time, as
# long as a layer's compute is longer than its gather: more than R/W tokens at once, as in notebook 04, with R the
# operations of a device per second and W the bytes of its wire. And the parameters keep their names, so optimizers,
# checkpoints and whatever else surrounds the model hardly have to know that it is sharded. Compared with FSDP1,
# [torchtitan's notes](https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md) report, for Llama-7B on 8 H100s, a
# higher MFU (the share of the GPUs' speed that is used), 7% lower peak memory, and the same loss curve.
#
# **Why not**: with micro-batches of few tokens nothing hides the gathers. With many ranks each gather has many steps of
# latency: then take HSDP, or fewer data-parallel ranks and another axis. If ranks take different paths through the
# model (different experts, say), collectives of different layers are matched with each other; PyTorch's does not notice
# when these have the same size (ours compares the order, and says so). And it does nothing about activations.

# %% [markdown]
# ## Say it back
#
# From memory: how much of the parameters does a rank hold between forward and backward, and how much does
# it send in a step, both as a multiple of the model? Leave out the root, which is gathered once instead of twice.
# `FULL_SHARD` and `SHARD_GRAD_OP` have `shards` ranks, `HYBRID_SHARD` has `shards` × `replicas`.


# %%
def held_and_sent(shards, replicas):
    """{"FULL_SHARD": (held, sent), "SHARD_GRAD_OP": (held, sent), "HYBRID_SHARD": (held,
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
# Answer each aloud before you unfold it.
#
# <details><summary>What does sharding by parameter cost against one flat vector, and what does it give?</summary>
#
# Padding for each parameter, and a copy out of what was gathered. It gives each parameter its name and its own place in
# the optimizer and in the state dict, and lets frozen and trained ones share a gather. There are no more messages than
# before.
# </details>
#
# <details><summary>When must the gather of layer 3 start, in forward and in backward, and how many layers are then
# held?</summary>
#
# In forward when layer 2 begins, in backward when layer 4 begins; two layers are then held. The gradients of layer 4
# are reduced while layer 3 computes its own.
# </details>
#
# <details><summary>Two nodes of eight ranks each. Which axis of the mesh comes last, what crosses the wire, and what
# does it cost in memory?</summary>
#
# `shard`: a node's eight ranks have consecutive numbers. Gradients cross, an eighth of them from each rank, but no
# parameters. P, G and S are divided by eight, not by sixteen.
# </details>
#
# For n bytes of parameters on S shards × R replicas, per rank and step, AdamW in float32:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | `FULL_SHARD`: sent | 3 (S − 1)/S n, less one gather of the root | as predicted | as predicted |
# | `SHARD_GRAD_OP`: sent | 2 (S − 1)/S n | as predicted | as predicted |
# | `HYBRID_SHARD`: sent | `FULL_SHARD`'s on S, and 2 (R − 1)/R n/S | as predicted | as predicted |
# | `NO_SHARD`: sent | 2 (R − 1)/R n | as predicted | DDP |
# | P, G, S | 4n/S together | as predicted | as predicted |
# | numbers | one process's | within 1e-12, in float64 | within 1e-12, in float64 |
#
# The optional part measures the last column.

# %% [markdown]
# ## Beat it: gathered in time, within a budget (30 minutes)
#
# Here it is open. A step is a list of instructions: `("gather", 3)`, `("forward", 3)`, `("drop", 3)`, `("backward",
# 3)`, each with the number of a layer. A gather returns at once, and its layer counts as held from then until it is
# dropped. A forward and a backward wait for their layer. Each backward puts its reduce-scatter on the wire by itself,
# and its gradient is held until that is over. The wire carries one message at a time, and each takes latency + bytes/W.
# A layer that stays after its forward need not be gathered again, but it takes room in which others could be here
# early. `measured(instructions, given)` says how long a step takes, and how many bytes it holds at the most.
#
# **The bound.** The computing lies between the first gather and the last reduce-scatter. And the wire must carry each
# layer's gather and reduce-scatter, and once more every byte that cannot stay from forward to backward: at most the
# budget less the last layer's gradient can. No step is shorter than the longer of the two: that is 100 points, in each
# of five models. To gather each layer when it is needed, and drop it after each use, scores 49.6 in their mean.
# A score is 100 × bound / time.
#
# Both ranks call your function, and must get the same list: fix the seed of a search, and do not end it by the clock.
# The check ends after 120 s of the processor. The ranks obey your lists for real, and the gradients must be one
# process's.

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
    """Each layer is gathered so many uses ahead; so many of the last ones stay for backward."""
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
    """The instructions of a step, forward and backward: [("gather", 0), ("forward", 0), …].

    By layer, the first is number 0: bytes of it, s of its forward and of its backward.
    At no moment more than `budget` bytes are held, and none at the end.
    measured(instructions, (nbytes, forward, …)) -> (s, most bytes held).  You may search, for
    up to ten seconds a call.
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
# The course treats all layers alike: so many gathered ahead, and so many of the last ones kept.
#
# <details><summary>Where is there room?</summary>
#
# In which layers stay. A byte saves the same on the wire in any layer, but a late layer holds its byte for a shorter
# time, and a small layer saves a latency for few bytes. And in how far ahead: what comes before a large layer can hide
# more than one gather.
# </details>
#
# Here the notebook ends. **What follows is optional**: PyTorch's `fully_shard` beside ours, its knobs, hybrid sharding
# on two nodes, the names of FSDP1, and a script. Then comes what to read, and what is next.
#
# ## Optional: PyTorch's own
#
# All these names are PyTorch's, so the same lines work with its own mesh. First the numbers, then the same ledgers.
# (For `NO_SHARD` you would take DDP.)

# %%
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh


def torchs(name, model):
    """A setting of PyTorch's fully_shard."""
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
    """Bytes as a multiple of the model's, in float32; words as they are."""
    return value if isinstance(value, str) else round(value / whole, 2)


def table(found):
    """The ledgers, in multiples of the model."""
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
# The bytes sent, the number of collectives, P, G and S are the same. PyTorch's has about a layer less in flight: it
# reduces from one buffer, whereas our all-to-all has two. Without resharding, what it holds depends on PyTorch's
# version: from 2.15 on one buffer is freed earlier.
#
# ## Optional: the knobs
#
# **Mixed precision** is a policy: shards in float32 (so the optimizer has its masters), gathers in bfloat16, gradients
# reduced in float32. A parameter then takes (4 + 4 + 8)/N bytes at rest; on the wire it takes 2 in a gather, and its
# gradient 4 in a reduce-scatter.

# %%
from labs.fsdp import MixedPrecisionPolicy

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# %%
low = ledgers({"bfloat16": partial(setting, "FULL_SHARD", mp_policy=bf16)})["bfloat16"]
assert low["sent"] == cost.fsdp(on_paper, itemsize=2).sent
assert all(low[kind] == ours["FULL_SHARD"][kind] for kind in "PGS")
table({"float32": ours["FULL_SHARD"], "bfloat16": low})

# %% [markdown]
# **float16** needs a scaled loss as well, since small gradients would otherwise become zero. An overflow is seen only
# by the rank that has that shard, but all ranks must skip the step: `LossScale` in
# [labs/memory/precision.py](../labs/memory/precision.py) asks every rank.
#
# A *sum* of float16 gradients has less room still: float16 ends at 65,504, and 40,000 from each of two ranks is more,
# though their mean is not. So a part of the division comes before the sum: on N ranks by about √N, on two ranks by 2.
# That has its own price at the other end of the range. Two gradients, each in both dtypes:


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
# In float16 the large gradient arrives, and the small one has become 0: half of 6e-8 is less than float16 has.
# PyTorch's `fully_shard` makes the same choice. bfloat16 has float32's range, so that both arrive.
#
# **Accumulation.** Each micro-batch reduces its gradients, unless `set_requires_gradient_sync(False)` says not to. Then
# whole gradients stay on each rank until the last one. With two micro-batches:


# %%
def last_only(model):
    """Gradients are reduced only in the last micro-batch."""
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
# The first of two reduce-scatters of each group is gone, and whole gradients are held, which count as `comm`. The
# gathers stay: they have nothing to do with gradients. To keep P gathered as well, set `reshard_after_forward=False`
# and call `set_reshard_after_backward(False)`.
#
# **CPU offload** keeps shards, their gradients and the optimizer's state in the CPU's memory: `CPUOffloadPolicy()`.
# Each gather then begins with a copy to the device, and the step itself runs on the CPU. Our device *is* the CPU, so
# there is nothing to measure here; [Offload](07b_offload.ipynb) does it with a slower kind of memory.
#
# ## Optional: two nodes
#
# Four ranks, two nodes, and between them notebook 05's wire. The link's arithmetic says how long, at least, a step
# keeps the wire busy; both groups along an axis share the wire. Then come the real jobs:

# %%
slow = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)
LAYOUTS = {  # the groups of ranks along `shard`, and along `replicate`
    "FULL_SHARD": ([(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]),
    "HYBRID_SHARD": ([(0, 1), (2, 3)], [(0, 2), (1, 3)]),
}


def on_the_wire(shard, replicate):
    """Seconds that a step keeps the wire busy."""
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
# gradients. In both, a step takes longer than the wire is busy: the ranks also compute, and wait for each other. And
# with the mesh's axes in the other order? Notebook 05 measured that: what talks most goes last.
#
# Hybrid sharding wins where P, G and S of the model fit on the ranks of one node, and the wire between nodes is slower
# than the one inside. It loses in memory, since P, G and S are divided by the ranks of a node and not by all ranks; and
# where the wire is equally fast everywhere, there is little to win.
#
# ## Optional: from FSDP1 to FSDP2
#
# | FSDP1, `FullyShardedDataParallel` | FSDP2, `fully_shard` |
# |---|---|
# | `FSDP(model, auto_wrap_policy=...)` | a loop: `fully_shard(layer)` for each layer, then `fully_shard(model)` |
# | `transformer_auto_wrap_policy`, `size_based_auto_wrap_policy` | the condition in that loop |
# | `sharding_strategy=FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD`, `NO_SHARD` | a mesh of two axes, replicas first; the same with a single shard |
# | `MixedPrecision(param_dtype, reduce_dtype, ...)` | `MixedPrecisionPolicy(param_dtype, reduce_dtype, ...)` |
# | `CPUOffload(offload_params=True)` | `CPUOffloadPolicy()` |
# | `with model.no_sync():` | `model.set_requires_gradient_sync(False)` |
# | `backward_prefetch=BACKWARD_PRE` | by itself; or `set_modules_to_backward_prefetch` |
# | `forward_prefetch=True` | `set_modules_to_forward_prefetch` |
# | `limit_all_gathers=True` | nothing: it is not needed |
# | `ignored_states` | `ignored_params` |
# | `use_orig_params=True` | always |
# | `model.clip_grad_norm_(1.0)` | `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `param_init_fn` | build on `meta`, shard, `model.to_empty(device=...)`, then initialize |
# | `sync_module_states=True` | `set_model_state_dict` with `full_state_dict=True, broadcast_from_rank0=True` |
# | `FSDP.state_dict_type(model, ...)` | `model.state_dict()`, of DTensors |
# | `FSDP.summon_full_params(model)` | a parameter's `full_tensor()`, or a module's `unshard()` |
#
# (`set_model_state_dict` is in `torch.distributed.checkpoint.state_dict`; it takes these two as `StateDictOptions`.)
# `fully_shard` changes the model in place, so what it returns may be thrown away; and the optimizer must be made
# *after* it.
#
# ## Optional: a way out
#
# Here is PyTorch's `fully_shard` in an ordinary script, with nothing of the course but the data and the model. It is
# [scripts/fsdp.py](../scripts/fsdp.py). From the root of the repository, run
# `torchrun --nproc-per-node 4 scripts/fsdp.py`:
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
# ## What PyTorch's has, what ours has, and why
#
# | | PyTorch's | ours | why |
# |---|---|---|---|
# | a list of modules as one group | yes | yes | norm and head travel together |
# | `ignored_params`, `register_fsdp_forward_method` | yes | yes | `generate`, say, is no forward |
# | `set_gradient_divide_factor` | yes | yes | a loss that is a sum wants no mean |
# | `set_is_last_backward` | yes | changes nothing | each of our backwards waits for its gradients |
# | `shard_placement_fn` | yes | no | we cut along the first dim alone, where pieces are contiguous |
# | parameters that are DTensors already | yes | refused | `labs.parallel` puts FSDP on tensor parallelism |
# | `set_requires_all_reduce(False)` | yes | no | `set_requires_gradient_sync(False)` saves both collectives |
# | tensors with a gather of their own, as for float8 | yes | refused | their hooks would be ignored |
# | `torch.func` transforms | yes | refused | they see no gather |
# | `torch.save`, DCP | yes | refused | they do not know our DTensor: `labs.checkpoint` saves it |
# | shards written to after an evaluation | may be missed | seen | a checkpoint is often loaded there |
# | `backward(inputs=shards)`, `autograd.grad` | no gradient, no word | refused | nobody would train |
# | writes between `unshard()` and `reshard()` | dropped | refused | they go to what is dropped |
# | `model.zero_grad()` behind a forward | may miss the root's shards | finds them | many loops do it there |
# | `create_graph=True` | a second backward fails | refused | it would read what was dropped |
#
# **Read on**: [labs/fsdp/module_events.py](../labs/fsdp/module_events.py), whose head has a table of what became of
# stage 3, event by event; then [labs/fsdp/parameter_group.py](../labs/fsdp/parameter_group.py) and
# [labs/fsdp/sharded_parameter.py](../labs/fsdp/sharded_parameter.py). Zhao et al., 2023, *PyTorch FSDP: Experiences on
# Scaling Fully Sharded Data Parallel* (arXiv 2304.11277), which is about FSDP1. PyTorch's tutorial *Getting Started
# with Fully Sharded Data Parallel (FSDP2)*.
#
# **Next.** P, G and S are now divided by the number of ranks, but the activations are what they were.
# [07 Memory](07_memory.ipynb) counts them, and computes them again.
#
# A clean copy of this notebook: `git restore notebooks/06_fsdp.ipynb`, then *File > Reload Notebook from Disk*.
