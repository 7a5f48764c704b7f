# %% [markdown]
# # Pipeline parallelism: some of the layers on each rank
#
# *A model needs sixteen machines, and the wire between them is slow. How few bytes can cross this wire?*
#
# You need: [Collectives](02_collectives.ipynb), and [Memory](07_memory.ipynb), which explains activations.
# **Minutes**, by estimate: 45 without exercises, 85 with them, 40 more for optional parts, 30 more for the challenge.
# A good place for a break is before exercise 3. For the optional part you also need [Tensor
# parallelism](09_tensor_parallel.ipynb). Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it, and skip questions on notebooks that you have not read.

# %%
from labs.kit import recall

recall.ask("10")

# %% [markdown]
# ## Question
#
# Tensor parallelism makes four all-reduces in each layer, so it is used inside a node, where the links are fast. A node
# has eight GPUs. How can we train a model that is too large for eight GPUs?

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
# The last line shows the idea of **pipeline parallelism**, PP: cut the model *between* layers, and not inside them.
# Each rank holds some consecutive layers, which are called a **stage**. In forward, only the activations x at a cut are
# sent to the next stage; in backward, only their gradient is sent back. Llama 3 405B was trained with 16 stages, and
# with tensor parallelism inside a node (Llama Team, 2024, arXiv 2407.21783, table 4).
#
# A *schedule* is a list of instructions for each rank. You will write three schedules, and run them.
#
# ## Picture
#
# ![Above: eight layers in four stages, one on each rank. Each stage sends x to the next stage, and gets its gradient
# back. Below, time runs from left to right. With the whole batch at once, only one rank works at any time. With the
# batch in four micro-batches, rank 1 can begin as soon as rank 0 has finished the first of them, and the ranks work
# side by side.](../images/pp_flow.svg)
#
# The numbers in the picture count **micro-batches**: parts of a batch that go through the model one after another. The
# empty places are times at which a rank waits. Together they are called the **bubble**.
#
# ## Predict
#
# Predict two numbers, which are computed below. Four ranks have one stage each, a batch is cut into eight
# micro-batches, and a backward takes twice as long as a forward. The ranks first do all forwards, and then all
# backwards. By what share does this take longer than if all ranks were busy all the time? A share of 0.5 means 1.5
# times as long.
#
# With this order the first rank holds the activations of all eight micro-batches at once. There is another order of the
# same work that takes the same time. With that order, how many micro-batches' activations must the first rank hold at
# once?

# %%
guess_bubble = 0.375  # your number
guess_alive = 4  # your number

# %% [markdown]
# ## Build: naive model parallelism
#
# The simplest way is naive model parallelism, which needs one process and no messages. Put each stage on its own
# device, and let forward copy x from device to device; autograd copies the gradient back. The core of the code is two
# lines of [labs/pp/one_process.py](../labs/pp/one_process.py):
#
#     for stage, device in zip(self.stages, self.devices):
#         x = stage(x.to(device))
#
# On a machine with four GPUs, this uses all four. Otherwise all four devices are the CPU:

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
# `pp.cut`, in [labs/pp/stages.py](../labs/pp/stages.py), cuts a model between its layers. Stage 0 also has the
# embedding, and the last stage also has the norm and the head. The next cell draws the naive schedule in time: forward
# goes from the first stage to the last, backward goes back to the first, and then the next micro-batch begins:

# %%
draw.schedule(naive(4, 2))

# %% [markdown]
# Only one of the four devices works at a time. The step takes four times as long as it would if all devices were always
# busy, so the bubble, as a fraction of this ideal time, is 3. But naive model parallelism has two advantages. It can
# train a model that no single device can hold, and it is simple.
#
# ## Build: a schedule is data
#
# The last figure was drawn from a list of instructions. So far there are two kinds of instructions, each for one stage
# and one micro-batch: `F(2, 0)` is stage 2's forward of micro-batch 0, and prints as `2F0`, as in PyTorch; `B(2, 0)` is
# the backward. An F needs the F of the previous stage, for the same micro-batch. A B needs the F of its own stage and,
# except on the last stage, the B of the next stage.
#
# A schedule is one list for each rank. `pp.simulate` computes its time from the times of the instructions that you
# pass; the defaults are F=1 and B=2. `pp.validate` checks whether a schedule can be run at all. The next cell shows two
# schedules that cannot:

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
# The first schedule has a simple mistake. The second is worse: each list looks right by itself, but real processes
# would wait for each other for ever. The checker finds this without running anything. It asks Lamport's question
# (1978): must an instruction *happen before* itself?
#
# ## Build: GPipe
#
# In the naive schedule a rank waits during every micro-batch. But rank 0 can begin its forward of the second
# micro-batch as soon as it has finished the first. Then a rank waits only until the first micro-batch arrives, and
# until the first gradient comes back. With more micro-batches, the ranks do more work for the same waiting time. This
# is the idea of GPipe (Huang et al., 2019, arXiv 1811.06965): first all forwards, then all backwards.
#
# ### Exercise 1: GPipe (10 minutes)
#
# Rank r has stage r. Do the forwards in the order of the micro-batches, and the backwards in the same order: then
# gradients are added up in the same order as in one process. The paper draws the backwards in reverse order; the bubble
# is the same. The check accepts only the order of the micro-batches, and tries 1 to 8 ranks and any number of
# micro-batches. Below the check, a figure shows your schedule, or its part before the first wrong instruction. In
# exercises 1 to 3, the figure shows the course's schedule until you have written yours: so write first, then look.


