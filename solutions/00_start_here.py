# %% [markdown]
# # Start here
#
# A model that is too large, or too slow, for one device has to be trained by many. There are only a few ways to share
# the work, and each of them comes down to two questions: *who holds what*, and *what travels between them*.
#
# In this course you build each way from scratch, run it as a real job on several processes, and measure it. Nothing is
# simulated unless the text says so. A laptop without a GPU is enough.
#
# **This notebook** shows how the course works.
# **Minutes**, by estimate: 25 without exercises, 35 with them.
# It needs 1 GB of memory, and nothing but some Python and the idea of a training loop in PyTorch. Run each cell with
# Shift+Enter, from top to bottom.
#
# <img src="../images/course_map.svg" alt="Map of the course: one device; split the batch; split the state; split the
# model; at work. Eighteen notebooks are there; 12, on contexts and experts, and 16, a bug clinic, are planned.">

# %%
import os

import torch
import torch.distributed as dist

from labs import cost
from labs.kit import check, draw, play
from labs.kit.launch import run

# %% [markdown]
# ## One real run
#
# In 2024 Meta trained Llama 3.1 405B, a model of 405 billion parameters, on up to 16,384 H100 GPUs. Its paper (Llama
# Team, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3, July 2024) describes 54 days of that
# training: the job was interrupted 466 times, 419 of them unexpectedly, mostly by failing hardware; even so, more than
# 90 % of the time went into training. The model card
# ([`MODEL_CARD.md`](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md), July 2024)
# has the bill: 30.84 million GPU-hours. It does not say what Meta paid. The report of DeepSeek-V3
# ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437), December 2024) assumes that an H800, a sister of the H100,
# rents for 2 dollars an hour. So, roughly:

# %%
GPUS, DAYS, UNEXPECTED, GPU_HOURS, DOLLARS = 16_384, 54, 419, 30.84e6, 2
print(f"one failure every {DAYS * 24 / UNEXPECTED:.1f} hours")
print(f"{GPU_HOURS / GPUS / 24:.0f} days, if all {GPUS:,} GPUs never stop")
print(f"{GPU_HOURS / 24 / 365:,.0f} years on one GPU")
print(f"{GPU_HOURS * DOLLARS / 1e6:.0f} million dollars, at {DOLLARS} an hour")

# %% [markdown]
# Nobody waits for thousands of years. But 16,384 GPUs are only that much quicker if they hardly ever wait for each
# other, and that depends on what lies between them.
#
# <img src="../images/cluster.svg" alt="Two nodes of a cluster. Each has eight GPUs of 80 GB, joined by NVLink: 450 GB/s
# each way, 0.6 µs per message. PCIe 5 leads from each GPU to its own network card, and InfiniBand from there to the
# other nodes: 50 GB/s each way, 2.7 µs. Ethernet of 10 Gb/s between the CPUs: 1.25 GB/s each way, 10 µs.">
#
# A **node** is one machine. A link has two numbers. Its **bandwidth** is how many bytes a second it carries; its
# **latency** is how long even the shortest message takes. (Meta's nodes were joined by an Ethernet as fast as this
# InfiniBand: 400 Gb/s for each GPU. That is gigabits; 8 bits are a byte.) The numbers come from the makers' data sheets
# and from published models of cost, so they are best cases; they are all in one table, `labs.cost.LINKS`, with their
# sources, and later notebooks predict with the same bandwidths.
#
# In each training step, GPUs that share a batch have to add up their gradients, which are as large as the model; such a
# sum over all of them is an **all-reduce**. Here is how long it takes, by size and by link (both scales are
# logarithmic):

# %%
play.links(size=2e10, ranks=8)

# %% [markdown]
# Move the size. Short messages cost the same however short they are: that is latency. Long ones take twice the time
# for twice the bytes: that is bandwidth. Then set more than 8 ranks: NVLink ends at the border of the node.
# Almost every decision in this course is about what may cross that border, and how often.
#
# ## A job is a function call with a value
#
# A **job** is one function that runs on several **ranks** at once. A rank is a process with a number: with four ranks,
# the numbers are 0, 1, 2 and 3. On a cluster each rank usually has a GPU of its own; here each is a process on your
# machine.
#
# The cell below is a real job. The function that it defines travels to four new processes, which run it side by side.
# What they print arrives here live, with the rank in front, in whatever order it happens.


