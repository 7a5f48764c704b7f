# %% [markdown]
# # Checkpoints: a training that survives
#
# *Llama 3 was trained on 16,384 GPUs. In 54 days of that, it was interrupted 419 times without warning. What is left of
# a training when one of its ranks dies?*
#
# It takes 75 minutes with its four exercises, 45 without; the machine works for half a minute of it, in 2 GB of memory.
# You need: [FSDP](06_fsdp.ipynb), and from [Offload](07b_offload.ipynb) what a rename is good for.
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
import random
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

# %%
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
# held is gone. Here is what interrupted that training unexpectedly, by cause (Llama 3, arXiv 2407.21783, table 5; some
# of its rows are added up here):

# %%
INTERRUPTIONS = {"GPU": 268, "software": 56, "network": 35, "maintenance": 32, "host": 21, "unknown": 7}
failures, days, gpus = sum(INTERRUPTIONS.values()), 54, 16_384
between = days * 24 * 3600 / failures  # seconds between two failures of the job
print(f"{failures} failures in {days} days: one in {between / 3600:.1f} h")
print(f"of one GPU, with all that belongs to it: one in {between * gpus / 3600 / 24 / 365:.1f} years")
draw.chart(INTERRUPTIONS, "failures", kind="waiting", caption="unexpected interruptions in 54 days")

# %% [markdown]
# Each GPU fails once in years. But there are so many of them that *some* part fails every three hours. A training
# survives only if it can begin again from something that is still there: a **checkpoint**, which is everything that the
# training needs to go on, on disk. To go on from one is to **resume**.
#
# ## Picture
#
# ![Four ranks each write their quarter of P and S to a file of their own, in a folder called step-12.draft. Rank 0
# writes index.json, which says what lies in which file, and renames the folder to step-12.](../images/checkpoint.svg)
#
# This is where we are going. Each rank writes what it holds, side by side with the others; what several ranks hold is
# written by one of them. An **index** says which part of which tensor lies in which file. And all of it has another
# name until the last byte is safely on the disk. Why so complicated?
#
# ## Predict
#
# The simplest way is one line: each rank calls `torch.save` on its model and its optimizer. Say that each of four ranks
# has the whole model and the whole state, as in DDP, in float32 with AdamW and its two moments. How many bytes are
# written by all ranks together, per parameter? And how many would be enough?

# %%
guess_naive = 4 * (4 + 8)  # your number
guess_needed = 4 + 8  # your number

# %% [markdown]
# ## Build: what is wrong with `torch.save` on every rank
#
# A training that is sharded, here by FSDP, has to gather everything before `torch.save` can write the whole. Then
# either every rank writes it, or only rank 0. The third way is the picture's, `save`.


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=4e-3)


def by_parameter(model):
    """FSDP: what a rank holds of it (we come to Held below), and its optimizer."""
    for part in [*model.layers.values(), model]:
        fully_shard(part, mesh=Mesh((dist.get_world_size(),), ("dp",)))
    optimizer = adamw(model.parameters())
    return Held(model, optimizer=optimizer), optimizer


@torch.no_grad()
def whole(model, optimizer):
    """All parameters and moments, on every rank."""
    tensors = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]


# %%
WAYS = {"every rank": range(4), "rank 0": range(1), "sharded": range(4)}


def saved_by(way, model, optimizer, held, place):
    """The file that this rank has written, if it has."""
    rank = dist.get_rank()
    if way == "sharded":
        return save(place, 1, held) / f"rank-{rank}-of-4.safetensors"
    path, tensors = place / f"{way} {rank}.pt", whole(model, optimizer)
    if rank in WAYS[way]:
        torch.save(tensors, path)
    return path


# %%
CONFIG = dataclasses.replace(PRESETS["tiny"], depth=2)
LARGER = dataclasses.replace(CONFIG, dim=256, hidden=640)
PSI, PSI_LARGER = (sum(p.numel() for p in GPT(config).parameters()) for config in (CONFIG, LARGER))
TEXT = corpus()
FOLDER = tempfile.TemporaryDirectory()


