# %% [markdown]
# # Three dimensions: all of them on one mesh
#
# *A model is too large for one way to split it. Can all of them be used at once, and is it then still the same
# training?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), [FSDP](06_fsdp.ipynb), [Tensor
# parallelism](09_tensor_parallel.ipynb) and [Pipeline](10_pipeline.ipynb).
# **Minutes**, by estimate: 25 without exercises, 65 with them, 5 more for optional parts, 25 more for the challenge.
# The machine works for half a minute of it, in 2 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("11")

# %%
import logging
from dataclasses import replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from IPython.display import display
from torch.distributed.tensor.parallel import loss_parallel

# %%
from labs import cost, native, pp, tp
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play, train
from labs.kit.launch import Link, run
from labs.kit.record import by_axis, mark
from labs.mesh import Mesh
from labs.model import GPT, PRESETS, Config
from labs.parallel import AXES, Parallel

on_cpu = partial(run, device="cpu")

# %% [markdown]
# ## Question
#
# Llama 3 405B was trained on 16,384 GPUs with TP 8, PP 16 and DP 128, and on 8,192 GPUs with TP 8, PP 16 and DP 64
# (arXiv 2407.21783, table 4). Why these three, why in these sizes, and how did anybody know that it was still the
# training of *one* model?
#
# Take a smaller case: Llama 3 70B on four nodes of eight GPUs with 80 GB each. You know four ways to divide a training
# by 32. If you take each of them alone, what stands in its way? The table counts 16 bytes per parameter, as in notebook
# 04, and no activations yet. A step has 512 sequences of 4,096 tokens.

# %%
llama, gpus, bandwidth = PRESETS["llama3-70b"], 32, 50  # GB/s of a GPU
parameters = sum(sum(part.sizes) for part in cost.gpt_layers(llama))
once = 2 * parameters * (gpus - 1) / gpus / 1e9  # GB a GPU sends for all of them, in 16 bits
reduced = 2 * (gpus - 1) / gpus * 2 * 4096 * llama.dim / 1e9  # GB to add up x of a sequence
reduces = 4 * llama.depth * 512 * reduced
walls = {
    "32 replicas (DDP)": (1, "a card has 80 GB"),
    "32 shards (FSDP)": (32, f"sends 3 × {once:,.0f} GB: {3 * once / bandwidth:.0f} s a step"),
    "TP 32": (32, f"{llama.kv_heads} key heads; all-reduces: {reduces / bandwidth:.0f} s"),
    "PP 32": (32, f"{llama.depth} layers, 32 stages; bubble 31/m"),
}
print(f"at 400 TFLOP/s, a GPU computes for {6 * parameters * 4096 * 512 / gpus / 400e12:.0f} s")
held = {name: f"{16 * parameters / parts / 1e9:,.0f} GB" for name, (parts, _) in walls.items()}
draw.table([{"": key, "a GPU holds": held[key], "its wall": walls[key][1]} for key in walls])

# %% [markdown]
# These are four *different* walls: the memory of a card, the wire between nodes, the heads and the all-reduces of every
# layer, and the bubble. Only the first one is final. The others cost time, and how much depends on the batch. FSDP
# alone is not bad here: its eight seconds are few beside the computing, as long as the batch is as large as this.
#
# Now combine them. TP 8 keeps its all-reduces inside a node, and FSDP with 4 shards, or 4 stages, connects the nodes.
# Each wall is then further away than with one dimension alone. That is what the 405B run does: TP 8 fills a node, PP
# 16 cuts the layers, and DP takes all GPUs that are left. Whether the activations fit is another question, to which
# the last section returns.
#
# ## Picture
#
# ![A block of eight ranks, two along each of three axes. Along pp, ranks have different layers; activations at the cut
# and their gradients travel. Along shard, different sequences and different pieces of the state; parameters and
# gradients travel. Along tp, different parts of each matrix; activations travel, in every
# layer.](../images/three_axes.svg)
#
# Nothing in it is new. A rank is a member of one group along each axis, and in each group it does what it did when that
# was the only one.
#
# ## Build: a place in four axes
#
# The course's mesh has four axes, in this order: `pp`, `replicate`, `shard`, `tp`. The two in the middle are those of
# HSDP (notebook 06): ranks along both of them read different sequences. An axis that is not wanted has size 1. Here are
# eight ranks on two nodes. In each row, ranks with the same letter and tint are a group. Choose a rank: with which
# ranks does it communicate, and over which wire?

# %%
EIGHT = {"pp": 2, "replicate": 1, "shard": 2, "tp": 2}
ranks = {"all": None} | {f"rank {n}": n for n in range(8)}
play.explore(partial(draw.nodes, EIGHT, 4), rank=ranks)

# %% [markdown]
# ### Exercise 1: what is my part? (5 minutes)
#
# Which layers, which sequences of the batch, which heads, and which piece of the state are a rank's own? The first
# three are divided evenly, in blocks, in the order of the ranks. The piece is a number from 0 on, the rank's place
# along `shard`, so replicas have the same one. Budget: no messages.


