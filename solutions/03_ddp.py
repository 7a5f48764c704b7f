# %% [markdown]
# # DDP: copies that agree
#
# *Four ranks train copies of one model, each on its own quarter of the batch. What must the ranks send each other so
# that they still train one model, and how many bytes is that?*
#
# You need: [One device](01_one_device.ipynb) for the reference curve, and [Collectives](02_collectives.ipynb) for the
# all-reduce.
# **Minutes**, by estimate: 50 without exercises, 85 with them, 25 more for optional parts, 35 more for the challenge.
# Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("03")

# %% [markdown]
# ## Question
#
# One device needs a certain time for a batch of 12 sequences. Four devices could read 3 sequences each, at the same
# time. But then each device computes a different gradient and takes a different step. After a while there are four
# different models, each trained on a quarter of the text.
#
# We want *one* model: the model that notebook 01 trained, with the same loss in every step. The loss curve of notebook
# 01 is our reference.

# %%
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from labs import collectives, cost, ddp, native
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.train import ADAMW, strategies
from labs.model import GPT, PRESETS

# %% [markdown]
# We use the same model, batches and optimizer as in notebook 01, and the first half of its thirty steps.

# %%
CONFIG, BATCH, STEPS = PRESETS["tiny"], 12, 15
small = partial(GPT, CONFIG)
text = corpus()
loader = Batches(text.tokens, BATCH, CONFIG.context)
batches = [loader[step] for step in range(STEPS)]

# %% [markdown]
# Below is the loop of notebook 01, for any number of ranks. Rank r takes the r-th part of each batch. The loop leaves
# two things open: `wrap`, which may put a wrapper around the model, and `finish`, which runs between backward and the
# optimizer. The whole notebook is about these two functions.