def fresh(name):
    """A new folder, so that a cell may be run twice."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER.name))


# %%
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
plain = run(three_ways, fresh("ways"), ranks=4, device="cpu")
recording = run(three_ways, fresh("ways"), ranks=4, device="cpu", record="memory").recording
rows = []
for step, way in enumerate(WAYS):
    seconds, sizes = zip(*(of_rank[step] for of_rank in plain), strict=True)
    row = {"written by": way, "bytes written per parameter": round(sum(sizes) / PSI_LARGER)}
    peak = recording.held(0, step)["peak"] / (12 * PSI_LARGER / 4)
    rows.append(row | {"peak of a rank, × its share": round(peak), "time": f"{max(seconds):.2f} s"})
draw.table(rows)

# %%
print(check.predict("Bytes per parameter, written by four ranks?", guess_naive, 48))
print(check.predict("And how many are enough?", guess_needed, 12))

# %% [markdown]
# The first way writes the same thing four times. The second writes it once. But both hold all of it on a rank: its own
# share, and four shares that were gathered. Had that fitted, nobody would have sharded it.
#
# ## Build: a torn file
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
    model = GPT(CONFIG)
    torch.save(model.state_dict(), path)  # a good one
    torch.save(model.state_dict(), Mortal(path, "w"))  # over it, a little later


# %%
torn = fresh("torn") / "model.pt"
try:
    run(saves_and_dies, torn, ranks=1, device="cpu")
except RankError as error:
    print(str(error).splitlines()[0])
try:
    torch.load(torn)
except RuntimeError as error:
    print(f"a part of the file is there, and torch.load raises {type(error).__name__}")

# %% [markdown]
# The new checkpoint is torn, and the old one was in the same file. The whole training is lost, at the very moment that
# should have made it safe.
#
# ## Build: sharded
#
# [labs/checkpoint](../labs/checkpoint/__init__.py) saves a training under any strategy of the course. It is told what
# this rank *holds*: `Held(model, optimizer=…)` above, and under ZeRO:


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
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach().clone())
    return mean.item() / ranks


# %%
def two_steps(layout, where=None, to=None):
    """The second loss.  Load `where` before, if given; save in the folder `to` after, if given."""
    model = GPT(CONFIG)
    held, optimizer = layout(model)
    if where:
        load(where, held)
    one_step(model, optimizer, 2 if where else 0)
    loss = one_step(model, optimizer, 3 if where else 1)
    if to:
        save(to, 2, held)
    return loss


# %%
place = fresh("sharded")
run(two_steps, in_vectors, to=place, ranks=4, device="cpu")
first = newest(place)
sizes = {path.name: path.stat().st_size for path in sorted(first.glob("rank-*"))}
draw.ledger({"bytes of P and S, in four files": (12 * PSI, sum(sizes.values()))}, within=0.02)

# %% [markdown]
# Each number is written once, by four ranks at the same time. This is what the index says of one tensor: its shape, and
# for each file which block of the tensor lies there (where the block begins, and the block's shape).

# %%
index = json.loads((first / "index.json").read_bytes())["record"]
name = "embed.weight"
print(*sorted(key for key in index["tensors"] if name in key), sep="\n")
of_it = index["tensors"][f"model/{name}"]
print(of_it["shape"], *of_it["pieces"], sep="\n")

# %% [markdown]
# A moment is stored under the *name* of its parameter. `optimizer.state_dict()` goes by *number*, and parameter 7 of an
# optimizer that was built in another order is another parameter. If both have the same shape, nothing fails: it gets
# another parameter's moments.
#
# ## Build: into another layout
#
# After a failure you may have fewer ranks than before. Three ranks load what four have saved (this is called
# **resharding**). Which elements of which files does each of them need? Move the sliders:

# %%
play.explore(partial(draw.reads, 12), saved=[4, 1, 2, 3, 6], loading=[3, 1, 2, 4, 6])

# %% [markdown]
# ### Exercise 1: each element once
#
# Budget: each element of this rank's part is read once and no other one, with at most one `read` per file, and none
# from a file that has nothing of the part. At most twice the part is held, so `torch.cat` is allowed. No rank needs to
# talk to another.


# %%
def load_shards(index, read, rank, ranks):
    """This rank's equal part of a vector that other ranks have saved, as one tensor.

    index: for each file, its name and how many elements of the vector lie in it (perhaps 0); the files follow one
        another
    read(name, start, stop) -> the elements start:stop of that file: a 1-D tensor of any dtype
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
# The textbook does the same with blocks, in any number of dims
# ([labs/checkpoint/extents.py](../labs/checkpoint/extents.py)): what a rank needs and what a file has, and what the two
# have in common. So it does not matter how many ranks have saved, or how they had split the model. Below, what four
# ranks of ZeRO have saved is resumed under FSDP on three ranks, on two, and on one. (The second loss is compared: the
# step before it needs the moments, too.)

