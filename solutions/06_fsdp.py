# %% [markdown]
# # FSDP: stage 3, one parameter at a time
#
# *Stage 3 waits for every layer that it gathers, and its optimizer has lost the parameters' names. PyTorch's FSDP does
# the same sums without either. What does it do otherwise?*
#
# You need: [ZeRO](04_zero.ipynb), whose stage 3 this continues, and [Mesh and DTensor](05_mesh_and_dtensor.ipynb), for
# the grid of ranks and a tensor that knows how it is cut. It takes 80 minutes with its three exercises, 45 without; the
# machine works for about a minute of it, in 1 GB of memory.

# %% [markdown]
# ## Question
#
# In notebook 04 a layer was one flat vector, cut in N equal shards. That made stage 3 short. Now ask its optimizer what
# it is looking at:

# %%
import time
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from labs import cost
from labs.data import Batches, corpus
from labs.kit import check, draw, play, strategies
from labs.kit.launch import run
from labs.kit.record import mark

# %%
from labs.kit.strategies import ADAMW, Training, backward, step, trainable
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
# One vector, a quarter of nine tensors, cut wherever a quarter ends. So:
#
# - an optimizer cannot treat a norm's scale otherwise than a matrix (weight decay for matrices only, say);
# - a frozen parameter cannot share a vector with a trained one, nor bfloat16 with float32;
# - a state dict must be put together by hand, since nothing in the shards has a name.
#
# FSDP1, of 2021, had such vectors too, and these troubles. **FSDP2** (`fully_shard`, 2024) cuts each parameter by
# itself.
#
# ## Picture
#
# ![Two parameters on two ranks. Each rank holds some rows of each, under the parameter's own name. It lays its pieces
# side by side, padded with zeros to the same length; one all-gather makes a table of them, a row for each rank; and
# columns of this table are copied to the full weight and the full bias.](../images/fsdp_table.svg)
#
# A shard is now some *rows* of a parameter. But what travels is still one message for a whole layer. The price: what
# arrives lies rank by rank, so it must be copied once more to become whole tensors; and each parameter has padding of
# its own.
#
# ## Predict
#
# Our GPT has four layers. Each is a group, and what is left of the model (embedding, last norm, head) is a fifth, the
# *root*. The root stays gathered from forward to backward, since backward begins where forward ended; a layer does not.
# How many all-gathers are there in a step?

# %%
guess_gathers = 2 * 4 + 1  # your number

# %% [markdown]
# Two nodes with two ranks each, and between them a wire that is slow. *Hybrid* sharding cuts the parameters over the
# two ranks of a node, and keeps a copy on each node: only gradients cross the wire. How many times less crosses than
# when everything is cut over all four?

# %%
guess_less = 2.4  # your number

# %% [markdown]
# ## Build: parameter by parameter
#
# Five rows on four ranks: whose are they? PyTorch's answer, and so ours, is `chunk`: pieces of ⌈5/4⌉ rows, as long as
# there are any.

# %%
from labs.fsdp import fully_shard
from labs.mesh import Mesh


def pieces():
    torch.manual_seed(0)  # on every rank: fully_shard compares, and refuses replicas that differ
    weight = fully_shard(nn.Linear(3, 5), mesh=Mesh((dist.get_world_size(),), ("dp",))).weight
    return str(weight.placements), str(tuple(weight.shape)), str(tuple(weight.to_local().shape))


columns = ("placements", "shape", "of it here")
draw.table([{"rank": r} | dict(zip(columns, seen, strict=True)) for r, seen in enumerate(on_cpu(pieces, ranks=4))])

# %% [markdown]
# The last rank has nothing of it, and that must be as good as any other shard. The parameter in the module is now a
# `DTensor` of shape [5, 3] with the placement `Shard(0)`; it says of itself what is where. `layer.weight` is still its
# name.
#
# ### Exercise 1: unshard and reshard
#
# Fill the parameters of one group from everybody's shards, by **one** collective. `fulls` are tensors whose storage is
# empty (notebook 04: `untyped_storage().resize_`). They may be bfloat16 while the shards are float32; then bfloat16
# travels. Use `all_gather(vector, part)` of notebook 04; with N ranks a piece of `full` has `-(-len(full) // N)` rows.
# Budget: (N − 1)/N of the group, in one collective; nothing stays after `reshard`.

