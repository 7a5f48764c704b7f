# %% [markdown]
# # The bug clinic: symptom first
#
# *A loss is a little off, a job stands still, memory grows. Somebody wrote the code, and it looks right. Which
# measurement tells you in minutes what is wrong?*
#
# **Minutes**, by estimate: 25 without exercises, 60 with them, 55 more for optional parts, 25 more for the challenge.
# Running all cells takes a minute and 2 GB of memory. You need: the notebooks up to [Three
# dimensions](11_three_dimensions.ipynb).
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("16")

# %%
import inspect
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.kit import beat, check, draw
from labs.kit.dry import would_hang

CASES = {fn.case.number: fn for fn in vars(check).values() if hasattr(fn, "case")}


def shipped(visit, *others):
    """Show the function as it was shipped, with what it uses, and the bill of readings."""
    print(*map(inspect.getsource, (visit.case.faulty, *others)), sep="\n")
    return draw.table([visit.bill()])


# %% [markdown]
# ## Question
#
# The twelve functions of this notebook come from projects that many people use: eight compute something wrong, two hang
# or may hang, one holds too much memory, and one is slow. Each is written anew here, small, on four ranks. You get what
# a user could see of it: a curve, a log, a ledger, a report. How few measurements do you need to name the cause?
#
# ## Picture
#
# A case shows its symptom. You write down what you suspect, and choose instruments. Only then comes the function as it
# was shipped, with its history. You mend it, and say what would have caught it before the run.
#
# | instrument | what it compares |
# |---|---|
# | `numbers` | each rank's values with those of one process in float64, which is never interrupted |
# | `gradients` | how often each micro-batch counts in a gradient with how often it should |
# | `sent` | the bytes that a rank sends with the right program's; up to 64 bytes of difference count as none |
# | `held` | the most bytes that a rank adds with the right program's |
# | `time` | how many calls a rank computes beside, with the right program's number; no clock is read |
# | `verdict` | the order of all ranks' calls with NCCL's rules |
# | `dry` | `sent`, `held` and `verdict` of a dry run, which sends nothing and computes no number |
#
# At work there is no right program yet: a formula, or the same step on one rank, takes its place.
#
# The cases have six kinds of symptoms: (a) the loss is nearly right, (b) it is right on one rank or with one
# micro-batch only, (c) the job hangs, or would hang on NCCL, (d) memory grows, (e) it is slow, (f) the resumed run is
# another training.
#
# ### Exercise 1: the same batch, another model (6 minutes)
#
# A user trains with micro-batches of one sequence, and accumulates 32 of them. The model is worse than with 32
# sequences at once. If all sequences are cut to one length, both agree. Here each of four ranks accumulates two
# sequences. The upper panel shows the mean loss per token before each step. Its curves lie on each other, and that is
# the point: only the lower panel shows a difference.

# %%
visit = CASES[1].visit()
draw.apart({name: losses.tolist() for name, losses in visit.both("losses").items()})

# %%
suspect = "some tokens count more than others"  # your line: what may be wrong, in a few words
chosen = ["gradients"]  # your line: a list of the instruments that you read
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Have you named the cause? Then unfold what it was.</summary>
#
# Each micro-batch's loss is the mean over its own tokens, and these means are averaged, over micro-batches and over
# ranks. So a token in a short micro-batch counts more ([trl#2175](https://github.com/huggingface/trl/issues/2175),
# closed, October 2024). Transformers changed its trainer in [PR
# 34191](https://github.com/huggingface/transformers/pull/34191) (merged, October 2024). Eight micro-batches have 87
# tokens here, 10.88 in the mean. Each factor is 10.88 divided by the micro-batch's own tokens:
# </details>

# %%
tokens, factors = CASES[1].tokens(visit.jobs.seed), visit.factors().flatten().tolist()
bars = {f"tokens: {n}": round(each, 2) for n, each in sorted(zip(tokens, factors, strict=True))}
draw.chart(bars, "×", caption="How often each micro-batch counts; once would be right")

