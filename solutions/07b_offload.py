# %% [markdown]
# # Offload: state on another tier
#
# *One card, and no second rank to share with: P, G and S do not fit, however often activations are computed again.
# Where else is there memory, and what does it cost to get there?*
#
# **Minutes**, by estimate: 30 without exercises, 50 with them, 35 more for the challenge.
# The machine works for half a minute of it, in 2 GB of memory. You need: [Memory](07_memory.ipynb), where activations
# were counted and computed again, and [ZeRO](04_zero.ipynb).
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

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
# Somebody wants to train 8 billion parameters on *one* card of 40 GB, a sequence of 8,192 tokens at a time, in mixed
# precision. There is no second rank, so no stage of ZeRO helps. Full recomputation makes activations as small as they
# get. What is left? (The numbers come from the formulas, as in notebook 07.)

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
# The highest moment is now the optimizer's step, when activations are gone. (G is a little more than 2 bytes per
# parameter: the optimizer takes the gradient of one parameter at a time in float32.) S is most of it: the float32
# masters, and AdamW's two moments. And S is idle for nearly the whole step. Forward does not read it, backward does not
# read it; the optimizer touches each number of it once, at the end. So it may lie where there is more room.
#
# ## Predict
#
# Two ways to take the optimizer's step. (a) Fetch the state to the card, update there, store it back. (b) Send the
# gradients down in 16 bits, update where the state is, send the parameters back in 16 bits. By what factor does (a)
# send more bytes over the link between the card and its *host*, the computer around it, than (b)? An expression will
# do.

# %%
guess_ratio = (12 + 12) / (2 + 2)  # your number

# %% [markdown]
# ## Picture
#
# Each kind of memory is a **tier**: the closer to the arithmetic, the quicker and the smaller.
#
# ![Three columns. All on the GPU: P, G, S, A. State in host memory: gradients go down, parameters come up, 2 + 2 bytes
# per parameter. State on a disk: in addition, 12 + 12 bytes are read and written in each step.](../images/tiers.svg)
#
# **Offloading** is putting state on a lower tier. From a GPU, the next tier is the memory of its host (this is called
# ZeRO-Offload). Below it comes the disk (ZeRO-Infinity; it uses fast disks, *NVMe*). On a laptop the ranks are in host
# memory already, so the disk is a real next tier: files that are **memory-mapped**, so that a program reads and writes
# them as if they were tensors.

# %%
up_and_down = 12 + 12  # bytes per parameter: the state
down_and_up = 2 + 2  # gradients and parameters
times = up_and_down / down_and_up
check.predict("(a) sends more bytes than (b), by a factor of", guess_ratio, times)

# %% [markdown]
# So the step is taken *where the state lives*, by the host's own processor.
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
# used wherever an optimizer can; here it is used inside stage 3. The loop resumes after the last step that is safely in
# the folder.


# %%
def sharded(where=None, make=adamw, steps=4):
    """All parameters by name, after training in stage 3 with the state in the folder `where`,
    or in memory."""
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
# The same parameters, bit for bit; and S no longer lies beneath everything else. It shows up only in the optimizer's
# step, and for at most three parameters at a time (under ZeRO a "parameter" is the shard of a layer): one is on its way
# in, one is being updated, one is on its way out. (In this float32 job S is 8 bytes per parameter. The files also hold
# a copy of each parameter, its master, from which a crashed job can go on: that makes 12.) The recorder counts mapped
# files as memory; the system can take that memory back whenever it likes, as the numbers are on the disk. Grey is what
# the recorder cannot call P, G, S or A: here, what AdamW needs while it works.

# %%
psi = sum(cost.parameter_sizes(CONFIG))
largest = max(sum(layer.sizes) for layer in cost.gpt_layers(CONFIG))
three = 3 * 12 * largest // 2  # bytes of master and two moments, on one of two ranks
whole, passing = in_memory.recording.steady()["S"], in_files.recording.steady()["S"]
assert passing <= three + 1024 < whole  # AdamW's counters, and room between tensors
print(f"S on each rank: in memory {whole:,} bytes; in files three shards at most, {three:,}")

