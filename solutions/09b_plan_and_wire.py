# %% [markdown]
# # Tensor parallelism, second part: the loss, the plan, and the wire
#
# *For one sequence, the last product of Llama 3 405B gives 4.2 GB of numbers, and all of them for one number, the loss.
# Where can they lie, and what must the ranks tell each other?*
#
# You need: [Tensor parallelism](09_tensor_parallel.ipynb); for the second axis, [FSDP](06_fsdp.ipynb).
# **Minutes**, by estimate: 25 without exercises, 50 with them, 5 more for optional parts, 25 more for the challenge.
# The machine works for about a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("09b")

# %% [markdown]
# ## Question
#
# A model ends with its *output head*: for each token a number for every entry of the vocabulary, its *logits*. Where
# the head is split, each rank has the logits of its own part. The loss needs all of them, or so it seems:

# %%
import inspect
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs import cost
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import Link, run
from labs.kit.record import mark

reduce = check.conjugate.reduce  # of the last notebook

# %%
from labs.model import PRESETS

llama = 4 * PRESETS["llama3-405b"].vocab * 8192 / 1e9
print(f"for a sequence of Llama 3: {llama:.1f} GB of logits in float32")
print(f"an eighth of them: {llama / 8:.2f} GB")

# %% [markdown]
# ## Picture
#
# ![Four ranks, each with a block of logits: all tokens, and a quarter of the vocabulary. From each block go three
# numbers per token, of which one only where the target is. The loss is made of them, the same on every
# rank.](../images/split_loss.svg)
#
# ## Predict
#
# One could also gather the logits on every rank, and compute the loss there. With four ranks, a vocabulary of 256 and
# float32, how many bytes more does a rank send for each token than with the picture's three numbers, which are
# all-reduced?

# %%
guess_more = 750  # your number

# %% [markdown]
# ## Build: a loss that never gathers the logits
#
# Gathering the logits would undo the saving. But look at what the loss of a token is:
#
#     loss = log(sum of exp(logit - highest)) - (target's logit - highest)
#
# It takes three numbers per token: the highest logit, a sum of exponentials, and the logit of the target. The first is
# a maximum over all ranks, the second a sum, and the third is on one rank only (if the others contribute zero, it is a
# sum too). The highest is subtracted because exp(100) is infinite in float32. It cancels, so its gradient is not
# needed: it may come from a detached tensor, by an all-reduce with `dist.ReduceOp.MAX`.
#
# ### Exercise 1: the loss of a split vocabulary (15 minutes)
#
# With `reduce` of the last notebook, autograd finds the gradient by itself. (The lines that are given pad the logits
# with one more column, of −inf. Where that column is picked, −inf × 0 is not a number: use `where` or `masked_fill`.)
# The check compares the loss and the gradient of the logits on 1 to 8 ranks and in sub-groups, with vocabularies that
# the number of ranks does not divide (any rank may have no column at all), with logits of ±10,000, and with a gradient
# of the loss other than 1. It measures bytes sent and held. Budget: three numbers per token, nothing backward, and
# never a gathered logit. At most 12 all-reduces: the tokens may go in a few parts, but not one by one.


# %%
def split_loss(logits, targets, first, group=None):
    """The mean cross-entropy of all tokens, in nats (0-dim), the same on all ranks.

    logits: [tokens, v], this rank's part of the vocabulary, which begins at `first`; v may be 0
    targets: [tokens], of the whole vocabulary, on every rank
    """
    v = logits.shape[1]
    here = (targets >= first) & (targets < first + v)  # the targets in this rank's part
    column = (targets - first).where(here, v)  # for the other targets, one behind the last
    logits = F.pad(logits, (0, 1), value=-torch.inf)  # that column, so there is always one
    ### BEGIN SOLUTION
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    mine = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    exponentials, target = reduce(torch.stack([shifted.exp().sum(1), mine]), group)
    return (exponentials.log() - target).mean()
    ### END SOLUTION


check.split_loss(split_loss)

# %% [markdown]
# How much is it worth? Here is the last notebook's GPT once more, by a plan that gathers the logits and takes the
# ordinary loss, beside what the formulas say of `gpt_plan`:

# %%
from labs.kit.train import in_turn, recorded, strategies
from labs.model import GPT
from labs.tp import gpt_plan

CONFIG, SEQUENCES = replace(PRESETS["small"], depth=2, kv_heads=4), 4  # as in the last notebook
on_cpu, loader = partial(run, device="cpu"), Batches(corpus().tokens, SEQUENCES, CONFIG.context)
batches = [loader[number] for number in range(2)]


