# %% [markdown]
# # Start here
#
# A model that is too large, or too slow, for one device has to be trained by many. There are only a few ways to share
# the work. Each way answers two questions: *which device holds which numbers*, and *which numbers travel between
# devices*.
#
# In this course you build each way of sharing from scratch, run it as a real job on several processes, and measure it.
# Nothing is simulated unless the text says so. A laptop without a GPU is enough.
#
# **This notebook** shows how the course works.
# **Minutes**, by estimate: 25 without exercises, 35 with them.
# The notebook needs 1 GB of memory. You need some Python, and an idea of what a training loop in PyTorch does. Run each
# cell with Shift+Enter, from top to bottom.
#
# <img src="../images/course_map.svg" alt="Map of the course in five parts: one device; split the batch; split the
# state; split the model; at work. Eighteen notebooks exist. Notebook 12, on long contexts and experts, and notebook 16,
# a bug clinic, are planned.">

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
# training. The job was interrupted 466 times. Of these interruptions 419 were unexpected, mostly because hardware
# failed. Even so, more than 90 % of the time went into training. The model card
# ([`MODEL_CARD.md`](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md), July 2024)
# states how much computing the training took: 30.84 million GPU-hours. The card does not say what Meta paid for them.
# The report of DeepSeek-V3 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437), December 2024) assumes that an H800,
# a sister of the H100, rents for 2 dollars an hour. From these numbers we can estimate roughly:

# %%
GPUS, DAYS, UNEXPECTED, GPU_HOURS, DOLLARS = 16_384, 54, 419, 30.84e6, 2
print(f"one failure every {DAYS * 24 / UNEXPECTED:.1f} hours")
print(f"{GPU_HOURS / GPUS / 24:.0f} days, if all {GPUS:,} GPUs never stop")
print(f"{GPU_HOURS / 24 / 365:,.0f} years on one GPU")
print(f"{GPU_HOURS * DOLLARS / 1e6:.0f} million dollars, at {DOLLARS} an hour")

# %% [markdown]
# Nobody waits for thousands of years. But 16,384 GPUs are 16,384 times as fast as one only if they hardly ever wait for
# each other, and that depends on the links between them.
#
# <img src="../images/cluster.svg" alt="Two nodes of a cluster. Each has eight GPUs of 80 GB, joined by NVLink: 450 GB/s
# each way, 0.6 µs per message. PCIe 5 leads from each GPU to its own network card, and InfiniBand leads from the card
# to the other nodes: 50 GB/s each way, 2.7 µs. The CPUs are joined by Ethernet of 10 Gb/s: 1.25 GB/s each way, 10 µs.">
#
# A **node** is one machine. Two numbers describe a link. Its **bandwidth** is the number of bytes that it carries per
# second. Its **latency** is the time that even the shortest message takes. Meta's nodes were joined by an Ethernet as
# fast as this InfiniBand: 400 gigabits per second for each GPU, which is 50 gigabytes per second, since a byte has 8
# bits. The numbers in the picture come from the makers' data sheets and from published models of cost, so they are best
# cases. The table `labs.cost.LINKS` lists them with their sources, and later notebooks predict with the same
# bandwidths.
#
# In each training step, GPUs that share a batch have to add up their gradients, which are as large as the model. An
# operation that gives every GPU the sum over all GPUs is an **all-reduce**. The chart shows how long an all-reduce
# takes, by size and by link; both scales are logarithmic:

# %%
play.links(size=2e10, ranks=8)

# %% [markdown]
# Move the control for the size. All short messages take about the same time, because latency dominates. Long messages
# take twice the time for twice the bytes, because bandwidth dominates. Then set more than 8 ranks: NVLink ends at the
# border of the node. Almost every decision in this course is about which bytes cross that border, and how often.
#
# ## A job is a function call that returns a value
#
# A **job** is one function that runs on several **ranks** at once. A rank is a process with a number: four ranks have
# the numbers 0, 1, 2 and 3. On a cluster each rank usually has a GPU of its own; in this course each rank is a process
# on your machine.
#
# The cell below is a real job. The cell defines a function, which is sent to four new processes, and these run it side
# by side. Everything that they print appears below the cell at once, with the rank in front. The order of the lines may
# change from run to run.


