# %% [markdown]
# # Pipeline parallelism: some of the layers on each rank
#
# *A model needs sixteen machines, and the wire between them is slow. What is the least that must cross it?*
#
# You need: [Collectives](02_collectives.ipynb), and [Memory](07_memory.ipynb) for what activations are.
# **Minutes**, by estimate: 45 without exercises, 85 with them, 40 more for optional parts, 30 more for the challenge.
# Before exercise 3 is a good place for a break. For the optional part you need [Tensor
# parallelism](09_tensor_parallel.ipynb), too. The machine works for about a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it,
# and leave out those on notebooks that you have not read.

# %%
from labs.kit import recall

recall.ask("10")

# %% [markdown]
# ## Question
#
# Tensor parallelism sends something four times in each layer, so it stays inside a node, where the wire is fast. A node
# has eight GPUs. What about a model that is too large for them?

# %%
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs import cost, native, pp
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import run
from labs.kit.record import instructions, mark
from labs.model import GPT, PRESETS
from labs.pp import B, F, I, W

# %%
llama, tokens, nodes = PRESETS["llama3-405b"], 8192, 16
x = 2 * tokens * llama.dim  # bytes between two layers, for a sequence, in 16 bits
all_reduces = (4 * llama.depth + 2) * 2 * (nodes - 1) / nodes * x / 1e9
held, there = 405e9 * 16 / 1e12, 8 * 80e9 / 1e12
print(f"405 billion parameters at 16 bytes: {held:.1f} TB; eight H100s have {there:.2f} TB")
print(f"a sequence of {tokens:,} tokens, on {nodes} nodes, sent by each of them:")
calls = 4 * llama.depth + 2
print(f"  tensor parallelism          {all_reduces:6.1f} GB, in {calls} all-reduces")
print(f"  one tensor to the next node {2 * x / 1e9:6.1f} GB, forward and backward together")

# %% [markdown]
# The last line is the idea of **pipeline parallelism** (PP). Do not cut the layers: cut *between* them. Each rank gets
# some consecutive layers, called a **stage**, and all that they hold. Only the activations at the cut, x, cross it on
# the way forward, and only their gradient on the way back. Llama 3 405B was trained like this: 16 stages, with tensor
# parallelism inside a node (Llama Team, 2024, arXiv 2407.21783, table 4).
#
# A *schedule* is a list, for each rank, of what to do next; you will write three of them, and run them.
#
# ## Picture
#
# ![Above: eight layers in four stages, one on each rank; x goes from each stage to the next, its gradient comes back.
# Below, time from left to right. With the whole batch at once, only one rank works at any time. With the batch in four
# micro-batches, rank 1 can begin as soon as rank 0 has finished the first of them, and the ranks work side by
# side.](../images/pp_flow.svg)
#
# The numbers are **micro-batches**: parts of a batch that go through the model one after another. The empty places,
# where a rank waits, are called the **bubble**.
#
# ## Predict
#
# Two numbers, both worked out below. Four ranks have one stage each, a batch is cut into eight micro-batches, and a
# backward takes twice as long as a forward. First all forwards are done, then all backwards. How much longer is this
# than if all ranks were busy all the time (0.5 would mean 1.5 times as long)?
#
# And the first rank then holds the activations of all eight micro-batches at once. Another order of the same work is
# just as quick. With that order, how many of them must the first rank hold?

# %%
guess_bubble = 0.375  # your number
guess_alive = 4  # your number

# %% [markdown]
# ## Build: the oldest way
#
# The simplest way takes one process, and not a single message. (It is called naive model parallelism.) Put each stage
# on its own device, and let forward copy x from device to device; autograd goes back the same way. All of it is two
# lines ([labs/pp/one_process.py](../labs/pp/one_process.py)):
#
#     for stage, device in zip(self.stages, self.devices):
#         x = stage(x.to(device))
#
# With four GPUs this uses them all. Without them, all four devices are the CPU here:

# %%
from labs.pp.one_process import Placed, naive

CONFIG = replace(PRESETS["tiny"], depth=8, kv_heads=4)  # 4 heads of each kind, for later
GPUS = torch.cuda.device_count() >= 4
DEVICES = [f"cuda:{number}" if GPUS else "cpu" for number in range(4)]
loader = Batches(corpus().tokens, 8, CONFIG.context)

whole, placed = GPT(CONFIG), Placed(pp.cut(GPT(CONFIG), 4), DEVICES)
x, y = loader[0]
loss = whole.loss(placed(x), y.to(DEVICES[-1]))
loss.backward()  # through all devices
same = torch.isclose(loss.cpu(), whole(x, y)).item()
print(f"loss {loss.item():.3f}; as of the whole model: {same}")

# %% [markdown]
# `pp.cut` cuts a model by its layers ([labs/pp/stages.py](../labs/pp/stages.py)); stage 0 also has the embedding, and
# the last one the norm and the head. What does this look like in time? Forward goes down the stages, backward comes up
# again, and then comes the next micro-batch:

# %%
draw.schedule(naive(4, 2))

# %% [markdown]
# Four devices, and one of them works at a time. In the terms of your first prediction: this takes four times as long as
# it could, so its bubble is 3. But it has two virtues. It makes room for a model that no single device can hold, and
# there is little to get wrong.
#
# ## Build: a schedule is data
#
# What you just saw was drawn from a list. There are two kinds of instruction so far, each for one stage and one
# micro-batch: `F(2, 0)` is stage 2's forward of micro-batch 0, and prints as `2F0`; `B(2, 0)` is the backward. (It is
# PyTorch's way of writing them.) F needs the F of the stage before it. B needs its own F and, except on the last stage,
# the B of the next stage. That is all there is to know.
#
# A schedule is one list for each rank. `pp.simulate` runs it on paper, with times that you give (F=1 and B=2 if you
# give none), and `pp.validate` says whether it can be run at all. Here are two that cannot:

# %%
early = [[F(0, 0), F(0, 1), B(0, 0), B(0, 1)], [B(1, 0), F(1, 0), F(1, 1), B(1, 1)]]
circle = [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]]
for lists in (early, circle):
    try:
        pp.validate(lists)
    except pp.WrongSchedule as refused:
        print(refused, end="\n\n")

# %%
draw.schedule(circle)

# %% [markdown]
# The first is a slip. The second is worse: each list looks right by itself, and as real processes the two would wait
# for each other for ever. The checker finds it without running anything. It asks Lamport's question (1978): must an
# instruction *happen before* itself?
#
# ## Build: GPipe
#
# In the naive schedule a rank waits during every micro-batch. But rank 0 can begin the second as soon as it has
# finished the first. Then a rank waits only for the first micro-batch to arrive, and for the first gradient to come
# back; and more micro-batches mean more work for the same waiting. That is the whole idea of GPipe (Huang et al., 2019,
# arXiv 1811.06965): all forwards, then all backwards.
#
# ### Exercise 1: GPipe (10 minutes)
#
# Rank r has stage r. Do the forwards in the order of the micro-batches, and the backwards, too: then gradients add up
# in the order of one process. (The paper draws the backwards in reverse; the bubble is the same.) The check accepts no
# other order; it tries 1 to 8 ranks and any number of micro-batches. Below it your schedule is drawn (up to the first
# wrong instruction, if it cannot be run). Until you have written yours, that picture is the course's, and so it is in
# exercises 2 and 3: write first, then look.


# %%
def gpipe(ranks, microbatches):
    """[the instructions of rank 0, those of rank 1, ...]"""
    ### BEGIN SOLUTION
    numbers = range(microbatches)
    order = [(kind, m) for kind in (F, B) for m in numbers]
    return [[kind(rank, m) for kind, m in order] for rank in range(ranks)]
    ### END SOLUTION