# %%
from labs.group import all_gather, reduce_scatter


def unshard(shards, fulls):
    """Fill each of `fulls` from everybody's shards; its storage, which is empty, gets its bytes again.

    shards: this rank's rows of each parameter, [rows, ...], fewer or none on the last ranks; perhaps of another dtype
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
# (In [labs/sharded.py](../labs/sharded.py) this is `ParameterGroup.gather`, `arrive` and `drop`. It is cut in three for
# the next step: to send for something and to wait for it are two things.)
#
# ## Build: before it is needed
#
# Notebook 04 ended with a comb: each rank stood and waited for each gather. Here are the same six layers that only
# pretend to compute, 5 ms in forward and 10 ms in backward. The wire is now one between two nodes, of 4 Gbit/s, so that
# a gather takes what the [link](../labs/kit/ranks/link.py) says, however busy your machine is:

# %%
from labs.kit.ranks.link import Link

wire = Link(nodes=2, bandwidth="4 Gbit/s")
a_layer = 4 * 1024 * 1024  # bytes
print(f"{1000 * wire.seconds('all_gather', a_layer / 2, ranks=2):.1f} ms for the gather of a layer, of two ranks")


def six_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    for layer in layers:
        layer.register_forward_hook(lambda *_: time.sleep(0.005))
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.01))
    return layers


# %%
def pretend(prepare, steps=8):
    """A few steps; prepare(layers) -> model, and what is to be called between backward and the next forward."""
    model, finish = prepare(six_layers())
    for _ in range(steps):
        dist.barrier()
        mark("step")
        mark("forward")
        loss = model(torch.ones(1, 1024, requires_grad=True)).sum()
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
    """How long rank 0 stood and waited in a step, in ms."""
    return 1000 * sum(event.waited for event in recording.select(0, number))


def quietest(recording):
    """The step in which it waited least: whatever else runs on this machine can only add."""
    return min(range(1, recording.steps), key=partial(waited, recording))


comb = on_cpu(pretend, stage_3, ranks=2, record="communication", link=wire).recording
print(f"stage 3: rank 0 waited {waited(comb, quietest(comb)):.0f} ms")

# %% [markdown]
# While a layer computes, the wire is idle. It could carry the next layer:
#
# ![Forward of four layers. Above, each gather is sent for when its layer is needed, and gathers and layers take turns.
# Below, the gather of layer 2 is under way while layer 1 computes, and so on: only the first gather is waited
# for.](../images/fsdp_prefetch.svg)
#
# ### Exercise 2: prefetch
#
# `layers` come in the order in which they are used. Each has `gather()`, which sends for its parameters and returns at
# once, `arrive()`, which waits until they are there, and `drop()`. Call `compute(layer)` for each, when it is there.
# Budget: the gather of every layer but the first is under way while the one before it computes; never more than **two**
# layers are here or on their way.


# %%
def prefetched(layers, compute):
    """Compute all layers, in this order, each when its parameters are there; none is held at the end.

    The list stays as it is.
    """
    ### BEGIN SOLUTION
    layers[0].gather()
    for layer, following in zip_longest(layers, layers[1:]):
        layer.arrive()
        if following:
            following.gather()
        compute(layer)
        layer.drop()
    ### END SOLUTION


check.prefetch(prefetched)

# %% [markdown]
# A real model does not hand over such a list: its forward is any Python code. How does `fully_shard` know what comes
# next? It has seen the step before: [labs/prefetch.py](../labs/prefetch.py) remembers the order, and backward takes it
# from the end. The reduce-scatters overlap too: each travels while the layer before it computes its gradient.
#
# You may set what is sent for yourself. So here is the same job with 0, 1, 2 and all six layers ahead:


# %%
def ahead(number, layers):
    """fully_shard, with `number` layers sent for before they are needed."""
    mesh = Mesh((dist.get_world_size(),), ("dp",))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + number])
        layer.set_modules_to_backward_prefetch(layers[max(i - number, 0) : i][::-1])
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda: (optimizer.step(), optimizer.zero_grad())


AHEAD = (0, 1, 2, 5)
talk = {n: on_cpu(pretend, partial(ahead, n), ranks=2, record="communication", link=wire).recording for n in AHEAD}
held = {n: on_cpu(pretend, partial(ahead, n), 3, ranks=2, record="memory").recording for n in AHEAD}

# %%
draw.timeline(comb, talk[1], step=2, names=("stage 3", "one layer ahead"))

# %%
rows = {"stage 3": comb} | {f"fully_shard, {n} ahead": talk[n] for n in AHEAD}
draw.table([{"": name, "rank 0 waited": f"{waited(each, quietest(each)):.0f} ms"} for name, each in rows.items()])

# %% [markdown]
# With one layer ahead hardly more than the first gather and the last reduce-scatter is waited for. (Each in its
# quietest step: whatever else your machine does comes on top.) A second one brings nothing here: a gather is shorter
# than a layer. And what does it cost? Move the slider, and look at the peak below:

# %%
play.prefetch(talk, held, step=2, begin=1)

# %%
peaks = {n: held[n].steady(rank=0)["peak"] for n in AHEAD}
assert peaks[0] < peaks[1] < peaks[2] < peaks[5]
more = {n: round((peaks[n] - peaks[0]) / a_layer, 1) for n in AHEAD}
draw.table([{"layers ahead": n, "peak, bytes": peaks[n], "more, in layers": more[n]} for n in AHEAD])

# %% [markdown]
# All layers ahead is the whole model at once: what stage 3 was there to avoid. (The peak is in backward, where
# gradients are held as well, so one more layer in flight is not always one more at the peak.)
#
# ## Build: over two axes
#
# With 512 ranks, each gather goes through 512 of them, most on other nodes. **Hybrid sharding** (HSDP) cuts over the
# ranks of a node alone, and copies over nodes: ranks as a grid of *replicas* × *shards*.

# %%
print(Mesh((2, 2), ("replicate", "shard"), rank=1))

# %% [markdown]
# Parameters are gathered along `shard`. But a gradient is to be the mean over *all* ranks, since each has read its own
# part of the batch.
#
# ### Exercise 3: the gradient of HSDP
#
# Given is this rank's whole gradient. Return its piece of the mean over both axes. `mesh.get_group("shard")` is the
# group of an axis, `mesh.size("shard")` how many ranks it has; `reduce_scatter(vector, group)` is notebook 04's. Budget
# on 2 × 2 ranks: 1.00 × the gradient, half of it along `replicate`.


# %%
def hsdp_gradient(gradient, mesh):
    """This rank's piece of the mean gradient over all ranks: [n] -> [n / shards].

    mesh: replicas × shards, of the axes "replicate" and "shard"; n divides by the size of the latter.  The gradient
    stays as it is.
    """
    ### BEGIN SOLUTION
    piece = reduce_scatter(gradient, mesh.get_group("shard"))
    dist.all_reduce(piece, group=mesh.get_group("replicate"))
    return piece / mesh.size()
    ### END SOLUTION


check.hsdp_gradient(hsdp_gradient)

# %% [markdown]
# ### A bug of the field
#
# The symptom: training runs, the loss goes down on every rank, no error, no warning that anybody reads. Yet the ranks'
# parameters differ. Somebody had asked for `HYBRID_SHARD` on a mesh of n × 1. Here is what happened, in small: two
# replicas, *one* shard, and the gradient averaged along `shard` only.


# %%
def two_replicas(average, steps=5):
    """Parameters after a few steps, and this rank's first and last loss."""
    mesh, w, losses = Mesh((2, 1), ("replicate", "shard")), torch.zeros(4, requires_grad=True), []
    x = torch.arange(4.0) + dist.get_rank()  # each rank has its own data
    for _ in range(steps):
        losses.append((x @ w - 1).square())
        losses[-1].backward()
        w.data -= 0.01 * average(w.grad, mesh)
        w.grad = None
    return w.tolist(), losses[0].item() > losses[-1].item()


