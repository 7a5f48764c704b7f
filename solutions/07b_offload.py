# %% [markdown]
# # Offload: state on another tier
#
# *There is one GPU, and no second rank to share P, G and S with. They do not fit, even with full recomputation of
# activations. Where else is there memory, and what does it cost to use it?*
#
# **Minutes**, by estimate: 35 without exercises, 55 with them, 35 more for the challenge.
# Running all cells takes half a minute and 2 GB of memory. You need: [Memory](07_memory.ipynb), which counts and
# recomputes activations, and [ZeRO](04_zero.ipynb).
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("07b")

# %%
import itertools
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# %%
from labs import cost
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.kit.train import ADAMW
from labs.memory.offload import Offloaded, one_ahead
from labs.model import GPT, PRESETS, initial_value
from labs.zero import Zero

# %% [markdown]
# ## Question
#
# Somebody wants to train 8 billion parameters on *one* GPU of 40 GB, one sequence of 8,192 tokens at a time, in mixed
# precision. There is no second rank, so no stage of ZeRO helps. Full recomputation makes activations as small as
# possible. Which kinds still take too much memory? As in notebook 07, the numbers come from the formulas.

# %%
one_card = cost.Job(PRESETS["llama3-8b"], batch=1, precision="mixed", recompute="full")
held = cost.per_rank(one_card, stage=0)
in_the_step = {kind: getattr(held, kind) / 1e9 for kind in ("P", "G", "S")}
in_the_step["temporary"] = held.peak / 1e9 - sum(in_the_step.values())
assert held.peak > 3 * 40e9
print(", ".join(f"{kind} {size:.1f} GB" for kind, size in in_the_step.items()))
caption = "8 billion parameters on one card: where the peak is"
draw.chart({"one card": in_the_step}, "GB", caption=caption)

# %% [markdown]
# Memory now peaks in the optimizer's step, when activations have been freed. G is a little more than 2 bytes per
# parameter, since the optimizer casts the gradient of one parameter at a time to float32. Most of the memory is S: the
# float32 masters, and AdamW's two moments. But S is idle for nearly the whole step. Neither forward nor backward reads
# S, and the optimizer reads and writes each number of S only once, at the end. So S can be kept in another memory,
# which is larger and slower.
#
# ## Predict
#
# Suppose S is in the memory of the *host*, the computer around the GPU. There are two ways to take the optimizer's
# step. (a) Fetch the state to the GPU, update it there, and store it back. (b) Send the gradients to the host in 16
# bits, update the state on the host, and send the parameters back in 16 bits. By what factor does (a) send more bytes
# over the link between the GPU and its host than (b)? You may type an expression.

# %%
guess_ratio = (12 + 12) / (2 + 2)  # your number

# %% [markdown]
# ## Picture
#
# Each kind of memory is a **tier**: the closer a tier is to the processor that computes, the faster and the smaller it
# is.
#
# ![Three columns. All on the GPU: P, G, S, A. State in host memory: gradients go down, parameters come up, 2 + 2 bytes
# per parameter. State on a disk: in addition, 12 + 12 bytes are read and written in each step.](../images/tiers.svg)
#
# To **offload** state is to keep it on a lower tier. The next tier below a GPU is the memory of its host; ZeRO-Offload
# uses this tier. The next tier below is the disk; ZeRO-Infinity uses fast disks, *NVMe*. On a laptop the ranks use host
# memory already, so the disk is their next tier. This notebook uses files that are **memory-mapped**: a program reads
# and writes them as if they were tensors.

# %%
up_and_down = 12 + 12  # bytes per parameter: the state
down_and_up = 2 + 2  # gradients and parameters
times = up_and_down / down_and_up
check.predict("(a) sends more bytes than (b), by a factor of", guess_ratio, times)

# %% [markdown]
# So the optimizer's step is taken *where the state is*, by the host's own processor.
#
# ## Build: an optimizer on another tier
#
# The model and the loop are those of notebook 07, on two ranks in ZeRO's stage 3, each with its own sequence.