answer = check.gpipe(gpipe)
answer


# %%
def attempt(mine, courses, *sizes):
    """Your lists; or the course's, while yours is a stub."""
    try:
        return mine(*sizes)
    except NotImplementedError:
        return courses(*sizes)


picture = draw.schedule(attempt(gpipe, pp.gpipe, 4, 8))
gpipe = gpipe if answer.ok else pp.gpipe  # from here on yours if it passed, else the course's
picture

# %% [markdown]
# Above: who does what when. Below: how many micro-batches' activations each rank holds. If it is still hard to see what
# moves where, take it moment by moment (press play, or move the slider):

# %%
play.microbatches(gpipe(4, 4))

# %%
bubble = pp.simulate(gpipe(4, 8)).bubble
reason = "It waits for 3 of each, and computes 8 of each."
check.predict("How much longer?", guess_bubble, bubble, reason=reason)

# %% [markdown]
# Each rank waits for as many forwards, and as many backwards, as there are *other* ranks. So with p ranks and m
# micro-batches the bubble is (p − 1)/m of the ideal time, whatever a forward and a backward take:

# %%
rows = []
for ranks in (2, 4, 8, 16):
    bubbles = {m: pp.simulate(gpipe(ranks, m), F=1, B=2).bubble for m in (1, 4, 8, 32, 128)}
    assert all(abs(found - (ranks - 1) / m) < 1e-12 for m, found in bubbles.items())
    assert abs(pp.simulate(gpipe(ranks, 8), F=2, B=3).bubble - (ranks - 1) / 8) < 1e-12
    told = {f"m = {m}": f"{found:.1%}" for m, found in bubbles.items()}
    rows.append({"bubble": f"{ranks} ranks"} | told)
draw.table(rows)

# %% [markdown]
# (Some papers divide by the whole time instead: (p − 1)/(m + p − 1). It is the same bubble.) So take a thousand
# micro-batches? A batch has only so many sequences, and a GPU with less to do in each micro-batch works less
# efficiently.
#
# Now run your schedule for real. `pp.Pipeline` obeys lists: it keeps this rank's stages, computes what the list says,
# and sends and receives between the ranks ([labs/pp/executor.py](../labs/pp/executor.py); soon you write its heart).
# The reference is one process that takes the same eight micro-batches one after another.

# %%
from labs.kit.train import strategies

MICRO, on_cpu = 8, partial(run, device="cpu")
adamw = partial(torch.optim.AdamW, **strategies.ADAMW)


def pipeline_of(lists):
    """This rank's part of the model: the pipeline keeps nothing of the other stages."""
    model = GPT(CONFIG)
    return pp.Pipeline(pp.cut(model, stages_of(lists)), lists, model.loss)


# %%
def train(lists):
    """Two steps; this rank's parameters after them, by name."""
    pipeline = pipeline_of(lists)
    optimizer = adamw(pipeline.parameters())
    for number in range(2):
        mark("step")
        pipeline.forward_backward(*loader[number])
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    stages = pipeline.stages.values()
    return {name: p.detach() for stage in stages for name, p in stage.named_parameters()}


# %%
def stages_of(lists):
    return 1 + max(x.stage for order in lists for x in order)


def one_process():
    model = GPT(CONFIG)
    optimizer = adamw(model.parameters())
    for number in range(2):
        strategies.backward(model, *loader[number], MICRO)
        for p in model.parameters():
            p.grad /= MICRO
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


# %%
[expected] = on_cpu(one_process, ranks=1)


def try_out(lists):
    """Train on 4 ranks; compare all their parameters with those of one process.  What was sent
    is recorded."""
    trained = on_cpu(train, lists, ranks=4, record="communication")
    found = {name: p for parameters in trained for name, p in parameters.items()}
    assert found.keys() == expected.keys()
    same = sum(torch.equal(p, expected[name]) for name, p in found.items())
    bits = f"{same} of {len(found)} parameters have the bits of one process"
    print(f"{bits}, after 2 steps on 4 ranks")
    return trained.recording


talk = {"GPipe": try_out(gpipe(4, MICRO))}

# %% [markdown]
# Not "within rounding": the same bits. Each parameter is on one rank, which adds up the gradients of the micro-batches
# in the same order as one process does. (Dividing each loss by 8, or the gradients by 8 at the end, is the same to the
# last bit, since 8 is a power of two.) The exception is a weight that two stages share, as with a tied embedding: each
# stage adds up its own part, and the parts are added after that, which is a different order.
#
# Micro-batches are parts of a batch, as ranks' are in notebook 03. So the same question comes up: what if seven of the
# eight sequences have one target that counts, and all others are ignored (-100)?

# %%
x, masked = loader[0][0], loader[0][1].clone()
masked[1:, 1:] = -100


def piped():
    """The batch's mean loss, on the last rank."""
    losses = pipeline_of(gpipe(4, MICRO)).forward_backward(x, masked)
    return sum(loss.item() for loss in losses) / MICRO


parts = zip(x.split(1), masked.split(1), strict=True)
means, due = sum(whole(*part).item() for part in parts) / MICRO, whole(x, masked).item()
for name, found in {"mean of means": means, "pipeline": on_cpu(piped, ranks=4)[-1]}.items():
    print(f"{name:13}: {'right' if abs(found - due) < 1e-4 else 'another loss'}")

# %% [markdown]
# A mean of the micro-batches' means is wrong, too: torchtitan's repair
# ([#2206](https://github.com/pytorch/torchtitan/pull/2206), of
# [#1842](https://github.com/pytorch/torchtitan/issues/1842)) counts over micro-batches and ranks. `pp.Pipeline` adds up
# losses, and divides by the targets that count in its whole batch. Where several pipelines read parts of a batch, give
# `forward_backward(x, y, over=n)`. A loss that cannot divide by another number is refused.
#
# ## Build: 1F1B
#
# A rank holds the activations of a micro-batch from its F to its B. With GPipe, in the middle of the step, these are
# the activations of the *whole batch*, however finely it is cut. And m, which should be large, gets larger with a
# larger batch. (The paper keeps only what goes into a stage, and recomputes the rest, as in notebook 07.)
#
# But look at rank 3 in the picture. Micro-batch 0 has arrived at the last stage, so its backward could begin at once,
# and its activations could go. **1F1B** ("one forward, one backward") has each rank do just enough forwards to keep
# the ranks after it busy, then a forward and a backward in turns, and at the end the backwards that are left:
#
#     rank 3    3F0 3B0 3F1 3B1 3F2 3B2 ...    begins to alternate at once
#     rank 2    2F0 2F1 2B0 2F2 2B1 2F3 ...    one forward first, for rank 3
#
# This is the version of Narayanan et al., 2021 (arXiv 2104.04473). Their first one, of 2019, never pauses between
# batches, so its weights are out of date.
#
# ### Exercise 2: 1F1B (15 minutes)
#
# The forwards that a rank does before it begins to alternate are its *warm-up*: none on rank 3, one on rank 2. (The
# first pair of F and B then begins with one more F.) Think about small numbers of micro-batches, too: with m < p, the
# first ranks have no more forwards to do than m. PyTorch's had overlooked this: with fewer micro-batches than ranks, a
# training hung ([torchtitan#775](https://github.com/pytorch/torchtitan/issues/775)). It refuses them now; yours should
# run them. The check wants the bubble of GPipe, and the activations of min(m, p − r) micro-batches at most.


