# %% [markdown]
# # DDP: copies that agree
#
# *Four ranks train copies of one model, each on its own quarter of the batch. What must travel between them so that
# it is still one training, and what does that cost?*
#
# You need: [One device](01_one_device.ipynb) for the reference curve, and [Collectives](02_collectives.ipynb) for the
# all-reduce.
# **Minutes**, by estimate: 50 without exercises, 85 with them, 25 more for optional parts, 35 more for the challenge.
# The machine works for a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("03")

# %% [markdown]
# ## Question
#
# One device needs a certain time for a batch of 12 sequences. Four devices could read 3 sequences each, at the same
# time. But then each of them finds a different gradient, takes a different step, and after a while there are four
# different models, each trained on a quarter of the text.
#
# We want *one* model: the one that notebook 01 trained, with the same loss in every step. That curve is our reference.

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
# Below is the loop of notebook 01, for any number of ranks. Rank r takes the r-th part of each batch. Two things are
# left open: what is put around the model (`wrap`), and what is done between backward and the optimizer (`finish`). The
# whole notebook is about these two.


# %%
def step(module, optimizer, x, y, finish):
    """One step of this rank, on its own part of the batch; its loss in nats."""
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
    """This rank's losses (nats), and its parameters after the last step."""
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
# A job of one rank, with nothing in either place, is notebook 01: the same curve, to the last bit, as that of the
# course's own loop. (`tell=` is what a job says about itself while it runs.) All jobs here run on CPUs, so that whoever
# reads this gets the same bytes.

# %%
job = partial(run, train, device="cpu")

[(reference, alone)] = job(ranks=1, tell="our loop")
courses = partial(run, strategies.train, strategies.ONE_DEVICE, ranks=1, tell="the course's")
one_device = courses(small, [batches])
assert reference == one_device[0][0] and len(reference) == STEPS
print(f"{sum(p.numel() for p in alone):,} parameters")

# %% [markdown]
# And this is what four ranks do by themselves, with nothing in either place.