# %% [markdown]
# Parameters can go the same way, if there is time to read them in every forward and backward: `to_file` gives the same
# numbers in a mapped file. (Under stage 3 these would be the shards, with a folder for each rank.) Nothing else in the
# program changes; only the loss is compared here.

# %%
from labs.memory.mapped_files import to_file


def losses(where=None):
    """The losses of two steps; with the parameters in files, if a folder is given."""
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
# A disk is slow. If the optimizer fetches the state of a parameter, updates it, stores it, and only then turns to the
# next, it waits for the disk most of the time. Meanwhile the disk waits for the optimizer. So let a *thread* do the
# fetching and storing: while parameter n is updated, the thread stores n − 1 and fetches n + 1.
#
#     thread      fetch 0   fetch 1    store 0  fetch 2    store 1  fetch 3    store 2  ...
#     caller                update 0   update 1            update 2            update 3
#
# It must not run further ahead: fetching *everything* at once would bring all of S back into memory.
#
# ### Exercise 1: the next is on its way (10 minutes)
#
# `ThreadPoolExecutor(1)` is one thread that runs the calls it is given, in that order. `thread.submit(f, a, b)` hands
# it `f(a, b)` and returns at once, with a *future*: its `.result()` waits until the call is done, and returns what the
# call returned, or raises what it raised. At the end of a `with` block of the executor, everything that was submitted
# is done. Three things to think about:
#
# - Which call must be submitted before `update` begins, so that it runs during the update?
# - `due` may be empty, or have one parameter only. What follows the last?
# - The disk is full in the middle of a step: `store` raises, in the thread. Who finds out?
#
# Budget: the state of three parameters at a time.


# %%
def offloaded_step(due, fetch, update, store):
    """A step of an optimizer whose state is on another tier: every parameter is fetched,
    updated, stored.

    due: the numbers of the parameters, in the order of their updates; perhaps none
    fetch(i) -> values, and store(i, values): slow, so not the caller's work
    update(i, values) -> the new values
    Raises what fetch and store raise. When it returns, everything is stored.
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
# (From here on your step is used if it is right, else the course's, `one_ahead`, which `Offloaded.step` calls with its
# own `fetch`, `updated` and `store`.) To see when each of the three runs, here are some that do nothing but take time:
# a fetch and a store take 10 ms each, an update 20 ms.

# %%
PAUSES = {"fetch": 0.010, "update": 0.020, "store": 0.010}  # seconds
spent = []


def slow(name):
    """A call that takes its time, and notes when it began and ended."""

    def call(i, values=None):
        begin = time.perf_counter()
        time.sleep(PAUSES[name])
        spent.append((name, begin, time.perf_counter()))
        return values

    return call


# %%
def step_of(parameters, how):
    """Seconds, and whether anything was fetched or stored during an update."""
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
# One after the other, a step of 8 parameters takes 8 × (10 + 20 + 10) ms. How long does it take with overlap? Take a
# pencil, and look at the two lines above: between the beginning of one update and the beginning of the next lies a
# *slot*. The caller has an update to do in it. What does the thread have to do? The slot lasts until both are done.
# What comes before the first slot, and what after the last?


# %%
def step_seconds(fetch, update, store):
    """Seconds of a step in which one thread fetches and stores beside the updates.

    fetch, update, store: lists of seconds, one number per parameter; all are empty if nothing
    is due
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
# (The measured time is a little longer: threads have to be woken up.) The formula says what overlap can do and what it
# cannot. If fetching and storing together take no longer than an update, they cost almost nothing, and a slower disk
# would do. If they take longer, the step takes as long as *they* do, and a quicker update would not help.
#
# > **What went wrong in the wild.** *Symptom*: training with the optimizer on the CPU gives different numbers from
# > training without it; no small test shows the difference. Gradients went from the GPU to the host by
# > `copy_(..., non_blocking=True)`, which returns before the numbers have arrived, and nothing waited for them: now and
# > then the optimizer read what had been there before. The copy was made blocking
# > ([fairscale#496](https://github.com/facebookresearch/fairscale/pull/496), March 2021). In your exercise it is
# > `.result()` that waits.

