# %% [markdown]
# # Tensor parallelism: every matrix split
#
# *A batch has 2,048 sequences, and there are 16,384 GPUs. If each sequence goes to one GPU, what do the other 14,336
# GPUs do?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), which explains `Shard`, `Replicate` and `Partial`, and
# [Memory](07_memory.ipynb), which explains activations.
# **Minutes**, by estimate: 30 without exercises, 50 with them, 35 more for optional parts.
# Running all cells takes half a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("09")

# %% [markdown]
# ## Question
#
# Every strategy so far gave each rank its own sequences. FSDP shards the state that a rank *holds*. But a rank still
# gathers each whole layer, and computes the whole layer for its own tokens. As long as no sequence is cut, there can be
# no more ranks than sequences. Llama 3 with 405 billion parameters was trained on 16,384 GPUs, with 16 million tokens
# in a batch, in sequences of 8,192 tokens (Llama Team, 2024, arXiv 2407.21783, section 3.3.2 and table 4):

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
# A larger batch would give the idle GPUs work, but beyond some size a larger batch hardly helps the training. So more
# GPUs help only if several of them work on the *same* sequence. Llama 3's GPUs did so along two axes. The eight GPUs of
# a node shared the work of every layer, and sixteen such nodes formed a [pipeline](10_pipeline.ipynb), in which each
# node had some of the layers. There were 128 such groups of 128 GPUs, with 16 sequences each. To share the work of
# every layer is **tensor parallelism**, TP (Shoeybi et al., 2019, who called their program Megatron-LM). All ranks of a
# TP group read the same tokens, and each matrix of the model is split over them.
#
# ## Picture
#
# Take two matrices one after the other, as in an MLP: `relu(x @ up) @ down`. In notebook 05, DTensor found a way to
# compute this with a single collective. The picture shows this way on two ranks:
#
# ![Both ranks have the whole x. Rank 0 has the first two columns of up and the first two rows of down, and rank 1 has
# the others. Each rank computes two of the four hidden features, applies relu, and multiplies by its rows. The result
# on each rank is a summand, and an all-reduce adds up the summands.](../images/tp_pair.svg)
#
# A *feature* is one number of a token's vector, which is a column of the hidden tensor. Until the all-reduce, each rank
# computes without communication.
#
# ## Predict
#
# A layer of our GPT has two such pairs of matrices. In attention the first matrices are q, k and v, and the second is
# o. In the MLP the first are gate and up, and the second is down. How many all-reduces does one layer need in a
# training step, forward and backward together?

# %%
guess_reduces = 4  # your number

# %% [markdown]
# ## Build: columns, then rows
#
# The next cell computes the picture in numbers. The first matrix is split by columns: each rank gets some of the hidden
# features, complete for every token. Relu works on each number by itself, so each rank can apply it to its own
# features. The second matrix is split by rows: each rank multiplies by some of the rows, and gets a *summand* of the
# result, which PyTorch calls `Partial`.
#
# Some texts say that "tensor parallelism splits the rows". This is true only of the second matrix. If you split the
# first matrix by rows, each rank has only a summand of `x @ up`. Then the summands must be added up before relu, since
# the relu of a sum is not the sum of the relus:

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
# So the order decides whether the ranks must communicate between the two matrices. The next cells run both orders as a
# real job on four ranks. A PyTorch `Linear` keeps its matrix as [outputs, inputs], so a column of our matrix is a row
# of its weight, and split by columns means `Shard(0)`.


# %%
def mine(whole, dim):
    """Return this rank's part along a dim."""
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def added(summand):
    dist.all_reduce(summand)
    return summand


