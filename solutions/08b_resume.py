# %% [markdown]
# # Resume: as if nothing had happened
#
# *A training was killed, and goes on from its last checkpoint. There is no error, and the loss falls as before. Is it
# still the same training?*
#
# **Minutes**, by estimate: 25 without exercises, 45 with them, 10 more for optional parts.
# Running all cells takes half a minute and 2 GB of memory. You need: [Checkpoints](08_checkpoint.ipynb), which explains
# `save` and `load`.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("08b")

# %%
import dataclasses
import math
import os
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

# %%
from labs.checkpoint import Held, Saver, load, newest, random_state, save, set_random_state
from labs.data import Batches, corpus
from labs.fsdp import fully_shard
from labs.kit import check, draw
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.model import GPT, PRESETS

# %% [markdown]
# ## Question
#
# To **resume** a training is to go on from a checkpoint. Llama 3's training had to resume after each of its
# interruptions (Llama Team, 2024, arXiv 2407.21783, section 3.3.4):

# %%
failures, days, gpus = 419, 54, 16_384
between = days * 24 * 3600 / failures  # seconds between two failures of the job
print(f"resumed {failures / days:.1f} times a day, every {between / 3600:.1f} h")

# %% [markdown]
# Each time, some part of the training's state may be forgotten, because it was not saved or not loaded. Then a
# different training goes on, without an error. And each time, the steps since the last checkpoint are lost, and have to
# be taken again.
#
# ## Picture
#
# ![Above, a training of ten steps without interruption. Below, the same training is saved after four steps, and killed
# in its seventh. A new process loads the checkpoint, and goes on with the fifth step. The checkpoint holds five things:
# weights, moments, schedule, place and random numbers.](../images/resume.svg)
#
# The resumed training is right if it ends with the same numbers as the training without interruption, to the last bit.
#
# ## Predict
#
# Predict two numbers, which are computed below. A training is saved after every step. Rank 1 is killed in the fourth
# step, before this step is saved. After the restart rank 0 is killed in the sixth step. How many steps are taken twice?
#
# In Llama 3's training, suppose that a save takes a minute, and that training waits for it. After how many minutes of
# training should it save?

# %%
guess_twice = 2  # your number
guess_minutes = 20  # your number

# %% [markdown]
# ## Build: the five things to save
#
# The state of a training is more than its weights. Ours uses a little **dropout**: in every forward, a tenth of the
# embedding's outputs, chosen at random, are set to zero. So five things change from step to step: the **weights**; the
# **optimizer**'s moments; the **schedule** of the learning rate, which grows for ten steps here; the **place** in the
# data; and the state of the **random** number generator, which differs on each rank.

# %%
CONFIG = dataclasses.replace(PRESETS["tiny"], depth=2)
SAVED, STEPS, WARM_UP = 10, 22, 10
TEXT = corpus()
FOLDER = tempfile.TemporaryDirectory()


