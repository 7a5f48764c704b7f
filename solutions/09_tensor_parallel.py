# %% [markdown]
# # Tensor parallelism: every matrix split
#
# *A batch has 2,048 sequences, and there are 16,384 GPUs. What do the other 14,336 do?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), for `Shard`, `Replicate` and `Partial`, and
# [Memory](07_memory.ipynb), for what activations are; near the end, [FSDP](06_fsdp.ipynb). It takes 90 minutes with its
# five exercises, 50 without; the machine works for about a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("09")

# %% [markdown]
# ## Question
#
# Every strategy so far gave each rank its own sequences. FSDP shards what a rank *holds*; but a rank still puts a whole
# layer together, and computes all of it for its own tokens. So there can be no more ranks than sequences. Llama 3 with
# 405 billion parameters was trained on 16,384 GPUs, with 16 million tokens in a batch, in sequences of 8,192 (Llama
# Team, 2024, arXiv 2407.21783, section 3.3.2 and table 4):

# %%
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs import cost
from labs.data import Batches, corpus
from labs.kit import check, draw, play, strategies
from labs.kit.launch import run
from labs.kit.ranks.link import Link
from labs.kit.record import mark
from labs.tp import parallel_layers

# %%
gpus, sequences = 16_384, 16 * 2**20 // 8192
print(
    f"{sequences:,} sequences: {gpus - sequences:,} of {gpus:,} GPUs would have none; {gpus // sequences} GPUs for each"
)

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
# Two numbers, both measured below. A layer of our GPT has two such pairs: attention (q, k and v, then o) and the MLP
# (gate and up, then down). How many all-reduces does one layer need in a training step, forward and backward together?
#
# And **sequence parallelism**, an addition to TP that makes activations smaller, has two collectives in place of each
# all-reduce: an all-gather and a reduce-scatter. By what factor does that change the bytes that a rank sends?

# %%
guess_reduces = 4  # your number
guess_times = 1.0  # your number

# %% [markdown]
# ## Build: columns, then rows
#
# Here is the picture in numbers. Take the columns first: each rank gets some of the hidden features, complete for every
# token. Relu works on each number by itself, so it can be applied before anything is put together. Then take the rows:
# multiplying by some of them gives each rank a part of every sum, a *summand* of the result. (PyTorch calls it
# `Partial`.)
#
# You may read that "tensor parallelism splits the rows". That is half of it. Start with rows, and each rank has only a
# summand of `x @ up`. Then relu has to wait for the sum, since the relu of a sum is not the sum of the relus:

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
ORDERS = {
    "columns, then rows": lambda x, up, down: added((x @ mine(up, 1)).relu() @ mine(down, 0)),
    "rows, then columns": lambda x, up, down: gathered(added(mine(x, 1) @ mine(up, 0)).relu() @ mine(down, 1)),
}


def multiply():
    """8 tokens of 16 features, with 64 in the middle, in both orders."""
    torch.manual_seed(0)
    x, up, down = torch.randn(8, 16), torch.randn(16, 64), torch.randn(64, 16)
    for product in ORDERS.values():
        mark("step")
        assert torch.allclose(product(x, up, down), (x @ up).relu() @ down, atol=1e-4)
        mark("end")


seen = run(multiply, ranks=4, device="cpu", record="communication").recording
called = [", ".join(seen.counts(0, number).elements()) for number in range(2)]
draw.table([{"": o, "collectives": called[n], "sent, bytes": seen.sent(0, n)} for n, o in enumerate(ORDERS)])

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
# ### Exercise 1: the conjugate pair
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
    """x [any shape] as it is, whole on all ranks; its gradient, a summand on each rank, becomes the sum."""

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
from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.redistribute import Line
from labs.tp.conjugate import Border


def courses_reduce(x, group=None):
    """Two of notebook 05's moves: one for the tensor, one for its gradient."""
    ranks = Line(tuple(x.shape), dist.get_world_size(group), dist.get_rank(group), group)
    return Border.apply(x, ranks, (Partial(), Replicate()), (Replicate(), Replicate()))


reduce = reduce if pair.ok else courses_reduce  # from here on yours if it passed, else the course's

# %% [markdown]
# ### Exercise 2: a row-parallel linear, with its bias
#
# A linear layer is split by rows and has a bias, and every rank has all of the bias. If each adds it to its summand,
# the result contains it N times. In August 2026 this bug was found in torchtitan, PyTorch's own library for training
# large models: in one model, the output of a split layer had its bias multiplied by the number of ranks
# ([torchtitan#4245](https://github.com/pytorch/torchtitan/pull/4245)). Two repairs come to mind that give the right
# output and are wrong in training. Add the bias on rank 0 only, and only rank 0's copy learns. Add an N-th of it on
# each rank, and its gradient is an N-th, too. (The second was reported in torchtitan a week later:
# [torchtitan#4332](https://github.com/pytorch/torchtitan/pull/4332).)
#
# The check compares the output and the gradients of x, weight and bias on 1 to 8 ranks and in sub-groups, with any
# number of outer dims, with ranks that have different numbers of inputs, or none, and without a bias. It measures bytes
# sent and held. Budget: one all-reduce forward, nothing backward. Use `reduce`.