# %%
def one_f_one_b(ranks, microbatches):
    """[the instructions of rank 0, those of rank 1, ...]; microbatches may be fewer than
    ranks."""
    lists = []
    for rank in range(ranks):
        forwards = [F(rank, m) for m in range(microbatches)]
        backwards = [B(rank, m) for m in range(microbatches)]
        ### BEGIN SOLUTION
        warmup = min(microbatches, ranks - 1 - rank)
        turns = [x for pair in zip(forwards[warmup:], backwards, strict=False) for x in pair]
        lists.append(forwards[:warmup] + turns + backwards[microbatches - warmup :])
        ### END SOLUTION
    return lists


answer = check.one_f_one_b(one_f_one_b)
answer

# %%
picture = draw.schedule(attempt(one_f_one_b, pp.one_f_one_b, 4, 8))
one_f_one_b = one_f_one_b if answer.ok else pp.one_f_one_b
picture

# %%
most, reason = max(pp.alive(one_f_one_b(4, 8))[0]), "As many as there are ranks."
check.predict("Micro-batches held by the first rank?", guess_alive, most, reason=reason)

# %% [markdown]
# The bubble is as large as before. (That 1F1B makes it smaller is a common mistake.) What is smaller is what the ranks
# *hold*: as many micro-batches as there are ranks from here to the end, however large the batch. So now m may grow, and
# that is what makes the bubble smaller. The real thing, its numbers and its bytes:

# %%
talk["1F1B"] = try_out(one_f_one_b(4, MICRO))

# %%
both = {"GPipe": gpipe(4, MICRO), "1F1B": one_f_one_b(4, MICRO)}
holds = partial(on_cpu, ranks=4, record="memory")
watched = {name: holds(train, lists).recording for name, lists in both.items()}
draw.memory(*watched.values(), step=1, ranks=[0], names=list(watched))

# %%
rows = []
for rank in range(4):
    told = {f"{name}, on the list": max(pp.alive(each)[rank]) for name, each in both.items()}
    gpipes, less = (watched[name].steady(rank)["A"] for name in both)
    told["1F1B, by bytes held"] = f"{MICRO * less / gpipes:.1f}"
    rows.append({"": f"rank {rank}", **told})
draw.table(rows, caption="micro-batches alive at most (by bytes: scaled so that GPipe's is 8)")

# %% [markdown]
# ## Build: interleaved
#
# To make the bubble itself smaller, make what a rank waits for smaller. It waits for other ranks' *stages*. So cut the
# model into more of them, and give each rank v stages that do *not* follow one another: rank r has stages r, r + p, r +
# 2p, … (Narayanan et al., 2021, arXiv 2104.04473, section 2.2). A micro-batch comes round v times, and each stage takes
# a v-th of the time.
#
# The micro-batches go in groups of p. A rank does the p of a group at its first stage, then the same p at its second,
# and so on, and then the next group. Backward takes the stages in reverse, the last one first, and the micro-batches in
# the same order as forward. As with 1F1B, there is a warm-up, then forward and backward in turns, then the rest.
#
# How long must the first rank's warm-up be, if messages take no time? Think of micro-batch 0, which goes down to the
# last rank and starts again, and count on paper. The picture shows Megatron's order, which warms up for longer:

# %%
draw.schedule(pp.interleaved(4, MICRO, 2), F=0.5, B=1)  # half of the layers in each stage

# %%
talk["interleaved"] = try_out(pp.interleaved(4, MICRO, 2))

# %% [markdown]
# The bubble is (p − 1)/(v m). In the picture the first rank does eleven forwards before its first backward: ten are its
# warm-up, and one belongs to the first pair. That is more than it needs. Before a rank comes
# to the last of its stages, a whole group has gone through each of the others: (v − 1) p forwards. From there,
# micro-batch 0 has p − 1 − r ranks still to pass. So on paper (v − 1) p + (p − 1 − r) is enough, seven on the first
# rank, as long as messages take no time at all. This schedule is Megatron's, which has p − 1 − r forwards more. Why,
# people have asked its authors ([Megatron-LM#675](https://github.com/NVIDIA/Megatron-LM/issues/675)). Our explanation:
# with messages that do take time, these forwards give a rank something to do while they are on their way:


# %%
def with_warmup(times, ranks=4, v=2):
    """The course's interleaved schedule, but with a warm-up of (v - 1) p + times (p - 1 -
    r)."""
    lists = []
    for rank, order in enumerate(pp.interleaved(ranks, MICRO, v)):
        forwards, backwards = ([x for x in order if isinstance(x, kind)] for kind in (F, B))
        warmup = (v - 1) * ranks + times * (ranks - 1 - rank)
        lists.append(pp.schedules.in_turns(forwards, backwards, warmup))
    return lists


# %%
lists = {f"{times} × (p − 1 − r)": (with_warmup(times), {"F": 0.5, "B": 1}) for times in (1, 2)}
lists["1F1B"] = one_f_one_b(4, MICRO), {"F": 1, "B": 2}
rows = []
for send in (0, 0.05, 0.1, 0.2):  # a rank's forward takes 1, in one stage or in two halves
    row = {"a message takes": f"{send} of a rank's forward"}
    for name, (each, costs) in lists.items():
        row[name] = f"{pp.simulate(each, send=send, **costs).bubble:.1%}"
    rows.append(row)
draw.table(rows, caption="bubble on 4 ranks with 8 micro-batches")

# %% [markdown]
# With the longer warm-up, interleaved loses no more to messages than 1F1B does. But it sends v times as many, which
# this table cannot show, since on paper any number of messages may travel at once. And more stages of fewer layers must
# still take equally long.
#
# ## Build: split the backward
#
# One idea is left. A backward computes two things: the gradient of the stage's *input*, for which the stage before it
# is waiting, and the gradients of its *weights*, for which nobody waits until the optimizer's step. So split B into
# **I** and **W**, and do W when there is nothing else to do: in the bubble. (Qi et al., 2023, arXiv 2401.10241, "Zero
# Bubble". They write B for what is I here.) For a linear layer:

# %%
torch.manual_seed(0)
layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
with pp.Deferred() as later:  # F
    y = layer(x)
y.backward(torch.ones_like(y))  # I
there = x.grad is not None, layer.weight.grad is not None
print(f"after I: x has its gradient: {there[0]}; the weight: {there[1]}")
later.backward()  # W
print(f"after W: the weight has it: {torch.equal(layer.weight.grad, torch.ones(3, 5) @ x)}")

# %% [markdown]
# Each is one matrix product, as forward is, so the three take about equally long: F = I = W = 1, and B = 2. (In a whole
# stage not quite: attention between tokens has no weights, so I takes longer than W.)
# ([labs/pp/deferred.py](../labs/pp/deferred.py) does it with autograd, one product at a time.) Now W needs its own I,
# and nothing needs W. From I to W a rank still keeps what W needs. The checker counts all activations as alive until
# W; in truth some go at I.
#
# ### Exercise 3 (optional): fill the bubble (15 minutes)
#
# Write 1F1B with I in place of B, and put the W's where they cost nothing. The paper calls it ZB-H1 (`pp.zb1p` in the
# course's code, "zero bubble" in its tables): it has a third of 1F1B's bubble, and no rank holds more than 1F1B's first
# rank does, min(m, p) micro-batches. Where would a rank have to wait? The first rank waits between two backwards, so
# there is room for a W right after each I. The last rank never waits between backwards, but all the others wait for its
# I's. So its I's should come as early as possible, and its W's later. How many W's can a rank put off, if no more than
# min(m, p) micro-batches may be alive on it? The check tries many numbers of ranks and micro-batches.