def as_it_was(gradient, mesh):
    return reduce_scatter(gradient, mesh.get_group("shard")) / mesh.size("shard")


(one, falls), (other, falls_too) = on_cpu(two_replicas, as_it_was, ranks=2)
print(f"the loss falls on both ranks: {falls and falls_too}; they have the same parameters: {one == other}")

# %% [markdown]
# FSDP1 saw one shard, took `NO_SHARD` for `HYBRID_SHARD`, and went on averaging over the group of one rank
# ([pytorch#154888](https://github.com/pytorch/pytorch/issues/154888), June 2025; with DDP, and with `NO_SHARD` asked
# for outright, the ranks agreed). The check above tries n × 1, too. Whatever you use: compare a parameter between
# replicas once, after a few steps.
#
# ## Build: all of it
#
# The table at the head of [labs/fsdp.py](../labs/fsdp.py) says what became of stage 3:

# %%
import labs.fsdp

print(labs.fsdp.__doc__.split("vectors `zero` has:")[1].split("Names and")[0].strip("\n"))


# %%
def float32():
    return GPT(CONFIG)


def fully(shape, parts, model, reshard=True, **options):
    """The training of a model: parts(model) are groups of their own, and the model is one for the rest."""
    mesh = Mesh(shape, ("replicate", "shard")[-len(shape) :])
    for part in parts(model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = adamw(trainable(model))  # after fully_shard: the model's parameters are shards now
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


job = partial(on_cpu, train)
FSDP = partial(fully, (4,), by_layer)

# %% [markdown]
# Does your exercise 1 carry it? In this job your functions stand in the places of the course's (without prefetch, since
# your `unshard` waits):

# %%
from labs.sharded import ParameterGroup


def yours(model):
    """FSDP, gathered and dropped by the functions of exercise 1, where they passed."""

    def arrive(group):
        if group.arriving and not group.gathered:
            unshard([p.local for p in group.parameters], [p.full.data for p in group.parameters])
            group.gathered, group.arriving = True, None
            for p in group.parameters:
                p.versions.allow()

    def gather(group, smaller=None):
        group.taken, group.arriving = group.versions(), not group.gathered

    if unsharded:
        ParameterGroup.gather, ParameterGroup.arrive = gather, arrive
    return FSDP(model)


# %%
mine, courses = job(yours, ranks=4), job(FSDP, ranks=4)
assert [losses for losses, _ in mine] == [losses for losses, _ in courses]
print("exercise 1, if it passed, in the course's place: the same losses, to the last bit")

# %% [markdown]
# ## Measure: numbers
#
# The test of notebooks 03 and 04, in float64: four ranks against one process that takes their parts one after the
# other. FSDP1 had names for four settings that people still ask for. In FSDP2 they are a mesh and
# `reshard_after_forward`:

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


def all_of(names):
    return {name: train(partial(setting, name), float64, keep=True)[1] for name in names}


alone = partial(strategies.set_up, strategies.ROWS["one device"])
[(_, expected)] = on_cpu(train, lambda model: alone(model)[0], float64, micro_batches=4, keep=True, ranks=1)
trained = on_cpu(all_of, list(SETTINGS), ranks=4)[0]
off = {name: max((p - expected[key]).abs().max() for key, p in trained[name].items()) for name in SETTINGS}
draw.table([{"": name, "within 1e-12 of one process": bool(off[name] < 1e-12)} for name in SETTINGS])

# %% [markdown]
# ## Measure: the four strategies
#
# What each sends, and holds. The formula for what it sends is short. With S shards and R replicas, for a group of n
# bytes: each gather (S − 1)/S n, the reduce-scatter as much, the all-reduce between replicas 2 (R − 1)/R n/S.

# %%
layer, whole = 4 * sum(sizes[1:10]), 4 * sum(sizes)  # bytes, in float32


def on_paper(name):
    """What a rank sends in a step, and what it holds of P, G and S together, without counters."""
    (replicas, shards), reshard = SETTINGS[name]
    gathered = whole + (4 * layer if reshard else 0)  # the layers once more; the root only once
    reduced = 2 * (replicas - 1) / replicas * whole / shards
    return (gathered + whole) * (shards - 1) / shards + reduced, 4 * whole / shards


# %%
def in_turn(ways, micro_batches):
    """Three steps of each, one after the other."""
    for apply in ways.values():
        train(apply, micro_batches=micro_batches)


def ledgers(ways, micro_batches=1):
    """Of each: what rank 0 sends in its third step, in how many collectives, and what it holds in a steady one."""
    talk = on_cpu(in_turn, ways, micro_batches, ranks=4, record="communication", tell="all: sent").recording
    found = {}
    for number, (name, apply) in enumerate(ways.items()):
        sent = [event.sent for event in talk.select(rank=0, step=3 * number + 2) if event.sent]
        watched = job(apply, micro_batches=micro_batches, ranks=4, record="memory", tell=f"{name}: held").recording
        found[name] = {"sent": sum(sent), "collectives": len(sent)} | watched.steady(rank=0)
    return found


# %%
ours = ledgers({name: partial(setting, name) for name in SETTINGS})
counters = 4 * len(sizes)  # AdamW counts its steps, in 4 bytes for each parameter
for name, each in ours.items():
    assert (each["sent"], sum(each[kind] for kind in "PGS") - counters) == on_paper(name)

# %%
KINDS = ("sent", "collectives", "P", "G", "S", "comm", "peak")
draw.table([{"": name, **{kind: each[kind] for kind in KINDS}} for name, each in ours.items()], caption="bytes, rank 0")

# %%
check.predict("All-gathers in a step?", guess_gathers, ours["FULL_SHARD"]["collectives"] - 5, reason="And 5 reduces.")

# %% [markdown]
# Formula and measurement agree to the byte. In the table, begin with what you know:
#
# - `NO_SHARD` is DDP: everything held whole, one all-reduce. (One shard, so nothing is gathered.)
# - `SHARD_GRAD_OP` sends as little, and holds a quarter of P, G and S; its price is in `comm`: from forward to backward
#   the whole model is there. It is not ZeRO's stage 2, which holds P whole at rest.
# - `FULL_SHARD` sends half as much again, for a peak that does not have the whole model in it.
# - `HYBRID_SHARD` holds twice as much of P, G and S as `FULL_SHARD`. Whether it pays depends on the wire: see below.
#
# ## Measure: how large is a group?
#
# `FULL_SHARD` by itself says little: what counts is on which modules you call `fully_shard`. Three ways: on the model
# alone; on each layer; and by size, on each attention and MLP, as they have more than 30,000 parameters.


# %%
def by_size(model, least=30_000):
    parts = [part for layer in model.layers.values() for part in layer.children()]
    return [part for part in parts if sum(p.numel() for p in part.parameters()) >= least]


WRAPS = {"root only": lambda model: (), "by size": by_size}
wrapped = ledgers({name: partial(fully, (4,), parts) for name, parts in WRAPS.items()})
wrapped = {"root only": wrapped["root only"], "each layer": ours["FULL_SHARD"], "by size": wrapped["by size"]}
draw.table([{"": name, **{kind: each[kind] for kind in KINDS}} for name, each in wrapped.items()])

# %%
assert wrapped["root only"]["peak"] > wrapped["each layer"]["peak"] > wrapped["by size"]["peak"]
assert wrapped["root only"]["collectives"] < wrapped["each layer"]["collectives"] < wrapped["by size"]["collectives"]

# %% [markdown]
# P, G and S are the same in all three: *at rest* they are equally sharded. But with the root only, the whole model is
# gathered at once, and nothing can overlap: the commonest mistake with FSDP, and no number at rest tells of it. Small
# groups have low peaks and many short messages. A layer of a transformer is a good group, almost always.
#
# ## The knobs
#
# **Mixed precision** is a policy: shards in float32 (so the optimizer has its masters), what is gathered in bfloat16,
# gradients reduced in float32. Per parameter, at rest, 4 + 4 + 8 bytes over N; on the wire, 2 for a gather and 4 for a
# reduce.

# %%
from labs.sharded import MixedPrecisionPolicy

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
low = ledgers({"bfloat16": partial(setting, "FULL_SHARD", mp_policy=bf16)})["bfloat16"]
gathers, reduces = (whole + 4 * layer) * 3 / 4, whole * 3 / 4
assert low["sent"] == gathers / 2 + reduces
assert all(low[kind] == ours["FULL_SHARD"][kind] for kind in "PGS")
both = {"float32": ours["FULL_SHARD"], "bfloat16": low}
draw.table([{"": name, **{kind: each[kind] for kind in KINDS}} for name, each in both.items()])

# %% [markdown]
# **float16** needs a factor for the loss, since small gradients would be zero (notebook 03's last part and
# [labs/precision.py](../labs/precision.py)). With shards there is one thing to mind: an overflow is seen by the rank
# that has that shard, and all of them must skip the step. `LossScale.update` asks everybody.

# %%
from labs.precision import LossScale


def half(steps=6):
    """In each step: was it taken?"""
    model, scale, taken = float32(), LossScale(2.0**19), []
    training = setting("FULL_SHARD", model, mp_policy=replace(bf16, param_dtype=torch.float16))
    for x, y in batches[:steps]:
        factor = scale.value
        scale(model(x[:1], y[:1])).backward()
        shards = [p.grad.to_local() for p in model.parameters()]
        taken.append(scale.update(SimpleNamespace(grad=shard) for shard in shards))
        for shard in shards:
            shard /= factor
        training.optimizer.step() if taken[-1] else None
        training.optimizer.zero_grad()
    return taken


# %%
taken, *others = on_cpu(half, ranks=4)
print(f"all ranks decide alike: {all(other == taken for other in others)}; the first step was taken: {taken[0]}")

# %% [markdown]
# **Accumulation.** Each micro-batch reduces its gradients, unless `set_requires_gradient_sync(False)` says not to. Then
# whole gradients stay on each rank until the last one. With four micro-batches:


# %%
def last_only(model):
    """Gradients are reduced in the last of four micro-batches alone."""
    training = setting("FULL_SHARD", model)

    def every(x, y, micro_batches):
        losses = []
        for number, pair in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            losses += training.backward(*pair, 1)
        return losses

    return replace(training, backward=every)


WAYS = {"each time": partial(setting, "FULL_SHARD"), "the last time": last_only}
four = ledgers(WAYS, micro_batches=4)
assert four["each time"]["sent"] - four["the last time"]["sent"] == 3 * whole * 3 / 4
draw.table([{"reduced": name, **{kind: each[kind] for kind in KINDS}} for name, each in four.items()])

# %% [markdown]
# Three of four reduce-scatters are gone, and the peak has the whole gradient in it. The gathers stay: they are not a
# matter of gradients. (To keep P as well, `reshard_after_forward=False` and `set_reshard_after_backward(False)`.)
#
# **CPU offload** keeps shards, their gradients and the optimizer's state in the CPU's memory: `CPUOffloadPolicy()`.
# Each gather then begins with a copy to the device, and the step itself runs on the CPU. Our device *is* the CPU, so
# there is nothing to measure here; [Memory](07_memory.ipynb) does it with a second tier.
#
# ## Measure: two nodes
#
# Four ranks, two nodes, and between them 200 Mbit/s and 1 ms: a cluster, only slower. The link's arithmetic tells how
# long a step has the wire busy; both groups of an axis share it:

# %%
slow = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)
groups = [whole - 4 * layer, *[layer] * 4]  # bytes: the root, and the layers