# %% tags=["exercise"]
def my_part(sizes, rank, layers, sequences, heads):
    """Return what a rank works on, as

    {"layers": (first, end), "sequences": (first, end), "heads": (first, end), "piece": number}
    end: one past the last, as in range
    sizes: a tuple, of pp, replicate, shard and tp; ranks are numbered row by row
    layers, sequences, heads: how many there are; each is divisible by the number of parts
    """
    ### BEGIN SOLUTION
    pp, replicate, shard, tp = sizes
    rest, t = divmod(rank, tp)
    rest, s = divmod(rest, shard)
    p, r = divmod(rest, replicate)

    def part(whole, parts, number):
        return whole // parts * number, whole // parts * (number + 1)

    return {
        "layers": part(layers, pp, p),
        "sequences": part(sequences, replicate * shard, r * shard + s),
        "heads": part(heads, tp, t),
        "piece": s,
    }
    ### END SOLUTION


check.my_part(my_part)

# %% [markdown]
# ## Predict
#
# On 64 ranks, with pp 2, replicate 2, shard 4 and tp 4: how many read the sequences that rank 5 reads, including rank
# 5? Replicas, as in notebook 06, have copies of the shards, and read different sequences.

# %%
guess_readers = 8  # your number

grid = Mesh((2, 2, 4, 4), AXES).mesh
parts = grid.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # a row for each part of the batch
[readers] = [ranks for ranks in parts.tolist() if 5 in ranks]
why = f"They are {readers}."
check.predict("Ranks that read what rank 5 reads:", guess_readers, len(readers), reason=why)

# %% [markdown]
# Only the axes of the data divide the batch. Ranks along `tp` work on one matrix together, and ranks along `pp` on one
# sequence, one after the other: they must all read the same.
#
# ## Build: who averages what
#
# After its backward, a rank has a gradient for each of its parameters. The optimizer needs that of the whole batch.
# Along `dp` (the data's axes, as one) ranks have the same parameter, and different sequences, so the *mean*. Along the
# other two it depends on the parameter:
#
# | kind | for example | along tp, ranks have | along pp, ranks have |
# |---|---|---|---|
# | `"split"` | a query matrix | different columns | different layers |
# | `"whole"` | a norm's weight | the same gradient | different layers |
# | `"summand"` | a norm's weight, with sequences split (notebook 09) | the sum over its own tokens | different layers |
# | `"tied"` | an embedding that is the head, too | different words | a summand each, at both ends |
#
# ### Exercise 2: combine (10 minutes)
#
# Write it down once, for all four kinds. The check gives `"tied"` only where there are two stages or one, so that all
# ranks along `pp` have it. Budget: nothing travels along an axis where nothing has to be added.


# %% tags=["exercise"]
def combine(gradient, kind, mesh):
    """Turn the gradient into the one that the optimizer of this rank needs, in place.

    kind: "split", "whole", "summand" or "tied"
    mesh: axes "pp", "dp", "tp"; it has get_group(axis) and size(axis)
    """
    ### BEGIN SOLUTION
    for axis in {"summand": ("dp", "tp"), "tied": ("dp", "pp")}.get(kind, ("dp",)):
        dist.all_reduce(gradient, group=mesh.get_group(axis))
    gradient /= mesh.size("dp")
    ### END SOLUTION


check.combine(combine)

# %% [markdown]
# Here is what your `combine` does on 2 × 2 × 2 ranks. Cells with one tint have the same parameter.

# %%
draw.who_combines({"pp": 2, "dp": 2, "tp": 2}, combine)

# %% [markdown]
# So *the mean is taken along the data's axes, and nowhere else*. Along all others it is a sum, or nothing.
#
# ## Build: two at a time
#
# When two strategies meet, one takes what the other has left. Here a matrix of each layer is cut three times, down to
# the piece that rank 5 holds:

# %%
draw.weight_cut({"pp": 2, "shard": 2, "tp": 2}, rank=5)

# %% [markdown]
# FSDP shards the *part* that `tp` and `pp` have left, and not the whole matrix, and it gathers the part alone. In the
# exercise, a linear layer `y = x @ w` is split by rows along `tp`, and its part is sharded along `dp`.
#
# ### Exercise 3: one layer in two dimensions (10 minutes)
#
# Write its forward, and its backward by hand. `all_gather(full, piece, group=…)` fills `full`, which may be 2-D: the
# ranks' rows one after the other. `reduce_scatter(vector, group)` returns this rank's equal part of the sum of all
# vectors (1-D). For y use `dist.all_reduce`. Budget: along `dp` what FSDP sends for this part, along `tp` one
# all-reduce of y.

# %% tags=["exercise"]
from labs.group import all_gather, reduce_scatter


