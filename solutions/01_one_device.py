# %% [markdown]
# # One device
#
# **The question.** A model of 7.5 billion parameters, trained the usual way, cannot take one step on a device of 80 GB,
# however little text it reads. What does the device hold in all this memory, and which part of it could be left out?
#
# So the course begins with one device. In this notebook you train the course's small GPT, take one training step apart
# until you know what every byte is for, and fix the loss curve that every later notebook has to reproduce.
#
# You need: [Start here](00_start_here.ipynb).
# **Minutes**, by estimate: 35 without exercises, 70 with them.
# Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("01")

# %%
import math
from dataclasses import replace

import torch

from labs import cost
from labs.data import Batches, corpus
from labs.kit import check, draw, play
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.train import ADAMW
from labs.model import GPT, PRESETS

# %% [markdown]
# ## Picture
#
# <img src="../images/one_step.svg" alt="What one device holds during one training step. Parameters: always. Optimizer
# state: always, from the first step on. Activations: they grow during forward and shrink during backward. Gradients:
# they grow during backward and stay until zero_grad. Temporary memory: a little, at all times.">
#
# The picture is only a drawing. By the end of this notebook you will have measured every shape in it.
#
# ## What the model reads
#
# The model needs text to learn from, on every machine and without a download. Every Python comes with some text: the
# source code of its own standard library. The course reads this text as bytes, so a **token** is a byte, and the
# **vocabulary** has 256 tokens.

# %%
text = corpus()
text

# %% [markdown]
# The size and the hash of the text depend on your version of Python. So this course never compares a loss with a stored
# number, but only with the loss of one process on the same machine.
#
# How well does a model do before it has learned anything? The **loss** is the mean surprise per token, in **nats**: if
# the model gave a token the probability p, the token costs −ln p. Two numbers serve as yardsticks. A blind guess among
# 256 bytes costs ln 256. A model that knows how often each byte occurs, and nothing else, costs the **unigram
# entropy**.

# %%
print(f"blind guess      {math.log(256):.2f} nats")
print(f"unigram entropy  {text.unigram_entropy():.2f} nats")

# %% [markdown]
# ## The model, and one step
#
# The model in `labs/model.py` is a decoder-only transformer of today's design; its code knows nothing about
# parallelism. The smallest preset is enough for most of the course.

# %%
config = PRESETS["tiny"]
sizes = cost.parameter_sizes(config)
assert sum(sizes) == sum(p.numel() for p in GPT(config).parameters())
print(f"{sum(sizes):,} parameters in {len(sizes)} tensors")
config

# %% [markdown]
# A batch is 12 stretches of 64 bytes, and the target of each byte is the next byte. One **step** of training makes
# three calls: *forward* computes the loss, *backward* computes the gradient of the loss with respect to each parameter,
# and the optimizer changes the parameters a little. After the step, the same batch must surprise the model less.

# %%
BATCH, STEPS = 12, 30
x, y = Batches(text.tokens, BATCH, config.context)[0]
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

before = model(x, y)
before.backward()
optimizer.step()
after = model(x, y)
assert abs(before.item() - math.log(256)) < 0.1 and after < before
print(f"before the step {before.item():.2f} nats, after it {after.item():.2f} nats")

# %% [markdown]
# ## The reference curve
#
# Thirty of these steps make a training run that is short enough to repeat all the time. The loop below is the whole
# run. `mark(...)` only tells a recording, if there is one, which part of the step begins.


# %%
def train_with(model, optimizer, batches):
    """Return the loss of each step, in nats. batches: a list of (inputs, targets)."""
    losses = []
    for batch in batches:
        mark("step")
        x, y = (each.clone() for each in batch)  # as a loader would: they die with their step
        mark("forward")
        loss = model(x, y)
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %% [markdown]
# The training runs as a job of *one* rank, so that later notebooks start from the same call. With `device="cpu"` the
# numbers of bytes below are the same on every machine.