def fresh(name):
    """Return a new folder, so that a cell may be run twice."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER.name))


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


# %%
def whole_training(seed, layout=by_parameter):
    """Build everything that changes from step to step, on this rank."""
    torch.manual_seed(seed + dist.get_rank())
    model = GPT(CONFIG, seed=seed)
    model.embed.register_forward_hook(lambda module, args, x: F.dropout(x, 0.1))
    held, optimizer = layout(model)
    schedule = LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    return model, held, optimizer, schedule


# %%
def take_steps(model, optimizer, schedule, steps):
    """Take steps, and return the mean losses over all ranks."""
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
# Besides the tensors that a rank holds, `save` takes two arguments: `values`, which must be the same on all ranks, and
# `own`, which may differ on each rank. `load` returns both. The next cell resumes a training, and can forget one of the
# five things. Note the learning rate: a schedule's `load_state_dict` does not set it in the optimizer.


# %%
@torch.no_grad()
def resumed(where, model, held, optimizer, schedule, forgotten=""):
    """Load a checkpoint, without the forgotten thing. Return the step at which the training
    goes on."""
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
# The next cells train for ten steps and save. Then they resume the training six times: once with all five things, and
# five times with one of them forgotten.

# %%
THINGS = ["weights", "optimizer", "schedule", "place", "random"]


def six_times(place):
    model, held, optimizer, schedule = whole_training(seed=0)
    begin = take_steps(model, optimizer, schedule, range(SAVED))
    values, own = schedule.state_dict(), random_state()
    where = save(place, SAVED, held, values=values, own=own)
    on = take_steps(model, optimizer, schedule, range(SAVED, STEPS))
    curves = {"undisturbed": begin + on}
    for forgotten in ["", *THINGS]:
        model, held, optimizer, schedule = training = whole_training(seed=7)
        at = resumed(where, *training, forgotten)
        on = take_steps(model, optimizer, schedule, range(at, at + STEPS - SAVED))
        curves[forgotten] = begin + on
    return curves


# %%
curves = run(six_times, fresh("six"), ranks=2, device="cpu", tell="seven trainings")[0]
assert curves[""] == curves["undisturbed"]
print(f"resumed with everything: {len(curves[''])} losses, all the same numbers")

# %% [markdown]
# The losses are equal to the last bit. Now look at the five other curves, in a random order. Can you tell from the
# curve alone which of the five things was forgotten? A hint: the bumps of a curve come from its batches.

# %%
ORDER = random.Random(8).sample(range(5), 5)
lettered = {letter: curves[THINGS[n]] for letter, n in zip("ABCDE", ORDER, strict=True)}


def beside(letters):
    """Draw the undisturbed curve, and these."""
    some = {letter: lettered[letter] for letter in letters}
    return draw.curves({"undisturbed": curves["undisturbed"], **some})


beside("ABC")

# %%
beside("DE")

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
    "optimizer": "AdamW does not know how large gradients are: a jump, until it has learned.",
    "schedule": "The rate grows from nothing again: for a while the curve falls more slowly.",
    "place": "Its bumps are those of the first batches, which it has seen before.",
    "random": "Other outputs were set to zero. The curve is as good, but it is not the same.",
}
guesses = [guess_A, guess_B, guess_C, guess_D, guess_E]
for letter, guess, n in zip("ABCDE", guesses, ORDER, strict=True):
    why = f"{THINGS[n]}. {WHY[THINGS[n]]}"
    print(check.predict(f"{letter}: what was forgotten?", guess, n, tolerance=0, reason=why))

# %% [markdown]
# Without the undisturbed curve for comparison, you would hardly have suspected that something was forgotten in some of
# these curves. So a curve does not tell you whether a training resumes exactly. Compare its numbers with those of a
# training that was not interrupted.
#
# > **What went wrong in the wild.** *Symptom*: none. A model of 120 billion parameters was resumed on 256 ranks.
# > *Cause*: the router of the experts draws from its own random number generator. The program declared the state of
# > this generator equal on ranks where it differs, so one rank's state was saved for all of them. After the resume, 252
# > of the 256 ranks went on with another rank's state
# > ([Megatron-LM#6858](https://github.com/NVIDIA/Megatron-LM/pull/6858), August 2026). The argument `own` of our `save`
# > avoids this.
#
# ### Exercise 1: remember, and resume (10 minutes)
#
# Now do it without the course's functions: `remember` returns a dictionary with everything that one rank needs to go
# on. The check pickles the dictionary, unpickles it, and passes it to `resume`, with a training that was just built.
# This training's optimizer is an AdamW, too, but it gets the parameters in another order. Some parameters may be
# frozen, the model has buffers, and perhaps no step has been taken yet. Between the two calls, the first training goes
# on and changes its tensors. The ranks do not average gradients: each rank trains a model of its own.


# %%
def remember(model, optimizer, schedule, loader):
    """Return a dictionary of copies of everything that a training needs to go on from here, on
    this rank.

    optimizer.state[p]: the optimizer's state of a parameter, a dictionary of tensors
    loader.step: the number of batches that were read; you may set it

    Dropout draws from PyTorch's default generator.
    """
    ### BEGIN SOLUTION
    names = {p: name for name, p in model.named_parameters()}
    moments = {}
    for p, kept in optimizer.state.items():
        moments[names[p]] = {key: x.clone() for key, x in kept.items()}
    return {
        "model": {name: x.clone() for name, x in model.state_dict().items()},
        "moments": moments,
        "rate": optimizer.param_groups[0]["lr"],
        "schedule": schedule.state_dict(),
        "step": loader.step,
        "random": torch.get_rng_state(),
    }
    ### END SOLUTION


# %%
def resume(state, model, optimizer, schedule, loader):
    """Let a training that was just built, from another seed, go on with the remembered state.

    state: the dictionary that `remember` returned

    The optimizer may have the parameters in another order; optimizer.state_dict() uses their
    numbers.
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
# ### Exercise 2, optional: the place in the data (10 minutes)
#
# On another number of ranks the random numbers cannot be the same. But the ranks can read the same data in the same
# order, if the remembered place does not depend on the number of ranks. So remember how many **windows**, pieces of
# text, all ranks *together* have read.