# %%
def zero_bubble(ranks, microbatches):
    """[the instructions of rank 0, those of rank 1, ...], with F, I and W."""
    ### BEGIN SOLUTION
    lists = []
    for rank, order in enumerate(one_f_one_b(ranks, microbatches)):
        mine, due = [], []
        for x in order:
            mine.append(I(rank, x.microbatch) if isinstance(x, B) else x)
            due += [W(rank, x.microbatch)] if isinstance(x, B) else []
            if isinstance(x, B) and len(due) > rank:
                mine.append(due.pop(0))
        lists.append(mine + due)
    return lists
    ### END SOLUTION


answer = check.zero_bubble(zero_bubble)
answer

# %%
picture = draw.schedule(attempt(zero_bubble, pp.zb1p, 4, MICRO))
zero_bubble = zero_bubble if answer.ok else pp.zb1p
picture

# %%
talk["zero bubble"] = try_out(zero_bubble(4, MICRO))

# %% [markdown]
# Rank r puts off r of its W's, and does them at the end, where it would have nothing else to do. Can the bubble go
# altogether? Nearly. Give each rank two stages, laid out as a **V**: rank r has stages r and 2p − 1 − r, so the first
# rank has the first stage *and* the last one. A micro-batch goes down to the last rank and comes up again, and its loss
# is computed on the rank where it started:

# %%
talk["ZB-V"] = try_out(pp.zbv(4, MICRO))
draw.schedule(pp.zbv(4, MICRO), F=0.5, I=0.5, W=0.5)

# %% [markdown]
# Once a rank has begun, it works without a pause until it has finished. (DeepSeek-V3's DualPipe feeds micro-batches in
# from both ends, so that it holds each stage twice, and runs an F of one with a B of another, so that the messages of
# one travel while the other computes. `pp.dualpipev` is its later variant on a V.) Here are all schedules in one table.
# Where a rank has two stages, each has half of the layers, so its activations count half:

# %%
SCHEDULES = {
    "GPipe": (gpipe(4, MICRO), 1),
    "1F1B": (one_f_one_b(4, MICRO), 1),
    "interleaved": (pp.interleaved(4, MICRO, 2), 2),
    "zero bubble": (zero_bubble(4, MICRO), 1),
    "ZB-V": (pp.zbv(4, MICRO), 2),
}
rows = []
for name, (lists, v) in SCHEDULES.items():
    alive = {f"rank {r}": max(each) / v for r, each in enumerate(pp.alive(lists))}
    rows.append({"": name, "bubble": f"{pp.simulate(lists).bubble:.1%}"} | alive)
draw.table(rows, caption="4 ranks, 8 micro-batches: the bubble, and micro-batches alive")

# %% [markdown]
# Nothing is free: the smaller the bubble, the more is held, or sent. Now play with it. On 4 ranks, with how many
# micro-batches is 1F1B's bubble at most 20 %? And if `a message takes` 0.2 of a rank's forward, are four stages on
# each rank still better than two (set the schedule to interleaved)?

# %%
play.schedule()

# %% [markdown]
# <details><summary>Answers</summary>
#
# With 15 or more, since 3/15 is 20 %. And no: with 8 micro-batches, four stages on each rank have a bubble of 9.4 %
# against 18.8 % as long as messages take no time. But if one takes 0.2, it is 34.4 % against 30.4 %: there are twice as
# many messages to wait for.
# </details>
#
# ## Measure: a list obeyed for real
#
# All of these bubbles were found on paper. Are they there in real processes? Four ranks cannot compute at once on two
# cores, and this machine may have no more. So first a picture in which nobody competes for a core: stages that compute
# next to nothing and *sleep*, 10 ms for each F, I and W and 20 for each B (half of that where a rank has two stages).
# Everything else is real: processes, messages, waiting. `instructions` makes each instruction a span of the recording.

# %%
SECONDS = {F: 0.01, B: 0.02, I: 0.01, W: 0.01}


def compute_and_sleep(compute, v, x):
    compute(x)
    time.sleep(SECONDS[type(x)] / v)


# %%
def sleeps(schedules, times):
    """A few steps of each; an instruction computes next to nothing, and then sleeps."""
    for lists, v in schedules.values():
        stages = [nn.Linear(4, 4) for _ in range(stages_of(lists))]
        pipeline = pp.Pipeline(stages, lists, lambda y, target: (y - target).square().mean())
        pipeline.compute = partial(compute_and_sleep, pipeline.compute, v)
        instructions(pipeline)
        for _ in range(times):
            dist.barrier()
            mark("step")
            pipeline.forward_backward(torch.ones(MICRO, 4), torch.ones(MICRO, 4))
            mark("end")


# %%
TIMES = 3  # and the quickest of them: nothing that your machine does makes a step quicker
slept = on_cpu(sleeps, SCHEDULES, TIMES, ranks=4, record="time", tell="sleeping").recording
quickest = {}
for n, (name, (lists, _)) in enumerate(SCHEDULES.items()):
    steps = range(TIMES * n, TIMES * (n + 1))
    times = {step: slept.schedule(lists, step).time for step in steps}
    quickest[name] = min(times, key=times.get)
draw.schedule(SCHEDULES["1F1B"][0], recording=slept, step=quickest["1F1B"], F=0.01, B=0.02)

# %% [markdown]
# For each rank, the picture shows what was simulated with these naps, and beneath it what the rank did. Now the whole
# step of all five:

# %%
rows = []
for name, (lists, v) in SCHEDULES.items():
    costs = {kind.__name__: seconds / v for kind, seconds in SECONDS.items()}
    on_paper = pp.simulate(lists, **costs)
    ran = slept.schedule(lists, quickest[name])
    times = {"ideal": on_paper.ideal, "simulated": on_paper.time, "recorded": ran.time}
    rows.append({"": name, **{what: f"{1000 * each:.0f} ms" for what, each in times.items()}})
draw.table(rows)

# %% [markdown]
# So the waiting is real. Every recorded step is longer than the simulated one: a sleep takes a little longer than it is
# told, a message takes some time, and a busy machine adds to both. On a quiet machine the recorded steps come close to
# the simulated ones. (If yours are not even in the same order, something else keeps the machine busy: run the cell
# again.) Now with real layers, and real competition for your cores:


# %%
def computes(lists, steps=3):
    pipeline = instructions(pipeline_of(lists))
    for _ in range(steps):
        mark("step")
        pipeline.forward_backward(*loader[0])
    mark("end")


computed = on_cpu(computes, SCHEDULES["1F1B"][0], ranks=4, record="time").recording
draw.schedule(SCHEDULES["1F1B"][0], recording=computed)

# %% [markdown]
# The order is the same, the times are not. An instruction takes longer while other ranks use the cores, the last stage
# also has the head and the loss to compute, and a message takes some time even between processes of one machine. On
# GPUs the first of these goes away.
#
# ### Exercise 4: obey (15 minutes)
#
# What does a rank do with its list? This is the heart of `pp.Pipeline`. You get the rank's instructions (F and B only),
# and two functions that know about ranks and messages, so that you need not:
#
# - `take(F(2, 0))` returns what stage 2's forward of micro-batch 0 has made, and waits until it is there, wherever it
#   is made. `take(B(2, 0))` returns the gradient of stage 2's *input*. Take each thing once.
# - `put(F(2, 0), tensor)` hands over what this rank has made, for whoever needs it: once, before the next instruction
#   begins. It may leave later, so do not write into it any more. Nobody needs the result of the last stage's F, or of
#   the first stage's B, so put nothing for them.
#
# Two things are easily forgotten. Gradients of the micro-batches add up, so each loss must be divided by their number
# *before* backward. And when the next instruction begins, nothing may be alive of a micro-batch whose B is over, or the
# saving is lost. (A name in your loop keeps what it refers to: `del` it, or let it be a name in a function that
# returns.) What you take has no history in autograd. Call `.requires_grad_()` on it: backward then stops there, and
# leaves its gradient in `.grad`. Put detached tensors: nobody else has a use for your graph.
#
# Write it in two parts: first what F does, then B. (`torch.autograd.backward(made, gradient)` goes back from a tensor;
# for a loss, which has no dims, the gradient is None.) The list may have its micro-batches in any order, and the
# backwards in a different order from the forwards. Change nothing that you are given but the `.grad` of parameters: the
# same list and stages serve for the next batch. The check runs schedules of all kinds on 1 to 4 ranks, and compares
# losses and gradients with one process; it watches what is alive when, and what is still there at the end.