# %%
def gpipe(ranks, microbatches):
    """Return [the instructions of rank 0, those of rank 1, ...]."""
    ### BEGIN SOLUTION
    numbers = range(microbatches)
    order = [(kind, m) for kind in (F, B) for m in numbers]
    return [[kind(rank, m) for kind, m in order] for rank in range(ranks)]
    ### END SOLUTION


answer = check.gpipe(gpipe)
answer


# %%
def attempt(mine, courses, *sizes):
    """Return your lists, or the course's while yours is a stub."""
    try:
        return mine(*sizes)
    except NotImplementedError:
        return courses(*sizes)


picture = draw.schedule(attempt(gpipe, pp.gpipe, 4, 8))
gpipe = gpipe if answer.ok else pp.gpipe  # from here on yours if it passed, else the course's
picture

# %% [markdown]
# The upper part of the figure shows each rank's instructions in time. The lower part shows how many micro-batches'
# activations each rank holds. The next figure shows the same moment by moment: press play, or move the slider:

# %%
play.microbatches(gpipe(4, 4))

# %%
bubble = pp.simulate(gpipe(4, 8)).bubble
reason = "It waits for 3 of each, and computes 8 of each."
check.predict("How much longer?", guess_bubble, bubble, reason=reason)

# %% [markdown]
# With p ranks, each rank waits for the time of p − 1 forwards and p − 1 backwards, one for each *other* rank. In m
# micro-batches it computes m forwards and m backwards. So the bubble is (p − 1)/m of the ideal time, for any times of a
# forward and a backward:

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
# Some papers divide the same bubble by the whole time instead, which gives (p − 1)/(m + p − 1). Why not use a thousand
# micro-batches? The number of micro-batches is limited by the number of sequences in a batch, and a GPU is less
# efficient if it has less work in each micro-batch.
#
# Now run your schedule in real processes. `pp.Pipeline`, in [labs/pp/executor.py](../labs/pp/executor.py), executes
# lists: it holds this rank's stages, runs the instructions, and sends and receives between the ranks. In exercise 4 you
# write its core. The reference is one process that computes the same eight micro-batches one after another.

# %%
from labs.kit.train import strategies

MICRO, on_cpu = 8, partial(run, device="cpu")
adamw = partial(torch.optim.AdamW, **strategies.ADAMW)


def pipeline_of(lists):
    """Return this rank's part of the model; the pipeline keeps nothing of the other stages."""
    model = GPT(CONFIG)
    return pp.Pipeline(pp.cut(model, stages_of(lists)), lists, model.loss)


# %%
def train(lists):
    """Take two steps, and return this rank's parameters after them, by name."""
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
    """Train on 4 ranks, and compare all parameters with those of one process. Return the
    recording of the messages."""
    trained = on_cpu(train, lists, ranks=4, record="communication")
    found = {name: p for parameters in trained for name, p in parameters.items()}
    assert found.keys() == expected.keys()
    same = sum(torch.equal(p, expected[name]) for name, p in found.items())
    bits = f"{same} of {len(found)} parameters have the bits of one process"
    print(f"{bits}, after 2 steps on 4 ranks")
    return trained.recording


talk = {"GPipe": try_out(gpipe(4, MICRO))}

# %% [markdown]
# The parameters are the same bit for bit, and not only within rounding. Each parameter is on one rank, which adds up
# the gradients of the micro-batches in the same order as one process. Dividing each loss by 8 gives the same bits as
# dividing the gradients by 8 at the end, since 8 is a power of two. The only exception is a weight that two stages
# share, such as a tied embedding: each stage adds up its own part of the gradient, and then the parts are added, which
# is a different order.
#
# Micro-batches are parts of a batch, like the ranks' parts in notebook 03. So the same problem occurs if they have
# different numbers of targets. What is the loss if seven of the eight sequences have only one target that counts, and
# all their other targets are -100, which means that they are ignored?

# %%
x, masked = loader[0][0], loader[0][1].clone()
masked[1:, 1:] = -100


def piped():
    """Return the batch's mean loss, on the last rank."""
    losses = pipeline_of(gpipe(4, MICRO)).forward_backward(x, masked)
    return sum(loss.item() for loss in losses) / MICRO


parts = zip(x.split(1), masked.split(1), strict=True)
means, due = sum(whole(*part).item() for part in parts) / MICRO, whole(x, masked).item()
for name, found in {"mean of means": means, "pipeline": on_cpu(piped, ranks=4)[-1]}.items():
    print(f"{name:13}: {'right' if abs(found - due) < 1e-4 else 'another loss'}")