# %% [markdown]
# Another batch has two micro-batches, of 2 and of 18 tokens. Each should count once.

# %%
guess = 5  # your number
check.predict("How often does the micro-batch of 2 tokens count?", guess, (2 + 18) / 2 / 2)

# %% [markdown]
# Mend it. `model(x)` returns the logits; a target of -100 is padding and does not count.


# %% tags=["exercise"]
def backward(model, micro_batches):
    """Leave in .grad, on all ranks, the gradient of the whole batch's mean loss per token.

    micro_batches: this rank's pairs (x, y) of tokens and targets
    """
    ### BEGIN SOLUTION
    count = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(count)
    for x, y in micro_batches:
        total = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
        (total / count).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    ### END SOLUTION


check.token_mean(backward)

# %% [markdown]
# <details><summary>What would have caught it before the run? Say it, then unfold.</summary>
#
# Compare one step with one process's, with micro-batches of *unequal* lengths: equal lengths hide the bug. The right
# program sends one number more in each step, which is within the 64 bytes that count as none here.
# </details>
#
# ### Exercise 2: right with one micro-batch (6 minutes)
#
# A sharded training is right as long as a step has one micro-batch. This log has the norm of the gradient, which is its
# length as a vector, for one, two and three micro-batches. We know of no user's report.

# %%
visit = CASES[2].visit()
draw.table(CASES[2].norms(visit.case.faulty))

# %%
suspect = "the first micro-batches get lost"  # your line
chosen = ["gradients", "sent"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit, CASES[2].Engine)

# %% [markdown]
# The training loop calls the engine like this:
#
# ```python
# for k, (x, y) in enumerate(micro_batches):
#     with no_sync(engine) if k < len(micro_batches) - 1 else nullcontext():
#         loss(model(x), y).backward()
# ```
#
# <details><summary>Unfold what it was.</summary>
#
# In Megatron-LM's second FSDP, the engine's adapter inherited a `no_sync` that does nothing ([PR
# 7186](https://github.com/NVIDIA/Megatron-LM/pull/7186), merged, September 2026). So every backward was the step's
# last. `gradients` says what is lost, and `sent` says why: each backward sends its sum at once, which is three times
# the bytes, and the next one clears the buffer.
# </details>
#
# Mend the context manager.


# %% tags=["exercise"]
@contextmanager
def no_sync(engine):
    """Make every backward inside of this context one that is not the step's last."""
    ### BEGIN SOLUTION
    before, engine.last = engine.last, False
    try:
        yield
    finally:
        engine.last = before
    ### END SOLUTION


check.inherited_no_sync(no_sync)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# A step of four micro-batches of one sequence must have the gradient of a step of one micro-batch of four sequences,
# and must send the same bytes. A dry run counts the bytes in seconds.
# </details>
#
# ### Exercise 3: silence (5 minutes)
#
# A training stands still where it computes the length of all gradients. Here the job is cut after two seconds, and the
# launcher says where each rank is.

# %%
visit = CASES[3].visit()
visit.hang_report()

