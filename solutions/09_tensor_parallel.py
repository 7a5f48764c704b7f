# %% [markdown]
# # Tensor parallelism: every matrix split
#
# *A batch has 2,048 sequences, and there are 16,384 GPUs. What do the other 14,336 do?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), for `Shard`, `Replicate` and `Partial`, and
# [Memory](07_memory.ipynb), for what activations are.
# **Minutes**, by estimate: 30 without exercises, 50 with them, 10 more for optional parts.
# The machine works for half a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("09")

# %% [markdown]
# ## Question
#
# Every strategy so far gave each rank its own sequences. FSDP shards what a rank *holds*; but a rank still puts a whole
# layer together, and computes all of it for its own tokens. As long as nobody cuts a sequence, there can be no more
# ranks than sequences. Llama 3 with 405 billion parameters was trained on 16,384 GPUs, with 16 million tokens in a
# batch, in sequences of 8,192 (Llama Team, 2024, arXiv 2407.21783, section 3.3.2 and table 4):

# %%
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs import cost
from labs.data import Batches, corpus
from labs.kit import check, draw
from labs.kit.launch import run
from labs.kit.record import mark

# %%
gpus, sequences = 16_384, 16 * 2**20 // 8192
idle, each = gpus - sequences, gpus // sequences
told = f"{idle:,} of {gpus:,} GPUs would have none; {each} GPUs for each"
print(f"{sequences:,} sequences: {told}")

# %% [markdown]
# (A larger batch would give them work, but past some size it teaches the model little more.) So more GPUs help only if
# several of them work on the *same* sequence. Llama's did, along two axes: the eight GPUs of a node shared the work of
# every layer, and sixteen such nodes shared the layers (a [pipeline](10_pipeline.ipynb)). There were 128 of these
# groups of 128 GPUs, with 16 sequences each. The first of the two is **tensor parallelism** (TP; Shoeybi et al., 2019,
# who called their program Megatron-LM). All ranks of a group read the same tokens, and each matrix of the model is
# split over them.
#
# ## Picture
#
# Two matrices one after the other, as in an MLP: `relu(x @ up) @ down`. In notebook 05, DTensor found a way to compute
# this with a single collective. Here it is on two ranks:
#
# ![Both ranks have all of x. Rank 0 has the first two columns of up and the first two rows of down, rank 1 the others.
# Each computes two of the four hidden features, applies relu, and multiplies by its rows: that gives each rank a
# summand of the result, and an all-reduce adds them up.](../images/tp_pair.svg)
#
# A *feature* is one number of a token's vector: a column of the hidden tensor. Up to the last step each rank works
# alone.
#
# ## Predict
#
# A layer of our GPT has two such pairs: attention (q, k and v, then o) and the MLP (gate and up, then down). How many
# all-reduces does one layer need in a training step, forward and backward together?

# %%
guess_reduces = 4  # your number

# %% [markdown]
# ## Build: columns, then rows
#
# Here is the picture in numbers. Take the columns first: each rank gets some of the hidden features, complete for every
# token. Relu works on each number by itself, so it can be applied before anything is put together. Then take the rows:
# multiplying by some of them gives each rank a part of every sum, a *summand* of the result. (PyTorch calls it
# `Partial`.)
#
# You may read that "tensor parallelism splits the rows". Of the second matrix, yes. Start with rows, and each rank has
# only a summand of `x @ up`. Then relu has to wait for the sum, since the relu of a sum is not the sum of the relus:

# %%
x = torch.tensor([[1, 2]])
up = torch.tensor([[1, 1, 2, 1], [0, -1, 1, 3]])
down = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 0]])

hidden = [(x @ columns).relu() for columns in up.chunk(2, dim=1)]  # one entry for each rank
summands = [mine @ rows for mine, rows in zip(hidden, down.chunk(2, dim=0), strict=True)]
assert [mine.tolist() for mine in hidden] == [[[1, 0]], [[4, 7]]]
assert [summand.tolist() for summand in summands] == [[[1, 0]], [[18, 4]]]
assert torch.equal(sum(summands), (x @ up).relu() @ down)

early = sum((x[:, [rank]] @ up[[rank]]).relu() for rank in range(2))
print(f"rows first: relu after the sum {(x @ up).relu().tolist()}, before it {early.tolist()}")

# %% [markdown]
# So the order decides what must be sent in the middle. Here are both orders, as a real job on four ranks. (A PyTorch
# `Linear` keeps its matrix as [outputs, inputs]: what is a column here is a row of its weight, `Shard(0)`.)


