# %% [markdown]
# # Checkpoints: a training that survives
#
# *Llama 3 was trained on 16,384 GPUs for 54 days, and in this time 419 of its parts failed without warning. What is
# left of a training when one of its ranks dies?*
#
# It takes 60 minutes with its five exercises, 35 without; the machine works for a minute of it, in 2 GB of memory. You
# need: [FSDP](06_fsdp.ipynb), and from [Offload](07b_offload.ipynb) what a rename is good for.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("08")

# %%
import dataclasses
import io
import json
import math
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

# %%
from torch.optim.lr_scheduler import LambdaLR

from labs.checkpoint import Held, HeldByZero, Saver, load, newest, random_state, save, set_random_state
from labs.data import Batches, corpus
from labs.dtensor import DTensor
from labs.fsdp import fully_shard
from labs.kit import check, draw, exercises, play
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.kit.watch.folders import watched
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from labs.zero import Zero

# %% [markdown]
# ## Question
#
# All ranks work together in every step. So if one of them dies, the others have to stop, too; and what the dead one
# held is gone. Here is what interrupted that training, as its authors counted it (Llama 3, arXiv 2407.21783, table 5):

# %%
INTERRUPTIONS = {"GPU": 268, "software": 56, "network": 35, "maintenance": 32, "host": 21, "unknown": 7}
failures, days, gpus = sum(INTERRUPTIONS.values()), 54, 16_384
between = days * 24 * 3600 / failures  # seconds between two failures of the job
print(f"{failures} failures in {days} days: one in {between / 3600:.1f} h")
print(f"one GPU, by itself: one failure in {between * gpus / 3600 / 24 / 365:.1f} years")
draw.chart(INTERRUPTIONS, "failures", kind="waiting", caption="unexpected interruptions in 54 days")

# %% [markdown]
# Each GPU is reliable. But there are so many of them that some part fails every three hours. A training goes on only if
# it can begin again from something that is still there: a **checkpoint**, which is all that it takes to go on, on disk.
#
# ## Predict
#
# The simplest way: after some steps, each rank calls `torch.save` on its model and its optimizer. On four ranks,
# in float32 with AdamW, how many bytes are written in all, per parameter? (Its state is two moments.)

# %%
guess_naive = 4 * (4 + 8)  # your number
guess_needed = 4 + 8  # how many would be enough?

# %% [markdown]
# ## Build: what is wrong with `torch.save` on every rank
#
# The model is the course's GPT with a little **dropout**: in every forward, a random tenth of what the embedding says
# is left out. So random numbers belong to this training, as they do to many.

# %%
CONFIG = dataclasses.replace(PRESETS["tiny"], depth=2)
TEXT = corpus()
PSI = sum(p.numel() for p in GPT(CONFIG).parameters())
folder = tempfile.TemporaryDirectory()
PLACE = Path(folder.name)


# %%
def small_gpt(seed=0):
    model = GPT(CONFIG, seed=seed)
    model.embed.register_forward_hook(lambda module, args, x: F.dropout(x, 0.1))
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=4e-3)


def by_parameter(model):
    """FSDP: what a rank holds of it, and its optimizer."""
    for part in [*model.layers.values(), model]:
        fully_shard(part, mesh=Mesh((dist.get_world_size(),), ("dp",)))
    optimizer = adamw(model.parameters())
    return Held(model, optimizer=optimizer), optimizer


# %% [markdown]
# Three ways to save a training in FSDP on four ranks: gather all of it, and every rank writes that; gather all of it,
# and rank 0 writes it; and `save`, which this notebook is about.


# %%
@torch.no_grad()
def gather_and_save(model, optimizer, path, ranks):
    """All of it on every rank; these ranks write it."""
    tensors = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
    if dist.get_rank() in ranks:
        torch.save(whole, path)
    return path


LARGER = dataclasses.replace(CONFIG, dim=256, hidden=640)
SIZE = sum(p.numel() for p in GPT(LARGER).parameters())


# %%
WAYS = {"every rank": range(4), "rank 0": range(1), "sharded": range(4)}