def on_the_wire(shard, replicate):
    """Seconds of a step; shard, replicate: along each axis, the groups of ranks."""
    seconds = 0
    for number, size in enumerate(groups):
        for ranks in shard:
            gather = slow.seconds("all_gather", size / len(ranks), 4, ranks)
            seconds += (2 if number else 1) * gather + slow.seconds("all_to_all", size, 4, ranks)
        seconds += sum(slow.seconds("all_reduce", size / len(shard[0]), 4, ranks) for ranks in replicate)
    return seconds


# %%
LAYOUTS = {
    "FULL_SHARD": ([(0, 1, 2, 3)], [(0,), (1,), (2,), (3,)]),
    "HYBRID_SHARD": ([(0, 1), (2, 3)], [(0, 2), (1, 3)]),
    "HYBRID_SHARD, axes exchanged": ([(0, 2), (1, 3)], [(0, 1), (2, 3)]),
}
busy = {name: on_the_wire(*layout) for name, layout in LAYOUTS.items()}
draw.table([{"by the link's arithmetic": name, "a step, s": round(s, 3)} for name, s in busy.items()])

# %% [markdown]
# In the last row parameters are cut *across* the nodes and copied inside them: the same mesh, its axes in the other
# order, and slower than no hybrid at all. So what talks most goes last, along neighbours. Now the real jobs:

# %%
felt, crossing = {}, {}
for name in ("FULL_SHARD", "HYBRID_SHARD"):
    recording = job(partial(setting, name), ranks=4, link=slow, record="communication", tell=name).recording
    crossing[name] = recording.across(0, 2) + recording.across(1, 2)  # all that leaves node 0
    felt[name] = min(span.end - span.start for span in recording.step_spans(0)[1:])
seconds = {name: {"predicted": f"{busy[name]:.2f} s", "measured": f"{felt[name]:.2f} s"} for name in felt}
draw.table([{"": name, "leaves a node, bytes": crossing[name], **seconds[name]} for name in felt])

# %%
less = crossing["FULL_SHARD"] / crossing["HYBRID_SHARD"]
check.predict("How many times less crosses?", guess_less, round(less, 2), unit="times", reason="Only gradients cross.")

# %% [markdown]
# Where it wins: a model whose P, G and S fit over the ranks of one node, and a wire between nodes that is slower than
# inside. Where it loses: memory, since P, G and S are divided by a node's ranks and not by all; and on a wire that is
# equally quick everywhere there is little to win.
#
# ## Native
#
# All these names are PyTorch's, so the same lines do, with its own mesh. The same settings, the same ledgers:

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
    return Training(partial(backward, model), adamw(trainable(model)), trainable(model), partial(full, model))