# %%
def mine(whole, dim):
    """This rank's part along a dim."""
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def added(summand):
    dist.all_reduce(summand)
    return summand


def gathered(features):
    """All ranks' features, side by side."""
    pieces = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, features)
    return torch.cat(pieces, dim=1)


# %%
def columns_then_rows(x, up, down):
    return added((x @ mine(up, 1)).relu() @ mine(down, 0))


def rows_then_columns(x, up, down):
    return gathered(added(mine(x, 1) @ mine(up, 0)).relu() @ mine(down, 1))


ORDERS = {"columns, then rows": columns_then_rows, "rows, then columns": rows_then_columns}


def multiply():
    """8 tokens of 16 features, with 64 in the middle, in both orders."""
    torch.manual_seed(0)
    x, up, down = torch.randn(8, 16), torch.randn(16, 64), torch.randn(64, 16)
    for product in ORDERS.values():
        mark("step")
        assert torch.allclose(product(x, up, down), (x @ up).relu() @ down, atol=1e-4)
        mark("end")


# %%
seen = run(multiply, ranks=4, device="cpu", record="communication").recording
called = [", ".join(seen.counts(0, number).elements()) for number in range(2)]
sent = [seen.sent(0, number) for number in range(2)]
rows = zip(ORDERS, called, sent, strict=True)
draw.table([dict(zip(("", "collectives", "sent, bytes"), row, strict=True)) for row in rows])

# %% [markdown]
# With columns first, nothing is sent in the middle, where the tensor is wide (here it is four times as wide as x). That
# is why the pair needs one collective and not two.
#
# ## Build: the two borders
#
# Now backward. Between x and the result the ranks work alone, so all communication is at two *borders*: where the whole
# x goes in, and where the summands come out. What comes out is easy. The sum is whole, its gradient is the same on each
# rank, and each summand gets it as it is. (All ranks compute the *same* loss from it, and it counts once. The backward
# of `torch.distributed.nn.functional.all_reduce` adds up the gradients of all ranks, since it takes the loss to be the
# sum of theirs. Here that would make gradients N times too large.)
#
# What goes in is less obvious. Each rank has used all of x, but only for its own columns. So in backward each rank has
# only a summand of x's gradient, and these must be added up. The two borders are mirror images, *conjugate* to each
# other:
#
# | border | forward | backward |
# |---|---|---|
# | `copy`, where x goes in | x as it is | all-reduce |
# | `reduce`, where summands come out | all-reduce | the gradient as it is |
#
# Here they are around a pair, on four ranks:
#
# ![x is whole on every rank, also behind the norm. copy sends nothing forward, and all-reduces the gradient backward.
# Columns give each rank some of the features, rows a summand. reduce all-reduces forward, and sends nothing
# backward.](../images/tp_borders.svg)
#
# ### Exercise 1: the conjugate pair (10 minutes)
#
# Write both as autograd functions. `ctx.group` is the group of ranks (None: all of them). In `backward` return a
# gradient for each argument of `forward`, and None for the group. An all-reduce works in place, and needs a contiguous
# tensor; but neither x nor the gradient that comes in is yours to change. (`clone()` keeps the strides, and ranks
# may have different ones; `contiguous()` copies only where it must.)
#
# The check compares values and gradients on 1 to 8 ranks and in sub-groups, for any shape and dtype, with gradients
# that are not contiguous. It counts what is sent and what is held. Budget: each border sends one all-reduce in one
# direction and nothing in the other, and keeps nothing for backward.


# %%
class Copy(torch.autograd.Function):
    """x [any shape] as it is, whole on all ranks; its gradient, a summand on each rank, becomes
    the sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ### BEGIN SOLUTION
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
        ### END SOLUTION


def copy(x, group=None):
    return Copy.apply(x, group)


# %%
class Reduce(torch.autograd.Function):
    """The sum of all ranks' summands [any shape]; its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ### BEGIN SOLUTION
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return gradient, None
        ### END SOLUTION


def reduce(x, group=None):
    return Reduce.apply(x, group)


pair = check.conjugate(copy, reduce)
pair

# %%
# from here on yours if it passed, else the course's
reduce = reduce if pair.ok else check.conjugate.reduce

