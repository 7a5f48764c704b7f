# %% [markdown]
# # DeepSpeed: a configuration file communicates
#
# *You wrote ZeRO in code. In the library of those who invented it, a stage is a number in a file. Is it the same ZeRO?
# And what does such a file not say?*
#
# You need: [ZeRO](04_zero.ipynb) and [FSDP](06_fsdp.ipynb).
# **Minutes**, by estimate: 30 without exercises, 55 with them, 25 more for the challenge.
# The machine works for half a minute of it, in 2 GB of memory. It needs DeepSpeed, too: `make learn EXTRA=deepspeed`
# adds it.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("14")

# %% [markdown]
# ## Question
#
# Who says what is sent? In notebook 04 you did, event by event. In notebook 13 it was a compiler, which works it out
# from layouts. DeepSpeed is a third answer: a **file** with a few dozen settings. The model and the loop stay what they
# are, and a stage of ZeRO is a number in it.
#
# So: is it the same training? Does it send and hold what yours does? And what is decided by the settings that the file
# does *not* have? If DeepSpeed is missing, the next cell says so.

# %%
from labs.deepspeed import engine
from labs.kit.launch import or_skip

or_skip(engine.missing())

# %%
import gc
import json
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from labs import cost
from labs.data import Batches, corpus
from labs.deepspeed import estimates
from labs.deepspeed.configuration import BUCKET, FAR, MICRO, from_fsdp, like_zero, to_fsdp
from labs.kit import check, draw, play
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import GPT, PRESETS

# %% [markdown]
# ## Picture
#
# ![What each of four ranks holds, in float32. Under DDP all of P, G and S: 16 bytes per parameter. Stage 1: a quarter
# of S, 10 bytes. Stage 2: a quarter of G and S, 7 bytes. Stage 3: a quarter of each, 4
# bytes.](../images/zero_stages.svg)
#
# You know this picture: what each rank holds under DDP and the three stages. And this is all that the file must say for
# stage 2, by [labs/deepspeed/configuration.py](../labs/deepspeed/configuration.py). The buckets are small, and nothing
# overlaps, so that bytes can be counted:

# %%
like_zero(2)

# %% [markdown]
# ## Predict
#
# In float32, DeepSpeed's optimizer keeps a **master** of each parameter, as it does in mixed precision, though here it
# is a mere copy. How many bytes of S is that for each parameter, before it is divided among the ranks? Ours has 8.
#
# And its stages 1 and 2 **all-reduce** the gradients, though each rank needs a part of the mean only. Then they gather
# the parameters. How many times as much as ours is that?

# %%
guess_state = 12  # your number
guess_times = 1.5  # your number

# %% [markdown]
# ## Measure: ZeRO by configuration
#
# Three stages of ours, PyTorch's `fully_shard` and three stages of DeepSpeed, on four ranks. Each is a row of the
# course's table of strategies; DeepSpeed's are in
# [labs/kit/rows/deepspeed_rows.py](../labs/kit/rows/deepspeed_rows.py), and how an engine is made is in
# [labs/deepspeed/engine.py](../labs/deepspeed/engine.py).

# %%
from labs.kit.train import strategies

config = replace(PRESETS["tiny"], depth=1, context=32)
loader = Batches(corpus().tokens, 4, config.context)
parts = [[part.chunk(4) for part in loader[step]] for step in range(3)]
batches = [[[chunks[rank] for chunks in step] for step in parts] for rank in range(4)]
ROWS = {row.name: row for row in (*strategies.STRATEGIES, *strategies.WITH_AN_EXTRA)}
NAMES = ["zero-1", "zero-2", "zero-3", "torch-fsdp", *(f"deepspeed-{n}" for n in (1, 2, 3))]


# %%
def as_it_is():
    return GPT(config)


def train_all(rows, make=as_it_is):
    losses = []
    for name in rows:
        gc.collect()
        mark("step")  # an empty step: what is in memory here belongs to earlier rows
        losses.append(strategies.train(ROWS[name], make, batches)[0])
    return losses


# %%
job = run(train_all, NAMES, ranks=4, device="cpu", record="communication", tell="sent")
losses, talk = dict(zip(NAMES, job[0], strict=True)), job.recording
watched = run(train_all, NAMES, ranks=4, device="cpu", record="memory", tell="held").recording
for name in NAMES:
    pairs = zip(losses[name], losses["zero-1"], strict=True)
    print(f"{name}: losses equal to 1e-5: {all(abs(a - b) < 1e-5 for a, b in pairs)}")