def gathered(features):
    """Return all ranks' features, side by side."""
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
    """Multiply 8 tokens of 16 features, with 64 hidden features, in both orders."""
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
# With columns first, nothing is sent between the two matrices, where the tensor is wide: here it is four times as wide
# as x. So the pair needs one collective instead of two.
#
# ## Build: the two borders
#
# Now consider backward. Inside the pair the ranks need no communication, so all communication is at two *borders*: at
# the input, where every rank has the whole x, and at the output, where the summands are added up. The output is easy.
# The sum is the same on all ranks, and so is its gradient, which is also the gradient of each summand. All ranks
# compute the *same* loss from the sum, and this loss counts once. PyTorch's function
# `torch.distributed.nn.functional.all_reduce` assumes instead that the loss is the sum of all ranks' losses: its
# backward adds up the gradients of all ranks, which would make our gradients N times too large.
#
# The input is less obvious. Each rank has used the whole x, but only for its own columns. So in backward each rank
# computes only a summand of x's gradient, and the summands must be added up. Each border does in forward what the other
# does in backward: the two are *conjugate* to each other:
#
# | border | forward | backward |
# |---|---|---|
# | `copy`, at the input | nothing: x is unchanged | all-reduce of the gradient |
# | `reduce`, at the output | all-reduce of the summands | nothing: the gradient is unchanged |
#
# The picture shows both borders around a pair, on four ranks:
#
# ![x is whole on every rank, before and after the norm. copy sends nothing in forward, and all-reduces the gradient in
# backward. The columns give each rank some of the features, and the rows give it a summand. reduce all-reduces in
# forward, and sends nothing in backward.](../images/tp_borders.svg)
#
# ### Exercise 1: the conjugate pair (10 minutes)
#
# Write both as autograd functions. `ctx.group` is the group of ranks; None means all ranks. In `backward` return a
# gradient for each argument of `forward`, and None for the group. An all-reduce works in place, and needs a contiguous
# tensor. But you may not change x or the gradient that `backward` gets. Note that `clone()` keeps the strides, which
# may differ between ranks, and that `contiguous()` copies only if it must.
#
# The check compares values and gradients on 1 to 8 ranks and in sub-groups, for any shape and dtype, with gradients
# that are not contiguous. It counts the bytes sent and held. Budget: each border makes one all-reduce in one direction,
# sends nothing in the other, and keeps nothing for backward.


# %%
class Copy(torch.autograd.Function):
    """The border at the input: x [any shape] is whole on all ranks and unchanged. Its gradient
    is a summand on each rank, and becomes the sum."""

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
    """The border at the output: the sum of all ranks' summands [any shape]. Its gradient is the
    same on all ranks."""

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
# A linear layer is split by rows and has a bias, and every rank holds the whole bias. If every rank adds the bias to
# its summand, the result contains the bias N times. In August 2026 this bug was found in torchtitan, PyTorch's own
# library for training large models ([torchtitan#4245](https://github.com/pytorch/torchtitan/pull/4245)).
#
# The check compares the output and the gradients of x, weight and bias on 1 to 8 ranks and in sub-groups. It tries any
# number of outer dims, ranks with different numbers of inputs or with none, and layers without a bias. It measures the
# bytes sent and held. Budget: one all-reduce in forward, and nothing sent in backward. Use `reduce`.


# %%
def row_linear(x, weight, bias, group=None):
    """Return the whole output on every rank, [..., outputs].

    x: [..., i], this rank's inputs
    weight: [outputs, i], the columns for these inputs
    bias: [outputs], whole, or None
    """
    ### BEGIN SOLUTION
    y = reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias
    ### END SOLUTION


check.row_linear(row_linear)

# %% [markdown]
# ## Build: attention, by heads
#
# Attention is such a pair, too. The projections q, k and v are split by columns, and o is split by rows. Between them
# each *head* computes by itself, with its own columns of q, k and v. So the matrices may be cut only between heads.
#
# With **grouped-query attention** there are H query heads and only K heads of keys and values, and H/K query heads
# share one head of keys and values. Llama 3 405B has H = 128 and K = 8. If K is at least the number of ranks, each rank
# gets whole heads of keys and values, each with the H/K query heads that use it. With more ranks than K, several
# neighbouring ranks need a copy of the same head of keys and values. Each of these ranks computes the gradient of this
# head from its own queries alone, so the gradients must be added up over exactly these ranks. In one model's training
# code this sum was wrong at first: the validation loss was 3.74 on several ranks and 2.64 on one rank
# ([bigcode-project/Megatron-LM#37](https://github.com/bigcode-project/Megatron-LM/pull/37)).
#
# ### Optional exercise: deal out the heads (10 minutes)
#
# Which heads does a rank have? Query head h uses the keys and values of head h // (H // K). Return a rank's query
# heads, the heads of keys and values that these use, and the ranks that have the same heads of keys and values,
# including the rank itself. If there are at least as many heads of keys and values as ranks, no two ranks share one.
# Then distribute them as evenly as possible; if there is a remainder, the first ranks get one more. A rank's heads may
# be consecutive or not, as you like. If there are fewer heads of keys and values than ranks, the ranks that share a
# head must be neighbours: [labs/tp/parameter_cuts.py](../labs/tp/parameter_cuts.py), which cuts the matrices, relies on
# this. The check tries many numbers of heads, on up to 16 ranks. Budget: no message. `rank` is any rank; it is not the
# number of the process that calls your function.