# %%
CONFIG = replace(PRESETS["tiny"], depth=8)
text = corpus()
loader = Batches(text.tokens, 2, CONFIG.context)
batches = [loader[step] for step in range(4)]
adamw = partial(torch.optim.AdamW, **ADAMW)


def one_step(model, optimizer, x, y):
    mark("forward")
    loss = model(x, y)
    mark("backward")
    loss.backward()
    mark("optimizer")
    optimizer.step()
    optimizer.zero_grad()


# %% [markdown]
# [labs/memory/offload.py](../labs/memory/offload.py) has an optimizer that keeps its state on another tier. It can be
# used in place of any optimizer; here it is used inside stage 3. The loop resumes after the last step that is safely
# stored in the folder.


# %%
def sharded(where=None, make=adamw, steps=4):
    """Return all parameters by name, after training in stage 3 with the state in the folder
    `where`, or in memory."""
    model = GPT(CONFIG)
    optimizer = partial(Offloaded, optimizer=make, where=where) if where else make
    zero = Zero(model, stage=3, optimizer=optimizer)
    for batch in batches[getattr(zero.optimizer, "steps", 0) : steps]:
        mark("step")
        x, y = (tensor[[dist.get_rank()]].clone() for tensor in batch)
        one_step(model, zero, x, y)
    mark("end")
    return zero.full_state_dict()


def same(one, other):
    ranks = zip(one, other, strict=True)
    pairs = [(mine[name], theirs[name]) for mine, theirs in ranks for name in mine]
    return all(torch.equal(a, b) for a, b in pairs)


# %%
two = partial(run, sharded, ranks=2, device="cpu")
folder = tempfile.TemporaryDirectory()
PLACE = Path(folder.name)
in_memory, in_files = two(record="memory"), two(PLACE / "watched", record="memory")
assert same(in_memory, in_files)
both, names = (in_memory.recording, in_files.recording), ("in memory", "in files")
draw.memory(*both, step=2, ranks=[0], names=names)

# %% [markdown]
# The parameters are the same, bit for bit. With files, S is in memory only during the optimizer's step, and only the
# state of at most three parameters at a time: one is being read, one is being updated, and one is being written. With
# ZeRO, a "parameter" of the optimizer is the shard of a layer. In this float32 job S takes 8 bytes per parameter. The
# files take 12, since they also hold a copy of each parameter, its master, from which a crashed job can resume. The
# recorder counts mapped files as memory, although the system can free that memory at any time, since the numbers are on
# the disk. Grey is memory that is not P, G, S or A; here AdamW needs it while it computes.

# %%
psi = sum(cost.parameter_sizes(CONFIG))
largest = max(sum(layer.sizes) for layer in cost.gpt_layers(CONFIG))
three = 3 * 12 * largest // 2  # bytes of master and two moments, on one of two ranks
whole, passing = in_memory.recording.steady()["S"], in_files.recording.steady()["S"]
assert passing <= three + 1024 < whole  # AdamW's counters, and room between tensors
print(f"S on each rank: in memory {whole:,} bytes; in files three shards at most, {three:,}")

# %% [markdown]
# Parameters can be offloaded, too, if there is time to read them in every forward and backward: `to_file` returns a
# tensor with the same numbers in a mapped file. In stage 3 these tensors would be the shards, with a folder for each
# rank. Nothing else in the program changes. The next cell compares only the losses.

# %%
from labs.memory.mapped_files import to_file


def losses(where=None):
    """Return the losses of two steps, with the parameters in files if a folder is given."""
    model, found = GPT(CONFIG), []
    for name, p in model.named_parameters():
        p.data = to_file(p.data, where / name) if where else p.data
    optimizer = adamw(model.parameters())
    for x, y in batches[:2]:
        found.append(model(x, y))
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in found]


one = partial(run, losses, ranks=1, device="cpu")
assert one(PLACE) == one()