# %%
def apart(results):
    """The largest difference between a parameter of rank 0 and the same one of another rank."""
    (_, first), *others = results
    pairs = [pair for _, other in others for pair in zip(first, other, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


strangers = job(ranks=4)
print("one model on all ranks:", apart(strangers) == 0)

# %% [markdown]
# They are four models now.
#
# ## Predict
#
# We want copies of one model. Each rank will hold a copy, and after each backward the gradients travel from each rank
# to all the others. Two questions, before you see how.
#
# On one device P, G and S took 16 bytes per parameter (notebook 01). Now there are four devices. How many bytes per
# parameter, of P, G and S together, will *each rank* hold?

# %%
guess_held = 16  # your number

# %% [markdown]
# The model has 205,376 parameters of 4 bytes each, and its gradient is as large. How many bytes must each of the four
# ranks send in a step? (Notebook 02 has the formula. An expression will do.)

# %%
guess_sent = 2 * 3 / 4 * 4 * 205_376  # your number

# %% [markdown]
# Both will be measured below.
#
# ## Picture
#
# Here is what we want. Each rank holds a full copy of the model, a **replica**, and reads its own part of the
# batch; this is **data parallelism**. The replicas start equal. If in each step all of them use the *same gradient*,
# namely that of the whole batch, then their optimizers do the same arithmetic, and they stay equal for ever.
#
# ![Four ranks side by side. Each has its own quarter of the batch and its own activations. Parameters, gradients after
# the all-reduce, and optimizer state are the same on all four.](../images/ddp_holds.svg)
#
# DDP, *distributed data parallel*, is the name that PyTorch gave it.
#
# ## Build: the mean of the means
#
# The loss is a mean over tokens, so its gradient is one, too; and the mean over 12 sequences is the mean of four means
# over 3. This needs parts of *equal* size. (We compare in float64, so that rounding does not blur the picture.)


# %%
def gradient(x, y, **settings):
    """The gradient of the mean loss, as one vector."""
    model = GPT(CONFIG).double()
    model(x, y, **settings).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_over(sizes):
    """The mean of the gradients of parts of these sizes, in sequences."""
    x, y = batches[0]
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    return torch.stack([gradient(*part) for part in parts]).mean(0)


whole = mean_over([12])
assert (whole - mean_over([3, 3, 3, 3])).abs().max() < 1e-12
assert (whole - mean_over([6, 2, 2, 2])).abs().max() > 1e-4

# %% [markdown]
# So nothing but the mean of the gradients is missing. There is one catch. A target of -100 is *ignored*: it counts in
# no loss, as behind the end of a shorter sequence, or in a question whose answer alone is to be learned. Suppose that
# in each of rank 0's three sequences one target counts, and on the other ranks all of them. Is the mean of the means
# still the mean?

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
# Each of rank 0's three targets weighs as much as 64 of another rank's. torchtitan divided by each rank's own number
# ([#1842](https://github.com/pytorch/torchtitan/issues/1842), mended in
# [#2206](https://github.com/pytorch/torchtitan/pull/2206)). The course has one rule: add up losses, not means, and
# divide by the targets that count in the *whole batch*, over all ranks and micro-batches. `model(x, y, over=n)` does
# so, with n as above, and the course's wrappers refuse a target of -100 without it.
#
# ### Exercise 1: average the gradients (10 minutes)
#
# `dist.all_reduce(tensor)` replaces a tensor, in place, by the sum over all ranks. Some parameters have no gradient:
# they are frozen, or were not used in this step. Every gradient that is there becomes the mean. *In place* means that
# the tensor behind `p.grad` itself gets it, since others may hold it, too. Budget: the bytes of one all-reduce for each
# gradient, and no rank does the others' work.


# %%
def average_gradients(model):
    """Every `p.grad` becomes its mean over all ranks, in place; called on all ranks, between
    backward and optimizer.

    model: any nn.Module, in training or evaluation mode. Where `p.grad` is None, on all ranks
    alike, it stays None.
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
# Now train with it: with yours if it is right, otherwise with the course's. (Course modules keep their `finish` in a
# method, `sync`, of the wrapped model.) The loss of the whole batch is the mean of the ranks' losses.


# %%
def sync(module):
    module.sync()


def curve(results):
    """The loss of the whole batch in each step: the mean over the ranks."""
    by_step = zip(*(losses for losses, _ in results), strict=True)
    return [statistics.mean(step) for step in by_step]


averaged = {"finish": average_gradients} if answer.ok else {"wrap": ddp.Naive, "finish": sync}
four = job(ranks=4, tell="averaged", **averaged)
assert apart(four) == 0
assert max(abs(a - b) for a, b in zip(curve(four), reference, strict=True)) < 1e-3
lines = {"one device": reference, "four ranks, averaged": curve(four)}
draw.curves(lines | {"four ranks, by themselves": curve(strangers)})

# %% [markdown]
# The dashed line lies in the grey band: it is the same training. And the replicas are equal to the last bit, since each
# sum was worked out once, and then copied to all.
#
# The third line deserves a second look. Four models that never talk have learned, too, though each from only a quarter
# of the text. **A loss that falls proves nothing.** Most mistakes with data parallelism look like this: nothing
# crashes, the curve is a bit worse. Here are two.

# %% [markdown]
# ### Wrong: the sum
#
# Suppose the division is forgotten. With plain gradient descent (SGD), a step is the learning rate times the gradient;
# so on four ranks the sum is the mean with four times the learning rate. Not roughly, but bit for bit, since
# multiplying by 4 rounds nothing.


# %%
def summed(module):
    """Synchronised like the others; then the division by the number of ranks is undone."""
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
# It is *the loss curve of another learning rate*, and one that grows with the number of ranks. AdamW hides the mistake:
# it divides each gradient by its own running size, so a constant factor all but cancels.

# %%
hidden = job(ranks=4, wrap=ddp.Bucketed, finish=summed)
largest = max(abs(a - b) for a, b in zip(curve(hidden), reference, strict=True))
print(f"AdamW, summed instead of averaged: at most {largest:.3f} nats from the reference")

# %% [markdown]
# In fifteen steps it can hardly be seen. It comes out on the day when somebody clips gradients by their norm, or
# changes the optimizer.
#
# ### Wrong: replicas that do not start equal
#
# Equal gradients keep equal replicas equal. They cannot make them so. Suppose each rank seeds with its own number, for
# good reasons (dropout should differ), and builds its model afterwards. The course's wrapper compares the replicas
# before it does anything else.


# %%
def unequal():
    """What the wrapper says about replicas from different seeds."""
    try:
        ddp.Naive(GPT(CONFIG, seed=dist.get_rank()))
    except ValueError as error:
        return str(error)


print(run(unequal, ranks=4, device="cpu")[0].replace(", but", ",\nbut"))

# %% [markdown]
# No wrapper sees what happens after that. A classic: a checkpoint is loaded *after* wrapping, and on one rank only.


# %%
def loaded_late(model):
    """Wrapped like the others; then rank 3 takes other weights."""
    module = ddp.Bucketed(model)
    if dist.get_rank() == 3:
        model.load_state_dict(GPT(CONFIG, seed=3).state_dict())
    return module


late = job(ranks=4, wrap=loaded_late, finish=sync)
assert apart(late) > 0.1
draw.curves({"one device": reference, "rank 3 is another model": curve(late)})

# %% [markdown]
# It learns, and nothing warns. Three replicas still agree; all four follow a gradient that is in part another model's.
#
# ## Build: many micro-batches, one synchronisation
#
# When a rank's part of the batch does not fit, it is cut into micro-batches (notebook 01); their gradients add up in
# `.grad`. The other ranks need them only once, when the optimizer steps.
#
# From here on, a wrapper stands for exercise 1: `ddp.Naive(model)` has `sync()`, which averages, and `no_sync()`, a
# context in which nothing is sent.
#
# ### Exercise 2: gradient accumulation (10 minutes)
#
# Budget: as many bytes as with one micro-batch, and the activations of one micro-batch. Two things matter little to
# `Naive`, and much to other wrappers. Forward belongs within `no_sync()` as well as backward: a model's buffers, as
# a BatchNorm's running statistics, become rank 0's at the end of `sync()`, so that all ranks evaluate the same model;
# outside of `no_sync()` they are sent before each further forward of the step, too, and those bytes count. And the last
# backward belongs outside: the wrapper that we are coming to begins to send during backward, and has to know which one
# is the last.


# %%
def accumulate(model, micro_batches):
    """All backwards of a step, and one synchronisation.

    model: a wrapper of labs.ddp; model(x_BT, y_BT) is the mean loss of a micro-batch (0-dim)
    micro_batches: this rank's list of (x_BT, y_BT), all of one size; it stays as it is

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
# How many all-reduces does one step take? One for each tensor:

# %%
sizes = cost.parameter_sizes(CONFIG)
assert len(sizes) == len(list(GPT(CONFIG).parameters()))
least, most = 4 * min(sizes), 4 * max(sizes)
draw.table([{"tensors": len(sizes), "smallest, bytes": least, "largest, bytes": most}])

# %% [markdown]
# The small ones are all latency (notebook 02): 256 bytes cost 2 (N − 1) rounds, just as a megabyte does. So gradients
# travel in **buckets**: copied side by side into one flat tensor, reduced at once, copied back. Here they are filled
# from the last layer on, and each is closed as soon as it holds 128 KiB: backward works from the last layer to the
# first, so the last layer's gradients are ready before all others.
#
# ### Exercise 3 (optional): fill the buckets (10 minutes)
#
# Write a function of numbers alone, for models with any number of tensors; a model without tensors has no buckets.
# Buckets that are too small cost messages, and one that holds everything is full only when backward is over: so it
# matters that a bucket is closed at the right moment.


# %%
def fill_buckets(nbytes, bucket_bytes):
    """Which tensors travel together: a list of buckets, each a list of indices into `nbytes`,
    the last tensor first.

    nbytes: the bytes of each tensor, in the model's order.  A bucket is closed as soon as it
    has bucket_bytes or more: fill_buckets([4, 8, 4, 16, 4], 16) is [[4, 3], [2, 1, 0]], two
    buckets of 20 and 16 bytes.
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
# `average` is called by `sync()`, once per step; `self.trainable` is a dict of the parameters by name, each of them
# with a gradient. `self.all_reduce(flat, group=self.group)` adds up over the ranks, in place; `self.ranks` is N. All
# three are the wrapper's own: its group need not be all ranks, nor its all-reduce torch's. `torch.cat` and `split` are
# your friends. Budget: the same bytes, in one all-reduce for each bucket.


# %%
class InBuckets(ddp.DataParallel):
    """One all-reduce for each bucket, after backward."""

    def average(self):
        """Every gradient becomes its mean over the ranks, in place."""
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
# Backward goes from the last layer to the first. When it reaches the first layer, the gradient of the last one has long
# been ready: it could be on its way. That is **overlap** (schematic, not measured):
#
# ![Three time lines. Naive: after backward, one all-reduce for each gradient, one after the other. Bucketed: the same
# bytes in two all-reduces. Overlapped: the first bucket is on its way while backward computes the
# second.](../images/overlap.svg)
#
# A **hook** is a function of ours that autograd calls as soon as a gradient is there. There are two kinds, and each can
# be used wrongly. Take two ranks, two micro-batches, one weight, and gradients that we can read: 1 then 2 on rank 0,
# and 3 then 4 on rank 1. Only the last backward is to be synchronised. What is right? (1 + 2 + 3 + 4) / 2 = 5.


# %%
def average(x):
    dist.all_reduce(x)
    x /= dist.get_world_size()


def two_micro_batches(hook_up):
    """`.grad` on this rank after two backwards; hooked up before the last."""
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
# A hook from `register_hook` is given the gradient of *this* backward: that of the first micro-batch is never averaged,
# and each rank keeps its own. A post-accumulate hook is given the *parameter*: averaging that does nothing at all, as
# all are equal, and the gradients stay apart. Without accumulation, even the first works. The third is right.
#
# > **What went wrong in the wild.** *Symptom*: a large model trains for thousands of steps, nothing crashes, and the
# > loss does not move. The team's optimizer took each gradient in a post-accumulate hook, `def hook(g)`, and `g` was
# > the parameter. It took them days to find ([pytorch#187268](https://github.com/pytorch/pytorch/issues/187268), June
# > 2026). A teaching library averages parameters in the same way, and a reader asks whether it should
# > ([picotron#39](https://github.com/huggingface/picotron/issues/39), May 2026).
#
# ### Exercise 4: overlap (15 minutes)
#
# Now you write the heart of DDP. `ddp.Overlapped` has everything but its two decisions; here is what it gives you.
#
# | | |
# |---|---|
# | `gradient_ready(p)` | is called by a post-accumulate hook, for each parameter in each backward |
# | `self.bucket_of[p]` | the bucket that `p` belongs to; `self.buckets` is the list of all, the last layer's first |
# | `bucket.collect(p)` | copies `p.grad` into the bucket, and makes `p.grad` a view of it |
# | `bucket.waiting_for` | the set of its parameters that are not ready yet: remove yours; refilled after each step |
# | `bucket.flat` | its gradients, side by side in one tensor |
# | `self.syncing` | False within `no_sync()`: collect, so that gradients are held once, and send nothing |
# | `self.all_reduce(x, group=self.group, async_op=True)` | begins, and returns a *work* to wait on, at once |
# | `self.works` | the works begun in this step. `sync()` waits for them, in the order of the buckets, and divides |
#
# One thing is easy to miss. On another rank gradients may become ready in a different order. If each rank began
# whichever bucket is full, ranks would reduce different buckets with each other, against the rule of notebook 02. So
# buckets begin *strictly in order*. Budget: as many all-reduces as buckets, each begun as soon as it may; and nobody
# waits in backward. (A second backward outside of `no_sync()`, before `sync()`, is the caller's mistake. The course's
# own raises an error there; yours need not.)


# %%
class Overlap(ddp.Overlapped):
    """Each bucket's all-reduce begins during backward."""

    def gradient_ready(self, p):
        """`p.grad` is complete: collect it, and begin what has become full."""
        ### BEGIN SOLUTION
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()
        ### END SOLUTION

    def start_full_buckets(self):
        """Begin the all-reduce of every full bucket that has not begun, in order, up to the
        first that is not full."""
        ### BEGIN SOLUTION
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))
        ### END SOLUTION