# %%
def deal_heads(heads, kv_heads, ranks, rank):
    """Return ([query heads], [heads of keys and values], [ranks that have these heads of keys
    and values]) of a rank, each in ascending order.

    kv_heads divides heads. If there are more ranks than kv_heads, kv_heads divides ranks, ranks
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
# Attention and the MLP are such pairs. The embedding is split by the vocabulary: the rank that holds a token's row
# looks it up, the other ranks contribute zeros, and an all-reduce adds them up. The *output head*, the last matrix,
# which computes the logits, is split by columns. A **plan** says how each module is split: it is a table from the name
# of a submodule to a *style*, and `parallelize` splits a model by a plan. In the next notebook you write a plan; here
# you see how it works. `strategies.by_plan(plan)` lets the loop of notebooks 04 and 06 train by a plan, `in_turn`
# trains by several plans one after the other, and `recorded` counts the bytes that rank 0 sends.

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
# Is it the same training? The next cell takes two steps with AdamW in float64, on four ranks, and compares the
# parameters with those of one process. The second way uses sequence parallelism, which is explained below.

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
# The parameters are not equal bit for bit, since a sum over four ranks is rounded in a different order from one long
# sum.
#
# ## Measure: bytes sent
#
# Count with pencil and paper. Let a batch have M tokens of D numbers each. In forward, each pair ends with an
# all-reduce of M × D numbers, and so does the embedding. In backward, there is such an all-reduce at the input of each
# pair, and one at the input of the output head. The loss needs three numbers per token, in two all-reduces: first the
# highest logit, and then a sum and the target's logit. You write this loss in the next notebook. `cost.tp_sent`
# computes the bytes by part and phase:

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
# With L = 2 layers these are 4L + 2 + 2 = 12 all-reduces; the last two belong to the loss. With sequence parallelism
# there are 2 (4L + 2) + 2 collectives, and one more for each of the 2L + 1 norms, which makes 27.


# %%
def one_layer():
    return GPT(replace(CONFIG, depth=1))


fewer = recorded({"one layer": WAYS["TP"]}, one_layer, batches)["one layer"]
more = talk["TP"]["collectives"] - fewer["collectives"]  # all-reduces, all of them
why = "Two forward, two backward."
check.predict("All-reduces of one layer in a step?", guess_reduces, more, reason=why)

# %% [markdown]
# Each layer makes four all-reduces, and a rank waits for each of them. The bytes that they send do not depend on the
# number of parameters. They grow with the number of *tokens*; the next notebook comes back to this.
#
# ## Build: sequence parallelism
#
# TP splits the matrices, and the features inside each pair. It does not split the operations between the *pairs*:
# norms, residual additions and dropout. Every rank computes these on the whole x, and keeps all of their activations.
# But these operations treat each token by itself. So **sequence parallelism** lets each rank compute them for only a
# part of the tokens (Korthikanti et al., 2022). Then x must be gathered at the input of each pair, and at the output a
# rank needs the sum for its own tokens only:
#
# ![Each rank has some of the tokens, before and after the norm. gather is an all-gather in forward and a reduce-scatter
# in backward. Columns, features, rows and summands are as before. scatter is a reduce-scatter in forward and an
# all-gather in backward, and then each rank has some of the tokens again.](../images/sp_borders.svg)
#
# `gather` and `scatter` are conjugate to each other, as `copy` and `reduce` are. Sequence parallelism makes two
# collectives in place of each all-reduce. By what factor does this change the bytes that a rank sends?

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
# A rank sends nearly the same number of bytes as before, and a little more for the norms. The reason is that an
# all-reduce *is* a reduce-scatter followed by an all-gather, as notebook 02 showed. Sequence parallelism separates the
# two, and between them each rank computes the norms and residual additions on its own tokens. This saves memory. Some
# texts use the name sequence parallelism for *context parallelism*, which splits the sequence inside attention, too.

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
# On four ranks, TP alone divides activations by only about two: the tensors that the norms keep and the input of each
# pair are whole on every rank. With sequence parallelism activations are divided by about three: the input of a pair is
# still gathered, and is kept whole. The next table shows the layer that the authors counted, that of GPT-3 in 16 bits,
# without the attention scores. It uses the formula of notebook 07, with s tokens, b sequences and width h:

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
# The term 10 counts the tensors that stay whole: those that norms and dropouts keep, and the inputs of the pairs. 34/8
# is the count for the authors' own code, which keeps only a shard of each pair's input and gathers it once more in
# backward; ours keeps the whole input.
#
# ### What went wrong in the wild
#
# *Symptom*: "no crash, no NaN, pure drift". *Cause*: with sequence parallelism each rank holds the whole weights of the
# norms, but uses them for its own tokens only. So the gradients of these weights are summands, and must be added up
# over the ranks: D numbers for each norm. In NeMo RL a new code path for training steps did not call the function of
# Megatron that computes this sum ([NVIDIA-NeMo/RL#3716](https://github.com/NVIDIA-NeMo/RL/issues/3716), August 2026).
# The next cells repeat the bug in miniature, with a plan that leaves out the norms:


# %%
def forgetful():
    """Take 12 steps without the sum. Return whether the loss fell, the last loss, the last
    norm's weight, and the error that reports the missing sum."""
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
# The four copies of each norm drift apart, and a checkpoint keeps only one of them, so the model that you load is not
# the model that you trained. After a few steps, compare once the parameters that should be the same on all ranks. The
# course's `parallelize` compares the gradients of these parameters after the first backward, and raises an error if
# they differ, as the last printed line shows.
#
# ### The norm of a part of a matrix
#
# A rank's part of a matrix is an ordinary tensor. Suppose that a loss includes the norm of a weight, or that a weight's
# gradient is clipped by its own norm. Is this the norm of the whole matrix, or of the part?


