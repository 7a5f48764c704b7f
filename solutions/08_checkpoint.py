# %% [markdown]
# # Checkpoints: a training that survives
#
# *Llama 3 was trained on 16,384 GPUs. In 54 days of that, it was interrupted 419 times without warning. What is left of
# a training when one of its ranks dies?*
#
# **Minutes**, by estimate: 30 without exercises, 50 with them, 35 more for the challenge.
# The machine works for half a minute of it, in 2 GB of memory. You need: [FSDP](06_fsdp.ipynb), and from
# [Offload](07b_offload.ipynb) what a rename is good for.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("08")

# %%
import dataclasses
import io
import json
import os
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

# %%
import torch
import torch.distributed as dist

from labs.checkpoint import Held, HeldByZero, export, load, newest, save
from labs.data import Batches, corpus
from labs.dtensor import DTensor
from labs.fsdp import fully_shard
from labs.kit import beat, check, draw, play
from labs.kit.launch import RankError, run
from labs.kit.record import mark, watch_folder
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from labs.zero import Zero

# %% [markdown]
# ## Question
#
# All ranks work together in every step. If one of them dies, the others have to stop, too; and what the dead one held
# is gone. This is what stopped that training, by cause, but for the 47 interruptions of all 466 that were planned
# (Llama Team, 2024, arXiv 2407.21783, table 5, with some of its rows added up):

# %%
INTERRUPTIONS = {
    "GPU": 268,
    "software": 56,
    "network": 35,
    "maintenance": 32,
    "host": 21,
    "unknown": 7,
}
failures, days, gpus = sum(INTERRUPTIONS.values()), 54, 16_384
between = days * 24 / failures  # hours between two failures of the job
print(f"{failures} failures in {days} days: one in {between:.1f} h")
print(f"of all causes, for each GPU: one in {between * gpus / 24 / 365:.1f} years")
draw.chart(INTERRUPTIONS, "failures", kind="waiting", caption="interruptions in 54 days")

# %% [markdown]
# The last line counts all causes, and divides by the number of GPUs: a GPU, with the share of the hosts, the network
# and the software that belongs to it, fails once in years. But there are so many of them that *some* part fails every
# three hours. A training survives only if it can begin again from something that is still there: a **checkpoint**,
# which is everything that it needs to go on, on disk.
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
# has the whole model and the whole state, as in DDP, in float32 with AdamW and its two moments. How many bytes do all
# ranks together write, per parameter? And how many would be enough?

# %%
guess_naive = 4 * (4 + 8)  # your number
guess_needed = 4 + 8  # your number

# %% [markdown]
# ## Build: what is wrong with `torch.save` on every rank
#
# A training that is sharded, here by FSDP, has to gather everything before `torch.save` can write it. Then either every
# rank writes the whole, or only rank 0 does. The third way is the picture's. It is called `save`, and takes what this
# rank *holds*: `Held(model, optimizer=…)`.


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=4e-3)


def by_parameter(model):
    """FSDP: what this rank holds, and its optimizer."""
    for part in [*model.layers.values(), model]:
        fully_shard(part, mesh=Mesh((dist.get_world_size(),), ("dp",)))
    optimizer = adamw(model.parameters())
    return Held(model, optimizer=optimizer), optimizer


@torch.no_grad()
def whole(model, optimizer):
    """All parameters and moments, on every rank."""
    moments = [x for state in optimizer.state.values() for x in state.values()]
    tensors = [*model.parameters(), *moments]
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
TEXT = corpus()
FOLDER = tempfile.TemporaryDirectory()


def count(config):
    """How many parameters the model has."""
    return sum(p.numel() for p in GPT(config).parameters())