# %% [markdown]
# ## Build: a crash in the middle
#
# The state is on disk, so it is still there when the process is not. But *which* state? Suppose a rank is killed when
# it has updated only some of its shards. A file with half a step in it is worse than none.
#
# Let us do that. On rank 1, in the third step, at its fourth shard, the process kills itself: no `except`, no goodbye.


# %%
def killed(at):
    """A function that makes an AdamW, for each shard and step; rank 1 dies when it should make
    number `at`."""
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
# Which steps are in the folder, rank by rank? (A *generation* is what one step, or the beginning, has stored.) Then the
# same call again, on the same folder, with an AdamW that survives:

# %% tags=["nbval-ignore-output"]
for rank in sorted(crashed.iterdir()):
    print(rank.name, *sorted(path.stem for path in rank.glob("generation-*.json")))
survived = two(crashed)
assert same(survived, in_memory)

# %% [markdown]
# Training went on after step 2, the last that *both* ranks had finished, and it ends where the undisturbed training
# ended, bit for bit. Why? What a step stores never overwrites what is committed. It goes to new files; when all of them
# are safely on the disk, one small file with their names is *renamed* to be the one that counts. A rename has either
# happened or not. If one rank has renamed and the other has not, both go back to the step before: its files are still
# there ([labs/memory/disk.py](../labs/memory/disk.py)). That is why the folder holds two generations:

# %%
found = sum(path.stat().st_size for path in crashed.glob("rank-*/*.[0-9]*"))
folder.cleanup()
draw.ledger({"in files, two generations": (2 * 12 * psi, found)}, within=0.01)

# %% [markdown]
# ## Build: never whole
#
# There is one more moment when a rank holds too much, and it comes before the first step: `GPT(config)` builds *all* of
# the parameters, even if they are cut right afterwards. On 1,000 ranks in stage 3 that is 1,000 times the memory that
# is needed.
#
# PyTorch has a device for this, **meta**: its tensors have a shape and a dtype, but no memory. Anyone can build a model
# of 405 billion parameters on it:

# %%
with torch.device("meta"):
    giant = GPT(PRESETS["llama3-405b"])
print(f"{sum(p.numel() for p in giant.parameters()):,} parameters, and not a byte of memory")

# %% [markdown]
# Then each rank has to *materialise* its shards: fill them with the numbers they start from. In this course each
# parameter starts from numbers that depend on its own name and the seed (`labs.model.initial_value`), so any rank can
# make any of them. `Zero(..., initial=...)` asks for them one layer at a time.


# %%
def built(device):
    """All parameters by name, as they are after building and sharding."""
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
# The same parameters; but on meta no rank ever held more than a quarter of them, and two copies of one layer while it
# was cut. Here that saves a megabyte. With 405 billion parameters it decides whether the job starts at all.

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
# > usual, and its adapters for q and k learn nothing at all. It kept its rotary tables as *buffers* that are in no
# > checkpoint. On meta these have no numbers either, and `to_empty` gave them memory with whatever happened to be in
# > it. Then q and k were multiplied by that ([UniRL#207](https://github.com/Tencent-Hunyuan/UniRL/pull/207), July
# > 2026). Whatever `__init__` computes has to be computed again after `to_empty`. (The course's model has no buffers.)
#
# ## Native
#
# PyTorch's way to build a large model has the same three steps: build on meta, `fully_shard`, then `to_empty`, which
# gives every shard memory without numbers, to be initialised or loaded.

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
# PyTorch's holds even less, since it cuts each parameter by itself, so that only one at a time is whole here; ours cuts
# layer by layer.
#
# For offloading, `fully_shard` takes a policy. `CPUOffloadPolicy` keeps shards, gradients and so the optimizer's state
# in host memory, and the optimizer's step is taken there: P and G are offloaded as well as S, and a shard travels up
# before every gather. `save_on_cpu` puts *activations* in host memory, with the hooks of notebook 07. Here both train
# the same steps once more:

# %%
from contextlib import nullcontext

from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


def natively(policy, activations):
    """All parameters by name, after the same steps with PyTorch's offloading."""
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
# The numbers are what they were: offloading moves them, and computes nothing else. What it saves cannot be seen here.
# The device that computes *is* the host, so a shard is where it was, and a saved activation is there twice.
# `pin_memory=False` is for a host without a GPU: memory is pinned so that a GPU's copy engines may reach it. DeepSpeed
# has ZeRO-Offload and ZeRO-Infinity, the originals of this lesson.
#
# ## The memory explorer
#
# Recomputation and offloading in one picture, from the same formulas, for 16-bit training with fused norms. It begins
# with our question: one card, full recomputation. Guess each time before you look, then try, in this order:
#
# - Offload the optimizer state. Does it fit a card of 40 GB now? Of 24?
# - Take 8 ranks. Which of stage 3 and offloading saves more then? On 64?
# - Give each rank a sequence of 131,072 tokens. What is in the way now? (Recomputing layers leaves the head alone: its
#   logits and their gradients are what you see then. Later notebooks take that up.)

# %%
play.memory(model="llama3-8b", ranks=1, batch=1, context=8192, recompute="full", card="40 GB")

# %%
offloaded = cost.per_rank(one_card, stage=0, offload=True)
assert offloaded.peak < 40e9
print(f"one card, offloaded: {offloaded.peak / 1e9:.1f} GB")