# %% [markdown]
# ## Build: overlapped
#
# A disk is slow. If the optimizer fetches the state of a parameter, updates it, stores it, and only then begins with
# the next parameter, it waits for the disk most of the time. During each update the disk waits for the optimizer. So
# let a *thread* fetch and store: while the optimizer updates parameter n, the thread stores the state of parameter n −
# 1 and fetches that of parameter n + 1.
#
#     thread      fetch 0   fetch 1    store 0  fetch 2    store 1  fetch 3    store 2  ...
#     caller                update 0   update 1            update 2            update 3
#
# The thread must not run further ahead: if it fetched *all* states at once, all of S would be in memory again.
#
# ### Exercise 1: the next is on its way (10 minutes)
#
# `ThreadPoolExecutor(1)` is one thread that runs the calls that you submit, one after another. `thread.submit(f, a, b)`
# submits the call `f(a, b)` and returns at once a *future*. `.result()` of the future waits until the call is done, and
# returns the call's result or raises its exception. At the end of a `with` block of the executor, all submitted calls
# are done. Consider three questions:
#
# - Which call must be submitted before `update` begins, so that it runs during the update?
# - `due` may be empty, or have only one parameter. What must your function do after the last update?
# - If the disk is full in the middle of a step, `store` raises in the thread. How does your function notice?
#
# Budget: the state of at most three parameters at a time.


# %%
def offloaded_step(due, fetch, update, store):
    """Take a step of an optimizer whose state is on another tier: fetch, update and store the
    state of every parameter.

    due: the numbers of the parameters to update, in the order of their updates; perhaps none
    fetch: fetch(i) returns the state of parameter i; it is slow, so call it in the thread
    update: update(i, values) returns the new state
    store: store(i, values) stores the state; it is slow, too

    Raise the exceptions of fetch and store. When this function returns, everything is stored.
    """
    ### BEGIN SOLUTION
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        stored = []
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()  # raises what the store raised
    ### END SOLUTION


answer = check.offloaded_step(offloaded_step)
answer

# %% [markdown]
# From here on the notebook uses your step if it is right, and otherwise the course's, `one_ahead`, which
# `Offloaded.step` calls with its own `fetch`, `updated` and `store`. To show when each of the three calls runs, the
# next cells use calls that only take time: a fetch and a store take 10 ms each, and an update takes 20 ms.

# %%
PAUSES = {"fetch": 0.010, "update": 0.020, "store": 0.010}  # seconds
spent = []


def slow(name):
    """Return a call that takes its time, and records when it began and ended."""

    def call(i, values=None):
        begin = time.perf_counter()
        time.sleep(PAUSES[name])
        spent.append((name, begin, time.perf_counter()))
        return values

    return call


# %%
def step_of(parameters, how):
    """Return the seconds of a step, and whether anything was fetched or stored during an
    update."""
    spent.clear()
    start = time.perf_counter()
    how(list(range(parameters)), *map(slow, PAUSES))
    lasted = time.perf_counter() - start
    updates = [span for name, *span in spent if name == "update"]
    others = [span for name, *span in spent if name != "update"]
    pairs = [(each, update) for each in others for update in updates]
    return lasted, any(begin < until and since < end for (begin, end), (since, until) in pairs)


def one_by_one(due, fetch, update, store):
    for i in due:
        store(i, update(i, fetch(i)))


# %%
mine = offloaded_step if answer.ok else one_ahead
for name, how in {"one after the other": one_by_one, "overlapped": mine}.items():
    lasted, beside = step_of(8, how)
    assert beside == (how is mine)
    print(f"{name}: {1000 * lasted:.0f} ms")

# %% [markdown]
# ### Exercise 2: how long does it take? (10 minutes)
#
# Without overlap, a step of 8 parameters takes 8 × (10 + 20 + 10) ms. How long does it take with overlap? Take a
# pencil, and look at the two lines of the diagram above. Call the time from the beginning of one update to the
# beginning of the next update a *slot*. In a slot the caller does one update. Which calls does the thread do in the
# same slot? The slot lasts until both are done. What happens before the first slot, and what after the last?