# %% [markdown]
# The mean of the micro-batches' means is wrong here, too. When torchtitan fixed this bug
# ([#1842](https://github.com/pytorch/torchtitan/issues/1842), fixed in
# [#2206](https://github.com/pytorch/torchtitan/pull/2206)), it counted the targets over all micro-batches and ranks.
# `pp.Pipeline` adds up losses, and divides by the number of targets that count in its whole batch. If several pipelines
# read parts of a batch, call `forward_backward(x, y, over=n)`. `pp.Pipeline` refuses a loss function that cannot divide
# by such a number.
#
# ## Build: 1F1B
#
# A rank holds the activations of a micro-batch from its F to its B. In the middle of a GPipe step, a rank holds its
# activations of the *whole batch*, no matter into how many micro-batches the batch is cut. And to make m large one
# needs a large batch, which needs still more memory. The paper keeps only the inputs of a stage, and recomputes the
# other activations, as in notebook 07.
#
# But look at rank 3 in the figure. When it has done its forward of micro-batch 0, the last stage is reached, so the
# backward of micro-batch 0 could begin at once, and its activations could be freed. In **1F1B**, "one forward, one
# backward", each rank first does just enough forwards to keep the later ranks busy. Then it alternates between a
# forward and a backward, and at the end it does the remaining backwards:
#
#     rank 3    3F0 3B0 3F1 3B1 3F2 3B2 ...    begins to alternate at once
#     rank 2    2F0 2F1 2B0 2F2 2B1 2F3 ...    one forward first, for rank 3
#
# This is the version of Narayanan et al., 2021 (arXiv 2104.04473). Their first version, of 2019, never waits between
# batches, so a rank may compute with weights that are out of date.
#
# ### Exercise 2: 1F1B (15 minutes)
#
# The forwards that a rank does before it begins to alternate are its *warm-up*: none on rank 3, and one on rank 2.
# After the warm-up, the first pair of F and B begins with one more F. Consider small numbers of micro-batches, too:
# with m < p, a rank has only m forwards. PyTorch had overlooked this: with fewer micro-batches than ranks, a training
# hung ([torchtitan#775](https://github.com/pytorch/torchtitan/issues/775)). PyTorch refuses this case now; your
# schedule should run. The check requires the bubble of GPipe, and at most the activations of min(m, p − r)
# micro-batches on rank r.


# %%
def one_f_one_b(ranks, microbatches):
    """Return [the instructions of rank 0, those of rank 1, ...]; microbatches may be fewer than
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
# The bubble is as large as that of GPipe, although some texts claim that 1F1B makes it smaller. But the ranks *hold*
# less: rank r holds at most p − r micro-batches, no matter how large the batch is. So you can use more micro-batches,
# and these make the bubble smaller. The next cells run 1F1B in real processes, and compare the parameters and the
# memory:

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
# In the bubble a rank waits for the *stages* of other ranks. So shorter stages make a smaller bubble. Cut the model
# into more stages, and give each rank v stages that do *not* follow one another: rank r has stages r, r + p, r + 2p, …
# (Narayanan et al., 2021, arXiv 2104.04473, section 2.2). This schedule is called *interleaved*. A micro-batch passes
# each rank v times, and each stage takes 1/v of the time.
#
# The micro-batches are divided into groups of p. A rank does the p forwards of a group at its first stage, then those
# at its second stage, and so on, and then begins the next group. Backward takes a rank's stages in reverse order, and
# the micro-batches in the same order as forward. As in 1F1B, a rank has a warm-up, then alternates between forward and
# backward, and then does the remaining backwards.
#
# How many forwards must the first rank's warm-up have, if messages take no time? Think of micro-batch 0, which passes
# all ranks and then begins again at the first rank, and count on paper. The next figure shows Megatron's order, which
# has a longer warm-up:

# %%
draw.schedule(pp.interleaved(4, MICRO, 2), F=0.5, B=1)  # half of the layers in each stage

# %%
talk["interleaved"] = try_out(pp.interleaved(4, MICRO, 2))

# %% [markdown]
# The bubble is (p − 1)/(v m). In the figure the first rank does eleven forwards before its first backward: ten are its
# warm-up, and one belongs to the first pair. Fewer forwards would be enough. Before rank r begins with the last of its
# stages, a whole group has passed its other stages, which takes (v − 1) p forwards. At that time, micro-batch 0 still
# has to pass p − 1 − r ranks. So a warm-up of (v − 1) p + (p − 1 − r) forwards is enough if messages take no time; on
# the first rank these are seven. Megatron's schedule has p − 1 − r forwards more, and people have asked its authors why
# ([Megatron-LM#675](https://github.com/NVIDIA/Megatron-LM/issues/675)). Our explanation is that messages take time, and
# that a rank does these additional forwards while messages are in flight:


# %%
def with_warmup(times, ranks=4, v=2):
    """Return the course's interleaved schedule with a warm-up of (v - 1) p + times (p - 1 -
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
# With the longer warm-up, the interleaved schedule loses no more time to messages than 1F1B. But it sends v times as
# many messages. The table does not show this cost, since the simulation lets any number of messages travel at once. And
# with more stages of fewer layers it is harder to make all stages equally long.
#
# ## Build: split the backward
#
# There is another way to make the bubble smaller. A backward computes two things: the gradient of the stage's *input*,
# for which the previous stage waits, and the gradients of the stage's *weights*, which are not needed before the
# optimizer's step. So split B into **I**, for the input, and **W**, for the weights, and do W when the rank would
# otherwise wait (Qi et al., 2023, arXiv 2401.10241, "Zero Bubble"; the paper writes B where we write I). The next cell
# splits the backward of a linear layer:

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
# F, I and W are one matrix product each, so they take about equally long: F = I = W = 1, and B = 2. In a whole stage I
# takes a little longer than W, since attention between tokens has no weights.
# [labs/pp/split_backward.py](../labs/pp/split_backward.py) splits the backward with autograd, one product at a time. In
# a schedule, W needs the I of the same stage and micro-batch, and no other instruction needs W. From I to W a rank
# still keeps the activations that W needs. The checker counts all activations as alive until W, although some can be
# freed after I.
#
# ### Exercise 3 (optional): fill the bubble (15 minutes)
#
# Write 1F1B with I in place of B, and put the W's where they cost no time. The paper calls this schedule ZB-H1. In the
# course's code it is `pp.zb1p`, and in its tables "zero bubble". Its bubble is a third of that of 1F1B, and no rank
# holds more than min(m, p) micro-batches, as many as the first rank holds in 1F1B. Where would a rank have to wait? The
# first rank waits between two backwards, so it has time for a W right after each I. The last rank never waits between
# backwards, but all other ranks wait for its I's. So the last rank should do its I's as early as possible, and its W's
# later. How many W's can a rank delay, if at most min(m, p) micro-batches may be alive on it? The check tries many
# numbers of ranks and micro-batches.


