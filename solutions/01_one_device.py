# %% [markdown]
# # One device
#
# **The question.** A model of 7.5 billion parameters, trained the usual way, cannot take one step on a device of 80 GB,
# however little text it reads. What is all this memory for, and which part of it could be left out?
#
# So the course begins with one device. Here you train the course's small GPT, take one training step apart until every
# byte has a name, and fix the loss curve that every later notebook has to reproduce.
#
# You need: [Start here](00_start_here.ipynb).
# **Minutes**, by estimate: 35 without exercises, 70 with them.
# The machine works for a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

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
from labs.kit.strategies import ADAMW
from labs.model import GPT, PRESETS

# %% [markdown]
# ## Picture
#
# <img src="../images/one_step.svg" alt="What one device holds during one training step. Parameters: always. Optimizer
# state: always, from the first step on. Activations: they grow during forward and shrink during backward. Gradients:
# they grow during backward and stay until zero_grad. Temporary: a little, all along.">
#
# This is a drawing. At the end of this notebook you will have measured every shape in it.
#
# ## What the model reads
#
# The model needs text to learn from, on every machine and without a download. Every Python brings some: the source code
# of its own standard library. It is read as bytes, so a **token** is a byte, and the **vocabulary** has 256 of them.

# %%
text = corpus()
text

# %% [markdown]
# Its size and hash depend on your version of Python. So this course never compares a loss with a stored number, only
# with what one process gets on the same machine.
#
# How well does a model do before it has learned anything? The **loss** is the mean surprise per token, in **nats**: a
# token that was given the probability p costs −ln p. Here are two yardsticks: a blind guess among 256 bytes costs ln
# 256, and knowing how often each byte occurs, and nothing else, costs the **unigram entropy**.

# %%
print(f"blind guess      {math.log(256):.2f} nats")
print(f"unigram entropy  {text.unigram_entropy():.2f} nats")

# %% [markdown]
# ## The model, and one step
#
# The model is a decoder-only transformer as it is built today, in `labs/model.py`; it knows nothing about parallelism.
# The smallest preset is enough for most of the course.

# %%
config = PRESETS["tiny"]
sizes = cost.parameter_sizes(config)
assert sum(sizes) == sum(p.numel() for p in GPT(config).parameters())
print(f"{sum(sizes):,} parameters in {len(sizes)} tensors")
config

# %% [markdown]
# A batch is 12 stretches of 64 bytes; for each byte, the target is the next one. One **step** of training is three
# calls: *forward* finds the loss, *backward* the gradient of the loss with respect to each parameter, and the optimizer
# changes the parameters a little. Afterwards the same batch must surprise the model less.

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
# Thirty of these steps are a training run short enough to repeat all the time. The loop below is all of it.
# `mark(...)` only tells a recording, if there is one, which part of the step begins.


# %%
def train_with(model, optimizer, batches):
    """The loss of each step, in nats. batches: a list of (inputs, targets)."""
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
# It runs as a job of *one* rank, so that later notebooks start from the same call. (`device="cpu"`: the bytes below are
# then the same on every machine.)


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
# The curve begins at a blind guess, and ends below the unigram entropy: by now the model knows more than how often each
# byte occurs. It has begun to use what comes before.
#
# **This curve is the reference.** Training is deterministic here: the same weights at the start (each parameter is
# drawn from the seed and its own name), the same batches, the same arithmetic. So we may ask for equality, bit for bit.

# %%
[again] = run(train, batches, ranks=1, device="cpu")
assert again == reference

# %% [markdown]
# The course's own loop, `labs.kit.strategies.train`, takes a strategy, a function that builds the model, and a list of
# batches for each rank. For "one device" it gives this curve; `make tour` hands it every other strategy.

# %%
from labs.kit import strategies

same = strategies.train, strategies.ONE_DEVICE, lambda: GPT(config), [batches]
[(losses, parameters)] = run(*same, ranks=1, device="cpu")
assert losses == reference