def two_dimensions(x, piece, dy, mesh):
    """Return y and the gradient of the piece, for the mean of the losses along dp.

    x: this rank's sequences, only the columns that its part of w multiplies
    piece: this rank's rows of its part of w
    dy: the gradient of this rank's loss by y, the same along tp
    mesh: axes "dp" and "tp"; no argument may change
    """
    ### BEGIN SOLUTION
    dp = mesh.get_group("dp")
    part = piece.new_empty(mesh.size("dp") * len(piece), piece.shape[1])
    all_gather(part, piece, group=dp)
    y = x @ part
    dist.all_reduce(y, group=mesh.get_group("tp"))
    mine = reduce_scatter((x.T @ dy).flatten(), dp).view(piece.shape)
    return y, mine / mesh.size("dp")
    ### END SOLUTION


check.two_dimensions(two_dimensions)

# %% [markdown]
# ## Build: three at once
#
# [labs/parallel.py](../labs/parallel.py) puts the parts together in one order, which is the order of its code:
#
# 1. `tp` splits the matrices of every stage. It comes first, since what follows takes a rank's part for the parameter.
# 2. `pp` leaves each rank its own stages.
# 3. `fsdp` shards what is left, over `replicate` and `shard`.
#
# One detail is new. A pipeline runs many micro-batches, and FSDP would gather each layer for each of them. `Parallel`
# keeps parameters gathered from a stage's first micro-batch to its last, and reduces gradients after the last one. So
# only *between* steps is everything sharded, and it sends what ZeRO's stage 2 does: one gather, one reduce-scatter.

# %% tags=["subject"]
CONFIG = replace(PRESETS["tiny"], context=32)
loader = Batches(corpus().tokens, 16, CONFIG.context)


def parallel_of(sizes, microbatches=2, config=CONFIG, order=AXES):
    """This rank's part of the model."""
    of = dict(zip(AXES, sizes, strict=True))
    mesh, stages = Mesh(tuple(of[axis] for axis in order), order), pp.cut(GPT(config), of["pp"])
    return Parallel(stages, pp.one_f_one_b(of["pp"], microbatches), mesh, tp.gpt_plan(config))


def ours(sizes):
    """The norms of two steps, and this rank's parameters, whole."""
    parallel = parallel_of(sizes)
    batches = [train.my_sequences(parallel.mesh, loader[number]) for number in range(2)]
    backward, clip = parallel.forward_backward, parallel.clip_gradients
    norms = train.clipped(parallel.parameters(), backward, clip, batches)
    return norms, {name: p.detach() for name, p in parallel.full_parameters().items()}


# %% [markdown]
# Is that the training of one process? Each row below is a real job: two dimensions at a time on four ranks, then three
# on eight. Look at the norms of the gradients in both steps, and at how far any parameter is from that of one process
# after two steps of AdamW.

# %%
[alone] = on_cpu(train.one_process, GPT(CONFIG), [loader[0], loader[1]], ranks=1)
jobs, rows = {}, []
norms = {f"step {n}": f"norm {norm:7.4f}" for n, norm in enumerate(alone[0])}
rows.append({"training": "one process"} | norms | {"a parameter is off by at most": "0"})
for sizes in ((2, 1, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2), (2, 1, 2, 2)):
    job = jobs[sizes] = on_cpu(ours, sizes, ranks=prod(sizes), record="communication")
    off = train.largest_difference(job, alone)["parameter"]
    name = " × ".join(f"{a} {n}" for a, n in zip(AXES, sizes, strict=True) if n > 1)
    norms = {f"step {n}": f"norm {norm:7.4f}" for n, norm in enumerate(job[0][0])}
    below = "below 1e-5" if off < 1e-5 else f"{off:.1e}"
    rows.append({"training": name} | norms | {"a parameter is off by at most": below})
draw.table(rows)

# %% [markdown]
# It is one training. The sums are taken in another order, so the last digits of a float32 may differ, and nothing else.
#
# ### PyTorch's parts
#
# PyTorch has all parts: `parallelize_module`, `fully_shard`, and the schedules of `torch.distributed.pipelining`.
# [labs/native](../labs/native/three_dimensions.py) puts them together in the same order: `native.parallel` splits and
# shards this rank's stage, and `native.pp` builds the pipeline.


# %% tags=["subject"]
def pytorchs(sizes):
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh, model = Mesh(sizes, AXES), GPT(CONFIG)
    number, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    stages = [s if n == number else None for n, s in enumerate(pp.cut(model, sizes[0]))]
    native.parallel([stages[number]], native.device_mesh(mesh), tp.gpt_plan(CONFIG))
    pipeline = native.pp(stages, "1f1b", 2, model.loss, group)
    del model  # with the other stages, which this rank does not need
    own, batches = stages[number], [train.my_sequences(mesh, loader[n]) for n in range(2)]

    def backward(x, y):
        with loss_parallel():
            pipeline.step(*[x] if own.embed else [], **({"target": y} if own.head else {}))

    clip = partial(native.clip_gradients, list(own.parameters()), group=group)
    return train.clipped(own.parameters(), backward, clip, batches)