# %%
def step(module, optimizer, x, y, finish):
    """Take one step of this rank, on its own part of the batch; return its loss in nats."""
    mark("forward")
    loss = module(x, y)
    mark("backward")
    loss.backward()
    mark("sync")
    finish(module)
    mark("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %%
def itself(model):
    return model


def nothing(module):
    pass


def train(wrap=itself, finish=nothing, steps=STEPS, build=small, optimizer=AdamW, **settings):
    """Return this rank's losses, in nats, and its parameters after the last step."""
    model = build()
    module, optimizer = wrap(model), optimizer(model.parameters(), **settings or ADAMW)
    losses = []
    for batch in batches[:steps]:
        mark("step")
        x, y = (each.chunk(dist.get_world_size())[dist.get_rank()].clone() for each in batch)
        losses.append(step(module, optimizer, x, y, finish))
    mark("end")
    return losses, [p.detach() for p in model.parameters()]


# %% [markdown]
# With one rank, and with a `wrap` and a `finish` that do nothing, the loop is that of notebook 01, and gives the same
# curve to the last bit. The argument `tell=` is the label that a job prints while it runs. All jobs in this notebook
# run on CPUs, so that every reader gets the same bytes.

# %%
job = partial(run, train, device="cpu")

[(reference, alone)] = job(ranks=1, tell="our loop")
courses = partial(run, strategies.train, strategies.ONE_DEVICE, ranks=1, tell="the course's")
one_device = courses(small, [batches])
assert reference == one_device[0][0] and len(reference) == STEPS
print(f"{sum(p.numel() for p in alone):,} parameters")

# %% [markdown]
# The next cell trains on four ranks that send each other nothing.


# %%
def apart(results):
    """Return the largest difference between a parameter of rank 0 and the same parameter of
    another rank."""
    (_, first), *others = results
    pairs = [pair for _, other in others for pair in zip(first, other, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


strangers = job(ranks=4)
print("one model on all ranks:", apart(strangers) == 0)

# %% [markdown]
# The four ranks have four different models now.
#
# ## Predict
#
# We want four copies of one model. Each rank will hold a copy, and after each backward the ranks exchange their
# gradients. Predict two numbers before you see how this works.
#
# On one device P, G and S took 16 bytes per parameter (notebook 01). Now there are four devices. How many bytes per
# parameter, of P, G and S together, will *each rank* hold?

# %%
guess_held = 16  # your number

# %% [markdown]
# The model has 205,376 parameters of 4 bytes each, and its gradient is as large. How many bytes must each of the four
# ranks send in a step? Notebook 02 has the formula, and you may type an expression.

# %%
guess_sent = 2 * 3 / 4 * 4 * 205_376  # your number

# %% [markdown]
# Both predictions will be measured below.
#
# ## Picture
#
# In the picture each rank holds a full copy of the model, a **replica**, and reads its own part of the batch. This is
# **data parallelism**. The replicas start equal. Suppose that in each step all replicas use the *same gradient*, namely
# the gradient of the whole batch. Then their optimizers do the same arithmetic, and the replicas stay equal for ever.
#
# ![Four ranks side by side. Each has its own quarter of the batch and its own activations. Parameters, gradients after
# the all-reduce, and optimizer state are the same on all four.](../images/ddp_holds.svg)
#
# PyTorch's name for data parallelism with replicas is DDP, *distributed data parallel*.
#
# ## Build: the mean of the means
#
# The loss is a mean over tokens, so its gradient is a mean over tokens, too. And the mean over 12 sequences is the mean
# of four means over 3 sequences each. This holds only if the parts have *equal* size. The next cell compares in
# float64, so that rounding errors are small.


# %%
def gradient(x, y, **settings):
    """Return the gradient of the mean loss, as one vector."""
    model = GPT(CONFIG).double()
    model(x, y, **settings).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_over(sizes):
    """Return the mean of the gradients of parts of these sizes, in sequences."""
    x, y = batches[0]
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    return torch.stack([gradient(*part) for part in parts]).mean(0)


whole = mean_over([12])
assert (whole - mean_over([3, 3, 3, 3])).abs().max() < 1e-12
assert (whole - mean_over([6, 2, 2, 2])).abs().max() > 1e-4

# %% [markdown]
# So the ranks need only the mean of their gradients. There is one catch. A target of -100 is *ignored*, which means
# that it counts in no loss. Such targets stand behind the end of a shorter sequence, or in a question when only the
# answer is to be learned. Suppose that in each of rank 0's three sequences only one target counts, and that on the
# other ranks all targets count. Is the mean of the ranks' means still the mean over all targets?

# %%
x, y = batches[0][0], batches[0][1].clone()
y[:3, 1:] = -100
parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
n = (y != -100).sum() / len(parts)  # targets that count in the batch, per part
due = gradient(x, y)
for name, settings in {"mean of means": {}, "over=n": {"over": n}}.items():
    found = torch.stack([gradient(*part, **settings) for part in parts]).mean(0)
    off = (found - due).norm() / due.norm()
    print(f"{name:13}: off by more than a third of the gradient: {bool(off > 1 / 3)}")

# %% [markdown]
# In the mean of means, each of rank 0's three targets has as much weight as 64 targets of another rank. torchtitan
# divided each rank's loss by that rank's own number of targets
# ([#1842](https://github.com/pytorch/torchtitan/issues/1842), fixed in
# [#2206](https://github.com/pytorch/torchtitan/pull/2206)). The course has one rule: add up losses, not means, and
# divide by the targets that count in the *whole batch*, over all ranks and micro-batches. `model(x, y, over=n)` does
# so, with n as above, and the course's wrappers refuse a batch with a target of -100 if `over` is missing.
#
# ### Exercise 1: average the gradients (10 minutes)
#
# `dist.all_reduce(tensor)` replaces a tensor, in place, by the sum over all ranks. Some parameters have no gradient:
# they are frozen, or were not used in this step. Replace every gradient that exists by its mean over the ranks. *In
# place* means that you write the mean into the tensor behind `p.grad`, since other code may hold a reference to this
# tensor. Budget: the bytes of one all-reduce for each gradient, with the work shared equally among the ranks.


# %%
def average_gradients(model):
    """Replace every `p.grad` by its mean over all ranks, in place. All ranks call this between
    backward and the optimizer.

    model: any nn.Module, in training or evaluation mode. Where `p.grad` is None, it is None on
        all ranks, and stays None.
    """
    ### BEGIN SOLUTION
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    ### END SOLUTION


answer = check.average_gradients(average_gradients)
answer

# %% [markdown]
# Now train with your function if it is right, and otherwise with the course's. The course's wrappers of the model have
# a method `sync`, which does the work of `finish`. The loss of the whole batch is the mean of the ranks' losses.


# %%
def sync(module):
    module.sync()


def curve(results):
    """Return the loss of the whole batch in each step: the mean over the ranks."""
    by_step = zip(*(losses for losses, _ in results), strict=True)
    return [statistics.mean(step) for step in by_step]


averaged = {"finish": average_gradients} if answer.ok else {"wrap": ddp.Naive, "finish": sync}
four = job(ranks=4, tell="averaged", **averaged)
assert apart(four) == 0
assert max(abs(a - b) for a, b in zip(curve(four), reference, strict=True)) < 1e-3
lines = {"one device": reference, "four ranks, averaged": curve(four)}
draw.curves(lines | {"four ranks, by themselves": curve(strangers)})

# %% [markdown]
# The dashed line lies in the grey band: averaging the gradients gives the same training as one device. And the replicas
# are equal to the last bit, since each sum was computed once and then copied to all ranks.
#
# Look at the third line again. The four models that never exchange gradients have learned, too, though each from only a
# quarter of the text. **A falling loss proves nothing.** With most mistakes in data parallelism, nothing crashes and
# the curve is only a bit worse. The next two sections show two such mistakes.

# %% [markdown]
# ### Wrong: the sum
#
# Suppose somebody forgets to divide by the number of ranks. With plain gradient descent (SGD), a step is the learning
# rate times the gradient. So on four ranks, training with the sum is training with the mean and four times the learning
# rate. The two agree bit for bit, since a multiplication by 4 rounds nothing.


# %%
def summed(module):
    """Average the gradients, and then undo the division by the number of ranks."""
    module.sync()
    for p in module.parameters():
        p.grad *= dist.get_world_size()


sgd = partial(job, ranks=4, steps=10, tell="SGD", wrap=ddp.Bucketed, optimizer=SGD)
mean, total = sgd(finish=sync, lr=0.05), sgd(finish=summed, lr=0.05)
faster = sgd(finish=sync, lr=0.2)
assert all(torch.equal(a, b) for a, b in zip(total[0][1], faster[0][1], strict=True))
lines = {"mean, rate 0.2": faster, "sum, rate 0.05": total, "mean, rate 0.05": mean}
draw.curves({name: curve(results) for name, results in lines.items()})

# %% [markdown]
# Training with the sum gives *the loss curve of a larger learning rate*, and this learning rate grows with the number
# of ranks. AdamW hides the mistake: it divides each gradient by a running mean of its size, so a constant factor almost
# cancels.

# %%
hidden = job(ranks=4, wrap=ddp.Bucketed, finish=summed)
largest = max(abs(a - b) for a, b in zip(curve(hidden), reference, strict=True))
print(f"AdamW, summed instead of averaged: at most {largest:.3f} nats from the reference")

# %% [markdown]
# In fifteen steps of AdamW the mistake can hardly be seen. It shows when somebody clips gradients by their norm, or
# changes the optimizer.
#
# ### Wrong: replicas that do not start equal
#
# Equal gradients keep equal replicas equal, but they cannot make unequal replicas equal. Suppose each rank sets the
# random seed to its own number, so that dropout differs between ranks, and then builds its model. The replicas start
# with different weights. The course's wrapper detects this, because it compares the replicas before it does anything
# else.


# %%
def unequal():
    """Return the wrapper's error for replicas from different seeds."""
    try:
        ddp.Naive(GPT(CONFIG, seed=dist.get_rank()))
    except ValueError as error:
        return str(error)


print(run(unequal, ranks=4, device="cpu")[0].replace(", but", ",\nbut"))

# %% [markdown]
# The wrapper compares only once, so it does not see later changes. A common mistake is to load a checkpoint *after*
# wrapping, and on one rank only.


# %%
def loaded_late(model):
    """Wrap the model, and then load other weights on rank 3."""
    module = ddp.Bucketed(model)
    if dist.get_rank() == 3:
        model.load_state_dict(GPT(CONFIG, seed=3).state_dict())
    return module


late = job(ranks=4, wrap=loaded_late, finish=sync)
assert apart(late) > 0.1
draw.curves({"one device": reference, "rank 3 is another model": curve(late)})

# %% [markdown]
# The loss still falls, and no warning appears. Three replicas still agree. But all four ranks use a gradient that comes
# in part from a different model.
#
# ## Build: many micro-batches, one synchronisation
#
# When a rank's part of the batch does not fit, it is cut into micro-batches, as in notebook 01, and their gradients add
# up in `.grad`. The ranks need to exchange gradients only once per step, before the optimizer runs.
#
# From here on, a wrapper does the work of exercise 1: `ddp.Naive(model)` has a method `sync()`, which averages the
# gradients, and a context `no_sync()`, in which nothing is sent.
#
# ### Exercise 2: gradient accumulation (10 minutes)
#
# Budget: the bytes sent for one micro-batch, and the activations of one micro-batch. Two rules matter little for
# `Naive`, and much for other wrappers. First, run forward within `no_sync()`, as well as backward. A model's buffers,
# such as the running statistics of a BatchNorm, are copied from rank 0 to all ranks at the end of `sync()`, so that all
# ranks evaluate the same model. Outside of `no_sync()`, each further forward of the step sends the buffers again, and
# these bytes count. Second, run the last micro-batch outside of `no_sync()`: the wrapper `Overlapped`, which comes
# later, begins to send during backward, and has to know which backward is the last.


# %%
def accumulate(model, micro_batches):
    """Run all backwards of a step, and synchronise once.

    model: a wrapper of labs.ddp; model(x_BT, y_BT) is the mean loss of a micro-batch (0-dim)
    micro_batches: this rank's list of (x_BT, y_BT), all of one size; do not change it

    Afterwards each gradient is that of the mean loss over all micro-batches of all ranks.
    """
    ### BEGIN SOLUTION
    *first, last = micro_batches
    with model.no_sync():
        for x, y in first:
            (model(x, y) / len(micro_batches)).backward()
    (model(*last) / len(micro_batches)).backward()
    model.sync()
    ### END SOLUTION


check.accumulation(accumulate)

# %% [markdown]
# ## Build: fewer messages
#
# How many all-reduces does one step of `Naive` make? It makes one for each tensor:

# %%
sizes = cost.parameter_sizes(CONFIG)
assert len(sizes) == len(list(GPT(CONFIG).parameters()))
least, most = 4 * min(sizes), 4 * max(sizes)
draw.table([{"tensors": len(sizes), "smallest, bytes": least, "largest, bytes": most}])

# %% [markdown]
# For the small tensors latency dominates, as in notebook 02: an all-reduce of 256 bytes takes 2 (N − 1) rounds, as many
# as one of a megabyte. So gradients are sent in **buckets**. A bucket is one flat tensor into which several gradients
# are copied; it is reduced by one all-reduce, and the results are copied back. Backward works from the last layer to
# the first, so the last layer's gradients are ready first. So we fill the buckets from the last layer on, and close
# each bucket as soon as it holds 128 KiB.
#
# ### Exercise 3 (optional): fill the buckets (10 minutes)
#
# Write a function that works with numbers only, for models with any number of tensors; a model without tensors has no
# buckets. The size of a bucket is a compromise: small buckets cost many messages, and a bucket that holds all gradients
# is full only when backward is over.


# %%
def fill_buckets(nbytes, bucket_bytes):
    """Return which tensors are sent together: a list of buckets, each a list of indices into
    `nbytes`, the last tensor first.

    nbytes: the bytes of each tensor, in the model's order
    bucket_bytes: a bucket is closed as soon as it has this many bytes or more

    fill_buckets([4, 8, 4, 16, 4], 16) is [[4, 3], [2, 1, 0]], two buckets of 20 and 16 bytes.
    """
    ### BEGIN SOLUTION
    buckets, room = [], 0
    for i in reversed(range(len(nbytes))):
        if room <= 0:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(i)
        room -= nbytes[i]
    return buckets
    ### END SOLUTION


check.fill_buckets(fill_buckets)

# %% [markdown]
# The course's own function does the same with the tensors themselves, and also begins a new bucket where the dtype
# changes:

# %%
BUCKET = 128 * 1024
buckets = ddp.in_buckets(GPT(CONFIG).parameters(), BUCKET)
assert sum(len(bucket) for bucket in buckets) == len(sizes)
assert buckets[0][0].shape == (CONFIG.vocab, CONFIG.dim)  # the head
rows = [{"tensors": len(bucket), "bytes": sum(p.nbytes for p in bucket)} for bucket in buckets]
draw.table([{"bucket": number, **row} for number, row in enumerate(rows)])

# %% [markdown]
# ### Optional exercise: buckets (15 minutes)
#
# `sync()` calls `average` once per step. `self.trainable` is a dict of the parameters by name, and each of them has a
# gradient. `self.all_reduce(flat, group=self.group)` adds up a tensor over the ranks, in place, and `self.ranks` is N.
# Use these attributes of the wrapper, because its group need not be all ranks, and its all-reduce need not be
# PyTorch's. `torch.cat` and `split` are helpful. Budget: the same bytes as `Naive`, in one all-reduce for each bucket.


# %%
class InBuckets(ddp.DataParallel):
    """A wrapper that makes one all-reduce for each bucket, after backward."""

    def average(self):
        """Replace every gradient by its mean over the ranks, in place."""
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            ### BEGIN SOLUTION
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(mean.view_as(p))
            ### END SOLUTION


check.buckets(InBuckets)

# %% [markdown]
# ## Build: send while backward still works
#
# Backward goes from the last layer to the first. When backward reaches the first layer, the gradient of the last layer
# has long been ready, and its all-reduce could already be in flight. To communicate while computing is called
# **overlap**. The picture is a sketch, not a measurement:
#
# ![Three time lines. Naive: after backward, one all-reduce for each gradient, one after the other. Bucketed: the same
# bytes in two all-reduces. Overlapped: the first bucket is in flight while backward computes the
# second.](../images/overlap.svg)
#
# A **hook** is a function of ours that autograd calls as soon as a gradient is ready. There are two kinds of hooks, and
# each can be used wrongly. Take two ranks, two micro-batches and one weight, with gradients that are easy to follow: 1
# and then 2 on rank 0, and 3 and then 4 on rank 1. The ranks should synchronise only in the last backward. The right
# result is (1 + 2 + 3 + 4) / 2 = 5.


# %%
def average(x):
    dist.all_reduce(x)
    x /= dist.get_world_size()


def two_micro_batches(hook_up):
    """Return `.grad` on this rank after two backwards. The hook is added before the last."""
    weight = nn.Parameter(torch.zeros(()))
    first, last = ((1.0, 2.0), (3.0, 4.0))[dist.get_rank()]
    (weight * first).backward()
    hook_up(weight)
    (weight * last).backward()
    return weight.grad.item()


# %%
def what_arrives(p):
    p.register_hook(average)


def the_parameter(p):
    p.register_post_accumulate_grad_hook(average)


def what_has_added_up(p):
    p.register_post_accumulate_grad_hook(lambda p: average(p.grad))


hooks = (what_arrives, the_parameter, what_has_added_up)
found = {hook.__name__: run(two_micro_batches, hook, ranks=2, device="cpu") for hook in hooks}
assert found["what_has_added_up"] == [5, 5]
named = {name.replace("_", " "): by_rank for name, by_rank in found.items()}
draw.table([{"average": name, "rank 0": a, "rank 1": b} for name, (a, b) in named.items()])

# %% [markdown]
# A hook from `register_hook` gets the gradient of *this* backward. So the gradient of the first micro-batch is never
# averaged, and each rank keeps its own. A post-accumulate hook gets the *parameter*. Averaging the parameter changes
# nothing, since all replicas are equal, and the gradients are not averaged. The third hook averages `p.grad` and is
# right. Without gradient accumulation the first hook would be right, too.
#
# > **What went wrong in the wild.** *Symptom*: a large model trains for thousands of steps, nothing crashes, and the
# > loss does not move. The team's optimizer read each gradient in a post-accumulate hook, `def hook(g)`, but `g` was
# > the parameter. The team searched for days ([pytorch#187268](https://github.com/pytorch/pytorch/issues/187268), June
# > 2026). A teaching library averages parameters instead of gradients in the same way, and a reader asks whether this
# > is intended ([picotron#39](https://github.com/huggingface/picotron/issues/39), May 2026).
#
# ### Exercise 4: overlap (15 minutes)
#
# Now you write the core of DDP: when a gradient is ready, and which all-reduces may begin. `ddp.Overlapped` provides
# the rest:
#
# | | |
# |---|---|
# | `gradient_ready(p)` | a post-accumulate hook calls it for each parameter in each backward |
# | `self.bucket_of[p]` | the bucket of `p`; `self.buckets` is the list of all buckets, the last layer's first |
# | `bucket.collect(p)` | copies `p.grad` into the bucket, and makes `p.grad` a view of it |
# | `bucket.waiting_for` | its parameters that are not ready yet: remove `p`; refilled after each step |
# | `bucket.flat` | the bucket's gradients, side by side in one tensor |
# | `self.syncing` | False within `no_sync()`: then collect, but send nothing |
# | `self.all_reduce(x, group=self.group, async_op=True)` | begins an all-reduce; returns a *work* to wait on |
# | `self.works` | append each work to this list; `sync()` waits for them in this order, and divides |
#
# One rule is easy to miss. On another rank gradients may become ready in a different order. If each rank began the
# all-reduce of any bucket that is full, two ranks could add up different buckets. This would break the rule of notebook
# 02, that all ranks call the same collectives in the same order. So begin the buckets *strictly in order*. Budget: as
# many all-reduces as buckets, each begun as soon as this rule allows, and no rank waits in backward. A second backward
# outside of `no_sync()`, before `sync()`, is the caller's mistake: the course's own class raises an error for it, and
# yours need not.


# %%
class Overlap(ddp.Overlapped):
    """A wrapper that begins each bucket's all-reduce during backward."""

    def gradient_ready(self, p):
        """Collect `p.grad`, which is complete now, and begin the buckets that may begin."""
        ### BEGIN SOLUTION
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()
        ### END SOLUTION

    def start_full_buckets(self):
        """Begin the all-reduces of full buckets that have not begun, in order, up to the first
        bucket that is not full."""
        ### BEGIN SOLUTION
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))
        ### END SOLUTION


answer = check.overlap(Overlap)
answer

# %% [markdown]
# The notebook goes on with your class if it is right, and otherwise with the course's. You have now seen every idea in
# [labs/ddp.py](../labs/ddp.py). The next cell prints the outline at the head of that file.

# %%
Overlapped = Overlap if answer.ok else ddp.Overlapped
print(ddp.__doc__.split("Each sends")[0].strip())

# %% [markdown]
# ## Measure: numbers
#
# Do all three ways give the same training as one process? We compare with one process that computes the ranks' parts of
# the batch one after the other, so that it rounds in the same places. Two numbers can be added in only one order, so on
# two ranks we require **the same bits**, in float32. From three ranks on, the order of the additions matters, so there
# we require agreement to 1e-12, in float64.

# %%
WAYS = {
    "naive": {"wrap": ddp.Naive, "finish": sync},
    "bucketed": {"wrap": partial(ddp.Bucketed, bucket_bytes=BUCKET), "finish": sync},
    "overlapped": {"wrap": partial(Overlapped, bucket_bytes=BUCKET), "finish": sync},
}


def float32():
    return GPT(CONFIG)


def float64():
    return GPT(CONFIG).double()


# %%
def part_by_part(parts):
    """Return a `wrap` for one process, which computes the ranks' parts of the batch one after
    the other."""

    def wrap(model):
        def mean_loss(x, y):
            pieces = zip(x.chunk(parts), y.chunk(parts), strict=True)
            return sum(model(*piece) for piece in pieces) / parts

        return mean_loss

    return wrap


expected = {
    2: job(ranks=1, steps=3, wrap=part_by_part(2), build=float32)[0][1],
    4: job(ranks=1, steps=3, wrap=part_by_part(4), build=float64)[0][1],
}


# %%
def each_off(ways, build):
    """Return, for each way, the largest difference between a parameter of this rank and the
    expected one, after three steps."""
    expect, found = expected[dist.get_world_size()], {}
    for name, way in ways.items():
        _, parameters = train(steps=3, build=build, **way)
        pairs = zip(parameters, expect, strict=True)
        found[name] = max((a - b).abs().max().item() for a, b in pairs)
    return found


# %%
def verdicts(ways):
    """Test on every rank whether three steps end with one process's parameters."""
    two = run(each_off, ways, float32, ranks=2, device="cpu", tell="float32")
    four = run(each_off, ways, float64, ranks=4, device="cpu", tell="float64")
    return {
        name: {
            "2 ranks, float32: same bits": all(off[name] == 0 for off in two),
            "4 ranks, float64: within 1e-12": all(off[name] < 1e-12 for off in four),
        }
        for name in ways
    }


# %%
own_ring = partial(Overlapped, bucket_bytes=BUCKET, all_reduce=collectives.all_reduce)
same = verdicts(WAYS | {"overlapped, our own ring": {"wrap": own_ring, "finish": sync}})
assert all(all(verdict.values()) for verdict in same.values())
draw.table([{"": name, **verdict} for name, verdict in same.items()])

# %% [markdown]
# All of them are the same training. The last row passes the ring of notebook 02, which is made of `isend` and `irecv`
# alone, as the argument `all_reduce`.
#
# ## Measure: bytes sent
#
# The next cell compares your prediction with the bytes that the recording counted in the third step.

# %%
talk = partial(job, ranks=4, steps=5, record="communication")
recordings = {name: talk(**way).recording for name, way in WAYS.items()}
sent = recordings["naive"].sent(rank=0, step=2)
check.predict("How much does each rank send in a step?", guess_sent, sent, unit="bytes")

# %% [markdown]
# The next cell compares the recordings with the formula in [labs/cost/data_parallel.py](../labs/cost/data_parallel.py).
# The formula knows the shapes of the model and which collectives each way calls; it uses no measurement. A `Job`
# describes the job to predict: a model, the number of sequences on a rank, and the number of ranks.

# %%
on_paper = cost.Job(CONFIG, BATCH // 4, ranks=4)  # rank 0 of it
predicted = {name: cost.ddp(on_paper, name, bucket_bytes=BUCKET) for name in WAYS}
rows = {}
for name, seen in recordings.items():
    rows[f"{name}: sent"] = predicted[name].sent, seen.sent(rank=0, step=2)
    calls = seen.counts(rank=0, step=2)["all_reduce"]
    rows[f"{name}: all-reduces"] = predicted[name].all_reduces, calls, ""
ledger = draw.ledger(rows, within=0)
assert ledger.agrees
ledger

# %% [markdown]
# All three ways send the same bytes, 1.5 times the size of the gradients. `Naive` sends them in 39 all-reduces, and the
# other two in 6.
#
# Remember what "measured" means here. For each *call*, the recording counts the fewest bytes that the call must send:
# these are logical bytes, as in notebook 02. Linux counts the bytes that really travelled:

# %%
from labs.kit.sockets import delivered


def on_the_wire(ways, steps=3):
    """Return the bytes that this rank really sent per step, or None on systems that do not
    count them."""
    carried = {}
    for name, way in ways.items():
        dist.barrier()
        before = delivered()
        train(steps=steps, **way)
        dist.barrier()
        carried[name] = None if before is None else (delivered() - before) / steps
    return carried


# %% tags=["nbval-ignore-output"]
carried = run(on_the_wire, WAYS, ranks=4, device="cpu", tell="3 steps each")[0]
logical = {name: seen.sent(rank=0, step=2) for name, seen in recordings.items()}
rows = []
for name, n in carried.items():
    wire = "not counted here" if n is None else f"{n / logical[name]:.2f} ×"
    row = {"rank 0, per step": name, "logical bytes": logical[name], "on the wire": wire}
    rows.append(row)
draw.table(rows)

# %% [markdown]
# A little more than the logical bytes travels, because each message also has a header. Naive averaging sends the most
# messages, so it sends the most headers.
#
# ## Measure: bytes held
#
# The figure shows one device alone with the whole batch, and then rank 0 of each way, in a steady step, which is any
# step but the first. Each kind is drawn at its own maximum. The mark above a bar is the peak of all kinds together. The
# peak is lower than the sum of the maxima, since these are not reached at the same moment.

# %%
watched = {"one device": job(ranks=1, steps=3, record="memory").recording}
for name, way in WAYS.items():
    watched[name] = job(ranks=4, steps=3, record="memory", tell=name, **way).recording
held = {name: seen.steady(rank=0) for name, seen in watched.items()}
draw.bars(held)

# %%
floor = round(sum(held["naive"][kind] for kind in "PGS") / sum(sizes))
question = "How large are P, G and S on each of four ranks?"
check.predict(question, guess_held, floor, unit="bytes per parameter")

# %% [markdown]
# Only the activations shrink to a quarter, since each rank reads a quarter of the batch; the rotary tables do not
# shrink, since every rank holds them in full. *Every* rank holds as many bytes of P, G and S as one device alone:

# %%
ranks = [watched["naive"].steady(rank) for rank in range(4)]
assert all(rank == ranks[0] for rank in ranks)
kept = {kind: sum(rank[kind] for rank in ranks) / held["one device"][kind] for kind in "PGSA"}
head = "all four ranks hold, × one device"
draw.table([{"kind": kind, head: times} for kind, times in kept.items()])

# %% [markdown]
# The four ranks hold the same parameters four times, the same optimizer state four times and, after the all-reduce, the
# same gradients four times. The next notebook, on ZeRO, removes this waste stage by stage.
#
# The three ways differ in their buffers:

# %%
exact = ("P", "G", "S", "A", "comm")
for name, prediction in predicted.items():
    assert all(getattr(prediction.held, kind) == held[name][kind] for kind in exact)
    assert abs(prediction.held.peak / held[name]["peak"] - 1) < 0.05
rows = [{"": name, **{kind: held[name][kind] for kind in (*exact, "peak")}} for name in WAYS]
draw.table(rows, caption="bytes: the peak as predicted within 5 %, all else exactly")

# %% [markdown]
# `Naive` needs no buffer. `Bucketed` needs one buffer, as large as the largest bucket. It allocates the buffer after
# backward, when the activations have been freed, so its peak is not higher. In `Overlapped` the gradients *live* in the
# buckets: `.grad` is a view of a bucket. So G counts the buckets, and one more gradient that is just being copied in.
# But the buckets stay allocated, even while the activations are at their maximum. So the peak of `Overlapped` is higher
# by one set of gradients: this memory is the price of overlap.

# %% [markdown]
# ## Measure: time
#
# How many all-reduces began before backward was over? The recording measures both on one clock.


# %%
def during_backward(recording, step=2):
    """Return how many of rank 0's all-reduces began before its backward was over."""
    backward = [s for s in recording.spans if s.rank == 0 and s.name == "backward"][step]
    started = [event.start < backward.end for event in recording.select(rank=0, step=step)]
    return f"{sum(started)} of {len(started)}"


began = {name: during_backward(recording) for name, recording in recordings.items()}
assert began == {"naive": "0 of 39", "bucketed": "0 of 6", "overlapped": "6 of 6"}
rows = [{"": name, "all-reduces begun during backward": count} for name, count in began.items()]
draw.table(rows)

# %% [markdown]
# Is overlap faster? The next cell prints the time of a step on this machine, as the median of five steps of the same
# recordings. Recording makes a step less than a tenth slower.


# %%
def milliseconds(recording):
    """Return the median time of a step on rank 0."""
    return 1000 * statistics.median(span.end - span.start for span in recording.step_spans(0))


for name, recording in recordings.items():
    print(f"{name}: {milliseconds(recording):.1f} ms")

# %% [markdown]
# Fewer messages make a step faster. Overlap may or may not help on your machine: read your own numbers. Here four ranks
# share the cores of your machine, and the cores that copy the bytes are the cores that compute. So there are no idle
# cores that overlap could use.
#
# On a cluster each rank has a device that computes and a link that sends. To show the schedule of a cluster on your
# machine, the next cell only pretends to compute: it builds six layers, and the backward of each layer *sleeps* 10 ms,
# as if another device did the work. The gradients, 4 MB per layer, and their all-reduces are real. The figure shows
# both ways on one time axis. For each rank it shows the phases, the messages in flight, and whether the rank computes
# or, hatched, waits. `ar 3` is the third all-reduce, and all-reduces that run at the same time are drawn below each
# other. Drag the slider back to the left, or press play, and watch both jobs from their start: what does each job do
# when the overlapped job sends its first bucket?


# %%
def six_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    for layer in layers:
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.01))
    return nn.Sequential(*layers)