# %% [markdown]
# ## Micro-batches
#
# Sometimes a batch is too large to go through the model at once. Then it is cut into **micro-batches**. The loss is a
# mean over the batch; so the gradient of the whole is the mean of the gradients of its equal parts. This small fact is
# the root of data parallelism: the parts need not be on one device.


# %%
def gradient(model, batches):
    """The gradient of the mean loss over equal batches, as one vector."""
    model.zero_grad()
    for x, y in batches:
        (model(x, y) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def micro(x, y, pieces):
    return list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))


assert [len(inputs) for inputs, _ in micro(x, y, 4)] == [3, 3, 3, 3]

# %% [markdown]
# `backward` *adds* to the gradients that are there; so the parts add up by themselves, and the mean comes from the
# division. It is easily forgotten. By what factor is the gradient then too large, with 4 micro-batches?

# %%
model = GPT(config)
whole = gradient(model, [(x, y)])
forgotten = sum(gradient(model, [part]) for part in micro(x, y, 4))

guess = 4  # your number
factor = round((forgotten.norm() / whole.norm()).item(), 3)
check.predict("By what factor is the gradient too large?", guess, answer=factor)

# %% [markdown]
# Now with the division, is it the same gradient? In mathematics, yes. On a computer each sum is rounded, and the parts
# are summed in another order.

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
# Neither is bitwise equal. But the difference shrinks with the precision of the arithmetic, and that is how to tell
# rounding from a mistake: a mistake stays as it is. Remember it for later, when ranks add up gradients in whatever
# order suits them. Where exactness is the point, the course compares in float64.
#
# ## Predict
#
# What does a step hold? Count bytes per parameter, in float32 (4 bytes per number), with AdamW: the parameter itself,
# its gradient, and what AdamW remembers, a running mean of the gradient and one of its square.

# %%
guess = 16  # your number
recording = run(train, batches[:3], ranks=1, device="cpu", record="memory").recording
held = recording.held(step=2)
answer = round((held["P"] + held["G"] + held["S"]) / sum(sizes))
check.predict("How many bytes per parameter do P, G and S take?", guess, answer, unit="B")

# %% [markdown]
# ## Measure
#
# `record="memory"` sees every tensor's memory come and go, and knows what each was for. This is the third step of the
# run, each phase drawn equally wide, however long it took:

# %%
draw.memory(recording, step=2)

# %% [markdown]
# Compare it with the drawing at the top. *Parameters* and *optimizer state* never change in size (the state is drawn on
# top of the gradients, so these lift it). *Activations* climb in forward, layer by layer, because backward will need
# them; it starts with the last layer and frees each layer's when it is done with it. Meanwhile the *gradients* grow. In
# this model the peak is where backward begins. (With a large model and a small batch it is where all gradients have
# been made.)
#
# Now set the formulas of `labs.cost` beside it. They know the shapes of the model, and what its code keeps at each
# line; they have measured nothing. (`cost.ddp` is named after the strategy of notebook 03; with `"single"` it means one
# device.)

# %%
predicted = cost.ddp(cost.Job(config, BATCH), "single").held
kinds = ("P", "G", "S", "A", "temporary", "peak")
draw.ledger({kind: (getattr(predicted, kind), held[kind]) for kind in kinds})

# %% [markdown]
# P and G are 4 bytes per parameter. S is 8, and 4 more per *tensor*: AdamW counts its steps. (*Temporary* is what lives
# within one operation, such as the roots that AdamW takes.) The three together are 16 bytes per parameter. And A, in
# this small model, is far more than all the others. Each row is the maximum of its kind during the step; the maxima do
# not all come at the same moment, so the peak is less than their sum.
#
# The last ledger is time. Here is the same step, with nothing switched on that could slow it down:

# %%
timed = run(train, batches[:8], ranks=1, device="cpu", record="time").recording
draw.timeline(timed, step=3)

