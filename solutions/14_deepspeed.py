# %% [markdown]
# # DeepSpeed: a configuration file communicates
#
# *You wrote ZeRO in code. In DeepSpeed, the library of its inventors, a stage of ZeRO is a number in a file. Is it the
# same ZeRO? And what happens to settings that the file leaves out?*
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
# Who decides what the ranks send? In notebook 04 you did, event by event. In notebook 13 a compiler did, from the
# layouts of a few arrays. In DeepSpeed a **file** does: it has a few dozen settings, and a stage of ZeRO is a number in
# it. The model stays unchanged. In the loop, `engine.backward` and `engine.step` replace PyTorch's calls, and they do
# not always mean the same.
#
# This leads to three questions. Is it the same training? Does DeepSpeed send and hold what your ZeRO does? And what do
# settings do that the file does *not* contain? If DeepSpeed is missing, the next cell says so.

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
# You know this picture from notebook 04: what each rank holds under DDP and under three stages of ZeRO, with 8 bytes of
# optimizer state per parameter. DeepSpeed's figures will differ in one term, which you predict below. The file for
# stage 2 needs only the settings below ([labs/deepspeed/configuration.py](../labs/deepspeed/configuration.py)). Buckets
# are small, and nothing overlaps, so that bytes can be counted:

# %%
like_zero(2)

# %% [markdown]
# ## Predict
#
# In mixed precision, DeepSpeed's optimizer holds a **master**, a float32 copy of each parameter. In float32 it holds
# this copy as well, although it equals the parameter. How many bytes of optimizer state S does this make per parameter,
# before S is sharded? Ours has 8.
#
# DeepSpeed's stages 1 and 2 **all-reduce** the gradients, although each rank needs only its shard of the mean. Then
# they all-gather the parameters. By what factor does a rank send more than in our stages 1 and 2?

# %%
guess_state = 12  # your number
guess_times = 1.5  # your number

# %% [markdown]
# ## Measure: ZeRO by configuration
#
# Train the same model on four ranks with our three stages, with PyTorch's `fully_shard` and with DeepSpeed's three
# stages. DeepSpeed's strategies are in [labs/kit/rows/deepspeed_rows.py](../labs/kit/rows/deepspeed_rows.py), and
# [labs/deepspeed/engine.py](../labs/deepspeed/engine.py) creates an engine.

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
        mark("step")  # an empty step: memory that is held here belongs to earlier rows
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
# All seven losses follow one curve. The next table shows what rank 0 sends in a step, and what it holds of parameters
# P, gradients G and optimizer state S:


# %%
def row(turn, name):
    first, last = 4 * turn, 4 * turn + 3  # this row's empty step, and its third one
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
# The picture above gives our stages; the table differs from it in two places. DeepSpeed's S is 12 bytes per parameter
# over 4 ranks, not 8. And our stage 2 holds more of G than a quarter, since all gradients of a layer, 172,544 bytes,
# exist when its backward ends, beside the shards that were reduced before; the picture shows only what stays.
#
# Let Ψ be the number of parameters and N the number of ranks. Two figures of the bytes sent need a reason:
#
# - Stage 3 sends 3Ψ (N − 1)/N numbers, here 683,712 bytes. DeepSpeed sends 8 bytes more, for the norm of all gradients.
#   Ours sends 24 bytes more, with which the ranks agree on the order of the layers.
# - `fully_shard` sends less, since it gathers embedding, norm and head (131,328 bytes) once in a step instead of twice.
#   This saves (N − 1)/N of these bytes.
#
# With `stage3_prefetch_bucket_size: 0`, DeepSpeed prefetches nothing and gathers each parameter separately.
# `fully_shard` gathers all parameters of a layer in one collective. These are the collectives in a step of this model,
# which has one layer:

# %%
for turn, name in enumerate(NAMES):
    print(f"{name}: {dict(sorted(talk.counts(0, 4 * turn + 3).items()))}")