# %% [markdown]
# What does each of the eight ranks send in a step along each axis? And what does it hold: P and S when a step begins,
# and its own gradients G when they are reduced? `predicted` is computed without a run, by
# [labs/cost/on_a_mesh.py](../labs/cost/on_a_mesh.py). Ranks with the same numbers share a row.

# %%
sizes = tuple(EIGHT.values())
said = [train.predicted(CONFIG, sizes, rank, microbatches=2, batch=16) for rank in range(8)]
theirs, sides = on_cpu(pytorchs, sizes, ranks=8, record="communication"), []
for job, way in ((jobs[sizes], ours), (theirs, pytorchs)):
    memory = on_cpu(way, sizes, ranks=8, record="memory").recording
    begin = [memory.moments(rank, 1)[0][1] for rank in range(8)]  # of the second step
    most = [{"G": memory.steady(rank)["G"]} for rank in range(8)]
    sides.append([by_axis(job.recording, rank) | begin[rank] | most[rank] for rank in range(8)])
names = {axis: f"send along {axis}" for axis in ("pp", "shard", "tp")}
names |= {"P": "hold of P", "G": "hold of G", "S": "hold of S"}
print("PyTorch's:", ", ".join(f"norm {norm:7.4f}" for norm in theirs[0]))
draw.by_rank(said, *sides, names=names)

# %% [markdown]
# Ours sends and holds what the formulas say, to the byte. PyTorch's ranks send 60 to 80 bytes more along `shard` and
# `tp`, in a step of about 800,000; no cell here takes these apart. All other numbers are equal. An eighth of the state
# is on each rank, but for norms and the ends of the model.
#
# ## Build: what multiplies, and what adds
#
# What a rank holds is a product: a half of the layers, of these a half of each matrix, and of that a half of the state.
# What it sends is a sum over the axes. Here is a step in more micro-batches, and one with a larger batch. If it is
# twice as large, by what factor do the bytes along `shard` grow? Below the table is the last of these steps on rank 0,
# as it was recorded, with a colour for each axis.

# %% tags=["subject"]
CASES = {
    "batch 8, 2 micro-batches": (8, 2),
    "batch 8, 4 micro-batches": (8, 4),
    "batch 16, 4 micro-batches": (16, 4),
}


def steps(sizes, cases, order=AXES):
    """Two steps of each; in the second one a rank sends what it sends from then on."""
    for batch, microbatches in cases:
        parallel = parallel_of(sizes, microbatches, order=order)
        for number in range(2):
            mark("step")
            few = [part[:batch] for part in loader[number]]
            parallel.forward_backward(*train.my_sequences(parallel.mesh, few))
            mark("end")


# %%
guess_factor = 1  # your number

rows, job = [], on_cpu(steps, sizes, CASES.values(), ranks=8, record="communication")
recording = job.recording
for number, name in enumerate(CASES):
    sent = by_axis(recording, 0, 2 * number + 1)
    calls = sum(len(call.ranks) > 1 for call in recording.select(0, 2 * number + 1))
    sends = {axis: f"{sent[axis]:,} B" for axis in ("pp", "shard", "tp")}
    rows.append({"rank 0 sends": name} | sends | {"calls": calls})
once, twice = (by_axis(recording, 0, step)["shard"] for step in (3, 5))
why = "They are parameters and gradients."
display(draw.table(rows), draw.rank_by_axis(recording, rank=0, step=5))
check.predict("The bytes along shard grow by", guess_factor, twice / once, reason=why)

# %% [markdown]
# In the timeline, `shard` has calls only at the beginning and at the end of a step, around all micro-batches; `tp` has
# some in every layer of every micro-batch. A bar along `pp` begins when a message is posted, and ends when it arrives.
#
# Along `pp` and `tp` activations travel: twice the batch, twice the bytes. Along the data's axes parameters and
# gradients do, once a step. More micro-batches of the same batch change no bytes, but make more calls, each of which
# has its latency.
#
# One thing multiplies that should not. The bubble is (p − 1)/m, and m is the number of micro-batches of *one* rank's
# part of the batch. With twice as many data-parallel ranks, and the same batch and size of a micro-batch, m is half,
# and the bubble is twice as long.
#
# ## Build: which axis on which wire
#
# Two nodes of four ranks, and a slow wire between them (notebook 05's `Link`). The first axis of a mesh crosses from
# node to node, the others stay inside. In any order a rank sends the same bytes; what changes is who sits where. Look
# at the first row of the table above: if `tp` comes first instead of `pp`, how many times as long is the wire busy?

# %%
guess_busy = 9  # your number

wire, found, busy = Link(nodes=2, bandwidth="10 Mbit/s"), {}, []
job = partial(on_cpu, steps, sizes, [(8, 2)], ranks=8, link=wire, record="communication")
for order in (AXES, ("replicate", "shard", "pp", "tp"), ("tp", "replicate", "shard", "pp")):
    name = " × ".join(axis for axis in order if axis != "replicate")
    seen = found[name] = job(order, tell=name).recording
    busy.append(8 * sum(seen.across(rank, 1) for rank in range(4)) / wire.bandwidth)
    took = [span.end - span.start for span in seen.step_spans(0)][1]
    print(f"{name}: the wire is busy for {busy[-1]:.2f} s, a step took {took:.2f} s")