def fresh(name):
    """A new folder, so that a cell may be run twice."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER.name))


# %%
def three_ways(place):
    """For each way: seconds, and the bytes that this rank has written."""
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
        written = path.stat().st_size if path.exists() else 0
        found.append((time.perf_counter() - begin, written))
    return found


# %%
plain = run(three_ways, fresh("ways"), ranks=4, device="cpu")
watched_too = run(three_ways, fresh("ways"), ranks=4, device="cpu", record="memory")
rows = []
for step, way in enumerate(WAYS):
    seconds, sizes = zip(*(of_rank[step] for of_rank in plain), strict=True)
    peak = watched_too.recording.held(0, step)["peak"] / (12 * count(LARGER) / 4)
    row = {"way": way, "bytes written per parameter": round(sum(sizes) / count(LARGER))}
    row |= {"peak of a rank, × its share": round(peak), "time": f"{max(seconds):.2f} s"}
    rows.append(row)
draw.table(rows)

# %%
print(check.predict("Bytes per parameter, written by four ranks?", guess_naive, 48))
print(check.predict("And how many are enough?", guess_needed, 12))

# %% [markdown]
# The first way writes the same thing four times. The second writes it once. But in both, a rank holds five shares: its
# own, and the four that were gathered. Had that fitted on a GPU, nobody would have sharded the model. A host has more
# memory than its GPUs, so PyTorch knows a fourth way: with `full_state_dict=True, cpu_offload=True`, one parameter
# after another is gathered and put into the memory of rank 0's host. It works as long as the whole fits there.
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
# [labs/checkpoint](../labs/checkpoint/__init__.py) saves a training under any strategy of the course. What it was given
# for FSDP is a `Held`. For ZeRO it is a `HeldByZero`:


# %%
def in_vectors(model):
    """ZeRO's stage 3: what a rank holds, and its optimizer."""
    zero = Zero(model, stage=3, optimizer=adamw)
    return HeldByZero(zero), zero


# %%
def one_step(model, optimizer, batch):
    """The mean loss over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = Batches(TEXT.tokens, 12, CONFIG.context, rank=rank, ranks=ranks)
    loss = model(*batches[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach().clone())
    return mean.item() / ranks


# %%
def two_steps(layout, where=None, to=None):
    """The second loss.  Loads `where` before, and saves in the folder `to` after, if given."""
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
due, found = 12 * count(CONFIG), sum(sizes.values())
draw.ledger({"bytes of P and S, in four files": (due, found)}, within=0.02)

# %% [markdown]
# Each number is written once, by four ranks at the same time. A parameter has four entries: itself, its two moments,
# and AdamW's count of its steps. For each, the index says what shape the tensor has, and which blocks of it lie where:
# where the block begins, its own shape, and the file.

# %%
index = json.loads((first / "index.json").read_bytes())["record"]
name = "embed.weight"
print(*sorted(key for key in index["tensors"] if name in key), sep="\n")
of_it = index["tensors"][f"model/{name}"]
print(of_it["shape"], *of_it["pieces"], sep="\n")

# %% [markdown]
# A moment is stored under the *name* of its parameter. `optimizer.state_dict()` goes by *number*, and number 7 of an
# optimizer that was given the parameters in another order is another parameter. If both have the same shape, nothing
# fails: each gets the other's moments.
#
# ## Build: into another layout
#
# After a failure you may have fewer ranks than before. That three ranks load what four have saved is called
# **resharding**. Which elements of which files does each of them need? Move the sliders:

# %%
play.explore(partial(draw.reads, 12), saved=[4, 1, 2, 3, 6], loading=[3, 1, 2, 4, 6])

# %% [markdown]
# ### Exercise 1: each element once (10 minutes)
#
# Budget: each element of this rank's part is read once and no other one, with at most one `read` per file, and none
# from a file that has nothing of the part. At most twice the part is held, so `torch.cat` is allowed. No rank needs to
# talk to another.


# %%
def load_shards(index, read, rank, ranks):
    """This rank's equal part of a vector that other ranks have saved, as one tensor.

    index: a list of pairs, a file's name and how many elements of the vector lie in it,
        perhaps 0; the files follow one another
    read(name, start, stop) -> the elements start:stop of that file: a 1-D tensor of any dtype
    The vector's length is a multiple of `ranks`. A part may begin and end inside a file,
    and it may be empty.
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
# The textbook does the same with blocks, in any number of dims:
# [labs/checkpoint/extents.py](../labs/checkpoint/extents.py) finds what a rank needs, what a file has, and what the two
# have in common. So it does not matter how many ranks have saved, or how they had split the model. Below, what four
# ranks of ZeRO have saved is loaded under FSDP on three ranks, on two, and on one. Each then takes two steps, and the
# second loss is compared: the step before it needs the moments, too.

# %%
layouts = {
    "ZeRO 3 on 4 ranks": (in_vectors, 4),
    "FSDP on 3 ranks": (by_parameter, 3),
    "FSDP on 2 ranks": (by_parameter, 2),
    "one process": (by_parameter, 1),
}
losses = {}
for name, (layout, ranks) in layouts.items():
    losses[name] = run(two_steps, layout, first, ranks=ranks, device="cpu")[0]
assert max(losses.values()) - min(losses.values()) < 1e-4
for layout, loss in losses.items():
    print(f"{layout}: loss {loss:.4f}")