# %%
def step_seconds(fetch, update, store):
    """Return the seconds of a step in which one thread fetches and stores beside the updates.

    fetch, update, store: lists of seconds, one number per parameter; all are empty if no
        parameter is updated
    """
    ### BEGIN SOLUTION
    if not update:
        return 0
    total = fetch[0] + store[-1]
    for n in range(len(update)):
        coming = fetch[n + 1] if n + 1 < len(fetch) else 0
        going = store[n - 1] if n > 0 else 0
        total += max(update[n], going + coming)
    return total
    ### END SOLUTION


answer = check.step_seconds(step_seconds)
answer

# %%
formula = step_seconds if answer.ok else check.step_seconds.expected
predicted = formula(*([seconds] * 8 for seconds in PAUSES.values()))
print(f"predicted {1000 * predicted:.0f} ms, measured {1000 * lasted:.0f} ms")

# %% [markdown]
# The measured time is a little longer, since it takes time to wake up a thread. The formula shows how much overlap can
# save. If fetching and storing together take no longer than an update, they cost almost no time, and a slower disk
# would be enough. If they take longer, the step takes as long as fetching and storing, and a faster update would not
# help.
#
# > **What went wrong in the wild.** *Symptom*: training with the optimizer on the CPU gives different numbers from
# > training without it, and no small test shows the difference. *Cause*: gradients were copied from the GPU to the host
# > by `copy_(..., non_blocking=True)`, which returns before the numbers have arrived, and no code waited for them. So
# > now and then the optimizer read old numbers. The copy was made blocking
# > ([fairscale#496](https://github.com/facebookresearch/fairscale/pull/496), March 2021). In your exercise the call of
# > `.result()` waits.

# %% [markdown]
# ## Build: a crash in the middle
#
# The state is on disk, so it survives when the process is killed. But *which* state is on the disk? Suppose a rank is
# killed after it has updated only some of its shards. A file that holds half of a step is worse than no file.
#
# The next cell makes this happen. On rank 1, in the third step, at its fourth shard, the process kills itself, so that
# no `except` or `finally` can run.


# %%
def killed(at):
    """Return a function that makes an AdamW for each shard and step; rank 1 dies when it should
    make number `at`."""
    count = itertools.count()

    def make(params):
        if dist.get_rank() == 1 and next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return adamw(params)

    return make


shards = len(cost.gpt_layers(CONFIG))  # in a step
crashed = PLACE / "crashed"
try:
    # one AdamW is made before, to learn its options
    two(crashed, killed(at=1 + 2 * shards + 3))
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Which steps are in the folder of each rank? A *generation* is the set of files that one step has stored, or the state
# before the first step. The next cell lists them, and then makes the same call on the same folder, with an AdamW that
# does not kill the process:

# %% tags=["nbval-ignore-output"]
for rank in sorted(crashed.iterdir()):
    print(rank.name, *sorted(path.stem for path in rank.glob("generation-*.json")))
survived = two(crashed)
assert same(survived, in_memory)

# %% [markdown]
# Training went on after step 2, the last step that *both* ranks had finished, and its result is bit for bit that of the
# training without a crash. The reason is that a step never overwrites the files of the last complete step. It writes
# new files. When all of them are safely on the disk, it commits them: it *renames* one small file that lists their
# names. A rename has either happened or not. If one rank has renamed its file and the other rank has not, both ranks go
# back to the step before, whose files still exist. [labs/memory/disk.py](../labs/memory/disk.py) implements this. So
# the folder holds two generations:

# %%
found = sum(path.stat().st_size for path in crashed.glob("rank-*/*.[0-9]*"))
folder.cleanup()
draw.ledger({"in files, two generations": (2 * 12 * psi, found)}, within=0.01)