answer = check.overlap(Overlap)
answer

# %% [markdown]
# We go on with yours if it is right, otherwise with the course's. You have now seen every idea in
# [labs/ddp.py](../labs/ddp.py); its head is the outline.

# %%
Overlapped = Overlap if answer.ok else ddp.Overlapped
print(ddp.__doc__.split("Each sends")[0].strip())

# %% [markdown]
# ## Measure: numbers
#
# Is it the same training? We compare with one process that takes the ranks' parts one after the other, so that even
# the roundings agree. Two numbers can be added in one way only; so on two ranks we may ask for **the same bits**, in
# float32. From three ranks on, the order matters: there we ask for 1e-12, in float64.

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
    """A `wrap` for one process, which takes the ranks' parts of the batch one after the
    other."""

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
    """By way: the largest difference between a parameter of this rank after three steps, and
    what is expected."""
    expect, found = expected[dist.get_world_size()], {}
    for name, way in ways.items():
        _, parameters = train(steps=3, build=build, **way)
        pairs = zip(parameters, expect, strict=True)
        found[name] = max((a - b).abs().max().item() for a, b in pairs)
    return found


# %%
def verdicts(ways):
    """Whether three steps end where one process ends, on every rank."""
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
# All of them are the same training. (The last row uses the ring of notebook 02, made of `isend` and `irecv` alone; that
# takes one argument.)
#
# ## Measure: bytes sent
#
# Here is your prediction, beside what the recording saw in the third step.