# %% [markdown]
# The same curve seven times. Now what is sent in a step, and what is held of P, G and S:


# %%
def row(turn, name):
    first, last = 4 * turn, 4 * turn + 3  # of its steps, the empty one and the third
    before, most = watched.moments(0, first)[0][1], watched.held(0, last)
    predicted = ROWS[name].predict(cost.Job(config, batch=1, ranks=4))
    held = {kind: most[kind] - before[kind] for kind in "PGS"}
    sent = talk.sent(rank=0, step=last)
    due = {kind: getattr(predicted.held, kind) for kind in "PGS"}
    as_predicted = (sent, held) == (predicted.sent, due)
    return {"": name, "sent": sent, **held, "as predicted, to the byte": as_predicted}


rows = {name: row(turn, name) for turn, name in enumerate(NAMES)}
draw.table(list(rows.values()), caption="bytes, on rank 0 of four")

# %%
per_parameter = 4 * rows["deepspeed-3"]["S"] / sum(cost.parameter_sizes(config))
times = rows["deepspeed-2"]["sent"] / rows["zero-2"]["sent"]
check.predict("Bytes of S for each parameter:", guess_state, round(per_parameter, 1))

# %%
why = "2Ψ to all-reduce, Ψ to gather."
check.predict("Times as much as ours:", guess_times, round(times, 2), reason=why)

# %% [markdown]
# Three of these figures ask for a reason:
#
# - Stage 3 is 3Ψ (N − 1)/N, here 683,712 bytes. DeepSpeed sends 8 more, for the norm of all gradients. Ours sends 24
#   more, with which the ranks agree on the order of the layers.
# - `fully_shard` sends less: embedding, norm and head, 131,328 bytes, are gathered once in a step and not twice. That
#   saves (N − 1)/N of them.
# - G of our stage 2 is more than a quarter: when the layer is through with its backward, its gradients are there as a
#   whole, 172,544 bytes, beside the shares of what is reduced by then.
#
# DeepSpeed fetches nothing ahead here (`stage3_prefetch_bucket_size: 0`), so it gathers each parameter by itself, where
# `fully_shard` gathers a layer at once. In a step of this model of one layer:

# %%
for turn, name in enumerate(NAMES):
    print(f"{name}: {dict(sorted(talk.counts(0, 4 * turn + 3).items()))}")

# %% [markdown]
# ## What the defaults hide
#
# `like_zero` says what nobody would think of saying. What happens if you do not? Change one thing at a time:
#
# - **`gradient_clipping`**. Since June 2026, where nothing is said, gradients are clipped to a norm of 1 ([pull request
#   8068](https://github.com/deepspeedai/DeepSpeed/pull/8068): most people want that). Before, nothing was clipped. The
#   same file under a newer release gives a different training run.
# - **`use_multi_rank_bucket_allreduce`**. It is on, and is why stages 1 and 2 send 3Ψ.
# - **stage 3's thresholds**. A parameter of up to 100,000 elements stays whole, and each of this model's is smaller.
#   One that is needed again before a billion others are is left gathered. Either would be enough here.
#
# The third one, for a small model: how many times Ψ does each rank send in a step, instead of 3?

# %%
guess_psi = 2  # your number

TWO = like_zero(2)["zero_optimization"]
OWN = {"stage": 3, "reduce_bucket_size": BUCKET, "memory_efficient_linear": False}


def unclipped(**zero):
    return {"gradient_clipping": 0.0, "zero_optimization": zero}


VARIANTS = {
    "stage 2, as ours": like_zero(2),
    "nothing said of clipping": {"zero_optimization": TWO},
    "no all-reduce of buckets": unclipped(**TWO, use_multi_rank_bucket_allreduce=False),
    "stage 3, as ours": like_zero(3),
    "stage 3, its own thresholds": unclipped(**OWN),
}


# %%
def train_each(variants):
    losses, adamw = [], partial(torch.optim.AdamW, **strategies.ADAMW)
    for settings in variants:
        made = engine.initialize(GPT(config), settings | {MICRO: 1}, adamw)
        losses.append([])
        for x, y in batches[dist.get_rank()]:
            mark("step")
            loss = made(x, y)
            made.backward(loss)
            made.step()
            losses[-1].append(loss.item())
        mark("end")
    return losses