def three_ways(place):
    """Of each way: seconds, and the bytes that this rank has written."""
    model, found = GPT(LARGER), []
    held, optimizer = by_parameter(model)
    model(*Batches(TEXT.tokens, 1, LARGER.context)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    for way in WAYS:
        mark("step")
        begin = time.perf_counter()
        path = saved_by(way, model, optimizer, held, place)
        dist.barrier()
        found.append((time.perf_counter() - begin, path.stat().st_size if path.exists() else 0))
    return found


# %%
def saved_by(way, model, optimizer, held, place):
    """Where this rank has written, if it has."""
    if way == "sharded":
        return save(place, 1, held) / f"rank-{dist.get_rank()}-of-4.safetensors"
    return gather_and_save(model, optimizer, place / f"{way} {dist.get_rank()}.pt", WAYS[way])


# %%
for name in ("plain", "watched"):
    (PLACE / name).mkdir()
plain = run(three_ways, PLACE / "plain", ranks=4, device="cpu")
recording = run(three_ways, PLACE / "watched", ranks=4, device="cpu", record="memory").recording
rows = []
for step, way in enumerate(WAYS):
    seconds, sizes = zip(*(of_rank[step] for of_rank in plain), strict=True)
    row = {"written by": way, "bytes written per parameter": round(sum(sizes) / SIZE, 1)}
    peak = recording.held(0, step)["peak"] / (12 * SIZE / 4)
    rows.append(row | {"peak of rank 0, × its share": round(peak, 1), "time": f"{max(seconds):.2f} s"})
draw.table(rows)

# %%
print(check.predict("Bytes per parameter, written by four ranks?", guess_naive, 48))
print(check.predict("And how many are enough?", guess_needed, 12))

# %% [markdown]
# Every rank has written the same thing, four times. If only rank 0 writes, it is written once, but the others wait; and
# to have it all in one place, it must be gathered first, which is just what did not fit.
#
# There is something worse. A file takes time to write, and in this time the process may die:


# %%
class Mortal(io.FileIO):
    """A file whose process is killed after some bytes."""

    def write(self, data):
        if self.tell() + len(data) > 400_000:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(data)


def saves_and_dies(path):
    model = small_gpt()
    torch.save(model.state_dict(), path)  # a good one
    torch.save(model.state_dict(), Mortal(path, "w"))  # over it, a little later


# %%
try:
    run(saves_and_dies, PLACE / "torn.pt", ranks=1, device="cpu")
except RankError as error:
    print(str(error).splitlines()[0])
try:
    torch.load(PLACE / "torn.pt")
except RuntimeError as error:
    print(f"{(PLACE / 'torn.pt').stat().st_size:,} bytes are left, which no one can read:", str(error).split(":")[0])

# %% [markdown]
# The new checkpoint is torn, and the old one was under the same name. The whole training is lost, in the moment that
# should have made it safe.
#
# ## Picture
#
# ![Four ranks each write their quarter of P and S to a file of their own, in a folder called step-12.draft. Rank 0
# writes index.json, which says what lies in which file, and renames the folder to step-12.](../images/checkpoint.svg)
#
# Three ideas, then. Each rank writes what it holds, side by side with the others, and what several of them hold is
# written by one. An **index** says which part of which tensor lies in which file. And all of it has another name until
# the last byte is safely on the disk.
#
# ## Build: sharded
#
# [labs/checkpoint](../labs/checkpoint/__init__.py) does this for every strategy of the course. It asks for what this
# rank *holds*: `Held(model, optimizer=…)` above, and under ZeRO:


# %%
def in_vectors(model):
    """ZeRO's stage 3: what a rank holds, and its optimizer."""
    zero = Zero(model, stage=3, optimizer=adamw)
    return HeldByZero(zero), zero


# %%
def one_step(model, optimizer, batch):
    """The mean loss over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss = model(*Batches(TEXT.tokens, 12, CONFIG.context, rank=rank, ranks=ranks)[batch])
    loss.backward()
    optimizer.step()
    dist.all_reduce(mean := loss.detach().clone())
    return mean.item() / ranks


# %%
def goes_on(layout, batch, where=None, to=None):
    """Load `where`, if given; the loss of one step, which is saved in the folder `to`, if given."""
    model = GPT(CONFIG)
    held, optimizer = layout(model)
    if where:
        load(where, held)
    loss = one_step(model, optimizer, batch)
    if to:
        save(to, batch + 1, held)
    return loss


# %%
run(goes_on, in_vectors, 0, to=PLACE / "sharded", ranks=4, device="cpu")
first = newest(PLACE / "sharded")
sizes = {path.name: path.stat().st_size for path in sorted(first.glob("rank-*"))}
draw.ledger({"bytes of P and S, in all files": (12 * PSI, sum(sizes.values()))}, within=0.02)

# %% [markdown]
# Each number is written once, by four ranks at the same time. What the index says of one tensor (its shape, and which
# block of it lies in which file: where the block begins, and its own shape):

# %%
index = json.loads((first / "index.json").read_bytes())["record"]
name = "embed.weight"
print(*sorted(key for key in index["tensors"] if name in key), sep="\n")
print(index["tensors"][f"model/{name}"])

# %% [markdown]
# A moment is stored under the *name* of its parameter. `optimizer.state_dict()` goes by *number*: parameter 7 of an
# optimizer that was built in another order is another parameter. If both have the same shape, nothing fails, and its
# moments belong to somebody else.
#
# ## Build: into another layout
#
# After a failure you may have fewer ranks than before. Three ranks load what four have saved. Which elements of which
# files does each of them need? Move the sliders:

# %%
play.explore(partial(draw.reads, 12), saved=[4, 1, 2, 3, 6], loading=[3, 1, 2, 4, 6])

# %% [markdown]
# ### Exercise 1: each element once
#
# Budget: each element of this rank's part is read once and no other one, with one `read` per file, and none of a file
# of which nothing is due; at most twice the part is held.


# %%
def load_shards(index, read, rank, ranks):
    """This rank's equal part of a vector that other ranks have saved, as one tensor.

    index: for each file, its name and how many elements of the vector lie in it; the files follow one another
    read(name, start, stop) -> the elements start:stop of a file: a 1-D tensor; costs what it reads
    The vector's length is a multiple of `ranks`. A part may begin and end within files, and be empty.
    """
    ### BEGIN SOLUTION
    each = sum(size for _, size in index) // ranks
    first, last = rank * each, (rank + 1) * each
    pieces, begin = [], 0
    for name, size in index:
        start, stop = max(first, begin), min(last, begin + size)
        if start < stop:
            pieces.append(read(name, start - begin, stop - begin))
        begin += size
    return torch.cat(pieces) if pieces else torch.empty(0)
    ### END SOLUTION


check.load_shards(load_shards)

# %% [markdown]
# In the textbook this is a few lines of arithmetic on blocks, in any number of dims
# ([labs/checkpoint/extents.py](../labs/checkpoint/extents.py)): what a rank needs and what a file has, and what the two
# have in common. So a layout on disk does not matter. What four ranks of ZeRO have saved goes on under FSDP on three
# ranks, on two, and on one:

# %%
losses = {
    "ZeRO 3 on 4 ranks": run(goes_on, in_vectors, 1, first, ranks=4, device="cpu")[0],
    "FSDP on 3 ranks": run(goes_on, by_parameter, 1, first, ranks=3, device="cpu")[0],
    "FSDP on 2 ranks": run(goes_on, by_parameter, 1, first, ranks=2, device="cpu")[0],
    "one process": run(goes_on, by_parameter, 1, first, ranks=1, device="cpu")[0],
}
assert max(losses.values()) - min(losses.values()) < 1e-5
for layout, loss in losses.items():
    print(f"{layout}: loss {loss:.6f}")

# %% [markdown]
# (The tests of the course do this for ten layouts, each to each, tensor parallelism and pipelines among them, and
# compare bit by bit what arrives.)
#
# ## Build: all or nothing
#
# `os.rename` gives something another name from one moment to the next: to whoever looks, it has happened or it has not.
# That is half of the trick. The other half is what a disk does behind your back: `write` returns when the *system* has
# the text, which may be seconds before the disk has it. If the power fails in between, the new name is there, and the
# file is empty. **Flushing** (`os.fsync`) waits until the disk has it; and a folder, which is a list of names, is
# flushed like a file.
#
# ### Exercise 2: old or new
#
# The check's disk behaves as badly as a disk is allowed to. It ends your function at each of its calls, looks at
# everything that might then be on the disk, and calls it once more, for the next text.


# %%
def replace(disk, name, text):
    """Let the file `name` have this text, so that at every moment the old text or the new one is there, whole.

    disk.write(name, text): make a file, or overwrite one. What is written may be anywhere between
        here and the disk, until
    disk.flush(name): that file's text is on the disk
    disk.rename(old, new): from one moment to the next `new` is what was called `old`; what `new` was is gone
    disk.flush_names(): all names are on the disk, as they are now
    disk.remove(name), disk.names()
    No other file stays behind, nor one that an earlier call has left in a power cut.
    """
    ### BEGIN SOLUTION
    draft = f"{name}.draft"
    disk.write(draft, text)
    disk.flush(draft)
    disk.rename(draft, name)
    disk.flush_names()
    ### END SOLUTION


check.replace(replace)

# %% [markdown]
# A checkpoint is many files, so a whole *folder* is renamed. Here is what is in the course's folder while two
# checkpoints are saved, call by call, as recorded on rank 0. Drag the slider: at which moment does the next checkpoint
# begin to count? Is there one after which a crash would leave nothing to load?


# %%
def two_saves(place):
    model = GPT(CONFIG)
    held, _ = by_parameter(model)
    place.mkdir(exist_ok=True)
    dist.barrier()
    with watched(place, newest) as moments:
        for step in 4, 8:
            save(place, step, held)
    return moments


moments = run(two_saves, PLACE / "moments", ranks=2, device="cpu")[0]
play.crashes(moments)

# %% [markdown]
# The next one counts from the rename on, and never is there a moment without one (after the first). Before the rename,
# every rank has flushed its file and taken its **checksum**, a number that changes with any bit of the file. The index
# has the checksums. So a file that was cut or altered later is found before a single tensor is loaded:

# %%
damaged = newest(PLACE / "sharded") / "rank-1-of-4.safetensors"
with open(damaged, "r+b") as file:
    file.seek(-1, os.SEEK_END)
    file.write(b"?")
try:
    run(goes_on, by_parameter, 1, first, ranks=2, device="cpu")
except RankError as error:
    print(str(error).strip().splitlines()[-1].replace(str(PLACE), "…"))

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a training of 7 billion parameters is killed, starts again, and stops
# > at once with `metadata is None`. Its checkpoints were saved in the background. The link `latest` was moved, and the
# > checkpoint before was deleted, when a save had *begun*. For about a minute after that, `latest` was a folder with
# > half of the files in it, and there was no other
# > ([KempnerForge#102](https://github.com/KempnerInstitute/KempnerForge/issues/102), May 2026). First finish, then
# > rename, then delete.
#
# ## Build: as if nothing had happened
#
# A training is more than its weights. This one has five things that change from step to step: the **weights**, the
# **optimizer**'s moments, the **schedule** of the learning rate (here it grows for 16 steps), the **place** in the
# data, and the state of the **random** numbers, which is another one on each rank.
#
# Here it runs for 8 steps, saves all five, and is then taken up six times: once with everything, and five times with
# one of them forgotten.

# %%
SAVED, STEPS, WARM_UP = 8, 20, 16


def whole_training(seed):
    """What changes from step to step, on this rank."""
    torch.manual_seed(seed + dist.get_rank())
    model = small_gpt()
    held, optimizer = by_parameter(model)
    schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    return model, held, optimizer, schedule


# %%
def take_steps(model, optimizer, schedule, steps):
    """The mean losses over all ranks."""
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    batches = Batches(TEXT.tokens, 4, CONFIG.context, rank=rank, ranks=ranks)
    for step in steps:
        losses.append(model(*batches[step]))
        losses[-1].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    dist.all_reduce(found := torch.stack(losses).detach())
    return (found / ranks).tolist()


# %%
def restore(where, model, held, schedule, forgotten=""):
    """Take a training up again, all of it or all but one thing; the step at which it goes on."""
    before = {key: x.clone() for key, part in held.parts().items() for x in part.blocks.values()}
    found = load(where, Held(model) if forgotten == "optimizer" else held)
    if forgotten == "weights":
        for key, part in held.parts().items():
            for x in part.blocks.values():
                x.copy_(before.get(key, x))
    if forgotten != "schedule":
        schedule.load_state_dict(found.values)
    if forgotten != "random":
        set_random_state(found.own[dist.get_rank()])
    return 0 if forgotten == "place" else found.step


# %%
THINGS = ["weights", "optimizer", "schedule", "place", "random"]


def six_times(place):
    model, held, optimizer, schedule = whole_training(seed=0)
    begin = take_steps(model, optimizer, schedule, range(SAVED))
    where = save(place, SAVED, held, values=schedule.state_dict(), own=random_state())
    curves = {"undisturbed": begin + take_steps(model, optimizer, schedule, range(SAVED, STEPS))}
    for forgotten in ["", *THINGS]:
        model, held, optimizer, schedule = whole_training(seed=7)
        first = restore(where, model, held, schedule, forgotten)
        curves[forgotten] = begin + take_steps(model, optimizer, schedule, range(first, first + STEPS - SAVED))
    return curves


curves = run(six_times, PLACE / "five", ranks=2, device="cpu", tell="seven trainings")[0]
assert curves[""] == curves["undisturbed"]

# %% [markdown]
# With everything, the losses are the same numbers, to the last bit. Now the five others. Can you tell from the curve
# alone which thing was forgotten in each? Two hints: one of them is easy to see, and one hardly at all; and the bumps
# of a curve come from the batches.

# %%
ORDER = [2, 0, 4, 1, 3]
panels = {chr(65 + i): curves[THINGS[n]] for i, n in enumerate(ORDER)}
draw.curves({"undisturbed": curves["undisturbed"], **{name: panels[name] for name in "ABC"}})

# %%
draw.curves({"undisturbed": curves["undisturbed"], **{name: panels[name] for name in "DE"}})

# %%
print(*(f"{number} {thing}" for number, thing in enumerate(THINGS)), sep=", ")
guess_A = 2  # your number
guess_B = 0  # your number
guess_C = 4  # your number
guess_D = 1  # your number
guess_E = 3  # your number

# %%
WHY = {
    "weights": "The curve begins again where an untrained model does.",
    "optimizer": "AdamW's first steps are as large as any: a jump, and then it has learned the moments anew.",
    "schedule": "The rate starts from nothing again: for a while the curve falls more slowly.",
    "place": "Its bumps are those of the first batches, which it has seen before.",
    "random": "Other numbers were left out. The curve is as good, but it is another one.",
}
for name, guess, n in zip("ABCDE", [guess_A, guess_B, guess_C, guess_D, guess_E], ORDER, strict=True):
    print(check.predict(f"{name}: what was forgotten?", guess, n, tolerance=0, reason=f"{THINGS[n]}. {WHY[THINGS[n]]}"))

# %% [markdown]
# Only two of the five are hard to miss. The others cost a run some days or some quality, and nobody notices.
#
# ### Exercise 3: remember, and resume
#
# Now yours, without the textbook: everything that one rank needs, as a dictionary. The optimizer of the training that
# goes on was built with its parameters in another order. And the training that you have remembered goes on as well,
# and changes its numbers. (In this check the ranks do not average gradients: each trains a model of its own.)


# %%
def remember(model, optimizer, schedule, loader):
    """All that a training needs to go on from here, on this rank: a dictionary of copies, not of the live tensors.

    loader.step: how many batches were read; it may be set.  Dropout draws from torch's own generator.
    """
    ### BEGIN SOLUTION
    names = {p: name for name, p in model.named_parameters()}
    return {
        "model": {name: x.clone() for name, x in model.state_dict().items()},
        "optimizer": {names[p]: {key: x.clone() for key, x in state.items()} for p, state in optimizer.state.items()},
        "schedule": dict(schedule.state_dict()),
        "step": loader.step,
        "random": torch.get_rng_state(),
    }
    ### END SOLUTION


# %%
def resume(state, model, optimizer, schedule, loader):
    """Let a training that was just built, from another seed, go on from there as if nothing had happened.

    Its optimizer may have been given the parameters in another order; optimizer.state_dict() goes by number.
    """
    ### BEGIN SOLUTION
    model.load_state_dict(state["model"])
    for name, p in model.named_parameters():
        if name in state["optimizer"]:
            optimizer.state[p] = {key: x.clone() for key, x in state["optimizer"][name].items()}
    schedule.load_state_dict(state["schedule"])
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    loader.step = state["step"]
    torch.set_rng_state(state["random"])
    ### END SOLUTION


check.resume(remember, resume)

# %% [markdown]
# ### Exercise 4: the place in the data
#
# On another number of ranks the random numbers cannot be the same, but the data can, in the same order. So what is
# remembered must not depend on the number of ranks: how many **windows** (pieces of text) all ranks *together* have
# read.


# %%
def next_windows(order, batch, read, rank, ranks):
    """The numbers of the windows that this rank reads in the next step, after a restart.

    order(epoch) -> the windows of an epoch, a list, in the order in which they are read (another one for each
        epoch; all of one length)
    batch: windows per step, on all ranks together, a multiple of ranks; rank r reads the r-th of equal parts
    read: how many windows all ranks together have read so far, a multiple of batch; those at the end of an
        epoch that do not fill a batch are left out
    """
    ### BEGIN SOLUTION
    steps = len(order(0)) // batch  # in an epoch
    epoch, step = divmod(read // batch, steps)
    share = batch // ranks
    start = step * batch + rank * share
    return order(epoch)[start : start + share]
    ### END SOLUTION


check.next_windows(next_windows)

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: none. A run of 120 billion parameters on 256 ranks came back from a
# > checkpoint with a smooth curve. But each rank's random state had been declared a copy of the others', so only one
# > was stored: 252 of 256 ranks went on with somebody else's random numbers
# > ([Megatron-LM#6858](https://github.com/NVIDIA/Megatron-LM/pull/6858), August 2026). In `save`, `values` are the same
# > on all ranks, which is checked, and `own` belongs to each.
#
# ## Measure: kill it
#
# Put together: a training that looks for the newest checkpoint when it begins, and saves after every step.


# %%
def survivor(place, steps, deaths=()):
    """All of this rank's numbers, after these steps.  deaths: (attempt, rank, step)s at which a rank is killed."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    model, held, optimizer, schedule = whole_training(seed=0)
    where = newest(place)
    first = restore(where, model, held, schedule) if where else 0
    for step in range(first, steps):
        take_steps(model, optimizer, schedule, [step])
        if (attempt, dist.get_rank(), step) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        save(place, step + 1, held, values=schedule.state_dict(), own=random_state())
    return {key: x for key, part in held.parts().items() for x in part.blocks.values()}


# %% [markdown]
# `run(..., restarts=3)` starts all ranks again after one has failed, up to three times. That is also what torchrun does
# on a cluster, with `--max-restarts 3`. Rank 1 is killed in its fourth step, and rank 0 in the one after the next:

# %%
two = partial(run, survivor, steps=8, ranks=2, device="cpu")
undisturbed = two(PLACE / "undisturbed")
killed = two(PLACE / "killed", deaths=[(0, 1, 3), (1, 0, 5)], restarts=3)
for mine, theirs in zip(undisturbed, killed, strict=True):
    assert all(torch.equal(x, theirs[key]) for key, x in mine.items())
print("the same parameters and moments, bit for bit, on both ranks")

# %% [markdown]
# ## Build: while training goes on
#
# A save takes time, and training waits for it. For what does it have to wait? Only for a *copy*, since the next step
# changes the numbers. A thread can write the copy while the next steps are computed. That is an **asynchronous** save;
# its price is the memory of the copy.


# %%
def waits(place):
    """Seconds that training waits in a save of 32 MB, and in an asynchronous one."""
    torch.manual_seed(0)
    model, seconds = torch.nn.Linear(1000, 8000, bias=False), {}
    held = Held(fully_shard(model, mesh=Mesh((dist.get_world_size(),), ("dp",))))
    with Saver(place) as saver:
        saver.save(0, held)  # which makes the buffers
        saver.wait()
        for number, (name, call) in enumerate({"save": partial(save, place), "Saver.save": saver.save}.items()):
            begin = time.perf_counter()
            call(number + 1, held)
            seconds[name] = time.perf_counter() - begin
    return seconds


for name, seconds in run(waits, PLACE / "waits", ranks=2, device="cpu")[0].items():
    print(f"{name}: training waits for {1000 * seconds:.0f} ms")

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a checkpoint of step 1 has numbers of step 2 in it. PyTorch's
# > `async_save` copied tensors "to the CPU" before its thread wrote them, and a tensor that is on the CPU already was
# > not copied: the thread wrote the live one, into which the optimizer was writing
# > ([pytorch#144657](https://github.com/pytorch/pytorch/issues/144657), January 2025; mended since).
#
# ## Measure: how often?
#
# Save often, and training waits often. Save seldom, and a failure loses much: on average half of the time between two
# saves. With δ seconds for a save, T seconds between two, and a failure of the job every M seconds, the share of time
# that is lost is about δ/T + T/2M. Where is that least? The slope is zero where δ/T² = 1/2M (J. W. Young, 1974):
#
# $$T = \sqrt{2 \delta M}$$
#
# ### Exercise 5: the interval


# %%
def interval(save, machine, machines):
    """Seconds of training between two saves, by Young's formula.

    save: seconds for which training waits in a save
    machine: the mean seconds between failures of one machine; machines: how many the job has
    """
    ### BEGIN SOLUTION
    return math.sqrt(2 * save * machine / machines)
    ### END SOLUTION


answer = check.interval(interval)
answer

# %% [markdown]
# For Llama 3's training, by how long training waits in a save; and what share of the time is lost with the best
# interval, and with one of two hours:

# %%
best = interval if answer.ok else exercises.interval


def lost(save, every):
    return save / every + every / (2 * between)


rows = []
for seconds in (1, 10, 60, 600):
    every = best(seconds, between * gpus, gpus)
    shares = {name: round(100 * lost(seconds, each), 1) for name, each in (("lost, %", every), ("every 2 h, %", 7200))}
    rows.append({"a save takes": f"{seconds} s", "best interval, minutes": round(every / 60, 1)} | shares)
draw.table(rows)

# %% [markdown]
# This is why asynchronous saves are worth their memory: the time that counts is what training *waits*.
#
# ## Native
#
# PyTorch's `torch.distributed.checkpoint`, **DCP**, works in the same way: files by rank, an index (`.metadata`),
# loading into any layout. `get_state_dict` names the optimizer's state by parameter.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard


# %%
def torchs(batch, where=None, to=None):
    """As goes_on does it, with PyTorch's own."""
    model = GPT(CONFIG)
    for part in [*model.layers.values(), model]:
        torchs_fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(model.parameters())
    if where:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=where)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    loss = one_step(model, optimizer, batch)
    if to:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=to)
    return loss