# %%
talk = partial(job, ranks=4, steps=5, record="communication")
recordings = {name: talk(**way).recording for name, way in WAYS.items()}
sent = recordings["naive"].sent(rank=0, step=2)
check.predict("How much does each rank send in a step?", guess_sent, sent, unit="bytes")

# %% [markdown]
# And here is the formula of [labs/cost/data_parallel.py](../labs/cost/data_parallel.py). It knows the shapes of the
# model and which collectives each way calls; it has seen no run. A `Job` is what it is asked about: a model, the
# sequences on a rank, the number of ranks.

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
# The same bytes, 1.5 times the gradients, in 39 all-reduces or in 6.
#
# Mind what "measured" means here. The recording sees each *call*, and counts for it the least that it must send:
# logical bytes, as in notebook 02. What the wire carried is counted by Linux:

# %%
from labs.kit.sockets import delivered


def on_the_wire(ways, steps=3):
    """Bytes that this rank really sent, per step; None on systems that do not count."""
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
# A little more than the logical bytes: each message also says what it is. Naive averaging sends the most messages.
#
# ## Measure: bytes held
#
# The figure shows first one device alone with the whole batch, then rank 0 of each way, in a steady step (any but the
# first). Each kind is shown at its own maximum. The mark above a bar is the peak of all together; it is lower than
# their sum, since the maxima do not come at the same moment.

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
# Only the activations went down to a quarter, as each rank reads a quarter of the batch (except the rotary tables,
# which every rank has in full). P, G and S are what they were on one device, on *every* rank:

# %%
ranks = [watched["naive"].steady(rank) for rank in range(4)]
assert all(rank == ranks[0] for rank in ranks)
kept = {kind: sum(rank[kind] for rank in ranks) / held["one device"][kind] for kind in "PGSA"}
head = "all four ranks hold, × one device"
draw.table([{"kind": kind, head: times} for kind, times in kept.items()])

# %% [markdown]
# Four times the same parameters, four times the same gradients after the all-reduce, four times the same optimizer
# state. This is the waste that the next notebook of the course, on ZeRO, will remove, stage by stage.
#
# The three ways differ in their buffers:

# %%
kinds = ("P", "G", "S", "A", "comm", "peak")
for name, prediction in predicted.items():
    assert all(getattr(prediction.held, kind) == held[name][kind] for kind in kinds)
rows = [{"": name, **{kind: held[name][kind] for kind in kinds}} for name in WAYS]
draw.table(rows, caption="bytes, exactly as predicted")

# %% [markdown]
# `Naive` needs none. `Bucketed` borrows one buffer, as large as the largest bucket, after backward, when the
# activations are gone: its peak is not higher. In `Overlapped` the gradients *live* in the buckets (`.grad` is a view
# of them, and G counts one gradient more, just on its way in). But they stay there, even while the activations are at
# their maximum. So its peak is higher by one set of gradients: overlap is paid for in memory.

# %% [markdown]
# ## Measure: time
#
# How many all-reduces were begun before backward was over? The recording has both on one clock.


# %%
def during_backward(recording, step=2):
    """How many of rank 0's all-reduces began before its backward was over."""
    backward = [s for s in recording.spans if s.rank == 0 and s.name == "backward"][step]
    started = [event.start < backward.end for event in recording.select(rank=0, step=step)]
    return f"{sum(started)} of {len(started)}"


began = {name: during_backward(recording) for name, recording in recordings.items()}
assert began == {"naive": "0 of 39", "bucketed": "0 of 6", "overlapped": "6 of 6"}
rows = [{"": name, "all-reduces begun during backward": count} for name, count in began.items()]
draw.table(rows)

# %% [markdown]
# Is it quicker? Here is the time of a step on this machine, from the same recordings, the median of five. (Recording
# costs less than a tenth of a step.)


# %%
def milliseconds(recording):
    """The median step of rank 0."""
    return 1000 * statistics.median(span.end - span.start for span in recording.step_spans(0))


for name, recording in recordings.items():
    print(f"{name}: {milliseconds(recording):.1f} ms")

# %% [markdown]
# Fewer messages help. Overlap may, or may not; read your own numbers. Here four ranks share the cores of your machine,
# and the cores that carry the bytes are the ones that compute: none is idle that overlap could use.
#
# On a cluster each rank has a device that computes and a link that carries. To see that schedule here, we only pretend
# to compute: six layers whose backward *sleeps* 10 ms each, as if another device did the work. The gradients, 4 MB per
# layer, and their all-reduces are real. The figure shows both ways on one time axis: for each rank its phases, what is
# on its way (`ar 3` is the third all-reduce; several at once lie below each other), and what the rank does, hatched
# where it waits. Drag the slider back to the left, or press play, and watch both jobs from their start: what is each of
# them doing when the overlapped one sends its first bucket?


# %%
def six_layers():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    for layer in layers:
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.01))
    return nn.Sequential(*layers)


# %%
def pretend(wrap):
    """Two steps; the first one also connects."""
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
# Where each rank has a core of its own, five of the six all-reduces are hidden behind the backward of other layers. (On
# a busy machine they may end later.) Only the last one, the first layer's, has nothing left to hide behind. That is why
# buckets must not be too large, either.

# %% [markdown]
# ## Native
#
# PyTorch's `DistributedDataParallel` is the third of our ways, in C++. You wrap the model, and there is nothing more to
# call: backward waits at its end. First, the same test.