# %% [markdown]
# ## What the defaults hide
#
# `like_zero` sets values that most people leave to their defaults. What happens if you leave them out? Change one at a
# time:
#
# - **`gradient_clipping`**. Since June 2026, the default clips gradients to a norm of 1, because most people want that
#   ([pull request 8068](https://github.com/deepspeedai/DeepSpeed/pull/8068)). Before, the default clipped nothing. So
#   the same file gives a different training run under a newer release.
# - **`use_multi_rank_bucket_allreduce`**. The default is on, and makes stages 1 and 2 send 3Ψ.
# - **The thresholds of stage 3**. A parameter of at most 100,000 elements is never sharded, and every parameter of this
#   model is smaller. A parameter also stays gathered if it is used again before a billion other elements are. Either
#   default alone would leave this model's parameters gathered.
#
# Predict the effect of the third on this small model: how many times Ψ does a rank send in a step, instead of 3?

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
    """Return the bytes that rank 0 sends in the third step, in units of 4 Ψ (N − 1)/N."""
    return round(each.recording.sent(0, 3 * turn + 2) / (4 * PSI / 2), 2)


def as_before(turn):
    return all(abs(a - b) < 1e-5 for a, b in zip(each[0][turn], each[0][0], strict=True))


turns = enumerate(VARIANTS)
draw.table([{"": v, "sent, × Ψ": times_psi(i), "same curve": as_before(i)} for i, v in turns])

# %%
why = "P is gathered once a step."
check.predict("Times Ψ, by its own thresholds:", guess_psi, times_psi(4), reason=why)

# %% [markdown]
# With the second file the losses differ, because gradients were clipped. Whoever compares two libraries by their
# defaults may compare two different trainings. `OWN` turns `memory_efficient_linear` off, because stage 3 would
# otherwise replace `torch.nn.functional.linear` in the whole process by a version that saves less for backward.
#
# One more difference is silent. A PyTorch loop may call `backward` twice before `step`, for two losses or two
# micro-batches, and the gradients add up. Below, the two gradients are 1 and 10, and the learning rate is 1, so PyTorch
# would change the weight by 11. Predict for each stage: by how much does DeepSpeed change it?


# %%
def two_backwards(stage):
    """Return by how much a weight changes in a step."""
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
# In stages 1 and 2 the first gradient is lost. The default of `gradient_accumulation_steps` is 1, so a step has one
# micro-batch, and the engine treats every backward as a whole step. Set it to 2, and call `step` after each backward,
# as DeepSpeed's documentation says. The engine then updates once, by the mean gradient.
#
# One more default does not show in any loss curve. Gradients wait in a **bucket** until they are reduced, and every
# rank allocates one of `reduce_bucket_size` elements. The default is 500 million *elements*, whatever the size of the
# model. How many MB is that in float32?

# %%
guess_bucket = 2000  # your number

check.predict("The bucket, MB:", guess_bucket, 500_000_000 * 4 / 1e6)

# %% [markdown]
# So each rank would allocate 2 GB for the model above, whose parameters take 0.3 MB. Others found this out before you:
# *Why ZeRO-2 use more CUDA Memory than ZeRO-1?* ([issue 1302](https://github.com/deepspeedai/DeepSpeed/issues/1302),
# 2021, and still open). The answer there was that communication buffers take GBs by default, and that the defaults suit
# larger models.
#
# ## Build: a configuration from a description
#
# A file has three batch sizes. `train_batch_size` is the number of sequences in a step, on all ranks together.
# `train_micro_batch_size_per_gpu` is the size of a micro-batch on one rank. `gradient_accumulation_steps` is the number
# of micro-batches in a step. The first is the product of the other two and the number of ranks, so any two of the three
# determine the third.
#
# ### Exercise 1: write it (5 minutes)
#
# Write a configuration for ZeRO's stage 2 in bfloat16 (the key is `bf16`, with `enabled` in it). The check judges what
# the file means, so several answers are right. DeepSpeed then takes a step with one of your files.