# %%
def train(batches):
    model = GPT(config)
    return train_with(model, torch.optim.AdamW(model.parameters(), **ADAMW), batches)


loader = Batches(text.tokens, BATCH, config.context)
batches = [loader[step] for step in range(STEPS)]
[reference] = run(train, batches, ranks=1, device="cpu")
entropy = text.unigram_entropy()
assert sum(reference[-5:]) / 5 < entropy
draw.curves({"one device": reference}, marks={"unigram entropy": entropy})

# %% [markdown]
# The curve begins at the loss of a blind guess and ends below the unigram entropy: by then the model knows more than
# how often each byte occurs. It has begun to use the bytes that come before.
#
# **This curve is the reference.** Training is deterministic here. Two runs start from the same weights, since each
# parameter is drawn from the seed and its own name; they read the same batches and do the same arithmetic. So we may
# require that the losses are equal bit for bit.

# %%
[again] = run(train, batches, ranks=1, device="cpu")
assert again == reference

# %% [markdown]
# The course's own loop, `strategies.train`, takes a strategy, a function that builds the model, and a list of
# batches for each rank. With the strategy "one device" the loop gives the reference curve; `make tour` runs it with
# every other strategy.

# %%
from labs.kit.train import strategies

same = strategies.train, strategies.ONE_DEVICE, lambda: GPT(config), [batches]
[(losses, parameters)] = run(*same, ranks=1, device="cpu")
assert losses == reference

# %% [markdown]
# ## Micro-batches
#
# Sometimes a batch is too large to go through the model at once. Then the batch is cut into **micro-batches**. The loss
# is a mean over the batch, so the gradient of the batch is the mean of the gradients of its equal parts. Data
# parallelism rests on this small fact: the parts need not be on one device.


# %%
def gradient(model, batches):
    """Return the gradient of the mean loss over equal batches, as one vector."""
    model.zero_grad()
    for x, y in batches:
        (model(x, y) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def micro(x, y, pieces):
    return list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))


assert [len(inputs) for inputs, _ in micro(x, y, 4)] == [3, 3, 3, 3]

# %% [markdown]
# `backward` *adds* to the gradients that are there. So the gradients of the micro-batches add up by themselves, and
# dividing each loss by the number of micro-batches gives the mean. This division is easily forgotten. By what factor is
# the gradient then too large, with 4 micro-batches?

# %%
model = GPT(config)
whole = gradient(model, [(x, y)])
forgotten = sum(gradient(model, [part]) for part in micro(x, y, 4))

guess = 4  # your number
factor = round((forgotten.norm() / whole.norm()).item(), 3)
check.predict("By what factor is the gradient too large?", guess, answer=factor)

# %% [markdown]
# With the division, is the gradient of 4 micro-batches the same as that of the whole batch? In mathematics it is. On a
# computer each sum is rounded, and micro-batches are summed in another order.

# %% tags=["nbval-ignore-output"]
rows = []
for dtype in (torch.float32, torch.float64):
    model = GPT(config).to(dtype)
    whole, mean = gradient(model, [(x, y)]), gradient(model, micro(x, y, 4))
    off = (whole - mean).abs().max().item()
    verdict = {"bitwise equal": torch.equal(whole, mean), "largest difference": f"{off:.0e}"}
    rows.append({"arithmetic": str(dtype), **verdict})
    assert 0 < off < 100 * torch.finfo(dtype).eps
draw.table(rows)

# %% [markdown]
# The gradients are bitwise equal neither in float32 nor in float64. But in float64 the difference is far smaller. This
# is how to tell rounding from a mistake: rounding errors shrink when the arithmetic is more precise, and a mistake
# stays as large as it was. Remember this test for later notebooks, where ranks add up gradients in different orders.
# Where exactness matters, the course compares in float64.
#
# ## Predict
#
# What does the device hold during a step? Count bytes per parameter, in float32, where each number takes 4 bytes. There
# are the parameter itself, its gradient, and the two numbers that AdamW remembers: a running mean of the gradient, and
# a running mean of its square.