# %% [markdown]
# ## Why, and why not
#
# | | what shrinks | what it costs | when |
# |---|---|---|---|
# | state in host memory | S, to nothing | 2 + 2 bytes per parameter and step | few ranks, many tokens per step |
# | state on disk | S, to that of three parameters | 12 + 12 bytes more | the same, and patience |
# | meta | the peak before the first step | nothing | always |
#
# **Why not** always? Because the link is slow, and the traffic comes in every step, however small the batch. It can be
# hidden behind arithmetic, if there is enough of that. How much is there? A parameter of a matrix is used once for each
# token in forward: one multiplication, one addition, 2 operations. In backward it is used twice, once for the gradient
# of its input and once for its own: 4 operations. Together 6 for each parameter and token: 6Ψn for n tokens.
#
# At R operations per second these take 6Ψn/R seconds. At c bytes per parameter and W bytes per second, the traffic
# takes cΨ/W. So n must be above c/6 × R/W. Ψ cancels, as it did for the all-reduce. (Ours hides the traffic behind the
# updates only; this is the most that any offloading could hide. The bandwidths are typical ones, and were not measured
# here, since that takes a GPU.)

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
# Thousands of tokens are one micro-batch, so state in host memory can be hidden, if the CPU is quick enough to update
# it. Hundreds of thousands are many micro-batches in a row: disks are for those who have time but no cards. And with
# many ranks there is nothing left to gain: stage 3 on 64 ranks leaves 1/64 of S on each.
#
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>Why is it S that is offloaded first, and not P or G?</summary>
#
# It is the largest kind, 12 of 16 bytes per parameter, and it is touched once per step. Parameters are read twice in
# every micro-batch.
# </details>
#
# <details><summary>Why is the optimizer's step taken where the state lives?</summary>
#
# Otherwise 12 bytes per parameter would have to come up and 12 go down. This way only the gradient goes down and the
# parameter comes up, 2 + 2 bytes.
# </details>
#
# <details><summary>While one parameter is updated, what does the thread do, and why not more?</summary>
#
# It stores the one before and fetches the next. If it fetched all of them ahead, all of S would be in memory again.
# </details>
#
# <details><summary>A rank is killed while it writes its state. Why is the training not spoiled?</summary>
#
# What is written lies in new files, and counts only when a small file with their names has been renamed. Until then the
# step before counts, and none of its files was overwritten. All ranks go back to the last step that all of them have.
# </details>
#
# And from memory: 16-bit training with AdamW, in bytes per parameter. How many are the state? How many go
# down to the host in a step, and how many come up? How many are read from the disk, if the state lies there?

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
# | S during a step, in files | three shards at most | no more | – |
# | files of two generations | 2 × 12 bytes per parameter | the same within 1 % | – |
# | built on meta | a quarter of P; two copies of a layer | the same, exactly | less: by parameter |
# | numbers | those of the job in memory | the same bits | the same bits |
#
# ## Beat it: a step under which the disk disappears (30 minutes)
#
# Exercise 1's thread fetches one parameter ahead, in the order of the parameters, and begins when all gradients are
# there. Here it is open. Three work side by side, each at one thing at a time:
# the **GPU** goes through forward and backward of all layers, twice; the **processor** updates states; the **disk**
# reads one, or writes one, in latency + bytes/W. A layer's update needs its state in memory, and its gradient; its next
# forward needs the update. Your list says what the processor and the disk do, each in the order of its own entries:
# `("read", 7)`, `("update", 7)`, `("write", 7)`. The disk never waits for room: a read begins as soon as the disk is
# free, so a write that is to make room for it must stand before it. A state takes room from the beginning of its read
# to the end of its write, and must be on the disk in the end. `measured(instructions, given)` says how long the two
# steps take, and how many bytes are held at most.
#
# **The bound.** Everything has to be computed; the first layer gets its gradient last, so its update comes after each
# backward, and its write after the second. And the disk reads and writes each state once, and once more each that finds
# no room in memory from one step to the next. Two steps take at least the longer of the two: 100 points, in each of
# five models. Read, update and write, one layer after the other, scores 51.6 in their mean. Your lists are also
# obeyed, and the numbers on the disk must be those of a training in memory.
# A score is 100 × bound / time.

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
    """Each state is read so many uses before its own, and written after its update."""
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
    """What the processor and the disk do in two steps: [("read", 7), ("update", 7), …].

    By layer, the first is number 0: bytes of its state, s of its forward and of its update; a
    backward takes twice its forward.  At no moment more than `budget` bytes are held.
    measured(instructions, (nbytes, forward, …)) -> (s, most bytes held).  You may search, for
    up to ten seconds a call.
    """
    ### BEGIN SOLUTION
    given = nbytes, forward, update, budget, latency, bandwidth
    tried = [so_far_ahead(len(nbytes), ahead) for ahead in range(len(nbytes) - 1)]
    fitting = [each for each in tried if measured(each, given)[1] <= budget]
    return min(fitting, key=lambda each: measured(each, given)[0])
    ### END SOLUTION


beat.hidden_disk(disk_disappears)

# %% [markdown]
# The course's answer reads all layers equally far ahead, and writes each after its update.
#
# <details><summary>Where is there room?</summary>
#
# In what stays: a state that is in memory where one step ends saves a write and a read. In writes, which nobody waits
# for, as long as there is room: a read may go first. And in the first layers, for which the next step waits.
# </details>
#
# **Read on**: [labs/memory/offload.py](../labs/memory/offload.py), [labs/memory/disk.py](../labs/memory/disk.py). Ren
# et al., 2021, *ZeRO-Offload* (arXiv 2101.06840). Rajbhandari et al., 2021, *ZeRO-Infinity* (arXiv 2104.07857).
#
# **Next.** This folder survives a crash, but it belongs to two ranks, each with its own part of it. What if there are
# three of them afterwards, and what else has to be remembered? [08 Checkpoints](08_checkpoint.ipynb) saves a training.
#
# A clean copy of this notebook: `git restore notebooks/07b_offload.ipynb`, then *File > Reload Notebook from Disk*.
