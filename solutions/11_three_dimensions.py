# %% [markdown]
# # Three dimensions: all of them on one mesh
#
# *A model is too large for one way to split it. Can all of them be used at once, and is it then still the same
# training?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), [FSDP](06_fsdp.ipynb),
# [Tensor parallelism](09_tensor_parallel.ipynb) and [Pipeline](10_pipeline.ipynb). It takes 60 minutes with its
# exercises, 30 without; the machine works for half a minute of it, in 2 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("11")

# %%
from functools import partial

import torch
import torch.distributed as dist

from labs import cost, pp, tp
from labs.data import Batches, corpus
from labs.kit import check, draw, strategies
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from labs.parallel import AXES, Parallel

# %% [markdown]
# ## Question
#
# Llama 3 70B, on four nodes of eight GPUs with 80 GB each. You know four ways to divide a training by 32. Take each of
# them alone: what stands in its way? (16 bytes a parameter, as in notebook 04, and nothing yet for activations.)

# %%
llama, gpus = PRESETS["llama3-70b"], 32
parameters = sum(sum(part.sizes) for part in cost.gpt_layers(llama))
each = {name: f"{16 * parameters / share / 1e9:,.0f} GB" for name, share in (("copied", 1), ("divided", gpus))}
once = 2 * parameters * (gpus - 1) / gpus / 1e9  # GB that a GPU sends for all parameters, in 16 bits
walls = {
    "copies (DDP)": (each["copied"], "a card has 80 GB"),
    "shards (FSDP)": (each["divided"], f"a GPU sends 3 × {once:,.0f} GB a step, most of it past other nodes"),
    "parts of matrices (TP)": (each["divided"], f"{llama.kv_heads} heads of keys; {4 * llama.depth} all-reduces"),
    "some layers each (PP)": (each["divided"], f"{llama.depth} layers for {gpus} stages; a bubble of {gpus - 1}/m"),
}
draw.table([{"32 of them": name, "a GPU holds": held, "its wall": wall} for name, (held, wall) in walls.items()])

# %% [markdown]
# Each has its wall: the card, the wire between nodes, the node itself, the bubble. But they are four *different* walls.
# With eight parts of each matrix inside a node, and four of something else across the nodes, no wall is reached. That
# is why large models are trained in two, three or four dimensions (Narayanan et al., 2021, arXiv 2104.04473). Llama 3
# 405B had eight parts of each matrix, sixteen stages, and 64 or 128 shards (arXiv 2407.21783, table 4).
#
# ## Picture
#
# ![A block of eight ranks, two along each of three axes. Along pp, ranks have other layers; activations at the cut and
# their gradients travel. Along shard, other sequences and other pieces of the state; parameters and gradients travel.
# Along tp, other parts of each matrix; activations travel, in every layer.](../images/three_axes.svg)
#
# Nothing in it is new. A rank is a member of one group along each axis, and in each group it does what it did when that
# was the only one.
#
# ## Predict
#
# Two numbers about this block, both found below. How many of the eight ranks read the same sequences as rank 5, with
# rank 5 itself? And if the batch of a step is twice as large: by what factor do the bytes grow that travel along
# `shard`?

# %%
guess_readers = 4  # your number
guess_factor = 1  # your number

# %% [markdown]
# ## Build: a place in four axes
#
# The course's mesh has four axes, in this order: `pp`, `replicate`, `shard`, `tp`. The two in the middle are those of
# HSDP (notebook 06): ranks along both of them read different sequences. An axis that is not wanted has size 1. Here are
# eight ranks on two nodes. Ranks of one letter and tint are a group:

# %%
EIGHT = {"pp": 2, "replicate": 1, "shard": 2, "tp": 2}
draw.nodes(EIGHT, node=4)

# %% [markdown]
# With whom does rank 5 talk, and over which wire?

# %%
draw.nodes(EIGHT, node=4, rank=5)