# %% [markdown]
# ### Exercise 2: a row-parallel linear, with its bias (10 minutes)
#
# A linear layer is split by rows and has a bias, and every rank has all of the bias. If each adds it to its summand,
# the result contains it N times. In August 2026 this bug was found in torchtitan, PyTorch's own library for training
# large models ([torchtitan#4245](https://github.com/pytorch/torchtitan/pull/4245)).
#
# The check compares the output and the gradients of x, weight and bias on 1 to 8 ranks and in sub-groups, with any
# number of outer dims, with ranks that have different numbers of inputs, or none, and without a bias. It measures bytes
# sent and held. Budget: one all-reduce forward, nothing backward. Use `reduce`.


# %%
def row_linear(x, weight, bias, group=None):
    """The whole output on every rank, [..., outputs].

    x: [..., i], this rank's inputs; weight: [outputs, i], its columns for them; bias:
    [outputs], whole, or None
    """
    ### BEGIN SOLUTION
    y = reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias
    ### END SOLUTION


check.row_linear(row_linear)

# %% [markdown]
# ## Build: attention, by heads
#
# Attention is a pair of this kind, too. The projections q, k and v are split by columns, o by rows, and between them
# each *head* computes by itself, with its own columns of q, k and v. So cuts are allowed only between heads.
#
# With **grouped-query attention** there are fewer heads of keys and values than query heads; H/K query heads read the
# same one. (Llama 3 405B has H = 128 and K = 8.) As long as there are at least as many heads of keys and values as
# ranks, each rank gets whole heads of keys and values, each with the H/K query heads that read it. With more ranks than
# that, several neighbours need a copy of the same head. Each of these ranks computes the gradient of this head from its
# own queries alone, so the gradients must be added up over just these ranks. In one model's training code this sum was
# wrong at first: the validation loss was 3.74 on several ranks and 2.64 on one
# ([bigcode-project/Megatron-LM#37](https://github.com/bigcode-project/Megatron-LM/pull/37)).
#
# ### Optional exercise: deal out the heads (10 minutes)
#
# Which heads does a rank have? Query head h reads the keys and values of head h // (H // K). Give every rank its query
# heads, the heads of keys and values that these read, and the ranks that have the same ones (itself included). If there
# are enough heads of keys and values, no two ranks share one: deal them out as evenly as possible, and if there is a
# remainder, the first ranks get one more. (A rank's heads may be consecutive, or dealt in turn, as you like.) If there
# are not enough, the ranks that share a head must be neighbours: [labs/tp/shares.py](../labs/tp/shares.py), which cuts
# the matrices, relies on it. The check tries many numbers of heads, on up to 16 ranks. Budget: no message. `rank` is
# any rank; it is not the number of the process that calls you.