# %%
guess = 16  # your number
recording = run(train, batches[:3], ranks=1, device="cpu", record="memory").recording
held = recording.held(step=2)
answer = round((held["P"] + held["G"] + held["S"]) / sum(sizes))
check.predict("How many bytes per parameter do P, G and S take?", guess, answer, unit="B")

# %% [markdown]
# ## Measure
#
# `record="memory"` records when the memory of each tensor is allocated and freed, and what the tensor was for. The next
# cell draws the third step of the run. Each phase is drawn equally wide, however long it took:

# %%
draw.memory(recording, step=2)

# %% [markdown]
# Compare this figure with the drawing at the top. *Parameters* and *optimizer state* never change in size; the state is
# drawn on top of the gradients, so its area moves up as the gradients grow. *Activations* grow in forward, layer by
# layer, because backward will need them. Backward starts with the last layer, and frees each layer's activations once
# it has used them. Meanwhile the *gradients* grow. In this model memory peaks when backward begins. With a large model
# and a small batch it peaks when all gradients have been computed.
#
# Now compare the measurement with the formulas of `labs.cost`. The formulas know the shapes of the model and which
# tensors its code keeps at each line; they use no measurement. The function `cost.ddp` is named after the strategy of
# notebook 03; with `"single"` it predicts for one device.

# %%
predicted = cost.ddp(cost.Job(config, BATCH), "single").held
kinds = ("P", "G", "S", "A", "temporary", "peak")
draw.ledger({kind: (getattr(predicted, kind), held[kind]) for kind in kinds})

# %% [markdown]
# P and G take 4 bytes per parameter each. S takes 8 bytes per parameter, and 4 more bytes per *tensor*, where AdamW
# counts its steps. P, G and S together take 16 bytes per parameter. In this small model A takes far more than all the
# other kinds. *Temporary* tensors live only within one operation; the square roots that AdamW computes are an example.
# The formulas leave them out, and predict the peak within 5 %.
# Each row shows the maximum of its kind during the step. These maxima are not all reached at the same moment, so the
# peak is less than their sum.
#
# The last ledger is time. The next cell draws the same step without the memory recording, which would slow it down:

# %%
timed = run(train, batches[:8], ranks=1, device="cpu", record="time").recording
draw.timeline(timed, step=3)

# %% [markdown]
# How much arithmetic does a step do? Take one weight of a matrix. In forward the weight is used once for each token: it
# is multiplied by a number of that token, and the product is added to a sum. That makes 2 operations per weight and
# token. Backward needs two such products: the gradient of the output times the input gives the gradient of the weight,
# and the gradient of the output times the weight gives the gradient of the input. That makes 4 operations in backward,
# and 6 operations per weight and token in the whole step. The count leaves out the embedding, which is only looked up,
# and attention, which multiplies tokens by tokens. PyTorch can count the operations of each matrix. Backward does twice
# the operations of forward: does it take twice the time, too?

# %%
from torch.utils.flop_counter import FlopCounterMode

with FlopCounterMode(display=False) as forward:
    loss = GPT(config)(x, y)
with FlopCounterMode(display=False) as backward:
    loss.backward()
matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
weights = sum(p.numel() for name, p in matrices.items() if name != "embed.weight")
for name, counter in {"forward": forward, "backward": backward}.items():
    operations = counter.get_flop_counts()["Global"][torch.ops.aten.mm] / weights / x.numel()
    seconds = sorted(span.end - span.start for span in timed.spans if span.name == name)
    print(f"{name}: {operations:g} operations per weight and token")
    print(f"{name}: {1e3 * seconds[len(seconds) // 2]:.1f} ms, the median of eight steps")