# %%
theirs = {"wrap": native.ddp}
same |= verdicts({"PyTorch's": theirs})
assert all(same["PyTorch's"].values())
draw.table([{"": name, **verdict} for name, verdict in same.items()])

# %% [markdown]
# Then come the same ledgers, with both sides as they ship: buckets of 25 MiB (PyTorch's first one is closed at 1 MiB
# already, to get the first message away early). Either way the whole of our small model fits into one.


# %%
def rows(sent, all_reduces, held):
    """What one rank sends and holds, by name."""
    row = {"sent": sent, "all-reduces": all_reduces}
    row |= {kind: held[kind] for kind in ("P", "S", "A", "peak")}
    return row | {"gradients and buckets": held["G"] + held["comm"]}


def measure(way):
    """Rank 0 of four: sent in the third step, held in a steady one."""
    talk = job(ranks=4, steps=3, record="communication", **way).recording
    held = job(ranks=4, steps=3, record="memory", **way).recording.steady(rank=0)
    return rows(talk.sent(rank=0, step=2), talk.counts(rank=0, step=2)["all_reduce"], held)


# %%
ours, torchs = measure({"wrap": ddp.Overlapped, "finish": sync}), measure(theirs)
paper = cost.ddp(on_paper, "overlapped")
paper = rows(paper.sent, paper.all_reduces, vars(paper.held))
units = dict.fromkeys(paper, "B") | {"all-reduces": ""}
rows = [(name, paper[name], ours[name], torchs[name], units[name]) for name in paper]
draw.ledger(rows, within=0)

# %% [markdown]
# The same, except for the last line. PyTorch's buckets hold the gradients *a second time*: each is copied into its
# bucket, and the mean back into `.grad`. Here the peak does not show it, since it comes where backward begins, when
# there are no gradients yet; in a model with few activations it would. One option turns `.grad` into a view, as ours
# is:

# %%
as_view = {"wrap": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)}
viewed = job(ranks=4, steps=3, record="memory", **as_view).recording.steady(rank=0)
kept = {"PyTorch's": torchs["gradients and buckets"]}
kept["PyTorch's, as views"] = viewed["G"] + viewed["comm"]
kept["ours"] = ours["gradients and buckets"]
assert kept["PyTorch's, as views"] == kept["ours"]
draw.table({"": name, "gradients and buckets, bytes": size} for name, size in kept.items())

# %% [markdown]
# And here is the time of a step, both sides in turn:

# %%
mine, torchs_own = (
    milliseconds(job(ranks=4, steps=10, record="time", **way).recording)
    for way in ({"wrap": ddp.Overlapped, "finish": sync}, theirs)
)
print(f"ours {mine:.1f} ms, or {mine / torchs_own:.2f} × torch's time")

# %% [markdown]
# Two differences that no ledger shows. PyTorch's DDP *copies* rank 0's parameters to all at the start, where ours
# compares and complains. It rebuilds its buckets after the first step, in the order in which gradients really came. One
# thing is the same: parameters without a gradient need `find_unused_parameters=True`, as ours need `find_unused=True`.
#
# ### Who reads what
#
# The other half of data parallelism is the data. Ours cuts each batch into contiguous parts; together the ranks read
# what one device would:

# %%
of_rank = partial(Batches, text.tokens, BATCH, CONFIG.context, ranks=4)
parts = [of_rank(rank=rank)[0][0] for rank in range(4)]
assert torch.equal(torch.cat(parts), batches[0][0])

# %% [markdown]
# PyTorch's `DistributedSampler` deals the samples out one by one, like cards. Here are ten, for four ranks:

# %%
from torch.utils.data import DistributedSampler


def dealt(**options):
    """The samples that each of four ranks reads, of ten."""
    sampler = partial(DistributedSampler, range(10), num_replicas=4, **options)
    return {f"rank {rank}": str(list(sampler(rank=rank))) for rank in range(4)}


plain, dropped = dealt(shuffle=False), dealt(shuffle=False, drop_last=True)
draw.table([{"": "as it is", **plain}, {"": "drop_last=True", **dropped}])

# %% [markdown]
# Ten is not divisible by four. As it is, samples 0 and 1 are read *twice*, to even out the tail: an evaluation counts
# them twice. With `drop_last=True`, samples 8 and 9 are not read at all. One more: it shuffles by its seed and the
# number of the epoch, and you have to tell it that number, or every epoch has the order of the first.

# %%
sampler = DistributedSampler(range(10), num_replicas=1, rank=0)
first, second = list(sampler), list(sampler)
assert first == second
sampler.set_epoch(1)
assert list(sampler) != first