# %%
def configure(batch, most, ranks, clip):
    """Return a configuration of DeepSpeed, as a dictionary.

    batch: number of sequences in a step, on all ranks together
    most: largest micro-batch for which a rank has memory; choose the largest micro-batches
        of equal size that fit
    ranks: number of ranks
    clip: norm to which gradients are clipped, or None for no clipping
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
# You will meet this error one day. It is quoted from [issue
# 6914](https://github.com/deepspeedai/DeepSpeed/issues/6914), of 2024:
#
#     Check batch related parameters. train_batch_size is not equal to
#     micro_batch_per_gpu * gradient_acc_step * world_size 8 != 2 * 1 * 1
#
# The file is right for some number of ranks. Which one? If the last factor is 1 although you have more GPUs, the
# processes were started without a launcher, and each one believes that it is alone.
#
# ### Exercise 2: mend it (5 minutes)


# %%
def mend(train, micro, accumulation, ranks):
    """Return two numbers: the ranks that fit these sizes, and a new accumulation for `ranks`.

    The new accumulation keeps `train` and `micro`; it is None if no accumulation does.

    train: sequences in a step, a multiple of micro × accumulation
    micro: sequences in a micro-batch
    accumulation: micro-batches in a step, as the file has it
    ranks: number of ranks that you have
    """
    ### BEGIN SOLUTION
    new, rest = divmod(train, micro * ranks)
    return train // (micro * accumulation), None if rest else new
    ### END SOLUTION


check.mend(mend)

# %% [markdown]
# ## From FSDP's words to DeepSpeed's
#
# You have a training run with `fully_shard`, and want the same one under DeepSpeed. Some of its settings have one key
# there, and some have two. `reshard_after_forward=False` has no key of its own; `stage3_max_reuse_distance` comes
# nearest, a distance within which parameters stay gathered:
#
# | within `zero_optimization` | |
# |---|---|
# | `stage3_param_persistence_threshold` | a parameter of at most this many elements is never sharded |
# | `stage3_max_reuse_distance` | a parameter stays gathered if it is used again within this many elements |
# | `stage3_prefetch_bucket_size` | at most this many elements are prefetched |
# | `offload_param`, `offload_optimizer` | `{"device": "cpu"}` stores them on the CPU between two uses |
#
# | outside of it | |
# |---|---|
# | `communication_data_type` | `"fp32"` or `"bf16"`: dtype in which gradients are sent; by default the parameters' |
#
# A `mesh` of one axis has no key: DeepSpeed uses all ranks that were started.
#
# ### Exercise 3: translate (10 minutes)
#
# The check runs your translation: for some settings, `fully_shard` and DeepSpeed train the same small model on two
# ranks. The bytes sent in a step, the parameters held after it and the final numbers must agree. If you set no bucket
# size, the check sets a small one.


# %%
def translate(reshard, param_dtype, reduce_dtype, offload, max_norm, micro, accumulation):
    """Return a configuration with which DeepSpeed trains as fully_shard does.

    reshard: the reshard_after_forward of fully_shard
    param_dtype: of its MixedPrecisionPolicy, torch.float32 or torch.bfloat16
    reduce_dtype: of its MixedPrecisionPolicy, torch.float32 or torch.bfloat16
    offload: whether fully_shard has a CPUOffloadPolicy
    max_norm: the argument of clip_grad_norm_, or None if it is not called
    micro: sequences in a micro-batch, on one rank
    accumulation: micro-batches in a step
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
# Here is the course's own translation. Choose settings of `fully_shard`, and read the file for DeepSpeed:

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
# Now translate back. Choose a file for a model of 7 billion parameters. Some files have no counterpart in
# `fully_shard`.


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
# Does DeepSpeed do what the file says? Let parameters be in bfloat16, and let gradients be reduced in float32. Each
# parameter is sent twice in bfloat16, and its gradient once in float32. How many bytes per parameter is that, in units
# of (N − 1)/N?

# %%
guess_mixed = 8  # your number

mixed, kept = (4 * times_psi(len(VARIANTS) + turn) for turn in range(2))
print(f"reshard_after_forward=False: {kept:.1f} bytes for each parameter, times (N - 1)/N")
check.predict("bfloat16 and float32:", guess_mixed, round(mixed, 1))

