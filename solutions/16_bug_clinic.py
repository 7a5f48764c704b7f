# %% [markdown]
# # The bug clinic: symptom first
#
# *A loss is a little too high, a job stands still, memory grows. Somebody wrote the code, and it looks right. Which
# measurement tells you in minutes what is wrong?*
#
# **Minutes**, by estimate: 25 without exercises, 60 with them, 45 more for optional parts, 25 more for the challenge.
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

# %% [markdown]
# ## Question
#
# Every function in this notebook is wrong, and each bug was shipped by a project that many people use. Each is
# written anew here, small, on four ranks. You get what its first user got: a curve, a log, a report, a ledger. You
# may measure before you mend. How few measurements do you need?
#
# ## Picture
#
# | symptom | what to read first | what it compares |
# |---|---|---|
# | (a) the loss is nearly right | `numbers`, `gradients` | values with one process; gradients with micro-batches' |
# | (b) right on one rank, or with one micro-batch, only | `numbers`, `gradients` | the same |
# | (c) the job hangs, or would hang on NCCL | `verdict` | the order of the calls with NCCL's rules |
# | (d) memory grows or peaks | `held` | the most bytes that a rank adds with the right program's |
# | (e) it is slow | `sent`, `time` | bytes with the right program's; the order of calls and computation |
# | (f) the resumed run is another training | `numbers` | values after the restart with those of a run without one |
#
# `dry` reads bytes and the verdict from a dry run, on one process, before anything is trained. The next cell shows a
# function as it was shipped, and returns a visit: `visit.read("sent")` reads an instrument, and `visit.counts` counts
# how often you did.


# %%
def shipped(exercise):
    """Show a function as it was shipped, and return a visit to its job."""
    print(inspect.getsource(exercise.case.faulty))
    return exercise.visit()


visit = shipped(check.token_mean)

# %% [markdown]
# ### Exercise 1: a token in a short micro-batch (7 minutes)
#
# A user accumulates 32 micro-batches of one sequence, and gets a worse model than with 32 sequences at once
# ([trl#2175](https://github.com/huggingface/trl/issues/2175), closed, October 2024). Transformers changed its trainer
# in [PR 34191](https://github.com/huggingface/transformers/pull/34191), merged, in the same month. The curve shows
# the mean loss per token of the whole batch before each step.

# %%
draw.curves(visit.both("losses"))

# %%
visit.read("gradients")

# %% [markdown]
# A factor of 10 for one micro-batch of rank 0, and 0.5 for the last of rank 3: what do the ten times and the half
# have to do with the number of tokens? Predict the bytes before you read them.

# %%
guess = 64  # your number
sent = visit.jobs.order.recording.sent
answer = sent(1, 1) - sent(1, 0)
question = "How many bytes more does rank 1 send in the right program, in 4 steps?"
check.predict(question, guess, answer)

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
# **What would have caught it before the run?**
#
# <details><summary>Say it, then unfold.</summary>
#
# One step beside one process's, with micro-batches of unequal lengths. Equal lengths hide it, and bytes hardly tell:
# the right program sends one number more.
# </details>
#
# ### Exercise 2: right with one micro-batch (6 minutes)
#
# Megatron-LM's second FSDP trained well, until a step had several micro-batches: then only the last one's gradient
# reached the optimizer ([PR 7186](https://github.com/NVIDIA/Megatron-LM/pull/7186), merged, September 2026). An
# engine adds gradients to buffers of its own, in a hook on each parameter. It asks `engine.last` whether this
# backward is the step's last.

# %%
visit = shipped(check.inherited_no_sync)
print(inspect.getsource(check.inherited_no_sync.Engine))

# %%
visit.read("gradients")

# %%
visit.read("sent")