# %% [markdown]
# ## Build: build a model that no rank holds whole
#
# A rank also holds too much before the first step: `GPT(config)` builds *all* parameters on every rank, even if they
# are sharded right afterwards. On 1,000 ranks in stage 3 this takes 1,000 times the memory of the shards.
#
# PyTorch has a device for this, **meta**: its tensors have a shape and a dtype, but no memory. Anyone can build a model
# of 405 billion parameters on it:

# %%
with torch.device("meta"):
    giant = GPT(PRESETS["llama3-405b"])
print(f"{sum(p.numel() for p in giant.parameters()):,} parameters, and not a byte of memory")

# %% [markdown]
# Then each rank has to *materialise* its shards, which means to fill them with their initial numbers. In this course
# the initial numbers of a parameter depend only on its name and the seed, so any rank can compute them, with
# `labs.model.initial_value`. `Zero(..., initial=...)` computes them for one layer at a time.


# %%
def built(device):
    """Return all parameters by name, as they are after building and sharding."""
    mark("step")
    with torch.device(device):
        model = GPT(CONFIG)
    initial = partial(initial_value, seed=0) if device == "meta" else None
    zero = Zero(model, stage=3, optimizer=adamw, initial=initial)
    mark("end")
    return zero.full_state_dict()


watched = partial(run, built, ranks=4, record="memory", device="cpu")
on_cpu, on_meta = watched("cpu"), watched("meta")
assert same(on_cpu, on_meta)
whole, kinds = (each.recording.held(step=0) for each in (on_cpu, on_meta))
draw.bars({"built whole": whole, "built on meta": kinds})

# %% [markdown]
# Both ways give the same parameters. But with meta no rank ever held more than a quarter of them, and two copies of one
# layer while the layer was cut. Here this saves a megabyte. With 405 billion parameters it decides whether the job can
# start at all.

# %%
shard = 4 * sum(cost.parameter_sizes(CONFIG)) // 4
two_layers = 2 * 4 * sum(cost.gpt_layers(CONFIG)[1].sizes)
rows = {
    "a quarter of P": (shard, kinds["P"]),
    "two copies of a layer, as it is cut": (two_layers, kinds["temporary"]),
}
draw.ledger(rows)

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a model that was built on meta learns less than the same model built as
# > usual, and its adapters for q and k learn nothing at all. *Cause*: the model kept its rotary tables as *buffers*
# > that are in no checkpoint. On meta these buffers have no numbers either, and `to_empty` gave them memory with
# > arbitrary numbers in it. Then q and k were multiplied by these numbers
# > ([UniRL#207](https://github.com/Tencent-Hunyuan/UniRL/pull/207), July 2026). All tensors that `__init__` computes
# > have to be computed again after `to_empty`. The course's model has no buffers.
#
# ## Native
#
# PyTorch builds a large model in the same three steps: build it on meta, call `fully_shard`, and then `to_empty`. The
# last call gives every shard memory without numbers, and you initialise or load the numbers.

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


# %%
@torch.no_grad()
def torchs():
    mark("step")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = GPT(CONFIG)
    for module in [*model.layers.values(), model]:
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        parts = initial_value(name, p.shape, seed=0).chunk(mesh.size())
        p.to_local().copy_(parts[mesh.get_rank()])
    mark("end")
    return {name: p.full_tensor() for name, p in model.named_parameters()}


# %%
native = run(torchs, ranks=4, record="memory", device="cpu")
assert same(on_meta, native)
peaks = {"built whole": on_cpu, "on meta, ours": on_meta, "on meta, PyTorch's": native}
held = {name: job.recording.held(step=0)["peak"] for name, job in peaks.items()}
draw.table([{"": name, "peak, MiB": round(size / 2**20, 2)} for name, size in held.items()])