# %%
def pretend(wrap):
    """Run two steps; the first one also connects."""
    module = wrap(six_layers(), bucket_bytes=4 * 1024**2)
    for _ in range(2):
        dist.barrier()
        mark("step")
        mark("forward")
        loss = module(torch.ones(1, 1024, requires_grad=True)).sum()
        mark("backward")
        loss.backward()
        mark("sync")
        module.sync()
    mark("end")


# %%
pretended = partial(run, pretend, ranks=2, device="cpu", record="communication")
bucketed, overlapped = (pretended(way).recording for way in (ddp.Bucketed, Overlapped))
play.replay(bucketed, overlapped, step=1, names=("bucketed", "overlapped"))

# %% [markdown]
# If each rank has a core of its own, five of the six all-reduces run while backward computes other layers, so they cost
# no time; on a busy machine they may end later. The all-reduce of the first layer begins last, when backward is over,
# so nothing hides it. This is a reason to keep buckets small.

# %% [markdown]
# ## Native
#
# PyTorch's `DistributedDataParallel` works like our `Overlapped`, in C++. You wrap the model and call nothing else: at
# its end, backward waits for the all-reduces. The next cell runs the same test of the numbers.

# %%
theirs = {"wrap": native.ddp}
same |= verdicts({"PyTorch's": theirs})
assert all(same["PyTorch's"].values())
draw.table([{"": name, **verdict} for name, verdict in same.items()])