# %% tags=["nbval-ignore-output"]
def hello():
    print(f"I am rank {dist.get_rank()} of {dist.get_world_size()}, in process {os.getpid()}")
    return dist.get_rank(), os.getpid()


answers = run(hello, ranks=4)

# %% [markdown]
# <img src="../images/job.svg" alt="A cell calls run(train, 20, ranks=4). The function travels to four processes, ranks
# 0 to 3, which form one process group. What each returned comes back as a list.">
#
# `run` waits for all ranks and returns a list: what rank 0 returned, then what rank 1 returned, and so on. So a job can
# be used like any function. (The fork server in the picture is a process that has PyTorch loaded and waits, so that new
# ranks are there at once.) Four process ids came back, and none of them is this notebook's:

# %%
ranks, pids = zip(*answers, strict=True)
assert ranks == (0, 1, 2, 3)
assert len({*pids, os.getpid()}) == 5
ranks

# %% [markdown]
# ## Ranks talk in collectives
#
# Ranks share no memory. Rank 2 cannot look at a variable of rank 0; all it can do is send and receive. The ranks that
# may talk to each other form a **process group**. An operation that every rank of a group calls together is a
# **collective**.
#
# The most common one is `all_reduce`: each rank brings a tensor, and each gets the sum of all of them. Here every rank
# brings its number plus one.


# %%
def add_up():
    mine = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(mine)
    return mine.item()


run(add_up, ranks=4)

# %% [markdown]
# Rank 0 brought 1, rank 1 brought 2, then 3 and 4. All of them have 10 now.
#
# ### Your first prediction
#
# In each notebook you will be asked for a number *before* the machine shows it. It is the
# quickest way to find out what you believe. What will each rank return if there are five of them? Type your number in
# place of `None`, then run the cell.

# %%
guess = 15  # your number
check.predict("What does each of five ranks return?", guess, answer=run(add_up, ranks=5)[0])

# %% [markdown]
# As long as nothing is filled in, a check says "not yet", and the notebook goes on without you. Once you have written
# something, it answers ✓, or says what differs. Try a wrong number too.
#
# ### Your first exercise: let the ranks talk (10 minutes)
#
# Underneath, a collective is made of messages. One rank calls `dist.send(tensor, dst=...)`, another calls
# `dist.recv(tensor, src=...)`, and what was sent ends up in the receiver's tensor, which must exist already, with the
# same shape and dtype.
#
# In training, each rank has a loss of its own, for its own part of the batch; the log should show the mean. Send every
# rank's loss to rank 0, and let rank 0 work out the mean. No collectives, please: `send` and `recv` are enough. Take
# out the line with `raise`, write yours in its place (six or so), and run the cell. Each rank runs the *same* function,
# and learns from `dist.get_rank()` which part is its own.