# %% [markdown]
# ### Exercise 1: what is my part?
#
# Before a rank can do anything, it must know what is its own: which layers, which sequences of the batch, which heads,
# and which piece of the state. The first three are divided evenly, in the order of the ranks. A piece is only a number,
# from 0 on. Budget: no messages.


# %%
def my_part(sizes, rank, layers, sequences, heads):
    """What a rank works on: {"layers": (first, end), "sequences": (first, end), "heads": (first, end), "piece": number}

    sizes: of pp, replicate, shard and tp; ranks are numbered row by row.  end: one behind the last, as in range.
    layers, sequences, heads: how many there are; each is divisible by the number of parts.
    """
    ### BEGIN SOLUTION
    pp, replicate, shard, tp = sizes
    rest, t = divmod(rank, tp)
    rest, s = divmod(rest, shard)
    p, r = divmod(rest, replicate)

    def part(whole, parts, number):
        return whole // parts * number, whole // parts * (number + 1)

    read = part(sequences, replicate * shard, r * shard + s)
    return {"layers": part(layers, pp, p), "sequences": read, "heads": part(heads, tp, t), "piece": s}
    ### END SOLUTION


check.my_part(my_part)

# %% [markdown]
# Only the axes of the data divide the batch. Ranks along `tp` work on one matrix together, and ranks along `pp` on one
# sequence, one after the other: they must all read the same.

# %%
mesh = Mesh(tuple(EIGHT.values()), AXES, rank=5)
readers = [rank for part in Mesh(mesh.shape, AXES).mesh.movedim(2, 0).flatten(1).tolist() if 5 in part for rank in part]
check.predict("Ranks that read what rank 5 reads:", guess_readers, len(readers), reason=f"They are {readers}.")

# %% [markdown]
# ## Build: who averages what
#
# After its backward, a rank has a gradient for each of its parameters. What the optimizer needs is the gradient of the
# whole batch. Along `dp` (the data's axes, as one) this is simple: the same parameter, and other sequences, so the
# *mean*. Along the other two it depends on the parameter:
#
# | kind | for example | along tp, ranks have | along pp, ranks have |
# |---|---|---|---|
# | `"split"` | a query matrix | other columns | another layer |
# | `"whole"` | a norm's weight | the same gradient | another layer |
# | `"summand"` | that, with sequences split (notebook 09) | what its sequences say | another layer |
# | `"tied"` | an embedding that is the head, too | other words | a summand each, at both ends |
#
# ### Exercise 2: combine
#
# Write it down once, for all four kinds. The check gives `"tied"` only where there are two stages or one, so that all
# ranks along `pp` have it. Budget: nothing travels along an axis where nothing has to be added.


# %%
def combine(gradient, kind, mesh):
    """Make it what the optimizer of this rank needs, in place.

    kind: "split", "whole", "summand" or "tied".  mesh: axes "pp", "dp", "tp"; it has get_group(axis) and size(axis).
    """
    ### BEGIN SOLUTION
    for axis in {"summand": ("dp", "tp"), "tied": ("dp", "pp")}.get(kind, ("dp",)):
        dist.all_reduce(gradient, group=mesh.get_group(axis))
    gradient /= mesh.size("dp")
    ### END SOLUTION


check.combine(combine)

# %% [markdown]
# So *the mean is taken along the data's axes, and nowhere else*. Along all others it is a sum, or nothing.
#
# ## Build: three at once
#
# [labs/parallel.py](../labs/parallel.py) puts the parts together in one order, which is the order of its code:
#
# 1. `tp` splits the matrices of every stage. It comes first, since what follows takes a rank's part for the parameter.
# 2. `pp` leaves each rank its own stages.
# 3. `fsdp` shards what is left, over `replicate` and `shard`.
#
# One detail is new. A pipeline runs many micro-batches, and FSDP would gather each layer for each of them. So
# `Parallel` keeps parameters gathered from a stage's first micro-batch to its last, and reduces gradients after the
# last one: once a step. What is then sharded is what a rank holds *between* steps, as in ZeRO's stage 2.