# %%
def zero_bubble(ranks, microbatches):
    """Return [the instructions of rank 0, those of rank 1, ...], with F, I and W."""
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
# Rank r delays r of its W's, and does them at the end, when it would otherwise wait. Can a schedule have no bubble at
# all? It can come close. Give each rank two stages, arranged as a **V**: rank r has stages r and 2p − 1 − r, so the
# first rank has the first stage *and* the last stage. A micro-batch goes from the first rank to the last rank and back
# again, and its loss is computed on the rank where it began:

# %%
talk["ZB-V"] = try_out(pp.zbv(4, MICRO))
draw.schedule(pp.zbv(4, MICRO), F=0.5, I=0.5, W=0.5)

# %% [markdown]
# Once a rank has begun, it works without waiting until it has finished. DeepSeek-V3's DualPipe goes further:
# micro-batches enter at both ends of the pipeline, so that each stage is held twice. It runs an F of one micro-batch
# together with a B of another, so that the messages of one are in flight while the other computes. `pp.dualpipev` is a
# later variant of it on a V. The next table compares all schedules of this notebook. If a rank has two stages, each has
# half of the layers, so the table counts its activations half:

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
# A smaller bubble has its price: the schedule holds more activations, or sends more messages. Now try it yourself. On 4
# ranks, from how many micro-batches on is 1F1B's bubble at most 20 %? Then set the schedule to interleaved. If `a
# message takes` 0.2 of a rank's forward, are four stages on each rank still better than two?

# %%
play.schedule()

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1F1B needs 15 micro-batches or more, since 3/15 is 20 %. Four stages on each rank are no longer better than two. With
# 8 micro-batches and messages that take no time, the bubble is 9.4 % with four stages and 18.8 % with two. If a message
# takes 0.2, the bubble is 34.4 % with four stages and 30.4 % with two, since a rank waits for twice as many messages.
# </details>
#
# ## Measure: schedules in real processes
#
# All of these bubbles were computed by simulation. Do they occur in real processes? Four ranks cannot compute at the
# same time on two cores, and your machine may have no more. So first we use stages that need no core: they compute
# almost nothing and *sleep*, 10 ms for each F, I and W, and 20 ms for each B. If a rank has two stages, they sleep half
# as long. The processes, the messages and the waiting are real. `instructions` records each instruction as a span.

# %%
SECONDS = {F: 0.01, B: 0.02, I: 0.01, W: 0.01}


def compute_and_sleep(compute, v, x):
    compute(x)
    time.sleep(SECONDS[type(x)] / v)