# %%
run(torchs, 0, to=PLACE / "dcp", ranks=4, device="cpu")
native = run(torchs, 1, where=PLACE / "dcp", ranks=3, device="cpu")[0]
assert abs(native - losses["one process"]) < 1e-5
print(f"PyTorch's, saved on 4 ranks, loaded on 3: loss {native:.6f}")

# %% [markdown]
# The same loss as above. Three differences to know, each of them silent:
#
# - Loading asks for keys. A key in the checkpoint that the program does *not* ask for is left out without a word:
#   forget the optimizer, and nobody tells you. Ours refuses: `nobody asks for its …`.
# - A plain tensor that is under the same key on all ranks is taken for one tensor: one rank's is stored, and after
#   loading all of them have it. That is how random states get lost. Ours compares such tensors, and refuses.
# - A tensor is cast to the dtype of the one that it is loaded into. Float32 masters loaded into a bfloat16 model have
#   lost half of their digits. Ours refuses.
#
# ### A way out
#
# Here is an ordinary script that survives, with nothing of the course but the data and the model. It is
# [scripts/checkpoint.py](../scripts/checkpoint.py). From the root of the repository, run
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 3
# scripts/checkpoint.py`, and kill one of its processes; or add `--kill-at 5`.
#
# ```python
# import argparse
# import os
# import signal
# from pathlib import Path
#
# import torch
# import torch.distributed as dist
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
# from torch.distributed.fsdp import fully_shard
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# parser = argparse.ArgumentParser()
# parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
# parser.add_argument("--kill-at", type=int, help="a step at which the last rank is killed, the first time")
# options = parser.parse_args()
#
# # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 checkpoint.py
# # Without the variable, ranks that are started again find the addresses of those that died (pytorch#135712).
# dist.init_process_group()
# rank, ranks = dist.get_rank(), dist.get_world_size()
# device, generator = ("cuda", torch.cuda) if torch.cuda.is_available() else ("cpu", torch)
# if device == "cuda":
#     torch.cuda.set_device(rank % torch.cuda.device_count())
#
# config = PRESETS["small"]
# model = GPT(config).to(device)
# for layer in model.layers.values():
#     fully_shard(layer)
# fully_shard(model)
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# batches = Batches(corpus().tokens, 16, config.context)
#
#
# def state():
#     parameters, moments = get_state_dict(model, optimizer)
#     # Each rank's generator under a key of its own: of one key, one rank's would be saved, for all.
#     return {"model": parameters, "optimizer": moments, f"generator-{rank}": generator.get_rng_state()}
#
#
# # A checkpoint is there once it has .metadata, which is written last.
# saved = [int(path.parent.name.removeprefix("step-")) for path in options.folder.glob("step-*/.metadata")]
# first = max(saved, default=0)
# if first:
#     found = state()
#     dcp.load(found, checkpoint_id=options.folder / f"step-{first}")
#     set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
#     generator.set_rng_state(found[f"generator-{rank}"])
#
# for step in range(first, 10):
#     if step == options.kill_at and rank == ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
#         os.kill(os.getpid(), signal.SIGKILL)
#     x, y = (part.chunk(ranks)[rank].to(device) for part in batches[step])
#     loss = model(x, y)
#     loss.backward()
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#     mean = loss.detach().clone()
#     dist.all_reduce(mean)
#     if rank == 0:
#         print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)
#     if step % 2:
#         dcp.save(state(), checkpoint_id=options.folder / f"step-{step + 1}")
#
# dist.barrier()
# dist.destroy_process_group()
# ```