# %%
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
TRANSLATED = from_fsdp(**MIXED), from_fsdp(reshard_after_forward=False)
recorded = partial(run, device="cpu", record="communication")
each = recorded(train_each, [*VARIANTS.values(), *TRANSLATED], ranks=2, tell="seven files")

# %%
PSI = sum(cost.parameter_sizes(config))


def times_psi(turn):
    """In units of 4 Ψ (N − 1)/N bytes, what rank 0 sends in the third step."""
    return round(each.recording.sent(0, 3 * turn + 2) / (4 * PSI / 2), 2)


def as_before(turn):
    return all(abs(a - b) < 1e-5 for a, b in zip(each[0][turn], each[0][0], strict=True))


turns = enumerate(VARIANTS)
draw.table([{"": v, "sent, × Ψ": times_psi(i), "same curve": as_before(i)} for i, v in turns])

# %%
why = "P is gathered once a step."
check.predict("Times Ψ, by its own thresholds:", guess_psi, times_psi(4), reason=why)

# %% [markdown]
# The second line trained differently. Whoever compares two libraries by their defaults may compare two different
# trainings. (In `OWN`, `memory_efficient_linear` is off, since stage 3 would otherwise replace
# `torch.nn.functional.linear` in the whole process by one that keeps less for backward.)
#
# Something else is lost in silence. A loop of PyTorch's may call `backward` twice before `step`, for two losses or two
# micro-batches, and the gradients add up. Here they are 1 and 10, and the learning rate is 1. How far does the weight
# go?


# %%
def two_backwards(stage):
    """How far a weight goes in a step."""
    model, sgd = torch.nn.Linear(1, 1, bias=False), partial(torch.optim.SGD, lr=1.0)
    made = engine.initialize(model, like_zero(stage) | {MICRO: 1}, sgd)
    [before] = [p.clone() for p in engine.full(made).values()]
    for x in 1.0, 10.0:
        made.backward(made(torch.full((1, 1), x)).sum())
    made.step()
    [after] = engine.full(made).values()
    return round((before - after).item(), 3)


for stage in 1, 2, 3:
    print(f"stage {stage}: {run(two_backwards, stage, ranks=2, device='cpu')[0]}")

# %% [markdown]
# In stages 1 and 2 the first gradient is gone. The file says, by its default, that a step has one micro-batch
# (`gradient_accumulation_steps: 1`), so the engine takes every backward for the whole of a step. Say 2 there, and call
# `step` after each of them, as DeepSpeed's documentation has it: then it steps once, by the mean.
#
# One more default, which no curve shows. Gradients wait in a **bucket** until they are reduced, and every rank has a
# place for one: `reduce_bucket_size`, 500 million *elements*, whatever the size of the model. How many MB is that in
# float32?

# %%
guess_bucket = 2000  # your number

check.predict("The bucket, MB:", guess_bucket, 500_000_000 * 4 / 1e6)

# %% [markdown]
# So the model above, of 0.3 MB, would take 2 GB on each rank. People keep finding that out: *Why ZeRO-2 use more
# CUDA Memory than ZeRO-1?* ([issue 1302](https://github.com/deepspeedai/DeepSpeed/issues/1302), 2021, and still open).
# The answer there: communication buffers are GBs by default, and models were meant to be larger.
#
# ## Build: a configuration from a description
#
# A file has three batch sizes: `train_batch_size`, the sequences of a step on all ranks;
# `train_micro_batch_size_per_gpu`, what a rank takes at a time; `gradient_accumulation_steps`, how many of these there
# are. The first is the product of the other two and the ranks. Two of the three say the third.
#
# ### Exercise 1: write it (5 minutes)
#
# ZeRO's stage 2, in bfloat16 (`bf16`, with `enabled` in it). It is judged by what it means, so there is more than one
# right answer. By one of them DeepSpeed then takes a step.


# %%
def configure(batch, most, ranks, clip):
    """A configuration of DeepSpeed, as a dictionary.

    batch: sequences in a step, of all ranks together
    most: a rank's memory has room for so many at a time; take the largest micro-batches
        that fit, all of one size
    clip: the norm that gradients are clipped to; None: they are not clipped
    """
    ### BEGIN SOLUTION
    each = batch // ranks
    micro = max(size for size in range(1, most + 1) if each % size == 0)
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": clip or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    ### END SOLUTION