def float32():
    return GPT(CONFIG)


# %%
from labs.dtensor import Replicate, Shard
from labs.mesh import Mesh
from labs.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from labs.tp.conjugate import gather, scatter
from labs.tp.shares import Keys, Queries

plan = gpt_plan(CONFIG) | {"head": ColwiseParallel(output_layouts=Replicate())}
del plan["loss"]
talk = recorded({"logits gathered": strategies.by_plan(plan)}, float32, batches)

on_paper = cost.Job(CONFIG, batch=SEQUENCES, ranks=4)
more = (talk["logits gathered"]["sent"] - cost.tp(on_paper).sent) / (SEQUENCES * CONFIG.context)
reason = "3/4 of 256 numbers are gathered; 3 numbers are all-reduced, at 2 × 3/4 of each."
check.predict("Bytes more for each token?", guess_more, more, unit="bytes", reason=reason)

# %% [markdown]
# ## Build: the plan
#
# Everything so far fits in one table, from the name of a submodule to the style in which it is split. A module without
# a row stays whole on every rank. The names of the styles are PyTorch's, all but the last; the argument `heads=` is the
# course's. Below, `between` is the layout that x has between the pairs: `Replicate()` where it is whole, `Shard(1)`
# where each rank has a part of the tokens (dim 1).
#
# - `ColwiseParallel()` and `RowwiseParallel(output_layouts=between)` are the two halves of a pair. With `heads=`, a
#   `Queries(H, K)` or `Keys(H, K)` of [labs/tp/shares.py](../labs/tp/shares.py), they cut between heads only.
# - `PrepareModuleInput(input_layouts=between)` is the border in front of a pair, for a module that has the pair in it.
#   What several columns read crosses it once.
# - `SequenceParallel()` is for a module that sees a part of the tokens. The gradients of its parameters are added up.
# - `LossParallel(vocabulary)` is exercise 1.
#
# A name may be a pattern: in `layers.*.mlp.[gu]*`, the first `*` is any layer, and the rest are `gate` and `up`.
#
# ### Exercise 2: the plan of a block that you have not seen (10 minutes)
#
# The block below is nowhere else in the course. Somebody has trained it on one device, and it has to be split over 2
# ranks, and over 4, without a change to its code:

# %%
Stranger, Mixer, FeedForward = (
    check.block_plan.Stranger,
    check.block_plan.Mixer,
    check.block_plan.FeedForward,
)

print(*map(inspect.getsource, (Mixer, FeedForward, Stranger)), sep="\n\n")

# %% [markdown]
# Write its plan. The check tries it with fewer heads of keys and values than ranks, too, and with heads that cannot be
# dealt out evenly.
#
# <details><summary>A first hint</summary>
#
# Follow one token through `forward`, and write beside each line what a rank can have there: x, some of the features, or
# a summand. Where does a line meet two tensors that are split?
# </details>
#
# <details><summary>A second hint</summary>
#
# A rank that has a head needs all that belongs to the head. How many matrices is that? The width of a matrix does not
# tell.
# </details>
#
# <details><summary>A third hint, on what is sent</summary>
#
# Four matrices of the mixer read the same x. And with sequence parallelism, who sees only a part of the tokens, and has
# parameters?
# </details>


# %%
def block_plan(config, sequence_parallel):
    """{name of a submodule: style} for Stranger(config), so that

    - output and gradients are those of one process;
    - a rank holds its part of every matrix, and no more;
    - it sends two collectives forward and two backward; with sequence_parallel four and four,
      and the gradients of two norms; and where ranks share a head, those of keys and values.

    config has `heads` and `kv_heads`.  x comes in and goes out whole; with sequence_parallel,
    each rank has a part of dim 1.
    """
    ### BEGIN SOLUTION
    between = Shard(1) if sequence_parallel else Replicate()
    queries, keys = (kind(config.heads, config.kv_heads) for kind in (Queries, Keys))
    split = {
        **dict.fromkeys(("mixer", "ffn"), PrepareModuleInput(input_layouts=between)),
        **dict.fromkeys(("mixer.query", "mixer.gates"), ColwiseParallel(heads=queries)),
        "mixer.[kv]*": ColwiseParallel(heads=keys),
        "mixer.out": RowwiseParallel(heads=queries, output_layouts=between),
        "ffn.w[13]": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=between),
    }
    return split | ({"norm_*": SequenceParallel()} if sequence_parallel else {})
    ### END SOLUTION


check.block_plan(block_plan)