# %%
def next_windows(order, batch, read, rank, ranks):
    """Return the numbers of the windows that this rank reads in the next step, after a restart.

    order: order(epoch) returns the windows of an epoch, a list, in the order in which they are
        read; each epoch has another order, but as many windows
    batch: the windows per step of all ranks together, a multiple of ranks; the batch is cut
        into equal consecutive parts, and rank r reads part r
    read: the number of windows that all ranks together have read so far, a multiple of batch;
        windows at the end of an epoch that do not fill a batch are left out, and not counted
    rank, ranks: this rank's number, and the number of ranks
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
# The next cells put this together: a training that looks for the newest checkpoint when it begins, and saves after
# every step. `run(..., restarts=3)` starts all ranks again after one has failed, up to three times. On a cluster
# torchrun does the same, with `--max-restarts 3`, as long as the node itself works. When a node is lost, Slurm or
# Kubernetes has to start the job again on another node. `run` and torchrun both set `TORCHELASTIC_RESTART_COUNT` to the
# number of restarts so far.


# %%
def survivor(place, steps, deaths=()):
    """Train for these steps, and return all of this rank's numbers.

    deaths: list of (attempt, rank, step) at which a rank is killed
    """
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, held, optimizer, schedule = training = whole_training(seed=0)
    where = newest(place)
    for step in range(resumed(where, *training) if where else 0, steps):
        take_steps(model, optimizer, schedule, [step])
        if (attempt, dist.get_rank(), step) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        save(place, step + 1, held, values=schedule.state_dict(), own=random_state())
    return {key: x for key, part in held.parts().items() for x in part.blocks.values()}


# %%
two = partial(run, survivor, steps=8, ranks=2, device="cpu")
undisturbed = two(fresh("undisturbed"))
killed = two(fresh("killed"), deaths=[(0, 1, 3), (1, 0, 5)], restarts=3)
for mine, theirs in zip(undisturbed, killed, strict=True):
    assert all(torch.equal(x, theirs[key]) for key, x in mine.items())
why = "Each of the two that were not saved yet."
print(check.predict("Steps that were taken twice?", guess_twice, 2, reason=why))

# %% [markdown]
# At the end, both ranks have the same weights and moments, bit for bit, as in the training in which no rank was killed.
#
# ## Measure: how often?
#
# If you save often, training often waits. If you save seldom, a failure loses much work: on average half of the time
# between two saves. Let δ be the seconds that a save takes, T the seconds of training between two saves, and M the
# seconds between two failures of the job, its *mean time between failures*. Then a share δ/T of the time is lost by
# waiting, and a share T/(2M) by work that is done again. A restart takes time as well, but this time does not depend on
# T. The next chart shows Llama 3's training, if a save takes a minute:

# %%
SAVE = 60  # seconds
shares = {}
for minutes in (5, 10, 20, 40, 80, 120):
    every = 60 * minutes
    waiting, again = 100 * SAVE / every, 100 * every / 2 / between
    shares[f"every {minutes} minutes"] = {"communication": waiting, "waiting": again}
lost, words = "of the time is lost", {"communication": "saving", "waiting": "work done again"}
draw.chart(shares, "%", caption=lost, words=words)

# %% [markdown]
# As T grows, the first share falls and the second rises. Their sum is smallest where its slope is zero, δ/T² = 1/(2M)
# (J. W. Young, 1974):
#
# $$T = \sqrt{2 \delta M}$$
#
# ### Exercise 3: the interval (10 minutes)
#
# The function needs only one line. But consider which failures interrupt the job: those of one machine, or those of all
# machines?


# %%
def interval(save, machine, machines):
    """Return the seconds of training between two saves, by Young's formula.

    save: the seconds that training waits in a save; 0 if it does not wait
    machine: the mean seconds between failures of one machine
    machines: the number of machines of the job
    """
    ### BEGIN SOLUTION
    return math.sqrt(2 * save * machine / machines)
    ### END SOLUTION


answer = check.interval(interval)
answer

# %%
best = interval if answer.ok else check.interval.expected
minutes = round(best(SAVE, between * gpus, gpus) / 60, 1)
ask = "Minutes between two saves, if each takes one?"
print(check.predict(ask, guess_minutes, minutes, tolerance=0.3))
rows = []
for seconds in (1, 10, 60, 600):
    every = best(seconds, between * gpus, gpus)
    share = 100 * (seconds / every + every / (2 * between))
    row = {"a save takes": f"{seconds} s", "best interval, minutes": round(every / 60, 1)}
    rows.append(row | {"lost, %": round(share, 1), "T / M": round(every / between, 2)})
draw.table(rows)

# %% [markdown]
# The formula assumes at most one failure between two saves, so it holds as long as T is much shorter than M. In the
# last row T is a third of M, so this row is only a rough guess. The loss depends on how long training *waits* in a
# save. If it waits a tenth as long, less than a third as much time is lost.
#
# ## Build: save while training goes on
#
# Training need not wait until a save has written all bytes. It only has to wait for a *copy* of its tensors, since the
# next step changes them. While training goes on, a thread can write the copy to the disk. This is an **asynchronous**
# save:
#
# ![Above, a save: training takes step 3, and waits while all bytes are written. Below, an asynchronous save: training
# makes a copy after step 3 and goes on with steps 4 to 7, while a thread writes the copy.](../images/async_save.svg)
#
# The price of an asynchronous save is the memory of the copy. And the next save waits until the thread has finished, so
# the time between two saves cannot be shorter than a write.


# %%
def waits(place):
    """Return the seconds that training waits in a save of 32 MB, and in an asynchronous one."""
    torch.manual_seed(0)
    model, seconds = torch.nn.Linear(1000, 8000, bias=False), {}
    held = Held(fully_shard(model, mesh=Mesh((dist.get_world_size(),), ("dp",))))
    with Saver(place) as saver:
        calls = {"save": partial(save, place), "Saver.save": saver.save}
        saver.save(0, held)  # which makes room for copies
        saver.wait()
        for step, (name, call) in enumerate(calls.items(), 1):
            begin = time.perf_counter()
            call(step, held)
            seconds[name] = time.perf_counter() - begin
    return seconds


# %%
for name, seconds in run(waits, fresh("waits"), ranks=2, device="cpu")[0].items():
    print(f"{name}: training waits for {1000 * seconds:.0f} ms")

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a checkpoint of step 1 contains numbers of step 2. *Cause*: PyTorch's
# > `async_save` moved tensors "to the CPU" before its thread wrote them, and this did not copy a tensor that was on the
# > CPU already. So the thread wrote the training's own tensor, which the optimizer was changing
# > ([pytorch#144657](https://github.com/pytorch/pytorch/issues/144657), January 2025; fixed since).
#
# ## Native
#
# PyTorch's `torch.distributed.checkpoint`, DCP, takes all five things in one dictionary. DCP assumes that a plain
# tensor under one key is the same on all ranks: it stores one rank's tensor, and all ranks load it. So a tensor that
# differs on each rank needs a key for each rank. And the thread of an asynchronous save sends messages to the other
# ranks. It needs a process group of its own, or its messages get mixed up with those of training.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard


def torchs(model):
    """Shard the model with PyTorch's FSDP, in place of by_parameter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model.layers.values(), model]:
        torchs_fully_shard(part, mesh=mesh)
    return None, adamw(model.parameters())