# %% [markdown]
# ## Why, and why not
#
# **Why**: it is the simplest strategy there is. Any model, any optimizer, one wrapper; and all devices compute all the
# time, if the all-reduce hides behind backward. When does it? This section is pencil and paper: its numbers come from
# formulas, and no cell of it runs a job.
#
# Backward does 4 operations per parameter and token: 2 for the gradient of the weight and 2 for that of its input
# (notebook 01 counted them). So it takes 4ΨT/R seconds, for Ψ parameters, T tokens on each device, and a rate of R
# operations per second. The all-reduce moves nearly 2 × 2Ψ bytes, for gradients of 2 bytes; so it takes 4Ψ/W seconds,
# at W bytes per second. Ψ cancels: the all-reduce is hidden when **T > R/W**, whatever the model.

# %%
R = cost.FLOPS  # operations per second of an H100 (Llama 3, arXiv 2407.21783, table 4)
LINKS = {name: link.bandwidth for name, link in cost.LINKS.items()}  # bytes per s, each way
head = "tokens per device and step, at least"
draw.table([{"link": name, head: round(R / W)} for name, W in LINKS.items()])

# %% [markdown]
# Drag the slider: a model of a billion parameters, on 64 devices. (NVLink joins at most a few of them; its bars show
# what a node of 64 would take.) The term that it moves lights up; in which of the two formulas is it? On each link,
# from how many tokens on is the all-reduce the shorter bar? (Latency is in it, too: 5 µs per message.)


# %%
def seconds(tokens, bandwidth, ranks=64, parameters=1_000_000_000):
    """Backward and all-reduce of one step."""
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
# So DDP stops paying when the batch is cut too thin. Let the batch be 4 million tokens, and add devices, over
# InfiniBand: each has fewer tokens to compute, and as many gradients to send as before. Whatever is not hidden is time
# spent waiting.


# %%
def thin(devices):
    """One step of 4 million tokens on this many devices."""
    tokens = 2**22 // devices
    backward, all_reduce = seconds(tokens, LINKS["InfiniBand, 400 Gb/s"], ranks=devices)
    computes, waits = 1.5 * backward, max(0, all_reduce - backward)  # forward takes half of it
    times = {"backward, ms": round(1000 * backward), "all-reduce, ms": round(1000 * all_reduce)}
    share = round(100 * computes / (computes + waits))
    return {"devices": devices, "tokens each": tokens, **times, "computing, %": share}


draw.table(thin(devices) for devices in (16, 64, 256, 1024, 4096))

# %% [markdown]
# One could enlarge the batch along with the devices. But then it is *a different training run*: fewer steps for the
# same text. Up to a point a larger learning rate makes up for it, in proportion to the batch and warmed up slowly
# (Goyal et al., 2017); beyond a critical size, which grows as the loss falls, a larger batch hardly helps (McCandlish
# et al., 2018).
#
# **Why not**: memory. No number of ranks lowers the floor, as you measured. In mixed precision it is 16 bytes
# per parameter, on every device:

# %%
floor = sum(cost.PIE["mixed"].values())
models = {"1.5 billion": 1.5e9, "7.5 billion": 7.5e9, "70 billion": 70e9}
table = [
    {"parameters": name, **{f"{n} ranks": round(floor * psi / 1e9) for n in (2, 64, 1024)}}
    for name, psi in models.items()
]
draw.table(table, caption="GB on each rank")

# %% [markdown]
# A device of 80 GB holds at most 5 billion parameters (80 / 16), without a single activation. The copies agree, so all
# but one of them are spare; which of them could go, and what would have to travel instead? That is the question of
# [04 ZeRO](04_zero.ipynb).

# %% [markdown]
# ## Out of the laboratory
#
# Here is all of it without the laboratory: PyTorch's DDP in a script of its own, [scripts/ddp.py](../scripts/ddp.py).
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
# `torchrun` starts it once per rank, and tells each process who it is, in environment variables that
# `init_process_group` reads:
#
# | | |
# |---|---|
# | `RANK`, `WORLD_SIZE` | which rank this is, of how many |
# | `LOCAL_RANK` | which rank of this machine it is: the GPU that it takes |
# | `MASTER_ADDR`, `MASTER_PORT` | where rank 0 waits for the others |
#
# Now run it, as four processes that know nothing of this notebook, and compare with the reference curve.

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
# In a terminal, from the root of the repository, that is `torchrun --nproc-per-node 4 scripts/ddp.py`. With GPUs
# nothing changes but the device: the script takes GPU number `LOCAL_RANK`, and NCCL carries the bytes. On two machines
# of eight GPUs each, run on both: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint
# HOST:29500 scripts/ddp.py`, where `HOST` is one of them. (Run here on CPUs only.)

# %% [markdown]
# ## Say it back
#
# From memory: the model has `tensors` gradients, which fill `buckets` buckets. How many all-reduces are started while
# backward works, and how many by `sync()`?