# %% [markdown]
# PyTorch holds even less: it cuts each parameter by itself, so that only one parameter at a time is whole. Ours cuts
# layer by layer.
#
# For offloading, `fully_shard` takes a policy. `CPUOffloadPolicy` keeps shards and gradients in host memory, and so the
# optimizer's state, too, and the host takes the optimizer's step. So P, G and S are all offloaded, and a shard is
# copied to the GPU before every gather. `save_on_cpu` moves *activations* to host memory, with the hooks of
# notebook 07. The next cells train the same steps with each of the two:

# %%
from contextlib import nullcontext

from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


def natively(policy, activations):
    """Return all parameters by name, after the same steps with PyTorch's offloading."""
    model, mesh = GPT(CONFIG), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model.layers.values(), model]:
        fully_shard(module, mesh=mesh, offload_policy=policy)
    optimizer = adamw(model.parameters())
    for batch in batches:
        with activations():
            one_step(model, optimizer, *(tensor[[dist.get_rank()]] for tensor in batch))
    assert {p.to_local().device.type for p in model.parameters()} == {"cpu"}
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


# %%
PLACES = (
    (OffloadPolicy(), nullcontext),
    (CPUOffloadPolicy(pin_memory=False), nullcontext),
    (OffloadPolicy(), save_on_cpu),
)
on_device, offloaded, saved = (run(natively, *place, ranks=2, device="cpu") for place in PLACES)
assert same(on_device, offloaded) and same(on_device, saved)
ours = in_memory[0]
off = max((value - ours[name]).abs().max().item() for name, value in offloaded[0].items())
print(f"the same bits in all three; within 1e-5 of ours: {off < 1e-5}")

# %% [markdown]
# The numbers do not change, since offloading only moves them. The memory that it saves cannot be measured here: the
# device that computes *is* the host, so an offloaded shard stays in the same memory, and an offloaded activation is
# held twice. `pin_memory=False` is for a host without a GPU, since memory is pinned so that a GPU's copy engines can
# access it. DeepSpeed has ZeRO-Offload and ZeRO-Infinity, the originals of the methods in this notebook.
#
# ## The memory explorer
#
# The explorer shows recomputation and offloading together, from the same formulas, for 16-bit training with fused
# norms. It begins with our question: one GPU, with full recomputation. Try the following in this order, and each time
# guess before you look:
#
# - Offload the optimizer state. Does the job fit on a GPU of 40 GB now? Does it fit on one of 24 GB?
# - Take 8 ranks. Does stage 3 or offloading save more memory then? And on 64 ranks?
# - Give each rank a sequence of 131,072 tokens. Which kind is too large now? Recomputation of layers does not help with
#   the head, whose logits and their gradients take most of the memory. A later notebook splits the head.

# %%
play.memory(model="llama3-8b", ranks=1, batch=1, context=8192, recompute="full", card="40 GB")

# %%
offloaded = cost.per_rank(one_card, stage=0, offload=True)
assert offloaded.peak < 40e9
print(f"one card, offloaded: {offloaded.peak / 1e9:.1f} GB")

# %% [markdown]
# ## Why, and why not
#
# | | saves memory for | costs | use it with |
# |---|---|---|---|
# | state in host memory | all of S | 2 + 2 bytes sent per parameter and step | few ranks, many tokens per step |
# | state on disk | all but the S of three parameters | 12 + 12 bytes more | few ranks, many more tokens per step |
# | building on meta | the peak before the first step | nothing | every large model |
#
# **Why not** offload always? The link is slow, and the same bytes are sent in every step, however small the batch. They
# cost no time if the step's arithmetic takes longer than sending them. How long does the arithmetic take? A parameter
# of a matrix is used once for each token in forward, in one multiplication and one addition, which are 2 operations. In
# backward it is used twice, for the gradient of its input and for its own gradient, which makes 4 operations. So a step
# with Ψ parameters and n tokens does 6Ψn operations.
#
# At R operations per second they take 6Ψn/R seconds. Suppose that offloading sends c bytes per parameter, at W bytes
# per second. This takes cΨ/W seconds. So the arithmetic takes longer if n > c/6 × R/W. Ψ cancels, as it did for the
# all-reduce. This is a limit for any offloading; ours overlaps only with the updates. The bandwidths in the next cell
# are typical values, which the course has not measured, since that takes a GPU.