# %%
theirs = ledgers({name: partial(torchs, name) for name in SETTINGS})
same = ("sent", "collectives", "P", "G", "S")
assert all(theirs[name][kind] == ours[name][kind] for name in SETTINGS for kind in same)
rows = [(name, each) for name in SETTINGS for each in ((f"{name}: ours", ours[name]), ("PyTorch's", theirs[name]))]
draw.table([{"": who, **{kind: each[kind] for kind in KINDS[:5]}} for _, (who, each) in rows], caption="bytes, rank 0")

# %%
names = list(SETTINGS)
kept = on_cpu(lambda: {n: train(partial(torchs, n), float64, keep=True)[1] for n in names}, ranks=4)[0]
off = {n: max((p - expected[key]).abs().max() for key, p in kept[n].items()) for n in names}
draw.table([{"PyTorch's": name, "within 1e-12 of one process": bool(off[name] < 1e-12)} for name in names])

# %% [markdown]
# The same bytes, the same number of collectives, the same P, G and S. (What both hold in `comm` differs: on the CPU,
# PyTorch's waits for each collective, and so has less in flight than ours.)
#
# ### From FSDP1 to FSDP2
#
# | FSDP1, `FullyShardedDataParallel` | FSDP2, `fully_shard` |
# |---|---|
# | `FSDP(model, auto_wrap_policy=...)` | a loop: `fully_shard(layer)` for each layer, then `fully_shard(model)` |
# | `transformer_auto_wrap_policy`, `size_based_auto_wrap_policy` | the condition in that loop |
# | `sharding_strategy=FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD`, `NO_SHARD` | a mesh of two axes, replicas first; of shards of 1 |
# | `MixedPrecision(param_dtype, reduce_dtype, ...)` | `MixedPrecisionPolicy(param_dtype, reduce_dtype, ...)` |
# | `CPUOffload(offload_params=True)` | `CPUOffloadPolicy()` |
# | `with model.no_sync():` | `model.set_requires_gradient_sync(False)` |
# | `backward_prefetch=BACKWARD_PRE` | by itself; or `set_modules_to_backward_prefetch` |
# | `model.clip_grad_norm_(1.0)` | `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `use_orig_params=True` | always |
# | `sync_module_states=True`, `param_init_fn` | build on `meta`, shard, `to_empty`, then fill the shards |
# | `FSDP.state_dict_type(model, ...)` | `model.state_dict()`, of DTensors: each has `.full_tensor()` |
#
# `fully_shard` changes the model in place, so what it returns may be thrown away; and the optimizer is made *after* it.
#
# ## Why, and why not
#
# **Why**: a model that does not fit, at stage 3's price in bytes and, with prefetch, at hardly any in time, as long as
# a layer's compute is longer than its gather: T > F/W tokens at once, as in notebook 04. And the parameters keep their
# names, so what stands around the model (optimizers, checkpoints, LoRA, quantisation) hardly knows of it.
#
# **Why not**: with micro-batches of few tokens nothing hides the gathers. With many ranks each gather has many steps of
# latency: then HSDP, or fewer data-parallel ranks and another axis. If ranks take different ways through the model, as
# with experts of their own, collectives of different layers meet; PyTorch's does not notice where they are of one size
# (ours compares the order, and says so). And it does not touch activations.
#
# **A way out**: the same without the course's laboratory. Save it as `train.py` in the root of the repository, and run
# `torchrun --nproc-per-node 4 train.py`:
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

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>What does sharding by parameter cost against one flat vector, and what does it give?</summary>
#
# Padding for each parameter, and a copy out of what was gathered. It gives each parameter its name, dtype, place in the
# optimizer and in the state dict, and lets frozen and trained ones share a gather. The messages are as few.
# </details>
#
# <details><summary>At which moment must the gather of layer 3 be sent for, in forward and in backward, and how many
# layers are then held?</summary>
#
# In forward when layer 2 begins, in backward when layer 4 begins; two. The gradient of layer 4 is reduced while layer 3
# computes its own.
# </details>
#
# <details><summary>Two nodes of eight ranks. Which axis of the mesh comes last, what crosses the wire, and what does it
# cost in memory?</summary>
#
# `shard`: a node's eight ranks are neighbours in number. Gradients cross, an eighth of them from each rank; no
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
# | `NO_SHARD`: sent | 2 (R − 1)/R n | as predicted | as predicted |
# | P, G, S | 4n/S together | as predicted | as predicted |
# | numbers | one process's | within 1e-12, in float64 | within 1e-12, in float64 |
#
# **Read on**: [labs/fsdp.py](../labs/fsdp.py), [labs/sharded.py](../labs/sharded.py) and
# [labs/prefetch.py](../labs/prefetch.py), in this order. Zhao et al., 2023, *PyTorch FSDP: Experiences on Scaling Fully
# Sharded Data Parallel* (arXiv 2304.11277), which is about FSDP1. PyTorch's tutorial *Getting Started with Fully
# Sharded Data Parallel (FSDP2)*.
#
# A clean copy of this notebook: `git restore notebooks/06_fsdp.ipynb`, then *File > Reload Notebook from Disk*.