# %% [markdown]
# The course's tests do this for twelve layouts, each to each, tensor parallelism and pipelines among them, and compare
# bit by bit what arrives.
#
# ## Build: all or nothing
#
# What about the torn file? `os.rename` gives something another name from one moment to the next: to whoever looks, it
# has happened or it has not. Such a change is called **atomic**. That is half of the trick. The other half is what a
# disk does behind your back: `write` returns when the *system* has the text, which may be seconds before the disk has
# it. If the power fails in between, the new name may be there, and the file empty. **Flushing** a file, `os.fsync`,
# waits until the disk has its text. A folder is a list of names, and is flushed in the same way.
#
# ### Exercise 2: old or new (10 minutes)
#
# The check's disk behaves as badly as a disk may. It cuts the power at each of your calls, looks at everything that
# might then be on the disk, and calls your function once more, with the next text. Once your function has returned, the
# new text must survive. Flushing a file does not flush its name; renames reach the disk in the order in which you made
# them.


# %%
def replace(disk, name, text):
    """Let the file `name` have this text: at every moment the old or the new one is there,
    whole.

    disk.write(name, text): make a file, or overwrite one; what is written may be lost until
    disk.flush(name): that file's text is on the disk
    disk.rename(old, new): from one moment to the next, `new` is what was called `old`;
        what was called `new` is gone
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
# saved into it, call by call, as recorded in a small job of one rank. Drag the slider. At which moment does the second
# checkpoint begin to count? Is there a moment, once the first is there, at which a crash would leave nothing to load?


# %%
def two_saves(place):
    held, _ = by_parameter(GPT(CONFIG))
    with watch_folder(place, newest) as moments:
        for step in 4, 8:
            save(place, step, held)
    return moments


moments = run(two_saves, fresh("moments"), ranks=1, device="cpu")[0]
play.crashes(moments)

# %% [markdown]
# It counts from its rename on; and once there is one, there is always one to load. Before the rename, every rank has
# flushed its file, and has taken its **checksum**, a number that changes with any bit of the file. The checksums are in
# the index. So a file that was cut or altered later is found before a single tensor is loaded:

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
# > **What went wrong in the wild.** *Symptom*: a training of 7 billion parameters is killed, starts again, and stops at
# > once with `metadata is None`. Its checkpoints were saved in the background. As soon as a save had *begun*, the link
# > `latest` was moved to it, and the checkpoint before may have been deleted. For about a minute, `latest` was a folder
# > with some of the files in it, so a job that was killed in that minute may have had nothing left. That is how the
# > thread explains it
# > ([KempnerForge#102](https://github.com/KempnerInstitute/KempnerForge/issues/102), May 2026). First finish, then
# > rename, then delete.
#
# ## Native
#
# PyTorch's `torch.distributed.checkpoint`, **DCP**, has the same parts: a file for each rank, an index that is written
# last and called `.metadata`, loading into any layout. `get_state_dict` gives the optimizer's state by the name of the
# parameter.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard


# %%
def torchs_training():
    """A model under PyTorch's FSDP, and its optimizer."""
    model, mesh = GPT(CONFIG), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model.layers.values(), model]:
        torchs_fully_shard(part, mesh=mesh)
    return model, adamw(model.parameters())


def states(model, optimizer):
    """What DCP takes: a dictionary."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


# %%
def torchs(where=None, to=None):
    """As two_steps does it, with PyTorch's own."""
    model, optimizer = torchs_training()
    if where:
        found = states(model, optimizer)
        dcp.load(found, checkpoint_id=where)
        parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(model, optimizer, **parts)
    one_step(model, optimizer, 2 if where else 0)
    loss = one_step(model, optimizer, 3 if where else 1)
    if to:
        dcp.save(states(model, optimizer), checkpoint_id=to)
    return loss


# %%
saved = fresh("dcp") / "step-2"
run(torchs, to=saved, ranks=4, device="cpu")
native = run(torchs, where=saved, ranks=3, device="cpu")[0]
assert abs(native - losses["one process"]) < 1e-4
print(f"PyTorch's, saved on 4 ranks, loaded on 3: loss {native:.4f}")

# %% [markdown]
# The same loss as above. But does a checkpoint of DCP survive a power cut? Look at each file, and at the folder, in the
# moment in which DCP flushes it: how many bytes does the system have by then?