display(draw.orders(found, step=1))
check.predict("The wire is busy, times:", guess_busy, round(busy[2] / busy[0], 1))

# %% [markdown]
# So stages go between the nodes, and tensor parallelism stays inside. A step takes at least as long as its wire is
# busy; the rest is computing, eight ranks on the cores of this machine. Shards are in between, and may travel while a
# rank computes (notebook 06), as a stage's message may. Tensor parallelism waits for each of its messages.
#
# ## Build: the norm, over all axes
#
# To clip gradients, every rank needs the norm of *all* of them (notebook 04). Each adds up its squares, and one number
# travels. Two things can go wrong, and both have:
#
# * **Some gradients do not count.** torchtitan, PyTorch's own trainer, clipped each stage of a pipeline by its own norm
#   ([torchtitan#596](https://github.com/pytorch/torchtitan/issues/596), 2024).
# * **Some gradients count twice**: both copies of a tied embedding, in two stages
#   ([Megatron-LM#7227](https://github.com/NVIDIA/Megatron-LM/pull/7227), September 2026), or what is whole along `tp`,
#   which made one model's norm 1.52 times too large
#   ([TransformerEngine#715](https://github.com/ROCm/TransformerEngine/pull/715)).
#
# ### Exercise 4: each gradient once (10 minutes)
#
# Each gradient comes with the axes along which it is *cut*: each rank there has a different part of it. Along all other
# axes all ranks have the same. Use float64 for the sum. Budget: 64 bytes, whatever the gradients' size.


# %% tags=["exercise"]
def mesh_norm(gradients, mesh):
    """Return the norm of all gradients of all ranks: the same on each, a float or a tensor.

    gradients: pairs of a tensor (maybe empty) and the names of the axes it is cut along
        (each stage has its own, or none)
    mesh: pp, replicate, shard and tp; it has size(axis), get_local_rank(axis),
        get_group(axis) and mesh_dim_names
    """
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float64)
    for gradient, cut in gradients:
        copies = prod(mesh.size(axis) for axis in mesh.mesh_dim_names if axis not in cut)
        total += gradient.double().square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt()
    ### END SOLUTION


check.mesh_norm(mesh_norm)

# %% [markdown]
# How wrong is it otherwise? Here is what each rank finds alone, and what all find together if copies count, as
# multiples of the right norm:


# %%
def wrong_norms(sizes):
    """Return a rank's own norm, and that of all ranks if copies count, as multiples of the
    right norm.  The embedding is tied to the head."""
    parallel = parallel_of(sizes, 2, replace(CONFIG, tied=True))
    words = torch.randint(256, (2, 8, 32), generator=torch.Generator().manual_seed(1))
    parallel.forward_backward(*train.my_sequences(parallel.mesh, words))
    right = parallel.clip_gradients(float("inf"))
    squares = sum(p.grad.to_local().double().square().sum() for p in parallel.parameters())
    everybodys = squares.clone()
    dist.all_reduce(everybodys)
    return (squares.sqrt() / right).item(), (everybodys.sqrt() / right).item()


wrong = on_cpu(wrong_norms, sizes, ranks=8)
print("each rank's own:  ", " ".join(f"{own:.2f}" for own, _ in wrong))
print(f"copies count, too: {wrong[0][1]:.2f}")

# %% [markdown]
# Each rank's own norm is about a third of the right one, so each shortens its gradients too little. Here the factors
# hardly differ, and the direction stays nearly what it was; it changes where one rank has much larger gradients than
# another. Neither mistake can be seen in a loss that falls.
#
# ## Build: the loss, over all axes
#
# What is the loss divided by? Each of these three has a mistake, two of them from torchtitan:
#
# * **A.** The pipeline runs a backward for each micro-batch, from the mean over its tokens. The gradients of m
#   micro-batches add up, and are then averaged over the data's ranks
#   ([torchtitan#2972](https://github.com/pytorch/torchtitan/issues/2972) was like this, with sums over tokens).
# * **B.** Each rank divides the sum over its tokens by the number of tokens in the *whole* batch. That is right if
#   gradients are added up over the data's ranks. But DDP averages them
#   ([torchtitan#2323](https://github.com/pytorch/torchtitan/pull/2323)).
# * **C.** For the log: the ranks of the last stage have the mean loss of their sequences, all others 0. All of it is
#   added up over all ranks, and divided by their number.
#
# In A and B all gradients are off by one factor, in C the loss in the log is. AdamW divides by the size of the
# gradients, so that the loss falls as before. The norm shows it.
#
# ### Exercise 5: by which factor? (5 minutes)