# %%
losses = {
    "ZeRO 3 on 4 ranks": run(two_steps, in_vectors, first, ranks=4, device="cpu")[0],
    "FSDP on 3 ranks": run(two_steps, by_parameter, first, ranks=3, device="cpu")[0],
    "FSDP on 2 ranks": run(two_steps, by_parameter, first, ranks=2, device="cpu")[0],
    "one process": run(two_steps, by_parameter, first, ranks=1, device="cpu")[0],
}
assert max(losses.values()) - min(losses.values()) < 1e-4
for layout, loss in losses.items():
    print(f"{layout}: loss {loss:.4f}")

# %% [markdown]
# (The tests of the course do this for ten layouts, each to each, tensor parallelism and pipelines among them, and
# compare bit by bit what arrives.)
#
# ## Build: all or nothing
#
# `os.rename` gives something another name from one moment to the next: to whoever looks, it has happened or it has not.
# Such a change is called **atomic**. That is half of the trick. The other half is what a disk does behind your back:
# `write` returns when the *system* has the text, which may be seconds before the disk has it. If the power fails in
# between, the new name may be there, and the file empty. **Flushing** a file (`os.fsync`) waits until the disk has its
# text. A folder is a list of names, and is flushed in the same way.
#
# ### Exercise 2: old or new
#
# The check's disk behaves as badly as a disk may. It cuts the power at each of your calls, looks at everything that
# might then be on the disk, and calls your function once more, with the next text. Once your function has returned, the
# new text must survive. Flushing a file does not flush its name; renames reach the disk in the order in which you made
# them.