# %% [markdown]
# Which line of the engine clears the buffer, and when does it do so here? Mend the context manager.


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
# **What would have caught it before the run?**
#
# <details><summary>Say it, then unfold.</summary>
#
# A step of 1 × 4 micro-batches must have the gradient of 4 × 1, and must send the same bytes. A dry run counts the
# bytes in seconds: try `visit.read("dry")`.
# </details>
#
# ### Exercise 3: eleven hours, then silence (6 minutes)
#
# AReaL computes the norm of all gradients. On ranks whose layers are frozen there are no gradients, and the other
# ranks wait for ever ([PR 1139](https://github.com/areal-project/AReaL/pull/1139), merged, April 2026). Here the job
# is cut after two seconds.

# %%
visit = shipped(check.early_return)
print(visit.hang_report())

# %% [markdown]
# The report names the rank that never came. `dry` needs no hang for that: it runs each rank by itself, and compares
# the calls. Mend the function.


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
# **What would have caught it before the run?**
#
# <details><summary>Say it, then unfold.</summary>
#
# A dry run of all ranks, one of them without a gradient, and `would_hang` on its recording. A test on equal ranks
# never takes this branch.
# </details>
#
# ### Exercise 4: memory that stays (6 minutes)
#
# PyTorch's FSDP2 sharded three models: two text encoders, frozen, and the model that was trained. After a forward
# of an encoder, under `no_grad`, its parameters stayed whole
# ([#149029](https://github.com/pytorch/pytorch/issues/149029), closed, March 2025; [PR
# 154704](https://github.com/pytorch/pytorch/pull/154704), closed, May 2025). Here are four encoders.

# %%
visit = shipped(check.root_stays)
draw.memory(visit.jobs.memory.recording)

# %% [markdown]
# The first step is the program as it was shipped, the second is the right one. How many gathered encoders does each
# hold at its peak? The root of a model stays gathered for a reason: its backward comes next. Mend the function, and
# keep what the reason is true for.


# %% tags=["exercise"]
def after_forward(unit):
    """Free the unit's gathered parameters, unless it is a root whose backward comes next.

    unit: has is_root and free(); it is called after each forward, under no_grad for encoders
    """
    ### BEGIN SOLUTION
    backward_comes = unit.is_root and torch.is_grad_enabled()
    if not backward_comes:
        unit.free()
    ### END SOLUTION


check.root_stays(after_forward)

# %% [markdown]
# **What would have caught it before the run?**
#
# <details><summary>Say it, then unfold.</summary>
#
# The peak of a dry run beside a formula: of all frozen encoders, one is whole at a time.
# </details>
#
# ### Exercise 5: gathers that wait (7 minutes)
#
# Under the first two stages of ZeRO, each rank updates its shard of the parameters, and then all ranks gather them. A
# user of DeepSpeed asks how to overlap this ([#6876](https://github.com/deepspeedai/DeepSpeed/issues/6876), closed,
# December 2024); ColossalAI ([PR 5898](https://github.com/hpcaitech/ColossalAI/pull/5898), merged, July 2024) and
# apex ([PR 1621](https://github.com/NVIDIA/apex/pull/1621), merged, March 2023) mended it. At work you would open a
# trace of `torch.profiler` in [Perfetto](https://ui.perfetto.dev). A few lines read it here, too.

# %%
visit = shipped(check.late_gather)
trace = check.late_gather.traced(visit.case.faulty)
print(*check.late_gather.in_order(trace), sep="\n")

# %% [markdown]
# `trace` is the text of a file: write it to `trace.json`, and drop it on Perfetto's page. What could begin earlier,
# and what must it wait for? `time` counts calls beside which the rank computes. It reads their order, and no clock.

# %%
visit.read("time")


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
# **What would have caught it before the run?**
#
# <details><summary>Say it, then unfold.</summary>
#
# The order of the calls in the trace of one step, on a laptop. A clock would say nothing here: four ranks share your
# cores.
# </details>
#
# ### Exercise 6: the resumed run (6 minutes)
#
# With accelerate, a run that was resumed in its second epoch has another loss than the run that was not interrupted,
# and in its first epoch it has the same ([#2016](https://github.com/huggingface/accelerate/issues/2016), open, 2023;
# [PR 4071](https://github.com/huggingface/accelerate/pull/4071), merged, June 2026).