# %%
def row_linear(x, weight, bias, group=None):
    """The whole output on every rank, [..., outputs].

    x: [..., i], this rank's inputs; weight: [outputs, i], its columns for them; bias: [outputs], whole, or None
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
# ranks, each rank gets whole groups. With more ranks than that, several neighbours need a copy of the same head. Each
# of these ranks computes the gradient of this head from its own queries alone, so the gradients must be added up over
# just these ranks. This is easily overlooked. A reader of one model's training code asked whether its sum left out the
# biases ([bigcode-project/Megatron-LM#11](https://github.com/bigcode-project/Megatron-LM/issues/11)). Later, a
# validation loss was 3.74 on several ranks and 2.64 on one; with the gradients added up in the right place it was 2.64
# again ([#37](https://github.com/bigcode-project/Megatron-LM/pull/37)).
#
# ### Exercise 3: deal out the heads
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
    """([query heads], [heads of keys and values], [ranks that have the latter]) of a rank, each in ascending order.

    kv_heads divides heads.  With more ranks than kv_heads, kv_heads divides ranks, ranks divides heads, and the ranks
    that have the same head of keys and values are neighbours.
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
    return list(range(each * rank, each * (rank + 1))), [rank // copies], list(range(first, first + copies))
    ### END SOLUTION


check.deal_heads(deal_heads)

# %% [markdown]
# ## Build: the whole model
#
# Attention and the MLP are pairs of this kind. The embedding is split by the vocabulary: each rank looks up the rows
# that it has, the others contribute zeros, and an all-reduce adds them up. The head has columns only. A **plan** says
# how each is split: a table from the name of a submodule to a *style*, which `parallelize` obeys. We come back to the
# plan below. First see what it does, in the loop of notebooks 04 and 06, where a `Training` is what a strategy makes of
# a model:

# %%
from labs.kit.strategies import ADAMW, Training, backward, step, trainable
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from labs.tp import full_parameters, gpt_plan, parallelize
from labs.tp.shares import Keys, Queries

CONFIG = replace(PRESETS["small"], depth=2, kv_heads=4)  # 4 heads of each kind, for 4 ranks
SEQUENCES, EVERYTHING = 4, slice(None)
loader = Batches(corpus().tokens, SEQUENCES, CONFIG.context)
batches = [loader[number] for number in range(2)]
adamw, on_cpu = partial(torch.optim.AdamW, **ADAMW), partial(run, device="cpu")


def tensor_parallel(sequence, model, plan=gpt_plan):
    """The training of a model that is split over all ranks, and which sequences of a batch this rank reads: all."""
    parallelize(model, Mesh((dist.get_world_size(),), ("tp",)), plan(model.config, sequence))
    trained = trainable(model)
    return Training(partial(backward, model), adamw(trained), trained, partial(full_parameters, model)), EVERYTHING


# %%
def float32(config=CONFIG):
    return GPT(config)


def train(apply, build=float32, batches=batches, keep=False):
    """This rank's losses, and the whole parameters after the last step if they are to be kept."""
    (training, mine), losses = apply(build()), []
    for x, y in batches:
        mark("step")
        losses.append(step(training, x[mine].clone(), y[mine].clone()))
    mark("end")
    return losses, {name: p.detach() for name, p in training.full().items()} if keep else {}


def row(name, model):
    """A strategy of the course's table: each rank reads its own part of the batch."""
    training, part = strategies.set_up(strategies.ROWS[name], model)
    parts = strategies.ROWS[name].parts(dist.get_world_size())
    each = SEQUENCES // parts
    return training, slice(part * each, (part + 1) * each)


# %%
def in_turn(ways, batches):
    """Train in each of the ways, one after the other."""
    for apply in ways.values():
        train(apply, batches=batches)


def recorded(ways, batches=batches):
    """For each way, of rank 0 in its second step: bytes sent, collectives, and those made while the optimizer steps."""
    seen = on_cpu(in_turn, ways, batches, ranks=4, record="communication", tell="what is sent").recording
    began = [span.start for span in seen.spans if (span.rank, span.name) == (0, "optimizer")]
    found = {}
    for second, name in zip(range(1, 2 * len(ways), 2), ways, strict=True):
        late = sum(event.start > began[second] for event in seen.select(0, second))
        counts = {"sent": seen.sent(0, second), "collectives": seen.counts(0, second).total()}
        found[name] = counts | {"in the optimizer": late}
    return found


# %% [markdown]
# Is it the same training? Two steps with AdamW in float64, on four ranks, against one process. (The second way has
# sequence parallelism, which we come to below.)

# %%
WAYS = {"TP": partial(tensor_parallel, False), "TP, sequence parallel": partial(tensor_parallel, True)}


def float64():
    return GPT(CONFIG).double()


def all_of(ways):
    return {name: train(apply, float64, keep=True) for name, apply in ways.items()}


[(_, expected)] = on_cpu(train, partial(row, "one device"), float64, keep=True, ranks=1)
trained = on_cpu(all_of, WAYS, ranks=4)[0]
off = {name: max((p - expected[key]).abs().max() for key, p in kept.items()) for name, (_, kept) in trained.items()}
draw.table([{"": name, "within 1e-12 of one process": bool(off[name] < 1e-12)} for name in WAYS])

# %% [markdown]
# They are not the same bits: a sum over four ranks is rounded in a different order from one long sum.
#
# ## Measure: what travels
#
# With pencil and paper: let a batch have M tokens of D numbers each. Forward, each pair ends in an all-reduce of M × D
# numbers, and so does the embedding. Backward, each pair begins with one, and so does the head. (The loss
# all-reduces three numbers per token; why, you will see in exercise 4.) `cost.tp_sent` says it in bytes, by part and
# phase:

# %%
on_paper = cost.Job(CONFIG, batch=SEQUENCES, ranks=4)
table = cost.tp_sent(on_paper)
draw.table([{"": part, **phases} for part, phases in table.items()], caption="bytes that each rank sends in a step")


# %%
def one_layer(model):
    return tensor_parallel(False, GPT(replace(CONFIG, depth=1)))


talk = recorded(WAYS | {"TP, one layer": one_layer})
predicted = {name: cost.tp(on_paper, bool(sequence)) for sequence, name in enumerate(WAYS)}
rows = {f"{name}: sent": (predicted[name].sent, talk[name]["sent"]) for name in WAYS}
for name in WAYS:
    rows[f"{name}: collectives"] = sum(predicted[name].collectives.values()), talk[name]["collectives"], ""
ledger = draw.ledger(rows, within=0)
assert ledger.agrees
ledger

# %%
more = talk["TP"]["collectives"] - talk["TP, one layer"]["collectives"]  # all-reduces, all of them
check.predict("All-reduces of one layer in a step?", guess_reduces, more, reason="Two forward, two backward.")

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
# ![Two rows. Tensor parallel: x is whole through the norm; copy sends nothing forward and all-reduces the gradient;
# columns, features, rows, summands; reduce all-reduces forward. With sequence parallelism: each rank has some tokens
# through the norm; gather is an all-gather forward and a reduce-scatter backward; columns, features, rows, summands;
# scatter is a reduce-scatter forward and an all-gather backward.](../images/tp_borders.svg)
#
# `gather` and `scatter` are conjugate to each other, as `copy` and `reduce` are. Now for your second prediction:

# %%
without, with_it = (talk[name]["sent"] for name in WAYS)
norms = 2 * 3 / 4 * 4 * CONFIG.dim * (2 * CONFIG.depth + 1)  # the gradients of their weights, in bytes: see below
assert with_it == without + norms
check.predict("Bytes sent, compared with TP alone?", guess_times, round(with_it / without, 3), unit="times")

# %% [markdown]
# They are the same, apart from a little that belongs to the norms. You know why from notebook 02: an all-reduce *is* a
# reduce-scatter followed by an all-gather. Sequence parallelism pulls the two apart, and what stands between the pairs
# is computed between them, by each rank on its own tokens. What it saves is memory. (Some use the name for something
# else: *context parallelism*, which splits the sequence inside attention, too.)

# %%
ONE = {"one device": partial(row, "one device")}
watched = {
    name: on_cpu(train, apply, ranks=1 if name in ONE else 4, record="memory", tell=f"{name}: held").recording
    for name, apply in (ONE | WAYS).items()
}
draw.memory(*watched.values(), step=1, ranks=[0], names=list(watched))

# %%
alone = sum(cost.activations(cost.Job(CONFIG, SEQUENCES)).values())
A = {"one device": alone, "TP": cost.tp(on_paper).held.A, "TP, sequence parallel": cost.tp(on_paper, True).held.A}
ledger = draw.ledger({f"A: {name}": (A[name], watched[name].steady(0)["A"]) for name in watched}, within=0.05)
assert ledger.agrees
ledger

# %% [markdown]
# TP alone does not divide activations by four, but by about two: what the norms keep, and what goes into each pair, is
# whole on every rank. With sequence parallelism it is about three: what goes into a pair is still put together, and is
# then kept whole. (Korthikanti's own code keeps the shard, and gathers once more in backward.) Here is the layer that
# its authors counted, GPT-3's in 16 bits, without the table of attention (notebook 07's formula; s tokens, b sequences,
# width h):

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
# ### What went wrong in the wild
#
# *Symptom*: "no crash, no NaN, pure drift". Between the pairs each rank now uses the norms' weights, which it has
# whole, for its own tokens only. So their gradients are summands and must be added up: D numbers for each norm. In NeMo
# RL a new code path for training steps bypassed the function of Megatron that does this sum
# ([NVIDIA-NeMo/RL#3716](https://github.com/NVIDIA-NeMo/RL/issues/3716), August 2026). Here it is in miniature, with the
# sum taken out of the course's own norms:


# %%
def forgetful():
    """12 steps without the sum: whether the loss fell, the last loss, the last norm's weight, and what reports it."""
    parallel_layers.copied = lambda module, given: nullcontext()
    training, _ = tensor_parallel(True, model := GPT(CONFIG))
    model.tensor_parallel.gradients_compared = True  # they are not, but let it think so,
    model.tensor_parallel.optimizers.add(training.optimizer)  # also as the optimizer begins
    losses = [step(training, *batches[number % 2]) for number in range(12)]
    try:
        step(tensor_parallel(True, GPT(CONFIG))[0], *batches[0])
    except RuntimeError as error:
        return losses[-1] < losses[0], losses[-1], model.norm.weight.tolist(), str(error).split(":")[0]


# %%
falls, last, norm, refused = zip(*on_cpu(forgetful, ranks=4), strict=True)
print(f"the loss falls: {all(falls)}; it is the same on all ranks: {len(set(last)) == 1}")
print(f"the last norm's weight is the same on all ranks: {all(weight == norm[0] for weight in norm)}")
print(f"compared: {refused[0]}")

# %% [markdown]
# Four copies of each norm drift apart, and a checkpoint keeps only one of them, usually rank 0's: the model that you
# load is not the one that you trained. So compare, once, after a few steps, the parameters that should be the same on
# all ranks. The course's `parallelize` compares their gradients after the first backward, and refuses to go on (the
# last line).
#
# ## Build: a loss that never gathers the logits
#
# The last product of the model gives V numbers for each token, its *logits* (V: the size of the vocabulary). The head
# is split by columns, so each rank has the logits of its part of the vocabulary. Gathering them would undo the saving,
# and V is large. But look at what the loss of a token is:
#
#     loss = log(sum of exp(logit - highest)) - (target's logit - highest)
#
# It takes three numbers per token: the highest logit, a sum of exponentials, and the logit of the target. The first is
# a maximum over all ranks, the second a sum, and the third is on one rank only (if the others contribute zero, it is a
# sum too). The highest is subtracted because exp(100) is infinite in float32. It cancels, so its gradient is not
# needed: it may come from a detached tensor, by an all-reduce with `dist.ReduceOp.MAX`.
#
# ### Exercise 4: the loss of a split vocabulary
#
# With `reduce` of exercise 1, autograd finds the gradient by itself. (The lines that are given pad the logits with one
# more column, of −inf. Where that column is picked, −inf × 0 is not a number: use `where` or `masked_fill`.) The check
# compares the loss and the gradient of the logits on 1 to 8 ranks and in sub-groups, with vocabularies that the number
# of ranks does not divide (any rank may have no column at all), with logits of ±10,000, and with a gradient of the loss
# other than 1. It measures bytes sent and held. Budget: three numbers per token, in at most 12 all-reduces however many
# tokens there are; nothing backward, and never a gathered logit.


# %%
def split_loss(logits, targets, first, group=None):
    """The mean cross-entropy of all tokens, in nats (0-dim), the same on all ranks.

    logits: [tokens, v], this rank's part of the vocabulary, which begins at `first`; v may be 0
    targets: [tokens], of the whole vocabulary, on every rank
    """
    here = (targets >= first) & (targets < first + logits.shape[1])  # the targets in this rank's part
    column = (targets - first).where(here, logits.shape[1])  # for the other targets, a column behind the last one
    logits = F.pad(logits, (0, 1), value=-torch.inf)  # that column, so there is always one
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
# How much is it worth? The same job once more, with a plan that gathers the logits and takes the ordinary loss:

# %%
from labs.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel


def gathers_logits(config, sequence):
    plan = gpt_plan(config, sequence) | {"head": ColwiseParallel(output_layouts=Replicate())}
    del plan["loss"]
    return plan


talk |= recorded({"logits gathered": partial(tensor_parallel, False, plan=gathers_logits)})
more = (talk["logits gathered"]["sent"] - talk["TP"]["sent"]) / (SEQUENCES * CONFIG.context)
assert more == cost.all_gather(CONFIG.vocab, 4).elements * 4 - 3 * 4 * 2 * 3 / 4  # V numbers, less three all-reduced
llama = 4 * PRESETS["llama3-405b"].vocab * 8192 / 1e9
print(f"{more:.0f} bytes more for each token")
print(f"for a sequence of Llama 3, {llama:.1f} GB of logits; an eighth of them is {llama / 8:.2f} GB")

# %% [markdown]
# ## Build: the plan
#
# Everything so far fits in one table, from the name of a submodule to the style in which it is split. The names of the
# styles are PyTorch's, all but the last; the argument `heads=` is the course's. Below, `x` stands for the layout of x
# between the pairs: `Replicate()` where it is whole, `Shard(1)` where each rank has a part of the tokens (dim 1).
#
# - `ColwiseParallel()` and `RowwiseParallel(output_layouts=x)` are the two halves of a pair. With `heads=`, a `Queries`
#   (for q, and for the rows of o) or `Keys` (for k and v) of [labs/tp/shares.py](../labs/tp/shares.py), they cut
#   between heads only.
# - `PrepareModuleInput(input_layouts=x)` is the border in front of a pair, once for all columns in it: q, k and v read
#   the same x, and so do gate and up.
# - `SequenceParallel()` is for a norm that sees a part of the tokens. Its gradients are added up.
# - `LossParallel(vocabulary)` is exercise 4.
#
# ### Exercise 5: the plan of a layer
#
# Write the plan of one `Layer` of [labs/model.py](../labs/model.py), whose submodules are `attention_norm`, `attention`
# (with `q`, `k`, `v`, `o`), `mlp_norm` and `mlp` (with `gate`, `up`, `down`). The check splits a layer by it, on 2 and
# 4 ranks, with fewer heads of keys and values than ranks too, and compares the output and all gradients with one
# process. It measures what each rank holds and sends. A name may be a pattern: `*` is any part of a name, and
# `attention.[kv]` is k and v. Budget: two collectives forward and two backward without sequence parallelism; four and
# four with it, and the gradients of two norms; and where ranks share a head, the gradients of k and v.


# %%
def block_plan(config, sequence_parallel):
    """{name of a submodule: style}; config: a labs.model.Config, with `heads` and `kv_heads`."""
    queries = Queries(config.heads, config.kv_heads)
    keys = Keys(config.heads, config.kv_heads)
    ### BEGIN SOLUTION
    x = Shard(1) if sequence_parallel else Replicate()
    split = {
        **dict.fromkeys(("attention", "mlp"), PrepareModuleInput(input_layouts=x)),
        "attention.q": ColwiseParallel(heads=queries),
        "attention.[kv]": ColwiseParallel(heads=keys),
        "attention.o": RowwiseParallel(heads=queries, output_layouts=x),
        **dict.fromkeys(("mlp.gate", "mlp.up"), ColwiseParallel()),
        "mlp.down": RowwiseParallel(output_layouts=x),
    }
    return split | ({"*_norm": SequenceParallel()} if sequence_parallel else {})
    ### END SOLUTION


check.block_plan(block_plan)

# %% [markdown]
# And here is the plan of the whole model, `gpt_plan(config, sequence_parallel=True)`: what a rank has of each weight
# (drawn as in this notebook's products: inputs down, outputs across), and what crosses each border. This model has four
# query heads and two heads of keys and values, so that on four ranks, two ranks share each of the latter. `*` stands
# for one part of a name.

# %%
draw.plan(gpt_plan(PRESETS["small"], sequence_parallel=True), GPT(PRESETS["small"]))

# %% [markdown]
# You can write a plan like this for your own model, with the names of its submodules. What a rank then has is an
# ordinary parameter of a smaller shape. So the other strategies need not know about the plan, and neither need an
# optimizer that treats every number by itself, as AdamW does. (One that needs whole matrices, like Muon, must know. So
# must the norm of all gradients, in which a gradient that every rank has whole counts once: `clip_gradients` of
# [labs/tp/tp.py](../labs/tp/tp.py).)
#
# ## The tensor-parallel explorer
#
# Here is a GPT with Llama 3's proportions: which slice of each matrix is on which rank, what rank 0 sends, and what it
# holds, by the formulas of the ledgers above. (Matrices are drawn as PyTorch keeps them, outputs down. So what are
# columns in this notebook's products are rows here.) Three questions to put to it:
#
# - On how many ranks do neighbours begin to share heads of keys and values, and what do they send for it?
# - On 8 ranks, put x in shards. What shrinks, and what does it cost in bytes sent?
# - Double the sequence: what doubles? And double the width?

# %%
play.tensor_parallel()

# %% [markdown]
# <details><summary>Answers</summary>
#
# On 16, since there are 8 heads of keys and values: two small all-reduces in each layer, of the gradients of k and v.
# Activations shrink, and almost nothing is sent in addition. Doubling the sequence doubles all that is sent, and the
# activations; P, G and S stay the same. Doubling the width doubles what is sent, too, but a layer's parameters grow
# about fourfold: wide models are where TP pays.
#
# </details>
#
# ## Native
#
# PyTorch's own `parallelize_module` takes a table like this, too. [labs/native.py](../labs/native.py) turns ours into
# its styles. Its parameters are DTensors, and the loss of split logits is a context, `loss_parallel()`:

# %%
from torch.distributed.tensor.parallel import loss_parallel

from labs import native


def torchs(sequence, model):
    """PyTorch's tensor parallelism, by the same plan."""
    mesh = native.device_mesh(Mesh((dist.get_world_size(),), ("tp",)))
    native.tp(model, mesh, gpt_plan(model.config, sequence))
    trained = trainable(model)

    def backwards(*arguments):
        with loss_parallel():
            return backward(model, *arguments)

    return Training(backwards, adamw(trained), trained, partial(full, model)), EVERYTHING


def full(model):
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


# %%
NATIVE = {name: partial(torchs, sequence) for sequence, name in enumerate(WAYS)}
theirs = recorded(NATIVE)
for name, way in NATIVE.items():
    theirs[name] |= on_cpu(train, way, ranks=4, record="memory", tell=f"{name}: held").recording.steady(0)

# %%
kept, rows = on_cpu(all_of, NATIVE, ranks=4)[0], []
for name in WAYS:
    ours, off = (
        talk[name] | watched[name].steady(0),
        {k: (p - expected[k]).abs().max() for k, p in kept[name][1].items()},
    )
    assert max(off.values()) < 1e-12 and all(ours[kind] == theirs[name][kind] for kind in "PS")
    for whose, each in (("ours", ours), ("PyTorch's", theirs[name])):
        shown = {kind: each[kind] for kind in ("sent", "collectives", "in the optimizer", "P", "G", "S", "A")}
        rows.append({"": f"{name}: {whose}", **shown})
draw.table(rows, caption="bytes, rank 0")

# %% [markdown]
# The parameters again equal those of one process, within 1e-12. Where PyTorch does more:
#
# - The loss adds up the exponentials and the targets' logits in two all-reduces; ours does it in one.
# - With sequence parallelism it leaves the norms' gradients as they are, `Partial()`. They are added up whenever they
#   are read, and AdamW reads each of the five three times.
# - The gradient of the embedding is as large as the whole embedding on every rank. Ours has the rank's own rows.
#
# PyTorch's also cuts features without regard to heads. With fewer heads of keys and values than ranks, you must repeat
# the heads by hand. (Bytes are logical: on CPUs its reduce-scatter is gloo's, which carries more, as in notebook 04.)
#
# ## Two axes: FSDP over TP
#
# TP cannot use more ranks than there are heads, and in practice no more than a node has. So it becomes one axis of a
# mesh, and FSDP the other: first split the model along `tp`, then shard what each rank has of it along `dp`. Ranks
# along `tp` read the same sequences; ranks along `dp` read different ones. Here are two nodes of two ranks each
# (notebook 05's `Link`), and the axes in both orders:

# %%
from labs.fsdp import fully_shard


def two_axes(names, model):
    """TP on 2 ranks, and FSDP over 2 such groups; the names of the mesh's axes, outermost first."""
    mesh = Mesh((2, 2), names)
    parallelize(model, mesh["tp"], gpt_plan(model.config, sequence_parallel=True))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    trained, reads = trainable(model), slice(mesh.get_local_rank("dp"), None, 2)  # every second sequence
    return Training(partial(backward, model), adamw(trained), trained, partial(full_parameters, model)), reads


# %%
nodes, many = Link(nodes=2, bandwidth="1 Gbit/s"), Batches(corpus().tokens, 16, CONFIG.context)
AXES = {" × ".join(names): partial(two_axes, names) for names in (("dp", "tp"), ("tp", "dp"))}
kept = on_cpu(all_of, AXES, ranks=4, tell="numbers")[0]
seen = on_cpu(in_turn, AXES, [many[0], many[1]], ranks=4, record="communication", link=nodes, tell="bytes").recording

# %%
half = cost.fsdp_tp(cost.Job(CONFIG, batch=8, ranks=4), sequence_parallel=True)  # a TP group reads 8 sequences
rows = []
for second, name in zip((1, 3), AXES, strict=True):
    off = max((p - expected[key]).abs().max() for key, p in kept[name][1].items())
    leaves = seen.across(0, second) + seen.across(1, second)
    assert seen.sent(0, second) == half.sent
    numbers = {"within 1e-12 of one process": bool(off < 1e-12), "sent by rank 0": half.sent}
    rows.append({"": name, **numbers, "leaves a node": leaves})
draw.table(rows, caption="the last axis is made of neighbours; bytes of a step with 16 sequences")

# %% [markdown]
# Both orders give the right numbers, and send what the formulas of TP and FSDP say (`cost.fsdp_tp`). With `tp` last,
# the ranks of a TP group are neighbours and share a node. With `tp` first, all that TP sends crosses between the nodes.
# That is why TP goes last on a mesh. (Llama's authors list their axes the other way round: TP, their first one, is the
# innermost.)
#
# ## Latency: when a token gets slower
#
# So far TP was for training. It also serves inference: a model that generates text has one token to compute at a time,
# and needs *all* its weights for it. Most of the time goes into reading them from memory, and each of N ranks reads
# only an N-th. `generate` keeps the keys and values of earlier tokens in a *cache*
# ([labs/generate.py](../labs/generate.py)), so that only the new token goes through the model. A rank caches its own
# heads. All ranks see the same logits and, where a token is drawn at random, use the same seed, so they choose the same
# token:

# %%
from labs.generate import cached, generate

CHAT = replace(PRESETS["medium"], dim=256, depth=4, heads=8, kv_heads=4, hidden=704)
prompt = torch.tensor([list(b"def all_reduce(")])


def split(config):
    """The model: whole on one rank, split on several."""
    mesh = Mesh((dist.get_world_size(),), ("tp",))
    return parallelize(GPT(config), mesh, gpt_plan(config))


def answer():
    """12 tokens, twice: the likeliest one at each step, and one drawn at random."""
    model = split(CHAT)
    return [generate(model, prompt, 12, temperature, seed=1).tolist() for temperature in (0.0, 0.8)]


# %%
def milliseconds(tokens=16):
    """How long one token takes: the quickest of several."""
    model, times, token = split(CHAT), [], prompt
    with cached(model, prompt.shape[1] + tokens):
        for _ in range(tokens):
            dist.barrier()
            mark("step")
            began = time.perf_counter()
            token = model(token)[:, -1:].argmax(-1)
            times.append(1000 * (time.perf_counter() - began))
            mark("end")
    return min(times[1:])  # the first one is the prompt


found = {n: on_cpu(lambda: (answer(), milliseconds()), ranks=n, tell="tokens")[0] for n in (1, 2, 4)}
print(f"the same tokens on 1, 2 and 4 ranks: {all(tokens == found[1][0] for tokens, _ in found.values())}")

# %% [markdown]
# And how long does a token take? With pencil and paper (`cost.token_seconds`) it has three parts: reading the weights;
# *messages*, the time that a collective takes however little it carries; and *bytes*, the time that its data adds. A
# slow wire shows the last two. Here is one between two ranks, the same for the formula and for the job:

# %%
slow = Link(nodes=2, bandwidth="100 Mbit/s", latency=2e-3)
on_slow = on_cpu(milliseconds, ranks=2, link=slow, record="communication", tell="a slow wire")
as_class = cost.LinkClass(begin=0, latency=2e-3, bandwidth=100e6 / 8, algorithms=(cost.ring_seconds,))
token, calls = cost.token_seconds(CHAT, 2, as_class, itemsize=4), on_slow.recording.counts(0, 5).total()
rows = {"a token: sent": (4 * cost.token_sent(CHAT, 2).elements, on_slow.recording.sent(0, 5))}
ledger = draw.ledger(rows | {"a token: collectives": (2 * CHAT.depth + 2, calls, "")}, within=0)
assert ledger.agrees
ledger

# %%
print(f"the slow wire, at least: {1000 * token.messages:.0f} ms for messages, {1000 * token.bytes:.1f} ms for bytes")
took = {f"{n} rank{'s' * (n > 1)}, this machine": each for n, (_, each) in found.items()}
took["2 ranks, the slow wire"] = on_slow[0]
draw.table([{"": name, "a token took": f"{each:.1f} ms"} for name, each in took.items()])

# %% [markdown]
# On your machine, ranks share cores and memory, so more of them need not be quicker. On the slow wire there is no
# doubt. A token has two all-reduces per layer, one for the embedding and a gather of the logits, all one after the
# other. And nearly all of their time is messages: for so small a model, a token is so little data that bandwidth hardly
# counts. (For a wide model on Ethernet it does, as you will see.) The rest of the time is compute and Python, as for
# two ranks without the slow wire, and whatever a busy machine adds.
#
# So TP pays for a model whose weights take longer to read than its all-reduces take to begin. Here is the same formula
# for the links that people have (`cost` names its sources), for models in 16 bit and one sequence, on GPUs of 80 GB:

# %%
llama3 = PRESETS["llama3-8b"]
SIZES = {"1.1B": replace(llama3, vocab=32_000, dim=2048, depth=22, kv_heads=4, hidden=5632), "8B": llama3}
SIZES["70B"] = PRESETS["llama3-70b"]


def in_ms(config, ranks, link):
    """How long a token takes; None where a rank's part of the weights does not fit."""
    fits = 2 * sum(cost.parameter_sizes(config)) / ranks < 80e9
    return round(1e3 * cost.token_seconds(config, ranks, link).seconds, 2) if fits else None


# %%
rows = []
for size, config in SIZES.items():
    for name, link in cost.LINK_CLASSES.items():
        on_8 = cost.token_seconds(config, 8, link)
        parts = {"on 8: messages": round(1e3 * on_8.messages, 2), "on 8: bytes": round(1e3 * on_8.bytes, 2)}
        rows.append({"": f"{size}, {name}"} | {f"on {n}": in_ms(config, n, link) for n in (1, 2, 4, 8)} | parts)
draw.table(rows, caption="a token on 1 to 8 ranks, in ms; –: does not fit")

# %% [markdown]
# So by this formula there are three answers, depending on the size of the model:
#
# - **Slower**: 1.1 billion parameters gain nothing on two ranks, by any of these links. Eight gain a quarter with
#   NVLink, and a little with PCIe; on Ethernet, each further rank makes it slower. Somebody asked vLLM about it, with a
#   1B model on two L40s joined by PCIe: 6.3 ms per token on one, 6.9 ms on both. The reply: so small a gap may be
#   noise, and for so small a model the overhead may outweigh the benefit
#   ([vllm#6027](https://github.com/vllm-project/vllm/issues/6027)). Both times are ten times ours: the formula counts
#   neither the launching of kernels nor Python, and an L40 reads its memory more slowly.
# - **Faster**: 8 billion on NVLink or PCIe. (On Ethernet two ranks gain a little, and eight hardly anything.)
# - **Merely possible**: 70 billion do not fit one GPU at all. Even over Ethernet, several of them are better than none.
#
# ## Async TP: multiply while it travels
#
# In training, too, a rank waits at each border: the next product needs what is on its way. But it does not need all of
# it at once. With sequence parallelism, the product for one rank's tokens needs these tokens only. So let the ranks'
# shards go round a ring, one by one, and multiply each while the next one travels. At the other end the sums go round,
# and each rank adds the product of its own part. [labs/tp/async_tp.py](../labs/tp/async_tp.py) has both,
# `gather_linear` and `linear_scatter`. Here are the two matrices of this notebook's first picture, forward, on two
# ranks and a slow wire. (A sleep makes each product longer, by 80 µs per token, so that the picture depends less on how
# busy your machine is.)

# %%
from torch.overrides import TorchFunctionMode

from labs.tp.async_tp import gather_linear, linear_scatter
from labs.tp.conjugate import gather, scatter


class Padded(TorchFunctionMode):
    """Within it, each product takes longer."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            time.sleep(80e-6 * result.shape[1])
        return result


def whole(x, up, down, mesh):
    """Gather, multiply twice, scatter."""
    return scatter((gather(x, mesh, dim=1) @ up.T).relu() @ down.T, mesh, dim=1)


def in_chunks(x, up, down, mesh):
    (hidden,) = gather_linear(x, [up], mesh)
    return linear_scatter(hidden.relu(), down, mesh)


# %%
TOKENS, WIDTH, PAIRS = 128, 256, {"one after the other": whole, "in chunks": in_chunks}


def both(times=12):
    """Run each of the two several times; whether they give the same result."""
    torch.manual_seed(dist.get_rank())  # the ranks have different tokens, and different parts of the matrices
    mesh, results = Mesh((dist.get_world_size(),), ("tp",)), []
    x, up, down = (torch.randn(shape) / 16 for shape in ((1, TOKENS, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)))
    for pair in PAIRS.values():
        for _ in range(times):
            time.sleep(0.05)  # a gap in the picture
            dist.barrier()  # so that the ranks begin together
            mark("step")
            with Padded():
                results.append(pair(x, up, down, mesh))
            mark("end")
    return torch.allclose(results[0], results[-1], atol=1e-5)


# %%
wire = Link(nodes=2, bandwidth="100 Mbit/s")
found = on_cpu(both, ranks=2, link=wire, record="communication", tell="async TP")
seen, spans = found.recording, [found.recording.step_spans(rank) for rank in range(2)]
assert all(found) and seen.sent(0, 0) == seen.sent(0, 12)


def lasted(number):
    """From the first rank's start to the last one's end, in ms."""
    return 1000 * (max(each[number].end for each in spans) - min(each[number].start for each in spans))


quiet = [min(range(first, first + 12), key=lasted) for first in (0, 12)]
draw.timeline(seen, seen, step=quiet, names=list(PAIRS))

# %%
for name, number in zip(PAIRS, quiet, strict=True):
    waits = 1000 * sum(event.waited for event in seen.select(0, number))
    print(f"{name}: {lasted(number):.0f} ms, of which rank 0 waited {waits:.0f} ms")
travels = 1000 * wire.seconds("send", 4 * TOKENS * WIDTH, ranks=2)
print(f"both send {seen.sent(0, 0):,} bytes; a shard travels {travels:.0f} ms")

# %% [markdown]
# (The picture shows the quickest of twelve steps of each. The scatter is drawn as an all-to-all, as in notebook 04.)
# The same result and the same bytes, but now a shard travels while another is multiplied. A rank now waits only if a
# shard takes longer to travel than to multiply: here hardly ever, unless your machine is busy. In PyTorch this is
# experimental: torch.compile can do it for a plan like this if you switch it on, between GPUs that can read each
# other's memory. Its authors
# [report](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)
# a forward pass up to 29% faster, and a whole step up to 8%, for a Llama 3 of 7B. It does nothing for a single token,
# which cannot be cut into shards.
#
# ## Three confusions, settled by measurement
#
# - **"TP splits the rows."** Columns, then rows: see the first job of this notebook.
# - **"TP makes activations smaller by the number of ranks."** Not by itself, and with sequence parallelism only if the
#   inputs of the pairs are kept as shards, too: see the ledger of A.
# - **"TP has little communication."** That is said of pipelines, with good reason. Take the same model, the same batch
#   and the same four ranks under three strategies. DDP sends *gradients*, FSDP *parameters and gradients*: as many for
#   one token as for a million. TP sends *activations*, a fixed number for each token of the whole batch. So with few
#   tokens it sends the least, and with many the most.
#
# First all three as measured, with sequences of 128 tokens. Then by the formulas, for other lengths, too; where TP
# meets DDP, it was measured once more:

# %%
a_part = cost.Job(CONFIG, batch=1, ranks=4)  # under data parallelism, each rank has a quarter of the batch
talk |= recorded({"DDP": partial(row, "ddp-bucketed"), "FSDP": partial(row, "fsdp")})


def sent(length):
    """Bytes that a rank sends in a step with four sequences of this length, by strategy."""
    on_part, on_all = (replace(job, config=replace(CONFIG, context=length)) for job in (a_part, on_paper))
    data_parallel = {"DDP": cost.ddp(on_part, "bucketed").sent, "FSDP": cost.fsdp(on_part).sent}
    return {"tokens": SEQUENCES * length} | data_parallel | {"TP": cost.tp(on_all).sent}


ledger = draw.ledger(
    {name: (sent(CONFIG.context)[name], talk[name]["sent"]) for name in ("DDP", "FSDP", "TP")}, within=0
)
assert ledger.agrees
ledger

# %%
crossed = next(length for length in range(1, 129) if sent(length)["TP"] > sent(length)["DDP"])
talk |= recorded({"at the crossing": WAYS["TP"]}, [tuple(part[:, :crossed] for part in batch) for batch in batches])
assert talk["at the crossing"]["sent"] == sent(crossed)["TP"]
draw.table([sent(length) for length in (32, 64, crossed, 128, 256)], caption="bytes that each rank sends in a step")

# %% [markdown]
# The crossing is easy to remember. A layer has about 12 D² parameters, of which DDP all-reduces the gradients; TP
# all-reduces 4 tensors of D numbers per token. They are equal at 12 D²/4 D = **3 D tokens** in the batch of a TP group,
# and with FSDP, which sends 1.5 times as much as DDP, at 4.5 D. (The embedding and the head move it a little.) In
# training, batches are usually larger.
#
# ## Why, and why not
#
# **Why**: more ranks than sequences; a layer, or its activations, that do not fit one device; an answer that must come
# sooner. Nearly everything is divided: P, G and S, most of A, and the arithmetic.
#
# **Why not**: with batches as large as in training it sends the most, and every collective is waited for. Hiding them
# takes extra work (async TP), whereas DDP and FSDP hide theirs easily. Is it worth it? A layer of ψ parameters takes
# 6ψT/(NR) seconds on N devices (T tokens, R operations per second), and its four all-reduces, 2 bytes per number, 16
# (N − 1)/N × TD/W (W bytes per second). T cancels: a larger batch does not help, only a wider model or a faster wire.
# The table gives the seconds on the wire for each second of computing:

# %%
R, N = cost.FLOPS, 8  # an H100 in Llama 3's training, its waiting included (arXiv 2407.21783, table 4)
WIRES = {name: link.bandwidth for name, link in cost.LINKS.items()}  # bytes per second, each way
rows = []
for name in ("llama3-8b", "llama3-405b"):
    config = PRESETS[name]
    psi = sum(cost.gpt_layers(config)[1].sizes)
    shares = {wire: 16 * (N - 1) * config.dim / W / (6 * psi / R) for wire, W in WIRES.items()}
    rows.append({"on 8 ranks": name, **{wire: round(share, 2) for wire, share in shares.items()}})
draw.table(rows)

# %% [markdown]
# So TP stays inside a node. In this layout it cannot use more ranks than there are query heads, and long before that
# the matrices become too narrow to keep a device busy.
#
# ### A way out
#
# Here is PyTorch's `parallelize_module` in an ordinary script, with nothing of the course but the data and the model.
# It is [scripts/tp.py](../scripts/tp.py). From the root of the repository, run
# `torchrun --nproc-per-node 2 scripts/tp.py`:
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
# <details><summary>Two nodes of eight GPUs with NVLink inside, a model of 8B, and training with a batch of a million
# tokens. Which axis goes where, and when would you not use TP at all?</summary>
#
# TP inside a node, last on the mesh, and data parallelism between nodes. If the model fits with FSDP and there are
# enough sequences for all ranks, FSDP alone sends less: a million tokens are far more than 4.5 D.
# </details>
#
# For M tokens of D numbers (b bytes each) in the batch of N ranks, and L layers, each rank sends and holds:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | TP: sent | (4L + 2) × 2 (N − 1)/N × MDb, and three numbers per token | exactly | exactly |
# | with sequence parallelism: sent | the same, and the norms' gradients | exactly | the norms' three times |
# | collectives of a layer | 4; sequence parallel 8, and 2 for its norms | exactly | the norms' as AdamW reads them |
# | P, G, S | 1/N, except for the norms | exactly | G: all of the embedding's |
# | A | by `cost.tp` | exactly | within 0.1 % of ours |
# | numbers | one process's | within 1e-12, in float64 | within 1e-12, in float64 |
#
# **Read on**: [labs/tp/conjugate.py](../labs/tp/conjugate.py), [labs/tp/shares.py](../labs/tp/shares.py),
# [labs/tp/vocabulary.py](../labs/tp/vocabulary.py), [labs/tp/parallel_layers.py](../labs/tp/parallel_layers.py),
# [labs/tp/styles.py](../labs/tp/styles.py) and [labs/tp/tp.py](../labs/tp/tp.py), in this order. Shoeybi et al., 2019,
# *Megatron-LM* (arXiv 1909.08053), section 3. Korthikanti et al., 2022, *Reducing Activation Recomputation in Large
# Transformer Models* (arXiv 2205.05198), section 4. Pope et al., 2022, *Efficiently Scaling Transformer Inference*
# (arXiv 2211.05102).
#
# **Next.** Tensor parallelism needs the fast wire of a node, so a model that is too large for one node is still out of
# reach. [10 Pipeline](10_pipeline.ipynb) splits it the other way, by its depth, and sends little enough for a slow
# wire.
#
# A clean copy of this notebook: `git restore notebooks/09_tensor_parallel.ipynb`, then *File > Reload Notebook from
# Disk*.