# %%
def forward(s, m, stages, loss, xs, ys, take, put):
    """F of stage s and micro-batch m; returns ((taken, made), value).

    taken: the tensor that went into the stage; made: what its backward begins at, the stage's
    output, or on the last stage the loss divided by the number of micro-batches; value: on the
    last stage the loss itself (0-dim, detached)
    """
    is_last = bool(ys) and s == max(stages)
    ### BEGIN SOLUTION
    taken = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
    made = stages[s](taken)
    if is_last:
        value = loss(made, ys[m])
        return (taken, value / len(ys)), value.detach()
    put(F(s, m), made.detach())
    return (taken, made), None
    ### END SOLUTION


# %%
def obey(instructions, stages, loss, xs, ys, take, put):
    """Run one rank's list; return its losses in the order of the micro-batches; [] without the
    last stage.

    stages: {number: module}, this rank's; loss: (what the last stage makes, target) -> 0-dim
    xs, ys: the micro-batches' inputs and targets; xs is empty without the first stage, ys
    without the last
    losses: 0-dim tensors, detached, not divided
    """
    losses, alive = {}, {}
    for x in instructions:
        s, m = x.stage, x.microbatch
        if isinstance(x, F):
            alive[s, m], value = forward(s, m, stages, loss, xs, ys, take, put)
            losses |= {} if value is None else {m: value}
        else:
            ### BEGIN SOLUTION
            last = not alive[s, m][1].ndim
            torch.autograd.backward(alive[s, m][1], None if last else take(B(s + 1, m)))
            if s > 0:
                put(B(s, m), alive[s, m][0].grad)
            del alive[s, m]
            ### END SOLUTION
    return [losses[m] for m in sorted(losses)]


# %%
check.obey(obey)

# %% [markdown]
# ### Exercise 5 (optional): where pipelines deadlock (10 minutes)
#
# Behind `take` and `put` are messages. A schedule that can be run may still hang with them: a large send is not over
# before the other rank receives, and two ranks that send to each other first wait for ever. So messages have their
# places in the lists, too. `Send(F(0, 2), 1)` gives rank 1 what F(0, 2) has made; `Receive(F(0, 2), 0)` takes it from
# rank 0. Each of the two waits until the other rank has come to its counterpart, and then both are over. Between two
# ranks, nothing but their order tells messages apart.
#
# `pp.ranks_of(lists)` is the rank of each stage, and its length the number of stages. `reader(x, stages)`, from
# `labs.pp.instructions`, is the instruction in the next stage that needs what `x` has made, or None; `needs(x,
# stages)`, beside it in that file, lists what `x` itself needs. The check walks through your lists for schedules of all
# kinds, on 1 to 8 ranks, and says where they stop; then it runs one for real.
#
# <details><summary>To begin with</summary>Receive right before the instruction that needs it, send right after the one
# that has made it. Which ranks wait for each other then, in 1F1B?</details>
#
# <details><summary>A hint</summary>Say all messages of all ranks had <i>one</i> order, and every rank took its own in
# that order. Look at the first message that is not over. Can one of its two ranks be waiting for another
# one?</details>
#
# <details><summary>Another hint</summary>Run the lists on paper, one instruction at a time, on any rank that can go
# on. When something is made that another rank needs, put the message at the end of both lists, as far as they are
# written by then.</details>


# %%
from labs.pp.instructions import reader
from labs.pp.messages import Receive, Send


def with_messages(lists):
    """The lists, with messages between the instructions.

    lists: of F and B; they can be run.  Instructions stay as they are.  What another rank needs
    is sent once, after it was made, and received once, before it is used; nothing else is sent.
    No rank waits for ever, whatever the lists are.
    """
    ### BEGIN SOLUTION
    stages, ranks, plans = stages_of(lists), pp.ranks_of(lists), [[] for _ in lists]
    for rank, x in pp.checker.in_order(lists):
        plans[rank].append(x)
        use = reader(x, stages)
        if use and ranks[use.stage] != rank:
            plans[rank].append(Send(x, ranks[use.stage]))
            plans[ranks[use.stage]].append(Receive(x, rank))
    return plans
    ### END SOLUTION


check.with_messages(with_messages)

# %% [markdown]
# [labs/pp/messages.py](../labs/pp/messages.py) has the same order for the executor, and does two things more: a send
# does not wait, so that ranks compute while a message is on its way; and the lists alone say when it must be over, so
# that its buffer may go.
#
# ## Measure: what travels
#
# Over each cut go the activations x of each micro-batch, and their gradient comes back. Nothing else travels, and the
# schedule makes no difference. On paper: M tokens in a micro-batch, D numbers each, m micro-batches; a rank sends 2 m M
# D numbers for each of its stages, but only half of that for the model's first or last stage.

# %%
a_part = cost.Job(CONFIG, batch=1, ranks=4, accumulation=MICRO)  # micro-batches of one sequence
entries = {}
for name, (lists, _) in SCHEDULES.items():
    for rank in (0, 1):
        predicted = cost.pp(replace(a_part, rank=rank), pp.plan(lists))
        entries[f"{name}, rank {rank}"] = predicted.sent, talk[name].sent(rank, 1)
ledger = draw.ledger(entries, within=0)
assert ledger.agrees
ledger

# %% [markdown]
# It goes only from one neighbour to the next, and a rank may compute while it is on its way. How it compares with what
# the other strategies send is measured in the optional part.
#
# ## Native
#
# PyTorch has all of these, in `torch.distributed.pipelining`: a `PipelineStage` for each stage, and a class for each
# schedule. [labs/native/pipelining.py](../labs/native/pipelining.py) puts them together:

# %%
NATIVE = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved": "interleaved", "zero bubble": "zb1p"}


def by_torch(name):
    """Two steps; this rank's parameters, and the lists as PyTorch prints them."""
    lists, model = SCHEDULES[name][0], GPT(CONFIG)
    stages, mine = pp.cut(model, stages_of(lists)), {x.stage for x in lists[dist.get_rank()]}
    theirs = native.pp(stages, NATIVE[name], MICRO, model.loss)
    parameters = {key: p for s in mine for key, p in stages[s].named_parameters()}
    optimizer = adamw(parameters.values())
    for x, y in (loader[0], loader[1]):
        mark("step")
        theirs.step(*[x] * (0 in mine), **({"target": y} if len(stages) - 1 in mine else {}))
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    return {key: p.detach() for key, p in parameters.items()}, theirs.pipeline_order


# %%
def all_by_torch():
    return {name: by_torch(name) for name in NATIVE}


theirs = on_cpu(all_by_torch, ranks=4, record="communication", tell="PyTorch's")
rows = []
for number, name in enumerate(NATIVE):
    found = [pair for rank in theirs for pair in rank[name][0].items()]
    same = [torch.equal(p, expected[key]) for key, p in found]
    bits = {"PyTorch's bits are one process's": f"{sum(same)} of {len(same)} parameters"}
    sent = talk[name].sent(1, 1), theirs.recording.sent(1, 2 * number + 1)
    rows.append({"": name} | bits | {"ours": sent[0], "PyTorch's": sent[1]})