# %%
def flushed(place):
    """For each file of a save: bytes that the system has when it is flushed, and at last."""
    seen, flush = {}, os.fsync

    def note(file):
        seen[os.fstat(file).st_ino] = os.fstat(file).st_size
        flush(file)

    with mock.patch("os.fsync", note):
        dcp.save({"weight": torch.ones(1000)}, checkpoint_id=place)
    files = [place, *sorted(place.iterdir())]
    return {file.name: (seen.get(file.stat().st_ino), file.stat().st_size) for file in files}


sizes = run(flushed, fresh("flushed") / "step-1", ranks=1, device="cpu")[0]
print("flushed:", *[name for name, (then, _) in sizes.items() if then is not None])
print(f"PyTorch {torch.__version__}: {sizes['.metadata'][0]} of the index's bytes had arrived")

# %% [markdown]
# The folder is never flushed. And the index? PyTorch 2.13 writes its text into a Python file, flushes the file while
# Python still has the text, and closes it: at the flush, 0 bytes have arrived. (PyTorch 2.15 hands the text over
# first.) Those are calls that your disk of exercise 2 knows. Here they are, on that disk:


# %%
def as_dcp(disk, name, text):
    """The calls of PyTorch 2.13 for its index."""
    draft = f"{name}.tmp"
    disk.write(draft, "")  # Python has the text
    disk.flush(draft)
    disk.write(draft, text)  # the file is closed
    disk.rename(draft, name)


check.replace(as_dcp, seed=1)

# %% [markdown]
# A second save under the same id writes into the very files of the first one, too. So give every save a folder of its
# own, flush the folder, and keep the checkpoint before it until that is done. Another difference to know, since nothing
# is said:


# %%
def silently(place):
    """What DCP makes of a key that nobody asks for."""
    dcp.save({"weight": torch.ones(2), "bias": torch.ones(2)}, checkpoint_id=place)
    found = {"weight": torch.zeros(2)}
    dcp.load(found, checkpoint_id=place)
    return list(found)


print("loaded:", *run(silently, fresh("silent") / "step-1", ranks=1, device="cpu")[0])

# %% [markdown]
# The bias is in the checkpoint, and the program forgot to ask for it. Ours refuses that, with `nobody asks for its …`.
# [tests/checkpoint/threads.py](../tests/checkpoint/threads.py) has eleven reports of what distributed
# checkpoints have lost or mixed up, each tried here.

# %% [markdown]
# ### A way out
#
# A checkpoint belongs to the program that wrote it. Others want the weights alone, in files that they know. `export`
# writes a folder as Hugging Face's libraries have it, from any layout; no rank holds more of the model than its own
# part, and one tensor. It is read here with nothing of the course:

# %%
from safetensors.torch import load_file


def exported(where, folder):
    held, _ = by_parameter(model := GPT(CONFIG))
    load(where, held)
    export(folder, Held(model), CONFIG)


weights = fresh("exported") / "gpt"
run(exported, first, weights, ranks=3, device="cpu")
print(*sorted(path.name for path in weights.iterdir()), sep="\n")

# %%
found = {}
for path in weights.glob("*.safetensors"):
    found |= load_file(path)
print(len(found), "tensors, among them", min(found), tuple(found[min(found)].shape))

# %% [markdown]
# `transformers.AutoModelForCausalLM.from_pretrained(folder)` makes a model of it, and inference engines read the same
# files. PyTorch's checkpoints have a way out of their own, into what `torch.load` reads:

# %%
plain_file = fresh("plain") / "step-2.pt"
dcp_to_torch_save(saved, plain_file)
print(*torch.load(plain_file), "by torch.load")
FOLDER.cleanup()

