# %% [markdown]
# # Checkpoints: a training that survives
#
# *Llama 3 was trained on 16,384 GPUs. In 54 days, the training was interrupted 419 times without warning. When one rank
# of a training dies, how can the training go on?*
#
# **Minutes**, by estimate: 30 without exercises, 50 with them, 35 more for the challenge.
# Running all cells takes half a minute and 2 GB of memory. You need: [FSDP](06_fsdp.ipynb), and
# [Offload](07b_offload.ipynb), which explains why a rename makes a save safe.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

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
# All ranks work together in every step. If one rank dies, the others have to stop, too, and the state that the dead
# rank held is lost. The next cell lists the causes of the 419 unplanned interruptions of Llama 3's training; 47 more
# were planned. The numbers are from table 5 of the paper, with some of its rows added up (Llama Team, 2024, arXiv
# 2407.21783):

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
# The last line counts all causes, and divides by the number of GPUs: a GPU, together with its share of the hosts, the
# network and the software, fails once in several years. But there are so many GPUs that *some* part of the cluster
# fails every three hours. A training survives only if it can go on from a **checkpoint**: everything that the training
# needs to go on, stored on disk.
#
# ## Picture
#
# ![Four ranks each write their quarter of P and S to a file of their own, in a folder called step-12.draft. Rank 0
# writes index.json, which says what lies in which file, and renames the folder to step-12.](../images/checkpoint.svg)
#
# The picture shows the checkpoint that this notebook builds. All ranks write their shards at the same time, and if
# several ranks hold the same tensor, only one of them writes it. An **index** lists which part of which tensor is in
# which file. The folder has another name until the last byte is safely on the disk. The next sections explain why each
# of these parts is needed.
#
# ## Predict
#
# The simplest checkpoint takes one line: each rank calls `torch.save` on its model and its optimizer. Suppose that
# four ranks train in float32 with AdamW, which has two moments, and that each rank has the whole model and the whole
# optimizer state, as in DDP. How many bytes per parameter do all ranks together write? And how many bytes per parameter
# would be enough?

# %%
guess_naive = 4 * (4 + 8)  # your number
guess_needed = 4 + 8  # your number

# %% [markdown]
# ## Build: what is wrong with `torch.save` on every rank
#
# A training that is sharded, here by FSDP, has to gather all tensors before `torch.save` can write them. Then either
# every rank writes all tensors, or only rank 0 does. The third way is the one in the picture: each rank writes its own
# shards. The course's function `save` writes only the shards that this rank *holds*, described by `Held(model,
# optimizer=…)`.


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=4e-3)


def by_parameter(model):
    """Shard the model with FSDP. Return the description of what this rank holds, and its
    optimizer."""
    for part in [*model.layers.values(), model]:
        fully_shard(part, mesh=Mesh((dist.get_world_size(),), ("dp",)))
    optimizer = adamw(model.parameters())
    return Held(model, optimizer=optimizer), optimizer


@torch.no_grad()
def whole(model, optimizer):
    """Return all parameters and moments, on every rank."""
    moments = [x for state in optimizer.state.values() for x in state.values()]
    tensors = [*model.parameters(), *moments]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]


# %%
WAYS = {"every rank": range(4), "rank 0": range(1), "sharded": range(4)}


def saved_by(way, model, optimizer, held, place):
    """Save in one of the three ways. Return the path of this rank's file, which exists if this
    rank has written one."""
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
    """Return the number of parameters of the model."""
    return sum(p.numel() for p in GPT(config).parameters())