# %%
# per second, as one H100 reaches in practice (Llama 3, arXiv 2407.21783, table 4)
OPERATIONS = 400e12
TIERS = {
    "host memory, PCIe 5 at 50 GB per second": (4, 50e9),
    "disk, at 5 GB per second": (24, 5e9),
}
rows = []
for tier, (c, W) in TIERS.items():
    least = {"tokens per step and device, at least": round(c / 6 * OPERATIONS / W)}
    rows.append({"tier": tier, "bytes per parameter": c} | least)
draw.table(rows)

# %% [markdown]
# Thousands of tokens fit in one micro-batch, so offloading to host memory costs no extra time, if the CPU updates the
# state fast enough. Hundreds of thousands of tokens are many micro-batches, so a disk is for people with much time and
# few GPUs. And with many ranks offloading gains little: in stage 3 on 64 ranks, each rank holds only 1/64 of S.
#
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Why do we offload S first, and not P or G?</summary>
#
# S is the largest kind, with 12 of 16 bytes per parameter, and the optimizer reads and writes it only once per step.
# Parameters are read twice in every micro-batch.
# </details>
#
# <details><summary>Why is the optimizer's step taken where the state is?</summary>
#
# Otherwise 12 bytes of state per parameter would have to be sent to the GPU, and 12 bytes back. When the host takes the
# step, only the gradient is sent to the host and the parameter to the GPU, 2 + 2 bytes.
# </details>
#
# <details><summary>While one parameter is updated, what does the thread do, and why not more?</summary>
#
# The thread stores the state of the previous parameter and fetches the state of the next one. If it fetched all states
# ahead, all of S would be in memory again.
# </details>
#
# <details><summary>A rank is killed while it writes its state. Why can the training still resume correctly?</summary>
#
# A step writes new files, which are committed only when a small file with their names has been renamed. Until then the
# step before is the last complete one, and none of its files has been overwritten. All ranks go back to the last step
# that all of them have committed.
# </details>
#
# Answer from memory, for 16-bit training with AdamW, in bytes per parameter. How large is the state? In a step, how
# many bytes are sent down to the host, and how many up to the GPU? How many bytes are read from the disk, if the state
# is there?

# %%
state = 12  # your number
down = 2  # your number
up = 2  # your number
read = 12  # your number

# %%
guesses = {"state": state, "down": down, "up": up, "read from the disk": read}
for (what, said), due in zip(guesses.items(), (12, 2, 2, 12), strict=True):
    print(check.predict(f"Bytes per parameter, {what}?", said, due))

# %% [markdown]
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | S between steps, in files | 0 | 0 | – |
# | S during a step, in files | three shards at most | as predicted | – |
# | files of two generations | 2 × 12 bytes per parameter | as predicted, within 1 % | – |
# | built on meta | a quarter of P; two copies of a layer | exactly as predicted | less: it cuts by parameter |
# | numbers | equal to those of the job in memory | the same bits | the same bits |
#
# ## Beat it: a step under which the disk disappears (30 minutes)
#
# The thread of exercise 1 fetches one parameter ahead, in the order of the parameters, and begins when all gradients
# are ready. In this challenge you choose the order. Three devices work side by side, each on one task at a time. The
# **GPU** computes forward and backward of all layers, in two steps. The **processor** updates states. The **disk**
# reads or writes one state at a time, which takes latency + bytes/W. A layer's update needs the layer's gradient, and
# its state in memory; the layer's next forward needs the update. Your list gives the tasks of the processor and of the
# disk: `("read", 7)`, `("update", 7)`, `("write", 7)`. Each of the two does its own tasks in the order of the list. The
# disk does not wait for memory: it begins its next task as soon as the last one is over. So a write that makes room for
# a read must come before that read in the list. A state takes memory from the beginning of its read to the end of its
# write, and all states must be on the disk at the end. `measured(instructions, given)` returns how long the two steps
# take, and how
# many bytes are held at most.
#
# **The bound.** Let C be the GPU's time for forward and backward of one step, u the time of the first layer's update, d
# the sum of latency + bytes/W over all layers and d_first that of the first layer, M the bytes of all states, B the
# room in memory and W the disk's bandwidth.
#
# time ≥ max(2 (C + u) + d_first, 2d + 2 · max(0, M − B)/W)
#
# No list can beat the first term: the first layer's gradient is ready last, so in each step its update comes after all
# of the GPU's work, and its write comes after the second update. And none can beat the second: the disk reads and
# writes each state at least once, and reads and writes those that do not fit in memory between the two steps again.
#
# The score of a model is 100 × bound / time, and your score is the mean over five models. If you read, update and write
# one layer after the other, you score 51.6. The check also executes your lists, and the numbers on the disk must be
# those of a training in memory.