# %% tags=["nbval-ignore-output"]
def hello():
    print(f"I am rank {dist.get_rank()} of {dist.get_world_size()}, in process {os.getpid()}")
    return dist.get_rank(), os.getpid()


answers = run(hello, ranks=4)

# %% [markdown]
# <img src="../images/job.svg" alt="A cell calls run(train, 20, ranks=4). The function is sent to four processes, ranks
# 0 to 3, which form one process group. The values that they return come back as a list.">
#
# `run` waits for all ranks and returns a list: the value that rank 0 returned, then the value of rank 1, and so on. So
# a job can be used like any function. The fork server in the picture is a process that has loaded PyTorch already and
# waits, so that new ranks start at once. The job returned four process ids, and none of them is the process id of this
# notebook:

# %%
ranks, pids = zip(*answers, strict=True)
assert ranks == (0, 1, 2, 3)
assert len({*pids, os.getpid()}) == 5
ranks

# %% [markdown]
# ## Ranks talk in collectives
#
# Ranks share no memory. Rank 2 cannot read a variable of rank 0: ranks exchange data only by sending and receiving. The
# ranks that may talk to each other form a **process group**. An operation that every rank of a group calls together is
# a **collective**.
#
# The most common collective is `all_reduce`: each rank contributes a tensor, and each rank gets the sum of all these
# tensors. In the cell below every rank contributes its number plus one.


# %%
def add_up():
    mine = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(mine)
    return mine.item()


run(add_up, ranks=4)

# %% [markdown]
# The four ranks contributed 1, 2, 3 and 4. All of them hold the sum, 10, now.
#
# ### Your first prediction
#
# Each notebook asks you for a number *before* the machine shows it. To predict a number is the quickest way to find out
# what you believe. What will each rank return if the same job has five ranks? Type your number in place of `None`, then
# run the cell.

# %%
guess = 15  # your number
check.predict("What does each of five ranks return?", guess, answer=run(add_up, ranks=5)[0])

# %% [markdown]
# As long as you have filled in nothing, a check says "not yet", and the cells below still run. Once you have written
# something, the check answers ✓, or says what differs. Try a wrong number too.
#
# ### Your first exercise: let the ranks talk (10 minutes)
#
# A collective is made of messages from one rank to another. One rank calls `dist.send(tensor, dst=...)`, and another
# calls `dist.recv(tensor, src=...)`. The receiver's tensor is filled with the numbers that were sent; it must exist
# already, with the same shape and dtype.
#
# In training, each rank computes a loss for its own part of the batch, and the log should show the mean of these
# losses. Send every rank's loss to rank 0, and let rank 0 compute the mean. Use no collective: `send` and `recv` are
# enough. Replace the line with `raise` by about six lines of your own, and run the cell. Every rank runs the *same*
# function, and `dist.get_rank()` tells the function on which rank it runs.