# %% [markdown]
# The next cells compare bytes, with the default settings of both: buckets of 25 MiB. PyTorch closes its first bucket at
# 1 MiB already, so that the first message is sent early. In both, one bucket has room for our whole small model.


# %%
def rows(sent, all_reduces, held):
    """Return what one rank sends and holds, by name."""
    row = {"sent": sent, "all-reduces": all_reduces}
    row |= {kind: held[kind] for kind in ("P", "S", "A", "peak")}
    return row | {"gradients and buckets": held["G"] + held["comm"]}


def measure(way):
    """Measure rank 0 of four: what it sends in the third step, and what it holds in a steady
    one."""
    talk = job(ranks=4, steps=3, record="communication", **way).recording
    held = job(ranks=4, steps=3, record="memory", **way).recording.steady(rank=0)
    return rows(talk.sent(rank=0, step=2), talk.counts(rank=0, step=2)["all_reduce"], held)


# %%
ours, torchs = measure({"wrap": ddp.Overlapped, "finish": sync}), measure(theirs)
paper = cost.ddp(on_paper, "overlapped")
paper = rows(paper.sent, paper.all_reduces, vars(paper.held))
units = dict.fromkeys(paper, "B") | {"all-reduces": ""}
assert all(paper[name] == ours[name] for name in paper if name != "peak")
rows = [(name, paper[name], ours[name], torchs[name], units[name]) for name in paper]
draw.ledger(rows, within=0.05)