# %%
CONFIG = PRESETS["tiny"]
loader = Batches(corpus().tokens, 16, CONFIG.context)
on_cpu, adamw = partial(run, device="cpu"), partial(torch.optim.AdamW, **strategies.ADAMW)


def parallel_of(sizes, microbatches):
    """This rank's part of the model, and which sequences of a batch it reads."""
    mesh, stages = Mesh(sizes, AXES), pp.cut(GPT(CONFIG), sizes[0])
    lists = pp.one_f_one_b(sizes[0], microbatches)
    part = mesh["replicate", "shard"]._flatten()
    return Parallel(stages, lists, mesh, tp.gpt_plan(CONFIG)), slice(part.get_local_rank(), None, part.size())


# %%
def train(sizes, microbatches=4, steps=2):
    """The norms of the gradients, and this rank's parameters, whole."""
    parallel, mine = parallel_of(sizes, microbatches)
    optimizer, norms = adamw(parallel.parameters()), []
    for number in range(steps):
        mark("step")
        parallel.forward_backward(*(part[mine] for part in loader[number]))
        norms.append(parallel.clip_gradients(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    return norms, {name: p.detach() for name, p in parallel.full_parameters().items()}


# %%
def one_process(steps=2):
    model = GPT(CONFIG)
    optimizer, norms = adamw(model.parameters()), []
    for number in range(steps):
        model(*loader[number]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


[(norms_due, due)] = on_cpu(one_process, ranks=1)


def same_training(results):
    """Whether all norms and parameters are those of one process, but for rounding."""
    norms = all(abs(a - b) < 1e-4 for norms, _ in results for a, b in zip(norms, norms_due, strict=True))
    found = {name: p for _, parameters in results for name, p in parameters.items()}
    return norms and found.keys() == due.keys() and all((p - due[name]).abs().max() < 1e-5 for name, p in found.items())


# %% [markdown]
# Two dimensions at a time, on four ranks, and then three on eight. Each row is a real job, and `cost.parallel` has said
# before what each of its ranks will send:


# %%
def predicted(sizes, rank, microbatches=4, batch=16):
    axes, lists = dict(zip(AXES, sizes, strict=True)), pp.one_f_one_b(sizes[0], microbatches)
    each = batch // axes["replicate"] // axes["shard"] // microbatches
    job = cost.Job(CONFIG, each, torch.Size(sizes).numel(), rank, accumulation=microbatches)
    return cost.parallel(job, pp.plan(lists), axes)


def sent(recording, rank, step=1):
    """In a step, all but the squares for the norm, which are float64.  (In step 0 ranks also agree on shapes.)"""
    return sum(event.sent for event in recording.select(rank, step) if event.dtype != "float64")


# %%
jobs = {}
for sizes in ((2, 1, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2, 2)):
    ranks = torch.Size(sizes).numel()
    jobs[sizes] = on_cpu(train, sizes, ranks=ranks, record="communication")
    as_said = all(sent(jobs[sizes].recording, rank) == predicted(sizes, rank).sent for rank in range(ranks))
    words = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    print(f"{words}: one process's training: {same_training(jobs[sizes])}; bytes as predicted: {as_said}")

# %% [markdown]
# ## Ten questions across the course
#
# From ten notebooks, one each, and different ones at each run. Which of them would you have to look up?

# %%
recall.ten()

# %% [markdown]
# **Next.** Which axis should go over which wire, what multiplies and what adds, and where the norm goes wrong: the
# second half of this notebook. And which sizes to take: [Plan a run](15_plan_a_run.ipynb).
#
# A clean copy of this notebook: `git restore notebooks/11_three_dimensions.ipynb`, then *File > Reload Notebook from
# Disk*.