# %%
def mean_on_rank_0(x):
    """On rank 0, return the mean of all ranks' x, a new tensor; on the others, return None.

    x: this rank's tensor of floating-point numbers, contiguous, of any shape. Shape and dtype
    are the same on every rank. Do not change x. The job has one rank or more, and calls this
    function again and again, as training does.
    Budget: each rank but rank 0 sends one message, and no rank calls a collective.
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
# The check has run your function in real jobs, on 1 to 8 ranks, with tensors of awkward shapes. It has counted messages
# and bytes, and has looked for messages and memory that your function left behind. Every exercise is checked this way.
# If the check answers ✗, it says what differs and on which rank, and asks a question that helps you find the mistake.
#
# Did your function *hang*? Then some rank waits for a message that no rank sends. The check tells you which rank waits,
# and on which line.
#
# ## A shard is a piece of a tensor
#
# If every rank holds every tensor whole, four devices can train no larger model than one device can. So a tensor is cut
# into pieces, and every rank keeps one piece, its **shard**. When a rank needs the **full** tensor, another collective,
# `all_gather`, puts the shards together again.


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
# With eight numbers and four ranks, each rank gets two numbers. Ten numbers do not divide evenly by four. `chunk`
# rounds the length of a shard up to 3 and cuts shards of that length until the numbers run out, so the last shard is
# shorter: 3, 3, 3, 1. With nine numbers the last rank gets none: 3, 3, 3, 0, and `chunk` returns only three pieces.
# Which numbers belong to which rank? Every strategy that shards has to answer this question, and the second exercise
# asks you to answer it. It needs only arithmetic, no tensors.


# %%
def my_shard(elements, ranks, rank):
    """Return (start, stop) of this rank's shard, as `torch.chunk` cuts it. An empty shard has
    start = stop = `elements`."""
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
# Every strategy in this course is tested with four **ledgers**, which are tables of predictions beside measurements. We
# predict bytes with pencil and paper. The bytes that a rank holds are then measured on the running job. The bytes that
# a rank sends are computed from the calls that it made; they are called **logical bytes**. Losses and parameters are
# compared with those of one process, and time is measured. Later notebooks use [scripts](../scripts) that run outside
# Jupyter, and these show the first ledger at work: `fsdp.py`, `tp.py`, `pp.py` and `parallel.py` train one model on the
# same batches, and all four end at the same loss, 3.0106 with Python 3.11.
#
# | ledger | its question |
# |---|---|
# | **numbers** | is it still the same training: the same losses, the same parameters as one process? |
# | **bytes sent** | what did each rank have to send? |
# | **bytes held** | what does each rank keep in memory, at rest and at its peak? |
# | **time** | when did each rank compute, communicate or wait? |
#
# The argument `record=` watches a job from outside, and the function needs no change for it. The next cell draws the
# second ledger for an `all_reduce` of a thousand numbers of 4 bytes each:


# %%
def add_up_many():
    dist.all_reduce(torch.ones(1000))


recording = run(add_up_many, ranks=4, record="communication").recording
predicted = 4 * cost.all_reduce(1000, ranks=4).elements
draw.ledger({"rank 0 sent": (predicted, recording.sent(rank=0))})

# %% [markdown]
# `labs.cost` predicts the bytes with a formula. The recording notes each call with its size and its ranks, and adds up
# the fewest bytes that such a call must send. The two share no code. In notebook 02 you will compare the recording's
# bytes with the bytes that really travel. There you will also find out why the result has to be 6,000 bytes, and
# neither 4,000 bytes, the size of one tensor, nor 12,000 bytes, the size of three.
#
# The bytes that a rank *holds* are shown by kind, and each kind has one colour in every figure of the course: **P** for
# parameters, **G** for gradients, **S** for optimizer state and **A** for activations. Two more kinds have no letter:
# buffers for communication, and other temporary tensors. The next cells give a first look at the goal of this course:
# four ranks train the course's small GPT, and each rank holds a copy of it. `mark` tells a recording which part of a
# step begins. `Bucketed` and `sync` average the gradients. In notebook 03 you will write what `Bucketed` does.

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
# The figure shows one training step of rank 0, from left to right. Activations grow in forward and shrink in backward,
# while the gradients grow. Then the ranks average their gradients, which is the red-orange block after backward, and
# the optimizer takes its step. Every rank holds all parameters and all optimizer state all the time, so four ranks hold
# four equal copies. The middle of the course removes these spare copies.
#
# ## When a rank fails
#
# With many ranks, one error causes many: one rank fails, and then the other ranks fail because that rank is gone. In
# the cell below the other ranks wait in `dist.barrier()`, a collective that sends no data and ends when every rank has
# called it. The launcher names the rank that failed *first*, and shows the line of your cell that failed. The cell
# fails on purpose:


# %% tags=["raises-exception"]
def fail_on_rank_2():
    if dist.get_rank() == 2:
        raise ValueError("this rank has read a broken file")
    dist.barrier()


run(fail_on_rank_2, ranks=4)

# %% [markdown]
# The worst failure gives no message. A collective needs every rank of its group; if one rank does not call it, the
# others wait for ever. On a cluster, such a **hang** can cost a night. In this course each rank records the collectives
# that it calls in a small log, its **flight recorder**. So the launcher can soon tell you which ranks wait, where they
# wait, and which rank did something else. In the cell below, rank 3 does not call the collective:


# %% tags=["raises-exception"]
def hang():
    gradient = torch.ones(3)
    if dist.get_rank() < 3:
        dist.all_reduce(gradient)


run(hang, ranks=4)

# %% [markdown]
# <div style="border-left: 4px solid #D55E00; padding-left: 0.8em">
#
# **What went wrong in the wild.** *Symptom*: a job stands still. There is no error, and the time limit that should have
# ended the job has passed. *Cause*: in the reported example, one of eight ranks passes twice as many numbers to an
# `all_reduce` as the others, and all ranks wait, as above. PyTorch's own watchdog should end such a program but did
# not, so the job was "stuck without being noticed" ([pytorch#97191](https://github.com/pytorch/pytorch/issues/97191),
# March 2023, since closed).
#
# </div>
#
# `run(..., timeout=...)` ends an endless loop after that many seconds. You can also interrupt the kernel with the ■
# button: this ends every rank of the job.

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
# | process group | ranks that may talk to each other; at the start, all ranks of the job |
# | collective | an operation that every rank of a group calls together |
# | send, receive | one rank passes a tensor to one other rank |
# | broadcast | every rank gets a copy of one rank's tensor |
# | reduce | one rank gets the sum of all ranks' tensors |
# | all-reduce | every rank gets the sum, mean or maximum of all ranks' tensors |
# | reduce-scatter | each rank gets one piece of the sum of all ranks' tensors |
# | all-gather | every rank gets the pieces of all ranks, put together |
# | all-to-all | each rank sends a different piece to every other rank |
# | hang, deadlock | ranks wait for a message that no rank will ever send |
# | ledger | a table of what was predicted and what was measured |
# | logical bytes | the fewest bytes that a call must send, computed from its size; more bytes may really travel |
# | shard | the piece of a tensor that one rank holds; the opposite of *full* |
# | replica | a full copy of the model, on one of several ranks |
# | gather, drop | make a tensor full on a rank; free the full tensor again and keep the shard |
# | parameters, **P** | the numbers that training changes |
# | gradients, **G** | the derivatives of the loss with respect to the parameters; backward computes them |
# | optimizer state, **S** | what the optimizer remembers from step to step |
# | activations, **A** | tensors that forward keeps because backward will need them |
# | recomputation, activation checkpointing | backward runs forward again, so that fewer activations are kept |
# | offloading | the training state is kept and updated in slower memory: the host's memory, or a disk |
# | backend | the library that moves the bytes: gloo between CPUs, NCCL between NVIDIA GPUs |
# | step | forward and backward on one batch, then one change of the parameters |
# | micro-batch | the part of a batch that goes through the model in one forward |
# | bucket | several gradients, copied into one tensor and sent together |
# | tensor parallelism, TP | every matrix is split over ranks that work on the same tokens |
# | sequence parallelism | between TP's split matrices, each rank has a part of the tokens |
# | pipeline parallelism, PP | each rank has a stage, some consecutive layers; micro-batches go from stage to stage |
# | bubble | the time that the ranks of a pipeline wait, as a fraction of the time that they compute |
# | key-value cache | keys and values of earlier tokens, kept during generation and computed only once |

# %% [markdown]
# ## The notebooks
#
# | | what it does |
# |---|---|
# | 00 Start here | this one |
# | [01 One device](01_one_device.ipynb) | trains the course's GPT, and shows what uses the memory |
# | [02 Collectives](02_collectives.ipynb) | builds broadcast, all-reduce and the like from send and receive |
# | [03 DDP](03_ddp.ipynb) | trains equal copies of the model in three ways of our own, and in PyTorch's way |
# | [04 ZeRO](04_zero.ipynb) | shards optimizer state, then gradients, then parameters |
# | [05 Mesh and DTensor](05_mesh_and_dtensor.ipynb) | arranges ranks in a grid; builds tensors that know their layout |
# | [06 FSDP](06_fsdp.ipynb) | shards parameter by parameter, and gathers ahead |
# | [07 Memory](07_memory.ipynb) | counts activations, and recomputes them to save memory |
# | [07b Offload](07b_offload.ipynb) | moves state to a disk; builds models that no rank ever holds whole |
# | [08 Checkpoints](08_checkpoint.ipynb) | saves a training on 4 ranks, completely or not at all, and loads it on 3 |
# | [08b Resume](08b_resume.ipynb) | kills a training and resumes it, with the same numbers to the last bit |
# | [09 Tensor parallelism](09_tensor_parallel.ipynb) | splits every matrix over ranks that work on the same tokens |
# | [09b Plan and wire](09b_plan_and_wire.ipynb) | splits the loss; splits a model by a plan; asks when that pays |
# | [10 Pipeline](10_pipeline.ipynb) | gives each rank some of the layers, and lets micro-batches flow through them |
# | [11 Three dimensions](11_three_dimensions.ipynb) | combines data, tensor and pipeline parallelism |
# | [11b Clusters](11b_clusters.ipynb) | runs the same job on two hosts and in a queue, with a time limit |
# | [12 Long contexts](12_long_context.ipynb) | splits every sequence, and sends keys and values round a ring |
# | [12b Experts](12b_experts.ipynb) | sends tokens to the ranks of their experts, and results back |
# | [13 GSPMD](13_gspmd.ipynb) | gives a compiler the layouts of a few arrays, and lets it split the program |
# | [14 DeepSpeed](14_deepspeed.ipynb) | runs ZeRO from a configuration file |
# | [15 Plan a run](15_plan_a_run.ipynb) | asks which layouts a cluster can run, and which are fast |
# | [16 Bug clinic](16_bug_clinic.ipynb) | finds bugs of well-known projects, from their symptoms |
#
# The next cell lists the exercises of each notebook under the names of their checks, and marks those that you have
# passed. In a terminal, `make progress` (or `python -m labs progress`) also says when you passed them.
#
# For this, the course keeps in its own folder when you passed an exercise, how many tries that took, the name of your
# last mistake, and your scores in challenges. It keeps no code and sends nothing anywhere; whoever may read the folder,
# such as a teacher, may read these files. `LABS_PROGRESS=off make learn` keeps nothing.

# %% tags=["nbval-ignore-output"]
from labs.kit.check import course_map

course_map()

# %% [markdown]
# Every notebook has the same order: a question, a picture and a prediction. Then you build the strategy, measure it,
# and meet PyTorch's own version. At the end you read when to use the strategy and when not. Answers to all exercises
# are in the folder `solutions`, in notebooks of the same names. The code that you build is also in the folder `labs`,
# one idea per file.

# %% [markdown]
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>What can a rank do to see a tensor that another rank holds?</summary>
#
# A rank can do nothing alone, since ranks share no memory. Both ranks have to take part, one as sender and one as
# receiver, or all ranks of the group call a collective.
# </details>
#
# <details><summary>Why did the job with the forgotten `all_reduce` hang, instead of failing with an error?</summary>
#
# `all_reduce` needs every rank of its group. Three ranks called `all_reduce` and waited for the fourth rank, which had
# already returned. No single rank ran into an error: the mistake was that the ranks did different things.
# </details>
#
# <details><summary>Four ranks hold a tensor of 8 numbers: once as replicas, once as shards. How many numbers does each
# hold, and how many do all of them hold together?</summary>
#
# As replicas, each rank holds 8 numbers, and all ranks together hold 32. As shards, each rank holds 2, and all ranks
# together hold 8.
# </details>

# %% [markdown]
# ## If something does not work
#
# `make doctor` (or `python -m labs doctor`) in a terminal lists the problems of this machine, each with its remedy.
#
# **A clean copy.** You cannot break anything for good. In a terminal, in the folder of the course:
#
#     git restore notebooks/00_start_here.ipynb
#
# (on an older git, `git checkout -- notebooks/00_start_here.ipynb`), then *File > Reload Notebook from Disk*. To start
# over without losing what you wrote: *Kernel > Restart Kernel and Clear Outputs of All Cells*.
#
# **Next.** You have seen what a rank holds during a step, but not what all of it is for, nor why it is so much. [01 One
# device](01_one_device.ipynb) takes a step apart until you know what every byte is for.