# %% [markdown]
# How much arithmetic is that? Take one weight of a matrix. In forward it meets each token once: it is multiplied by a
# number of that token, and the product is added to a sum. That makes 2 operations per weight and token. Backward needs
# two such products: the gradient of the output times the input gives the gradient of the weight, and the gradient of
# the output times the weight gives the gradient of the input. That makes 4, and 6 in all. (The embedding is only looked
# up. Attention multiplies tokens by tokens, too; that is not counted here.) PyTorch counts it, matrix by matrix. Does
# backward take twice the time, too?

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
# Less than twice, as a rule. In a model this small, much of the time goes to other work (norms, softmax, moving numbers
# about), which backward does not do twice. Nothing is sent, and nobody waits. That will change.
#
# ## Activations grow with the batch
#
# P, G and S depend on the model alone. Activations depend on what goes through it. How large do they get with twice the
# batch, or with half the context?


# %%
def activations(batch, context):
    """Bytes of A, as measured in the second of two steps."""
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
# A is proportional to the number of tokens, except for the *rotary* tables: they tell attention where in the text each
# token stands, with one row per position, shared by the whole batch. The rule holds because attention here is *fused*:
# it never stores its table of all tokens by all tokens. Where it is stored, A has a part that grows with the square of
# the context.
#
# The formula goes through the model, operator by operator, and asks what each one's derivative needs: the norms,
# attention, the *rotary* tables, *mlp* (a block's other half), the *head*, which gives the logits, and *tokens*, the
# batch itself:

# %%
kept = cost.activations(cost.Job(config, BATCH))
kept |= {"together": sum(kept.values())}
draw.table([{"kept by": part, "bytes": count} for part, count in kept.items()])

# %% [markdown]
# Now a model that people use, by formula: none of it is run. Move the batch, and watch which part grows; what a control
# changes in the formulas lights up. From what batch size on is A more than the other three together?


# %%
def holds(model, batch, context, precision):
    """P, G, S and A, by formula; nothing is run."""
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
# Llama 3 8B, 1,024 tokens: from 16 on in float32, from 32 on in mixed precision; with 8,192 tokens from 2 and from 4.
# </details>
#
# ## Build: mixed precision
#
# Large models are not trained in float32. **bfloat16** takes 2 bytes and has float32's range, with far fewer digits;
# GPUs multiply it much faster. But it has too few digits for the optimizer's small changes:

# %%
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.ones((), dtype=dtype)
    for _ in range(100):
        weight += 0.001
    gap = torch.finfo(dtype).eps
    print(f"{dtype}: a gap of {gap:.2g}; 100 changes of 0.001 to 1 give {weight:.3f}")

# %% [markdown]
# Between 1 and the next number there is a gap, and a change smaller than half of it is rounded away, all hundred times.
# So **mixed precision** keeps a float32 **master** copy of each parameter. The optimizer changes the master; the model
# computes with its own copy in bfloat16.
#
# First AdamW itself, by hand, to see what it has to remember:


# %%
def adamw(weight, mean, square, gradient, t, lr, betas, eps, weight_decay):
    """Step number t, in place (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2)."""
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
# Write two functions. `remember` says what is kept for a parameter p, and `mixed_step` takes one step with it: the
# gradient becomes float32, `adamw` moves the master, and p becomes the master again, rounded. It all happens *in
# place*: the model knows p and no other tensor, and p keeps its memory, which another layer may share (so no `p.data =
# ...`). What is in `kept` may be replaced. Where backward did not reach a parameter, its gradient is None, and nothing
# changes. Budget: 16 bytes per parameter when the step is over, the gradient included.


# %%
def remember(p):
    """For p, in bfloat16 or float16: {"master": ..., "mean": ..., "square": ...}, in float32
    and of p's shape."""
    ### BEGIN SOLUTION
    master = p.detach().float()
    mean, square = torch.zeros_like(master), torch.zeros_like(master)
    return {"master": master, "mean": mean, "square": square}
    ### END SOLUTION