# %%
def replace(disk, name, text):
    """Let the file `name` have this text, so that at every moment the old text or the new one is there, whole.

    disk.write(name, text): make a file, or overwrite one; what is written may be lost until
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
# A checkpoint is many files, so a whole *folder* is renamed. Here is what is in a folder while two checkpoints are
# saved into it, call by call, as recorded on the one rank of a small job. Drag the slider. At which moment does the
# next checkpoint begin to count? Is there a moment at which a crash would leave nothing to load?


# %%
def two_saves(place):
    held, _ = by_parameter(GPT(CONFIG))
    with watched(place, newest) as moments:
        for step in 4, 8:
            save(place, step, held)
    return moments


moments = run(two_saves, fresh("moments"), ranks=1, device="cpu")[0]
play.crashes(moments)

# %% [markdown]
# The next one counts from its rename on. Once there is one, there is always one to load. Before the rename, every rank
# has flushed its file, and has taken its **checksum**, a number that changes with any bit of the file. The checksums
# are in the index. So a file that was cut or altered later is found before a single tensor is loaded:

# %%
damaged = fresh("damaged") / first.name
shutil.copytree(first, damaged)
with open(damaged / "rank-1-of-4.safetensors", "r+b") as file:
    file.seek(-1, os.SEEK_END)
    file.write(b"?")
try:
    run(two_steps, by_parameter, damaged, ranks=2, device="cpu")
except RankError as error:
    print("…", str(error).strip().splitlines()[-1].partition(damaged.name)[2])

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a training of 7 billion parameters is killed, starts again, and stops
# > at once with `metadata is None`. Its checkpoints were saved in the background. As soon as a save had *begun*, the
# > link `latest` was moved to it, and the checkpoint before was deleted. For about a minute, `latest` was a folder with
# > half of the files in it, and there was no other. A job that was killed in that minute had nothing left
# > ([KempnerForge#102](https://github.com/KempnerInstitute/KempnerForge/issues/102), May 2026). First finish, then
# > rename, then delete.
#
# ## Build: as if nothing had happened
#
# A training is more than its weights. Ours gets a little **dropout** now: in every forward, a tenth of the embedding's
# outputs, chosen at random, are set to zero. Then five things change from step to step: the **weights**, the
# **optimizer**'s moments, the **schedule** of the learning rate (here the rate grows for 10 steps), the **place** in
# the data, and the state of the **random** numbers, which differs on each rank.

# %%
SAVED, STEPS, WARM_UP = 10, 22, 10


def whole_training(seed):
    """What changes from step to step, on this rank."""
    torch.manual_seed(seed + dist.get_rank())
    model = GPT(CONFIG, seed=seed)
    model.embed.register_forward_hook(lambda module, args, x: F.dropout(x, 0.1))
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


# %% [markdown]
# `save` also takes what is no tensor: `values`, which must be the same on all ranks, and `own`, which belongs to each
# rank. Both come back from `load`. Here is how to resume, and how to forget one of the five. (A schedule's
# `load_state_dict` does not touch the rate of the optimizer; it has to be put there.)


# %%
@torch.no_grad()
def resumed(where, model, held, optimizer, schedule, forgotten=""):
    """The step at which the training goes on."""
    untrained = {name: p.to_local().clone() for name, p in model.named_parameters()}
    found = load(where, Held(model) if forgotten == "optimizer" else held)
    for name, p in model.named_parameters() if forgotten == "weights" else ():
        p.to_local().copy_(untrained[name])
    if forgotten != "schedule":
        schedule.load_state_dict(found.values)
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    if forgotten != "random":
        set_random_state(found.own[dist.get_rank()])
    return 0 if forgotten == "place" else found.step


# %% [markdown]
# The training takes 10 steps and is saved. Then it is resumed six times: once with everything, and five times with one
# of the five things forgotten.

# %%
THINGS = ["weights", "optimizer", "schedule", "place", "random"]


def six_times(place):
    model, held, optimizer, schedule = whole_training(seed=0)
    begin = take_steps(model, optimizer, schedule, range(SAVED))
    where = save(place, SAVED, held, values=schedule.state_dict(), own=random_state())
    curves = {"undisturbed": begin + take_steps(model, optimizer, schedule, range(SAVED, STEPS))}
    for forgotten in ["", *THINGS]:
        model, held, optimizer, schedule = training = whole_training(seed=7)
        at = resumed(where, *training, forgotten)
        curves[forgotten] = begin + take_steps(model, optimizer, schedule, range(at, at + STEPS - SAVED))
    return curves


curves = run(six_times, fresh("six"), ranks=2, device="cpu", tell="seven trainings")[0]
assert curves[""] == curves["undisturbed"]

# %% [markdown]
# With everything, the losses are the same numbers, to the last bit. Now the five others, in a random order. Can you
# tell from the curve alone what was forgotten? A hint: the bumps of a curve come from its batches.

# %%
ORDER = random.Random(8).sample(range(5), 5)
lettered = {letter: curves[THINGS[n]] for letter, n in zip("ABCDE", ORDER, strict=True)}
draw.curves({"undisturbed": curves["undisturbed"], **{letter: lettered[letter] for letter in "ABC"}})

# %%
draw.curves({"undisturbed": curves["undisturbed"], **{letter: lettered[letter] for letter in "DE"}})

# %%
print(*(f"{number} {thing}" for number, thing in enumerate(THINGS)), sep=", ")
guess_A = 1  # your number
guess_B = 2  # your number
guess_C = 4  # your number
guess_D = 0  # your number
guess_E = 3  # your number

# %%
WHY = {
    "weights": "The curve begins again where an untrained model does.",
    "optimizer": "AdamW begins with no idea of how large the gradients are: a jump, and then it has learned it again.",
    "schedule": "The rate grows from nothing again, and for a while the curve falls more slowly.",
    "place": "Its bumps are those of the first batches, which it has seen before.",
    "random": "Other outputs were set to zero. The curve is as good, but it is not the same.",
}
for letter, guess, n in zip("ABCDE", [guess_A, guess_B, guess_C, guess_D, guess_E], ORDER, strict=True):
    print(
        check.predict(f"{letter}: what was forgotten?", guess, n, tolerance=0, reason=f"{THINGS[n]}. {WHY[THINGS[n]]}")
    )

# %% [markdown]
# Without the undisturbed curve beside it, you would hardly have suspected some of these. So do not look at a curve to
# find out whether a training resumes exactly: compare its numbers with those of one that was not interrupted.
#
# > **What went wrong in the wild.** *Symptom*: none. A model of 120 billion parameters was resumed on 256 ranks. But
# > each rank's random state had been declared a copy of the others', so only one was stored: 252 of the 256 ranks went
# > on with another rank's random numbers ([Megatron-LM#6858](https://github.com/NVIDIA/Megatron-LM/pull/6858), August
# > 2026). That is what `own` is for.
#
# ### Exercise 3: remember, and resume
#
# Now without the textbook: all that one rank needs, in a dictionary. The check pickles it, and gives what it unpickles
# to a training that was just built. The optimizer there is an AdamW, too, but it was given the parameters in another
# order. Some parameters may be frozen, there are buffers, and there may have been no step yet. The training that you
# remembered goes on as well, and changes its numbers. (Here the ranks do not average gradients: each trains a model of
# its own.)


# %%
def remember(model, optimizer, schedule, loader):
    """All that a training needs to go on from here, on this rank: a dictionary of copies, not of the live tensors.

    optimizer.state[p]: what it keeps of a parameter, a dictionary of tensors
    loader.step: how many batches were read; it may be set.  Dropout draws from torch's own generator.
    """
    ### BEGIN SOLUTION
    names = {p: name for name, p in model.named_parameters()}
    return {
        "model": {name: x.clone() for name, x in model.state_dict().items()},
        "moments": {names[p]: {key: x.clone() for key, x in kept.items()} for p, kept in optimizer.state.items()},
        "rate": optimizer.param_groups[0]["lr"],
        "schedule": schedule.state_dict(),
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
        optimizer.state[p] = state["moments"].get(name, {})
    optimizer.param_groups[0]["lr"] = state["rate"]
    schedule.load_state_dict(state["schedule"])
    loader.step = state["step"]
    torch.set_rng_state(state["random"])
    ### END SOLUTION


check.resume(remember, resume)

# %% [markdown]
# ### Exercise 4, optional: the place in the data
#
# On another number of ranks the random numbers cannot be the same, but the data can be, in the same order. So what is
# remembered must not depend on the number of ranks: it is how many **windows** (pieces of text) all ranks *together*
# have read.


# %%
def next_windows(order, batch, read, rank, ranks):
    """The numbers of the windows that this rank reads in the next step, after a restart.

    order(epoch) -> the windows of an epoch, a list, in the order in which they are read: another one for each
        epoch, but as long
    batch: windows per step, on all ranks together, a multiple of ranks; rank r reads the r-th of equal parts that
        lie one after the other
    read: how many windows all ranks together have read so far, a multiple of batch; those at the end of an epoch
        that do not fill a batch are left out, and not counted
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
# ## Measure: kill it
#
# Put together, a training that looks for the newest checkpoint when it begins, and saves after every step:


# %%
def survivor(place, steps, deaths=()):
    """All of this rank's numbers, after these steps.  deaths: (attempt, rank, step)s at which a rank is killed."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, held, optimizer, schedule = training = whole_training(seed=0)
    where = newest(place)
    for step in range(resumed(where, *training) if where else 0, steps):
        take_steps(model, optimizer, schedule, [step])
        if (attempt, dist.get_rank(), step) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        save(place, step + 1, held, values=schedule.state_dict(), own=random_state())
    return {key: x for key, part in held.parts().items() for x in part.blocks.values()}


# %% [markdown]
# `run(..., restarts=3)` starts all ranks again after one has failed, up to three times; so does torchrun on a cluster,
# with `--max-restarts 3`. Rank 1 is killed in its fourth step, and after the restart rank 0 in the sixth. How many
# steps are taken twice?

# %%
guess_twice = 2  # your number

# %%
two = partial(run, survivor, steps=8, ranks=2, device="cpu")
undisturbed = two(fresh("undisturbed"))
killed = two(fresh("killed"), deaths=[(0, 1, 3), (1, 0, 5)], restarts=3)
for mine, theirs in zip(undisturbed, killed, strict=True):
    assert all(torch.equal(x, theirs[key]) for key, x in mine.items())
print(check.predict("Steps that were taken twice?", guess_twice, 2, reason="Each of the two that were not saved yet."))

# %% [markdown]
# And at the end, the same parameters and moments on both ranks, bit for bit.
#
# ## Build: while training goes on
#
# A save takes time, and training waits for it. For what does it have to wait? Only for a *copy*, since the next step
# changes the numbers. A thread can write the copy meanwhile. That is an **asynchronous** save:
#
#     training   step 3   copy   step 4   step 5   step 6   copy   step 7   ...
#     thread                     write ----------------->          write ---...
#
# Its price is the memory of the copy. And the next save waits for this one, so they cannot be closer together than a
# write takes.


# %%
def waits(place):
    """Seconds that training waits in a save of 32 MB, and in an asynchronous one."""
    torch.manual_seed(0)
    model, seconds = torch.nn.Linear(1000, 8000, bias=False), {}
    held = Held(fully_shard(model, mesh=Mesh((dist.get_world_size(),), ("dp",))))
    with Saver(place) as saver:
        saver.save(0, held)  # which makes room for copies
        saver.wait()
        for number, (name, call) in enumerate({"save": partial(save, place), "Saver.save": saver.save}.items()):
            begin = time.perf_counter()
            call(number + 1, held)
            seconds[name] = time.perf_counter() - begin
    return seconds


for name, seconds in run(waits, fresh("waits"), ranks=2, device="cpu")[0].items():
    print(f"{name}: training waits for {1000 * seconds:.0f} ms")

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a checkpoint of step 1 has numbers of step 2 in it. PyTorch's
# > `async_save` moved tensors "to the CPU" before its thread wrote them, and a tensor that is on the CPU already was
# > not copied: the thread wrote the live one, into which the optimizer was writing
# > ([pytorch#144657](https://github.com/pytorch/pytorch/issues/144657), January 2025; mended since).
#
# ## Measure: how often?
#
# Save often, and training waits often. Save seldom, and a failure loses much: on average half of the time between two
# saves. Take δ seconds for a save, T seconds between two saves, and a failure every M seconds (the job's *mean time
# between failures*, MTBF). Then a share of δ/T is lost by waiting, and T/2M by work that is done again. (A restart
# takes time as well, but as much for every T.) For Llama 3's training, if a save takes a minute: after how many minutes
# of training should it save?

# %%
guess_minutes = 20  # your number

# %%
SAVE = 60  # seconds
shares = {}
for minutes in (5, 10, 20, 40, 80, 120):
    every = 60 * minutes
    shares[f"every {minutes} minutes"] = {"communication": 100 * SAVE / every, "waiting": 100 * every / 2 / between}
draw.chart(shares, "%", caption="of the time is lost: by saving (communication), by doing work again (waiting)")

# %% [markdown]
# One part falls as the other rises. Their sum is least where its slope is zero, δ/T² = 1/2M (J. W. Young, 1974):
#
# $$T = \sqrt{2 \delta M}$$
#
# ### Exercise 5: the interval
#
# One line, but whose failures are they?


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

# %%
best = interval if answer.ok else exercises.interval
minutes = round(best(SAVE, between * gpus, gpus) / 60, 1)
print(check.predict("Minutes between two saves, if each takes one?", guess_minutes, minutes, tolerance=0.3))
rows = []
for seconds in (1, 10, 60, 600):
    every = best(seconds, between * gpus, gpus)
    share = 100 * (seconds / every + every / (2 * between))
    rows.append(
        {"a save takes": f"{seconds} s", "best interval, minutes": round(every / 60, 1), "lost, %": round(share, 1)}
    )
draw.table(rows)

# %% [markdown]
# This is why asynchronous saves are worth their memory: what counts is how long training *waits*.
#
# ## Native
#
# PyTorch's `torch.distributed.checkpoint`, **DCP**, is made of the same parts: files by rank, an index (`.metadata`,
# written last), loading into any layout. `get_state_dict` names the optimizer's state by parameter.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard


# %%
def torchs(where=None, to=None):
    """As two_steps does it, with PyTorch's own."""
    model = GPT(CONFIG)
    for part in [*model.layers.values(), model]:
        torchs_fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(model.parameters())
    if where:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=where)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    one_step(model, optimizer, 2 if where else 0)
    loss = one_step(model, optimizer, 3 if where else 1)
    if to:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=to)
    return loss