# %%
visit = shipped(check.first_epoch_again)
draw.curves(visit.both("losses"))

# %%
visit.read("numbers")


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
# **What would have caught it before the run?**
#
# <details><summary>Say it, then unfold.</summary>
#
# Save, load, and compare the next windows, inside the *second* epoch. No training is needed.
# </details>

# %% [markdown]
# ## Measure: which instruments suffice?
#
# `visit.counts` says what you have read in the last case.

# %%
visit.counts

# %% [markdown]
# Which instruments tell of which case? A test of the course holds this table.

# %%
CASES = {name: fn.case for name, fn in vars(check).items() if hasattr(fn, "case")}
instruments = check.token_mean.instruments
rows = []
for name, case in CASES.items():
    marks = {each: "tells" if each in case.tells else "" for each in instruments}
    rows.append({"group": case.group, "case": name} | marks)
draw.table(sorted(rows, key=lambda row: row["group"]))

# %%
guess = 3  # your number
answer = len(check.token_mean.fewest({name: case.tells for name, case in CASES.items()}))
check.predict("How many instruments suffice to notice each of the twelve?", guess, answer)

# %% [markdown]
# One comparison with one process finds most bugs of numbers. A dry run finds hangs and memory without a device. The
# order of calls and computation finds what is slow and right. Read them in this order, and read `gradients` and
# `sent` to learn *why*.
#
# ## Native: the same instruments at work
#
# | here | on a cluster |
# |---|---|
# | `numbers` | the same step on one GPU in float64, or with `dp=1`; parameters compared by name after each step |
# | `gradients` | the gradients of one layer of each rank, saved and compared in a notebook |
# | `sent` | `torch.profiler`, or the Flight Recorder: count the collectives of a step and their sizes |
# | `held` | `torch.cuda.memory._record_memory_history`, and its page |
# | `time` | a trace of `torch.profiler` in Perfetto |
# | `verdict`, hang report | PyTorch's Flight Recorder: [CLUSTERS.md](../CLUSTERS.md) says how |
# | `dry` | a fake process group, and fake tensors |
#
# ## Why, and why not
#
# **Why** measure before you read the code? The code of a bug looks right: somebody reviewed it. A measurement says
# which half of the program is innocent. **Why not** measure everything? Each instrument costs a run, and at work a
# run costs hours of a cluster. So ask first which two explanations the next measurement tells apart.
#
# [DEBUGGING.md](../DEBUGGING.md) leads from each symptom to the measurement that tells.
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
# Most words of `gradients` are kinds. Nine words are not, and stand for a kind each; "right" does so if the gradient is
# wrong in its digits only:

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
# Here the required part ends. **What follows is optional**: six more cases. Then come three questions, and ten across
# the course.
#
# ## Optional: six more cases
#
# ### Exercise 7: experts that learn twice as fast (7 minutes)
#
# Under expert parallelism, DeepSpeed's gradients of experts were as many times too large as there were ranks that
# share the experts ([#5618](https://github.com/deepspeedai/DeepSpeed/issues/5618), closed, June 2024;
# [#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545), open; [PR
# 6546](https://github.com/deepspeedai/DeepSpeed/pull/6546), merged, September 2024). Adam hides a constant factor, so
# the loss was nearly right. Here two ranks share two experts, and two others hold copies of them.

# %%
visit = shipped(check.expert_scale)
visit.read("gradients")