# %%
def taken_for_the_whole(in_the_loss):
    """Return the error if a weight's norm is in the loss, or clips its gradient."""
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
# It is the norm of the part, which differs on every rank, and is not the norm of the matrix. PyTorch uses a DTensor as
# the weight, which knows the whole matrix. With an ordinary tensor nothing crashes, and the loss falls. So
# `parallelize` checks the *first step*: it computes the batch once more with the whole model, and compares the results.
# It detects a weight that is used outside of its module, gradients that are scaled by a different factor on each rank,
# and an optimizer that updates a matrix and its parts differently. It does not detect later changes of a part between
# two steps.
#
# ## Why, and why not
#
# **Why**: tensor parallelism can use more ranks than there are sequences. It helps if a layer or its activations do not
# fit on one device, and if a single answer must come sooner. It divides nearly everything: P, G and S, most of A, and
# the arithmetic.
#
# **Why not**: four times in each layer, all ranks wait for an all-reduce, whose size grows with the batch. The next
# notebook compares these bytes with those of other strategies, and computes how long they take on common links.

# %% [markdown]
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Why is the first matrix of a pair split by columns and the second by rows, and where are the pair's
# collectives in forward and backward?</summary>
#
# The columns give each rank some of the features, complete, so that relu, silu or a head's attention can be applied to
# them. The rank's rows of the second matrix need exactly these features. In forward, one all-reduce comes after the
# rows. In backward, one all-reduce comes at the input of the columns, since every rank used the whole x for its own
# columns and computes only a summand of x's gradient.
# </details>
#
# <details><summary>How does sequence parallelism change the bytes sent, the bytes held, and the gradients of the
# norms?</summary>
#
# A rank sends nearly the same number of bytes, since an all-reduce is a reduce-scatter and an all-gather; in addition
# it sends the norms' gradients. The activations between the pairs are divided by the number of ranks, too. On each rank
# the norms see only a part of the tokens, so their gradients must be added up over the ranks.
# </details>
#
# <details><summary>There are 16 ranks and 8 heads of keys and values. Which heads does each rank have, and which sum is
# easily forgotten?</summary>
#
# Two neighbouring ranks have a copy of the same head of keys and values. Each of the two computes the gradient of this
# head from its own queries alone, so the gradients of k and v must be added up over exactly these two ranks.
# </details>
#
# Let N ranks read a batch of M tokens, with D numbers of b bytes per token, and let the model have L layers. The table
# shows how much each rank sends and holds:
#
# | | predicted | ours |
# |---|---|---|
# | TP: sent | (4L + 2) × 2 (N − 1)/N × MDb, and three numbers per token | exactly |
# | with sequence parallelism: sent | as TP, and the norms' gradients | exactly |
# | collectives of a layer | 4; with sequence parallelism 8, and 2 for the norms | exactly |
# | P, G, S | 1/N, except for the norms | as predicted |
# | A | by `cost.tp` | within 5 % |
# | numbers | equal to one process's | within 1e-12, in float64 |
#
# The next notebook tests PyTorch's own tensor parallelism with the same ledgers.
#
# Here the notebook ends. **What follows is optional**: a check that finds a forgotten border without running any rank.
#
# ## Optional: the type of a tensor over ranks
#
# *`copy` sends nothing in forward. If a layer lacks it, how do you notice?*
#
# The next cells leave `copy` out of a pair of matrices, on four ranks. They compare the loss with that of one process,
# and the gradients of x, up and down. How many of these three gradients are wrong?