# %%
place = fresh("dcp") / "step-2"
run(torchs, to=place, ranks=4, device="cpu")
native = run(torchs, where=place, ranks=3, device="cpu")[0]
assert abs(native - losses["one process"]) < 1e-4
print(f"PyTorch's, saved on 4 ranks, loaded on 3: loss {native:.4f}")

# %% [markdown]
# The same loss as above. `dcp.async_save` is its asynchronous save. Two differences to know, since nothing is said:


# %%
def silently(place):
    """What DCP makes of a key that nobody asks for, and of one key with another value on each rank."""
    rank = dist.get_rank()
    saved = {"weight": torch.ones(2), "bias": torch.ones(2), "random state": torch.full((1,), rank)}
    dcp.save(saved, checkpoint_id=place)
    found = {"weight": torch.zeros(2), "random state": torch.zeros(1, dtype=torch.long)}
    dcp.load(found, checkpoint_id=place)
    return sorted(found), found["random state"].item()


keys, states = zip(*run(silently, fresh("silent") / "step-1", ranks=2, device="cpu"), strict=True)
print(f"loaded: {' and '.join(keys[0])}; of two random states, {len(set(states))} is left")
FOLDER.cleanup()

# %% [markdown]
# The bias is in the checkpoint, the program forgot to ask for it, and nothing is said. And a plain tensor under one key
# is taken for one tensor: one rank's is stored, and all ranks get it. Ours refuses both: `nobody asks for its …`, and
# `… differs on ranks 0 and 1`. [tests/checkpoint/threads.py](../tests/checkpoint/threads.py) has some twenty more.