# %% tags=["exercise"]
def wrong_by(sizes, microbatches):
    """Return {"A": …, "B": …, "C": …}: the wrong value as a multiple of the right one.

    sizes: a tuple, of pp, replicate, shard and tp
    """
    ### BEGIN SOLUTION
    pp, replicate, shard, _ = sizes
    return {"A": microbatches, "B": 1 / (replicate * shard), "C": 1 / pp}
    ### END SOLUTION


check.wrong_by(wrong_by)

# %% [markdown]
# Does a real job show these factors? Here are 2 × 2 × 2 ranks and 2 micro-batches. `over` tells `Parallel` by which
# number of tokens it has to divide a rank's sum of losses. The job trains with the right number, then with that of one
# micro-batch (A), then with that of the whole batch (B), and compares the norms of the gradients.


# %% tags=["subject"]
def three_losses(sizes, microbatches):
    parallel, found = parallel_of(sizes, microbatches), {}
    x, y = train.my_sequences(parallel.mesh, loader[0])
    own, whole = y.numel(), loader[0][1].numel()
    for name, tokens in {"right": own, "A": own // microbatches, "B": whole}.items():
        losses = parallel.forward_backward(x, y, over=tokens)
        found[name] = parallel.clip_gradients(float("inf")).item()
        torch._foreach_zero_([p.grad for p in parallel.parameters()])
        if name == "right":
            log = torch.stack(losses).mean() if losses else torch.zeros(())
            dist.all_reduce(log)  # C: the ranks of the first stage add 0
            found["C"] = log.item() / dist.get_world_size()
    return found


# %%
found = on_cpu(three_losses, sizes, 2, ranks=8)[0]
[loss] = on_cpu(lambda: GPT(CONFIG)(*loader[0]).item(), ranks=1)
rows = []
for name in "ABC":
    what, right = ("loss", loss) if name == "C" else ("norm", found["right"])
    row = {"mistake": name, "found": f"{what} {found[name]:7.4f}"}
    rows.append(row | {"right": f"{what} {right:7.4f}", "factor": f"{found[name] / right:.3f}"})
draw.table(rows)

# %% [markdown]
# A and B change every gradient by one factor, and C changes the loss in the log alone.
#
# ## Why, and why not
#
# **Why**: each dimension is used up to its wall, and no further. Tensor parallelism fills a node, stages bridge the
# nodes, and the data's axes take all GPUs that are left. That is a rule for large models, and it need not send the
# fewest bytes between nodes: the challenge below asks which mesh does.
#
# **Why not**: for a model that fits, one dimension is simpler. Each further one is another way to be
# silently wrong, as the bugs above show. So compare with one process on a small model before you train a large one, and
# compare the norm of the gradients, not only the loss.
#
# **What would you do on Monday, with 32 GPUs and a 70B model?** In torchtitan:
#
# 1. Begin with one dimension: `--parallelism.data_parallel_shard_degree 32`, and full activation checkpointing. Each
#    GPU holds 35 GB of state. Two all-gathers and a reduce-scatter take 8 s of the wire, beside 69 s of computing at
#    512 sequences of 4,096 tokens (first table). With an eighth of the batch they take as long as the computing.
# 2. If the batch must be that small, take `--parallelism.tensor_parallel_degree 8` with
#    `--parallelism.data_parallel_shard_degree 4`. The state is the same 35 GB, and a GPU sends a tenth as much along
#    `shard`. Its price is the all-reduces in every layer, inside the node.
# 3. Add `--parallelism.pipeline_parallel_degree 4` in place of the shards only if the wire between nodes is slow, since
#    it costs a bubble of 3/m. The last table of the page has the bytes of all three.

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>For each axis: what do its ranks have in common, what do they send, and on which wire?</summary>
#
# Ranks along tp hold the same layers and read the same sequences. They send activations in every layer, so keep them
# inside a node. Ranks along pp read the same sequences, and send activations at each cut; they may be on different
# nodes. Ranks along shard and replicate hold the same layers and the same part of each matrix. They send parameters and
# gradients once a step: shards inside a node or between nodes, replicas between nodes.
# </details>
#
# <details><summary>Twice the batch: which bytes double? Twice the micro-batches of it: what
# changes?</summary>
#
# With twice the batch, all bytes along pp and tp double, and none along the data's axes. With more micro-batches no
# bytes change; there are more calls, and the bubble is shorter.
# </details>
#
# <details><summary>A norm is too large by a factor between 1 and the square root of the number of ranks. What do you
# look for?</summary>
#
# Some gradients have copies and count several times: those of norms along tp, of tied embeddings along pp, and all
# gradients along replicate.
# </details>
#
# For a rank with a p-th of the layers, a t-th of each matrix and an s-th of the state, in a step with m micro-batches:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | holds of P, G and S | 1/(p t s), but for norms and the ends | exactly | exactly |
# | sends along tp | in each layer, for each micro-batch | exactly | within 0.1 % |
# | sends along pp | at each cut, for each micro-batch | exactly | exactly |
# | sends along the data's axes | once a step | exactly | within 0.1 % |
# | numbers | one process's | within rounding | within rounding |

# %% [markdown]
# ## Beat it: find the mesh that sends the fewest bytes between nodes (20 minutes)
#
# Here it is open. Eight ranks on two nodes or on four train four models with different batches. You choose the axes,
# their sizes and their order. A step is run for real, and the bytes that leave the busiest node, or come into it, are
# counted. A rank has room for one of so many `pieces` of the state, so there cannot be many replicas.
#
# **The bound.** Let each node hold a fraction f of the layers, and read a fraction g of the sequences. Together the n
# nodes do all the work once, so f·g = 1/n. Let G be the bytes of all gradients, and X those of the batch's activations
# at one cut. A node has e ends of its layers that are no end of the model: 0 if f = 1, 1 if f = 1/2, 2 if f is less.
#
# bytes of the busiest node ≥ 2 (1 − g) f G + e g X, at the best f and g
#
# Nothing can beat it: 1/g nodes must add up their gradients of the same layers, which takes 2 (1 − g) of them per node,
# and the activations of g of the batch, or their gradients, must cross each end. Here are the two arrows out of one of
# four nodes:

# %%
draw.node_bound(nodes=4, stages=2)

# %% [markdown]
# The table has both arrows for each f. `measured` runs one case on one mesh for you to try. A point is a hundredth of
# bound / bytes, and the score is the mean of the four cases; `pp 2 × shard 2 × tp 2` scores 51.3.

# %%
rows = []
for name, case in beat.best_mesh.cases.items():
    G = 4 * sum(sum(part.sizes) for part in cost.gpt_layers(case.config))
    X = 4 * case.batch * case.config.context * case.config.dim
    row = {"": name, "nodes": case.nodes, "pieces": case.pieces, "G, B": G, "X, B": X}
    for stages in (1, 2, 4):
        g = stages / case.nodes
        gradients, cuts = 2 * (1 - g) * G / stages, min(stages - 1, 2) * g * X
        row[f"f = 1/{stages}"] = f"{gradients:,.0f} + {cuts:,.0f}" if g <= 1 else "–"
    rows.append(row | {"bound": f"{beat.best_mesh.bound(case):,.0f}"})
display(draw.table(rows))
cube = beat.best_mesh.measured("few tokens", {"pp": 2, "shard": 2, "tp": 2})
print(f"few tokens, pp 2 × shard 2 × tp 2: {cube:,} bytes leave the busiest node")


# %% tags=["exercise"]
def mesh_for(config, batch, nodes, pieces):
    """Return {axis: size}, outermost first: {"pp": 2, "tp": 4}; replicate comes before shard.

    config: dim, depth, context, ...; batch: sequences of a step; pieces: see above
    """
    ### BEGIN SOLUTION
    inside = 8 // nodes
    between = "replicate" if pieces <= inside else "pp"
    return {between: nodes, "shard": inside}
    ### END SOLUTION


beat.best_mesh(mesh_for)

# %% [markdown]
# The course shards inside a node. Between nodes it has replicas where there is room, and stages elsewhere; it never
# compares them, and never splits a matrix. Why is it dear to split one, even inside a node, where a pipeline crosses
# the nodes?
#
# <details><summary>Answer</summary>All ranks along tp have the whole x, and each of them sends it to the next
# stage: with tp 2 it leaves the node twice.</details>
#
# Here the notebook ends. **What follows is optional**: the four nodes of the beginning, and a script.
#
# ## Optional: two models on four nodes
#
# Nobody here has four nodes of eight GPUs. But the real code can be run as one rank of 32, on a device that only
# pretends: it computes no numbers, and records what the rank would hold and send (a **dry run**), in float32 and
# without recomputing. All layers are alike, so four of them tell whether `cost` is right, and `cost` tells about all of
# them:

# %%
LLAMA, rows = replace(PRESETS["llama3-70b"], context=4096), []
# dense, some 690 billion parameters
GPT4_CLASS = Config(100_256, 18_432, 160, 144, 8, 64_512, context=4096)
both = ("TP 8 × shards 4", LLAMA, (1, 1, 4, 8), 1), ("PP 4 × TP 8", GPT4_CLASS, (4, 1, 1, 8), 4)
for name, config, sizes, m in both:
    short = replace(config, depth=4)
    said = train.predicted(short, sizes, 0, m, m * sizes[2], sequence_parallel=True)
    rank_0 = train.dry_step(short, sizes, m)
    sent = said["pp"] + said["shard"] + said["tp"]
    own = {"sends, predicted": sent, "peak, predicted": said["peak"]}
    own |= {"sends": rank_0.communication.sent(0, 1), "peak": rank_0.memory.steady(0)["peak"]}
    rows.append({"4 layers": name} | {k: f"{n / 1e9:.2f} GB" for k, n in sorted(own.items())})
draw.table(rows)

# %%
LAYOUTS = {  # and how many micro-batches of one sequence on a rank, for 32 sequences in a step
    "TP 8 × shards 4": ((1, 1, 4, 8), 8),
    "shards 32": ((1, 1, 32, 1), 1),
    "PP 4 × TP 8": ((4, 1, 1, 8), 32),
}
rows = []
for name, config in {"70B": LLAMA, "GPT-4 class": GPT4_CLASS}.items():
    for layout, (sizes, microbatches) in LAYOUTS.items():
        said = train.predicted(config, sizes, 0, microbatches, 32, sequence_parallel=True)
        held = {"P, G, S": said["P"] + said["G"] + said["S"], "peak": said["peak"]}
        sends = {f"sends along {axis}": said[axis] for axis in ("pp", "shard", "tp")}
        in_GB = {key: f"{n / 1e9:,.1f} GB" for key, n in (held | sends).items()}
        rows.append({"rank 0 of 32": f"{name}, {layout}"} | in_GB)
draw.table(rows)

# %% [markdown]
# * **70B.** Its state fits in each of them. What leaves a node? With 32 shards one ring passes through all nodes: 547
#   GB, in float32, gathered once and reduced once; the 3 × 137 GB of the beginning are 16 bits, gathered twice. With
#   TP 8 × shards 4 there are eight rings, one for each part: 8 × 53 GB. With PP 4 × TP 8 it is 8 × 0.5 GB, but there is
#   a bubble. With its activations, in float32 and without recomputing, none of them fits at the peak; with 16-bit
#   numbers and some recomputing, TP 8 × shards 4 does (notebook 15 shows it).
# * **GPT-4 class.** P, G and S alone are 346 GB, on a GPU of 80 GB, however 32 GPUs are used. More GPUs help, or memory
#   outside them (notebook 07b).
#
# ## Optional: a way out
#
# Here are the three dimensions in an ordinary script, with nothing of the course but the data and the model. It is
# [scripts/parallel.py](../scripts/parallel.py). From the root of the repository, run
# `torchrun --nproc-per-node 8 scripts/parallel.py`:
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
# from torch.distributed.tensor import DTensor
# from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# dist.init_process_group()
# device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# if device.type == "cuda":
#     device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
#     torch.cuda.set_device(device)
# if dist.get_world_size() not in (4, 8, 16):
#     raise SystemExit("start 4, 8 or 16 ranks: each shard cuts its part of 16 sequences into 4 micro-batches")
# shards = dist.get_world_size() // 4
# mesh = init_device_mesh(device.type, (2, shards, 2), mesh_dim_names=("pp", "dp", "tp"))
# p, d, first = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.get_local_rank("pp") == 0
#
# config = PRESETS["small"]
# model = GPT(config)
# layers = list(model.layers.values())[2 * p : 2 * p + 2]
# for layer in layers:  # embedding, norms and head stay whole along tp
#     split = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
#     split |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
#     parallelize_module(layer.to(device), mesh["tp"], split)
# stage = nn.Sequential(*[model.embed] * first, *layers, *[] if first else [model.norm, model.head]).to(device)
# for module in (*layers, stage):  # gathered once a step, and not for every micro-batch
#     fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
#
# its = PipelineStage(stage, p, 2, device, group=mesh.get_group("pp"))
# schedule = Schedule1F1B(its, n_microbatches=4, loss_fn=model.loss)
# optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
# batches = Batches(corpus().tokens, 16, config.context)
# for step in range(10):
#     x, y = (part.chunk(shards)[d].to(device) for part in batches[step])  # by dp alone
#     losses = []
#     schedule.step(*[x] * first, **({} if first else {"target": y, "losses": losses}))
#
#     # Of a DTensor it is the norm of the whole; what is whole along tp counts once; stages add up.
#     norms = [p.grad.norm() for p in stage.parameters()]
#     square = sum(norm.full_tensor() ** 2 if isinstance(norm, DTensor) else norm**2 for norm in norms)
#     dist.all_reduce(square, group=mesh.get_group("pp"))
#     for parameter in stage.parameters():
#         parameter.grad *= (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#
#     loss = torch.zeros((), device=device) if first else torch.stack(losses).mean()
#     dist.all_reduce(loss)  # all ranks of the last stage have one: half of them
#     if dist.get_rank() == 0:
#         print(f"step {step}: loss {2 * loss.item() / dist.get_world_size():.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```

# %% [markdown]
# **Read on**: [labs/parallel.py](../labs/parallel.py), then [labs/cost/on_a_mesh.py](../labs/cost/on_a_mesh.py).
# Narayanan et al., 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (arXiv
# 2104.04473), section 3. Liang et al., 2024, *TorchTitan* (arXiv 2410.06511).
#
# **Next.** What is still unsolved: all of this ran on one machine, of which nobody else had a part. [11b
# Clusters](11b_clusters.ipynb) runs the same job on two hosts and in a queue.
#
# A clean copy of this notebook: `git restore notebooks/11_three_dimensions.ipynb`, then *File > Reload Notebook from
# Disk*.