draw.table(rows, caption="and bytes that rank 1 sends in the second step")

# %% [markdown]
# The same bits, the same bytes. A schedule of theirs can be read into our lists (`pp.read`, and `pp.read_csv` for their
# CSV files). So let us put theirs through the checker:

# %%
for name in NATIVE:
    printed = theirs[0][name][1]
    lists = pp.read_csv(",".join(map(str, filter(None, printed[rank]))) for rank in range(4))
    try:
        pp.validate(lists)
        ours = pp.SCHEDULES[NATIVE[name]](4, MICRO)
        print(f"{name}: can be run; the same as the course's: {lists == [*map(list, ours)]}")
    except pp.WrongSchedule as refused:
        print(f"{name}: {refused}")

# %% [markdown]
# In PyTorch 2.13, what `Schedule1F1B` *prints* for the last rank is not what it does: it prints the forwards 3F1 to 3F8
# in place of 3F0 to 3F7 (hence nine micro-batches), and runs the right list, as the parameters above show, with its own
# code. So believe a recording, and not a printed schedule, not even a library's.

# %% [markdown]
# ### What went wrong in the wild
#
# *Symptom*: nothing fails, and with accumulation "the accumulated gradient is an exponential moving average, rather
# than a sum" ([torchtitan#1733](https://github.com/pytorch/torchtitan/issues/1733), September 2025). Who divides by the
# number of micro-batches, and when? The course's executor divides each loss before backward. PyTorch by default divides
# the *gradients* at the end of each step, all that is in `.grad`. If a step accumulates several batches, the first
# batch's gradients are divided again by the second, and so on. Two equal batches, four micro-batches each:


# %%
def both_sides(stages, model):
    """Two pipelines of the same stages, as functions of a batch; PyTorch's takes only what the
    rank's stage reads."""
    ours = pp.Pipeline(stages, pp.one_f_one_b(2, 4), model.loss)
    theirs, rank = native.pp(stages, "1f1b", 4, model.loss), dist.get_rank()
    given = {0: lambda x, y: theirs.step(x), 1: lambda x, y: theirs.step(target=y)}
    return {"ours": ours.forward_backward, "PyTorch's default": given[rank]}


def accumulate(side):
    """This rank's gradients after two batches, as multiples of those after one."""
    model, norms = GPT(CONFIG), []
    stages = pp.cut(model, 2)
    run_batch = both_sides(stages, model)[side]
    for _ in range(2):
        run_batch(*loader[0])
        norms.append(torch.stack([p.grad.norm() for p in stages[dist.get_rank()].parameters()]))
    return norms[1] / norms[0]


# %%
rows = []
for side in ("ours", "PyTorch's default"):
    times = torch.cat(on_cpu(accumulate, side, ranks=2))
    least, most = (round(each.item(), 3) for each in times.aminmax())
    rows.append({"": side, "least": least, "most": most, "due": 2.0})
draw.table(rows, caption="gradients after two batches, as multiples of those after one")

# %% [markdown]
# The first batch leaves a mean gradient of 1. The second adds four micro-batches of 1 each, and all of it is divided by
# 4: (1 + 4)/4 = 1.25, where 2 is due. The repair is to do as the course does: `scale_grads=False`, and divide the loss.
#
# ## Why, and why not
#
# **Why**: it sends little, and only to a neighbour. So it is what goes *between* nodes, on the slowest wire: last to be
# added, outermost on a mesh. P, G and S are divided by the number of ranks.
#
# **Why not**: the bubble, which is small only with many micro-batches, and so with a large batch; and schedules, stages
# and messages to get right. There can hardly be more stages than layers. And the slowest stage sets the pace for all.

# %% [markdown]
# ### A way out
#
# Here is PyTorch's `PipelineStage` in an ordinary script, with nothing of the course but the data and the model. It is
# [scripts/pp.py](../scripts/pp.py). From the root of the repository, run `torchrun --nproc-per-node 2 scripts/pp.py`:
#
# ```python
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed.pipelining import PipelineStage, Schedule1F1B
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# dist.init_process_group()
# rank, ranks = dist.get_rank(), dist.get_world_size()
# device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# if device.type == "cuda":
#     device = torch.device("cuda", rank % torch.cuda.device_count())
#     torch.cuda.set_device(device)
#
# config = PRESETS["small"]  # four layers, so four ranks at most
# model = GPT(config)
# layers, first, last = list(model.layers.values()), rank == 0, rank == ranks - 1
# mine = layers[len(layers) * rank // ranks : len(layers) * (rank + 1) // ranks]
# stage = nn.Sequential(*[model.embed] * first, *mine, *[model.norm, model.head] * last).to(device)
#
# schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, device), n_microbatches=8, loss_fn=model.loss)
# optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
# batches = Batches(corpus().tokens, 16, config.context)
# for step in range(10):
#     x, y = (part.to(device) for part in batches[step])
#     losses = []  # of the micro-batches; only the last stage has them
#     schedule.step(*[x] * first, **({"target": y, "losses": losses} if last else {}))
#
#     # The norm of all gradients: each rank knows its own stage's.
#     norm = torch.nn.utils.get_total_norm([p.grad for p in stage.parameters()]).square()
#     dist.all_reduce(norm)
#     torch.nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, norm.sqrt())
#     optimizer.step()
#     optimizer.zero_grad()
#
#     loss = torch.stack(losses).mean() if last else torch.zeros((), device=device)
#     dist.broadcast(loss, ranks - 1)
#     if first:
#         print(f"step {step}: loss {loss.item():.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```

# %% [markdown]
# ## Say it back
#
# From memory: the bubble of each schedule, as a fraction of the ideal time, if F, I and W take equally
# long and the number of micro-batches is a multiple of the number of ranks.


# %%
def bubbles(ranks, microbatches, stages_per_rank):
    """{"GPipe": …, "1F1B": …, "interleaved": …, "zero bubble": …}; with "zero bubble", ZB-H1 is
    meant."""
    ### BEGIN SOLUTION
    bubble = (ranks - 1) / microbatches
    others = {"interleaved": bubble / stages_per_rank, "zero bubble": bubble / 3}
    return {"GPipe": bubble, "1F1B": bubble} | others
    ### END SOLUTION


check.bubbles(bubbles)

# %% [markdown]
# Answer each aloud before you unfold it.
#
# <details><summary>What does 1F1B make smaller, and what not? What makes the bubble smaller?</summary>
#
# It makes smaller what is held: min(m, p − r) micro-batches' activations on rank r, where GPipe holds m. The bubble is
# (p − 1)/m with both. It gets smaller with more micro-batches, for which 1F1B makes room; with more stages per rank;
# and with a backward that is split, since the weights' gradients can wait and fill it.
# </details>
#
# <details><summary>Two ranks wait for each other for ever. How can that be seen in the lists, before anything
# runs?</summary>
#
# Follow what each instruction needs, and what stands before it on its rank: if this leads back to where you began, the
# instruction would have to happen before itself, and no order of messages can help. With lists that are right, ranks
# can still block each other by the order in which they send and receive, so all messages get one order.
# </details>
#
# <details><summary>The loss of a pipeline is a little different from that of one process. What do you look at
# first?</summary>
#
# At the gradients, compared with those of one process: AdamW hides a constant factor from the losses. If all gradients
# are off by the same factor, who divides by the number of micro-batches: nobody, two places, or each accumulated batch
# once more? And does every parameter have a gradient at all?
# </details>
#
# For p ranks, m micro-batches of M tokens, v stages per rank, D numbers per token of b bytes, F = I = W and B = 2 F:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | bubble: GPipe, 1F1B | (p − 1)/m | exactly, simulated | the same bits; 1F1B prints another list |
# | interleaved | (p − 1)/(v m) | exactly | the same list |
# | zero bubble (ZB-H1) | (p − 1)/(3 m) | exactly | the same list |
# | ZB-V, one step by itself | (p − 1)/(6 m) | exactly | not run here |
# | activations alive on rank r | GPipe m, 1F1B min(m, p − r) | as measured | not measured here |
# | sent by an inner rank | 2 m M D b for each of its stages | exactly | exactly |
# | numbers | one process's | the same bits | the same bits |