# %% [markdown]
# All lines agree, except the last. PyTorch's buckets hold the gradients *a second time*: PyTorch copies each gradient
# into its bucket, and copies the mean back into `.grad`. Here this does not raise the peak, which is reached when
# backward begins and there are no gradients yet. In a model with few activations it would. An option makes `.grad` a
# view of the bucket, as in ours:

# %%
as_view = {"wrap": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)}
viewed = job(ranks=4, steps=3, record="memory", **as_view).recording.steady(rank=0)
kept = {"PyTorch's": torchs["gradients and buckets"]}
kept["PyTorch's, as views"] = viewed["G"] + viewed["comm"]
kept["ours"] = ours["gradients and buckets"]
assert kept["PyTorch's, as views"] == kept["ours"]
draw.table({"": name, "gradients and buckets, bytes": size} for name, size in kept.items())

# %% [markdown]
# The next cell measures the time of a step, first with ours and then with PyTorch's:

# %%
mine, torchs_own = (
    milliseconds(job(ranks=4, steps=10, record="time", **way).recording)
    for way in ({"wrap": ddp.Overlapped, "finish": sync}, theirs)
)
print(f"ours {mine:.1f} ms, or {mine / torchs_own:.2f} × torch's time")

# %% [markdown]
# Two differences appear in no ledger. At the start, PyTorch's DDP *copies* rank 0's parameters to all ranks, whereas
# ours compares the replicas and raises an error if they differ. After the first step, PyTorch's DDP rebuilds its
# buckets in the order in which gradients really became ready. Both need an option for parameters without a gradient:
# PyTorch's `find_unused_parameters=True`, and ours `find_unused=True`.
#
# ### Who reads what
#
# The other half of data parallelism is the data. The course's `Batches` cuts each batch into contiguous parts, and
# together the ranks read the same sequences as one device:

# %%
of_rank = partial(Batches, text.tokens, BATCH, CONFIG.context, ranks=4)
parts = [of_rank(rank=rank)[0][0] for rank in range(4)]
assert torch.equal(torch.cat(parts), batches[0][0])

# %% [markdown]
# PyTorch's `DistributedSampler` gives sample 0 to rank 0, sample 1 to rank 1, and so on, like dealing cards. The next
# cell does so with ten samples and four ranks:

# %%
from torch.utils.data import DistributedSampler


def dealt(**options):
    """Return the samples, out of ten, that each of four ranks reads."""
    sampler = partial(DistributedSampler, range(10), num_replicas=4, **options)
    return {f"rank {rank}": str(list(sampler(rank=rank))) for rank in range(4)}


plain, dropped = dealt(shuffle=False), dealt(shuffle=False, drop_last=True)
draw.table([{"": "as it is", **plain}, {"": "drop_last=True", **dropped}])

# %% [markdown]
# Ten is not divisible by four. By default the sampler repeats samples 0 and 1, so that every rank reads three samples,
# and an evaluation counts these two *twice*. With `drop_last=True`, no rank reads samples 8 and 9. There is another
# trap: the sampler shuffles by its seed and the number of the epoch. You have to call `set_epoch` with that number, or
# every epoch has the order of the first.

# %%
sampler = DistributedSampler(range(10), num_replicas=1, rank=0)
first, second = list(sampler), list(sampler)
assert first == second
sampler.set_epoch(1)
assert list(sampler) != first