# %%
measured = beat.hidden_disk.measured
rows = []
for name, given in beat.hidden_disk.cases.items():
    sizes = " ".join(str(n // 1_000_000) for n in given.nbytes)
    forward = " ".join(f"{1000 * each:.0f}" for each in given.forward)
    row = {"": name, "state in MB, by layer": sizes, "forward, ms": forward}
    rows.append(row | {"room, MB": given.budget // 1_000_000})
draw.table(rows)


# %%
def so_far_ahead(depth, ahead):
    """Read each state `ahead` updates before its own, and write it after its update."""
    uses, read, found = [*reversed(range(depth))] * 2, 0, []
    for n, layer in enumerate(uses):
        soon = uses[read : n + 1 + ahead]
        found += [("read", other) for other in soon] + [("update", layer), ("write", layer)]
        read += len(soon)
    return found


for each in so_far_ahead(depth=2, ahead=1)[:5]:
    print(*each)


# %%
def disk_disappears(nbytes, forward, update, budget, latency, bandwidth):
    """Return the tasks of the processor and the disk in two steps: [("read", 7), ("update", 7),
    …].

    nbytes, forward, update: lists with one number per layer, the first layer first: the bytes
        of the layer's state, and the seconds of its forward and of its update; a backward takes
        twice its forward
    budget: the bytes of states that may be held at any moment
    latency: seconds per read or write
    bandwidth: bytes per second

    measured(instructions, (nbytes, forward, …)) returns (seconds, most bytes held). You may
    search for up to ten seconds per call.
    """
    ### BEGIN SOLUTION
    given = nbytes, forward, update, budget, latency, bandwidth
    tried = [so_far_ahead(len(nbytes), ahead) for ahead in range(len(nbytes) - 1)]
    fitting = [each for each in tried if measured(each, given)[1] <= budget]
    return min(fitting, key=lambda each: measured(each, given)[0])
    ### END SOLUTION


beat.hidden_disk(disk_disappears)

# %% [markdown]
# The course's answer reads every state the same number of updates ahead, and writes each state right after its update.
#
# <details><summary>Where can time be saved?</summary>
#
# Keep some states in memory between the steps: each of them saves a write and a read. Delay writes while there is room
# in memory, so that reads, for which an update waits, come first. And update the first layers early, since the next
# step's forward waits for them.
# </details>
#
# **Read on**: [labs/memory/offload.py](../labs/memory/offload.py), [labs/memory/disk.py](../labs/memory/disk.py). Ren
# et al., 2021, *ZeRO-Offload* (arXiv 2101.06840). Rajbhandari et al., 2021, *ZeRO-Infinity* (arXiv 2104.07857).
#
# **Next.** The folder of this notebook survives a crash, but it belongs to two ranks, and each rank has its own part of
# it. How can three ranks load it, and what else must a training save? [08 Checkpoints](08_checkpoint.ipynb) answers
# these questions.
#
# To get a clean copy of this notebook, run `git restore notebooks/07b_offload.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