# %%
def mean_on_rank_0(x):
    """On rank 0, return the mean of all ranks' x, a new tensor; on the others, return None.

    x: this rank's tensor of floating-point numbers, contiguous, of any shape (the same on every
    rank, as is the dtype); it stays as it is. Any number of ranks, one included; called again
    and again, as in training.
    Budget: one message from each of the others, and no collective.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    if rank > 0:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        total += theirs
    return total.div_(ranks)
    ### END SOLUTION


check.mean_on_rank_0(mean_on_rank_0)

# %% [markdown]
# The check has run your function as real jobs, on 1 to 8 ranks, with tensors of awkward shapes; it has counted messages
# and bytes, and looked at what is left behind. Every exercise is checked this way. If the answer is ✗, it says what
# differs and on which rank, and asks a question that leads on.
#
# Did it *hang*? Then some rank waits for a message that nobody sends. The check tells you which rank, and on which
# line.
#
# ## A shard is a piece of a tensor
#
# If every rank holds the whole tensor, four devices can train no larger model than one. So a tensor is cut, and every
# rank keeps one piece: its **shard**. When a rank needs the **full** tensor, it is put together again by another
# collective, `all_gather`.


# %%
def shard_and_gather():
    full = torch.arange(8)
    shard = full.chunk(dist.get_world_size())[dist.get_rank()]
    pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard)
    assert torch.equal(torch.cat(pieces), full)
    return shard.tolist()


run(shard_and_gather, ranks=4)

# %% [markdown]
# Eight numbers are two for each of four ranks. Ten do not divide evenly: `chunk` makes every shard as long as the
# longest has to be, 3, until the numbers run out, so the last one is shorter: 3, 3, 3, 1. Nine numbers leave nothing at
# all for the last rank: 3, 3, 3, 0 (`chunk` then returns only three pieces). Which numbers belong to which rank? Every
# strategy that shards has to answer this, so the second exercise is yours. It is arithmetic, without tensors.


# %%
def my_shard(elements, ranks, rank):
    """(start, stop) of this rank's shard, as `torch.chunk` cuts. An empty shard starts and
    stops at `elements`."""
    ### BEGIN SOLUTION
    longest = -(-elements // ranks)  # rounded up
    start = min(rank * longest, elements)
    stop = min(start + longest, elements)
    return start, stop
    ### END SOLUTION


check.my_shard(my_shard)

# %% [markdown]
# ## Four ledgers
#
# Every strategy in this course is held to four **ledgers**: tables of predictions beside measurements. Bytes are
# predicted with pencil and paper. Those that a rank holds are then measured on the job itself, and those that it sends
# are worked out from the calls that it really made: they are called **logical bytes**. Numbers are compared with those
# of one process; and time is measured. The [scripts](../scripts), with which later notebooks leave the laboratory, show
# the first of these: `fsdp.py`, `tp.py`, `pp.py` and `parallel.py` train one model on the same batches, and all four
# end at the same loss, 3.0106 with Python 3.11.
#
# | ledger | its question |
# |---|---|
# | **numbers** | is it still the same training: the same losses, the same parameters as one process? |
# | **bytes sent** | what did each rank have to send? |
# | **bytes held** | what does each rank keep in memory, at rest and at its peak? |
# | **time** | when did each rank compute, communicate or wait? |
#
# `record=` watches a job from outside; the function has no part in it. Here is the second ledger, for an `all_reduce`
# of a thousand numbers of 4 bytes each:


# %%
def add_up_many():
    dist.all_reduce(torch.ones(1000))


recording = run(add_up_many, ranks=4, record="communication").recording
predicted = 4 * cost.all_reduce(1000, ranks=4).elements
draw.ledger({"rank 0 sent": (predicted, recording.sent(rank=0))})

# %% [markdown]
# `labs.cost` predicts. The recording notes each call, its size and its ranks, and adds up the least that such a call
# must send; neither knows of the other. In notebook 02 you will check that against what really travels, and find out
# why it has to be 6,000 bytes, and neither the 4,000 of one tensor nor the 12,000 of three.
#
# What a rank *holds* is shown by kind, and each kind has one colour in every figure of the course: **P** parameters,
# **G** gradients, **S** optimizer state, **A** activations, then, without a letter, buffers for communication and
# whatever else is temporary. Below is a first look at where we are going: the course's small GPT, trained by four ranks
# that each hold a copy of it. `mark` tells a recording which part of a step begins; `Bucketed` and `sync` average the
# gradients. After notebook 03 you will have written what `Bucketed` does.

# %%
from labs.data import Batches, corpus
from labs.ddp import Bucketed
from labs.kit.record import mark
from labs.model import GPT, PRESETS


# %%
def step(model, optimizer, x, y):
    mark("forward")
    loss = model(x, y)
    mark("backward")
    loss.backward()
    mark("sync")
    model.sync()
    mark("optimizer")
    optimizer.step()
    optimizer.zero_grad()


# %%
def train(steps=3):
    model = Bucketed(GPT(PRESETS["tiny"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens, rank = corpus().tokens[:100_000], dist.get_rank()
    batches = Batches(tokens, batch=12, context=64, rank=rank, ranks=4)
    for number in range(steps):
        mark("step")
        step(model, optimizer, *batches[number])
    mark("end")


recording = run(train, ranks=4, record="memory").recording
draw.memory(recording, step=2, ranks=[0])

# %% [markdown]
# One training step of rank 0, from left to right. Activations pile up in forward and melt away in backward, while the
# gradients grow. Then the ranks average their gradients (the red-orange block after backward), and the optimizer
# takes its step. Parameters and optimizer state are there all the time, on each rank: four times the same. Removing
# these spare copies is what the middle of the course is about.
#
# ## When a rank fails
#
# With many ranks, errors come in crowds: one rank fails, the others break because it is gone. (Here they wait in
# `dist.barrier()`, a collective that carries nothing: it ends when every rank has called it.) The launcher names the
# rank that failed *first*, and shows the line in your cell. This cell fails on purpose:


# %% tags=["raises-exception"]
def fail_on_rank_2():
    if dist.get_rank() == 2:
        raise ValueError("this rank has read a broken file")
    dist.barrier()


run(fail_on_rank_2, ranks=4)

# %% [markdown]
# The worst failure makes no noise. A collective needs every rank of its group; if one does not come, the others wait
# for ever. On a cluster, such a **hang** can cost a night. Here each rank keeps a small record of what it calls, its
# **flight recorder**, so you are soon told who waits where, and who did something else. Below, rank 3 forgets its part:


# %% tags=["raises-exception"]
def hang():
    gradient = torch.ones(3)
    if dist.get_rank() < 3:
        dist.all_reduce(gradient)


run(hang, ranks=4)

# %% [markdown]
# <div style="border-left: 4px solid #D55E00; padding-left: 0.8em">
#
# **What went wrong in the wild.** *Symptom*: a job stands still. There is no error, and the time limit that should
# have ended it has passed. *Cause*: in the reported example, one of eight ranks brings twice as many numbers to an
# `all_reduce` as the others. All of them wait, as above. PyTorch's own watchdog is there to end such a program; it
# failed to, so the job was "stuck without being noticed"
# ([pytorch#97191](https://github.com/pytorch/pytorch/issues/97191), March 2023, since closed).
#
# </div>
#
# An endless loop is ended by `run(..., timeout=...)`, in seconds. You can also interrupt the kernel (the ■ button):
# every rank goes with it, and none stays behind.

# %% [markdown]
# ## Words
#
# | word | what it means |
# |---|---|
# | job | one function, run on several ranks at once |
# | rank | one process of a job, and its number, counted from 0 |
# | node | one machine, with several devices |
# | bandwidth, latency | bytes per second that a link carries; seconds that even the shortest message takes |
# | world size | how many ranks a job has |
# | process group | ranks that talk to each other; at first, all of the job |
# | collective | an operation that every rank of a group calls together |
# | send, receive | one rank hands a tensor to one other |
# | broadcast | one rank's tensor goes to all |
# | reduce | the sum of everybody's tensor, on one rank |
# | all-reduce | the sum (or mean, or maximum) of everybody's tensor, on every rank |
# | reduce-scatter | the same sum, but each rank keeps one piece of it |
# | all-gather | the pieces that ranks hold, put together on every rank |
# | all-to-all | each rank sends a different piece to every other rank |
# | hang, deadlock | ranks wait for something that will never come |
# | ledger | a table of what was predicted and what was measured |
# | logical bytes | the least that a call must send, worked out from its size; the wire may carry more |
# | shard | the piece of a tensor that one rank holds; the opposite of *full* |
# | replica | a full copy of the model, on one of several ranks |
# | gather, drop | make a tensor full on a rank; give its memory back, except for the shard |
# | parameters, **P** | the numbers that are trained |
# | gradients, **G** | how the loss changes with each parameter; backward makes them |
# | optimizer state, **S** | what the optimizer remembers from step to step |
# | activations, **A** | what forward keeps because backward will need it |
# | recomputation | forward run again in backward, so that A need not be kept; also *activation checkpointing* |
# | offloading | state kept, and updated, in slower memory: the host's, or a disk |
# | backend | the library that moves the bytes: gloo between CPUs, NCCL between NVIDIA GPUs |
# | step | one batch: forward, backward, and one change of the parameters |
# | micro-batch | a part of a batch that goes through the model at once |
# | bucket | several gradients side by side, sent as one |
# | tensor parallelism, TP | every matrix split over ranks that work on the same tokens |
# | sequence parallelism | between TP's split matrices, each rank has a part of the tokens |
# | pipeline parallelism, PP | some consecutive layers, a stage, on each rank; micro-batches go from stage to stage |
# | bubble | the time that the ranks of a pipeline wait, as a fraction of the time that they compute |
# | key-value cache | in generation, the keys and values of earlier tokens, kept so as not to be computed again |

# %% [markdown]
# ## The notebooks
#
# | | what it does |
# |---|---|
# | 00 Start here | this one |
# | [01 One device](01_one_device.ipynb) | trains the course's GPT; the reference curve; where the memory goes |
# | [02 Collectives](02_collectives.ipynb) | builds broadcast to all-reduce from send and receive |
# | [03 DDP](03_ddp.ipynb) | trains copies that agree, in three ways of our own and in PyTorch's |
# | [04 ZeRO](04_zero.ipynb) | removes the spare copies, one kind after another |
# | [05 Mesh and DTensor](05_mesh_and_dtensor.ipynb) | arranges ranks as a grid; tensors that know their layout |
# | [06 FSDP](06_fsdp.ipynb) | shards parameter by parameter, and gathers ahead |
# | [07 Memory](07_memory.ipynb) | counts activations, and computes them again |
# | [07b Offload](07b_offload.ipynb) | moves state to a disk, and builds models that no rank ever holds whole |
# | [08 Checkpoints](08_checkpoint.ipynb) | saves a training on 4 ranks, all or nothing, and loads it on 3 |
# | [08b Resume](08b_resume.ipynb) | kills a training, which goes on as if nothing had happened |
# | [09 Tensor parallelism](09_tensor_parallel.ipynb) | splits every matrix over ranks that work on the same tokens |
# | [09b Plan and wire](09b_plan_and_wire.ipynb) | splits the loss, and any model by a plan; and says when it pays |
# | [10 Pipeline](10_pipeline.ipynb) | gives each rank some of the layers, and lets micro-batches flow through them |
# | [11 Three dimensions](11_three_dimensions.ipynb) | puts all of that on one mesh, each axis on a wire that suits it |
# | [13 GSPMD](13_gspmd.ipynb) | lets a compiler split a program, by layouts that are said of a few arrays |
# | [14 DeepSpeed](14_deepspeed.ipynb) | has ZeRO by a configuration file |
# | [15 Plan a run](15_plan_a_run.ipynb) | asks what can be run on given machines, what fits, and what is quick |
#
# Planned, and not there yet: long contexts and experts, and a bug clinic.
#
# Below are the exercises of each notebook, under the names of their checks; those that you have passed are marked. In a
# terminal `make progress` (or `python -m labs progress`) also says when.

# %% tags=["nbval-ignore-output"]
from labs.kit import progress

progress.course_map()

# %% [markdown]
# Every notebook follows one path: a question, a picture, a prediction, then you build it, measure it, meet PyTorch's
# own version, and hear when to use it and when not. Answers to all exercises are in the folder `solutions`, in
# notebooks of the same names. The code that you build is in the folder `labs`, one idea per file.

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>What can a rank do to see a tensor that another rank holds?</summary>
#
# Nothing by itself: ranks share no memory. Both have to take part, one as sender and one as receiver, or all together
# in a collective.
# </details>
#
# <details><summary>Why did the second failing job hang, and not fail?</summary>
#
# `all_reduce` needs every rank of its group. Three ranks called it and waited for the fourth, which had returned. No
# rank did anything wrong by itself; the mistake was between them.
# </details>
#
# <details><summary>Four ranks hold a tensor of 8 numbers: once as replicas, once as shards. How many numbers does each
# hold, and how many do all of them hold together?</summary>
#
# As replicas 8 each, 32 together. As shards 2 each, 8 together.
# </details>

# %% [markdown]
# ## If something does not work
#
# `make doctor` (or `python -m labs doctor`) in a terminal says what is amiss on this machine, each line with its
# remedy.
#
# **A clean copy.** You cannot break anything for good. In a terminal, in the folder of the course:
#
#     git restore notebooks/00_start_here.ipynb
#
# (on an older git, `git checkout -- notebooks/00_start_here.ipynb`), then *File > Reload Notebook from Disk*. To start
# over without losing what you wrote: *Kernel > Restart Kernel and Clear Outputs of All Cells*.
#
# **Next.** You have seen what a rank holds during a step, but not what all of it is for, nor why it is so much.
# [01 One device](01_one_device.ipynb) takes a step apart until every byte has a name.