def fresh(name):
    """Return a new folder, so that a cell may be run twice."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER.name))


# %%
def three_ways(place):
    """Return for each way the seconds, and the bytes that this rank has written."""
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
# The first way writes the same bytes four times, and the second writes them once. But in both ways a rank holds five
# times its share: its own shards, and the gathered shards of all four ranks. If this fitted on a GPU, nobody would have
# sharded the model. A host has more memory than its GPUs, so PyTorch offers a fourth way: with `full_state_dict=True,
# cpu_offload=True`, it gathers one parameter after another and copies it to the memory of rank 0's host. This works as
# long as the whole model and state fit there.
#
# ## Build: a torn file
#
# There is a worse problem. It takes time to write a file, and in this time the process may die:


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
# The new checkpoint is incomplete, and the old one has been overwritten, since both use the same file. The save that
# should have made the training safe has destroyed it.
#
# ## Build: sharded
#
# [labs/checkpoint](../labs/checkpoint/__init__.py) saves a training under any strategy of the course. For FSDP, the
# object that describes a rank's shards is a `Held`. For ZeRO it is a `HeldByZero`:


# %%
def in_vectors(model):
    """Shard the model with ZeRO's stage 3. Return the description of what this rank holds, and
    its optimizer."""
    zero = Zero(model, stage=3, optimizer=adamw)
    return HeldByZero(zero), zero


# %%
def one_step(model, optimizer, batch):
    """Take one step, and return the mean loss over all ranks."""
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
    """Take two steps and return the second loss. Load `where` before them, and save in the
    folder `to` after them, if given."""
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
# The four ranks write at the same time, and each number is written once. The index has four entries for a parameter:
# the parameter itself, its two moments, and AdamW's count of steps. Each entry holds the shape of the tensor, and a
# list of its blocks. For each block it names the place where the block begins in the tensor, the shape of the block,
# and the file.

# %%
index = json.loads((first / "index.json").read_bytes())["record"]
name = "embed.weight"
print(*sorted(key for key in index["tensors"] if name in key), sep="\n")
of_it = index["tensors"][f"model/{name}"]
print(of_it["shape"], *of_it["pieces"], sep="\n")

# %% [markdown]
# A moment is stored under the *name* of its parameter. In contrast, `optimizer.state_dict()` stores it under a
# *number*, which depends on the order of the parameters in the optimizer. If an optimizer gets the parameters in
# another order, number 7 is another parameter. If the two parameters have the same shape, nothing fails, but each gets
# the other's moments.
#
# ## Build: into another layout
#
# After a failure you may have fewer ranks than before. To load on three ranks a checkpoint that four ranks have saved
# is called **resharding**. Which elements of which files does each of the three ranks need? Move the sliders:

# %%
play.explore(partial(draw.reads, 12), saved=[4, 1, 2, 3, 6], loading=[3, 1, 2, 4, 6])

# %% [markdown]
# ### Exercise 1: each element once (10 minutes)
#
# Budget: read each element of this rank's part once, and no other elements. Call `read` at most once per file, and
# never for a file that holds none of the part. Hold at most twice the size of the part, so `torch.cat` is allowed. The
# ranks need not talk to each other.


# %%
def load_shards(index, read, rank, ranks):
    """Return this rank's equal part of a vector that other ranks have saved, as one tensor.

    index: a list of pairs (file, n): n elements of the vector are in the file, perhaps 0; the
        files follow one another
    read: read(file, start, stop) returns the elements start:stop of the file, a 1-D tensor of
        any dtype
    rank, ranks: this rank's number, and the number of ranks that load

    The vector's length is a multiple of `ranks`. A part may begin and end inside a file, and it
    may be empty.
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
# The course's `load` does the same with blocks, in any number of dims:
# [labs/checkpoint/tensor_blocks.py](../labs/checkpoint/tensor_blocks.py) computes the overlap between the blocks that a
# rank needs and the blocks that a file has. So the number of ranks that saved does not matter, nor how they had sharded
# the model. The next cell loads a checkpoint of four ranks with ZeRO into FSDP on three ranks, on two, and on one. Each
# job then takes two steps, and we compare the second loss, which depends on the loaded moments, too.

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
# The course's tests load from each of fourteen layouts into each of the others, including tensor parallelism and
# pipelines, and compare the loaded tensors bit by bit.
#
# ## Build: all or nothing
#
# How can we avoid an incomplete file? `os.rename` changes a name in one instant: every other process sees either the
# old name or the new one. Such a change is called **atomic**. But a rename alone is not enough. `write` returns when
# the operating *system* has the text, which may be seconds before the disk has it. If the power fails in between, the
# new name may be on the disk while the file is empty. To **flush** a file, with `os.fsync`, waits until the disk has
# its text. A folder is a list of names, and is flushed in the same way.
#
# ### Exercise 2: old or new (10 minutes)
#
# The check simulates the worst disk that is allowed. It cuts the power at each of your calls, tries every content that
# the disk might then have, and calls your function once more, with the next text. Once your function has returned, the
# new text must survive. To flush a file does not flush its name. Renames reach the disk in the order in which you made
# them.