# %%
def sleeps(schedules, times):
    """Run a few steps of each schedule; an instruction computes almost nothing, and then
    sleeps."""
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
# For each rank, the figure shows the simulation with these sleeping times, and below it the recording. The next table
# compares the time of a whole step, for all five schedules:

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
# So the bubbles occur in real processes. Every recorded step is longer than the simulated one: a sleep takes a little
# longer than requested, a message takes some time, and both take longer on a busy machine. On a quiet machine the
# recorded times are close to the simulated times. If yours are not even in the same order, another program keeps the
# machine busy: run the cell again. The next cell runs real layers, which compete for your cores:


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
# The instructions have the same order, but other times. An instruction takes longer while other ranks use the cores.
# The last stage also computes the head and the loss. And a message takes some time even between processes on one
# machine. On GPUs the ranks do not compete for cores, so only the other two causes remain.
#
# ### Exercise 4: obey (15 minutes)
#
# How does a rank execute its list? This is the core of `pp.Pipeline`. You get the rank's instructions, which are only F
# and B, and two functions that deal with ranks and messages:
#
# - `take(F(2, 0))` returns the output of stage 2's forward of micro-batch 0, and waits until it has arrived, on
#   whichever rank it is computed. `take(B(2, 0))` returns the gradient of stage 2's *input*. Take each of them once.
# - `put(F(2, 0), tensor)` passes on a result of this rank, for the rank that needs it. Call it once, before the next
#   instruction begins. The tensor may be sent later, so do not write into it any more. No rank needs the result of the
#   last stage's F, or of the first stage's B, so do not put them.
#
# Two things are easily forgotten. The gradients of the micro-batches add up, so each loss must be divided by the number
# of micro-batches *before* backward. And when the next instruction begins, no tensor of a micro-batch may be alive
# after its B, or 1F1B saves no memory. A variable in your loop keeps its tensor alive: `del` it, or use a function,
# whose variables end when it returns. A tensor from `take` has no autograd history. Call `.requires_grad_()` on it:
# backward then stops at this tensor, and stores its gradient in `.grad`. Put detached tensors, since other ranks cannot
# use your graph.
#
# Write two parts: first F, then B. `torch.autograd.backward(made, gradient)` runs backward from a tensor; for a loss,
# which has no dims, the gradient is None. The list may have its micro-batches in any order, and the backwards in a
# different order from the forwards. Do not change your arguments, except the `.grad` of parameters: the same list and
# stages are used for the next batch. The check runs schedules of all kinds on 1 to 4 ranks, and compares losses and
# gradients with those of one process. It also checks which tensors are alive at each moment and at the end.


# %%
def forward(s, m, stages, loss, xs, ys, take, put):
    """Run F of stage s and micro-batch m; return ((taken, made), value).

    taken: the tensor that went into the stage
    made: the tensor at which its backward begins: the stage's output, or on the last stage the
        loss divided by the number of micro-batches
    value: on the last stage the loss itself (0-dim, detached); otherwise None
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
    """Run one rank's list; return its losses in the order of the micro-batches, or [] without
    the last stage.

    stages: {number: module}, this rank's stages
    loss: loss(output of the last stage, target) returns a 0-dim tensor
    xs, ys: the micro-batches' inputs and targets; xs is empty without the first stage, and ys
        without the last

    The losses are 0-dim tensors, detached, and not divided.
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
# `take` and `put` send messages. Even a schedule that passes the checker may hang because of its messages: a large send
# does not end before the other rank receives, so two ranks that first send to each other wait for ever. So the lists
# must contain the messages, too. `Send(F(0, 2), 1)` sends the result of F(0, 2) to rank 1, and `Receive(F(0, 2), 0)`
# receives it from rank 0. Each of the two waits until the other rank has come to the matching instruction. Messages
# between two ranks are matched only by their order.
#
# `pp.ranks_of(lists)` returns the rank of each stage, so its length is the number of stages. `reader(x, stages)`, from
# `labs.pp.instructions`, returns the instruction of another stage that needs the result of `x`, or None. `needs(x,
# stages)`, in the same file, lists the instructions whose results `x` needs. The check simulates your lists for
# schedules of all kinds, on 1 to 8 ranks, and reports where they hang; then it runs one schedule in real processes.
#
# <details><summary>How to begin</summary>Put each Receive right before the instruction that needs the result, and each
# Send right after the instruction that computes it. Which ranks wait for each other then, in 1F1B?</details>
#
# <details><summary>A hint</summary>Suppose that all messages of all ranks had <i>one</i> order, and that every rank
# sent and received its own messages in this order. Look at the first message that has not ended. Can one of its two
# ranks be waiting for another message?</details>
#
# <details><summary>Another hint</summary>Simulate the lists, one instruction at a time, on any rank that can go on, and
# write each instruction to a new list of its rank. When an instruction computes a result that another rank needs,
# append the Send and the Receive to the new lists of both ranks.</details>


# %%
from labs.pp.instructions import reader
from labs.pp.messages import Receive, Send


