# %% [markdown]
# # Tensor parallelism, second part: the loss, the plan, and the wire
#
# *For one sequence of 8,192 tokens, the output head of Llama 3 405B computes 4.2 GB of logits in float32. From all of
# them follows one number, the loss. Can each rank hold only its shard of the logits, and what must the ranks exchange?*
#
# You need: [Tensor parallelism](09_tensor_parallel.ipynb); for the second axis, [FSDP](06_fsdp.ipynb).
# **Minutes**, by estimate: 25 without exercises, 50 with them, 5 more for optional parts, 25 more for the challenge.
# The machine works for about a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("09b")

# %% [markdown]
# ## Question
#
# The last notebook split a layer over the ranks of a tensor-parallel group. This one splits a whole model, and asks one
# question at each step: **how many bytes must travel?** First for the loss, the end of the model. Then for all its
# layers, which a *plan* describes. And last for a cluster: does tensor parallelism (TP) send little enough to leave a
# node?
#
# A model ends with its *output head*, which gives each token one number for every entry of the vocabulary: its
# *logits*. If the head is split, each rank has the logits of its shard of the vocabulary. The loss needs all logits, or
# so it seems:

# %%
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs import cost
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import Link, run
from labs.kit.train import in_turn, ledgers, recorded, strategies
from labs.model import GPT, PRESETS
from labs.tp import gpt_plan

# %%
llama = 4 * PRESETS["llama3-405b"].vocab * 8192 / 1e9
print(f"for a sequence of Llama 3: {llama:.1f} GB of logits in float32")
print(f"an eighth of them: {llama / 8:.2f} GB")

# %% [markdown]
# ## Picture
#
# ![Four ranks, each with a block of logits: all tokens, and a quarter of the vocabulary. From each block go three
# numbers per token, of which one only where the target is. The loss is made of them, the same on every
# rank.](../images/split_loss.svg)
#
# ## Predict
#
# In the picture, each rank all-reduces three numbers per token. You could instead all-gather the logits and compute
# the loss on every rank. Take four ranks, a vocabulary of 256, and float32. By how many bytes per token does a rank
# then send *more* than in the picture?

# %%
guess_more = 750  # your number

# %% [markdown]
# ## Build: a loss that never gathers the logits
#
# Gathering the logits would undo the saving. But look at what the loss of a token is:
#
#     loss = log(sum of exp(logit - highest)) - (target's logit - highest)
#
# It takes three numbers per token: the highest logit, a sum of exponentials, and the logit of the target. The first is
# a maximum over all ranks, and the second a sum over all ranks. One rank has the third; if the others contribute zero,
# it is a sum as well. The highest logit is subtracted because exp(100) is infinite in float32. It cancels in the
# formula, so the loss does not depend on it and its gradient is not needed: take it from a detached tensor, by an
# all-reduce with `dist.ReduceOp.MAX`.
#
# ### Exercise 1: the loss of a split vocabulary (15 minutes)
#
# With `reduce` of the last notebook, autograd computes the gradient by itself. The first lines are given. They append
# one column of −inf to the logits, and let every target that belongs to another rank point to it, so that `gather`
# works on each rank. These targets must then contribute zero: set their values with `where` or `masked_fill`, since
# multiplying by a mask would give −inf × 0, which is not a number.
#
# The check compares the loss and the gradient of the logits on 1 to 8 ranks and in sub-groups. It uses vocabularies
# that the number of ranks does not divide (a rank may have no column), logits of ±10,000, and a gradient of the loss
# other than 1. It also measures bytes sent and held. Your budget is three numbers per token in forward, none in
# backward, and never a gathered logit. You may use at most 12 all-reduces, so process the tokens in a few chunks at
# most, not one by one.


# %% tags=["exercise"]
reduce = check.conjugate.reduce  # of the last notebook


def split_loss(logits, targets, first, group=None):
    """Return the mean cross-entropy of all tokens, in nats (0-dim), the same on all ranks.

    logits: [tokens, v], the logits of this rank's shard of the vocabulary; v may be 0
    targets: [tokens], the targets in the whole vocabulary, the same on every rank
    first: first entry of the vocabulary in this rank's shard
    group: process group of the ranks that share the vocabulary
    """
    v = logits.shape[1]
    here = (targets >= first) & (targets < first + v)  # the targets in this rank's shard
    column = (targets - first).where(here, v)  # other targets point behind the last column
    logits = F.pad(logits, (0, 1), value=-torch.inf)  # the column behind the last one
    ### BEGIN SOLUTION
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    mine = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    exponentials, target = reduce(torch.stack([shifted.exp().sum(1), mine]), group)
    return (exponentials.log() - target).mean()
    ### END SOLUTION


check.split_loss(split_loss)

# %% [markdown]
# How much does this loss save? Train the last notebook's GPT with `gpt_plan`, whose loss is split, and with a plan that
# gathers the logits and takes the ordinary loss. The first cell compares what a rank sends, the second what it holds:

# %%
from labs.dtensor import Replicate, Shard
from labs.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from labs.tp.conjugate import gather, scatter
from labs.tp.parameter_cuts import Keys, Queries

CONFIG, SEQUENCES = replace(PRESETS["small"], depth=2, kv_heads=4), 4  # as in the last notebook
loader = Batches(corpus().tokens, SEQUENCES, CONFIG.context)
batches = [loader[number] for number in range(2)]
float32, on_cpu = partial(GPT, CONFIG), partial(run, device="cpu")

# %% tags=["subject"]
plan = gpt_plan(CONFIG) | {"head": ColwiseParallel(output_layouts=Replicate())}
del plan["loss"]
losses = {"loss split": gpt_plan(CONFIG), "logits gathered": plan}
losses = {name: strategies.by_plan(each) for name, each in losses.items()}
found = ledgers(losses, float32, [*batches, loader[2]])

on_paper = cost.Job(CONFIG, batch=SEQUENCES, ranks=4)
more = found["logits gathered"].sent - found["loss split"].sent
TOKENS = SEQUENCES * CONFIG.context
more /= TOKENS
reason = "4 × (3/4 × 256 − 2 × 3/4 × 3): 256 numbers are gathered, and 3 all-reduced."
check.predict("Bytes more for each token?", guess_more, more, unit="bytes", reason=reason)