# %%
def all_five(model, optimizer, schedule, step):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {
        "model": of_model,
        "optimizer": of_optimizer,
        "schedule": schedule.state_dict(),
        "step": step,
        f"random-{dist.get_rank()}": torch.get_rng_state(),
    }


def put_back(found, model, optimizer, schedule):
    parts = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(model, optimizer, **parts)
    schedule.load_state_dict(found["schedule"])
    torch.set_rng_state(found[f"random-{dist.get_rank()}"])


# %%
def saved_meanwhile(place):
    """Return the losses of the steps after an asynchronous save, which do not wait for it."""
    model, _, *rest = whole_training(seed=0, layout=torchs)
    take_steps(model, *rest, range(3))
    now, group = all_five(model, *rest, 3), dist.new_group(backend="gloo")
    saving = dcp.async_save(now, checkpoint_id=place, process_group=group)
    losses = take_steps(model, *rest, range(3, 8))
    saving.result()
    return losses


# %%
def taken_up(place):
    """Return the losses of the same steps, after loading."""
    model, _, *rest = whole_training(seed=7, layout=torchs)
    found = all_five(model, *rest, 0)
    dcp.load(found, checkpoint_id=place)
    put_back(found, model, *rest)
    return take_steps(model, *rest, range(found["step"], 8))