# %% tags=["exercise"]
def average_by_kind(dense, experts, copies):
    """Make each .grad that of the mean of all ranks' losses.

    dense: parameters that every rank holds
    experts: this rank's experts' parameters, whose .grad is due to all ranks that share experts
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
# ### Exercise 8: a norm per stage (6 minutes)
#
# A reader of torchtitan asks whether each stage of a pipeline clips by the norm of its own parameters
# ([#596](https://github.com/pytorch/torchtitan/issues/596), closed, October 2024; [PR
# 649](https://github.com/pytorch/torchtitan/pull/649), merged, October 2024). It did.

# %%
visit = shipped(check.clip_by_stage)
for rank in range(4):
    print(*(f"{float(norm):.2f}" for norm in visit.both("norms", rank)[f"rank {rank}"]))


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
# The norm must be equal on all ranks, and one process's: one line compares it.
# </details>
#
# ### Exercise 9: a norm that never hears from the others (7 minutes)
#
# With sequence parallelism, each rank's layer norm sees a piece of the sequence. A user of Megatron-LM printed its
# gradient on four ranks ([#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446), closed, March 2025). GPT-NeoX
# had registered its hooks before DeepSpeed was initialised ([PR
# 1259](https://github.com/EleutherAI/gpt-neox/pull/1259), merged, August 2024).

# %%
visit = shipped(check.silent_norm)
for rank in range(4):
    print(visit.both("gradient", rank)[f"rank {rank}"][:3])


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
# Count the all-reduces of one step, in a dry run: one for each parameter of a norm.
# </details>
#
# ### Exercise 10: four times the same quarter (5 minutes)
#
# ms-swift initialised the parts of a split weight by the same seed on all ranks ([PR
# 7944](https://github.com/modelscope/ms-swift/pull/7944), merged, January 2026), and so did InternLM ([PR
# 405](https://github.com/InternLM/InternLM/pull/405), merged, October 2023). Neither thread names a symptom. Here is
# one: the rank of the gathered matrix.

# %%
visit = shipped(check.same_seed)
parts = [visit.both("weight", rank) for rank in range(4)]
whole = torch.cat([part["one process"] for part in parts])
gathered = torch.cat([part[f"rank {rank}"] for rank, part in enumerate(parts)])
for name, matrix in {"one process": whole, "four ranks": gathered}.items():
    print(f"{name}: a matrix of rank {int(torch.linalg.matrix_rank(matrix))}")


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
# ### Exercise 11: two groups, two orders (6 minutes)
#
# On 64 GPUs of a TorchRec job, 62 ranks waited in an all-to-all of one group, and two in an all-reduce of another
# ([PR 4149](https://github.com/meta-pytorch/torchrec/pull/4149), closed, April 2026). The groups were used in another
# order on some ranks, and an implicit synchronisation did the rest. On gloo the job here ends, and its numbers are
# right.

# %%
visit = shipped(check.two_orders)
visit.read("verdict")


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
# <details><summary>What would have caught it before the run?</summary>
#
# `would_hang` on a recording, or on a dry run, of all ranks. gloo ends in any order.
# </details>
#
# ### Exercise 12: a checkpoint that casts (5 minutes)
#
# PyTorch's distributed checkpoint reads into the tensors that it is given, whatever their dtype
# ([#187138](https://github.com/pytorch/pytorch/issues/187138), open, June 2026; [PR
# 187257](https://github.com/pytorch/pytorch/pull/187257), open). Shapes are compared, dtypes are not.

# %%
visit = shipped(check.narrow_template)
visit.read("numbers")


# %% tags=["exercise"]
def load(template, saved):
    """Put every tensor of `saved` into the dictionary `template`, bit by bit.

    template: {name: tensor}, of a model that was made in bfloat16
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
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>With 4 micro-batches the gradient is wrong. Which two bugs of this notebook do that, and which
# instrument tells them apart?</summary>
#
# Micro-batch means of unequal token counts, and a step that keeps the last micro-batch only. The gradient as a
# mixture tells them apart: unequal factors for all micro-batches, or zeros for all but the last.
# </details>
#
# <details><summary>All tests pass on gloo. Which bugs of this notebook may still wait for you on NCCL?</summary>
#
# Two groups in two orders. gloo ends whatever the order, and NCCL may not. A recording on gloo is enough for the
# verdict.
# </details>
#
# <details><summary>Why is Adam's loss curve a poor instrument?</summary>
#
# Adam divides by the size of the gradient, so a constant factor disappears. Compare gradients, not curves.
# </details>
#
# | | predicted | ours |
# |---|---|---|
# | bytes that a right mean of the loss costs, in 4 steps | 64 | 64 |
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