# %% [markdown]
# ## Why, and why not
#
# **Why**: DDP is the simplest strategy. It works with any model and any optimizer, and needs one wrapper. All devices
# compute all the time, if backward takes long enough to hide the all-reduce. When does it? The numbers in this section
# come from formulas, and no cell of it runs a job.
#
# Let the model have Ψ parameters, let each device read T tokens per step and do R operations per second, and let the
# link carry W bytes per second. Backward does 4 operations per parameter and token, as notebook 01 counted: 2 for the
# gradient of the weight and 2 for the gradient of the input. So backward takes 4ΨT/R seconds. With gradients of 2
# bytes, each rank sends nearly 2 × 2Ψ bytes in the all-reduce, so the all-reduce takes 4Ψ/W seconds. Backward is the
# longer of the two when **T > R/W**. Ψ cancels, so this holds for any model.

# %%
R = cost.FLOPS  # operations per second of an H100 (Llama 3, arXiv 2407.21783, table 4)
LINKS = {name: link.bandwidth for name, link in cost.LINKS.items()}  # bytes per s, each way
head = "tokens per device and step, at least"
draw.table([{"link": name, head: round(R / W)} for name, W in LINKS.items()])

# %% [markdown]
# The next figure shows a model of a billion parameters on 64 devices. Today NVLink joins only a few devices of a node;
# its bars show the time in an imagined node of 64. Drag the slider: the term that depends on it lights up. In which of
# the two formulas is this term? On each link, from how many tokens on is the bar of the all-reduce shorter than that of
# backward? The all-reduce includes a latency of 5 µs per message.


# %%
def seconds(tokens, bandwidth, ranks=64, parameters=1_000_000_000):
    """Return the seconds of backward and of the all-reduce, in one step."""
    all_reduce = cost.ring_seconds(2 * parameters, ranks, 5e-6, bandwidth)
    return 4 * parameters * tokens / R, all_reduce


def picture(tokens, link):
    backward, all_reduce = seconds(tokens, link)
    bars = {"backward": {"compute": backward}, "all-reduce": {"communication": all_reduce}}
    chart = draw.chart(bars, "s", caption=f"{tokens:,} tokens on each of 64 devices")
    T, W = draw.term(f"{tokens:,} tokens", "tokens"), draw.term(f"{link / 1e9:g} GB/s", "link")
    computes = ["backward: 4 × 10⁹ × ", T, f" / ({R / 1e12:g} × 10¹² operations per second)"]
    sends = ["all-reduce: 2 (64 − 1) × 5 µs + 2 (64 − 1)/64 × 2 GB / ", W]
    return draw.formula(chart, computes, sends)


play.explore(picture, tokens=[2**k for k in range(9, 20)], link=LINKS)

# %% [markdown]
# So DDP stops paying when each device has too few tokens. Let the batch be 4 million tokens, and add devices that are
# joined by InfiniBand. With more devices, each device computes fewer tokens, but sends as many bytes of gradients as
# before. The part of the all-reduce that backward does not hide is time spent waiting.


# %%
def thin(devices):
    """Predict one step of 4 million tokens on this many devices."""
    tokens = 2**22 // devices
    backward, all_reduce = seconds(tokens, LINKS["InfiniBand, 400 Gb/s"], ranks=devices)
    computes, waits = 1.5 * backward, max(0, all_reduce - backward)  # forward takes half of it
    times = {"backward, ms": round(1000 * backward), "all-reduce, ms": round(1000 * all_reduce)}
    share = round(100 * computes / (computes + waits))
    return {"devices": devices, "tokens each": tokens, **times, "computing, %": share}


draw.table(thin(devices) for devices in (16, 64, 256, 1024, 4096))

# %% [markdown]
# One could enlarge the batch in proportion to the number of devices. But this would be *a different training run*, with
# fewer steps for the same text. Up to a point a larger learning rate compensates for the fewer steps, if it is
# proportional to the batch and warmed up slowly (Goyal et al., 2017). Beyond a critical batch size, which grows as the
# loss falls, a larger batch hardly helps (McCandlish et al., 2018).
#
# **Why not**: DDP does not save memory for P, G and S. As you measured, every rank holds all of them, on any number of
# ranks. In mixed precision they take 16 bytes per parameter on every device:

# %%
floor = sum(cost.PIE["mixed"].values())
models = {"1.5 billion": 1.5e9, "7.5 billion": 7.5e9, "70 billion": 70e9}
table = [
    {"parameters": name, **{f"{n} ranks": round(floor * psi / 1e9) for n in (2, 64, 1024)}}
    for name, psi in models.items()
]
draw.table(table, caption="GB on each rank")

# %% [markdown]
# A device of 80 GB holds at most 80 / 16 = 5 billion parameters, without a single activation. All copies are equal, so
# only one is needed. Which copies could be removed, and which bytes would the ranks have to send instead? [04
# ZeRO](04_zero.ipynb) answers these questions.

# %% [markdown]
# ## Outside Jupyter
#
# The script [scripts/ddp.py](../scripts/ddp.py) trains with PyTorch's DDP, without the course's tools for running jobs:
#
# ```python
# import os
#
# import torch
# import torch.distributed as dist
# from torch.nn.parallel import DistributedDataParallel
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# dist.init_process_group()
# rank, ranks = dist.get_rank(), dist.get_world_size()
# device = "cpu"
# if torch.cuda.is_available():
#     device = f"cuda:{os.environ['LOCAL_RANK']}"
#     torch.cuda.set_device(device)
#
# config = PRESETS["tiny"]
# model = DistributedDataParallel(GPT(config).to(device))
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
# batches = Batches(corpus().tokens, 12, config.context, rank=rank, ranks=ranks)
#
# for step in range(15):
#     x, y = (part.to(device) for part in batches[step])
#     loss = model(x, y)
#     loss.backward()
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
#
# `torchrun` starts the script once per rank, and sets environment variables in each process, which `init_process_group`
# reads:
#
# | | |
# |---|---|
# | `RANK`, `WORLD_SIZE` | the number of this rank, and the number of ranks |
# | `LOCAL_RANK` | the number of this rank on its machine, which is also the number of its GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | the address at which rank 0 waits for the other ranks |
#
# The next cells run the script as four processes that know nothing of this notebook, and compare the losses with the
# reference curve.

# %%
import re
import subprocess
import sys

torchrun = [sys.executable, "-m", "torch.distributed.run"]
torchrun += ["--standalone", "--nproc-per-node", "4"]
started = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
job, told = subprocess.Popen([*torchrun, "../scripts/ddp.py"], **started), ""
for line in job.stdout:  # as they come; the first three are shown
    told += line
    print(line if told.count("\n") <= 3 else "", end="", flush=True)
print("...")