# %%
guess_wrong = 1  # your number


# %% tags=["subject"]
def without_copy():
    """Return whether the loss is right, and the names of the wrong gradients."""
    torch.manual_seed(0)
    sizes = (8, 16), (16, 64), (64, 16)
    x, up, down = (torch.randn(*size).double().requires_grad_() for size in sizes)
    whole = ((x @ up).relu() @ down).square().sum()
    loss = reduce((x @ mine(up, 1)).relu() @ mine(down, 0)).square().sum()
    wrong = []
    for name, tensor, dim in (("x", x, 0), ("up", up, 1), ("down", down, 0)):
        grads = (torch.autograd.grad(y, tensor, retain_graph=True)[0] for y in (whole, loss))
        if not torch.allclose(*(mine(grad, dim) for grad in grads)):
            wrong.append(name)
    return torch.allclose(loss, whole), wrong


# %%
right, wrong = run(without_copy, ranks=4, device="cpu")[0]
print(f"the loss is right: {right}; wrong gradients: {', '.join(wrong)}")
why = "And so is every gradient of the layers before it."
check.predict("Wrong gradients of the three?", guess_wrong, len(wrong), reason=why)

# %% [markdown]
# Nothing in forward shows the mistake, since x is the same tensor before `copy` and after it. Only its gradient
# differs: after `copy`, each rank has a summand of the gradient, and before `copy`, each rank has the sum. So give each
# tensor a *type* along an axis of the mesh, which says what the ranks have of the tensor and of its gradient:
#
# ![Above, the tensors of a pair on four ranks. x is whole before copy and after it, then each rank has some features,
# then a summand, and after reduce the sum. Below, their gradients, from right to left. The gradient is whole after
# reduce and before it, then each rank has some features, then a summand, and before copy the sum. The types are I, R,
# V, P and I.](../images/tp_types.svg)
#
# There are four types. Their names are those of `spmd_types`, a package by Meta with which torchtitan checks its
# models:
#
# | | type | the tensor on the ranks | its gradient on the ranks |
# |---|---|---|---|
# | R | replicated | the same | summands of the gradient (P) |
# | I | invariant | the same | the same (I) |
# | V | varying | each rank has its own | each rank has its own (V) |
# | P | partial | summands | the same (R) |
#
# `copy` takes an invariant tensor and returns a replicated one. The type of a result follows from the types of the
# operands. `typed` follows the types through a function, without ranks and without numbers. In such a function, `rows`
# is a product that sums over a dim of which each rank has a part, as the second product of a pair does:

# %% tags=["subject"]
from labs.tp import rank_types as types


def pair(x, up, down):
    return types.reduce(types.rows(torch.relu(types.copy(x) @ up), down))


types.typed(pair, x="I", up="V", down="V")


# %% [markdown]
# Without `copy`, an invariant x meets varying columns. Each rank then uses x in its own way and has only a summand of
# the gradient of x, but nothing adds up the summands:


# %% tags=["subject"]
def refused(program, **given):
    """Return the sentence with which the checker refuses a program."""
    try:
        types.typed(program, **given)
    except TypeError as error:
        return str(error)