# %% [markdown]
# And here is the plan of the course's own model, `gpt_plan(config, sequence_parallel=True)`: what a rank has of each
# weight (drawn as in the last notebook's products: inputs down, outputs across), and what crosses each border. This
# model has four query heads and two heads of keys and values, so that on four ranks, two ranks share each of the
# latter. `*` stands for one part of a name.

# %%
draw.plan(gpt_plan(PRESETS["small"], sequence_parallel=True), GPT(PRESETS["small"]))

# %% [markdown]
# You can write a plan like this for your own model, with the names of its submodules. What a rank then has is an
# ordinary parameter of a smaller shape. So the other strategies need not know about the plan, and neither need an
# optimizer that treats every number by itself, as AdamW does. (One that needs whole matrices, like Muon, must know. So
# must the norm of all gradients, in which a gradient that every rank has whole counts once: `clip_gradients` of
# [labs/tp/tp.py](../labs/tp/tp.py).)
#
# ## The tensor-parallel explorer
#
# Here is a GPT with Llama 3's proportions: which slice of each matrix is on which rank, what rank 0 sends, and what it
# holds, by the formulas of the last notebook. Three questions to put to it:
#
# - On how many ranks do neighbours begin to share heads of keys and values, and what do they send for it?
# - On 8 ranks, put x in shards. What shrinks, and what does it cost in bytes sent?
# - Double the sequence: what doubles? And double the width?

# %%
play.tensor_parallel()

# %% [markdown]
# <details><summary>Answers</summary>
#
# On 16, since there are 8 heads of keys and values: two small all-reduces in each layer, of the gradients of k and v.
# Activations shrink, and almost nothing is sent in addition. Doubling the sequence doubles all that is sent, and the
# activations; P, G and S stay the same. Doubling the width doubles what is sent, too, but a layer's parameters grow
# about fourfold: wide models are where TP pays.
#
# </details>
#
# ## Native
#
# PyTorch's own `parallelize_module` takes a table like this, too.
# [labs/native/parallelized.py](../labs/native/parallelized.py) turns ours into its styles. Its parameters are DTensors,
# and the loss of split logits is a context, `loss_parallel()`. Ours is what the formulas say, as the last notebook has
# measured; PyTorch's is measured here, with sequence parallelism:

# %%
row = replace(strategies.ROWS["torch-tp-sp"], axes=lambda ranks: {"tp": ranks})
NATIVE, ALONE = {"PyTorch's": row}, {"one device": strategies.ROWS["one device"]}


def float64():
    return GPT(CONFIG).double()


def off(kept):
    """How far these parameters are from one process's."""
    return max((p - expected["one device"][key]).abs().max() for key, p in kept.items())


[expected] = on_cpu(in_turn, ALONE, float64, batches, keep=2, ranks=1)
[kept] = on_cpu(in_turn, NATIVE, float64, batches, keep=2, ranks=4, tell="numbers")[0].values()
print(f"within 1e-12 of one process: {bool(off(kept) < 1e-12)}")

# %%
[theirs] = recorded(NATIVE, float32, batches).values()
job = on_cpu(in_turn, NATIVE, float32, batches, ranks=4, record="memory", tell="what is held")
theirs |= job.recording.steady(0)

said = cost.tp(on_paper, sequence_parallel=True)
ours = {"sent": said.sent, "collectives": sum(said.collectives.values()), "in the optimizer": 0}
ours |= vars(said.held)
assert all(ours[kind] == theirs[kind] for kind in "PS")

shown = ("sent", "collectives", "in the optimizer", *"PGSA")
both = {"ours": ours, "PyTorch's": theirs}
rows = [{"": whose} | {kind: each[kind] for kind in shown} for whose, each in both.items()]
draw.table(rows, caption="bytes, rank 0")

# %% [markdown]
# Where PyTorch does more:
#
# - The loss adds up the exponentials and the targets' logits in two all-reduces; ours does it in one.
# - It leaves the norms' gradients as they are, `Partial()`. They are added up whenever they
#   are read, and AdamW reads each of the five three times.
# - The gradient of the embedding is as large as the whole embedding on every rank. Ours has the rank's own rows.
#
# PyTorch's also cuts features without regard to heads. With fewer heads of keys and values than ranks, you must repeat
# the heads by hand. (Bytes are logical: on CPUs its reduce-scatter is gloo's, which carries more, as in notebook 04.)
#
# ## Two axes: FSDP over TP
#
# TP cannot use more ranks than there are heads, and in practice no more than a node has. So it becomes one axis of a
# mesh, and FSDP the other: first split the model along `tp`, then shard what each rank has of it along `dp`. Ranks
# along `tp` read the same sequences; ranks along `dp` read different ones. Here are two nodes of two ranks each
# (notebook 05's `Link`), and the axes in both orders:

# %%
from labs.fsdp import fully_shard
from labs.tp import full_parameters, parallelize


def two_axes(model, mesh):
    """TP along one axis of the mesh, and FSDP along the other."""
    parallelize(model, mesh["tp"], gpt_plan(model.config, sequence_parallel=True))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    training = strategies.replicated(model, partial(strategies.backward, model))
    return replace(training, full=partial(full_parameters, model))


def of_axes(*names):  # outermost first
    row = strategies.ROWS["fsdp-tp"]
    return replace(row, apply=two_axes, axes=lambda ranks: dict.fromkeys(names, 2))


# %%
nodes, many = Link(nodes=2, bandwidth="1 Gbit/s"), Batches(corpus().tokens, 16, CONFIG.context)
two = [many[0], many[1]]
AXES = {" × ".join(names): of_axes(*names) for names in (("dp", "tp"), ("tp", "dp"))}
kept = on_cpu(in_turn, AXES, float64, batches, keep=2, ranks=4, tell="numbers")[0]
wired = {"record": "communication", "link": nodes, "tell": "bytes"}
seen = on_cpu(in_turn, AXES, float32, two, ranks=4, **wired).recording

# %%
half = cost.Job(CONFIG, batch=8, ranks=4)  # of the 16 sequences, a TP group reads 8
due = cost.fsdp_tp(half, sequence_parallel=True).sent
rows = []
for second, name in zip((1, 3), AXES, strict=True):
    leaves = seen.across(0, second) + seen.across(1, second)
    assert seen.sent(0, second) == due
    row = {"": name, "within 1e-12 of one process": bool(off(kept[name]) < 1e-12)}
    rows.append(row | {"sent by rank 0": due, "leaves a node": leaves})
draw.table(rows, caption="the last axis is made of neighbours; bytes in a step of 16 sequences")

# %% [markdown]
# Both orders give the right numbers, and send what the formulas of TP and FSDP say (`cost.fsdp_tp`). With `tp` last,
# the ranks of a TP group are neighbours and share a node. With `tp` first, all that TP sends crosses between the nodes.
# That is why TP goes last on a mesh. (Llama's authors list their axes the other way round: TP, their first one, is the
# innermost.)
#
# > **What went wrong in the wild.** *Symptom*: the loss of a fresh model is 47.88, where log(151,936), about 11.93, is
# > due. Each rank divides its sum by the number of tokens in the whole batch, and Hugging Face's trainer multiplied by
# > the number of ranks, so that the mean over all of them comes out right. On eight ranks along `dp` it is 11.97. On 2
# > × 4, where the second axis holds experts, the four ranks along it read the *same* tokens, and the loss counted four
# > times ([transformers#45994](https://github.com/huggingface/transformers/pull/45994), May 2026). What is averaged
# > over data must be counted along the axes that split the data, and along no other.
#
# ## Optional: latency, when a token gets slower
#
# TP also serves inference: a model that generates text has one token to compute at a time, and needs *all* its weights
# for it. Most of the time goes into reading them from memory, and each of N ranks reads only an N-th. `generate` keeps
# the keys and values of earlier tokens in a *cache* ([labs/generate.py](../labs/generate.py)), so that only the new
# token goes through the model. A rank caches its own heads. All ranks see the same logits, and draw with the same seed:

# %%
from labs.generate import cached, generate

CHAT = replace(PRESETS["medium"], dim=256, depth=4, heads=8, kv_heads=4, hidden=704)
prompt = torch.tensor([list(b"def all_reduce(")])


def split():
    """The model: whole on one rank, split on several."""
    return parallelize(GPT(CHAT), Mesh((dist.get_world_size(),), ("tp",)), gpt_plan(CHAT))


def answer():
    return generate(split(), prompt, 12, temperature=0.8, seed=1).tolist()


answers = [on_cpu(answer, ranks=ranks, tell="12 tokens")[0] for ranks in (1, 2, 4)]
print(f"the same tokens on 1, 2 and 4 ranks: {answers[0] == answers[1] == answers[2]}")

# %% [markdown]
# And how long does a token take? With pencil and paper (`cost.token_seconds`) it has three parts: reading the weights;
# *messages*, the time that a collective takes however little it carries; and *bytes*, the time that its data adds. A
# slow wire shows the last two. Here is one between two ranks, the same for the formula and for the job:


# %%
def token_by_token(tokens=16):
    model, token = split(), prompt
    with cached(model, prompt.shape[1] + tokens):
        for _ in range(tokens):
            mark("step")
            token = model(token)[:, -1:].argmax(-1)
    mark("end")