# %% [markdown]
# ## Beat it: the shortest schedule under a limit of memory (30 minutes)
#
# Here it is open. Eight stages, eight micro-batches, four ranks, and a limit of activations alive on each. Any stage
# may be on any rank: it is on the one in whose list it stands. Backwards may be whole or split. In five cases stages
# and messages take different times: print `costs` and `most` in your function to see them. Your lists are simulated,
# and those of the first case are run for real.
#
# **The bound.** Somebody computes at least a quarter of all there is; and all micro-batches of a stage are computed by
# one rank. No list takes less than the longer of the two: 100 points, and the score is the mean of the five. Zero
# bubble (ZB-H1), with two stages per rank that count as one, keeps every limit, and scores 74.2. How close one can come
# is open: the search further down takes one stage per rank. A score is 100 × bound / time.


# %%
def shortest(ranks, microbatches, costs, most):
    """The lists of four ranks for eight stages, each on the rank that you choose.

    costs: what F, B, I and W take, by stage, and `send`, what a message takes to another rank.
    most: activations alive on a rank at any time, as pp.alive counts them: one for each
    micro-batch in each stage.  pp.simulate(lists, **costs).time is judged.
    You may search, for up to ten seconds in each of the five cases.
    """
    ### BEGIN SOLUTION
    lists = [schedule(ranks, microbatches) for schedule in (pp.zbv, pp.dualpipev)]
    fitting = [each for each in lists if max(map(max, pp.alive(each))) <= most]
    return min(fitting, key=lambda each: pp.simulate(each, **costs).time)
    ### END SOLUTION


beat.short_schedule(shortest)

# %% [markdown]
# The course takes the quicker of two lists that were made for other costs. A list can also be grown: let the rank that
# could begin first take, of all that it could do, what others wait for.
#
# Here the notebook ends. **What follows is optional**: pipelines beside the other strategies, the search for a
# quicker list, two traps, and the slowest stage. Then comes what to read, and what is next.
#
# ## Optional: which one for what?
#
# One model, one batch of eight sequences, four ranks, and the four strategies of the course so far. DDP and FSDP give
# each rank two of the sequences, TP gives every rank all eight, and PP (1F1B) sends them through one by one. All is
# measured; each number is the largest of any rank:

# %%
ROWS = strategies.ROWS
WAYS = {"DDP": ROWS["ddp-bucketed"], "FSDP": ROWS["fsdp"]}
WAYS["TP"] = replace(ROWS["tp"], axes=lambda asked: {"tp": asked})


def as_row(strategy):
    parts = strategy.parts(4)
    cut = [list(zip(*(each.chunk(parts) for each in loader[n]), strict=True)) for n in range(2)]
    batches = [list(steps) for steps in zip(*cut, strict=True)]
    strategies.train(strategy, partial(GPT, CONFIG), batches)


for name, strategy in WAYS.items():
    talk[name] = on_cpu(as_row, strategy, ranks=4, record="communication").recording
    watched[name] = on_cpu(as_row, strategy, ranks=4, record="memory").recording

# %%
PAPER = {"DDP": (12, 24), "FSDP": (12, 24), "TP": (3, 24)}  # 4 F and 4 B are 12
PAPER["PP"] = tuple(pp.simulate(one_f_one_b(4, m)).time for m in (1, MICRO))
talk["PP"], watched["PP"] = talk["1F1B"], watched["1F1B"]