# %%
def deal_heads(heads, kv_heads, ranks, rank):
    """([query heads], [heads of keys and values], [ranks that have the latter]) of a rank, each
    in ascending order.

    kv_heads divides heads.  With more ranks than kv_heads, kv_heads divides ranks, ranks
    divides heads, and the ranks that have the same head of keys and values are neighbours.
    """
    group = heads // kv_heads  # query heads that read one head of keys and values
    ### BEGIN SOLUTION
    if ranks <= kv_heads:
        least, more = divmod(kv_heads, ranks)
        first = rank * least + min(rank, more)
        keys = list(range(first, first + least + (rank < more)))
        return list(range(group * keys[0], group * (keys[-1] + 1))), keys, [rank]
    copies, each = ranks // kv_heads, heads // ranks
    first = rank // copies * copies
    queries = list(range(each * rank, each * (rank + 1)))
    return queries, [rank // copies], list(range(first, first + copies))
    ### END SOLUTION


check.deal_heads(deal_heads)

# %% [markdown]
# ## Build: the whole model
#
# Attention and the MLP are pairs of this kind. The embedding is split by the vocabulary: each rank looks up the rows
# that it has, the others contribute zeros, and an all-reduce adds them up. The *output head* (the last matrix, which
# gives the logits) has columns only. A **plan** says how each is split: a table from the name of a submodule to a
# *style*, which `parallelize` obeys. You write one in the next notebook. First see what it does.
# `strategies.by_plan(plan)` lets the loop of notebooks 04 and 06 train by a plan, `in_turn` does so by several, and
# `recorded` says what rank 0 sends.

# %%
from labs.kit.train import in_turn, recorded, strategies
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from labs.tp import SequenceParallel, gpt_plan, parallelize

CONFIG = replace(PRESETS["small"], depth=2, kv_heads=4)  # 4 heads of each kind, for 4 ranks
SEQUENCES, on_cpu = 4, partial(run, device="cpu")
loader = Batches(corpus().tokens, SEQUENCES, CONFIG.context)
batches = [loader[number] for number in range(2)]


def float32():
    return GPT(CONFIG)


# %% [markdown]
# Is it the same training? Two steps with AdamW in float64, on four ranks, against one process. (The second way has
# sequence parallelism, which we come to below.)

# %%
ONE = {"one device": strategies.ROWS["one device"]}
WAYS = {
    "TP": strategies.by_plan(gpt_plan(CONFIG)),
    "TP, sequence parallel": strategies.by_plan(gpt_plan(CONFIG, sequence_parallel=True)),
}


def float64():
    return GPT(CONFIG).double()


[expected] = on_cpu(in_turn, ONE, float64, batches, keep=2, ranks=1)
trained, rows = on_cpu(in_turn, WAYS, float64, batches, keep=2, ranks=4)[0], []
for name, parameters in trained.items():
    off = max((p - expected["one device"][key]).abs().max() for key, p in parameters.items())
    rows.append({"": name, "within 1e-12 of one process": bool(off < 1e-12)})
draw.table(rows)

# %% [markdown]
# They are not the same bits: a sum over four ranks is rounded in a different order from one long sum.
#
# ## Measure: what travels
#
# With pencil and paper: let a batch have M tokens of D numbers each. Forward, each pair ends in an all-reduce of M × D
# numbers, and so does the embedding. Backward, there is one in front of each pair, and one in front of the output head.
# The loss adds three numbers per token in two all-reduces: the highest logit, then a sum and the target's logit. You
# write it in the next notebook. `cost.tp_sent` says all of this in bytes, by part and phase:

# %%
on_paper = cost.Job(CONFIG, batch=SEQUENCES, ranks=4)
table = cost.tp_sent(on_paper)
rows = [{"": part, **phases} for part, phases in table.items()]
draw.table(rows, caption="bytes that each rank sends in a step")


# %%
talk = recorded(WAYS, float32, batches)
predicted = {name: cost.tp(on_paper, bool(sequence)) for sequence, name in enumerate(WAYS)}
rows = {f"{name}: sent": (predicted[name].sent, talk[name]["sent"]) for name in WAYS}
for name in WAYS:
    said = sum(predicted[name].collectives.values())
    rows[f"{name}: collectives"] = said, talk[name]["collectives"], ""
ledger = draw.ledger(rows, within=0)
assert ledger.agrees
ledger

# %% [markdown]
# With L layers that is 4L + 2 + 2 = 12 all-reduces, the last two for the loss. (With sequence parallelism it is
# 2 (4L + 2) + 2, and one for each of 2L + 1 norms: 27.)


# %%
def one_layer():
    return GPT(replace(CONFIG, depth=1))


fewer = recorded({"one layer": WAYS["TP"]}, one_layer, batches)["one layer"]
more = talk["TP"]["collectives"] - fewer["collectives"]  # all-reduces, all of them
why = "Two forward, two backward."
check.predict("All-reduces of one layer in a step?", guess_reduces, more, reason=why)

# %% [markdown]
# Each layer has four all-reduces, and at each of them a rank waits until it is done. What they send does not depend
# on how many parameters there are. It grows with the number of *tokens*; we come back to that.
#
# ## Build: sequence parallelism
#
# TP splits the matrices, and the features between columns and rows. It does not split what lies between the *pairs*:
# norms, residual additions, dropout if there is any. Every rank computes them on all of x, and keeps all of their
# activations. Yet they treat each token by itself. So let each rank compute them for only a part of the tokens
# (Korthikanti et al., 2022). Then x must be put together in front of each pair; and behind it, a rank needs the sum for
# its own tokens only:
#
# ![Each rank has some of the tokens, also behind the norm. gather is an all-gather forward and a reduce-scatter
# backward. Columns, features, rows and summands are as before. scatter is a reduce-scatter forward and an all-gather
# backward, and each rank has some of the tokens again.](../images/sp_borders.svg)
#
# `gather` and `scatter` are conjugate to each other, as `copy` and `reduce` are. There are two collectives now in place
# of each all-reduce. By what factor does that change the bytes that a rank sends?

# %%
guess_times = 1.0  # your number

# %%
without, with_it = (talk[name]["sent"] for name in WAYS)
# the gradients of their weights, in bytes: see below
norms = 2 * 3 / 4 * 4 * CONFIG.dim * (2 * CONFIG.depth + 1)
assert with_it == without + norms
times = round(with_it / without, 3)
check.predict("Bytes sent, compared with TP alone?", guess_times, times, unit="times")

# %% [markdown]
# Nearly as many as before, and a little more for the norms. You know why from notebook 02: an all-reduce *is* a
# reduce-scatter followed by an all-gather. Sequence parallelism pulls the two apart, and what stands between the pairs
# is computed between them, by each rank on its own tokens. What it saves is memory. (Some use the name for something
# else: *context parallelism*, which splits the sequence inside attention, too.)

# %%
watched = {}
for name, way in (ONE | WAYS).items():
    told = {"record": "memory", "tell": name, "ranks": 1 if name in ONE else 4}
    watched[name] = on_cpu(in_turn, {name: way}, float32, batches, **told).recording
draw.memory(*watched.values(), step=1, ranks=[0], names=list(watched))

# %%
alone = sum(cost.activations(cost.Job(CONFIG, SEQUENCES)).values())
of_tp, with_sequences = (cost.tp(on_paper, it).held.A for it in (False, True))
A = {"one device": alone, "TP": of_tp, "TP, sequence parallel": with_sequences}
beside = {f"A: {name}": (A[name], watched[name].steady(0)["A"]) for name in watched}
ledger = draw.ledger(beside, within=0.05)
assert ledger.agrees
ledger

# %% [markdown]
# TP alone does not divide activations by four, but by about two: what the norms keep, and what goes into each pair, is
# whole on every rank. With sequence parallelism it is about three: what goes into a pair is still put together, and is
# then kept whole. Here is the layer that the authors counted, GPT-3's in 16 bits, without the attention scores
# (notebook 07's formula; s tokens, b sequences, width h):

# %%
count = partial(cost.korthikanti, s=2048, b=1, h=12_288, a=96, recompute="selective")
terms = {"34": count(), "10 + 24/8": count(t=8), "34/8": count(t=8, sequence_parallel=True)}
names = ("one rank", "TP on 8", "TP on 8, sequence parallel")
draw.table(
    [
        {"": n, "× s b h": t, "MB per layer": round(float(b) / 1e6)}
        for n, (t, b) in zip(names, terms.items(), strict=True)
    ]
)

# %% [markdown]
# The 10 is what stays whole: what norms and dropouts keep, and what goes into the pairs. 34/8 is the authors' own code,
# which keeps a shard of that and gathers it once more in backward; ours keeps more.
#
# ### What went wrong in the wild
#
# *Symptom*: "no crash, no NaN, pure drift". Between the pairs each rank now uses the norms' weights, which it has
# whole, for its own tokens only. So their gradients are summands and must be added up: D numbers for each norm. In NeMo
# RL a new code path for training steps bypassed the function of Megatron that does this sum
# ([NVIDIA-NeMo/RL#3716](https://github.com/NVIDIA-NeMo/RL/issues/3716), August 2026). Here it is in miniature, with a
# plan that leaves the norms out:


# %%
def forgetful():
    """12 steps without the sum: whether the loss fell, the last loss, the last norm's weight,
    and what reports it."""
    plan, mesh = gpt_plan(CONFIG, sequence_parallel=True), Mesh((4,), ("tp",))
    summed = [name for name, style in plan.items() if isinstance(style, SequenceParallel)]
    row = strategies.by_plan({name: plan[name] for name in plan if name not in summed})
    training = row.apply(model := GPT(CONFIG), mesh)
    model.tensor_parallel.gradients_compared = True  # so that nothing compares them
    model.tensor_parallel.optimizers.add(training.optimizer)  # in backward, or later
    losses = [strategies.step(training, *batches[number % 2]) for number in range(12)]
    try:
        strategies.step(row.apply(GPT(CONFIG), mesh), *batches[0])
    except RuntimeError as error:
        return losses[-1] < losses[0], losses[-1], model.norm.weight.tolist(), str(error)


# %%
falls, last, norm, refused = zip(*on_cpu(forgetful, ranks=4), strict=True)
print(f"the loss falls: {all(falls)}; it is the same on all ranks: {len(set(last)) == 1}")
equal = all(weight == norm[0] for weight in norm)
print(f"the last norm's weight is the same on all ranks: {equal}")
print(f"with the gradients compared: {refused[0]}")

# %% [markdown]
# Four copies of each norm drift apart, and a checkpoint keeps only one of them: the model that you load is not the one
# that you trained. So compare, once, after a few steps, the parameters that should be the same on all ranks. The
# course's `parallelize` compares their gradients after the first backward, and refuses to go on (the last line).
#
# ### What a part does not know
#
# A rank's part of a matrix is an ordinary tensor. Suppose that a loss has the norm of a weight in it, or that a
# weight's gradient is clipped by its own norm. Which norm is it?


# %%
def taken_for_the_whole(in_the_loss):
    """What is said where a weight's norm is in the loss, or clips its gradient."""
    model = parallelize(GPT(CONFIG), Mesh((4,), ("tp",)), gpt_plan(CONFIG))
    weight = model.layers["0"].mlp.up.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        (model(*batches[0]) + in_the_loss * weight.norm()).backward()
        torch.nn.utils.clip_grad_norm_([weight], max_norm=1e-3)
        optimizer.step()
    except RuntimeError as error:
        return str(error).partition(": ")[2]


# %%
for number in (1, 0):
    print(on_cpu(taken_for_the_whole, number, ranks=4)[0], end="\n\n")

# %% [markdown]
# It is the norm of the part: another one on every rank, and none of them the matrix's. (PyTorch keeps a DTensor there,
# which knows the whole.) Nothing crashes by itself, and the loss falls. So `parallelize` looks at the *first step*. It
# runs the batch once more as the whole model would, and compares what comes out. It looks for a weight that is used
# outside of its module, for gradients that are scaled by another factor on each rank, and for an optimizer that steps a
# matrix and its parts differently. What is done to a part later, between two steps, nobody sees.
#
# ## Why, and why not
#
# **Why**: more ranks than sequences; a layer, or its activations, that do not fit one device; an answer that must come
# sooner. Nearly everything is divided: P, G and S, most of A, and the arithmetic.
#
# **Why not**: four times in each layer, all ranks wait for a message whose size grows with the batch. How much that is,
# beside what other strategies send and on the wires that people have, is measured in the next notebook.

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>Why columns first and rows second, and where are the collectives of the pair, forward and
# backward?</summary>
#
# Columns give some of the features, complete, so that relu, silu or a head's attention can work on them; and these are
# just what the rows need. Forward, one all-reduce behind the rows. Backward, one in front of the columns, since every
# rank used all of x for its own columns and has only a summand of its gradient.
# </details>
#
# <details><summary>What does sequence parallelism change in bytes sent, in bytes held, and in the gradients of the
# norms?</summary>
#
# Sent: nearly the same, since an all-reduce is a reduce-scatter and an all-gather; the norms' gradients come on top.
# Held: what is between the pairs is divided by the number of ranks, too. The norms see only a part of the tokens on
# each rank, so their gradients must be added up.
# </details>
#
# <details><summary>There are 16 ranks and 8 heads of keys and values. What does each rank have of them, and which sum
# is easily forgotten?</summary>
#
# Two neighbours have a copy of the same head. Each of the two computes its gradient from its own queries alone, so the
# gradients of k and v must be added up over just these two.
# </details>
#
# For M tokens of D numbers (b bytes each) in the batch of N ranks, and L layers, each rank sends and holds:
#
# | | predicted | ours |
# |---|---|---|
# | TP: sent | (4L + 2) × 2 (N − 1)/N × MDb, and three numbers per token | exactly |
# | with sequence parallelism: sent | the same, and the norms' gradients | exactly |
# | collectives of a layer | 4; sequence parallel 8, and 2 for its norms | exactly |
# | P, G, S | 1/N, except for the norms | as predicted |
# | A | by `cost.tp` | within 5 % |
# | numbers | one process's | within 1e-12, in float64 |
#
# PyTorch's own is held to the same ledgers in the next notebook.
#
# **Read on**: [labs/tp/conjugate.py](../labs/tp/conjugate.py), [labs/tp/shares.py](../labs/tp/shares.py),
# [labs/tp/vocabulary.py](../labs/tp/vocabulary.py) and [labs/tp/parallel_layers.py](../labs/tp/parallel_layers.py), in
# this order. Shoeybi et al., 2019, *Megatron-LM* (arXiv 1909.08053), section 3. Korthikanti et al., 2022, *Reducing
# Activation Recomputation in Large Transformer Models* (arXiv 2205.05198), section 4.
#
# **Next.** The last product of a model gives more numbers than any other, and your own model has other names than this
# one. [09b Plan and wire](09b_plan_and_wire.ipynb) splits the loss, has you write a plan, puts FSDP on a second axis,
# and asks when all of this is quicker.
#
# A clean copy of this notebook: `git restore notebooks/09_tensor_parallel.ipynb`, then *File > Reload Notebook from
# Disk*.