# %% [markdown]
# ## Why, and why not
#
# | | what it gives | what it costs |
# |---|---|---|
# | every rank saves all | one line of code | each byte N times; a torn file is the end |
# | rank 0 saves all | one file | a rank must hold the whole; the others wait |
# | rank 0's host gathers all | one file; no GPU holds the whole | its memory must hold the whole; the others wait |
# | sharded, with an index | ranks write side by side; any layout loads it | a folder, and an index |
#
# **Why not** always? On one device, or where the whole model fits on a rank beside its share, `torch.save` on rank 0 is
# enough: into a draft that is flushed, and then renamed. At work you will also have to decide how many checkpoints to
# keep. Two at least: one that loads, and one to go back to when the loss goes wrong. And object stores have no rename.
# There, the index is written last, and what has no index is no checkpoint.
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
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | bytes written per parameter, by `torch.save` on 4 ranks | 48 | – | 48 |
# | bytes written per parameter, sharded | 12 | 12 | not measured here |
# | loaded in another layout | the same loss | within 1e-4 | within 1e-4 |
#
# ## Beat it: the cheapest save that survives (30 minutes)
#
# Here it is open. Four ranks hold a state of 48 kB, and save it eight times. Each
# tensor is on all ranks, on two, or on one; some are frozen, and of sixteen experts only four change between two saves.
# A rank writes 8 MB/s. Each flush, of a file or of the names, takes it 0.5 ms, as long as 4 kB. `disk.meet()` waits for
# all ranks, and takes no time of its own; but from one meeting to the next, all wait for the slowest rank. What
# counts is how long eight saves take, in the mean of five states. A tensor changes as a whole, or not at all.
#
# The power may fail at any moment, as in exercise 2, and between two meetings nothing says which rank comes first. The
# file `index` says where each piece is: `{("tensor 0", 0): "some file", …}`, the rows of this tensor from row 0 on.
# What it leads to must be the state of the save before, or of this one; and after the save, of this one. The disk has
# room for 2.25 states.
#
# **The bound.** All that has changed since the save before is new, so it has to be written, by four ranks side by side
# at best, and flushed. Only then may its name change, and be flushed. So no save takes less than changed bytes/4W and
# two latencies. Where the first rank that has a tensor writes it, as here, the mean is 41.7 points.
# A score is 100 × bound / time.


# %%
def written_by(writer, disk, step, mine):
    """Each tensor is written by its rank; then rank 0 writes the index. The old files go."""
    rank, file = dist.get_rank(), f"step {step}, rank {{}}".format
    own = {(name, 0): x for name, x in mine.items() if writer[name] == rank}
    disk.write(file(rank), own)
    disk.flush(file(rank))
    disk.meet()
    if rank == 0:
        disk.write("draft", {(name, 0): file(writer[name]) for name in writer})
        disk.flush("draft")
        disk.rename("draft", "index")
        disk.flush_names()
    disk.meet()
    if step:
        disk.remove(f"step {step - 1}, rank {rank}")


# %%
def by_the_first(disk, step, mine, tensors, memo):
    writer = {name: ranks[0] for name, (rows, ranks) in tensors.items()}
    written_by(writer, disk, step, mine)


# %%
def saved_cheaply(disk, step, mine, tensors, memo):
    """Save step 0, 1, … 7 of a state: afterwards it survives, and until then the last one.

    mine: this rank's tensors, by name; rows of 128 bytes. They change in place, later
    tensors: of all tensors, by name, the rows, and the ranks that have it
    memo: this rank's dictionary, the same one in each step; empty at first
    disk.write(file, {(name, first row): rows of this tensor, …}), or, for the index, files;
        16 bytes more for each entry
    disk.flush, rename, flush_names, remove: as in exercise 2
    disk.meet(x) -> what each rank has brought, by rank; disk.room: bytes
    """
    ### BEGIN SOLUTION
    load, writer = [0] * dist.get_world_size(), {}
    for name, (rows, ranks) in sorted(tensors.items(), key=lambda each: -each[1][0]):
        writer[name] = min(ranks, key=load.__getitem__)
        load[writer[name]] += rows
    written_by(writer, disk, step, mine)
    ### END SOLUTION


beat.cheap_save(saved_cheaply)

# %% [markdown]
# The course's answer gives each tensor, the largest first, to the rank that has least to write, and always writes all.
#
# <details><summary>Where is there room?</summary>
#
# In what has not changed: an index may name files of earlier saves, as long as they are there. In tensors, which may
# be cut into pieces. And in the index, which need not be the last to be flushed. But old files are full of what nobody
# needs any more, and the disk is small.
# </details>
#
# **Read on**: [labs/checkpoint/saving.py](../labs/checkpoint/saving.py), then
# [labs/checkpoint/loading.py](../labs/checkpoint/loading.py); and
# [labs/checkpoint/exporting.py](../labs/checkpoint/exporting.py), for other libraries. Pillai et al., 2014, *All File
# Systems Are Not Created Equal* (OSDI), on what disks do to programs that forget to flush.
#
# **Next.** A checkpoint is there, whole. But is all of the training in it? [08b Resume](08b_resume.ipynb) goes on from
# one as if nothing had happened, finds out how often to save, and lets training go on meanwhile.
#
# A clean copy of this notebook: `git restore notebooks/08_checkpoint.ipynb`, then *File > Reload Notebook from Disk*.