def fullest(name):
    """The most that any rank sends, in how many calls; and the most that any rank holds, by
    kind, in MB."""
    counts = (talk[name].counts(rank, 1) for rank in range(4))
    sent = {"sent, kB": max(talk[name].sent(rank, 1) for rank in range(4)) // 1000}
    calls = {"calls": max(count.total() - count["recv"] for count in counts)}
    steady = [watched[name].steady(rank) for rank in range(4)]
    return sent | calls | {kind: max(each[kind] for each in steady) / 1e6 for kind in "PGSA"}


# %%
rows = []
for name, (one, all_of_them) in PAPER.items():
    told = fullest(name)
    told |= {kind: f"{told[kind]:.2g}" for kind in "PGSA"}
    rows.append({"": name, **told, "time of 1": one, "of 8": all_of_them})
draw.table(rows, caption="P, G, S, A in MB; on paper, the time of 1 sequence and of 8")

# %% [markdown]
# The last two columns are times on paper: a stage's F takes 1 and its B 2, the model has four stages' worth of layers,
# and messages take no time. So a sequence takes 12. DDP and FSDP give two to each rank, which takes 24 (the job takes
# both at once, so its A is that of two sequences); TP does a quarter of each sequence on each rank, so one takes 3 and
# eight take 24.
#
# PP sends the least by far, and needs no collective. It divides P, G and S almost as evenly as FSDP and TP do, and no
# rank ever holds a layer that is not its own. Its A is the smallest here only because its micro-batches are single
# sequences. More ranks do not make it smaller: each then has fewer layers, but the first one holds as many more
# micro-batches. Here it holds four of them, each for a quarter of the layers: as much as one device would hold for one
# sequence.
#
# **Latency** is how long one sequence takes, **throughput** how many are done per unit of time. On paper, only TP makes
# one sequence quicker. A pipeline passes it from rank to rank, while the others are idle; it earns its keep when many
# are under way. That is why a model that answers one person is split by TP, and a model that answers thousands may be
# split by layers.
#
# ## Optional: can you beat 1F1B?
#
# Four ranks, eight micro-batches, and no more activations alive than 1F1B has: 4, 3, 2 and 1. Is there a list that is
# quicker? Try it: change `mine`, and draw it. (A list that cannot be run is refused with a picture.)

# %%
mine = [[*order] for order in one_f_one_b(4, MICRO)]
mine[0][9], mine[0][10] = mine[0][10], mine[0][9]  # say, a backward earlier, a forward later
print(f"time {pp.simulate(mine).time:g}, 1F1B's is {pp.simulate(one_f_one_b(4, MICRO)).time:g}")
print(f"alive at most: {[max(alive) for alive in pp.alive(mine)]}")

# %% [markdown]
# There are more lists than anybody can try, but not all of them need be tried.
# [labs/pp/search.py](../labs/pp/search.py) cuts off every beginning that cannot end in time (*branch and bound*), so
# that what is left at the end is the quickest of all. Here it is without and with a split backward, under three memory
# limits:

# %%
from labs.pp.search import search

rows = []
for split in (False, True):
    for limits in ([4, 3, 2, 1], [4] * 4, [8] * 4):
        best = search(4, MICRO, limits, split)
        row = {"backward": "split" if split else "whole"}
        row |= {
            "alive at most": " ".join(map(str, limits)),
            "time": best.simulation.time,
            "bubble": f"{best.simulation.bubble:.1%}",
        }
        rows.append(row | {"none is quicker": best.proven})
draw.table(rows)

# %% [markdown]
# With one stage on each rank, nothing beats 1F1B as long as a backward is one piece, not even with all the memory there
# is. Split, it can be beaten with the same memory. With four micro-batches alive on each rank ZB-H1 is the best there
# is, and more memory brings nothing: the last rank cannot start before time 3, and has 24 to compute. (The paper calls
# ZB-V, and with twice the memory ZB-H2, *zero* bubble. It counts each rank's time from its own first F to its own last
# W, since its next step can begin right there, if the optimizer waits for nobody. To clip the gradients, which takes
# every rank's norm, it must wait.) What the search has found is a schedule like any other, so it can be run:

# %%
found = search(4, MICRO, [4, 3, 2, 1], split=True).schedule
try_out(found)
draw.schedule(found)

# %% [markdown]
# ## Optional: a second trap
#
# Here is a second trap, of which we have found no report. FSDP may shard a stage's parameters over
# data-parallel ranks, and drop them after forward (notebook 06). Under a schedule that splits the backward, PyTorch
# 2.13 then looks for the gradients of weights that are not there any more:

# %%
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from labs.mesh import Mesh

KINDS = {"1F1B": schedules.ScheduleInterleaved1F1B}
KINDS["zero bubble"] = schedules.ScheduleInterleavedZeroBubble


# %%
def sharded_stages(name, reshard):
    """How many gradients of this rank's stage are there, and how many are not."""
    mesh, model = native.device_mesh(Mesh((2, 2), ("pp", "dp"))), GPT(CONFIG)
    (x, y), number = loader[0], mesh.get_local_rank("pp")
    stage = pp.cut(model, 2)[number]
    for module in (*stage.layers.values(), stage):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
    part = PipelineStage(stage, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    pipeline = KINDS[name]([part], 4, loss_fn=model.loss)
    pipeline.step(*[x] * (number == 0), **({"target": y} if number == 1 else {}))
    return Counter("there" if p.grad is not None else "missing" for p in stage.parameters())


# %%
rows = []
for name, reshard in (("1F1B", True), ("zero bubble", False), ("zero bubble", True)):
    stages = on_cpu(sharded_stages, name, reshard, ranks=4)
    found = stages[0] + stages[2]  # ranks 1 and 3 have the same ones
    counts = {"gradients": found["there"], "missing": found["missing"]}
    rows.append({"": name, "reshard_after_forward": reshard, **counts})
draw.table(rows)

# %% [markdown]
# No error, no warning; the whole second stage never learns. (The first is spared: nobody needs its input's gradient, so
# PyTorch does its backward in one piece.) With a schedule like this, give `reshard_after_forward=False`. (The course's
# `native.pp` refuses such stages.)
#
# ## Optional: would it hang on NCCL?
#
# All jobs here ran on gloo, and GPUs talk over NCCL, where an order of messages that works on gloo may hang. There, a
# send waits until the other side receives (unless it is small), and what two ranks tell each other goes one by one, in
# the order in which each of them issued it. It takes no GPU to see this coming: the order is in the recording. Here are
# the messages of a schedule, each sent as soon as it is made, and asked for when it is needed:


# %%
def ends(x):
    """Who makes what an instruction needs, and who needs what it makes; none at the ends."""
    return (x.stage - 1, x.stage + 1) if isinstance(x, F) else (x.stage + 1, x.stage - 1)


def one_by_one(lists):
    """The messages alone: nothing is computed."""
    ranks, leaving = range(len(lists)), []
    for source, to in map(ends, lists[dist.get_rank()]):
        if source in ranks:
            dist.recv(torch.empty(8), source)
        leaving += [dist.isend(torch.ones(8), to)] if to in ranks else []
    for work in leaving:
        work.wait()


# %%
from labs.kit.dry import would_hang


def verdict_of(job, schedule):
    ran = on_cpu(job, schedule(4, MICRO), ranks=4, record="communication")
    return would_hang(ran.recording)


verdict = verdict_of(one_by_one, pp.one_f_one_b)
print("on gloo it went through; on NCCL:", verdict.name)
verdict

# %% [markdown]
# Rank 2 has an activation for rank 3, and rank 3 a gradient for rank 2. Both send, and neither receives. The repair:
# what a rank has made, and the question for what it needs next, leave in *one* call, a batch, whose messages do not
# wait for each other. (Megatron's `send_forward_recv_backward` is such a batch. The course's executor needs none: it
# gives the messages of all ranks one order, in which no two ranks ever send to each other at once.)


# %%
def batched(lists):
    ranks, nobody = range(len(lists)), (None, None)
    order = [ends(x) for x in lists[dist.get_rank()]]
    for (_, to), (source, _) in zip([nobody, *order], [*order, nobody], strict=True):
        both = ((dist.isend, to), (dist.irecv, source))
        messages = [dist.P2POp(op, torch.ones(8), peer) for op, peer in both if peer in ranks]
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()


verdicts = {"1F1B, one by one": verdict, "1F1B, batched": verdict_of(batched, pp.one_f_one_b)}
verdicts |= {"GPipe, one by one": verdict_of(one_by_one, pp.gpipe)}
verdicts["1F1B, the course's"] = would_hang(talk["1F1B"])
verdicts["PyTorch's, all four"] = would_hang(theirs.recording)
draw.table([{"": name, "on NCCL": each.name} for name, each in verdicts.items()])

# %% [markdown]
# With GPipe no two ranks ever have something for each other at the same time. The rules that were asked about stand,
# each with its source, at the head of [labs/kit/nccl/verdict.py](../labs/kit/nccl/verdict.py), and so does what no
# recording can tell.

# %% [markdown]
# ## Optional: the slowest stage
#
# Look at Llama 3 with 16 ranks: with eight layers each, the last one would have the head as well, which has as many
# parameters as two thirds of a layer. That model has 126 layers and not 128: its authors took one away from the first
# rank, which holds most activations and the embedding, and one from the last, which computes the head and the loss
# (arXiv 2407.21783, section 3.3.2; their schedule is interleaved). What would that gain with plain 1F1B and 32
# micro-batches? (*Idle* is the share of the whole step, not of the ideal time as the bubble is.)

# %%
_, layer, *_, head = (sum(part.sizes) for part in cost.gpt_layers(llama))
rows = []
cuts = {"8 in each stage": 8, "7 in the first and the last, 8 in the others": 7}
for name, outer in cuts.items():
    layers = [outer, *[8] * 14, outer]
    F_costs = [*layers[:-1], layers[-1] + head / layer]
    B_costs = [2 * each for each in F_costs]
    time_taken = pp.simulate(one_f_one_b(16, 32), F=F_costs, B=B_costs).time
    idle = 1 - 3 * 32 * sum(F_costs) / (16 * time_taken)
    slowest = round(max(F_costs), 2)
    rows.append({"layers": name, "slowest stage, in layers": slowest, "idle": f"{idle:.1%}"})
draw.table(rows)

# %% [markdown]
# **Read on**: [labs/pp/instructions.py](../labs/pp/instructions.py), [labs/pp/checker.py](../labs/pp/checker.py),
# [labs/pp/simulation.py](../labs/pp/simulation.py), [labs/pp/schedules.py](../labs/pp/schedules.py),
# [labs/pp/messages.py](../labs/pp/messages.py) and [labs/pp/executor.py](../labs/pp/executor.py), in this order.
# Narayanan et al., 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (arXiv
# 2104.04473). Qi et al., 2023, *Zero Bubble Pipeline Parallelism* (arXiv 2401.10241). DeepSeek-AI, 2024,
# *DeepSeek-V3 Technical Report* (arXiv 2412.19437), section 3.2.1.
#
# **Next.** Each way to split has its limit: data parallelism the batch, tensor parallelism the node, and pipelines the
# bubble. What remains is to use all three at once, on one mesh: [Three dimensions](11_three_dimensions.ipynb).
#
# A clean copy of this notebook: `git restore notebooks/10_pipeline.ipynb`, then *File > Reload Notebook from Disk*.