PAIR = {"x": "I", "up": "V", "down": "V"}
print(refused(lambda x, up, down: types.reduce(types.rows(torch.relu(x @ up), down)), **PAIR))

# %% [markdown]
# ### Exercise 3 (optional): the table of types (10 minutes)
#
# The checker obeys a table, which you write for products and collectives. It has the letters of the operands and the
# letter of the result: `{"RV": "V"}` says that a replicated and a varying tensor, in either order, give a varying one.
# Whatever is not in the table is refused. To find an entry, ask three questions. What does each rank have of the
# result? Given the gradient of the result, what does each rank get as the gradient of an operand? Is this the gradient
# that the operand's type promises? For example, the sum of a partial and a replicated tensor is refused, because every
# rank would add the replicated one.
#
# | | in forward | in backward |
# |---|---|---|
# | `copy` | nothing | all-reduce |
# | `reduce` | all-reduce | nothing |
# | `all_reduce` | all-reduce | all-reduce |
# | `gather` | all-gather | reduce-scatter |
# | `scatter` | reduce-scatter | all-gather |
# | `join` | all-gather | each rank keeps its own piece of the gradient |
# | `split` | each rank keeps its own piece | all-gather |
# | `all_to_all` | all-to-all | all-to-all |
#
# `all_reduce` is that of `torch.distributed.nn.functional`, as described before exercise 1. The check applies your
# table to right and wrong programs, and names a program that your table misjudges.


# %% tags=["exercise"]
def type_table():
    """Return {operation: {letters of its operands: letter of its result}}, along one axis of
    the mesh. All tensors have gradients.

    product: each rank multiplies what it has, and sums over a dim that is whole on each rank;
        two letters, in alphabetical order; five entries
    rows: a product that sums over a dim of which each rank has a part; one entry
    copy, reduce, all_reduce, gather, scatter, join, split, all_to_all: one entry each, such as
        {"V": "V"}
    """
    table = {
        "sum": {"II": "I", "PP": "P", "RR": "R", "RV": "V", "VV": "V"},
        "relu": {"I": "I", "R": "R", "RV": "V", "V": "V"},  # and others that are not linear
    }
    ### BEGIN SOLUTION
    table["product"] = {"II": "I", "PR": "P", "RR": "R", "RV": "V", "VV": "V"}
    table["rows"] = {"VV": "P"}
    table |= {"copy": {"I": "R"}, "reduce": {"P": "I"}, "all_reduce": {"P": "R"}}
    table |= {"gather": {"V": "R"}, "scatter": {"P": "V"}, "all_to_all": {"V": "V"}}
    table |= {"join": {"V": "I"}, "split": {"I": "V"}}
    ### END SOLUTION
    return table


checked = check.type_table(type_table)
checked

# %% [markdown]
# The table has each border of this notebook, and one rule connects them. A collective from one type to another has in
# backward a collective from the gradient of the second to the gradient of the first. `copy` goes from I to R. Its
# backward goes from P to I, and this is `reduce`. Likewise, `gather` goes from V to R, and its backward, from P to V,
# is `scatter`. A tensor has one type along each axis, and each axis is checked by itself:

# %% tags=["subject"]
table = type_table() if checked.ok else check.type_table.expected()
AXES = {"axes": ("dp", "tp"), "returns": "VI", "x": "VI", "up": "IV", "down": "IV"}


def every_axis(x, up, down):
    up, down = types.copy(up, axis="dp"), types.copy(down, axis="dp")
    return types.reduce(types.rows(torch.relu(types.copy(x) @ up), down))


types.typed(every_axis, table=table, **AXES)

# %% [markdown]
# Along `dp` each rank has its own sequences, and all ranks have the same weights and update them alike, so the weights
# are invariant. They meet varying tensors, so they cross `copy`, too: its all-reduce in backward is what DDP does. FSDP
# has its shards cross `gather` instead. Without `copy` along `dp`, and with a bug of sequence parallelism:

# %%
print(refused(pair, table=table, **AXES), end="\n\n")


def forgotten_sum(x, norm, up):
    return types.join(types.gather(F.rms_norm(x, (1,)) * norm) @ up)


print(refused(forgotten_sum, table=table, x="V", norm="I", up="V"))