# %%
slow = Link(nodes=2, bandwidth="100 Mbit/s", latency=2e-3)
seen = on_cpu(token_by_token, ranks=2, link=slow, record="communication", tell="wire").recording
the_same = cost.LinkClass(0, latency=2e-3, bandwidth=12.5e6, algorithms=(cost.ring_seconds,))
token = cost.token_seconds(CHAT, 2, the_same, itemsize=4)
assert seen.sent(0, 5) == 4 * cost.token_sent(CHAT, 2).elements
took = min(span.end - span.start for span in seen.step_spans(0)[1:])  # without the prompt
print(f"a token: {seen.sent(0, 5):,} bytes in {seen.counts(0, 5).total()} collectives")
print(f"at least {1e3 * token.messages:.0f} ms for messages", end=", ")
print(f"{1e3 * token.bytes:.1f} ms for bytes; it took {1e3 * took:.0f} ms")

# %% [markdown]
# A token has two all-reduces per layer, one for the embedding and a gather of the logits, all one after the other. Each
# of the nine all-reduces crosses the wire twice, and the gather once: 19 × 2 ms. For so small a model, a token is so
# little data that bandwidth hardly counts. The rest, compute, Python, waiting and recording, is not taken apart here.
#
# So TP pays for a model whose weights take longer to read than its all-reduces take to begin. Here is the same formula
# for Llama 3 8B in 16 bit on two links (`cost` names its sources):

# %%
rows, llama = [], PRESETS["llama3-8b"]
for name in ("NVLink 4", "Ethernet, 10 Gb/s"):
    on = {n: cost.token_seconds(llama, n, cost.LINKS[name]) for n in (1, 2, 4, 8)}
    row = {f"on {n}": each.seconds for n, each in on.items()}
    row |= {"on 8: messages": on[8].messages, "on 8: bytes": on[8].bytes}
    rows.append({"": name} | {kind: round(1e3 * seconds, 2) for kind, seconds in row.items()})
draw.table(rows, caption="a token on 1 to 8 ranks, in ms")

# %% [markdown]
# With NVLink eight ranks are four times as quick as one. With Ethernet two gain a little, and eight nothing.
#
# ## Optional: async TP, multiply while it travels
#
# In training, too, a rank waits at each border: the next product needs what is on its way. But it does not need all of
# it at once. With sequence parallelism, the product for one rank's tokens needs these tokens only. So let the ranks'
# shards go round a ring, one by one, and multiply each while the next one travels. At the other end the sums go round,
# and each rank adds the product of its own part. [labs/tp/async_tp.py](../labs/tp/async_tp.py) has both,
# `gather_linear` and `linear_scatter`. Here are the two matrices of the last notebook's first picture, forward, on two
# ranks and a slow wire. (A sleep makes each product longer, by 80 µs per token, so that the picture depends less on how
# busy your machine is.)

# %%
from torch.overrides import TorchFunctionMode

from labs.tp.async_tp import gather_linear, linear_scatter