# %%
suspect = "rank 2 leaves before the all-reduce"  # your line
chosen = ["dry"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# All layers of rank 2 are frozen, so it has no gradients, and it returns before the others meet. AReaL had this bug
# ([PR 1139](https://github.com/areal-project/AReaL/pull/1139), merged, April 2026). `dry` needs no hang: it runs each
# rank by itself, and compares the calls.
# </details>
#
# Mend the function.


# %% tags=["exercise"]
def gradient_norm(gradients):
    """Return the length of all ranks' gradients as one vector, in float64 and without dims.

    gradients: this rank's gradients, a list that may be empty
    """
    ### BEGIN SOLUTION
    squares = torch.zeros((), dtype=torch.float64)
    for g in gradients:
        squares += g.double().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()
    ### END SOLUTION


check.early_return(gradient_norm)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# A dry run of all ranks, one of them without a gradient. A test whose ranks are all alike never takes this branch.
# </details>
#
# ### Exercise 4: memory that stays (6 minutes)
#
# A user shards a text encoder with PyTorch's FSDP2, and asks to have its parameters freed after each forward. Under
# `no_grad`, memory grows with a forward all the same, and a `reshard()` by hand lowers it. Here four encoders run, then
# a block and the root of a model that is trained. Each of the six is 1 MiB when gathered.

# %%
visit = CASES[4].visit()
draw.memory(visit.jobs.memory.recording, step=0, ranks=[0])

# %%
suspect = "the encoders stay gathered"  # your line
chosen = ["held"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# Each encoder is sharded by itself, so it is the *root* of its own model. A root stayed gathered, since its backward
# usually comes next. A frozen encoder has none: at the peak, four are held that nobody needs. The symptom is from
# [#149029](https://github.com/pytorch/pytorch/issues/149029) (closed, March 2025), the cause from [PR
# 154704](https://github.com/pytorch/pytorch/pull/154704) (closed, May 2025). In torch 2.13 a root is freed with
# `reshard_after_forward=True`, as that PR has it, and by default it stays.
# </details>

# %%
both = (visit, CASES[4].visit(visit.case.right))
recordings = [each.jobs.memory.recording for each in both]
draw.memory(*recordings, step=0, ranks=[0], names=("as shipped", "right"))

# %% [markdown]
# Mend the function: a root whose backward comes next may stay, and nothing else. This mend is the course's, and not
# that of the PR.


# %% tags=["exercise"]
def after_forward(unit):
    """Free the unit's gathered parameters, unless it is a root whose backward comes next.

    unit: has is_root and free(); the function is called after each forward, and for encoders
        under no_grad
    """
    ### BEGIN SOLUTION
    backward_comes = unit.is_root and torch.is_grad_enabled()
    if not backward_comes:
        unit.free()
    ### END SOLUTION


check.root_stays(after_forward)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# The peak of a dry run beside a formula: one frozen encoder is whole at a time.
# </details>
#
# ### Exercise 5: gathers with nothing beside them (6 minutes)
#
# Under the first two stages of ZeRO, each rank updates its shard of the parameters, and then all ranks gather them. All
# numbers are right; a user asks how to overlap the gathers. At work you would open a trace of `torch.profiler` in
# [Perfetto](https://ui.perfetto.dev). To do so, write `trace` to a file. A few lines read it here, too.

# %%
visit = CASES[5].visit()
trace = CASES[5].traced(visit.case.faulty)
print(*CASES[5].in_order(trace), sep="\n")

# %%
suspect = "no gather begins before the last update"  # your line
chosen = ["time"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# A bucket's gather can be in flight while the next bucket is updated; only the last one has no update beside it. The
# question is DeepSpeed's [#6876](https://github.com/deepspeedai/DeepSpeed/issues/6876) (closed, December 2024).
# ColossalAI ([PR 5898](https://github.com/hpcaitech/ColossalAI/pull/5898), merged, July 2024) and apex ([PR
# 1621](https://github.com/NVIDIA/apex/pull/1621), merged, March 2023) shipped late gathers, and then the overlap.
# </details>
#
# Mend the function.


# %% tags=["exercise"]
def update_and_gather(buckets):
    """Update every bucket, and leave all of them gathered.

    buckets: each has update(), for this rank's shard, and gather(), which starts to gather the
        whole bucket and returns a work; work.wait() ends it
    """
    ### BEGIN SOLUTION
    started = []
    for bucket in buckets:
        bucket.update()
        started.append(bucket.gather())
    for work in started:
        work.wait()
    ### END SOLUTION


check.late_gather(update_and_gather)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# The order of the calls in the trace of one step. A clock would say nothing here: four ranks share your cores.
# </details>
#
# ### Exercise 6: another loss after the restart (5 minutes)
#
# A run is saved, stopped and resumed. A restart in the first epoch is harmless. After a restart in the second epoch,
# its losses are different from those of a run that was not interrupted.

# %%
visit = CASES[6].visit()
names = ("uninterrupted", "resumed")
losses = [each.tolist() for each in visit.both("losses").values()]
curves = dict(zip(names, losses, strict=True))
draw.curves(curves, moments={"second epoch": 6, "restart": 8})

# %%
suspect = "it reads other data"  # your line
chosen = ["numbers"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# The new data loader counts epochs from 0: it skips the right number of batches, in the order of the wrong epoch. A
# user of accelerate found it ([#2016](https://github.com/huggingface/accelerate/issues/2016), open, 2023), and [PR
# 4071](https://github.com/huggingface/accelerate/pull/4071) (merged, June 2026) mends it.
# </details>
#
# Mend the function.


# %% tags=["exercise"]
def rest_of_epoch(make, step):
    """Return the batches that are left in the epoch of this step.

    make: make(epoch=2) returns all batches of an epoch, in its order
    step: the number of steps before the restart, counted from the first epoch on
    """
    ### BEGIN SOLUTION
    length = len(make(epoch=0))
    batches = make(epoch=step // length)
    return batches[step % length :]
    ### END SOLUTION


check.first_epoch_again(rest_of_epoch)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# Save, load, and compare the next windows, inside the *second* epoch. No training is needed.
# </details>
#
# ## Measure: which instruments suffice?
#
# For each of the twelve cases, at least one of your instruments must tell. How many instruments do you need?

# %%
guess = 3  # your number
tells = {number: each.case.tells for number, each in CASES.items()}
answer = len(check.token_mean.fewest(tells))
check.predict("How many instruments suffice to notice each of the twelve?", guess, answer)

# %%
instruments, rows = check.token_mean.instruments, []
for number, each in sorted(CASES.items()):
    marks = {name: "tells" if name in tells[number] else "" for name in instruments}
    rows.append({"exercise": number, "symptom": each.case.group} | marks)
draw.table(rows)

# %% [markdown]
# Three instruments suffice, in the order of their cost:
#
# 1. `dry` finds hangs and memory, before anything is trained.
# 2. `numbers` finds most of what is wrong: one step beside one process, or a restart beside a run without one.
# 3. `time`, the order of calls and computation, finds what is slow and right.
#
# Read `gradients` and `sent` to learn *why*.
#
# ## Native: the same instruments at work
#
# [DEBUGGING.md](../DEBUGGING.md) leads from each symptom to its measurement and its case here, and names for each
# instrument the tool that takes its place on a cluster.
#
# ## Why, and why not
#
# **Why** measure before you read the code? The code of a bug looks right: somebody reviewed it. A measurement says
# which half of the program is innocent. **Why not** measure everything? At work a run costs hours of a cluster. So ask
# first which two explanations the next measurement tells apart.
#
# ## Beat it: an unknown bug by the fewest readings (20 minutes)
#
# Thirty programs take one step of training on four ranks, and restart. Each has one bug of twenty kinds, and some
# kinds are planted at two places. You see no code. `visit.read("sent")` returns `"right"`, or a word for the
# difference from the right program; `"no end"` says that the job hangs. There are six instruments: numbers,
# gradients, sent, held, time and verdict. `numbers` names the first wrong value of the first rank that has one:
# tokens, gradient, norm, parameters, resumed or next tokens. These are the kinds:

# %%
draw.table([{"kind": kind, "the bug": text} for kind, text in beat.unknown_bug.cases.items()])

# %% [markdown]
# `measured(fn, seed)` tries a function on one program, drawn by the seed. It shows the kind that the function names,
# the planted one, and the readings. The program is run for real, beside the right one:


# %% tags=["subject"]
def look(visit):
    visit.read("numbers")
    visit.read("gradients")
    return "kept"


beat.unknown_bug.measured(look, seed=1)

# %% [markdown]
# Most words of `gradients` are kinds. Nine words are not, of `numbers` and of `gradients`, and stand for a kind each;
# "right" does so if the gradient is wrong in its digits only:

# %%
STANDS_FOR = {
    "no end": "rank missing",
    "tokens": "data of another",
    "norm": "norm of a shard",
    "parameters": "not updated",
    "resumed": "cast",
    "next tokens": "first epoch again",
    "a mixture": "left out",
    "no mixture": "other seed",
    "right": "narrow",
}

# %% [markdown]
# **The bound.** Your function reads an instrument, and chooses the next one by the value: it is a decision tree. Let P
# be the set of thirty programs, and let d(T, p) be the number of readings after which tree T names the kind of
# program p. Let B be the least of Σₚ d(T, p) / 30 over all trees T whose every answer is right. Then the mean number
# of readings, m, is
#
# > m ≥ B = 2.13.
#
# Nothing can beat it, since a function that is right on all programs of P is one of these trees, and the judge has
# compared all of them on the table of values, program × instrument.
#
# The score is 100 × B / m. One wrong name scores nothing, and its message says what was read. Reading all six
# instruments scores 35.6.


# %% tags=["exercise"]
def diagnose(visit):
    """Return the kind of the bug of an unknown program, by few readings.

    visit: visit.read(instrument) returns a word, and is counted
    """
    ### BEGIN SOLUTION
    wrong = visit.read("numbers")
    if wrong == "right":
        if visit.read("time") != "right":
            return "waits at once"
        if visit.read("held") != "right":
            return "kept"
        return "reduced again" if visit.read("verdict") == "right" else "two orders"
    if wrong == "gradient":
        wrong, sent = visit.read("gradients"), visit.read("sent")
        if wrong == "nothing synchronised" and sent == "more sent":
            return "one rank's gradient everywhere"
    return STANDS_FOR.get(wrong, wrong)
    ### END SOLUTION


beat.unknown_bug(diagnose)

# %% [markdown]
# The course's answer reads in a fixed order: numbers first, and then always two more if the gradient is wrong. Which
# of its readings decide nothing? Each try is kept and drawn: `python -m labs challenges` shows your best.
#
# Here the required part ends. **What follows is optional**: six more cases, and an eighth instrument. Then come three
# questions, and ten across the course.
#
# ## Optional: six more cases
#
# ### Exercise 7: the same curve, and larger gradients (7 minutes)
#
# A user compares the lengths of gradients with and without expert parallelism. The loss curves look the same. Here two
# ranks share two experts, and two other ranks hold copies of both.

# %%
visit = CASES[7].visit()
rows = []
for name, words in {"dense": "a dense weight", "gradient": "an expert's weight"}.items():
    one, other = (float(gradient.norm()) for gradient in visit.both(name).values())
    rows.append({"gradient of": words, "one process": one, "expert parallelism": other})
draw.table(rows)

# %%
suspect = "an expert's gradient is divided by the wrong number"  # your line
chosen = ["gradients"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# An expert has the tokens of all ranks, so its gradient is a sum over the losses of all ranks. It was divided by the
# number of its copies. DeepSpeed's users found it in [#5618](https://github.com/deepspeedai/DeepSpeed/issues/5618)
# (closed, June 2024) and [#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545) (open), and [PR
# 6546](https://github.com/deepspeedai/DeepSpeed/pull/6546) (merged, September 2024) mends it. Adam divides by the size
# of a gradient, so a constant factor hardly shows in the curve: PyTorch's
# [#160285](https://github.com/pytorch/pytorch/issues/160285) (open, August 2025) says so of a factor of two.
# </details>


# %% tags=["exercise"]
def average_by_kind(dense, experts, copies):
    """Make each .grad that of the mean of all ranks' losses.

    dense: parameters that every rank holds
    experts: the parameters of this rank's experts; a .grad is a sum already, over the losses of
        the ranks with which this rank exchanges tokens
    copies: the process group of the ranks that hold copies of these experts
    """
    ### BEGIN SOLUTION
    ranks = dist.get_world_size()
    for group, parameters in ((None, dense), (copies, experts)):
        for p in parameters:
            dist.all_reduce(p.grad, group=group)
            p.grad /= ranks
    ### END SOLUTION


check.expert_scale(average_by_kind)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# One step with and without expert parallelism, on the same tokens: the gradients must be equal.
# </details>
#
# ### Exercise 8: four lengths in one log (6 minutes)
#
# Four stages of a pipeline clip their gradients to a common length, and each rank logs the length before that. The
# table has three steps. No user reported it: a reader of the code asked.

# %%
visit = CASES[8].visit()
rows = []
for rank in range(4):
    lengths = visit.both("norms", rank)[f"rank {rank}"].tolist()
    rows.append({"rank": rank} | {f"step {step}": each for step, each in enumerate(lengths)})
draw.table(rows)

# %%
suspect = "each stage takes the length of its own gradients"  # your line
chosen = ["numbers"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# The model is one, so its gradient is one vector, with one length. Each stage clipped by the length of its own part.
# In torchtitan a reader asked whether it does that ([#596](https://github.com/pytorch/torchtitan/issues/596), closed,
# October 2024). It did, until [PR 649](https://github.com/pytorch/torchtitan/pull/649) (merged in the same month).
# </details>


# %% tags=["exercise"]
def clip_all_stages(gradients, max_norm):
    """Clip all stages' gradients, as one vector, to the length max_norm; return its length.

    gradients: this stage's gradients in float64, which change in place
    """
    ### BEGIN SOLUTION
    total = sum(g.square().sum() for g in gradients)
    dist.all_reduce(total)
    norm = total.sqrt()
    if norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    return norm
    ### END SOLUTION


check.clip_by_stage(clip_all_stages)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# The length must be equal on all ranks, and equal to one process's. One line compares it.
# </details>
#
# ### Exercise 9: four gradients of one weight (7 minutes)
#
# With sequence parallelism, each rank's layer norm reads a piece of the sequence, and all ranks hold copies of its
# weight. A user printed the gradient of this weight on four ranks, before the optimizer's step. The table has its
# first three elements. What should be equal here?

# %%
visit = CASES[9].visit()
rows = []
for rank in range(4):
    first = visit.both("gradient", rank)[f"rank {rank}"][:3].tolist()
    rows.append({"rank": rank} | {f"element {n}": each for n, each in enumerate(first)})
draw.table(rows)

# %%
suspect = "the gradients of the pieces are never added up"  # your line
chosen = ["gradients"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit, CASES[9].engine)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# The hooks are on parameters that the engine replaces, so backward never reaches them. GPT-NeoX registered its hooks
# before `deepspeed.initialize`, and now does so after it ([PR
# 1259](https://github.com/EleutherAI/gpt-neox/pull/1259), merged, August 2024); that the parameters are replaced there
# is our reading. The log is that of a user of Megatron-LM
# ([#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446), closed, March 2025), whose cause we do not know.
# </details>


# %% tags=["exercise"]
def prepare(model, engine, add_up):
    """Call engine(model), and have add_up(p) called after backward for each p of model.norm.

    engine: replaces all parameters of a model by others
    add_up: adds up p.grad over the ranks
    """
    ### BEGIN SOLUTION
    engine(model)
    for _, p in model.norm.named_parameters():
        p.register_post_accumulate_grad_hook(add_up)
    ### END SOLUTION


check.silent_norm(prepare)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# Count the all-reduces of one step in a dry run: one for each parameter of a layer norm, so two for each layer norm.
# </details>
#
# ### Exercise 10: too few independent rows (5 minutes)
#
# A weight of 12 rows and 8 columns is split over four ranks, three rows on each. The two projects that had this bug
# report no symptom. Here is one: gather the weight after its initialisation, and count its independent rows.

# %%
visit = CASES[10].visit()
both = [visit.both("weight", rank) for rank in range(4)]
gathered = {
    "one process": torch.cat([parts["one process"] for parts in both]),
    "four ranks": torch.cat([parts[f"rank {rank}"] for rank, parts in enumerate(both)]),
}
for name, weight in gathered.items():
    independent = int(torch.linalg.matrix_rank(weight))
    print(f"{name}: {independent} of {len(weight)} rows are independent")

# %%
suspect = "all ranks draw the same rows"  # your line
chosen = ["numbers"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# All ranks draw their parts by the same seed, so the parts are equal. More than 8 rows of 8 columns cannot be
# independent, and here only the three of one part are. ms-swift ([PR
# 7944](https://github.com/modelscope/ms-swift/pull/7944), merged, January 2026) and InternLM ([PR
# 405](https://github.com/InternLM/InternLM/pull/405), merged, October 2023) had this bug.
# </details>


# %% tags=["exercise"]
def part_of(rows, columns, seed):
    """Return this rank's rows of the matrix that one process would draw by this seed.

    rows, columns: the size of the whole matrix; rows is divisible by the number of ranks
    """
    ### BEGIN SOLUTION
    draw_by = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=draw_by, dtype=torch.float64)
    mine = rows // dist.get_world_size()
    return matrix[mine * dist.get_rank() :][:mine].clone()
    ### END SOLUTION


check.same_seed(part_of)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# Gather a split weight once, and compare its parts: no two of them may be equal.
# </details>
#
# ### Exercise 11: some wait here, and some there (6 minutes)
#
# On 64 GPUs of a job, 62 ranks waited for a collective of one group, and two ranks for a collective of another. On
# gloo the job here ends, and its numbers are right. The table has the calls in which its ranks would stand on NCCL.

# %%
visit = CASES[11].visit()
draw.table(visit.waits())

# %%
suspect = "the ranks use the two groups in different orders"  # your line
chosen = ["verdict"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# Ranks 0 and 3 begin with one group, ranks 1 and 2 with the other, so they wait for each other in a circle: the next
# cell draws it. The report is [PR 4149](https://github.com/meta-pytorch/torchrec/pull/4149) of TorchRec, which adds a
# benchmark of such orders (closed, April 2026; we do not know whether it landed). It names two conditions of the hang:
# the orders, and a wait for the whole device, which the program does not show. Without such a wait the same orders
# passed there. Our verdict names another second condition: communicators that are made at their first use. The bug is
# the orders; with either condition the job may hang.
# </details>

# %%
would_hang(visit.jobs.order.recording)


# %% tags=["exercise"]
def start(ready, groups):
    """Start the all-reduce of each bucket in its group; return the works.

    ready: pairs (axis, bucket), in the order in which this rank's backward has filled them
    groups: {axis: process group}
    """
    ### BEGIN SOLUTION
    in_one_order = sorted(ready, key=lambda pair: pair[0])
    works = []
    for axis, bucket in in_one_order:
        works.append(dist.all_reduce(bucket, group=groups[axis], async_op=True))
    return works
    ### END SOLUTION


check.two_orders(start)

# %% [markdown]
# One order has a price: a bucket that is filled early waits for its turn, and less of its all-reduce is hidden.
#
# <details><summary>What would have caught it before the run?</summary>
#
# `would_hang` on a recording, or on a dry run, of all ranks. gloo ends in any order.
# </details>
#
# ### Exercise 12: loaded, and not what was saved (5 minutes)
#
# A user loads a checkpoint, and compares it with what was saved. There is no error and no warning.

# %%
visit = CASES[12].visit()
saved, loaded = visit.both("weight").values()
print(f"saved {saved[0]:.6f}, loaded {loaded[0]:.6f}")
print(f"largest difference: {(saved - loaded).abs().max():.6f}")

# %%
suspect = "the values are rounded"  # your line
chosen = ["numbers"]  # your line
visit.look(suspect, chosen)

# %%
shipped(visit)

# %% [markdown]
# <details><summary>Unfold what it was.</summary>
#
# The model was made in bfloat16, which has two to three digits, and `copy_` rounds what it reads to the dtype of the
# tensor that it writes. PyTorch's distributed checkpoint compares shapes, and no dtypes
# ([#187138](https://github.com/pytorch/pytorch/issues/187138), open, June 2026; [PR
# 187257](https://github.com/pytorch/pytorch/pull/187257), open, raises an error instead).
# </details>
#
# Here the optimizer takes its master copies from the dictionary after the load. So its entries may be replaced. A
# model that holds the old tensors would not see the new ones.


# %% tags=["exercise"]
def load(template, saved):
    """Put every tensor of `saved` into the dictionary `template`, bit for bit.

    template: {name: tensor}, in bfloat16; after the call, its tensors become the optimizer's
        master copies, and nobody holds the old ones
    saved: {name: tensor}, in float32
    """
    ### BEGIN SOLUTION
    for name, x in template.items():
        template[name] = x.to(saved[name].dtype).copy_(saved[name])
    ### END SOLUTION


check.narrow_template(load)

# %% [markdown]
# <details><summary>What would have caught it before the run?</summary>
#
# Compare the dtypes of the file and of the template, as their shapes are compared, before anything is read.
# </details>
#
# ## Optional: an eighth instrument, which runs nothing
#
# The checker of types in the optional part of [notebook 09](09_tensor_parallel.ipynb) reads the operations of a
# program. It does not read the programs of this notebook, so three of them are written here in its words, each with its
# bug. Which bugs are wrong types?

# %%
from labs.tp import rank_types as types


def scaled(x, expert, factor):
    return types.all_to_all(torch.relu(types.all_to_all(x) @ expert)) * factor


def own_length(gradient):
    return torch.sqrt(types.rows(gradient, gradient))


def norm_on_pieces(x, weight):
    return types.join(F.rms_norm(x, (1,)) * weight)


# %%
def refusal(program, returns, **given):
    """Return what the checker says of a program, or "" if it accepts it."""
    try:
        types.typed(program, returns, **given)
    except TypeError as refused:
        return str(refused)
    return ""


seven = refusal(scaled, "V", x="V", expert="V", factor="R")
eight = refusal(own_length, "I", gradient="V")
nine = refusal(norm_on_pieces, "I", x="V", weight="I")
refusals = {7: seven, 8: eight, 9: nine}
draw.table([{"exercise": n, "refusal": text} for n, text in refusals.items()])

# %% [markdown]
# The types tell of what went wrong in 8 and 9, and name the call that is missing: in 9 the hooks that should make it
# are on the wrong parameters, which a type does not see. They do not tell of 7: a wrong factor has the right type. The
# other nine were not tried; an order, a branch or memory has no type.
#
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>On one rank, a step with one micro-batch is right, and a step with four is not. Which two bugs of
# this notebook do that? What tells them apart?</summary>
#
# Means of micro-batches with unequal numbers of tokens, and an engine that keeps the last micro-batch only. `gradients`
# tells them apart: unequal factors, or zeros for all but the last. Four ranks with one micro-batch each also tell them
# apart: only the first bug remains.
# </details>
#
# <details><summary>All tests pass on gloo. Which bug of this notebook may still wait for you on NCCL?</summary>
#
# Two groups in two orders. gloo ends whatever the order, and NCCL may not. A recording on gloo is enough for the
# verdict.
# </details>
#
# <details><summary>Why is Adam's loss curve a poor instrument?</summary>
#
# Adam divides by the size of the gradient, so a constant factor hardly shows. Compare gradients, not curves.
# </details>
#
# | | predicted | ours |
# |---|---|---|
# | how often a micro-batch of 2 tokens counts, beside one of 18 | 5 | 5 |
# | instruments that notice each of the twelve | 3 | 3 |
#
# ## Ten questions across the course
#
# Here is one question from each of ten notebooks; each run asks different ones. Which of them would you have to look
# up?

# %%
recall.ten()

# %% [markdown]
# **Read on**: [labs/kit/nccl/would_hang.py](../labs/kit/nccl/would_hang.py), whose head lists NCCL's rules with their
# sources, and [labs/exercises/bug_clinic/_case.py](../labs/exercises/bug_clinic/_case.py), which has the instruments.
#
# **Next.** This is the last notebook, and the next bug is yours. Write it down as you found it here: the symptom, the
# fewest measurements that tell, and the sentence that would have caught it before the run.
#
# To get a clean copy of this notebook, run `git restore notebooks/16_bug_clinic.ipynb`, and then choose *File >
# Reload Notebook from Disk*.