# %% [markdown]
# The second sentence is the bug of NeMo RL above, found without a step. A type says nothing about numbers: a gradient
# that is summed and should be averaged has the right type.
#
# ## Optional: the same with spmd_types
#
# *A program of names is quickly written. But who checks the code that trains?* `spmd_types` follows the types through
# real code, in one forward of one rank. The other ranks are pretended: PyTorch's fake process group has any number of
# ranks, and sends nothing. The next cells check the pair as rank 0 of 8,192, with `copy` and without it. `spmd_types`
# calls `copy` a conversion from I to R, and `reduce` an all-reduce to I.

# %% tags=["nbval-ignore-output"]
from torch.distributed.device_mesh import init_device_mesh

from labs.kit.dry import accepted_layers, on_pretended_ranks, spmd_types_missing
from labs.kit.launch import or_skip

or_skip(spmd_types_missing())


# %% tags=["subject"]
def by_spmd_types(forgotten):
    """Return the type of a pair's result; spmd_types is imported only in a job of its own."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    mesh = init_device_mesh("cpu", (1024, 8), mesh_dim_names=("dp", "tp"))
    with spmd.set_current_mesh(mesh), typecheck():
        x, up, down = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
        spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.I})
        for weight in (up, down):
            spmd.assert_type(weight, {"dp": spmd.R, "tp": spmd.V})
        inside = x if forgotten else spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
        y = spmd.all_reduce((inside @ up).relu() @ down, "tp", src=spmd.V, dst=spmd.I)
        return str(spmd.get_local_type(y))


# %% tags=["nbval-ignore-output"]
def with_and_without():
    """Return the type with `copy`, and the refusal without it."""
    with_copy = by_spmd_types(forgotten=False)
    try:
        by_spmd_types(forgotten=True)
    except RuntimeError as refused:
        return with_copy, str(refused)


print(*on_pretended_ranks(with_and_without, ranks=8192), sep="\n\n")

# %% [markdown]
# The sentence names the operands with their types, and the call that is missing. Now take seven split layers of this
# course, whose borders are autograd functions. How many of them does `spmd_types` accept as they are?

# %%
guess_accepted = 0  # your number

# %% tags=["nbval-ignore-output"]
rows = on_pretended_ranks(accepted_layers, ranks=8)
draw.table(rows)

# %% tags=["nbval-ignore-output"]
accepted = sum(row["unchanged"] != "refused" for row in rows)
why = "It refuses an autograd function for which there is no rule."
check.predict("Layers that are accepted unchanged?", guess_accepted, accepted, reason=why)

# %% [markdown]
# An autograd function that communicates needs a *rule*, which says the types that it takes and returns. In this course
# one rule is enough for all borders: [labs/tp/conjugate.py](../labs/tp/conjugate.py) has for each the placements of the
# tensor and of its gradient, and these two are its type. The cross-entropy has a second rule. Both are in
# [labs/kit/extras/types_of_layers.py](../labs/kit/extras/types_of_layers.py), and the layers stay as they are.
#
# The last column leaves all borders out. Two layers pass even so. The cross-entropy has no border. Columns that gather
# nothing multiply each rank's own tokens, and two varying tensors give a varying one: a type does not say which part of
# a tensor a rank has.
#
# **Read on**: [labs/tp/conjugate.py](../labs/tp/conjugate.py),
# [labs/tp/parameter_cuts.py](../labs/tp/parameter_cuts.py), [labs/tp/vocabulary.py](../labs/tp/vocabulary.py) and
# [labs/tp/parallel_layers.py](../labs/tp/parallel_layers.py), in this order. Shoeybi et al., 2019, *Megatron-LM* (arXiv
# 1909.08053), section 3. Korthikanti et al., 2022, *Reducing Activation Recomputation in Large Transformer Models*
# (arXiv 2205.05198), section 4. [labs/tp/rank_types.py](../labs/tp/rank_types.py), and the document *Local SPMD types*
# of [spmd_types](https://github.com/meta-pytorch/spmd_types).
#
# **Next.** The logits, which the last matrix of a model computes, are more numbers than any other activation, and your
# own model has other submodules than this one. In [09b Plan and wire](09b_plan_and_wire.ipynb) you split the loss,
# write a plan, combine TP with FSDP on a second axis, and find out when TP is faster.
#
# To get a clean copy of this notebook, run `git restore notebooks/09_tensor_parallel.ipynb`, and then choose *File >
# Reload Notebook from Disk*.