def with_messages(lists):
    """Return the lists, with messages between the instructions.

    lists: lists of F and B that can be run; do not change the instructions

    Each result that another rank needs is sent once, after it was computed, and received once,
    before it is used. Nothing else is sent. No rank may wait for ever, with any lists.
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
# [labs/pp/messages.py](../labs/pp/messages.py) computes such an order for the executor, and does two things more. A
# send does not wait, so that ranks compute while a message is in flight. And the lists alone determine when a message
# must have arrived, so that its buffer can be freed.
#
# ## Measure: bytes sent
#
# Across each cut, a rank sends the activations x of each micro-batch forward, and the next rank sends their gradient
# back. Nothing else is sent, and the number of bytes does not depend on the schedule. Let the batch have m
# micro-batches of M tokens, with D numbers per token. A rank sends 2 m M D numbers for each of its stages, but only
# half as many for the model's first or last stage.

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
# A rank sends only to its neighbours, and can compute while the messages are in flight. The optional part compares
# these bytes with those of other strategies.
#
# ## Native
#
# PyTorch has these schedules in `torch.distributed.pipelining`, with a `PipelineStage` for each stage, and a class for
# each schedule. [labs/native/pipelining.py](../labs/native/pipelining.py) combines them:

# %%
NATIVE = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved": "interleaved", "zero bubble": "zb1p"}


def by_torch(name):
    """Take two steps with PyTorch; return this rank's parameters, and the lists as PyTorch
    prints them."""
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
# PyTorch's pipelines give the same bits and send the same bytes. `pp.read` converts a schedule of PyTorch into our
# lists, and `pp.read_csv` reads PyTorch's CSV files. So the checker can check PyTorch's schedules:

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
# In PyTorch 2.13, `Schedule1F1B` *prints* another list for the last rank than the list that it runs. It prints the
# forwards 3F1 to 3F8 in place of 3F0 to 3F7, so the checker counts nine micro-batches. But it runs the right list, as
# the parameters above show. So trust a recording, and not a printed schedule, not even that of a library.

# %% [markdown]
# ### What went wrong in the wild
#
# *Symptom*: nothing fails, and with accumulation "the accumulated gradient is an exponential moving average, rather
# than a sum" ([torchtitan#1733](https://github.com/pytorch/torchtitan/issues/1733), September 2025). *Cause*: the
# division by the number of micro-batches comes at the wrong time. The course's executor divides each loss before
# backward. PyTorch by default divides the *gradients* at the end of each step, and so divides all of `.grad`. If
# several batches are accumulated, the gradients of the first batch are divided again after the second, and so on. The
# next cells accumulate two equal batches with four micro-batches each:


# %%
def both_sides(stages, model):
    """Return two pipelines of the same stages, as functions of a batch; PyTorch's takes only
    the input that the rank's stage reads."""
    ours = pp.Pipeline(stages, pp.one_f_one_b(2, 4), model.loss)
    theirs, rank = native.pp(stages, "1f1b", 4, model.loss), dist.get_rank()
    given = {0: lambda x, y: theirs.step(x), 1: lambda x, y: theirs.step(target=y)}
    return {"ours": ours.forward_backward, "PyTorch's default": given[rank]}


def accumulate(side):
    """Return this rank's gradients after two batches, as multiples of those after one."""
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
# After the first batch the mean gradient is 1. The second batch adds four micro-batches of 1 each, and PyTorch divides
# the sum by 4: (1 + 4)/4 = 1.25, although 2 would be right. To avoid this, do as the course does: pass
# `scale_grads=False`, and divide the loss.
#
# ## Why, and why not
#
# **Why**: a pipeline sends few bytes, and only between neighbours. So use it *between* nodes, on the slowest wire, as
# the outermost axis of a mesh. It divides P, G and S by the number of ranks.
#
# **Why not**: the bubble is small only with many micro-batches, and so only with a large batch. Schedules, stages and
# messages make the program complicated. A model can hardly have more stages than layers. And the slowest stage
# determines the speed of all stages.

# %% [markdown]
# ### Outside Jupyter
#
# The ordinary script [scripts/pp.py](../scripts/pp.py) uses PyTorch's `PipelineStage`; only the data and the model are
# the course's. In the root of the repository, run `torchrun --nproc-per-node 2 scripts/pp.py`:
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
# Write from memory the bubble of each schedule, as a fraction of the ideal time. Assume that F, I and W take equally
# long, and that the number of micro-batches is a multiple of the number of ranks.


# %%
def bubbles(ranks, microbatches, stages_per_rank):
    """Return {"GPipe": …, "1F1B": …, "interleaved": …, "zero bubble": …}; "zero bubble" means
    ZB-H1."""
    ### BEGIN SOLUTION
    bubble = (ranks - 1) / microbatches
    others = {"interleaved": bubble / stages_per_rank, "zero bubble": bubble / 3}
    return {"GPipe": bubble, "1F1B": bubble} | others
    ### END SOLUTION


check.bubbles(bubbles)