# %% [markdown]
# ## Why, and why not
#
# | | what it gives | what it costs |
# |---|---|---|
# | every rank saves all | one line of code | each byte N times; a torn file is the end |
# | rank 0 saves all | one file | N − 1 ranks wait; the whole model on one rank |
# | sharded, with an index | 1/N of the time; any layout loads it | a folder, and an index |
# | asynchronous | training waits for a copy | the memory of the copy |
#
# **Why not** simply often? Because even a copy takes time, and because a network disk that 16,384 ranks write to at
# once becomes the slowest part of the job.
#
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>Why is the folder renamed only at the end, and what must have happened before?</summary>
#
# A rename has happened or it has not, so there is no moment with half a checkpoint. Before it, every file and the index
# must be flushed; otherwise the name may reach the disk before what is in the files.
# </details>
#
# <details><summary>Four ranks have saved, three load. Who gathers the whole?</summary>
#
# Nobody. Each rank reads from each file the part that is in its own blocks. The index says where that is.
# </details>
#
# <details><summary>Why are moments stored by the name of their parameter?</summary>
#
# The number of a parameter depends on the order in which the optimizer was given it. With another order, or another
# wrapping, the moments of one would go to another of the same shape, and nothing would fail.
# </details>
#
# <details><summary>What is different on each rank, and so must be saved by each?</summary>
#
# The state of its random numbers. The place in the data is one number for all of them, if it counts what all have read.
# </details>
#
# | | predicted | measured |
# |---|---|---|
# | `torch.save` on each of 4 ranks | 4 × 12 bytes per parameter | the same within 2 % |
# | sharded | 12 bytes per parameter | the same within 2 % |
# | into another layout | the same loss | within 1e-5 |
# | killed twice, taken up again | the same numbers | bit for bit |
# | time between two saves | √(2δM) | – |
#
# **Read on**: [labs/checkpoint/saving.py](../labs/checkpoint/saving.py), then
# [labs/checkpoint/loading.py](../labs/checkpoint/loading.py). J. W. Young, 1974, *A first order approximation to the
# optimum checkpoint interval* (Communications of the ACM). Pillai et al., 2014, *All File Systems Are Not Created
# Equal* (OSDI), on what disks do to programs that forget to flush.
#
# **Next.** A layer, or a single sequence, may still be too large for one device, and there can be no more ranks than
# sequences. [09 Tensor parallelism](09_tensor_parallel.ipynb) splits the layers themselves.
#
# A clean copy of this notebook: `git restore notebooks/08_checkpoint.ipynb`, then *File > Reload Notebook from Disk*.

# %%
folder.cleanup()