# %% [markdown]
# Backward usually takes less than twice the time of forward. In a model this small, much of the time goes to norms,
# softmax and copying numbers, and backward does not do this work twice. One device sends nothing and waits for nobody.
# With several devices that will change.
#
# ## Activations grow with the batch
#
# P, G and S depend on the model alone. Activations also depend on the batch that goes through the model. How large do
# they get with twice the batch, or with half the context?


# %%
def activations(batch, context):
    """Return the bytes of A, as measured in the second of two steps."""
    loader = Batches(text.tokens, batch, context)
    two = [loader[0], loader[1]]
    return run(train, two, ranks=1, device="cpu", record="memory").recording.held(step=1)["A"]


measured = {shape: activations(*shape) for shape in [(12, 64), (24, 64), (12, 32)]}

# %%
guess = 2  # your number
factor = measured[24, 64] / measured[12, 64]
check.predict("With twice the batch, A grows by what factor?", guess, factor)

# %%
rows = {
    f"batch {batch}, context {context}: A": (
        sum(cost.activations(cost.Job(config, batch, context=context)).values()),
        A,
    )
    for (batch, context), A in measured.items()
}
draw.ledger(rows)

# %% [markdown]
# A is proportional to the number of tokens, except for the *rotary* tables: they tell attention the position of each
# token in the text, with one row per position, and the whole batch shares them. A is proportional to the tokens because
# attention here is *fused*: it never stores its table of scores, which has one entry for each pair of tokens. Where
# attention stores that table, A has a part that grows with the square of the context.
#
# The formula goes through the model, operator by operator, and adds up the tensors that the derivative of each operator
# needs. The rows of the table are the norms, attention, the *rotary* tables, *mlp* (the other half of a block), the
# *head*, which computes the logits, and *tokens*, the batch itself:

# %%
kept = cost.activations(cost.Job(config, BATCH))
kept |= {"together": sum(kept.values())}
draw.table([{"kept by": part, "bytes": count} for part, count in kept.items()])

# %% [markdown]
# Now apply the formula to a model that people use; nothing is run. Move the control for the batch, and watch which bar
# grows: the terms that a control changes light up in the formulas. From what batch size on does A take more than P, G
# and S together?


# %%
def holds(model, batch, context, precision):
    """Draw P, G, S and A as the formulas predict them; nothing is run."""
    job = cost.Job(replace(PRESETS[model], context=context), batch, precision=precision)
    kinds = {kind: getattr(cost.per_rank(job, stage=0), kind) for kind in "PGSA"}
    caption = f"{model} on one device, {batch} × {context:,} tokens at a time, in {precision}"
    picture = draw.chart({each: {each: n} for each, n in kinds.items()}, "B", caption=caption)
    parameters = draw.term(f"{sum(cost.parameter_sizes(job.config)):,} parameters", "model")
    each = " + ".join(f"{size:g}" for size in cost.PIE[precision].values())
    bytes_each = draw.term(each, "precision")
    tokens = draw.term(f"{batch}", "batch"), " × ", draw.term(f"{context:,} tokens", "context")
    of_a_token = kinds["A"] / batch / context / 2**20
    per_token = draw.term(f"{of_a_token:.1f} MiB", "model", "precision")
    floor = ["P + G + S: ", parameters, " × (", bytes_each, ") bytes"]
    return draw.formula(picture, floor, ["A: ", *tokens, " × ", per_token])


# %%
models = {"llama3-8b": "llama3-8b", **{name: name for name in PRESETS}}
precisions = {"float32": "float32", "mixed precision": "mixed"}
sizes_of = {"batch": [1, 2, 4, 8, 16, 32], "context": [1024, 2048, 4096, 8192]}
play.explore(holds, model=models, **sizes_of, precision=precisions)

# %% [markdown]
# <details><summary>Answer</summary>
#
# For Llama 3 8B with a context of 1,024 tokens: from a batch of 16 on in float32, and from 32 on in mixed precision.
# With a context of 8,192 tokens: from 2 on in float32, and from 4 on in mixed precision.
# </details>
#
# ## Build: mixed precision
#
# Large models are not trained in float32. A number in **bfloat16** takes 2 bytes and has the range of float32, with far
# fewer digits; GPUs multiply such numbers much faster. But bfloat16 has too few digits for the optimizer's small
# changes:

# %%
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(100):
        weight += 0.001
    gap = torch.finfo(dtype).eps
    print(f"{dtype}: a gap of {gap:.2g}; 100 changes of 0.001 to 1 give {weight:.3f}")

# %% [markdown]
# Between 1 and the next larger number of bfloat16 there is a gap, and a change smaller than half of the gap is rounded
# away, all hundred times. So **mixed precision** keeps a float32 **master** copy of each parameter. The optimizer
# changes the master; the model computes with its own copy in bfloat16.
#
# First write AdamW itself by hand, to see which numbers it has to remember:


# %%
def adamw(weight, mean, square, gradient, t, lr, betas, eps, weight_decay):
    """Take step t in place (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2)."""
    mean.lerp_(gradient, 1 - betas[0])
    square.lerp_(gradient**2, 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    weight.mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)


weight, slope = torch.tensor([1.0, -2.0]), torch.tensor([0.3, 5.0])
theirs = torch.nn.Parameter(weight.clone())
theirs.grad = slope
torch.optim.AdamW([theirs], **ADAMW).step()
adamw(weight, torch.zeros(2), torch.zeros(2), slope, 1, **ADAMW)
assert torch.allclose(weight, theirs)


# %% [markdown]
# Before you build it, count again. The model's own copy of a parameter takes 2 bytes now, and so does its gradient. The
# optimizer keeps the master as well as its two running means, all three in float32. How many bytes per parameter do P,
# G and S take together?

# %%
guess_mixed = 16  # your number

# %% [markdown]
# ### Exercise 1: parameters in two bytes, masters in four (20 minutes)
#
# Write two functions. `remember` returns the tensors that the optimizer keeps for a parameter p. `mixed_step` takes one
# step with them: it casts the gradient to float32, `adamw` changes the master, and p gets the master's values, rounded.
# All changes of p happen *in place*: the model knows the tensor p and no other, and another layer may share the memory
# of p, so do not assign `p.data = ...`. You may replace the tensors in `kept`. If backward did not reach a parameter,
# its gradient is None, and nothing changes. Budget: 16 bytes per parameter when the step is over, the gradient
# included.


# %%
def remember(p):
    """Return {"master": ..., "mean": ..., "square": ...} for p, which is bfloat16 or float16.
    All three tensors are float32 and have p's shape."""
    ### BEGIN SOLUTION
    master = p.detach().float()
    mean, square = torch.zeros_like(master), torch.zeros_like(master)
    return {"master": master, "mean": mean, "square": square}
    ### END SOLUTION


@torch.no_grad()
def mixed_step(p, kept, t, **settings):
    """Take step t for p.

    kept: the dictionary that remember(p) returned
    t: the number of the optimizer's step, from 1 on; a step in which p has no gradient counts,
        too
    settings: lr, betas, eps and weight_decay, for adamw; they may change from step to step

    p.grad is None or has p's dtype; do not change it.
    """
    ### BEGIN SOLUTION
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
        p.copy_(kept["master"])
    ### END SOLUTION


answer = check.mixed_precision(remember, mixed_step)
answer

# %% [markdown]
# An optimizer is a loop that calls these two functions. If yours are not right yet, the next cell uses the course's
# own.

# %%
if not answer:
    remember, mixed_step = check.mixed_precision.remember, check.mixed_precision.mixed_step