# %% [markdown]
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Compared with GPipe, what does 1F1B make smaller, and what not? What makes the bubble
# smaller?</summary>
#
# 1F1B needs less memory: rank r holds the activations of min(m, p − r) micro-batches, and with GPipe it holds those of
# m. The bubble is (p − 1)/m with both. Three things make it smaller: more micro-batches, for which 1F1B has the memory;
# more stages per rank; and a split backward, since a rank can compute the gradients of weights while it would otherwise
# wait.
# </details>
#
# <details><summary>How can you see in the lists of a schedule, before anything runs, that two ranks will wait for each
# other for ever?</summary>
#
# From an instruction, follow the instructions whose results it needs and those that come before it on its rank. If this
# leads back to the instruction where you began, it would have to happen before itself, and the lists cannot be run.
# Even with lists that can be run, two ranks can block each other by the order in which they send and receive. So give
# the messages of all ranks one common order.
# </details>
#
# <details><summary>The loss of a pipeline is a little different from that of one process. What do you check
# first?</summary>
#
# Compare the gradients with those of one process, since AdamW hides a constant factor from the losses. If all gradients
# are wrong by the same factor, look for the division by the number of micro-batches: it may be missing, be done twice,
# or be done again for each accumulated batch. Also check that every parameter has a gradient.
# </details>
#
# The table is for p ranks, m micro-batches of M tokens, v stages per rank, and D numbers of b bytes per token, with F =
# I = W and B = 2 F:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | bubble: GPipe, 1F1B | (p − 1)/m | exactly, simulated | not simulated; 1F1B prints another list |
# | interleaved | (p − 1)/(v m) | exactly | the same list |
# | zero bubble (ZB-H1) | (p − 1)/(3 m) | exactly | the same list |
# | ZB-V, one step by itself | (p − 1)/(6 m) | exactly | not run here |
# | activations alive on rank r | GPipe m, 1F1B min(m, p − r) | as measured | not measured here |
# | sent by an inner rank | 2 m M D b for each of its stages | exactly | exactly |
# | numbers | equal to one process's | the same bits | the same bits |

# %% [markdown]
# ## Beat it: the shortest schedule under a limit of memory (30 minutes)
#
# This challenge is open: write the shortest schedule for eight stages and eight micro-batches on four ranks, with a
# limit for the activations that are alive on each rank. Any stage may be on any rank: a stage is on the rank whose list
# contains its instructions. Backwards may be whole or split. In five cases, stages and messages take different times:
# print `costs` and `most` in your function to see them. The check simulates your lists, and runs those of the first
# case in real processes.
#
# **The bound.** Let c_s be the time of F, I and W of stage s for one micro-batch, and m = 8 the number of
# micro-batches.
#
# time ≥ m · max(Σ c_s / 4, max c_s)
#
# No schedule can beat this: one of the four ranks does at least a quarter of the work, and one rank computes all
# micro-batches of the longest stage.
#
# The score of a case is 100 × bound / time, and your score is the mean over the five cases. ZB-H1, with two consecutive
# stages per rank that count as one, meets every limit and scores 74.2. Nobody knows the best possible score: the search
# below is for one stage per rank.


# %%
def shortest(ranks, microbatches, costs, most):
    """Return the lists of four ranks for eight stages; choose the rank of each stage.

    costs: the times of F, B, I and W, by stage, and `send`, the time of a message to another
        rank
    most: the activations that may be alive on a rank at any time, as pp.alive counts them: one
        for each micro-batch in each stage

    The score uses pp.simulate(lists, **costs).time. You may search for up to ten seconds in
    each of the five cases.
    """
    ### BEGIN SOLUTION
    lists = [schedule(ranks, microbatches) for schedule in (pp.zbv, pp.dualpipev)]
    fitting = [each for each in lists if max(map(max, pp.alive(each))) <= most]
    return min(fitting, key=lambda each: pp.simulate(each, **costs).time)
    ### END SOLUTION


beat.short_schedule(shortest)

# %% [markdown]
# The course's answer takes the faster of two schedules that were made for other costs. You can also build a schedule
# step by step: let the rank that could begin first choose, among the instructions that it could run, one for which
# other ranks wait.
#
# The required part of the notebook ends here. **The rest is optional**: it compares pipelines with the other
# strategies, searches for a faster schedule, and shows two traps and the slowest stage. After it come the reading list
# and the next notebook.
#
# ## Optional: which strategy for which purpose?
#
# The next cells run one model with one batch of eight sequences on four ranks, with four strategies of the course so
# far. DDP and FSDP give each rank two of the sequences, TP gives every rank all eight, and PP, with 1F1B, sends them
# through the stages one by one. The numbers of bytes are measured; each is the largest of any rank:

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
    """Return the most that any rank sends, in how many calls, and the most that any rank holds,
    by kind, in MB."""
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
# The last two columns are computed and not measured. A stage's F takes 1 and its B takes 2, the model has the layers of
# four stages, and messages take no time. So one sequence takes 12 on one rank. With DDP and FSDP each rank computes two
# sequences, which takes 24; the job computes both at once, so A is that of two sequences. With TP each rank does a
# quarter of the work of each sequence, so one sequence takes 3 and eight take 24.
#
# PP sends by far the fewest bytes, and needs no collective. It divides P, G and S almost as evenly as FSDP and TP do,
# and no rank ever holds a layer of another rank. A of PP is the smallest here only because its micro-batches are single
# sequences. More ranks do not make A smaller: each rank then has fewer layers, but the first rank holds proportionally
# more micro-batches. Here the first rank holds four micro-batches, each for a quarter of the layers, which is as much
# as one device would hold for one sequence.
#
# **Latency** is the time that one sequence takes. **Throughput** is the number of sequences per unit of time. Of these
# strategies, only TP lowers the latency of one sequence. In a pipeline one sequence passes from rank to rank while the
# other ranks are idle, so a pipeline is useful only when many sequences are in flight. So a model that answers one
# person is split by TP, and a model that answers thousands may be split by layers.
#
# ## Optional: can you beat 1F1B?
#
# Take four ranks and eight micro-batches, and allow as many micro-batches alive as 1F1B has: 4, 3, 2 and 1. Is there a
# faster schedule? Try it: change `mine`, and draw it. If a schedule cannot be run, the error shows it in a picture.