place = fresh("dcp") / "step-3"
undisturbed = run(saved_meanwhile, place, ranks=2, device="cpu")[0]
assert run(taken_up, place, ranks=2, device="cpu")[0] == undisturbed
print(f"PyTorch's: {len(undisturbed)} losses, all the same numbers")

# %% [markdown]
# PyTorch's resume is exact as well. If you forget the rank's number in the key `random-…`, DCP gives no error:


# %%
def one_key(place):
    saved = {"random": torch.full((1,), dist.get_rank())}
    dcp.save(saved, checkpoint_id=place)
    dcp.load(saved, checkpoint_id=place)
    return saved["random"].item()


numbers = run(one_key, fresh("one") / "step-1", ranks=2, device="cpu")
print(f"of two ranks' numbers, {len({*numbers})} is left")
FOLDER.cleanup()

# %% [markdown]
# The course's `save` refuses this with an error: `… differs on ranks 0 and 1`.

# %% [markdown]
# ### Outside Jupyter
#
# The ordinary script [scripts/checkpoint.py](../scripts/checkpoint.py) survives when a process is killed; only the data
# and the model are the course's. In the root of the repository, run
#
#     export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
#     torchrun --standalone --nproc-per-node 4 --max-restarts 3 scripts/checkpoint.py --kill-at 5
#
# or kill one of its processes yourself. The script resumes from the newest checkpoint in the folder `checkpoints`, so
# remove this folder to begin anew. On the same number of ranks the resumed training is the same training. On more ranks
# it resumes with the same parameters, but the additional ranks draw new random numbers.
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
#     found, place = state(), options.folder / f"step-{first}"
#     random, saved = f"generator-{rank}", dcp.FileSystemReader(place).read_metadata().state_dict_metadata
#     if random not in saved:  # fewer ranks have saved: this one begins with new numbers
#         del found[random]
#     dcp.load(found, checkpoint_id=place)
#     set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
#     generator.set_rng_state(found.get(random, generator.get_rng_state()))
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
# | method | advantage | price |
# |---|---|---|
# | save and load all five things | the same training | a test that compares the numbers once |
# | save every √(2δM) seconds | the least time lost | you have to know δ and M |
# | save asynchronously | training waits only for a copy | the memory of the copy |
#
# **Why not** always resume exactly? On another number of ranks this is impossible: each rank has its own random
# numbers, and sums are rounded in another order. But the ranks can still read the same data in the same order.
#
# **Why not** simply save more often? Even a copy takes time. And if thousands of ranks write to a network disk at once,
# the disk becomes the slowest part of the job.
#
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Which part of a training's state differs on each rank, so that every rank must save its
# own?</summary>
#
# The state of the random number generator differs on each rank. The place in the data is one number for all ranks, if
# it counts the windows that all ranks together have read.
# </details>
#
# <details><summary>The loss of a resumed training falls as before. What does this prove?</summary>
#
# It proves little: the curve looks as good with other random numbers, or with data that were read before. Compare the
# numbers with those of a training that was not interrupted.
# </details>
#
# <details><summary>A job gets twice as many machines, and a save takes as long as before. How often should it
# save?</summary>
#
# The job fails twice as often, so M is half as long, and T = √(2δM) is shorter by a factor of √2.
# </details>
#
# <details><summary>In an asynchronous save, what does training wait for, and why?</summary>
#
# Training waits for a copy of its tensors. The optimizer changes the tensors in the next step, so without a copy the
# thread would write a mixture of two steps.
# </details>
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | resumed with all five | the same numbers | bit for bit | bit for bit |
# | killed twice, and resumed | the same numbers | bit for bit | – |
# | steps taken twice | those that were not saved yet | 2 | – |
# | time between two saves | √(2δM) | – | – |
#
# **Read on**: [labs/checkpoint/randomness.py](../labs/checkpoint/randomness.py), then
# [labs/checkpoint/background.py](../labs/checkpoint/background.py). J. W. Young, 1974, *A first order approximation to
# the optimum checkpoint interval* (Communications of the ACM). Mohan et al., 2021, *CheckFreq* (USENIX FAST), write
# copies while training goes on.
#
# **Next.** A single layer, or the activations of a single sequence, may still be too large for one device. And data
# parallelism can use no more ranks than there are sequences in the batch. [09 Tensor
# parallelism](09_tensor_parallel.ipynb) splits the layers themselves.
#
# To get a clean copy of this notebook, run `git restore notebooks/08b_resume.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