# %%
def replace(disk, name, text):
    """Replace the text of the file `name`. At every moment the file must hold the whole old
    text or the whole new one.

    disk.write(name, text): makes or overwrites a file; the text may be lost until it is flushed
    disk.flush(name): waits until this file's text is on the disk
    disk.rename(old, new): atomically gives the file `old` the name `new`; the old file `new` is
    gone
    disk.flush_names(): waits until all names are on the disk, as they are now
    disk.remove(name), disk.names(): remove a file; list the names

    Leave no other file behind, not even one that an earlier call has left in a power cut.
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
# A checkpoint consists of many files, so `save` renames a whole *folder*. The next figure shows the files in a folder
# while a small job of one rank saves two checkpoints into it, call by call. Drag the slider. At which moment does
# `load` begin to find the second checkpoint? After the first checkpoint is complete, is there a moment at which a crash
# would leave nothing to load?


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
# `load` finds the second checkpoint from its rename on, and after the first rename there is always a checkpoint to
# load. Before the rename, every rank has flushed its file and computed its **checksum**, a number that changes if any
# bit of the file changes. The index holds the checksums. So `load` notices a file that was cut or altered later, before
# it loads a single tensor:

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
# > once with `metadata is None`. *Cause*, as the thread explains it: checkpoints were saved in the background. As soon
# > as a save had *begun*, the link `latest` pointed to it, and the previous checkpoint may have been deleted. For about
# > a minute, `latest` was a folder with only some of the files, so a job that was killed in that minute may have had
# > nothing to load ([KempnerForge#102](https://github.com/KempnerInstitute/KempnerForge/issues/102), May 2026). So
# > first finish the new checkpoint, then rename it, and only then delete the old one.
#
# ## Native
#
# PyTorch's `torch.distributed.checkpoint`, **DCP**, has the same parts: a file for each rank, and an index,
# `.metadata`, which is written last. It can load into any layout. `get_state_dict` returns the optimizer's state under
# the names of the parameters.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard


# %%
def torchs_training():
    """Return a model under PyTorch's FSDP, and its optimizer."""
    model, mesh = GPT(CONFIG), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model.layers.values(), model]:
        torchs_fully_shard(part, mesh=mesh)
    return model, adamw(model.parameters())


def states(model, optimizer):
    """Return the dictionary that DCP saves."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


# %%
def torchs(where=None, to=None):
    """Do the same as two_steps, with PyTorch's own checkpoints."""
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
# The loss is the same as above. But does a checkpoint of DCP survive a power cut? The next cell records, for each file
# and for the folder, how many bytes the system has when DCP flushes it:


# %%
def flushed(place):
    """Return for each file of a save the bytes that the system has when it is flushed, and at
    the end."""
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
# DCP never flushes the folder. PyTorch 2.13 writes the text of the index into a Python file, calls `os.fsync` while
# Python still holds the text in its buffer, and then closes the file: at the flush, the system has 0 bytes. PyTorch
# 2.15 empties the buffer first. The next cell makes the calls of PyTorch 2.13 on the disk of exercise 2:


# %%
def as_dcp(disk, name, text):
    """Make the calls of PyTorch 2.13 for its index."""
    draft = f"{name}.tmp"
    disk.write(draft, "")  # Python has the text
    disk.flush(draft)
    disk.write(draft, text)  # the file is closed
    disk.rename(draft, name)


check.replace(as_dcp, seed=1)

# %% [markdown]
# A second save of DCP under the same id also overwrites the files of the first. So give every save a folder of its own,
# flush the folder, and keep the previous checkpoint until then. There is another difference, about which DCP gives no
# warning:


# %%
def silently(place):
    """Return the keys that DCP loads if the program does not ask for one of them."""
    dcp.save({"weight": torch.ones(2), "bias": torch.ones(2)}, checkpoint_id=place)
    found = {"weight": torch.zeros(2)}
    dcp.load(found, checkpoint_id=place)
    return list(found)


print("loaded:", *run(silently, fresh("silent") / "step-1", ranks=1, device="cpu")[0])

# %% [markdown]
# The bias is in the checkpoint, but the program forgot to load it. The course's `load` raises an error in this case:
# `nobody asks for its …`. [tests/checkpoint/threads.py](../tests/checkpoint/threads.py) lists eleven reports of tensors
# that distributed checkpoints have lost or mixed up, and tries each of them with the course's checkpoints.

# %% [markdown]
# ### Export to other libraries
#
# Only the program that wrote a checkpoint can read it. Other programs need only the weights, in files of a common
# format. `export` writes a folder in the format of Hugging Face's libraries, from any layout; no rank holds more of the
# model than its own shards and one tensor. The next cells export the checkpoint, and read the folder without the
# course's code:

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
# `transformers.AutoModelForCausalLM.from_pretrained(folder)` builds a model from such a folder, and inference engines
# read the same files. PyTorch can convert its own checkpoints into a file for `torch.load`:

# %%
plain_file = fresh("plain") / "step-2.pt"
dcp_to_torch_save(saved, plain_file)
print(*torch.load(plain_file), "by torch.load")
FOLDER.cleanup()

# %% [markdown]
# ## Why, and why not
#
# | way to save | advantage | price |
# |---|---|---|
# | every rank saves all tensors | one line of code | each byte is written N times; an incomplete file loses all |
# | rank 0 saves all tensors | one file | rank 0 must hold the whole model and state; the others wait |
# | rank 0's host gathers all tensors | one file; no GPU holds all | the host must hold the whole; the others wait |
# | sharded, with an index | ranks write side by side; any layout loads it | a folder with an index |
#
# **Why not** always save shards with an index? On one device, or if the whole model fits on a rank beside its share,
# `torch.save` on rank 0 is enough: write a draft, flush it, and rename it. You also have to decide how many checkpoints
# to keep. Keep at least two: the newest, and an older one to go back to if the loss goes wrong. Object stores have no
# rename. There, write the index last; a folder without an index is not a checkpoint.
#
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Why is the folder renamed only at the end, and what must have happened before?</summary>
#
# A rename is atomic, so there is no moment at which half of a checkpoint has the final name. Before the rename, every
# file and the index must be flushed; otherwise the name may reach the disk before the contents of the files.
# </details>
#
# <details><summary>Four ranks have saved a checkpoint, and three ranks load it. Which rank gathers the whole
# model?</summary>
#
# No rank does. Each rank reads from each file only the parts that belong to its own blocks. The index says where they
# are.
# </details>
#
# <details><summary>Why are moments stored by the name of their parameter?</summary>
#
# The number of a parameter depends on the order in which the optimizer gets the parameters. In another order, a
# parameter could get the moments of another parameter of the same shape, and nothing would fail.
# </details>
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | bytes written per parameter, by `torch.save` on 4 ranks | 48 | – | 48 |
# | bytes written per parameter, sharded | 12 | 12 | not measured here |
# | loss after loading in another layout | the same loss | within 1e-4 | within 1e-4 |
#
# ## Beat it: the cheapest save that survives (30 minutes)
#
# In this challenge four ranks save a state of 48 kB eight times, as fast as they can. Some tensors are on several
# ranks, some are frozen, and some do not change between two saves.
#
# ![One save of four ranks, as the cells below do it. Each rank writes its file and flushes it. At a meeting all ranks
# wait for the slowest. Then rank 0 writes the index, flushes it, renames it and flushes the names, while the others
# wait.](../images/cheap_save.svg)
#
# - *Time*: a rank writes W = 8 MB/s, a flush takes α = 0.5 ms, and at `disk.meet()` all ranks wait for the slowest.
# - *Safety*: the power may fail at any call, as in exercise 2. Between two meetings the calls of different ranks have
#   no order. The file `index` names the file of each piece: `{("tensor 0", 0): "some file", …}` for the rows of this
#   tensor from row 0 on. These files must always hold the previous state or the new one, and after the save the new
#   one.
# - *Room*: the disk has room for 2.25 states.
#
# **The bound.** Let M be the bytes that have changed since the last save, with W and α as above.
#
# time ≥ M/(4W) + 2α
#
# No save can beat this: four ranks have to write M bytes and flush them, and only then may they flush the new name.
#
# The score is 100 × bound / time, as the mean over five states. The cells below, in which the first rank that holds a
# tensor writes it, score 41.7. `beat.cheap_save.measured(fn, name)` returns the seconds of the eight saves of one
# state. Add tries of your own to the picture; the other states are "halves", "shards", "adapters" and "experts".


