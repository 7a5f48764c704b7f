# %% [markdown]
# # Three dimensions: all of them on one mesh
#
# *You have 32 GPUs and a model of 70 billion parameters. How do you divide the training, and is it then still the
# training of one model?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), [FSDP](06_fsdp.ipynb), [Tensor
# parallelism](09_tensor_parallel.ipynb) and [Pipeline](10_pipeline.ipynb).
# **Minutes**, by estimate: 30 without exercises, 65 with them, 10 more for optional parts, 25 more for the challenge.
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
from math import ceil, prod

import torch
import torch.distributed as dist
from IPython.display import display
from torch.distributed.tensor.parallel import loss_parallel

from labs import cost, native, pp, tp
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play, train
from labs.kit.launch import Link, run
from labs.kit.record import by_axis, mark, sent_and_held
from labs.model import GPT, PRESETS

# %% [markdown]
# ## Question
#
# Llama 3 405B was trained on 16,384 GPUs with TP 8, PP 16 and DP 128, 2,048 sequences in a step (arXiv 2407.21783,
# table 4). Why three dimensions, why in these sizes, and how did anybody know that it was still the training of *one*
# model?
#
# Take a case that you may meet: Llama 3 70B on four nodes of eight H100s with 80 GB each, with sequences of 4,096
# tokens. You know four ways to divide a training by 32. DDP alone is out: every card would hold 16 bytes per parameter,
# 1,129 GB. With each of the other three it holds a 32nd of that, 35 GB. How long does a step take? The functions below
# put together what notebooks 06, 09 and 10 found:
#
# * FSDP gathers the weights twice and reduces their gradients once. All of this may travel while a GPU computes.
# * TP adds up the activations x four times in every layer. For these all-reduces every GPU waits.
# * A pipeline of p stages with m micro-batches takes as long as m + p − 1 of them: the rest is its bubble.
# * Each GPU has its own network card. A group with eight ranks on every node uses all eight cards of a node for one
#   message; a group with one rank on every node uses one.

# %% tags=["subject"]
llama, GPUS, NODE = PRESETS["llama3-70b"], 32, 8
BETWEEN, INSIDE = 50, 450  # GB/s of a GPU, by the network and by NVLink
parameters = sum(sum(part.sizes) for part in cost.gpt_layers(llama))
weights, x = 2 * parameters / 1e9, 2 * 4096 * llama.dim / 1e9  # GB in 16 bits; x of a sequence
compute = 6 * parameters * 4096 / 400e12  # seconds of a GPU for a sequence, at 400 TFLOP/s