@torch.no_grad()
def mixed_step(p, kept, t, **settings):
    """Step t of p and of kept, which is what remember(p) returned.

    t: the number of the optimizer's step, from 1 on; a step in which p has no gradient counts,
    too. p.grad: in p's dtype, or None; it stays as it is. settings: lr, betas, eps and
    weight_decay, as adamw has them; they may change from step to step
    """
    ### BEGIN SOLUTION
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
        p.copy_(kept["master"])
    ### END SOLUTION


answer = check.mixed_precision(remember, mixed_step)
answer

# %% [markdown]
# An optimizer is a loop around the two. (Where yours are not right yet, it uses the course's own.)

# %%
if not answer:
    from labs.kit.exercises import mixed_step, remember


class MixedAdamW(torch.optim.Optimizer):
    """AdamW for parameters in low precision. It keeps three float32 numbers for each of
    theirs."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)
        self.steps, self.state = 0, {p: remember(p) for p in self.param_groups[0]["params"]}

    def step(self):
        self.steps += 1
        for p, kept in self.state.items():
            mixed_step(p, kept, self.steps, **self.defaults)


# %% [markdown]
# Here is your guess, beside what a run of it holds.


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
# 2 + 2 + 12: sixteen again. Mixed precision does not lower the floor. It moves bytes from the model to the optimizer,
# where, as you will see in the notebook on ZeRO, they are easiest to share. What it does save is activations and, on a
# GPU, time.
#
# ### Exercise 2: the sixteen bytes, as a function (15 minutes)
#
# Now put it on paper, to the byte, for any model. Some tensors may be *frozen*: they are held, but not trained. A
# number in float32 takes 4 bytes, one in bfloat16 takes 2.


# %%
def bytes_by_kind(parameters, mixed):
    """{"P": bytes, "G": bytes, "S": bytes} when backward is over: parameters, gradients, what
    the optimizer remembers.

    parameters: a list of (shape, trained), one for each tensor: ((256, 64), True), or ((64,),
        False) for a frozen one, which has no gradient, and for which nothing is remembered
    mixed: False: all is float32, and S is that of PyTorch's AdamW: its two running means, and
        one more float32 per tensor, the count of its steps.  True: P and G are bfloat16, and S
        is what remember(p) returns
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
# Does it say what was measured, to the byte? And what is left to hold if only the last matrix, the head, is trained?

# %%
if not answer:
    from labs.kit.exercises import bytes_by_kind

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
# A frozen parameter costs its own 2 bytes and no more. That is why fine-tuning a few small matrices, with the model
# frozen, fits where training the whole model does not.
#
# Is it still the same training, in mixed precision?

# %%
[in_mixed] = run(train_mixed, batches, ranks=1, device="cpu")
assert max(abs(one - other) for one, other in zip(reference, in_mixed, strict=True)) < 0.1
curves = {"float32": reference, "mixed precision": in_mixed}
draw.curves(curves, marks={"unigram entropy": entropy})

# %% [markdown]
# Not bit for bit, since it computes with fewer digits; but the curve is the same.
#
# <div style="border-left: 4px solid #D55E00; padding-left: 0.8em">
#
# **What went wrong in the wild.** *Symptom*: somebody trains in bfloat16 and asks the optimizer for masters,
# `master_weights=True`. There is no error, and there are no masters. *Cause*: NVIDIA Apex's `FusedAdam` made them for
# parameters in float16, and for those in bfloat16 it silently ignored the setting, though bfloat16 has fewer digits
# still ([apex#1728](https://github.com/NVIDIA/apex/issues/1728), September 2023).
#
# </div>
#
# What does a step lose without them? Here is one step of PyTorch's own AdamW, with a learning rate as small as it
# becomes late in training:


# %% tags=["nbval-ignore-output"]
def unmoved(dtype, lr):
    """The share of the parameters that one step leaves as they were."""
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
# So look at what an optimizer *holds*, as you did above. With masters, S is 12 bytes per parameter; without, 8 at most.
# A flag is no evidence.
#
# ## Why some count 18, or 20
#
# There is a quicker way to write it: give the masters to PyTorch's own AdamW. It wants each gradient in the type of its
# parameter, so all of them are copied to float32 first.


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
# Twenty: 4 bytes per parameter more, for as long as the optimizer works. Some libraries add up their gradients in
# float32 from the start and drop the low-precision ones at once: that makes 2 + 4 + 12 = 18. None of these counts is
# wrong. They are different programs, and you can now tell which one a paper means. For the model of our question:


# %%
def gigabytes(parameters):
    pies = cost.PIE.items()
    return {name: {k: b * parameters / 1e9 for k, b in kinds.items()} for name, kinds in pies}


draw.chart(gigabytes(7.5e9), "GB", caption="7.5 billion parameters: P, G and S")

# %% [markdown]
# ## Native
#
# PyTorch's own mixed precision is `torch.autocast`. It goes the other way round: the parameters *are* the masters, in
# float32, and inside the context each matrix multiplication casts what it needs.


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
# Sixteen once more: 4 + 4 + 8. But look at A, counted like the rest in bytes per parameter, for a batch of 12 times 64
# tokens. Both keep the norms and the loss in float32, so A is not halved. Autocast also keeps the cast weights until
# backward is done, and casts one input anew for each matrix that multiplies it: three times in attention (its q, k and
# v), twice in the MLP. So it saves less; in return, the parameters, and what flows between layers, stay float32.
#
# ## Why, and why not
#
# **Why** so much? Because each kind answers a need. Without G there is no step, without S the steps are worse, without
# A there is no backward, and without masters small changes are lost. One can trade: an optimizer with less memory,
# gradients applied as they come, activations computed twice (a later notebook). None of these is free.
#
# **Why not** one device? A device for training has, say, 80 GB:

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
# So on such devices the model of our question does not fit, not even with an empty batch. Somebody has to hold the
# rest. *Where do they all live, these sixteen bytes per parameter?* That is the question of this course. Before devices
# can share anything, though, they have to talk: that is the next notebook.
#
# ## Say it back
#
# | P + G + S, bytes per parameter | predicted | ours | PyTorch's own |
# |---|---|---|---|
# | float32 | 16 | – | 16 (`AdamW`) |
# | mixed precision | 16 | 16 | 16 (`autocast`) |
# | mixed precision, all gradients copied first | 20 | – | 20 (`AdamW` on masters) |
#
# <details><summary>Which of P, G, S and A depend on the batch? At which moment of a step is most memory in
# use?</summary>
#
# Only A. In this model the peak is where forward ends and backward begins: all activations are there.
# </details>
#
# <details><summary>Mixed precision halves parameters and gradients. Why does the sum stay at 16?</summary>
#
# The float32 parameter is still there: it has moved into the optimizer state, as the master copy. 4 + 4 + (4 + 4) has
# become 2 + 2 + (4 + 4 + 4).
# </details>
#
# <details><summary>Two programs give gradients that differ by 1e-9. How do you find out whether that is rounding or a
# mistake?</summary>
#
# Run both in float64. Rounding shrinks by many orders of magnitude, a mistake stays.
# </details>

# %% [markdown]
# **Read on**: the 16 bytes are counted in section 3.1 of the ZeRO paper, Rajbhandari et al. 2020,
# [arXiv 1910.02054](https://arxiv.org/abs/1910.02054); mixed precision is Micikevicius et al. 2018,
# [arXiv 1710.03740](https://arxiv.org/abs/1710.03740).
#
# **Next.** One device is too small for these sixteen bytes per parameter, so several have to share them. Before devices
# can share anything, they have to talk: [02 Collectives](02_collectives.ipynb).
#
# **A clean copy**: `git restore notebooks/01_one_device.ipynb`, then *File > Reload Notebook from Disk*.