# %%
def written_by(writer, disk, step, mine):
    """Write each tensor on its writer; then rank 0 writes the index. Remove the old files."""
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


bound = beat.cheap_save.bound(beat.cheap_save.cases["copies"])
bars = {"the bound": bound, "by the first": beat.cheap_save.measured(by_the_first, "copies")}
draw.chart(bars, "s", caption="eight saves of a state that all ranks hold")


# %%
def saved_cheaply(disk, step, mine, tensors, memo):
    """Save step 0, 1, … 7 of a state. Afterwards this state survives a power cut, and until
    then the last one does.

    mine: this rank's tensors by name, with rows of 128 bytes; later steps change them in place,
        each as a whole or not at all
    tensors: {name: (rows, the ranks that hold the tensor)} for all tensors
    memo: this rank's dictionary, the same one in each step; empty at first
    disk.write: disk.write(file, {(name, first row): rows of this tensor, …}), or names of files
    for the index; each entry takes 16 bytes more
    disk.flush, disk.rename, disk.flush_names, disk.remove: as in exercise 2
    disk.meet: disk.meet(x) returns the x of each rank, by rank
    disk.room: the bytes of the disk
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
# The course's answer assigns each tensor, the largest first, to the rank with the fewest bytes to write, and always
# writes all tensors.
#
# <details><summary>Where can time be saved?</summary>
#
# Do not write unchanged tensors again: an index may name files of earlier saves, as long as they exist. Cut tensors
# into pieces. And the index need not be flushed last. But old files also hold tensors that are no longer needed, and
# the disk is small.
# </details>
#
# **Read on**: [labs/checkpoint/saving.py](../labs/checkpoint/saving.py), then
# [labs/checkpoint/loading.py](../labs/checkpoint/loading.py); and
# [labs/checkpoint/exporting.py](../labs/checkpoint/exporting.py), for other libraries. Pillai et al., 2014, *All File
# Systems Are Not Created Equal* (OSDI), describe what happens to programs that forget to flush.
#
# **Next.** The checkpoint is complete on the disk. But does it hold everything that a training needs? [08b
# Resume](08b_resume.ipynb) resumes a training with the same numbers to the last bit, computes how often to save, and
# saves while training goes on.
#
# To get a clean copy of this notebook, run `git restore notebooks/08_checkpoint.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