# %%
def started_when(tensors, buckets):
    """{"Naive": (by backward, by sync), "Bucketed": (…, …), "Overlapped": (…, …)}, in one
    micro-batch."""
    ### BEGIN SOLUTION
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)}
    ### END SOLUTION


check.started_when(started_when)

# %% [markdown]
# Answer each aloud before you unfold it.
#
# <details><summary>Why do the replicas stay equal, though nobody ever sends a parameter?</summary>
#
# They start equal, they take the same gradient (the mean over all ranks, with the same bits on each), and the same
# optimizer does the same arithmetic with it. Equal stays equal; unequal stays unequal, too.
# </details>
#
# <details><summary>With 8 ranks, 4 micro-batches per step and gradients of 1 GB: how much does each rank send in a
# step, with <code>no_sync</code> and without?</summary>
#
# With it 2 × 7/8 × 1 GB = 1.75 GB. Without it four times that, 7 GB; the result is the same.
# </details>
#
# <details><summary>Why is one bucket for all gradients bad for overlap, and one bucket for each gradient bad for
# latency?</summary>
#
# It is full only when the last gradient is there, and then backward is over: nothing is left to hide behind. With one
# bucket for each, every small tensor pays the latency of a whole all-reduce.
# </details>
#
# For Ψ parameters in float32 with AdamW, on N ranks, per rank:
#
# | | predicted | ours, `Overlapped` | PyTorch's DDP |
# |---|---|---|---|
# | sent in a step | 2 (N − 1)/N × 4Ψ bytes | the same, exactly | the same, exactly |
# | P, S | 4Ψ, 8Ψ bytes | as predicted | as predicted |
# | gradients, buckets | 4Ψ bytes, and one gradient on its way | as predicted | 8Ψ, or the same with views |
# | numbers | one process's | same bits on 2 ranks | same bits on 2 ranks |

# %% [markdown]
# ## Beat it: the earliest next step (30 minutes)
#
# Here it is open again. Backward goes from the last layer to the first, but the next forward goes from the first to the
# last, and a layer cannot begin before its gradient has come. What is needed first is ready last. You choose which
# gradients travel together, and in which order; the wire carries one all-reduce at a time, of latency + bytes/W. A step
# lasts from its first backward to the end of the next forward.
#
# **The bound.** All layers are computed, one after the other. And all gradients are sent after the last layer's
# backward and before its next forward, with one latency at the least. No step takes less than the longer of the two:
# 100 points, in each of five models. One all-reduce for each layer, the last first, scores 72.8 in their mean.
# A score is 100 × bound / time.
#
# Two ranks really send your buckets. More ranks would change nothing: what an all-reduce takes is given here.

# %%
models, bound = beat.early_start.cases, beat.early_start.bound
step_seconds = beat.early_start.measured


def in_ms(given):
    """One all-reduce for each layer, and the bound."""
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
    """The buckets in the order in which they are sent, by the numbers of the layers: [[3, 2],
    [0, 1]].

    By layer, the first is number 0: bytes of its gradient, s of its backward and of its
    forward.
    step_seconds(buckets, (nbytes, backward, …)) says how long a step takes. You may search, for
    up to ten seconds a call. It is also called for a model that is not in the table.
    """
    ### BEGIN SOLUTION
    given = nbytes, backward, forward, latency, bandwidth
    sizes = [fill_buckets(nbytes, 1000 * 2**k) for k in range(12)]
    return min(sizes, key=lambda buckets: step_seconds(buckets, given))
    ### END SOLUTION


beat.early_start(in_which_order)

# %% [markdown]
# The course fills buckets as DDP does, and tries a dozen sizes. PyTorch sends its buckets in the order in which they
# stand; ByteScheduler (Peng et al., 2019, SOSP) puts what is needed first before the others, and so can you.
#
# <details><summary>What do the best orders that are known have in common?</summary>
#
# They hold some of the late layers back until the first layers have been sent: what is ready early is needed late.
# </details>
#
# **Read on**: [labs/ddp.py](../labs/ddp.py). Li et al., 2020, *PyTorch Distributed: Experiences on Accelerating Data
# Parallel Training* (VLDB, arXiv 2006.15704), of which you have now built section 3.2. Goyal et al., 2017,
# *Accurate, Large Minibatch SGD* (arXiv 1706.02677). McCandlish et al., 2018, *An Empirical Model of Large-Batch
# Training* (arXiv 1812.06162).
#
# **Next.** The copies agree, so all but one of them are spare, and yet every rank pays for all of P, G and S.
# [04 ZeRO](04_zero.ipynb) removes them, one kind after another.
#
# A clean copy of this notebook: `git restore notebooks/03_ddp.ipynb`, then *File > Reload Notebook from Disk*.