check.configure(configure)

# %% [markdown]
# ## Build: two batch sizes that contradict each other
#
# You will meet this message one day. Here it is from
# [issue 6914](https://github.com/deepspeedai/DeepSpeed/issues/6914), of 2024:
#
#     Check batch related parameters. train_batch_size is not equal to
#     micro_batch_per_gpu * gradient_acc_step * world_size 8 != 2 * 1 * 1
#
# The file is right, for some number of ranks. Which one? (If the last factor is 1 and you have more GPUs, each process
# believes that it is alone: it was not started by a launcher.)
#
# ### Exercise 2: mend it (5 minutes)


# %%
def mend(train, micro, accumulation, ranks):
    """(the number of ranks that these sizes agree on, the accumulation that keeps train on
    `ranks` ranks).

    Micro stays, too: it is what fits. train is always a multiple of micro × accumulation.
    None in place of the second where there is no such accumulation.
    """
    ### BEGIN SOLUTION
    new, rest = divmod(train, micro * ranks)
    return train // (micro * accumulation), None if rest else new
    ### END SOLUTION


check.mend(mend)

# %% [markdown]
# ## From FSDP's words to DeepSpeed's
#
# You have a training with `fully_shard`, and want the same one under DeepSpeed. Some of its settings have a key there,
# some have two, and for `reshard_after_forward=False` there is only a distance within which nothing is dropped:
#
# | within `zero_optimization` | |
# |---|---|
# | `stage3_param_persistence_threshold` | parameters of up to so many elements are always whole |
# | `stage3_max_reuse_distance` | a parameter that is used again before so many others are stays gathered |
# | `stage3_prefetch_bucket_size` | so many elements are gathered before they are used |
# | `offload_param`, `offload_optimizer` | `{"device": "cpu"}`: where they are between two uses |
#
# | outside of it | |
# |---|---|
# | `communication_data_type` | `"fp32"` or `"bf16"`: gradients travel in it; unless it is said, in that of parameters |
#
# A `mesh` of one axis has no key: there are as many ranks as were started.
#
# ### Exercise 3: translate (10 minutes)
#
# It is judged by a trial: for some settings, `fully_shard` and DeepSpeed train the same small model on two ranks. The
# bytes sent in a step, the parameters held after it and the numbers at the end must be the same. Where you do not say
# how large a bucket of gradients is, the check takes a small one.