# %% [markdown]
# ### A way out
#
# Here is an ordinary script that survives, with nothing of the course but the data and the model. It is
# [scripts/checkpoint.py](../scripts/checkpoint.py). From the root of the repository, run
#
#     export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
#     torchrun --standalone --nproc-per-node 4 --max-restarts 3 scripts/checkpoint.py --kill-at 5
#
# or kill one of its processes yourself. It goes on from what is in the folder `checkpoints`, so remove that to begin
# anew; and it resumes on as many ranks as have saved.
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
# | rank 0 saves all | one file | a rank must hold the whole; the others wait |
# | sharded, with an index | ranks write side by side; any layout loads it | a folder, and an index |
# | asynchronous | training waits for a copy | the memory of the copy |
#
# **Why not** simply more often? Even a copy takes time, and a network disk that thousands of ranks write to at once
# becomes the slowest part of the job. At work you will also have to decide how many checkpoints to keep (two at least:
# one that loads, and one to go back to when the loss goes wrong), and what to do where there is no rename, as in object
# stores: there, the index is written last, and what has no index is no checkpoint.
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
# Nobody. Each rank reads from each file what lies in its own blocks. The index says where that is.
# </details>
#
# <details><summary>Why are moments stored by the name of their parameter?</summary>
#
# The number of a parameter depends on the order in which the optimizer was given it. In another order, the moments of
# one would go to another of the same shape, and nothing would fail.
# </details>
#
# <details><summary>What differs on each rank, and so must be saved by each?</summary>
#
# The state of its random numbers. The place in the data is one number for all of them, if it counts what all have read.
# </details>
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | bytes written, per parameter, by `torch.save` on 4 ranks | 48 | – | 48 |
# | bytes written, per parameter, sharded | 12 | 12 | – |
# | resumed in another layout | the same loss | within 1e-4 | within 1e-4 |
# | killed twice, and resumed | the same numbers | bit for bit | – |
# | time between two saves | √(2δM) | – | – |
#
# **Read on**: [labs/checkpoint/saving.py](../labs/checkpoint/saving.py), then
# [labs/checkpoint/loading.py](../labs/checkpoint/loading.py); and
# [labs/checkpoint/llamas.py](../labs/checkpoint/llamas.py), which exports weights as Hugging Face's libraries have
# them. J. W. Young, 1974, *A first order approximation to the optimum checkpoint interval* (Communications of the
# ACM). Pillai et al., 2014, *All File Systems Are Not Created Equal* (OSDI), on what disks do to programs that forget
# to flush.
#
# **Next.** A layer, or a single sequence, may still be too large for one device, and there can be no more ranks than
# sequences. [09 Tensor parallelism](09_tensor_parallel.ipynb) splits the layers themselves.
#
# A clean copy of this notebook: `git restore notebooks/08_checkpoint.ipynb`, then *File > Reload Notebook from Disk*.