# %%
mine = [[*order] for order in one_f_one_b(4, MICRO)]
mine[0][9], mine[0][10] = mine[0][10], mine[0][9]  # say, a backward earlier, a forward later
print(f"time {pp.simulate(mine).time:g}, 1F1B's is {pp.simulate(one_f_one_b(4, MICRO)).time:g}")
print(f"alive at most: {[max(alive) for alive in pp.alive(mine)]}")

# %% [markdown]
# There are too many schedules to try all of them, but not all need to be tried.
# [labs/pp/search.py](../labs/pp/search.py) builds schedules step by step, and gives up every beginning that cannot lead
# to a faster schedule; this method is called *branch and bound*. The schedule that it finds is the fastest of all. The
# next cell runs the search without and with a split backward, under three memory limits:

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
# With one stage on each rank and whole backwards, no schedule is faster than 1F1B, even with more memory. With a split
# backward, some schedules are faster with the same memory. With four micro-batches alive on each rank, ZB-H1 is
# optimal, and more memory does not help: the last rank cannot start before time 3, and has 24 units of work. The paper
# calls ZB-V, and with twice the memory ZB-H2, *zero* bubble. It counts each rank's time from its own first F to its own
# last W, since the rank's next step can begin then, if the optimizer does not wait for other ranks. But to clip
# gradients, the optimizer must wait for every rank's norm. A schedule that the search has found can be run like any
# other:

# %%
found = search(4, MICRO, [4, 3, 2, 1], split=True).schedule
try_out(found)
draw.schedule(found)

# %% [markdown]
# ## Optional: a second trap
#
# We have found no published report of this second trap. FSDP can shard a stage's parameters over data-parallel ranks,
# and drop the full parameters after forward, as in notebook 06. With a schedule that splits the backward, PyTorch 2.13
# then computes no gradients for the weights that were dropped:

# %%
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from labs.mesh import Mesh

KINDS = {"1F1B": schedules.ScheduleInterleaved1F1B}
KINDS["zero bubble"] = schedules.ScheduleInterleavedZeroBubble


# %%
def sharded_stages(name, reshard):
    """Count the gradients of this rank's stage that exist, and those that are missing."""
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
# There is no error and no warning, but the whole second stage is never trained. The first stage is not affected: no
# rank needs the gradient of its input, so PyTorch does not split its backward. With such a schedule, pass
# `reshard_after_forward=False`. The course's `native.pp` refuses such stages.
#
# ## Optional: would it hang on NCCL?
#
# All jobs in this notebook ran on gloo. GPUs use NCCL, where an order of messages that works on gloo may hang. On NCCL
# a send waits until the other rank receives, unless the message is small. And the messages between two ranks are
# transferred one by one, in the order in which each of the ranks issued them. You need no GPU to predict a hang, since
# the recording contains the order. The next cells send the messages of a schedule: each result is sent as soon as it is
# computed, and received when it is needed:


# %%
def ends(x):
    """Return the stage whose result an instruction needs, and the stage that needs its result;
    none at the ends."""
    return (x.stage - 1, x.stage + 1) if isinstance(x, F) else (x.stage + 1, x.stage - 1)


def one_by_one(lists):
    """Send only the messages of a schedule; nothing is computed."""
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
# Rank 2 sends an activation to rank 3 while rank 3 sends a gradient to rank 2. Both send, and neither receives. The
# remedy is a *batch*: a rank issues the send of its result and the receive that it needs next in one call, and the
# messages of a batch do not wait for each other. Megatron's `send_forward_recv_backward` is such a batch. The course's
# executor needs no batch: it gives the messages of all ranks one order, in which two ranks never send to each other at
# the same time.


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
# With GPipe, two ranks never send to each other at the same time. The head of
# [labs/kit/nccl/would_hang.py](../labs/kit/nccl/would_hang.py) lists the rules that this check applies, each with its
# source, and the causes of a hang that no recording can show.

# %% [markdown]
# ## Optional: the slowest stage
#
# Take Llama 3 405B on 16 ranks with eight layers each. The last rank would also have the head, which has as many
# parameters as two thirds of a layer. The real model has 126 layers and not 128. Its authors removed one layer from the
# first rank, which holds the most activations and the embedding, and one from the last rank, which computes the head
# and the loss (arXiv 2407.21783, section 3.3.2; their schedule is interleaved). How much would this gain with 1F1B and
# 32 micro-batches? In the table, *idle* is a share of the whole step, and not of the ideal time like the bubble.

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
# **Next.** Each strategy has its limit: data parallelism is limited by the batch, tensor parallelism by the node, and
# pipelines by the bubble. The next notebook combines all three on one mesh: [Three
# dimensions](11_three_dimensions.ipynb).
#
# To get a clean copy of this notebook, run `git restore notebooks/10_pipeline.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