# %% [markdown]
# ## What its estimators leave out
#
# DeepSpeed estimates what a model will need by `estimate_zero2_model_states_mem_needs_all_live` and similar functions.
# For stage 2 the estimate is 2Ψ + 18Ψ/N bytes on each of N ranks: 2 per parameter for P in 16 bits, and a shard of 2 +
# 4 + 12, for G in 16 bits, G in 32 bits and S. [labs/deepspeed/estimates.py](../labs/deepspeed/estimates.py) has the
# estimates in closed form.
#
# ### Exercise 4: what is left out (5 minutes)
#
# In float32 training, each rank holds all of P, 4 bytes per parameter, and a shard of G (4 bytes) and of S (12 bytes).
# In mixed precision the estimate of P, G and S is right. In both cases the estimate leaves out the activations and one
# bucket, which has the dtype of the parameters.


# %%
def left_out(parameters, ranks, activations, bucket, float32):
    """Return the bytes that a rank holds under stage 2 beyond the estimate, 2Ψ + 18Ψ/N.

    parameters: Ψ, the number of parameters
    ranks: N, the number of ranks
    activations: bytes of activations for this rank's sequences
    bucket: size of the bucket, in elements
    float32: True if everything is in float32; False for mixed precision, with parameters in
        16 bits
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
# The estimate ignores tokens and buckets, and your function adds both. Your answer still misses temporary tensors,
# which grow with the tokens: at 512 tokens it is 18 % below `labs/cost`, which includes them. `labs/cost` is a formula
# as well; its tests compare it with measured peaks. [Issue 5102](https://github.com/deepspeedai/DeepSpeed/issues/5102),
# of 2024, has a longer list.
#
# ## Recomputed, and compiled
#
# You may add two things to a training run: activation checkpointing (notebook 07) and `torch.compile`. DeepSpeed has
# its own checkpointing function, and PyTorch's works as well. How many bytes of activations does a rank hold at its
# peak with each?


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
    """Return the peak bytes of activations in the third step, beyond those before the first."""
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
# FSDP2 and DeepSpeed are equal to the byte: the bytes of activations that a layer keeps do not depend on who shards its
# parameters. DeepSpeed's own function keeps a little more than PyTorch's. It can also shard what it keeps over the
# ranks of a tensor-parallel group, or move it to the CPU.
#
# Now trace each layer with `torch.compile`, and then shard it. `backend="eager"` traces the layers but generates no
# code, so this cell shows only that tracing does not change bytes or losses; it says nothing about speed. DeepSpeed
# runs stage 2 here: in stage 3 it gathers through hooks on every module, which are traced as well, until PyTorch's
# limit of recompilations is reached.


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
# | is configured | in code: `fully_shard(layer)` | in a file | above |
# | gathers | a layer in one collective | without prefetch, each parameter separately | counted above |
# | S, in float32 | 8 bytes | 12, with masters | measured above |
# | clips gradients | when you call it | unless you say 0 | measured above |
# | its optimizer | any of PyTorch's | its own, compiled at first use; or PyTorch's | DeepSpeed, 10/2026 |
# | offload to the CPU | yes | yes | run in notebook 07b; run in exercise 3 |
# | offload to NVMe | no | on Linux, with a C++ compiler and libaio | PyTorch, 7/2026; DeepSpeed, 10/2026 |
# | activation checkpointing | PyTorch's | the same; or its own, cut over TP, or on the CPU | measured; docs, 11/2026 |
# | compile | each layer, then `fully_shard` | each layer, or `engine.compile()` | traced above; DeepSpeed, 10/2026 |
# | inference | sharded, as in training | the same in stage 3; its own engine | docs of both, 11/2026 |
# | a checkpoint is loaded by | any number of ranks | the same number; any, once converted | notebook 08; its test |
# | a checkpoint is | tensors and an index | pickles: load only those you trust | notebook 08; its test |
#
# *PyTorch, 7/2026* means that the code of its release 2.13 of July 2026 was read, and *DeepSpeed, 10/2026* means that
# of [release 0.19.8](https://pypi.org/project/deepspeed/0.19.8/) of October 2026. The docs are those of PyTorch on
# `fully_shard`, and those of deepspeed.ai on activation checkpointing and on inference, read in November 2026. The test
# is [tests/deepspeed/test_saved.py](../tests/deepspeed/test_saved.py), which runs at each change of this course. It
# shows that an offloaded training run ends with the same numbers, and that a run saved by four ranks continues on two
# once it is converted.
#
# **Why**: DeepSpeed offers what you would otherwise have to write, above all offload to disk, and a model needs no
# change. **Why not**: settings that the file leaves out are decided by defaults, which may change with a release. So
# write down what you rely on, and measure the rest once.
#
# ### A way out
#
# A few lines of a training script change. The script below imports only the data and the model from this course; use
# your own in their place.
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
# Here is the file, with everything that you rely on. These small numbers make two libraries comparable. For a large
# model choose larger buckets, and allow prefetch.

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
# Look for a default that changed. Gradients are clipped by default since June 2026, so write `gradient_clipping` into
# the file, even as 0.
# </details>
#
# <details><summary>Why do stages 1 and 2 send half as much again as ours, and what turns it off?</summary>
#
# DeepSpeed all-reduces a bucket that has gradients for several ranks. With `use_multi_rank_bucket_allreduce: false`,
# each shard is reduced only to the rank that needs it, which sends 2Ψ.
# </details>
#
# <details><summary>DeepSpeed estimates 1 GB for a model, but a card of 4 GB is too small. What does the estimate leave
# out?</summary>
#
# It leaves out the activations, which grow with the tokens; the bucket, by default 1 GB in 16 bits and 2 GB in float32;
# and, in float32, the wider parameters.
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
# This part is optional and open: no answer is the last one. Two ranks train three models of linear layers, with AdamW
# in float32. Each model has a memory budget, in bytes beyond those held before the model was made. A message takes
# latency + bytes/bandwidth. You write the file: how many rows a rank reads in a micro-batch, and the entries of
# `zero_optimization`. Nothing is offloaded. DeepSpeed trains with your file, and its losses must equal those of one
# process. The score counts the time of the third step's messages on the busier rank. The budget limits the peak of the
# fuller rank in a steady step.
#
# **The bound.** Let Ψ be the number of parameters, α the latency, W the bandwidth, and t the time of a rank's messages.
# Then t ≥ α + 4Ψ/W. Nothing can beat it, because a rank's new parameters depend on all Ψ numbers of the other rank's
# gradient, so 4Ψ bytes must be sent, in at least one message. The score is 100 × bound/t, and your points are the mean
# of the three. `from_fsdp(reshard_after_forward=False)`, with buckets of 1,500 elements and at most 16 rows in a
# micro-batch, fits everywhere and scores 22.0.

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
# `measured` tries files in one of the three setups, as the judge does. It returns exact bytes; the tables round to kB.

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
    """Return a configuration of DeepSpeed that fits the budget and sends quickly.

    It has two keys: train_micro_batch_size_per_gpu, which divides rows, and zero_optimization,
    whose values are numbers and switches.

    widths: the model has a linear layer with bias from each width to the next
    rows: number of rows that a rank reads in a step
    budget: bytes that a rank may hold
    latency: seconds per message
    bandwidth: bytes per second
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
# The course's answer avoids stage 3, which needs more messages, and spends all spare memory on the bucket.
#
# <details><summary>Where is there room?</summary>
#
# Reduce the number of buckets. Memory does not grow evenly with their size: a bucket that just fits two layers costs
# less than one that nearly does. If gradients accumulate over micro-batches, smaller micro-batches leave room for one
# bucket that holds all gradients.
# </details>

# %% [markdown]
# **Read on**: [labs/deepspeed/configuration.py](../labs/deepspeed/configuration.py),
# [labs/deepspeed/saved.py](../labs/deepspeed/saved.py), on its checkpoints, and
# [labs/cost/deepspeed_stages.py](../labs/cost/deepspeed_stages.py). Rajbhandari et al., 2020, *ZeRO* (arXiv
# 1910.02054).
#
# **Next.** You, a compiler or a file can decide what the ranks send. There are fifteen thousand layouts for a model on
# 32 GPUs alone. Which one is the best, and how can you know before you rent a GPU? [Plan a run](15_plan_a_run.ipynb).
#
# A clean copy of this notebook: `git restore notebooks/14_deepspeed.ipynb`, then *File > Reload Notebook from Disk*.