class MixedAdamW(torch.optim.Optimizer):
    """AdamW for parameters in low precision. It keeps three float32 numbers for each
    parameter."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)
        self.steps, self.state = 0, {p: remember(p) for p in self.param_groups[0]["params"]}

    def step(self):
        self.steps += 1
        for p, kept in self.state.items():
            mixed_step(p, kept, self.steps, **self.defaults)


# %% [markdown]
# The next cell compares your guess with the bytes that a run in mixed precision holds.


# %%
def train_mixed(batches, optimizer=MixedAdamW):
    model = GPT(config).bfloat16()
    return train_with(model, optimizer(model.parameters(), **ADAMW), batches)


def held_by(train):
    recording = run(train, batches[:3], ranks=1, device="cpu", record="memory").recording
    return recording.held(step=2)


def bytes_per_parameter(held):
    return {kind: round(held[kind] / sum(sizes), 2) for kind in "PGSA"}


held_in_mixed = held_by(train_mixed)
mixed = bytes_per_parameter(held_in_mixed)
in_all = sum(mixed[kind] for kind in "PGS")
check.predict("How many in mixed precision?", guess_mixed, in_all, unit="B")


# %%
def pie(rows):
    return draw.table(
        {"bytes per parameter": name, **row, "P + G + S": sum(row[kind] for kind in "PGS")}
        for name, row in rows.items()
    )


full = bytes_per_parameter(held)
rows = {"float32": full, "mixed precision": mixed}
assert {kind: mixed[kind] for kind in "PGS"} == cost.PIE["mixed"]
pie(rows)

# %% [markdown]
# P, G and S take 2 + 2 + 12 = 16 bytes again, so mixed precision does not save any of these bytes. It moves bytes from
# the model to the optimizer, and the notebook on ZeRO will show that optimizer state is the easiest to share. Mixed
# precision does save memory for activations and, on a GPU, time.
#
# ### Exercise 2: the sixteen bytes, as a function (15 minutes)
#
# Now write a function that counts the bytes of any model exactly. Some tensors may be *frozen*: the device holds them
# but does not train them. A number in float32 takes 4 bytes, and a number in bfloat16 takes 2.


# %%
def bytes_by_kind(parameters, mixed):
    """Return {"P": bytes, "G": bytes, "S": bytes} that are held when backward is over.

    parameters: a list of (shape, trained), one for each tensor: ((256, 64), True), or ((64,),
        False) for a frozen tensor, which has no gradient and no optimizer state
    mixed: if False, all tensors are float32, and S is the state of PyTorch's AdamW: two running
        means, and one more float32 per tensor, the count of its steps. If True, P and G are
        bfloat16, and S is the tensors that remember(p) returns
    """
    ### BEGIN SOLUTION
    P = G = S = 0
    for shape, trained in parameters:
        n = math.prod(shape)
        P += n * (2 if mixed else 4)
        if trained:
            G += n * (2 if mixed else 4)
            S += n * 12 if mixed else n * 8 + 4
    return {"P": P, "G": G, "S": S}
    ### END SOLUTION


answer = check.bytes_by_kind(bytes_by_kind)
answer

# %% [markdown]
# Does your function return exactly the bytes that were measured? And how many bytes per parameter remain if only the
# last matrix, the head, is trained?

# %%
if not answer:
    bytes_by_kind = check.bytes_by_kind.expected

tensors = [(p.shape, True) for p in GPT(config).parameters()]
rows = {}
for name, seen, low in (("float32", held, False), ("mixed", held_in_mixed, True)):
    due = bytes_by_kind(tensors, low)
    rows |= {f"{name}: {kind}": (n, seen[kind]) for kind, n in due.items()}
ledger = draw.ledger(rows, within=0)
assert ledger.agrees
head = [(p.shape, name == "head.weight") for name, p in GPT(config).named_parameters()]
in_head = sum(bytes_by_kind(head, True).values())
print(f"the head alone: {in_head / sum(sizes):.2f} bytes per parameter")
ledger

# %% [markdown]
# A frozen parameter costs its own 2 bytes and no more. So a device on which the whole model cannot be trained may still
# have room for fine-tuning a few small matrices, with the model frozen.
#
# Does training in mixed precision still give the same losses?

# %%
[in_mixed] = run(train_mixed, batches, ranks=1, device="cpu")
assert max(abs(one - other) for one, other in zip(reference, in_mixed, strict=True)) < 0.1
curves = {"float32": reference, "mixed precision": in_mixed}
draw.curves(curves, marks={"unigram entropy": entropy})

# %% [markdown]
# The losses are not equal bit for bit, since mixed precision computes with fewer digits; but the curves look the same.
#
# <div style="border-left: 4px solid #D55E00; padding-left: 0.8em">
#
# **What went wrong in the wild.** *Symptom*: somebody trains in bfloat16 and asks the optimizer for masters,
# `master_weights=True`. There is no error, and there are no masters. *Cause*: NVIDIA Apex's `FusedAdam` made them for
# parameters in float16. For parameters in bfloat16 it silently ignored the setting, although bfloat16 has even fewer
# digits ([apex#1728](https://github.com/NVIDIA/apex/issues/1728), September 2023).
#
# </div>
#
# What does a step lose without masters? The next cell takes one step of PyTorch's own AdamW, with a learning rate as
# small as it becomes late in training:


# %% tags=["nbval-ignore-output"]
def unmoved(dtype, lr):
    """Return the share of the parameters that one step leaves unchanged."""
    model = GPT(config).to(dtype)
    model(x, y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    torch.optim.AdamW(model.parameters(), **ADAMW | {"lr": lr}).step()
    pairs = zip(model.parameters(), before, strict=True)
    return sum((p == old).sum().item() for p, old in pairs) / sum(sizes)


alone, full_precision = unmoved(torch.bfloat16, lr=3e-5), unmoved(torch.float32, lr=3e-5)
assert full_precision < 0.01 < 0.3 < alone
told = f"one step leaves {alone:.0%} of the parameters as they were"
print(f"{told}; in float32, {full_precision:.2%}")

# %% [markdown]
# So measure the bytes that an optimizer *holds*, as you did above. With masters, S takes 12 bytes per parameter;
# without masters, it takes at most 8. That a flag is set proves nothing.
#
# ## Why some count 18, or 20
#
# Such an optimizer takes fewer lines if you pass the masters to PyTorch's own AdamW. PyTorch's AdamW needs each
# gradient in the dtype of its parameter, so all gradients are copied to float32 first.


# %%
class CopyingAdamW(torch.optim.AdamW):
    def __init__(self, parameters, **settings):
        self.low = list(parameters)
        super().__init__([p.detach().float() for p in self.low], **settings)

    @torch.no_grad()
    def step(self):
        masters = self.param_groups[0]["params"]
        for p, master in zip(self.low, masters, strict=True):
            master.grad = p.grad.float()
        super().step()
        for p, master in zip(self.low, masters, strict=True):
            p.copy_(master)
            p.grad = None


# %%
def train_copying(batches):
    return train_mixed(batches, CopyingAdamW)


copied_first = bytes_per_parameter(held_by(train_copying))
pie({"gradients copied one at a time": mixed, "all copied first": copied_first})

# %% [markdown]
# This optimizer needs 20 bytes per parameter, 4 more than ours, while it works. Some libraries add up gradients in
# float32 from the start and free the low-precision gradients at once: that makes 2 + 4 + 12 = 18 bytes. None of the
# counts 16, 18 and 20 is wrong. They belong to different programs, and you can now tell which program a paper means.
# The chart shows the counts for the model of our question:


# %%
def gigabytes(parameters):
    pies = cost.PIE.items()
    return {name: {k: b * parameters / 1e9 for k, b in kinds.items()} for name, kinds in pies}


draw.chart(gigabytes(7.5e9), "GB", caption="7.5 billion parameters: P, G and S")

# %% [markdown]
# ## Native
#
# PyTorch's own mixed precision is `torch.autocast`. Autocast does the opposite of ours: the parameters *are* the
# masters, in float32, and inside the context each matrix multiplication casts its inputs to bfloat16.


# %%
def train_autocast(batches):
    def forward(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, y)

    model = GPT(config)
    return train_with(forward, torch.optim.AdamW(model.parameters(), **ADAMW), batches)


autocast = bytes_per_parameter(held_by(train_autocast))
pie({"float32": full, "ours": mixed, "torch.autocast": autocast})

# %% [markdown]
# With autocast, P, G and S take 4 + 4 + 8 = 16 bytes once more. But look at A, which the table also counts in bytes per
# parameter, for a batch of 12 times 64 tokens. Both programs compute the norms and the loss in float32, so A is not
# halved. Autocast also keeps the cast weights until backward is done. And it casts an input again for each matrix that
# multiplies it: three times in attention, for q, k and v, and twice in the MLP. So autocast saves less of A than ours
# does. In return, the parameters and the tensors that pass between layers stay in float32.
#
# ## Why, and why not
#
# **Why** does training need so much memory? Each kind has its purpose. Without G there is no step, without S the steps
# are worse, without A there is no backward, and without masters small changes are lost. One can save some memory at a
# price: use an optimizer with less state, apply each gradient as soon as it is computed, or compute activations twice,
# as a later notebook does.
#
# **Why not** train on one device? A device for training has, say, 80 GB of memory:

# %%
need = 16 * 7.5e9 / 1e9
devices = math.ceil(need / 80)
print(f"7.5 billion parameters: {need:.0f} GB, on devices of 80 GB at least {devices}")
llama = PRESETS["llama3-8b"]
parameters = sum(cost.parameter_sizes(llama))
kept = sum(cost.activations(cost.Job(llama, batch=1)).values()) / 1e9
print(f"llama3-8b: {parameters:,} parameters, {16 * parameters / 1e9:.0f} GB")
tokens = f"one sequence of {llama.context:,} tokens"
print(f"and {kept:.0f} GB of activations for {tokens}, if kept in float32")

# %% [markdown]
# So the model of our question does not fit on such a device, not even with an empty batch, and other devices have to
# hold the rest. *Which device holds which of these sixteen bytes per parameter?* That is the question of this course.
#
# ## Say it back
#
# | P + G + S, bytes per parameter | predicted | ours | PyTorch's own |
# |---|---|---|---|
# | float32 | 16 | – | 16 (`AdamW`) |
# | mixed precision | 16 | 16 | 16 (`autocast`) |
# | mixed precision, all gradients copied first | 20 | – | 20 (`AdamW` on masters) |
#
# <details><summary>Which of P, G, S and A depend on the batch? At which moment of a step does memory peak?</summary>
#
# Only A depends on the batch. In this model memory peaks when forward ends and backward begins, because all activations
# are held at that moment.
# </details>
#
# <details><summary>Mixed precision halves parameters and gradients. Why do P, G and S still add up to 16 bytes per
# parameter?</summary>
#
# The float32 parameter still exists: it has moved into the optimizer state, as the master copy. The sum 4 + 4 + (4 + 4)
# has become 2 + 2 + (4 + 4 + 4).
# </details>
#
# <details><summary>Two programs give gradients that differ by 1e-9. How do you find out whether the difference is
# rounding or a mistake?</summary>
#
# Run both programs in float64. A difference from rounding shrinks by many orders of magnitude, and a difference from a
# mistake stays.
# </details>

# %% [markdown]
# **Read on**: section 3.1 of the ZeRO paper counts the 16 bytes (Rajbhandari et al. 2020, [arXiv
# 1910.02054](https://arxiv.org/abs/1910.02054)). Mixed precision was introduced by Micikevicius et al. 2018, [arXiv
# 1710.03740](https://arxiv.org/abs/1710.03740).
#
# **Next.** One device is too small for these sixteen bytes per parameter, so several have to share them. Before devices
# can share anything, they have to talk: [02 Collectives](02_collectives.ipynb).
#
# To get a clean copy of this notebook, run `git restore notebooks/01_one_device.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