# %%
losses = [float(loss) for loss in re.findall(r"loss (\S+)", told)]
assert len(losses) == STEPS
assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 1e-3
draw.curves({"one device": reference, "torchrun, 4 processes": losses})

# %% [markdown]
# In a terminal, in the root of the repository, type `torchrun --nproc-per-node 4 scripts/ddp.py`. On GPUs only the
# device changes: each process takes the GPU with the number `LOCAL_RANK`, and NCCL sends the bytes. On two machines of
# eight GPUs each, type on both machines: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint
# HOST:29500 scripts/ddp.py`, where `HOST` is one of the two machines. The course has run the script on CPUs only.

# %% [markdown]
# ## Say it back
#
# Answer from memory: a model has `tensors` gradients, which fill `buckets` buckets. How many all-reduces does each of
# the three ways start during backward, and how many in `sync()`?


# %%
def started_when(tensors, buckets):
    """Return {"Naive": (by backward, by sync), "Bucketed": (…, …), "Overlapped": (…, …)}, for a
    step with one micro-batch."""
    ### BEGIN SOLUTION
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)}
    ### END SOLUTION


check.started_when(started_when)

# %% [markdown]
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Why do the replicas stay equal, although no rank ever sends a parameter?</summary>
#
# The replicas start equal. All of them use the same gradient, which is the mean over all ranks and has the same bits on
# each rank. And the same optimizer does the same arithmetic with this gradient. So equal replicas stay equal; but
# unequal replicas stay unequal, too.
# </details>
#
# <details><summary>Eight ranks train with 4 micro-batches per step and gradients of 1 GB. How much does each rank send
# in a step, with <code>no_sync</code> and without it?</summary>
#
# With `no_sync` each rank sends 2 × 7/8 × 1 GB = 1.75 GB. Without it each rank sends four times as much, 7 GB, for the
# same result.
# </details>
#
# <details><summary>Why is one bucket for all gradients bad for overlap, and one bucket for each gradient bad for
# latency?</summary>
#
# A bucket for all gradients is full only when the last gradient is ready. Then backward is over, and no computation is
# left that could hide the all-reduce. With one bucket for each gradient, every small tensor costs the latency of a
# whole all-reduce.
# </details>
#
# The table shows the bytes of each rank, for Ψ parameters in float32 with AdamW on N ranks:
#
# | | predicted | ours, `Overlapped` | PyTorch's DDP |
# |---|---|---|---|
# | sent in a step | 2 (N − 1)/N × 4Ψ bytes | the same, exactly | the same, exactly |
# | P, S | 4Ψ, 8Ψ bytes | as predicted | as predicted |
# | gradients, buckets | 4Ψ bytes, and one more gradient | as predicted | 8Ψ bytes, or as predicted with views |
# | numbers | equal to one process's | same bits on 2 ranks | same bits on 2 ranks |

# %% [markdown]
# ## Beat it: the earliest next step (30 minutes)
#
# This challenge is open: there is no single right answer. Backward goes from the last layer to the first, but the next
# forward goes from the first layer to the last, and a layer's forward cannot begin before its gradient has been
# reduced. So the gradient that forward needs first is ready last. You choose which gradients are sent together, and in
# which order. The wire carries one all-reduce at a time, which takes latency + bytes/W. A step lasts from the beginning
# of backward to the end of the next forward.
#
# **The bound.** Let C be the time that all backwards and forwards take together, b and f the times of the last layer's
# backward and forward, M the bytes of all gradients, α the latency and W the bandwidth.
#
# time ≥ max(C, b + α + M/W + f)
#
# No schedule can beat C, since a rank computes one layer at a time. And none can beat the second term: no gradient is
# ready before the last layer's backward is over, and all gradients must have been reduced before the last layer's
# forward begins in the next step.
#
# The score of a model is 100 × bound / time, and your score is the mean over five models. One all-reduce for each
# layer, the last layer first, scores 72.8.
#
# Two ranks really send your buckets. More ranks would not change the score, since the time of an all-reduce is given by
# the formula above.

# %%
models, bound = beat.early_start.cases, beat.early_start.bound
step_seconds = beat.early_start.measured


def in_ms(given):
    """Return the time of one all-reduce for each layer, and the bound."""
    one_each = [[layer] for layer in reversed(range(len(given.nbytes)))]
    seconds = {"one each, ms": step_seconds(one_each, given), "bound": bound(given)}
    return {name: round(1000 * each, 1) for name, each in seconds.items()}


rows = []
for name, given in models.items():
    layers = " ".join(str(n // 1000) for n in given.nbytes)
    rows.append({"": name, "kB, by layer": layers} | in_ms(given))
draw.table(rows)


# %%
def in_which_order(nbytes, backward, forward, latency, bandwidth):
    """Return the buckets in the order in which they are sent, as lists of layers' numbers: [[3,
    2], [0, 1]].

    nbytes, backward, forward: lists with one number per layer, the first layer first: the bytes
        of its gradient, and the seconds of its backward and of its forward
    latency: seconds per all-reduce
    bandwidth: bytes per second

    step_seconds(buckets, (nbytes, backward, …)) returns how long a step takes. You may search
    for up to ten seconds per call. The check also calls this function for a model that is not
    in the table.
    """
    ### BEGIN SOLUTION
    given = nbytes, backward, forward, latency, bandwidth
    sizes = [fill_buckets(nbytes, 1000 * 2**k) for k in range(12)]
    return min(sizes, key=lambda buckets: step_seconds(buckets, given))
    ### END SOLUTION


beat.early_start(in_which_order)

# %% [markdown]
# The course's answer fills buckets as DDP does, and tries a dozen sizes. PyTorch sends its buckets in the order of
# their numbers. ByteScheduler (Peng et al., 2019, SOSP) sends the gradients that the next forward needs first before
# the others, and so can you.
#
# <details><summary>What do the best known orders have in common?</summary>
#
# They send some of the last layers only after the first layers: the gradients of the last layers are ready first, but
# the next forward needs them last.
# </details>
#
# **Read on**: [labs/ddp.py](../labs/ddp.py). Li et al., 2020, *PyTorch Distributed: Experiences on Accelerating Data
# Parallel Training* (VLDB, arXiv 2006.15704); you have now built the algorithm of its section 3.2. Goyal et al., 2017,
# *Accurate, Large Minibatch SGD* (arXiv 1706.02677). McCandlish et al., 2018, *An Empirical Model of Large-Batch
# Training* (arXiv 1812.06162).
#
# **Next.** All copies are equal, so only one is needed, and yet every rank holds all of P, G and S. [04
# ZeRO](04_zero.ipynb) removes the spare copies, one kind after another.
#
# To get a clean copy of this notebook, run `git restore notebooks/03_ddp.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