# %%
def translate(reshard, param_dtype, reduce_dtype, offload, max_norm, micro, accumulation):
    """A configuration of DeepSpeed under which it trains as fully_shard does.

    reshard: its reshard_after_forward
    param_dtype, reduce_dtype: of its MixedPrecisionPolicy; torch.float32 or torch.bfloat16
    offload: whether it has a CPUOffloadPolicy
    max_norm: what clip_grad_norm_ is called with; None: it is not called
    micro, accumulation: sequences of a rank in a micro-batch; micro-batches in a step
    """
    ### BEGIN SOLUTION
    config = like_zero(3)
    zero = config["zero_optimization"]
    zero["stage3_max_reuse_distance"] = 0 if reshard else 10**9
    for part in ("offload_param", "offload_optimizer"):
        zero[part] = {"device": "cpu" if offload else "none"}
    return config | {
        "bf16": {"enabled": param_dtype == torch.bfloat16},
        "communication_data_type": "bf16" if reduce_dtype == torch.bfloat16 else "fp32",
        "gradient_clipping": max_norm or 0.0,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    ### END SOLUTION


check.translate(translate)

# %% [markdown]
# Here is the course's own translation. Set the left side, and read the right one:

# %%
NUMBERS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def in_its_words(**settings):
    config = from_fsdp(**settings)
    lines = {**config.pop("zero_optimization"), **config}
    words = [{"DeepSpeed": key, "": json.dumps(value)} for key, value in lines.items()]
    return draw.table(words, caption=f"fully_shard: {settings}")


CHOICES = {"reshard_after_forward": [True, False], "offload": [False, True]}
play.explore(in_its_words, param_dtype=NUMBERS, reduce_dtype=NUMBERS, **CHOICES)

# %% [markdown]
# And back. Here the left side is the file, for a model of 7 billion parameters. Not everything has a counterpart.


# %%
def in_fsdps_words(stage, reuse, device, bf16):
    there = {"device": device}
    zero = {"stage": stage, "offload_param": there, "offload_optimizer": there}
    zero["stage3_max_reuse_distance"] = reuse
    config = {"zero_optimization": zero, "bf16": {"enabled": bf16}}
    try:
        settings = to_fsdp(config, parameters=7_000_000_000)
        words = {name: str(value) for name, value in settings.items()}
    except ValueError as told:
        words = {"no counterpart": str(told)}
    return draw.table([words], caption=f"DeepSpeed: {config}")


CHOICES = {"device": ["none", "cpu", "nvme"], "bf16": [False, True]}
play.explore(in_fsdps_words, stage=[3, 2, 1], reuse=[0, FAR, 10 * FAR], **CHOICES)

# %% [markdown]
# Does the file do what it says? Let parameters be in bfloat16, and gradients be reduced in float32. Parameters travel
# in bfloat16, twice; gradients in float32, once. How many bytes for each parameter is that, times (N − 1)/N?

# %%
guess_mixed = 8  # your number

mixed, kept = (4 * times_psi(len(VARIANTS) + turn) for turn in range(2))
print(f"reshard_after_forward=False: {kept:.1f} bytes for each parameter, times (N - 1)/N")
check.predict("bfloat16 and float32:", guess_mixed, round(mixed, 1))

# %% [markdown]
# ## What its estimators leave out
#
# DeepSpeed tells beforehand what a model will need: `estimate_zero2_model_states_mem_needs_all_live` and its like. For
# stage 2 it is 2Ψ + 18Ψ/N bytes on each of N ranks: two for P in 16 bits, and shares of G in 16 and in 32 bits and of
# S, 2 + 4 + 12. ([labs/deepspeed/estimates.py](../labs/deepspeed/estimates.py) has them in closed form.)
#
# ### Exercise 4: what is left out (5 minutes)
#
# In float32, P has 4 bytes, of which each rank has all; G has 4 and S has 12, of which it has a share. In mixed
# precision the estimate's P, G and S are right. Besides, there is one bucket, in the parameters' dtype, and there are
# the activations.


# %%
def left_out(parameters, ranks, activations, bucket, float32):
    """Bytes that a rank holds under stage 2 beyond 2Ψ + 18Ψ/N.

    activations: bytes, of the sequences of this rank
    bucket: elements
    float32: whether all is in float32; else it is in mixed precision, with parameters in 16
    bits
    """
    ### BEGIN SOLUTION
    states = 2 * parameters - 2 * parameters // ranks if float32 else 0
    return states + activations + (4 if float32 else 2) * bucket
    ### END SOLUTION


answer = check.left_out(left_out)
answer

# %%
left_out = left_out if answer.ok else check.left_out.expected
rows = []
for context, bucket in ((32, BUCKET), (512, BUCKET), (32, 500_000_000)):
    longer = replace(config, context=context)
    plan = cost.deepspeed(cost.Job(longer, batch=1, ranks=4), 2, bucket).held
    estimate = estimates.stage2(PSI, devices=4).device
    more = left_out(PSI, 4, plan.A, bucket, True)
    rows.append({"tokens": context, "bucket": bucket, "its estimate": estimate})
    rows[-1] |= {"with yours": round(estimate + more), "labs/cost": plan.peak}
draw.table(rows, caption="bytes on a rank of four, stage 2, float32")

# %% [markdown]
# The estimate knows neither tokens nor buckets, and yours adds both. What is still missing are temporaries, more of
# them with more tokens. labs/cost has these; its tests compare it with measured peaks. ([Issue
# 5102](https://github.com/deepspeedai/DeepSpeed/issues/5102), of 2024, has a longer list.)
#
# ## Recomputed, and compiled
#
# Two things that you may add to a training: activation checkpointing, which is notebook 07's, and `torch.compile`.
# DeepSpeed has a checkpointing function of its own, and PyTorch's is there as well. How many bytes of activations does
# a rank hold under each, at the most?


# %%
def recomputed_by(checkpoint):
    model = GPT(replace(config, depth=2))
    for layer in model.layers.values():
        layer.forward = partial(checkpoint, layer.forward)
    return model


def by_deepspeeds():
    own = engine.imported().checkpointing
    own.configure(None)
    return recomputed_by(own.checkpoint)


# %%
pytorchs = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
MAKERS = {
    "as it is": partial(recomputed_by, lambda forward, *inputs: forward(*inputs)),
    "PyTorch's": partial(recomputed_by, pytorchs),
    "DeepSpeed's": by_deepspeeds,
}
BOTH = ["torch-fsdp", "deepspeed-3"]


def train_each_way():
    return [train_all(BOTH, make) for make in MAKERS.values()]


held = run(train_each_way, ranks=2, device="cpu", record="memory", tell="recomputed")


# %%
def activations(turn):
    """Of the turn's third step, beyond what was there before its first."""
    before = held.recording.moments(0, 4 * turn)[0][1]["A"]
    return held.recording.held(0, 4 * turn + 3)["A"] - before


def on_one_curve(turn):
    pairs = [pair for each in held[0][turn] for pair in zip(each, held[0][0][0], strict=True)]
    return all(abs(a - b) < 1e-5 for a, b in pairs)


# %%
table = [
    {
        "checkpoint": name,
        "FSDP2": activations(2 * i),
        "DeepSpeed": activations(2 * i + 1),
        "same curve": on_one_curve(i),
    }
    for i, name in enumerate(MAKERS)
]
draw.table(table, caption="bytes of A, at the most, on rank 0 of two; two layers")

# %% [markdown]
# They are equal to the byte: how many activations a layer keeps does not depend on who shards its parameters.
# DeepSpeed's function keeps a little more; it can also cut what it keeps over the ranks of a tensor-parallel group, or
# move it to the CPU.
#
# Now compiled, layer by layer, and then sharded. (`backend="eager"` traces the layers and compiles nothing, so no
# compiler is needed here. DeepSpeed is in stage 2: in stage 3 it gathers by hooks on every module, which are traced,
# too, until PyTorch's limit of recompilations is reached.)


# %%
def compiled():
    model = as_it_is()
    for layer in model.layers.values():
        layer.compile(backend="eager")
    return model


def train_both():
    return [train_all(["torch-fsdp", "deepspeed-2"], make) for make in (as_it_is, compiled)]


job = recorded(train_both, ranks=2, tell="compiled")
sent = [job.recording.sent(0, 4 * turn + 3) for turn in range(4)]
curves = [each for both in job[0] for each in both]
same = all(abs(a - b) < 1e-5 for each in curves for a, b in zip(each, curves[0], strict=True))
print("bytes sent in a step, as it is and compiled:")
print(f"FSDP2 {sent[0]} and {sent[2]}, DeepSpeed {sent[1]} and {sent[3]}")
print(f"all four on one curve: {same}")

# %% [markdown]
# ## Why, and why not
#
# | | FSDP2 | DeepSpeed | how do we know? |
# |---|---|---|---|
# | is a part of PyTorch | yes | no: a package of its own | the imports above |
# | is told what to do | in code: `fully_shard(layer)` | in a file | above |
# | a layer is gathered | at once | with no prefetch, each parameter by itself | counted above |
# | S, in float32 | 8 bytes | 12, with masters | measured above |
# | clips gradients | when you call it | unless you say 0 | measured above |
# | its optimizer | any of PyTorch's | its own, compiled at first use; or PyTorch's | DeepSpeed, 10/2026 |
# | offload to the CPU | yes | yes | run in notebook 07b; run in exercise 3 |
# | offload to NVMe | no | on Linux, with a C++ compiler and libaio | PyTorch, 7/2026; DeepSpeed, 10/2026 |
# | activation checkpointing | PyTorch's | the same; or its own, cut over TP, or on the CPU | measured; docs, 11/2026 |
# | compile | each layer, then `fully_shard` | each layer, or `engine.compile()` | run above; DeepSpeed, 10/2026 |
# | inference | sharded, as in training | the same in stage 3; its own engine | docs of both, 11/2026 |
# | a checkpoint is loaded by | any number of ranks | the same number; any, once converted | notebook 08; its test |
# | a checkpoint is | tensors and an index | pickles: run nobody else's | notebook 08; its test |
#
# *PyTorch, 7/2026* is its release 2.13 of July 2026, and *DeepSpeed, 10/2026* [release
# 0.19.8](https://pypi.org/project/deepspeed/0.19.8/) of October 2026: their code was read. The docs are those of
# PyTorch on `fully_shard`, and those of deepspeed.ai on activation checkpointing and on inference, read in November
# 2026. The test is [tests/deepspeed/test_saved.py](../tests/deepspeed/test_saved.py), which runs at each change of this
# course: offloaded, a training ends with the same numbers; saved by four ranks and converted, it goes on with two.
#
# **Why**: what you would have to write, offload to disk above all, is there, and a model needs no change. **Why not**:
# what a file does not say is decided elsewhere, and may change with a release. So write down what you rely on, and
# measure the rest once.
#
# ### A way out
#
# A few lines of a training script become DeepSpeed's, and it needs nothing of this course.
#
# | PyTorch | DeepSpeed |
# |---|---|
# | `fully_shard(model)` | `engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="zero.json")` |
# | `loss.backward()` | `engine.backward(loss)` |
# | `clip_grad_norm_(parameters, 1.0)` | `"gradient_clipping": 1.0` in the file |
# | `optimizer.step()`, `zero_grad()` | `engine.step()` |
# | `torchrun --nproc-per-node=8 train.py` | the same, or `deepspeed --no_local_rank train.py` |
#
# A whole script is [scripts/train_with_deepspeed.py](../scripts/train_with_deepspeed.py). From the root of the
# repository, run `torchrun --nproc-per-node 4 scripts/train_with_deepspeed.py`, or `deepspeed --no_local_rank` and the
# same file:
#
# ```python
# import deepspeed
# import torch
# import torch.distributed as dist
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# # On CPUs, DeepSpeed would compile an operator for shared memory.
# deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = device == "cuda"
#
# dist.init_process_group()
# rank, ranks = dist.get_rank(), dist.get_world_size()
# if device == "cuda":
#     torch.cuda.set_device(rank % torch.cuda.device_count())
# deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
#
# settings = {
#     "train_batch_size": 16,
#     "gradient_clipping": 1.0,
#     "bf16": {"enabled": device == "cuda"},
#     "zero_optimization": {"stage": 3, "reduce_bucket_size": 1 << 20, "memory_efficient_linear": False},
#     "zero_allow_untested_optimizer": True,
#     "zero_force_ds_cpu_optimizer": False,
#     "steps_per_print": 1 << 31,
# }
# config = PRESETS["small"]
# model = GPT(config)
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
# engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
#
# batches = Batches(corpus().tokens, 16, config.context)
# for step in range(10):
#     x, y = (part.chunk(ranks)[rank].to(device) for part in batches[step])
#     loss = engine(x, y)
#     engine.backward(loss)
#     engine.step()
#     mean = loss.detach().float()
#     dist.all_reduce(mean)
#     if rank == 0:
#         print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```
#
# And the file, which says what you rely on. These are numbers for comparing: for a large model take larger buckets, and
# let it fetch ahead.

# %%
SIZES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
print(json.dumps(SIZES | from_fsdp(), indent=2))

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>The same file, a newer release, another curve. What do you look for?</summary>
#
# What the file does not say: gradients are clipped by default since 2026. Write `gradient_clipping` down, even as 0.
# </details>
#
# <details><summary>Why do stages 1 and 2 send half as much again as ours, and what turns it off?</summary>
#
# A bucket with gradients for several ranks is all-reduced. With `use_multi_rank_bucket_allreduce: false` each part is
# reduced to the rank that needs it: 2Ψ.
# </details>
#
# <details><summary>By its estimate a model needs 1 GB, and a card of 4 is too small. What is not in it?</summary>
#
# Activations, which grow with the tokens; the bucket, by default 1 GB in 16 bits and 2 GB in float32; and in float32
# the wider parameters.
# </details>
#
# | | predicted | DeepSpeed | ours |
# |---|---|---|---|
# | numbers | one curve | the same | the same |
# | stages 1 and 2 send | 3Ψ | 3Ψ | 2Ψ |
# | stage 3 sends | 3Ψ | 3Ψ; a small model, by its own thresholds: 2Ψ | 3Ψ |
# | S in float32, N ranks | 12Ψ/N | 12Ψ/N | 8Ψ/N |

# %% [markdown]
# ## Beat it: the quickest file that fits (20 minutes)
#
# Optional, and open: no answer is the last one. Two ranks train three models of linear layers, with AdamW in float32.
# Each has a budget of bytes, beyond what was there before the model, and a message takes latency + bytes/bandwidth. You
# write the file: how many of its rows a rank takes at a time, and what stands in `zero_optimization`. Nothing is
# offloaded. DeepSpeed trains by your file; the losses must be one process's. What counts is the time of the third
# step's messages on the busier rank; what has to fit is the most that the fuller one holds in a steady step.
#
# **The bound.** What a rank's parameters become depends on the other's gradient, in Ψ numbers. So 4Ψ bytes must be
# sent, in a message at least. That is 100 points, in each of the three. Stage 3 as
# `from_fsdp(reshard_after_forward=False)` has it, with buckets of 1,500 elements and at most 16 rows at a time, fits
# everywhere, and scores 22.0 in their mean.
# A score is 100 × bound / time.

# %%
from itertools import pairwise

from labs.kit import beat

rows, measured = [], beat.knobs.measured
for name, setup in beat.knobs.cases.items():
    row = {"": name, "widths": " → ".join(map(str, setup.widths)), "rows": setup.rows}
    row |= {"budget, kB": setup.budget // 1000, "latency, ms": round(1000 * setup.latency)}
    rows.append(row)
draw.table(rows, caption=f"{setup.bandwidth / 1e6:.0f} MB per second")

# %% [markdown]
# `measured` tries files in one of the three setups, as the judge does. (kB are rounded here; what counts is exact.)

# %%
zeros = {"stage 2": like_zero(2), "straightforward": from_fsdp(reshard_after_forward=False)}
files = {}
for name, each in zeros.items():
    zero = each["zero_optimization"] | {"reduce_bucket_size": 1500}
    files[name] = {MICRO: 8, "zero_optimization": zero}
rows = []
for name, each in zip(files, measured("few rows", *files.values()), strict=True):
    row = {"": name, "messages": each.messages, "sent, kB": round(each.sent / 1000)}
    rows.append(row | {"held, kB": round(each.held / 1000)})
draw.table(rows, caption="few rows, buckets of 1,500")


# %%
def quick_file(widths, rows, budget, latency, bandwidth):
    """A configuration of DeepSpeed with two keys: train_micro_batch_size_per_gpu, which divides
    rows, and zero_optimization, of numbers and switches.

    widths: of the model, which has a linear layer with bias from each to the next; rows: of a
    rank in a step; bytes, s, bytes/s
    """
    ### BEGIN SOLUTION
    psi = sum(a * b + b for a, b in pairwise(widths))
    micro = min(rows, 16)
    spare = budget - 16 * psi - 6 * micro * sum(widths)
    zero = {"stage": 2 if micro == rows else 1, "overlap_comm": False}
    zero["use_multi_rank_bucket_allreduce"] = False
    zero["reduce_bucket_size"] = max(spare // 4, 1000)
    return {MICRO: micro, "zero_optimization": zero}
    ### END SOLUTION


beat.knobs(quick_file)

# %% [markdown]
# The course does without stage 3, which needs more messages. What it has to spare becomes a bucket.
#
# <details><summary>Where is there room?</summary>
#
# In the number of buckets. What is held does not grow evenly with their size: a bucket that is just large enough for
# two layers costs less than one that almost is. And where gradients are added up over micro-batches, smaller ones leave
# room for one bucket that takes all.
# </details>

# %% [markdown]
# **Read on**: [labs/deepspeed/configuration.py](../labs/deepspeed/configuration.py),
# [labs/deepspeed/saved.py](../labs/deepspeed/saved.py), on its checkpoints, and
# [labs/cost/deepspeed_stages.py](../labs/cost/deepspeed_stages.py). Rajbhandari et al., 2020, *ZeRO* (arXiv
# 1910.02054).
#
# **Next.** You, a compiler or a file can say what is sent. On 32 GPUs there are dozens of layouts, on 16,384 thousands.
# Which is the best, and how can one know before a GPU is rented? [Plan a run](15_plan_a_run.ipynb).
#
# A clean copy of this notebook: `git restore notebooks/14_deepspeed.ipynb`, then *File > Reload Notebook from Disk*.