def speed(ranks, apart, between):  # GB/s of a group whose neighbours are `apart` ranks away
    local = max(1, NODE // apart)  # of its ranks, on each node
    return INSIDE if ranks <= local else min(INSIDE, local * between)


def step_time(sequences, shard=1, pp=1, tp=1, between=BETWEEN):  # micro-batches of 1 sequence
    rounds, layers = ceil(sequences / shard) + pp - 1, ceil(llama.depth / pp)  # longest stage
    computing = rounds * compute / tp * layers / llama.depth
    reduces = rounds * layers * 4 * 2 * (tp - 1) / tp * x / speed(tp, 1, between)
    gathers = 3 * weights / pp / tp * (shard - 1) / shard / speed(shard, tp, between)
    return max(computing, gathers) + reduces


# %%
LAYOUTS = {"FSDP 32": {"shard": 32}, "PP 32": {"pp": 32}, "TP 32": {"tp": 32}}
LAYOUTS |= {"TP 8 × FSDP 4": {"tp": 8, "shard": 4}, "TP 8 × PP 4": {"tp": 8, "pp": 4}}
held = 16 * parameters / 1e9
print(f"a GPU holds {held:,.0f} GB with DDP, and {held / GPUS:.0f} GB in these layouts")
rows = []
for name, layout in ({"computing alone": None} | LAYOUTS).items():
    took = {n: step_time(n, **layout) if layout else n * compute / GPUS for n in (512, 16)}
    rows.append({"a step of": name} | {f"{n} sequences": f"{t:.1f} s" for n, t in took.items()})
draw.table(rows)

# %% [markdown]
# With 512 sequences, FSDP alone is as quick as computing itself: nobody needs a second dimension. PP 32 is slower,
# since 80 layers do not fill 32 stages evenly. TP 32 waits for all-reduces between nodes (and Llama has eight key
# heads, too few for 32 ranks).
#
# With 16 sequences, half of FSDP's ranks have nothing to do, because a rank reads whole sequences. Both layouts of
# *two* dimensions are quicker: their GPUs share a sequence. Somewhere in between, the order changes.
#
# ## Predict
#
# TP 8 × FSDP 4 works on four sequences at a time, with eight GPUs each, and waits for TP's all-reduces. FSDP 32 works
# on up to 32 at a time. A step has at most 32 sequences: from how many on is FSDP 32 the quicker of the two?

# %%
guess_sequences = 25  # your number

SEQUENCES, two = range(4, 33), ("FSDP 32", "TP 8 × FSDP 4")
lines = {name: [(n, step_time(n, **LAYOUTS[name])) for n in SEQUENCES] for name in two}
first = min(n for (n, fsdp), (_, other) in zip(*lines.values(), strict=True) if fsdp < other)
each = step_time(4, tp=8, shard=4)
why = f"Four sequences take {each:.2f} s with TP 8, and 32 take {compute:.2f} s with FSDP."
what = "Llama 3 70B on 32 GPUs: the seconds of a step"
display(draw.on_scales(lines, "sequences in a step", "seconds", what))
display(check.predict("From this many sequences on:", guess_sequences, first, reason=why))
large = sum(sum(part.sizes) for part in cost.gpt_layers(PRESETS["llama3-405b"]))
travels = 3 * 2 * large / 1e9 / NODE / speed(2048, NODE, BETWEEN)
computes = 6 * large * 8192 / NODE / 400e12
print(f"405B on 2,048 nodes: weights travel {travels:.1f} s, a GPU computes {computes:.1f} s")

# %% [markdown]
# The line of TP 8 × FSDP 4 is a staircase, because every round takes the same time, whether one sequence is in it or
# four. From 25 sequences on it has seven rounds or eight, which take longer than FSDP's single one. So a second
# dimension is for steps with **few sequences per GPU**.
#
# And that is where large runs are. The 405B run had 2,048 sequences of 8,192 tokens for 16,384 GPUs: an eighth of a
# sequence, or 1,024 tokens, for each. So at least eight GPUs have to share a sequence. TP 8 does that, and FSDP over
# the 2,048 nodes would divide the rest. By the last line its messages would be just hidden, and nothing is left for a
# message that is late. With 16 stages each GPU has a 16th of these weights; the price of stages is a bubble.
#
# `step_time` is a rough model. It hides messages perfectly, gathers the weights once a step however many sequences a
# rank reads, and forgets the memory of activations; notebook 15 has the whole bill. Here the question is how such a
# layout is built, and whether it is then still the same training.
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
# HSDP (notebook 06): replicas have copies of the shards. An axis that is not wanted has size 1. Here are eight ranks on
# two nodes. In each row, ranks with the same letter and tint are a group. Choose a rank: with which ranks does it
# communicate, and over which wire?

# %%
from labs.mesh import Mesh
from labs.parallel import AXES, Parallel

on_cpu = partial(run, device="cpu")
EIGHT = {"pp": 2, "replicate": 1, "shard": 2, "tp": 2}
sizes, ranks = tuple(EIGHT.values()), {"all": None} | {f"rank {n}": n for n in range(8)}
play.explore(partial(draw.nodes, EIGHT, 4), rank=ranks)

# %% [markdown]
# Which ranks read the same sequences as rank 5?
#
# <details><summary>Answer</summary>Ranks 0, 1, 4 and 5. Only the data's axes, <code>replicate</code> and
# <code>shard</code>, divide the batch. Ranks along <code>tp</code> work on one matrix together, and ranks along
# <code>pp</code> on one sequence, one after the other: they must all read the same.</details>
#
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
# ## Build: two at a time, then three
#
# When two strategies meet, one takes what the other has left. Here a matrix of each layer is cut three times, down to
# the piece that rank 5 holds:

# %%
draw.weight_cut({"pp": 2, "shard": 2, "tp": 2}, rank=5)

# %% [markdown]
# FSDP shards the *part* that `tp` and `pp` have left, and not the whole matrix, and it gathers the part alone.
#
# ### Exercise 2: one layer in two dimensions (10 minutes)
#
# A linear layer `y = x @ w` is split by rows along `tp`, and its part is sharded along `dp`, the data's axis. Write its
# forward, and its backward by hand. `all_gather(full, piece, group=…)` fills `full`, which may be 2-D: the ranks' rows
# one after the other. `reduce_scatter(vector, group)` returns this rank's equal part of the sum of all vectors (1-D).
# For y use `dist.all_reduce`. Budget: along `dp` what FSDP sends for this part, along `tp` one all-reduce of y.

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
# [labs/parallel.py](../labs/parallel.py) puts three dimensions together in one order, which is the order of its code:
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


def steps(sizes, cases, order=AXES):
    """Two steps of each case; in the second one a rank sends what it sends from then on."""
    for batch, microbatches in cases:
        parallel = parallel_of(sizes, microbatches, order=order)
        for number in range(2):
            mark("step")
            few = [part[:batch] for part in loader[number]]
            parallel.forward_backward(*train.my_sequences(parallel.mesh, few))
            mark("end")


# %% [markdown]
# ## Build: which axis on which wire
#
# Run it on eight ranks. They are on two nodes, with a slow wire between them (notebook 05's `Link`). Three steps differ
# in their batch and micro-batches. If the batch is twice as large, by what factor do the bytes along `shard` grow?
# Below the table is the last of these steps as rank 0 recorded it, with a colour for each axis.

# %%
guess_factor = 1  # your number

CASES = {"batch 8": (8, 2), "batch 8, more micro-batches": (8, 4), "batch 16": (16, 4)}
wire, name, rows = Link(nodes=2, bandwidth="10 Mbit/s"), "pp × shard × tp", []
job = partial(on_cpu, steps, ranks=8, link=wire, record="communication")
found = {name: job(sizes, CASES.values(), tell=name).recording}
for number, (case, (_, m)) in enumerate(CASES.items()):
    sent = by_axis(found[name], 0, 2 * number + 1)
    sends = {axis: f"{sent[axis]:,} B" for axis in ("pp", "shard", "tp")}
    rows.append({"rank 0 sends": case, "micro-batches": m} | sends)
once, twice = (by_axis(found[name], 0, step)["shard"] for step in (3, 5))
display(draw.table(rows), draw.rank_by_axis(found[name], rank=0, step=5))
why = "They are parameters and gradients."
check.predict("The bytes along shard grow by", guess_factor, twice / once, reason=why)

# %% [markdown]
# In the timeline, `shard` has calls only at the beginning and at the end of a step, around all micro-batches. `tp` has
# some in every layer of every micro-batch. A bar along `pp` is the time in which the rank waits for a message of its
# neighbour; a thin mark is a message for which it did not wait.
#
# Along `pp` and `tp` activations travel: twice the batch, twice the bytes. Along the data's axes parameters and
# gradients do, once a step. More micro-batches of the same batch change no bytes. They are more calls, each with its
# latency, and they shorten the bubble.
#
# Now the order of the axes. The first axis of a mesh crosses from node to node, the others stay inside. In any order a
# rank sends the same bytes; what changes is who sits where. The first row below is the mesh that you have just seen.
# If `tp` comes first instead of `pp`, how many times as long is the wire busy?

# %%
guess_busy = 9  # your number

for order in (("replicate", "shard", "pp", "tp"), ("tp", "replicate", "shard", "pp")):
    name = " × ".join(axis for axis in order if axis != "replicate")
    found[name] = job(sizes, [CASES["batch 8"]], order, tell=name).recording
busy = []
for name, seen in found.items():
    busy.append(8 * sum(seen.across(rank, 1) for rank in range(4)) / wire.bandwidth)
    print(f"{name}: the wire is busy for {busy[-1]:.2f} s in a step")
display(draw.orders(found, step=1, sizes=EIGHT))
check.predict("The wire is busy, times:", guess_busy, round(busy[2] / busy[0], 1))

# %% [markdown]
# Each box has a rank's place on the axes (p 0 is the first stage); in bold is the axis whose ranks are on different
# nodes. With `tp` in bold, every all-reduce of every layer crosses the slow wire. So stages go between the nodes, and
# tensor parallelism stays inside. Shards are in between. They may travel while a rank computes, as a stage's message
# may (notebook 06); tensor parallelism waits for each of its messages.
#
# <details><summary>Do the axes disturb each other? In one place: the bubble.</summary>
#
# It takes (p − 1)/m of a step's computing, and m is the number of micro-batches of <em>one</em> rank's part of the
# batch. With twice as many data-parallel ranks, and the same batch and size of a micro-batch, m is half, and the bubble
# is twice as long.
# </details>
#
# ## Build: who averages what
#
# The layout is built. Is it still the training of one model? First the gradients. After its backward, a rank has a
# gradient for each of its parameters, and the optimizer needs that of the whole batch. Along `dp` (the data's axes, as
# one) ranks have the same parameter and different sequences, so they take the *mean*. Along the other two it depends on
# the parameter:
#
# | kind | for example | along tp, ranks have | along pp, ranks have |
# |---|---|---|---|
# | `"split"` | a query matrix | different columns | different layers |
# | `"whole"` | a norm's weight | the same gradient | different layers |
# | `"summand"` | a norm's weight, with sequences split (notebook 09) | the sum over its own tokens | different layers |
# | `"tied"` | an embedding that is the head, too | different words | a partial sum, at both ends |
#
# ### Exercise 3: combine (10 minutes)
#
# Write it down once, for all four kinds. A tied weight has two partial sums: one where it is the embedding, one where
# it is the head. The check has at most two stages then, so that every rank along `pp` holds one of them. Budget:
# nothing travels along an axis where nothing has to be added.


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
# ## Is it still one training?
#
# Train for two steps of AdamW in one process, then in two dimensions on four ranks, then in three on eight. If a
# gradient were combined wrongly anywhere, the norm of the gradients would tell: it is computed from all of them. How
# far are parameters from those of one process after the two steps?


# %% tags=["subject"]
def ours(sizes):
    """The norms of two steps, and this rank's parameters, whole."""
    parallel = parallel_of(sizes)
    batches = [train.my_sequences(parallel.mesh, loader[number]) for number in range(2)]
    backward, clip = parallel.forward_backward, parallel.clip_gradients
    norms = train.clipped(parallel.parameters(), backward, clip, batches)
    return norms, {name: p.detach() for name, p in parallel.full_parameters().items()}


# %%
[alone] = on_cpu(train.one_process, GPT(CONFIG), [loader[0], loader[1]], ranks=1)
jobs, norms = {}, {"one process": (alone[0], "0")}
for shape in ((2, 1, 1, 2), (2, 1, 2, 1), (1, 1, 2, 2), sizes):
    job = jobs[shape] = on_cpu(ours, shape, ranks=prod(shape), record="communication")
    off = train.largest_difference(job, alone)["parameter"]
    name = " × ".join(f"{a} {n}" for a, n in zip(AXES, shape, strict=True) if n > 1)
    norms[name] = job[0][0], "below 1e-5" if off < 1e-5 else f"{off:.1e}"
rows = []
for name, (of_steps, off) in norms.items():
    both = {f"step {n}": f"norm {norm:7.4f}" for n, norm in enumerate(of_steps)}
    rows.append({"training": name} | both | {"a parameter is off by at most": off})
draw.table(rows)

# %% [markdown]
# In these two steps it is one training. The norms agree within a unit of the fourth decimal, and all parameters within
# 10⁻⁵. The last digits may differ, since sums of float32 are taken in another order.
#
# PyTorch has all parts, too: `parallelize_module`, `fully_shard`, and the schedules of
# `torch.distributed.pipelining`. [labs/native](../labs/native/three_dimensions.py) puts them together in the same
# order: `native.parallel` splits and shards this rank's stage, and `native.pp` builds the pipeline.


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
# Each of the eight ranks now has two bars: ours on the left, PyTorch's on the right. The black lines are predictions,
# by formulas and without a run ([labs/cost/on_a_mesh.py](../labs/cost/on_a_mesh.py)). Bytes held are those of P and S
# when a step begins, and of a rank's own gradients G when they are reduced. The table below the bars has only the rows
# in which any number differs. Before you run it: which ranks hold the most, and why?

# %%
said = [train.predicted(CONFIG, sizes, rank, microbatches=2, batch=16) for rank in range(8)]
theirs = on_cpu(pytorchs, sizes, ranks=8, record="communication")
sides = {}
for name, way, job in (("ours", ours, jobs[sizes]), ("PyTorch's", pytorchs, theirs)):
    again = on_cpu(way, sizes, ranks=8, record="memory")
    sides[name] = sent_and_held(job.recording, again.recording)
print("PyTorch's:", ", ".join(f"norm {norm:7.4f}" for norm in theirs[0]))
names = {axis: f"send along {axis}" for axis in ("pp", "shard", "tp")}
names |= {kind: f"hold of {kind}" for kind in "PGS"}
every = (said, *sides.values())
equal = [n for n in names if all(len({side[r][n] for side in every}) == 1 for r in range(8))]
print("equal to the byte, on all ranks:", ", ".join(names.pop(n) for n in equal))
display(draw.sent_and_held(said, sides), draw.by_rank(*every, names=names))

# %% [markdown]
# Every bar ends at its line. Each rank holds an eighth of the state, but for norms, which are whole along `tp`. Ranks 4
# to 7 hold and send a little more than the others: the last stage has the model's last norm, and its split loss sends
# three numbers per token along `tp` (notebook 09b).
#
# To the eye both bars of a rank are equal. Our ranks send and hold what the formulas say, to the byte. PyTorch's send
# 60 to 80 bytes more along `shard` and `tp`, in a step of about 860,000. No cell here takes these apart.
#
# ## Build: the norm, over all axes
#
# One number is left that no axis knows alone. To clip gradients, every rank needs the norm of *all* of them (notebook
# 04). So each rank adds up the squares of its own gradients, and an all-reduce adds up these sums, one number for each
# rank. Two things can go wrong, and both have:
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


# %% tags=["subject"]
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
# Each rank's own norm is about a third of the right one, so each shortens its gradients too little. Neither mistake
# shows in the loss, which falls in either case: AdamW divides by the size of the gradients. The first optional part
# below has three mistakes in the *loss* that hide in the same way.
#
# ## Why, and why not
#
# **Why**: with few sequences per GPU, one dimension alone is slow (first picture). Then tensor parallelism fills a
# node, the data's axes take the GPUs that are left, and stages bridge nodes where weights would travel for longer than
# ranks compute. That is a rule for large models, and it need not send the fewest bytes between nodes: the challenge
# below asks which mesh does.
#
# **Why not**: where FSDP alone is hidden, a further dimension only adds waiting. Each one is also another way to be
# silently wrong, as the bugs above show. So compare with one process on a small model before you train a large one, and
# compare the norm of the gradients, not only the loss.
#
# ### On Monday, with 32 GPUs
#
# You have four nodes, the 70B model, and torchtitan. How many sequences has your step? Set the number; the table has
# the settings of the three layouts, and the seconds of a step by the first section's `step_time`, for the wire of 50
# GB/s per GPU and for one of 5.

# %%
mine = 16  # sequences of 4,096 tokens in a step

settings = {
    "FSDP 32": "data_parallel_shard_degree 32",
    "TP 8 × FSDP 4": "tensor_parallel_degree 8, data_parallel_shard_degree 4",
    "TP 8 × PP 4": "tensor_parallel_degree 8, pipeline_parallel_degree 4",
}
rows = []
for name, flags in settings.items():
    took = {n: step_time(mine, between=n, **LAYOUTS[name]) for n in (BETWEEN, 5)}
    row = {"layout": name} | {f"{n} GB/s": f"{t:.1f} s" for n, t in took.items()}
    rows.append(row | {"--parallelism. …": flags})
draw.table(rows)

# %% [markdown]
# 1. Begin with FSDP 32 and full activation checkpointing: it has the fewest ways to be wrong. Give each GPU one
#    sequence or more. If the activations of your batch do not fit, accumulate gradients; then every round gathers the
#    weights again.
# 2. If your step has fewer sequences than GPUs, take TP 8 × FSDP 4. Its price is the all-reduces in every layer.
# 3. Replace the four shards by four stages if the wire between your nodes is slow. At 5 GB/s even an eighth of the
#    weights travels for longer than the GPUs compute. The price of stages is the bubble.
#
# In all three a GPU holds 35 GB of P, G and S. Compare your first hundred steps with the table before you start the
# long run: it is a forecast by a rough model, and your wire may be slower than its name.

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
# <details><summary>Why did the 405B run need more than FSDP?</summary>
#
# It had an eighth of a sequence for each GPU, so eight GPUs had to share one, by TP. FSDP over the nodes would then
# have been just hidden by computing; stages leave each GPU fewer weights.
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
# Here it is open. Eight ranks train four models with different batches, on two nodes or on four. You choose the axes,
# their sizes and their order. A step is run for real, and the bytes that leave the busiest node, or come into it, are
# counted. The memory of a rank is limited: it holds at most 1/`pieces` of P, G and S. So where `pieces` is 8 there can
# be no replicas, and where it is 4 there can be two.
#
# **The bound.** There are n nodes. A node holds a fraction f of the layers, and reads a fraction g of the sequences;
# together the nodes do all the work once, so f·g = 1/n. Its layers are cut off from the others' at e places: e is 0 if
# it holds all layers, 1 if it holds half of them, and 2 in the middle of a longer pipeline. G is the bytes of the
# model's gradients, and X those of the activations of the whole batch between two layers.
#
# bytes of the busiest node ≥ 2 (1 − g) f G + e g X, at the best f and g
#
# Nothing can beat it: the 1/g nodes that hold the same layers must add up their gradients, as in an all-reduce, and the
# activations of a node's sequences, or their gradients, must cross each of its cuts. The picture has these two arrows
# out of one of four nodes.
#
# The table has the bytes of both arrows for each f, as gradients + activations; the bound is their smallest sum.
# `measured` runs one case on a mesh of yours. A case gives 100 points × bound / bytes, and the score is the mean of the
# four cases; `pp 2 × shard 2 × tp 2` scores 51.3.

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
display(draw.node_bound(nodes=4, stages=2), draw.table(rows))
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
# Here the notebook ends. **What follows is optional**: wrong losses, the four nodes of the beginning, and a script.
#
# ## Optional: the loss, over all axes
#
# What is the loss divided by? It should be the mean over all tokens of the batch. Two gradients and a log are wrong:
#
# | | a micro-batch's sum of losses is divided by the tokens of | gradients of micro-batches | along the data's axes |
# |---|---|---|---|
# | right | the rank's part of the batch | add up | are averaged |
# | **A** | *the micro-batch* | add up | are averaged |
# | **B** | *the whole batch*, of all ranks | add up | are averaged |
#
# **C** is for the log: the ranks of the last stage have the mean loss of their sequences, all others 0. All of it is
# added up over all ranks, and divided by their number.
#
# B was in [torchtitan#2323](https://github.com/pytorch/torchtitan/pull/2323). A mistake like A was in
# [torchtitan#2972](https://github.com/pytorch/torchtitan/issues/2972), which did not divide at all: there the factor is
# the number of tokens.
#
# In A and B all gradients are off by one factor, in C the loss in the log is. AdamW divides by the size of the
# gradients, so that the loss falls as before. The norm shows it.
#
# ### Exercise 5, optional: by which factor? (5 minutes)


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
# Does a real job show these factors? `over` tells `Parallel` by which number of tokens it has to divide a rank's sum of
# losses. The job trains with the right number, then with that of one micro-batch (A), then with that of the whole batch
# (B), and compares the norms of the gradients.


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
# ## Optional: four nodes
#
# Nobody here has four nodes of eight GPUs. But the real code can be run as one rank of 32, on a device that only
# pretends: it computes no numbers, and records what the rank would hold and send (a **dry run**), in float32 and
# without recomputing. Are the formulas of `labs.cost` right for such a rank? Four layers are enough to see it, since
# all layers are alike. For all 80 layers the second table trusts the formulas:

# %%
LLAMA, rows = replace(PRESETS["llama3-70b"], context=4096), []
short = replace(LLAMA, depth=4)
for name, shape, m in ("TP 8 × FSDP 4", (1, 1, 4, 8), 1), ("TP 8 × PP 4", (4, 1, 1, 8), 4):
    said = train.predicted(short, shape, 0, m, m * shape[2], sequence_parallel=True)
    rank_0 = train.dry_step(short, shape, m)
    sent = said["pp"] + said["shard"] + said["tp"]
    own = {"sends, predicted": sent, "peak, predicted": said["peak"]}
    own |= {"sends": rank_0.communication.sent(0, 1), "peak": rank_0.memory.steady(0)["peak"]}
    rows.append({"4 layers": name} | {k: f"{n / 1e9:.2f} GB" for k, n in sorted(own.items())})
draw.table(rows)

# %%
RANK_0 = {  # and how many micro-batches of one sequence on a rank, for 32 sequences in a step
    "TP 8 × FSDP 4": ((1, 1, 4, 8), 8),
    "FSDP 32": ((1, 1, 32, 1), 1),
    "TP 8 × PP 4": ((4, 1, 1, 8), 32),
}
rows = []
for layout, (shape, microbatches) in RANK_0.items():
    said = train.predicted(LLAMA, shape, 0, microbatches, 32, sequence_parallel=True)
    held = {"P, G, S": said["P"] + said["G"] + said["S"], "peak": said["peak"]}
    sends = {f"sends along {axis}": said[axis] for axis in ("pp", "shard", "tp")}
    in_GB = {key: f"{n / 1e9:,.1f} GB" for key, n in (held | sends).items()}
    rows.append({"rank 0 of 32": layout} | in_GB)
draw.table(rows)

# %% [markdown]
# P, G and S fit on a card of 80 GB in all three. At the peak, with activations in float32 and without recomputing,
# none of them does. With 16-bit numbers and some recomputing TP 8 × FSDP 4 fits (notebook 15 shows it).
#
# What leaves a node? With FSDP 32 one ring passes through all nodes: 547 GB, in float32. With TP 8 × FSDP 4 there are
# eight rings, one for each part of a matrix: 8 × 53 GB. With TP 8 × PP 4 it is 8 × 0.5 GB.
#
# ## Optional: a way out
#
# Here are the three dimensions in an ordinary script, with nothing of the course but the data and the model. It is
# [scripts/parallel.py](../scripts/parallel.py). From the root of the repository, run
# `torchrun --nproc-per-node 8 scripts/parallel.py`.
#
# <details><summary>The script</summary>
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
#
# </details>

# %% [markdown]
# **Read on**: [labs/parallel.py](../labs/parallel.py), then [labs/cost/on_a_mesh.py](../labs/cost/on_a_mesh.py).
# Narayanan et al., 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (arXiv
# 2104.04473), section 3. Liang et al., 2024, *TorchTitan* (arXiv 2410.06511).
#
# **Next.** What is still unsolved: all of this ran on one machine that you had for yourself. [11b
# Clusters](11b_clusters.ipynb) runs the same job on two hosts, and in a queue with other people's jobs.
#
# A clean copy of this notebook: `git restore notebooks/11_three_dimensions.ipynb`, then *File > Reload Notebook from
# Disk*.