# %%
rows = []
for name, each in found.items():
    rows.append({"": name, "sent": each.sent // TOKENS, "peak": each.held["peak"] // TOKENS})
draw.table(rows, caption="bytes per token, rank 0 of 4; all logits of a token take 1,024")

# %% [markdown]
# Gathering the logits raises the peak by about 1.5 kB per token, more than all logits of the token take. Llama 3's
# vocabulary has 128,256 entries, so its logits are 500 times as large.
#
# ## Build: the plan
#
# The head is done. A **plan** says how all other modules are split: it is a table that gives a submodule's name a
# *style*. A module without a row is replicated on every rank. The names of the styles are PyTorch's, except for the
# last; the argument `heads=` is the course's. A column-split and a row-split matrix
# make a pair, as in the last notebook. Below, `between` is the layout of x between one pair and the next: `Replicate()`
# if every rank has all of x, `Shard(1)` if each rank has a shard of the tokens (dim 1).
#
# - `ColwiseParallel()` and `RowwiseParallel(output_layouts=between)` are the two halves of a pair. With `heads=`, a
#   `Queries(H, K)` or `Keys(H, K)` of [labs/tp/parameter_cuts.py](../labs/tp/parameter_cuts.py), they split between
#   heads only.
# - `PrepareModuleInput(input_layouts=between)` is for a module that contains a pair. It converts the module's input
#   from `between` to a replicated tensor, once for all column-split matrices that read it.
# - `SequenceParallel()` is for a module that reads a shard of the tokens. The gradients of its parameters are partial
#   sums, which are added up over the ranks.
# - `LossParallel(vocabulary)` is the loss of exercise 1.
#
# Here is the plan of the course's own model, with sequence parallelism. The picture shows each rank's shard of every
# weight (inputs down, outputs across, as in the last notebook) and the collective at each border. This model has four
# query heads and two key and value heads, so on four ranks two ranks share each of the latter. `*` stands for one
# component of a name.

# %%
draw.plan(gpt_plan(PRESETS["small"], sequence_parallel=True), GPT(PRESETS["small"]))

# %% [markdown]
# A name may be a pattern: in `layers.*.mlp.[gu]*`, the first `*` is any layer, and the rest are `gate` and `up`.
#
# ### Exercise 2: the plan of a block that you have not seen (10 minutes)
#
# The block below occurs nowhere else in the course. Somebody has trained it on one device. Split it over 2 ranks, and
# over 4, without changing its code:

# %%
print(check.block_plan.source)

# %% [markdown]
# Write its plan. The check counts in units of x: on four ranks an all-reduce sends 2 × 3/4 of x, so two of them send
# 3.00 × x. It also tries fewer key and value heads than ranks, and numbers of heads that the ranks do not
# divide.
#
# <details><summary>A first hint</summary>
#
# Follow one token through `forward`, and write beside each line what a rank can have there: all of x, some of the
# features, or a partial sum. Which line combines two tensors that are split?
# </details>
#
# <details><summary>A second hint</summary>
#
# A rank that has a head needs everything that belongs to the head. How many matrices is that? Do not judge by a
# matrix's width.
# </details>
#
# <details><summary>A third hint, on what is sent</summary>
#
# Four matrices of the mixer read the same x. And with sequence parallelism, which modules have parameters, but read
# only a shard of the tokens?
# </details>


# %% tags=["exercise"]
def block_plan(config, sequence_parallel):
    """Return the plan of Stranger(config), as {name of a submodule: style}.

    - Output and gradients equal those of one process.
    - A rank holds its shard of every matrix, and no more.
    - A rank sends two collectives in forward and two in backward; with sequence_parallel, four
      and four, and the gradients of two norms.  If ranks share a key or value head, they also
      send its gradients.

    config: has `heads` and `kv_heads`
    sequence_parallel: if False, x is replicated at input and output; if True, each rank has a
        shard of dim 1
    """
    ### BEGIN SOLUTION
    between = Shard(1) if sequence_parallel else Replicate()
    queries, keys = (kind(config.heads, config.kv_heads) for kind in (Queries, Keys))
    split = {
        **dict.fromkeys(("mixer", "ffn"), PrepareModuleInput(input_layouts=between)),
        **dict.fromkeys(("mixer.query", "mixer.gates"), ColwiseParallel(heads=queries)),
        "mixer.[kv]*": ColwiseParallel(heads=keys),
        "mixer.out": RowwiseParallel(heads=queries, output_layouts=between),
        "ffn.w[13]": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=between),
    }
    return split | ({"norm_*": SequenceParallel()} if sequence_parallel else {})
    ### END SOLUTION


check.block_plan(block_plan)

# %% [markdown]
# You can write such a plan for your own model, with the names of its submodules. Each rank then has ordinary parameters
# of smaller shapes, so other strategies need not know about the plan, and neither does an optimizer such as AdamW,
# which treats every number separately. Two things must know it: an optimizer that needs whole matrices, like Muon, and
# the norm of all gradients, because a replicated gradient counts once. Use `clip_gradients` of
# [labs/tp/tp.py](../labs/tp/tp.py).
#
# ## Measure: does TP send little?
#
# A plan splits the model. So do FSDP's shards, and DDP splits nothing but the batch. Which of the three sends least?
# Train the same model with the same batch on four ranks. DDP sends *gradients*, and FSDP *parameters and gradients*:
# the same number of bytes for one token as for a million. TP sends *activations*, a fixed number of bytes for each
# token of the whole batch. So TP sends the least for few tokens and the most for many. From how many tokens in a batch
# does TP send more than DDP? Answer in multiples of the width D.

# %%
guess_tokens = 3  # your number, × D

# %% [markdown]
# The lines are the formulas of `cost`, for four sequences of 8 to 256 tokens; the model's width D is 128. The circles
# are measured: all three strategies at sequences of 128 tokens (4 D in the batch), and TP at 92, just above the
# crossing.


# %% tags=["subject"]
def sent(length):
    """Return the bytes that a rank sends with four sequences of this length, by strategy."""
    config = replace(CONFIG, context=length)
    a_part = cost.Job(config, batch=1, ranks=4)  # DDP, FSDP: a quarter of the batch
    whole = cost.Job(config, batch=SEQUENCES, ranks=4)  # TP: all of it
    data_parallel = {"DDP": cost.ddp(a_part, "bucketed").sent, "FSDP": cost.fsdp(a_part).sent}
    return data_parallel | {"TP": cost.tp(whole).sent}


# %%
TP = strategies.by_plan(gpt_plan(CONFIG))
ways = {"DDP": strategies.ROWS["ddp-bucketed"], "FSDP": strategies.ROWS["fsdp"], "TP": TP}
short = [tuple(part[:, :92] for part in batch) for batch in batches]
jobs = {128: recorded(ways, float32, batches), 92: recorded({"TP": TP}, float32, short)}

rows = {
    f"{way}, {length} tokens": (sent(length)[way], found["sent"])
    for length, measured in jobs.items()
    for way, found in measured.items()
}
draw.ledger(rows, within=0)

# %%
times_D = SEQUENCES / CONFIG.dim  # of a length, for the tokens in the batch as a multiple of D
by_length = {length: sent(length) for length in range(8, 257)}
lines = {w: [(times_D * n, by[w] / 1e6) for n, by in by_length.items()] for w in ways}
measured = {"TP": [(times_D * n, job["TP"]["sent"] / 1e6) for n, job in jobs.items()]}
measured |= {w: [(times_D * 128, jobs[128][w]["sent"] / 1e6)] for w in ("DDP", "FSDP")}
kinds = {"DDP": "G", "FSDP": "P", "TP": "A"}
draw.crossings(
    lines, kinds, "tokens in the batch, × D", "MB that a rank sends in a step", measured,
    caption="TP sends the least for few tokens, and the most for many",
)  # fmt: skip

# %%
met = next(times_D * n for n, by in by_length.items() if by["TP"] > by["DDP"])
why = "Sequences of 92 tokens. A layer has 12 D² gradients, and 4 D for each token."
check.predict("Tokens, × D?", guess_tokens, met, reason=why)

# %% [markdown]
# The crossing is easy to remember. A layer has about 12 D² parameters, whose gradients DDP all-reduces. TP
# all-reduces 4 tensors with D numbers per token. Both send the same at 12 D²/4 D = **3 D tokens** in the batch of a
# TP group. FSDP sends 1.5 times as much as DDP for a layer, so its crossing is at 4.5 D. In so small a model, the
# embedding and the head move both crossings a little: to 2.8 D and 4.1 D. Llama 3 405B has a width of 16,384, so 3 D
# are 49,152 tokens, six sequences of 8,192. In its training, each TP group read 16 such sequences in a step: 2,048 of
# them, divided among 128 data-parallel replicas (arXiv 2407.21783, table 4). There **TP sends the most**, not the
# least. Where in a cluster can it send that much?
#
# ## Two axes: FSDP over TP
#
# In this layout, TP cannot use more ranks than there are query heads, so a large cluster needs a second axis. Split the
# model along `tp` first, and then shard each rank's parameters along `dp`. Ranks along `tp` read the same sequences;
# ranks along `dp` read different ones:


# %% tags=["subject"]
from labs.fsdp import fully_shard
from labs.tp import full_parameters, parallelize


def two_axes(model, mesh):
    """Apply TP along one axis of the mesh, and FSDP along the other."""
    parallelize(model, mesh["tp"], gpt_plan(model.config, sequence_parallel=True))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    training = strategies.replicated(model, partial(strategies.backward, model))
    return replace(training, full=partial(full_parameters, model))


# %% [markdown]
# Now take two nodes of two GPUs, with a slow link between the nodes. The last axis of a mesh is made of neighbours,
# which share a node. So `dp × tp` has each TP group inside a node, and `tp × dp` has each FSDP group inside. A step has
# 16 sequences of 128 tokens. By what factor do the bytes that leave a node differ?

# %%
guess_order = 4  # your number


# %%
def of_axes(*names):  # outermost first
    row = strategies.ROWS["fsdp-tp"]
    return replace(row, apply=two_axes, axes=lambda ranks: dict.fromkeys(names, 2))


many = Batches(corpus().tokens, 16, CONFIG.context)
AXES = {" × ".join(names): of_axes(*names) for names in (("dp", "tp"), ("tp", "dp"))}
job = partial(on_cpu, in_turn, AXES, float32, [many[0], many[1]], ranks=4)
link = Link(nodes=2, bandwidth="1 Gbit/s")
found = job(record="communication", link=link, tell="bytes").recording
draw.wire(found, {"dp × tp": 1, "tp × dp": 3}, {"dp": "P", "tp": "A"})

# %%
inside, between = (found.across(0, step) for step in (1, 3))
why = "TP sends activations in every layer; FSDP gathers twice and reduces once."
check.predict("Times as much?", guess_order, round(between / inside, 1), reason=why)

# %% [markdown]
# With `tp` last, 2.7 MB leave each node; with `tp` first, 10.5 MB do. The factor of 3.9 belongs to 16 sequences: TP's
# bytes grow with the tokens, and FSDP's do not. With more than about 4 D tokens TP sends more, and training runs read
# more, so TP is the last axis of a mesh. With fewer tokens it would be the other way round. (Llama's authors list
# their axes in the opposite order: their first one, TP, is the innermost.) Both orders are the same training, and
# each rank sends what the formulas of TP and FSDP say:

# %%
half = cost.Job(CONFIG, batch=8, ranks=4)  # of the 16 sequences, a TP group reads 8
said = cost.fsdp_tp(half, sequence_parallel=True).sent
print("sent as predicted, to the byte:", all(found.sent(0, step) == said for step in (1, 3)))


def float64():
    return GPT(CONFIG).double()


sharded = replace(strategies.ROWS["torch-tp-sp"], axes=lambda ranks: {"tp": ranks})  # PyTorch's
[expected] = on_cpu(in_turn, {"one": strategies.ONE_DEVICE}, float64, batches, keep=2, ranks=1)
kept = on_cpu(in_turn, AXES | {"PyTorch's TP": sharded}, float64, batches, keep=2, ranks=4)[0]
for name, full in kept.items():
    off = max((p - expected["one"][key]).abs().max() for key, p in full.items())
    print(f"{name}: within 1e-12 of one process: {bool(off < 1e-12)}")

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: the loss of a fresh model is 47.88 instead of log(151,936), about 11.93.
# > *Cause*: each rank divides its sum of losses by the number of tokens in the whole batch. Hugging Face's trainer
# > multiplied by the number of ranks, so that the mean over all ranks is right. On eight ranks along `dp` the loss is
# > 11.97, as it should be. On a mesh of 2 × 4, the four ranks along the second axis (which holds experts) read the
# > *same* tokens, so the loss counted four times
# > ([transformers#45994](https://github.com/huggingface/transformers/pull/45994), May 2026). *Rule*: to average over
# > data, count the ranks along the axes that split the data, and along no other.
#
# ## Native
#
# The last line above is PyTorch's `parallelize_module`, which takes a table like ours.
# [labs/native/parallelize_module.py](../labs/native/parallelize_module.py) converts our plan to its styles. Its
# parameters are DTensors, and `loss_parallel()` is a context in which the loss accepts split logits. The cell measures
# what it sends and holds, with sequence parallelism, beside our formulas (which the last notebook compared with our own
# code):

# %%
[theirs] = recorded({"PyTorch's": sharded}, float32, batches).values()
watched = {"ranks": 4, "record": "memory", "tell": "held"}
held = on_cpu(in_turn, {"": sharded}, float32, batches, **watched)
theirs |= held.recording.steady(0)

said = cost.tp(on_paper, sequence_parallel=True)
ours = {"sent": said.sent, "collectives": sum(said.collectives.values()), "in the optimizer": 0}
ours |= vars(said.held)
shown = ("sent", "collectives", "in the optimizer", *"PGSA")
both = {"ours": ours, "PyTorch's": theirs}
rows = [{"": whose} | {kind: each[kind] for kind in shown} for whose, each in both.items()]
draw.table(rows, caption="bytes, rank 0")

# %% [markdown]
# PyTorch does more in three places:
#
# - Its loss adds up the exponentials and the targets' logits in two all-reduces; ours needs one.
# - It leaves the gradients of the five norms as partial sums, `Partial()`. Each time that AdamW reads such a gradient,
#   the ranks add it up by an all-reduce, and AdamW reads each three times.
# - On every rank, the gradient of the embedding is as large as the whole embedding. Ours has only the rank's own rows.
#
# PyTorch's implementation also splits features without regard to heads. With fewer key and value heads than ranks, you
# must repeat the heads by hand. The bytes in the table are logical: on CPUs its reduce-scatter is gloo's, which sends
# more, as in notebook 04.
#
# ## Why, and why not
#
# **Why** use TP: it divides parameters, gradients and optimizer state, and with sequence parallelism the activations as
# well, without more sequences in the batch. It lets several ranks work on one sequence, and one token.
#
# **Why not**: with the batches of training, TP sends the most, and the computation waits for every collective. Hiding
# them takes extra work (async TP, in the optional part), whereas DDP and FSDP hide theirs easily.
#
# Which link is fast enough? Compare the time of one layer's computation with that of its four all-reduces, when N
# devices process T tokens:
#
# - The computation takes 6ψT/(NR) seconds, if the layer has ψ parameters, and a device does R operations per second.
# - The all-reduces take 16 (N − 1)/N × TD/W seconds, if x has the width D with 2 bytes per number, and a link carries W
#   bytes per second.
#
# T cancels in the ratio of the two: a larger batch does not help, only a wider model or a faster link. The bars show
# this ratio on 8 ranks; each rank uses one link, as it does if it is the group's only rank on its node. R is what an
# H100 reached in Llama 3's training (arXiv 2407.21783, table 4). That includes its waiting, so a device computes faster
# than R, and the figures are the least that one should expect:

# %%
links = ("NVLink 4", "InfiniBand, 400 Gb/s", "Ethernet, 10 Gb/s")
bars = {}
for name in ("llama3-8b", "llama3-405b"):
    config = PRESETS[name]
    computing = 6 * sum(cost.gpt_layers(config)[1].sizes) / cost.FLOPS  # seconds, × T/N
    sending = 16 * (8 - 1) * config.dim  # bytes, × T/N
    bars[name] = {link: sending / cost.LINKS[link].bandwidth / computing for link in links}
words = "communication is shorter", "communication is longer"
draw.ratios(bars, words, "Seconds of communication per second of computation, on 8 ranks")

# %% [markdown]
# With NVLink, TP communicates for a third of the time in which it computes the 8B model, and for less than a tenth with
# 405B. Over InfiniBand, 8B would communicate for almost three times as long as it computes. So TP stays inside a node.
#
# ### A way out
#
# Here is PyTorch's `parallelize_module` in an ordinary script, which imports only the data and the model from this
# course: [scripts/tp.py](../scripts/tp.py). From the root of the repository, run
# `torchrun --nproc-per-node 2 scripts/tp.py`.
#
# <details><summary>The script</summary>
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.tensor import Replicate, Shard
# from torch.distributed.tensor.parallel import (
#     ColwiseParallel,
#     PrepareModuleInput,
#     RowwiseParallel,
#     SequenceParallel,
#     loss_parallel,
#     parallelize_module,
# )
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# dist.init_process_group()
# device = "cuda" if torch.cuda.is_available() else "cpu"
# if device == "cuda":
#     torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
# mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
#
# shard, whole = Shard(1), Replicate()
# enter = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(whole,))
# plan = {
#     "embed": RowwiseParallel(input_layouts=whole, output_layouts=shard),
#     "norm": SequenceParallel(),
#     "head": ColwiseParallel(input_layouts=shard, use_local_output=False),
# }
# layer = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": enter, "mlp": enter}
# layer |= {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
# layer |= {name: RowwiseParallel(output_layouts=shard) for name in ("attention.o", "mlp.down")}
#
# config = PRESETS["small"]  # two heads of keys and values, so two ranks at most
# model = GPT(config).to(device)
# parallelize_module(model, mesh, plan | {f"layers.*.{name}": style for name, style in layer.items()})
#
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# batches = Batches(corpus().tokens, 16, config.context)
# for step in range(10):
#     x, y = (part.to(device) for part in batches[step])  # all ranks read the same
#     with loss_parallel():
#         loss = model(x, y)
#         loss.backward()
#     for p in model.parameters():  # the norms' gradients are summands, which PyTorch 2.11 would leave unclipped
#         p.grad = p.grad.redistribute(placements=p.placements)
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#     if dist.get_rank() == 0:
#         print(f"step {step}: loss {loss.item():.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```
# </details>

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>You train a model of 8B with a batch of a million tokens on two nodes of eight GPUs, with NVLink
# inside. Which axis goes where, and when would you not use TP at all?</summary>
#
# Put TP inside a node, as the last axis of the mesh, and data parallelism between the nodes. If the model fits with
# FSDP and there are enough sequences for all ranks, FSDP alone sends less: a million tokens are far more than 4.5 D.
# </details>
#
# <details><summary>The vocabulary is split over the ranks. How can they work out the loss without gathering any
# logits?</summary>
#
# The ranks exchange three numbers per token: the highest logit, as a maximum over the ranks; the sum of the
# exponentials; and the target's logit, which one rank has and to which the others add zero.
# </details>
#
# <details><summary>From how many tokens in a batch does TP send more than DDP, and why does this number grow with the
# width?</summary>
#
# TP sends more from about 3 D tokens on. DDP all-reduces the gradients of a layer, 12 D² numbers, however many tokens
# there are. TP all-reduces 4 D numbers for each token.
# </details>
#
# Let N ranks process M tokens of D numbers (b bytes each) in L layers. With sequence parallelism, PyTorch's
# implementation sends and holds on each rank (ours is in the last notebook's table):
#
# | | predicted | PyTorch's |
# |---|---|---|
# | sent | (4L + 2) × 2 (N − 1)/N × MDb, three numbers per token, the norms' gradients | the norms' three times |
# | collectives of a layer | 8, and 2 for its norms | 8, and 6 for its norms, in the optimizer |
# | P, G, S | 1/N, except for the norms | G: all of the embedding's |
# | A | by `cost.tp` | within 0.1 % |
# | numbers | one process's | within 1e-12, in float64 |

# %% [markdown]
# ## Beat it: one block over a node boundary (20 minutes)
#
# This part is open: there is no final answer. Two nodes of two ranks compute the block `silu(x @ up) @ down`. Each
# rank has a quarter of the T tokens and a quarter of the H features, and it needs y for its own tokens. Autograd
# computes the gradients. Communication inside a node is free. A message of m numbers to the other node takes α + m/W,
# with α = 0.5 ms and W = 1,000 numbers per ms. A collective sends one message to each rank to which it sends data; you
# may also use `dist.send` and autograd functions of your own. The job is real, and the score counts how long the
# outgoing link of the busier node is in use. Messages leave a node one at a time, whichever of its ranks sends them.
# The time that a rank waits for a message to arrive does not count.
#
# > **The bound.** Let T be the tokens, D the width, H the features, α the latency, W the numbers per second of the
# > link, and t the seconds for which the busier node uses it.
# >
# > t ≥ 2α + 2 D min(T, H)/W
# >
# > Nothing can beat it, because in forward and again in backward a node needs either T × D numbers that depend on the
# > other node's weights, or the other node's D × H weights (or their gradients), in at least one message each time.
#
# **A point** is one per cent of this speed: a block scores 100 × bound/t, and your points are the mean of five blocks.
# `beat.boundary.measured(block, fn)` tries a function on one of them, and returns the messages, numbers and seconds of
# the busier node. Here it tries the first idea, in which all tokens go to all ranks. Add your own functions to `TRIES`.


# %% tags=["subject"]
def tokens_everywhere(x, up, down, mesh):
    """Gather all tokens on every rank, multiply by its features, and scatter the sums."""
    nodes, gpus = mesh["nodes"], mesh["gpus"]
    x = gather(gather(x, gpus, 0), nodes, 0)
    return scatter(scatter(F.silu(x @ up) @ down, nodes, 0), gpus, 0)


TRIES = {"tokens everywhere": tokens_everywhere}

# %%
blocks = beat.boundary.cases
rows = [{"": n, "T": b.tokens, "D": b.width, "H": b.features} for n, b in blocks.items()]
draw.table(rows)

# %%
bars = {}
for name, block in blocks.items():
    bound = beat.boundary.bound(block)
    bars[f"{name}: the bound"] = {"waiting": 1e-3, "communication": bound - 1e-3}
    for called, fn in TRIES.items():
        took = beat.boundary.measured(name, fn)
        latency = took.messages * 0.5e-3
        parts = {"waiting": latency, "communication": took.seconds - latency}
        bars[f"{name}: {called}"] = parts
words = {"waiting": "latency", "communication": "numbers"}
caption = "Time of the busier node's link: latency (grey), numbers (orange)"
draw.chart(bars, "s", words=words, caption=caption)

# %% [markdown]
# An answer with one group of all four ranks, as in most of this notebook, scores 28.7; the course's own scores 58.4.
# Before you write anything: in which of these blocks is it cheaper to send the weights?


# %% tags=["exercise"]
def over_the_boundary(x, up, down, mesh):
    """Return y for this rank's tokens, [t, D]; y.backward gives the gradients of x, up, down.

    x: [t, D] in float64, this rank's quarter of the tokens
    up: [D, h] in float64, this rank's quarter of the features
    down: [h, D] in float64, this rank's quarter of the features
    mesh: 2 × 2, with the axes "nodes" and "gpus"; use it as in gather(x, mesh["nodes"], dim=0),
        and in scatter likewise
    """
    ### BEGIN SOLUTION
    nodes, gpus = mesh["nodes"], mesh["gpus"]
    if len(x) < up.shape[1]:  # few tokens: they cross before they are copied inside a node
        x = gather(gather(x, nodes, 0), gpus, 0)
        return scatter(scatter(F.silu(x @ up) @ down, gpus, 0), nodes, 0)
    up, down, x = gather(up, nodes, 1), gather(down, nodes, 0), gather(x, gpus, 0)
    return scatter(F.silu(x @ up) @ down, gpus, 0)
    ### END SOLUTION


beat.boundary(over_the_boundary)

# %% [markdown]
# Each try in this notebook is kept, and `python -m labs challenges` shows your best.
#
# <details><summary>Where is there room?</summary>
#
# Count the messages that leave a node. Do both of its ranks have to send, must two tensors be two messages, and must
# both nodes ask at once? Then decide for each block what crosses in forward and what in backward. It need not be the
# same.
# </details>
#
# Here the notebook ends. **What follows is optional**: an explorer, the latency of a token, and a way to overlap TP's
# communication.
#
# ## Optional: the tensor-parallel explorer
#
# Here is a GPT with Llama 3's proportions. The explorer shows each rank's shard of every matrix, what rank 0 sends, and
# what it holds, by the last notebook's formulas. From which TP degree on do neighbours share key and value heads? What
# shrinks if x is sharded along the tokens? What doubles with the sequence, and what with the width?

# %%
play.tensor_parallel()

# %% [markdown]
# <details><summary>Answers</summary>
#
# They share heads at a TP degree of 16, since there are 8 key and value heads. For this they send two small all-reduces
# in each layer, of the gradients of k and v. Sequence parallelism shrinks the activations, and sends almost nothing
# more. Doubling the sequence doubles the activations and all bytes sent; P, G and S stay the same. Doubling the width
# also doubles the bytes sent, but a layer's parameters and its computation grow about fourfold, so TP pays in wide
# models.
#
# </details>
#
# ## Optional: latency, when a token gets slower
#
# TP also serves inference. A model that generates text computes one token at a time, and needs *all* its weights for
# each. Most of the time goes into reading the weights from memory, and each of N ranks reads only 1/N of them.
# `generate` keeps the keys and values of earlier tokens in a *cache* ([labs/generate.py](../labs/generate.py)), so that
# only the new token passes through the model. A rank caches its own heads. All ranks see the same logits, and sample
# with the same seed:

# %% tags=["subject"]
from labs.generate import generate
from labs.mesh import Mesh

CHAT = replace(PRESETS["medium"], dim=256, depth=4, heads=8, kv_heads=4, hidden=704)


def answer():
    """Generate 12 tokens with a model that all ranks share."""
    model = parallelize(GPT(CHAT), Mesh((dist.get_world_size(),), ("tp",)), gpt_plan(CHAT))
    prompt = torch.tensor([list(b"def all_reduce(")])
    return generate(model, prompt, 12, temperature=0.8, seed=1).tolist()


answers = [on_cpu(answer, ranks=ranks, tell="12 tokens")[0] for ranks in (1, 2, 4)]
print(f"the same tokens on 1, 2 and 4 ranks: {answers[0] == answers[1] == answers[2]}")

# %% [markdown]
# How long does a token take? A token needs two all-reduces per layer, one for the embedding, and a gather of the
# logits, all in sequence. The formula (`cost.token_seconds`) adds up three parts: reading the *weights*; the *latency*
# of these collectives, however few bytes they send; and the time that their *bytes* add. Here it is for Llama 3 8B in
# 16 bits on two links (`cost` names its sources):

# %%
bars = {}
for link in ("NVLink 4", "Ethernet, 10 Gb/s"):
    for n in (1, 2, 4, 8):
        token = cost.token_seconds(PRESETS["llama3-8b"], n, cost.LINKS[link])
        parts = {"P": token.compute, "waiting": token.messages, "communication": token.bytes}
        bars[f"{link}, on {n}"] = parts
words = {"P": "weights", "waiting": "latency", "communication": "bytes"}
caption = "A token: weights (blue), latency (grey), bytes (orange)"
draw.chart(bars, "s", words=words, caption=caption)

# %% [markdown]
# With NVLink, eight ranks are four times as quick as one. With Ethernet, two ranks gain a little, and eight gain
# nothing, because latency and bytes take all the time that shorter reading saves. Over NVLink the bytes hardly matter:
# there, by this formula, TP speeds up generation until latency takes as long as the reading.
#
# ## Optional: async TP, multiply while it travels
#
# In training, too, a rank waits at each border: the next product needs data that is still in transit. But it does not
# need all of it at once. With sequence parallelism, the product for one rank's tokens needs only these tokens. So the
# shards travel round a ring one by one, and each rank multiplies one shard while the next one travels. At the other end
# the partial sums travel, and each rank adds its own product. [labs/tp/async_tp.py](../labs/tp/async_tp.py) has both,
# `gather_linear` and `linear_scatter`. The cells below run the two matrices of the last notebook's first picture,
# forward, on two ranks and a slow link. Each product is made longer by 80 µs per token (`paced`), so that the picture
# depends less on how busy your machine is.

# %% tags=["subject"]
from labs.kit.train import paced
from labs.tp.async_tp import gather_linear, linear_scatter


def whole(x, up, down, mesh):
    """Gather the tokens, multiply by both matrices, and scatter the sums."""
    return scatter((gather(x, mesh, dim=1) @ up.T).relu() @ down.T, mesh, dim=1)


def in_chunks(x, up, down, mesh):
    """Do the same, one shard of the tokens after the other."""
    (hidden,) = gather_linear(x, [up], mesh)
    return linear_scatter(hidden.relu(), down, mesh)


# %%
def both():
    """Run each of the two twelve times, and return whether the results are equal."""
    torch.manual_seed(dist.get_rank())  # different tokens, and different parts of the matrices
    x, up, down = (torch.randn(shape) / 16 for shape in ((1, 128, 256), (512, 256), (256, 512)))
    inputs = x, up, down, Mesh((dist.get_world_size(),), ("tp",))
    one, other = paced((whole, in_chunks), inputs, times=12, seconds=80e-6)
    return torch.allclose(one, other, atol=1e-5)


wire = Link(nodes=2, bandwidth="100 Mbit/s")
seen = on_cpu(both, ranks=2, link=wire, record="communication", tell="async TP")
recording = seen.recording
as_many = recording.sent(0, 0) == recording.sent(0, 12)
print(f"equal results: {all(seen)}, equal bytes: {as_many}")
quickest = [min(range(first, first + 12), key=recording.took) for first in (0, 12)]
names = ("one after the other", "in chunks")
draw.timeline(recording, recording, step=quickest, names=names)

# %% [markdown]
# The picture shows the quickest of twelve steps of each. (On CPUs the course builds a reduce-scatter from an
# all-to-all, and adds up what arrives.) Results and bytes are the same, but now a shard travels while another is
# multiplied. A rank waits only where a shard takes longer to travel than to multiply: the hatched parts of the picture,
# which a busy machine makes longer. In PyTorch async TP is experimental: if you switch it on, torch.compile can apply
# it to a plan like this, between GPUs that can read each other's memory. Its authors
# [report](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)
# a forward pass that is up to 29% faster, and a whole step that is up to 8% faster, for a Llama 3 of 7B. It does not
# help with a single token, which cannot be split into shards.

# %% [markdown]
# **Read on**: [labs/tp/conjugate.py](../labs/tp/conjugate.py),
# [labs/tp/parameter_cuts.py](../labs/tp/parameter_cuts.py), [labs/tp/vocabulary.py](../labs/tp/vocabulary.py),
# [labs/tp/parallel_layers.py](../labs/tp/parallel_layers.py), [labs/tp/styles.py](../labs/tp/styles.py) and
# [labs/tp/tp.py](../labs/tp/tp.py), in this order. Shoeybi et al., 2019, *Megatron-LM* (arXiv 1909.08053), section 3.
# Korthikanti et al., 2022, *Reducing Activation Recomputation in Large Transformer Models* (arXiv 2205.05198), section
# 4. Pope et al., 2022, *Efficiently Scaling Transformer Inference* (arXiv 2211.05102).
#
# **Next.** Over a slow link TP is too slow, and FSDP gathers every layer through it. [10 Pipeline](10_pipeline.ipynb)
# splits the model by depth, and sends little enough for a slow link.
#
# A clean copy of this notebook: `git restore notebooks/09b_plan_and_wire.ipynb`, then *File > Reload Notebook from
# Disk*.