class Padded(TorchFunctionMode):
    """Within it, each product takes longer."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            time.sleep(80e-6 * result.shape[1])
        return result


def whole(x, up, down, mesh):
    """Gather, multiply twice, scatter."""
    return scatter((gather(x, mesh, dim=1) @ up.T).relu() @ down.T, mesh, dim=1)


def in_chunks(x, up, down, mesh):
    (hidden,) = gather_linear(x, [up], mesh)
    return linear_scatter(hidden.relu(), down, mesh)


TOKENS, WIDTH, PAIRS = 128, 256, {"one after the other": whole, "in chunks": in_chunks}


# %%
def both(times=12):
    """Run each of the two several times; whether they give the same result."""
    torch.manual_seed(dist.get_rank())  # different tokens, and different parts of the matrices
    mesh, results = Mesh((dist.get_world_size(),), ("tp",)), []
    x = torch.randn(1, TOKENS, WIDTH) / 16
    up, down = torch.randn(2 * WIDTH, WIDTH) / 16, torch.randn(WIDTH, 2 * WIDTH) / 16
    for pair in PAIRS.values():
        for _ in range(times):
            time.sleep(0.05)  # a gap in the picture
            dist.barrier()  # so that the ranks begin together
            mark("step")
            with Padded():
                results.append(pair(x, up, down, mesh))
            mark("end")
    return torch.allclose(results[0], results[-1], atol=1e-5)


# %%
wire = Link(nodes=2, bandwidth="100 Mbit/s")
found = on_cpu(both, ranks=2, link=wire, record="communication", tell="async TP")
seen, spans = found.recording, [found.recording.step_spans(rank) for rank in range(2)]
assert all(found) and seen.sent(0, 0) == seen.sent(0, 12)


def lasted(number):
    """From the first rank's start to the last one's end, in ms."""
    began = min(each[number].start for each in spans)
    return 1000 * (max(each[number].end for each in spans) - began)


quiet = [min(range(first, first + 12), key=lasted) for first in (0, 12)]
draw.timeline(seen, seen, step=quiet, names=list(PAIRS))

# %%
for name, number in zip(PAIRS, quiet, strict=True):
    waits = 1000 * sum(event.waited for event in seen.select(0, number))
    print(f"{name}: {lasted(number):.0f} ms, of which rank 0 waited {waits:.0f} ms")
travels = 1000 * wire.seconds("send", 4 * TOKENS * WIDTH, ranks=2)
print(f"both send {seen.sent(0, 0):,} bytes; a shard travels {travels:.0f} ms")

# %% [markdown]
# (The picture shows the quickest of twelve steps of each. On CPUs the course makes a reduce-scatter of an all-to-all,
# and adds up what arrives.) The same result and the same bytes, but now a shard travels while another is multiplied. A
# rank now waits only if a shard takes longer to travel than to multiply: here hardly ever, unless your machine is busy.
# In PyTorch this is experimental: torch.compile can do it for a plan like this if you switch it on, between GPUs that
# can read each other's memory. Its authors
# [report](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)
# a forward pass up to 29% faster, and a whole step up to 8%, for a Llama 3 of 7B. It does nothing for a single token,
# which cannot be cut into shards.
#
# ## Measure: does TP send little?
#
# Take the same model, the same batch and the same four ranks under three strategies. DDP sends *gradients*, FSDP
# *parameters and gradients*: as many for one token as for a million. TP sends *activations*, a fixed number for each
# token of the whole batch. So with few tokens it sends the least, and with many the most. From how many tokens in a
# batch does TP send more than DDP, in multiples of the width D?

# %%
guess_tokens = 3  # your number, × D

# %% [markdown]
# First DDP and FSDP as measured, with sequences of 128 tokens. Then by the formulas, for other lengths, too; where TP
# meets DDP, it was measured once more:

# %%
a_part = cost.Job(CONFIG, batch=1, ranks=4)  # DDP, FSDP: a rank has a quarter of the batch
others = {"DDP": strategies.ROWS["ddp-bucketed"], "FSDP": strategies.ROWS["fsdp"]}
talk |= recorded(others, float32, batches)


def sent(length):
    """Bytes that a rank sends in a step with four sequences of this length, by strategy."""
    config = replace(CONFIG, context=length)
    on_part, on_all = replace(a_part, config=config), replace(on_paper, config=config)
    data_parallel = {"DDP": cost.ddp(on_part, "bucketed").sent, "FSDP": cost.fsdp(on_part).sent}
    return {"tokens": SEQUENCES * length} | data_parallel | {"TP": cost.tp(on_all).sent}


rows = {name: (sent(CONFIG.context)[name], talk[name]["sent"]) for name in ("DDP", "FSDP")}
ledger = draw.ledger(rows, within=0)
assert ledger.agrees
ledger

# %%
crossed = next(length for length in range(1, 129) if sent(length)["TP"] > sent(length)["DDP"])
short = [tuple(part[:, :crossed] for part in batch) for batch in batches]
talk |= recorded({"at the crossing": strategies.by_plan(gpt_plan(CONFIG))}, float32, short)
assert talk["at the crossing"]["sent"] == sent(crossed)["TP"]
rows = [sent(length) for length in (32, 64, crossed, 128, 256)]
draw.table(rows, caption="bytes that each rank sends in a step")

# %%
met = SEQUENCES * crossed / CONFIG.dim
why = "About 12 D² of a layer's gradients, 4 D for each token."
check.predict("Tokens, × D?", guess_tokens, met, reason=why)

# %% [markdown]
# The crossing is easy to remember. A layer has about 12 D² parameters, of which DDP all-reduces the gradients; TP
# all-reduces 4 tensors of D numbers per token. They are equal at 12 D²/4 D = **3 D tokens** in the batch of a TP group,
# and with FSDP, which sends 1.5 times as much for a layer, at 4.5 D. The embedding and the head move it a little in so
# small a model: here to 2.9 D, and with FSDP, which gathers these two only once, to 4.1 D. In training, batches are
# usually larger.
#
# ## Why, and why not
#
# **Why** is as in the last notebook.
#
# **Why not**: with batches as large as in training it sends the most, and every collective is waited for. Hiding them
# takes extra work (async TP), whereas DDP and FSDP hide theirs easily. Is it worth it? A layer of ψ parameters takes
# 6ψT/(NR) seconds on N devices (T tokens, R operations per second), and its four all-reduces, 2 bytes per number, 16
# (N − 1)/N × TD/W (W bytes per second). T cancels: a larger batch does not help, only a wider model or a faster wire.
# The table gives the seconds on the wire for each second of computing:

# %%
# R is that of an H100 in Llama 3's training, its waiting included (arXiv 2407.21783, table 4).
R, N = cost.FLOPS, 8
WIRES = {name: link.bandwidth for name, link in cost.LINKS.items()}  # bytes/s, each way
rows = []
for name in ("llama3-8b", "llama3-405b"):
    config = PRESETS[name]
    psi = sum(cost.gpt_layers(config)[1].sizes)
    sending = 16 * (N - 1) * config.dim  # bytes, × T/N
    computing = 6 * psi / R  # seconds, × T/N
    shares = {wire: round(sending / W / computing, 2) for wire, W in WIRES.items()}
    rows.append({"on 8 ranks": name} | shares)
draw.table(rows)

# %% [markdown]
# So TP stays where there is NVLink: PCIe inside a node is no better here than InfiniBand between nodes. In this layout
# it cannot use more ranks than there are query heads, and long before that the matrices become too narrow to keep a
# device busy.
#
# ### A way out
#
# Here is PyTorch's `parallelize_module` in an ordinary script, with nothing of the course but the data and the model.
# It is [scripts/tp.py](../scripts/tp.py). From the root of the repository, run
# `torchrun --nproc-per-node 2 scripts/tp.py`.
#
# <details><summary>The script</summary>
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.tensor import Replicate, Shard
# from torch.distributed.tensor.parallel import (
#     ColwiseParallel,
#     PrepareModuleInput,
#     RowwiseParallel,
#     SequenceParallel,
#     loss_parallel,
#     parallelize_module,
# )
#
# from labs.data import Batches, corpus
# from labs.model import GPT, PRESETS
#
# dist.init_process_group()
# device = "cuda" if torch.cuda.is_available() else "cpu"
# if device == "cuda":
#     torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
# mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
#
# shard, whole = Shard(1), Replicate()
# enter = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(whole,))
# plan = {
#     "embed": RowwiseParallel(input_layouts=whole, output_layouts=shard),
#     "norm": SequenceParallel(),
#     "head": ColwiseParallel(input_layouts=shard, use_local_output=False),
# }
# layer = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": enter, "mlp": enter}
# layer |= {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
# layer |= {name: RowwiseParallel(output_layouts=shard) for name in ("attention.o", "mlp.down")}
#
# config = PRESETS["small"]  # two heads of keys and values, so two ranks at most
# model = GPT(config).to(device)
# parallelize_module(model, mesh, plan | {f"layers.*.{name}": style for name, style in layer.items()})
#
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# batches = Batches(corpus().tokens, 16, config.context)
# for step in range(10):
#     x, y = (part.to(device) for part in batches[step])  # all ranks read the same
#     with loss_parallel():
#         loss = model(x, y)
#         loss.backward()
#     for p in model.parameters():  # the norms' gradients are summands, which PyTorch 2.11 would leave unclipped
#         p.grad = p.grad.redistribute(placements=p.placements)
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()
#     optimizer.zero_grad()
#     if dist.get_rank() == 0:
#         print(f"step {step}: loss {loss.item():.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```
# </details>

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>Two nodes of eight GPUs with NVLink inside, a model of 8B, and training with a batch of a million
# tokens. Which axis goes where, and when would you not use TP at all?</summary>
#
# TP inside a node, last on the mesh, and data parallelism between nodes. If the model fits with FSDP and there are
# enough sequences for all ranks, FSDP alone sends less: a million tokens are far more than 4.5 D.
# </details>
#
# <details><summary>The vocabulary is split over the ranks. How can they work out the loss without gathering any
# logits?</summary>
#
# Each token takes three numbers: the highest logit, a maximum over the ranks; the sum of the exponentials; and the
# target's logit, which one rank has and to which the others add zero.
# </details>
#
# <details><summary>From how many tokens in a batch does TP send more than DDP, and why do they grow with the
# width?</summary>
#
# From about 3 D. DDP sends the gradients of a layer, 12 D² numbers, however many tokens there are. TP sends 4 D numbers
# for each token.
# </details>
#
# For M tokens of D numbers (b bytes each) in the batch of N ranks, and L layers, each rank sends and holds with
# sequence parallelism (ours is in the last notebook's table):
#
# | | predicted | PyTorch's |
# |---|---|---|
# | sent | (4L + 2) × 2 (N − 1)/N × MDb, three numbers per token, the norms' gradients | the norms' three times |
# | collectives of a layer | 8, and 2 for its norms | the norms' as AdamW reads them |
# | P, G, S | 1/N, except for the norms | G: all of the embedding's |
# | A | by `cost.tp` | within 0.1 % |
# | numbers | one process's | within 1e-12, in float64 |

# %% [markdown]
# ## Beat it: one block over a node boundary (20 minutes)
#
# From here it is open. The block is `silu(x @ up) @ down`, and two nodes of two ranks compute it. A rank has a quarter
# of the T tokens, and of the H features. It needs y for its own tokens; gradients come by autograd. What stays inside a
# node is free. A message to the other node costs α + m/W: α is 0.5 ms, and 1,000 numbers take 1 ms. A collective sends
# one message to each rank that it sends something to; `dist.send` and autograd functions of your own are allowed. The
# job is a real one. What counts, by its recording, is how long the wire out of the busier node is in use: messages
# leave a node one at a time, whichever of its ranks sends them, and waiting for an answer costs nothing.
#
# **The bound.** For its own tokens, a node needs the other node's part of y and of x's gradient, T × D numbers
# together; or the other's weights, D × H. As much goes for the gradients of its own weights: T × D numbers of the
# other's tokens, or D × H numbers that the other has summed. So at least 2 D min(T, H) numbers leave a node, and at
# least one message forward and one backward. That is 100 points, and the score is the mean of five blocks:
# A score is 100 × bound / time.

# %%
bound = beat.boundary.bound
rows = []
for name, block in beat.boundary.cases.items():
    rows.append({"": name, **block._asdict(), "least, ms": round(1e3 * bound(block), 2)})
draw.table(rows)

# %% [markdown]
# With one group of all four ranks, as in most of this notebook, the score is 28.7. The course's own answer has 58.4.
# Before you write anything: which of these blocks would rather send its weights?


# %%
def over_the_boundary(x, up, down, mesh):
    """y for this rank's tokens, [t, D], so that y.backward gives the gradients of x, up and
    down.

    x: [t, D], this rank's quarter of the tokens; up: [D, h], down: [h, D], its quarter of the
    features; all of float64
    mesh: 2 x 2, with the axes "nodes" and "gpus"; gather(x, mesh["nodes"], dim=0), scatter
    likewise
    """
    ### BEGIN SOLUTION
    nodes, gpus = mesh["nodes"], mesh["gpus"]
    if len(x) < up.shape[1]:  # few tokens: they cross, before they are copied inside a node
        x = gather(gather(x, nodes, 0), gpus, 0)
        return scatter(scatter(F.silu(x @ up) @ down, gpus, 0), nodes, 0)
    up, down, x = gather(up, nodes, 1), gather(down, nodes, 0), gather(x, gpus, 0)
    return scatter(F.silu(x @ up) @ down, gpus, 0)
    ### END SOLUTION


beat.boundary(over_the_boundary)

# %% [markdown]
# Each try in this notebook is kept, and `python -m labs challenges` shows your best.
#
# <details><summary>Where is there room?</summary>
#
# Count the messages that leave a node: do both of its ranks have to send, must two tensors be two messages, and must
# both nodes ask at once? Then ask of each block what crosses forward, and what backward. It need not be the same.
# </details>
#
# **Read on**: [labs/tp/conjugate.py](../labs/tp/conjugate.py), [labs/tp/shares.py](../labs/tp/shares.py),
# [labs/tp/vocabulary.py](../labs/tp/vocabulary.py), [labs/tp/parallel_layers.py](../labs/tp/parallel_layers.py),
# [labs/tp/styles.py](../labs/tp/styles.py) and [labs/tp/tp.py](../labs/tp/tp.py), in this order. Shoeybi et al., 2019,
# *Megatron-LM* (arXiv 1909.08053), section 3. Korthikanti et al., 2022, *Reducing Activation Recomputation in Large
# Transformer Models* (arXiv 2205.05198), section 4. Pope et al., 2022, *Efficiently Scaling Transformer Inference*
# (arXiv 2211.05102).
#
# **Next.** Over a slow wire TP is out, and FSDP gathers every layer through it. [10 Pipeline](10_pipeline.ipynb) splits
# the model by its depth, and sends little enough for a slow wire.
#
# A clean copy of this notebook: `git restore notebooks/09b_plan_and_wire.ipynb`, then *File > Reload Notebook from
# Disk*.
