# %% [markdown]
# # Memory: where it really goes
#
# *ZeRO has divided P, G and S by the number of ranks, and the job still does not fit. What uses the memory now, and
# what does it cost to free some of it?*
#
# **Minutes**, by estimate: 45 without exercises, 80 with them, 25 more for the challenge.
# Running all cells takes half a minute and 2 GB of memory. You need: [One device](01_one_device.ipynb), which measures
# activations, and [ZeRO](04_zero.ipynb).
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. If you come directly
# from 04, skip questions on 05 and 06. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("07")

# %% [markdown]
# ## Question
#
# Train a model of 8 billion parameters in mixed precision on 64 ranks, with ZeRO's stage 3, which leaves no copy to
# remove. Each rank reads one sequence of 8,192 tokens, and has a GPU of 40 GB. How much memory does a rank need? The
# next cells compute it with formulas, for 16-bit training with fused norms; a fused norm is computed by one kernel. In
# this notebook you will measure the terms of these formulas, on a small model in float32.

# %%
import itertools
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.random import fork_rng

# %%
from labs import cost
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, play
from labs.kit.launch import RankError, run
from labs.kit.record import budget, mark
from labs.kit.train import ADAMW
from labs.memory import recompute
from labs.model import GPT, PRESETS

# %%
job_of_64 = cost.Job(PRESETS["llama3-8b"], batch=1, ranks=64, precision="mixed")
a_rank = cost.per_rank(job_of_64, stage=3)
at_the_peak = {kind: getattr(a_rank, kind) / 1e9 for kind in ("P", "S", "A", "temporary")}
assert a_rank.peak > 40e9 and abs(sum(at_the_peak.values()) - a_rank.peak / 1e9) < 0.01
print(", ".join(f"{kind} {size:.1f} GB" for kind, size in at_the_peak.items()))
caption = "8 billion parameters, stage 3: where the peak is"
draw.chart({"each of 64 ranks": at_the_peak}, "GB", caption=caption)

# %% [markdown]
# The chart shows the moment of a step at which memory peaks: forward is over, and the backward of the loss begins.
# There are no gradients yet, and no layer is gathered. The grey part is *temporary* memory, here the gradients of the
# logits. P and S, the subject of notebook 04, are the two narrow strips on the left. The activations, A, do not fit on
# the GPU.
#
# **Activations** are tensors that forward keeps because backward will need them, as notebook 01 showed. They are not
# copies: each rank's activations belong to its own tokens. So ZeRO does not shard them, and more ranks do not make them
# smaller. But a rank can compute activations *again* instead of keeping them. How much memory does this save, and how
# much time does it cost? Notebook 07b does the opposite for P, G and S: it keeps them in a larger and slower memory.
#
# The model is that of notebook 01 with twice the layers, and the loop is the same. The function `change` may change the
# model before it trains; everything that this notebook does to a model happens in such a function.

# %%
CONFIG, BATCH = replace(PRESETS["tiny"], depth=8), 12
text = corpus()
loader = Batches(text.tokens, BATCH, CONFIG.context)
batches = [loader[step] for step in range(4)]


def one_step(model, optimizer, x, y):
    """Take one step, and return its loss in nats."""
    mark("forward")
    loss = model(x, y)
    mark("backward")
    loss.backward()
    mark("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %%
def nothing(model):
    pass


def train(change=nothing, config=CONFIG, batches=batches[:3]):
    """Return the losses, in nats, and the parameters after the last step."""
    model = GPT(config)
    change(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for batch in batches:
        dist.barrier()  # where several ranks train side by side, their steps begin together
        mark("step")
        x, y = (tensor.clone() for tensor in batch)
        losses.append(one_step(model, optimizer, x, y))
    mark("end")
    return losses, [p.detach() for p in model.parameters()]


# %%
job = partial(run, train, ranks=1, device="cpu")  # so that every reader gets the same bytes
plain = job(record="memory").recording
draw.memory(plain, step=2)

# %% [markdown]
# ## Picture
#
# In this figure P and S are constant, and G grows in backward. The large peak is A. It grows layer by layer in forward,
# and shrinks layer by layer in backward, the last layer first. Forward computes the first layer first, and backward
# needs its activations last, so a rank keeps them through nearly all of forward and backward. Could a rank drop them,
# and compute them a second time just before they are needed?
#
# ![Activations held over time, for four layers. None: the activations of all layers add up in forward. Selective: about
# half of each layer's activations are kept, and the rest is computed again in the layer's backward. All but attention:
# each layer's input and the result of its attention are kept. Full: only each layer's input is kept, and its forward
# runs again.](../images/recompute.svg)

# %% [markdown]
# ## Predict
#
# Let D be the width of the model, here 64. The input of a layer is D numbers for each token. How many *times D* numbers
# does one layer keep for its backward? A rough guess is enough, and the answer may surprise you.

# %%
guess_times = 20  # your number

# %% [markdown]
# If every layer's forward runs twice, by what factor does the arithmetic of a training step grow? As notebook 01
# counted, backward does about twice the arithmetic of forward. You may type an expression.

# %%
guess_work = 4 / 3  # your number

# %% [markdown]
# ## Build: a formula, term by term
#
# Which tensors does forward have to keep? Each operator keeps the tensors that its own derivative needs, and no others.
# PyTorch lets us see them: inside `saved_tensors_hooks(pack, unpack)`, autograd calls `pack` with each tensor that it
# is about to keep, and keeps the return value of `pack` instead. When backward needs the tensor, it calls `unpack` with
# this value.


# %%
def shapes_kept(fn, *inputs):
    """Return the shape of each tensor that is kept for the backward of fn(*inputs)."""
    saved = []
    with saved_tensors_hooks(saved.append, lambda nothing: None):
        fn(*inputs)
    return [tuple(tensor.shape) for tensor in saved]


x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
assert shapes_kept(torch.add, x, x) == []
assert shapes_kept(torch.mul, x, x.exp()) == [(5, 4), (5, 4)]
assert sorted(shapes_kept(torch.matmul, x, w)) == [(4, 3), (5, 4)]
assert shapes_kept(F.silu, x) == shapes_kept(torch.softmax, x, -1) == [(5, 4)]

# %% [markdown]
# The derivative of a sum is 1 for any summands, so a sum keeps nothing. The derivative of a product with respect to one
# factor is the *other* factor, so a product keeps both factors. A matrix product keeps its input and its weights in the
# same way; the weights are in memory anyway, as P. silu, the nonlinearity in the course's MLP, keeps its input, and
# softmax keeps its result.
#
# Now look at a whole layer. The letters are those of `labs/model.py`: B sequences of T tokens, D the width of the
# model, H heads of queries, K heads of keys and values, E = D / H the width of a head, F the hidden width of the MLP.
#
# ![One layer of the course's GPT, from its input to its output: the output of each operator, as a bar whose length is
# the count of numbers per token.](../images/layer_shapes.svg)
#
# Some of the kept tensors cannot be guessed from the derivative alone:
#
# - The course's norm is made of several operators. It keeps x, x / rms(x) and 1 / rms(x); the last of these is one
#   number per token.
# - Attention is *fused*: it is one kernel, which never stores its table of scores, with one entry for each pair of
#   tokens. Its backward computes the table again. For this it keeps q, k, v, its result y, and one number per token and
#   head, the log-sum-exp.
# - `o`, the output matrix of attention, keeps its input, which is y with the heads side by side. To arrange the heads
#   side by side, y is copied. With one head, or with one token, no copy is needed: then the input of `o` *is* y, and
#   counts once.
# - *Rotary*, which rotates q and k by an angle that depends on the position, keeps its cosines and sines. They are 2E
#   numbers per position, which all sequences share.
#
# ### Exercise 1: a formula, term by term (10 minutes)
#
# Take a pencil, go through the picture, and write down the bytes that one layer keeps, in float32. If two operators
# keep the same tensor, it is in memory only once.


# %%
def layer_bytes(B, T, D, H, K, F):
    """Return the bytes that one layer keeps for its backward, in float32.

    The result is {"norms": both norms, "attention": with q, k, v and o, "rotary": cosines and
    sines, "mlp": ...}.
    """
    ### BEGIN SOLUTION
    E, tokens = D // H, B * T
    norm = 2 * D + 1  # x, x / rms(x); 1 / rms(x)
    side_by_side = D if H > 1 and T > 1 else 0
    # input; q; k, v; y; log-sum-exps; the input of o
    attention = D + D + 2 * K * E + D + H + side_by_side
    return {
        "norms": 4 * tokens * 2 * norm,
        "attention": 4 * tokens * attention,
        "rotary": 4 * T * 2 * E,
        "mlp": 4 * tokens * (D + 4 * F),  # input; gate, silu(gate), up, their product
    }
    ### END SOLUTION


answer = check.layer_bytes(layer_bytes)
answer

# %% [markdown]
# <details><summary>The terms, for when you have written down yours</summary>
#
# ![The same layer. The tensors that backward needs have the colour of activations, and the others are
# dashed.](../images/layer_keeps.svg)
#
# | for each token | keeps | numbers |
# |---|---|---|
# | a norm | x; x / rms(x); 1 / rms(x) | 2D + 1 |
# | attention: q, k, v | the input that all three share | D |
# | attention itself | q, k, v, its result y; one number per head | 2D + 2KE + H |
# | attention: o | its input: y again, heads side by side | D |
# | MLP: gate, up | their input | D |
# | MLP: silu(gate) × up | gate; silu(gate); up | 3F |
# | MLP: down | its input, the product | F |
#
# </details>
#
# Is your formula right? The next cells measure the layer itself. `kept` adds up the tensors that the hooks show. It
# counts each block of memory once, and does not count parameters.


# %%
def itself(tensor):
    return tensor


def kept(module, *inputs):
    """Return the bytes that are kept for the backward of module(*inputs), without its
    parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, itself):
        output = module(*inputs)  # must live until everything is counted
    assert output.requires_grad
    return sum(size for place, size in found.items() if place not in parameters)


# %%
T, D, hidden = CONFIG.context, CONFIG.dim, CONFIG.hidden
H, K = CONFIG.heads, CONFIG.kv_heads
courses = cost.layer_terms(cost.Job(CONFIG, BATCH), "none")
by_hand = layer_bytes(BATCH, T, D, H, K, hidden) if answer.ok else courses

# %%
layer, x_BTD = GPT(CONFIG).layers["0"], torch.randn(BATCH, T, D, requires_grad=True)
names = "attention_norm", "mlp_norm", "attention", "mlp"
measured = {name: kept(layer.get_submodule(name), x_BTD) for name in names}
rows = {
    "two norms": (by_hand["norms"], measured["attention_norm"] + measured["mlp_norm"]),
    "attention, with rotary": (by_hand["attention"] + by_hand["rotary"], measured["attention"]),
    "mlp": (by_hand["mlp"], measured["mlp"]),
    "the layer": (sum(by_hand.values()), kept(layer, x_BTD)),
}
ledger = draw.ledger(rows, within=0)
assert ledger.agrees
ledger

# %%
tokens, KE = BATCH * T, K * CONFIG.head_size
a_layer = 9 * D + 2 * KE + H + 4 * hidden + 2
print(f"9D + 2KE + H + 4F + 2 = {a_layer:,} numbers for each token")
check.predict("How many times D does a layer keep?", guess_times, round(a_layer / D, 1))

# %% [markdown]
# A layer keeps twenty times as many numbers as its input has; this count is per token and without rotary. More than
# half of them belong to the MLP, which keeps four tensors of its hidden width F.
#
# `cost.activations` has this formula, and adds the parts of the model outside the layers: the last norm, the tokens
# themselves, and the head, which keeps its input and the logarithms of the probabilities. These are V numbers for each
# token, where V is the size of the vocabulary. The next cell compares the formula with the recording of the whole step:

# %%
predicted = cost.activations(cost.Job(CONFIG, BATCH))
A = plain.held(step=2)["A"]
ledger = draw.ledger({"A, at its highest": (sum(predicted.values()), A)}, within=0)
assert ledger.agrees
ledger

# %%
shares = {name: round(100 * size / A, 1) for name, size in predicted.items()}
draw.table([{"kept by": name, "bytes": predicted[name], "%": shares[name]} for name in shares])

# %% [markdown]
# The formula is exact to the byte: in this small model we know what each byte is for. With CUDA, RMSNorm is a single
# kernel, and keeps D + 1 numbers instead of 2D + 1; `cost.Job(..., fused_norms=True)` counts it this way. Other
# libraries keep other tensors. But the *method* is the same: go through the model, and ask which tensors the derivative
# of each operator needs.
#
# ## A formula that you may have met
#
# If you have read about activations before, you may have met the formula `sbh(34 + 5as/h)` (Korthikanti et al., 2022).
# It gives the bytes of one layer, for s tokens, b sequences, width h and a heads. The formula differs from ours because
# it describes a different layer, that of GPT-3. This layer uses 16-bit numbers, two LayerNorms, an MLP of width 4h with
# the nonlinearity GELU, and attention that is *not* fused, with dropout in three places. **Dropout** sets numbers to
# zero at random, so that a model does not come to depend on single numbers. The next cells build this layer:


# %%
def dropout(x):
    # as on a GPU: it keeps a mask of one byte per number
    return torch.native_dropout(x, 0.1, True)[0]


def core(q, k, v):
    """Compute attention as it is written on paper, with its table of all tokens by all
    tokens."""
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1)
    return dropout(weights) @ v


# %%
class Block(nn.Module):
    """One layer of GPT-3, of width h with a heads. It leaves out the causal mask, which adds no
    byte."""

    def __init__(self, h, a, core=core):
        super().__init__()
        self.a, self.core = a, core
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def attention(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.a, -1)).transpose(1, 2) for part in parts)
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + dropout(self.attention(self.norm1(x)))
        return x + dropout(self.down(F.gelu(self.up(self.norm2(x)))))


# %% [markdown]
# Take the pencil once more, and count with 2 bytes per number and in units of sbh bytes. The two LayerNorms keep their
# inputs: 2 + 2. The MLP keeps the inputs of `up`, of GELU and of `down`, and a mask of 1 byte per number: 2 + 8 + 8 +
# 1 = 19. Attention keeps its input, then q, k and v, the input of `out`, and a mask: 2 + 6 + 2 + 1 = 11. Together these
# make **34**. The table of attention has a × s × s entries for each sequence. Each entry takes 2 bytes for the result
# of softmax, 2 bytes for the result of dropout, and 1 byte for the mask. These 5abs² bytes are sbh × **5as/h**.
#
# The paper's table 2 has two more rows. With *selective* recomputation the core of attention is computed again, and
# only the 34 remain. With *full* recomputation everything is computed again, and only the input, 2, remains. The next
# cells compare all three with recordings:


# %%
def again(*inputs):
    return recompute.checkpoint(core, *inputs)


def one_block(how, s=64, b=2, h=128, a=4):
    """Run one forward; return the bytes that the formula predicts for it."""
    block = Block(h, a, again if how == "selective" else core).bfloat16()
    if how == "full":
        recompute.recompute([block])
    mark("step")
    block(torch.randn(b, s, h, dtype=torch.bfloat16))
    mark("end")
    return int(cost.korthikanti(s, b, h, a, recompute=how))


# %%
rows = {}
for how, terms in {"none": "34 + 5as/h", "selective": "34", "full": "2"}.items():
    results = run(one_block, how, ranks=1, device="cpu", record="memory")
    rows[f"{how}: sbh({terms})"] = results[0], results.recording.held(step=0)["A"]
ledger = draw.ledger(rows, within=0.01)
assert ledger.agrees
ledger

# %% [markdown]
# The small difference is the norms' statistics, which the paper leaves out on purpose. The paper's formula is right for
# the paper's layer. Now look at the share of the second term, 5as/h, in models that people train today:


# %%
def share(s, h, a):
    """Return the share of 5as/h, in percent."""
    return round(100 * 5 * a * s / h / (34 + 5 * a * s / h))


shapes = {
    "GPT-3": (2048, 12_288, 96),
    "Llama 3 8B, 8k tokens": (8192, 4096, 32),
    "the same, 128k": (131_072, 4096, 32),
}
what = "5as/h, % of all, if not fused"
draw.table([{"": name, what: share(*shape)} for name, shape in shapes.items()])

# %% [markdown]
# The paper's selective recomputation removes this term: the table of attention, which grows with the square of the
# context.
#
# FlashAttention (Dao et al., 2022) makes this selective recomputation unnecessary: one kernel computes attention piece
# by piece, never stores the table, and computes it again in its own backward. In PyTorch,
# `F.scaled_dot_product_attention` calls such a kernel if there is one for the device, the dtype and the options. Is
# there one for your machine? `KeepOutputs` records which of the given operations have run:

# %%
from labs.memory.selective import ATTENTION, KeepOutputs


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def kernels(attention):
    """Return the fused kernels that a call of attention(q, k, v) runs."""
    q = torch.randn(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True)
    with KeepOutputs(ATTENTION) as seen:
        attention(q, q, q)
    return [str(op.overloadpacket) for op, *_ in seen.outputs]


assert kernels(core) == []
kernels(fused)

# %% [markdown]
# This is the name of FlashAttention on a CPU. Now replace `core` by it, and go through the formula once more. Without
# the table and its dropout, the 34 remain. The kernel also keeps its result, but the result *is* the input of `out`,
# which is counted already. In addition, the kernel keeps the log-sum-exps, 4 bytes for each token and head:


# %%
def one_fused_block(s=64, b=2, h=128, a=4):
    """Run one forward; return the bytes that pencil and paper predict for it."""
    block = Block(h, a, fused).bfloat16()
    mark("step")
    block(torch.randn(b, s, h, dtype=torch.bfloat16))
    mark("end")
    return 34 * s * b * h + 4 * s * b * a


results = run(one_fused_block, ranks=1, device="cpu", record="memory")
found = results.recording.held(step=0)["A"]
ledger = draw.ledger({"fused: 34sbh + 4sba": (results[0], found)}, within=0.01)
assert ledger.agrees
ledger

# %% [markdown]
# No term grows with s² any more. The course's model calls the same kernel, in the class `Attention` of `labs/model.py`.
# Attention that is written out, as in `core`, does not use the kernel. So a fused kernel already follows the advice of
# 2022, to recompute attention. The other activations remain: 34 bytes × h per token in GPT-3's layer, or about 20
# numbers × D per token in ours.
#
# ## Build: compute it twice
#
# **Activation checkpointing**, or recomputation (Chen et al., 2016), keeps only the input of a layer. When backward
# reaches the layer, the layer's forward runs once more, and this time keeps all activations. Backward then finds all
# tensors that it needs, as if they had been kept from the start. The tool for this is the pair of hooks that you have
# seen, which keep something else in place of a tensor.
#
# ### Exercise 2: a checkpoint (15 minutes)
#
# In place of each tensor, autograd keeps the tensor's *number*: 0, 1, 2, and so on. When backward unpacks the first
# number, the layer has to run again, under `saved_tensors_hooks(keep, itself)`, so that the list `again` is filled in
# the same order. Write the three or four lines that run the layer again. Consider three things:
#
# - Backward runs without gradient mode, so you need `torch.enable_grad()` for the second run to build a graph.
# - The layer may draw random numbers, and must draw *the same* numbers again: `random` is the state of the generator
#   before the first run, and `torch.set_rng_state` sets it.
# - After the second run, the program must go on with the random numbers that it would have drawn otherwise: the context
#   `torch.random.fork_rng(devices=[])` restores the generator's state at its end.
#
# Budget: 0.30 × the memory. Each layer's forward runs exactly once more, even if `x_BTD` needs no gradient. Tensors
# that you write to a file count as memory.


# %%
def checkpoint(layer, x_BTD):
    """Return the same output as layer(x_BTD), with the same gradients, but hold only x_BTD from
    forward to backward."""
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def keep(tensor):
        # without its graph, which would hold the list in turn, for ever
        again.append(tensor.detach())

    def unpack(number):
        if not again:
            ### BEGIN SOLUTION
            with torch.enable_grad(), fork_rng(devices=[]), saved_tensors_hooks(keep, itself):
                torch.set_rng_state(random)
                layer(x_BTD)
            ### END SOLUTION
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x_BTD)


answer = check.checkpoint(checkpoint)
answer

# %% [markdown]
# From here on the notebook uses your checkpoint if it is right, and otherwise the course's. The next cell puts it
# around each layer. Two ranks train the same model side by side without talking to each other, the first without
# checkpoints and the second with checkpoints:

# %%
mine = checkpoint if answer.ok else recompute.checkpoint


def each_layer(model):
    for layer in model.layers.values():
        layer.forward = partial(mine, layer.forward)


def side_by_side(*changes):
    return train(changes[dist.get_rank()])


both = run(side_by_side, nothing, each_layer, ranks=2, device="cpu", record="memory")
draw.memory(both.recording, step=2, names=("as before", "with checkpoints"))

# %% [markdown]
# The one large peak has become a comb: each tooth in backward is one layer whose activations are computed again and
# then freed. The teeth are grey because the recorder counts as A only tensors that *autograd* keeps. Here your list
# `again` keeps the activations, and your function keeps the layers' inputs; the recorder counts memory that it cannot
# name as temporary, in grey. Is it still the same training?

# %%
(losses, parameters), (again_losses, again_parameters) = both
assert again_losses == losses
assert all(torch.equal(a, b) for a, b in zip(again_parameters, parameters, strict=True))

# %% [markdown]
# The losses and parameters are equal bit for bit: the second forward repeats the first one, *if* it draws the same
# random numbers. PyTorch's own checkpoint does not restore them with `preserve_rng_state=False`. The next cell tries
# this on a layer with dropout, with the same input and the same seed:

# %%
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

dropping = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))


def first_gradient(call):
    torch.manual_seed(0)
    dropping.zero_grad()
    call(dropping, torch.ones(3, 4)).sum().backward()
    return dropping[0].weight.grad[0]


forgetful = partial(torchs_checkpoint, use_reentrant=False, preserve_rng_state=False)
calls = (lambda layer, x: layer(x)), mine, forgetful
right, ours, wrong = map(first_gradient, calls)
assert torch.equal(ours, right) and not torch.equal(wrong, right)

# %% [markdown]
# PyTorch gives no warning, and the gradient is wrong: forward dropped some numbers, and the second run dropped others.
#
# > **What went wrong in the wild.** *Symptom*: activation checkpointing is turned off, which should change only memory
# > and time, and after 150 steps the loss is 2.195 instead of 2.495. *Cause*: checkpointing always used
# > `preserve_rng_state=False`, which did no harm until somebody trained a model with dropout. Then every recomputation
# > drew new masks, and the gradients were not those of the loss
# > ([OLMo-core#828](https://github.com/allenai/OLMo-core/pull/828), August 2026).
#
# ## Build: selective recomputation
#
# Some activations are expensive to *compute*: matrix products and attention do nearly all of the arithmetic. The
# results of norms, rotary, silu and sums are cheap to compute, and only expensive to *keep*. **Selective**
# recomputation keeps the results of the expensive operations, and computes the others again. The paper recomputes only
# the core of attention; today the word is used for any choice by operation.
# [labs/memory/recompute.py](../labs/memory/recompute.py) does full and selective recomputation, together with
# [labs/memory/selective.py](../labs/memory/selective.py), and changes a model in place:

# %%
said = recompute.__doc__
print(said[said.index("    recompute(model") : said.index("(letters")].rstrip())

# %%
from labs.memory.selective import MATMULS

assert "aten.mm" in MATMULS  # these are sets of PyTorch's own operation names


def by_operation(keep, model):
    recompute.recompute(model.layers.values(), keep)


WAYS = {
    "none": nothing,
    "selective": partial(by_operation, MATMULS | ATTENTION),
    "all but attention": partial(by_operation, ATTENTION),
    "full": partial(by_operation, ()),
}
four = run(side_by_side, *WAYS.values(), ranks=4, device="cpu", record="memory")
draw.memory(four.recording, step=2, names=list(WAYS))

# %% [markdown]
# *Full* recomputes everything in a layer, *all but attention* recomputes everything except attention, and *selective*
# recomputes everything except matrix products and attention. The teeth have the colour of A now, since these
# checkpoints give the tensors back to autograd. The rest in grey is temporary memory that an operation needs only while
# it runs, such as the gradients inside a layer.
#
# ## Measure: bytes and numbers
#
# Without recomputation, A is highest at the end of forward. With recomputation, A is highest in backward. It then
# consists of the tensors that the earlier layers have kept, and of *all* activations of the layer whose backward is
# running. With selective recomputation it also includes q and k before rotary, and the results of `o` and `down`:

# %%
rows = {}
for rank, how in enumerate(WAYS):
    predicted = cost.most_activations(cost.Job(CONFIG, BATCH, recompute=how))
    rows[f"{how}: A at its highest"] = predicted, four.recording.held(rank, step=2)["A"]
ledger = draw.ledger(rows, within=0.01)
assert ledger.agrees
ledger

# %%
losses, parameters = four[0]
assert all(found == losses for found, _ in four)
assert all(all(map(torch.equal, after, parameters)) for _, after in four)

# %% [markdown]
# All four ways give the same losses and the same parameters, to the last bit.
#
# ## Measure: what it costs
#
# First count the arithmetic. PyTorch has a counter of operations, from which we take the matrix products. The counter
# includes attention on a CPU only from PyTorch 2.15 on, so we leave attention out, and the count is the same in every
# version.

# %%
from torch.utils.flop_counter import FlopCounterMode


def operations(change):
    """Count the floating-point operations of one forward and backward, in matrix products."""
    model = GPT(CONFIG)
    change(model)
    with FlopCounterMode(display=False) as count:
        model(*batches[0]).backward()
    return sum(n for op, n in count.get_flop_counts()["Global"].items() if str(op) in MATMULS)


without, work = operations(nothing), {}
for how, change in WAYS.items():
    work[how] = operations(change) / without
    print(f"{how}: {work[how]:.2f} × the operations")
asked = "With full recomputation, by what factor does the arithmetic of a step grow?"
check.predict(asked, guess_work, round(work["full"], 2))

# %% [markdown]
# Forward does 1 unit of work, backward does 2, and the second forward does 1 again: the factor is 4/3. The measured
# factor is a little lower, since the head belongs to no layer and is not computed again. "All but attention" has the
# same factor, since attention is not counted here. Now measure the time, on a wider model, where arithmetic takes most
# of the time. For each way we take the fastest of three steps:

# %%
WIDE = PRESETS["small"]
wide_loader = Batches(text.tokens, BATCH, WIDE.context)
wide_batches = [wide_loader[step] for step in range(4)]


def seconds(change):
    """Return the time of the fastest step: other programs can only make a step longer."""
    recording = job(change, WIDE, wide_batches, record="time").recording
    return min(span.end - span.start for span in recording.step_spans()[1:])


took = {}
for how, change in WAYS.items():
    took[how] = seconds(change)
    longer = took[how] / took["none"]
    print(f"{how}: {work[how]:.2f} × the operations, {longer:.2f} × as long")

# %% [markdown]
# Selective recomputation computes no matrix product twice, and yet it takes longer than none. There are two possible
# causes. Norms, silu and sums do little arithmetic, but they read and write memory. And our selective recomputation
# calls Python code for each operation, to record which results to keep. The next cells measure each cause without the
# other:
#
# - *noted*: Python code runs for every operation, as in the first run of selective recomputation, but nothing is
#   computed again.
# - *cheap*: norms and silu(gate) × up are computed again, by full checkpoints around these functions, so that no
#   operation is recorded.


# %%
def under_notes(forward, x_BTD):
    with KeepOutputs(MATMULS | ATTENTION):
        return forward(x_BTD)


def noted(model):
    for layer in model.layers.values():
        layer.forward = partial(under_notes, layer.forward)


def gated(gate_BTF, up_BTF):
    return F.silu(gate_BTF) * up_BTF


def gated_again(mlp, x_BTD):
    return mlp.down(recompute.checkpoint(gated, mlp.gate(x_BTD), mlp.up(x_BTD)))


# %%
def cheap(model):
    for layer in model.layers.values():
        recompute.recompute([layer.attention_norm, layer.mlp_norm])
        layer.mlp.forward = partial(gated_again, layer.mlp)


# "nothing" once more: the machine may be quicker, or slower, than it was above.
alone = {change.__name__: seconds(change) for change in (noted, nothing, cheap)}
for name in ("noted", "cheap"):
    print(f"{name}: {alone[name] / alone['nothing']:.2f} × as long")

# %% [markdown]
# Read your own numbers: they differ from machine to machine, and from run to run. The part of *noted* above 1 is the
# price of Python in the first run, and selective recomputation pays it again in the second run. The part of *cheap*
# above 1 is the price of the operations themselves. The rotation and the sums are in neither measurement, so the parts
# need not add up. Only this implementation pays the price of Python, which does not grow with the model; every
# implementation pays for reading and writing memory. Korthikanti et al. count 2.7 % more operations for *their*
# selective recomputation in GPT-3. But a count of operations is not a time.

# %% [markdown]
# ## Place the checkpoints
#
# So far we treated every layer alike. But each layer may be recomputed in a different way. The next table shows how
# much each way keeps of *one layer*, and whether it computes matrix products again:

# %%
rows = []
for how in WAYS:
    configs = (replace(CONFIG, depth=depth) for depth in (8, 7))
    eight, seven = (cost.Job(config, BATCH, recompute=how) for config in configs)
    layers = sum(cost.activations(eight).values()) - sum(cost.activations(seven).values())
    row = {"": how, "kept, × D per token": round(layers / tokens / 4 / D, 1)}
    rows.append(row | {"matrix products again": work[how] > 1.01})
draw.table(rows)

# %% [markdown]
# ### Exercise 3: a budget for both (10 minutes)
#
# You get a GPT of some depth. Besides parameters and gradients, its step may hold at most 40 % of the memory that it
# holds without recomputation. And at most *half* of the multiplications in the layers' forward, attention included, may
# be done again. Full recomputation does too much work, and selective recomputation holds too much. Change the model so
# that it meets both limits. The check measures memory with 8 layers. The limit on work holds at any depth, even odd
# ones and a single layer. Do not change the names in `state_dict()`.
#
# Use `recompute.recompute(layers, keep=())`, where `keep` may be `MATMULS | ATTENTION`; you may call it with different
# `keep` for different layers. It is not enough to recompute one half of the layers in full and the other half
# selectively: it matters *which* half. Look at the highest tooth of the comb. Which layer's activations are computed
# again there, and how many of them should have been kept?


# %%
def place_checkpoints(model):
    """Change `model` in place: its step holds at most 0.40 × the memory, and at most 0.5 × the
    layers' forward is computed again.

    model: a GPT; model.layers is a ModuleDict of its layers, in order
    """
    ### BEGIN SOLUTION
    layers = list(model.layers.values())
    for number, layer in enumerate(layers):
        keep = () if number < len(layers) // 2 else MATMULS | ATTENTION
        recompute.recompute([layer], keep=keep)
    ### END SOLUTION


answer = check.place_checkpoints(place_checkpoints)
answer

# %% [markdown]
# The comb is highest when backward begins, because all other layers still hold their kept tensors. At this moment the
# last layer is computed again. If half of that layer was kept, the tooth adds only half as much. With the two halves of
# the layers exchanged, the same amount of work would not fit. The next cell draws your answer, or full recomputation
# until yours passes:

# %%
placed = place_checkpoints if answer.ok else WAYS["full"]
draw.memory(job(placed, record="memory").recording, step=2)

# %% [markdown]
# ## A job that does not fit
#
# What happens when memory runs out? `budget(size)` lets the tensors of this process take `size` more bytes. It counts
# bytes as the ledger does, on any system, and raises an error if an operator would exceed the budget. In the next cells
# a model with 8 layers gets 96 MiB; this job is *meant* to fail:

# %%
MiB = 2**20
DEEP = replace(WIDE, depth=8)
alone = sum(cost.activations(cost.Job(DEEP, BATCH)).values())
print(f"its activations alone: {alone / MiB:.0f} MiB")


def within(size, change):
    """Return two losses, from training with at most `size` more bytes than the model takes."""
    model = GPT(DEEP)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    with budget(size):
        return [one_step(model, optimizer, x, y) for x, y in wide_batches[:2]]


# %% tags=["nbval-ignore-output"]
try:
    run(within, 96 * MiB, nothing, ranks=1, device="cpu")
except RankError as error:
    message = str(error).splitlines()[0]
assert "exceeded its budget of 96.00 MiB" in message
print(message.replace(": it held", ":\nit held").replace(" at model.py", "\nat model.py"))

# %% [markdown]
# The message names the budget, the size that an operator needed, and the line of the model that called this operator.
# On a GPU the error would be `torch.OutOfMemoryError`. Now run the same job with the same budget and your checkpoints:

# %%
[fits] = run(within, 96 * MiB, placed, ranks=1, device="cpu")
[free] = run(within, 1024 * MiB, nothing, ranks=1, device="cpu")
assert fits == free

# %% [markdown]
# The job fits, and its losses are those of a job with a gigabyte.
#
# ## Native
#
# PyTorch's own checkpoint is `torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)`. Always pass `False`.
# The old way, `True`, is an `autograd.Function`: if a layer's *input* needs no gradient, for example after a frozen
# embedding, the layer's parameters get no gradient either. Selective recomputation takes a *policy*, a function that
# decides for each operation whether its result is kept:

# %%
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def policy(context, op, *args, **kwargs):
    keep = str(op.overloadpacket) in MATMULS | ATTENTION
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def torchs(model, **options):
    around = partial(torchs_checkpoint, use_reentrant=False, **options)
    for layer in model.layers.values():
        layer.forward = partial(around, layer.forward)


contexts = partial(create_selective_checkpoint_contexts, policy)
THEIRS = {"full": torchs, "selective": partial(torchs, context_fn=contexts)}

# %%
native = run(side_by_side, *THEIRS.values(), ranks=2, device="cpu", record="memory")
assert all(all(map(torch.equal, after, parameters)) for _, after in native)
rows = []
for rank, how in enumerate(THEIRS):
    ours = four.recording.held(list(WAYS).index(how), step=2)["peak"] / 2**20
    theirs = native.recording.held(rank, step=2)["peak"] / 2**20
    theirs_work = operations(THEIRS[how]) / operations(nothing)
    row = {"": how, "peak, MiB, ours": round(ours, 2), "PyTorch's": round(theirs, 2)}
    row |= {"operations, ours, ×": round(work[how], 2), "PyTorch's, ×": round(theirs_work, 2)}
    rows.append(row)
draw.table(rows)

# %% [markdown]
# PyTorch's checkpoint gives the same numbers, to the bit, and holds almost the same bytes. In one point it is better:
# it *stops early*. The last operation of a layer computes the layer's output, which is not needed a second time. So
# PyTorch ends the second run as soon as all kept tensors have been computed again. Here the second run skips `down`,
# which is a quarter of its arithmetic. Ours runs to the end, and is easier to read.
#
# One mistake is easily made: PyTorch's `checkpoint_wrapper(layer)` *returns* a module. If you do not put this module
# into the model, nothing fails, but no memory is saved. The check of exercise 3 would say "nothing is recomputed"; in
# your own code, look at the peak.

# %% [markdown]
# ## The memory explorer
#
# Back to the question: 64 ranks have GPUs of 40 GB, and each rank reads one sequence of 8,192 tokens. The explorer uses
# the same formulas, for 16-bit training with fused norms. Set recompute to *selective*, and then to *full*. Each time,
# guess the answer before you look.
#
# - With full recomputation, which stages of ZeRO fit in 40 GB? And on how few ranks does stage 3 then fit in 24 GB?
# - Without recomputation, stages 1 and 2 have the same peak. The two stages differ in G alone, and when the backward of
#   the loss begins, which is the peak, there are no gradients yet. With full recomputation the peak is at another
#   moment: do the stages differ now?

# %%
play.memory(model="llama3-8b", ranks=64, batch=1, context=8192, card="40 GB")

# %% [markdown]
# ## Why, and why not
#
# **First**, make the micro-batch smaller. A is proportional to its size, and with gradient accumulation, as in notebook
# 03, the training is the same. Smaller micro-batches cost no extra arithmetic, until the matrices become too small to
# keep the device busy. But in stages 2 and 3 each micro-batch communicates again, as notebook 04 showed. A micro-batch
# of one sequence cannot be made smaller; then use recomputation:
#
# | recomputation | saves memory for | costs | use it |
# |---|---|---|---|
# | selective | about half of a layer's A | the cheap operations again | if they are fast: measure |
# | full | all but a twentieth of a layer's A | a third more arithmetic | for large models and long contexts |
# | a mixture | as much of A as needed | in between | if full saves more than needed |
#
# **Why not** recompute everything always? A third more arithmetic takes time. Selective recomputation saves nearly half
# of a layer's activations, and repeats no matrix product. Fused attention already recomputes its table inside its
# kernel. And with more ranks ZeRO needs less memory for P, G and S, so that a rank can keep more of A. Recompute as
# little as you can while the job still fits.

# %% [markdown]
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>Why does ZeRO not shard activations?</summary>
#
# ZeRO removes *copies*. P, G and S are the same on all ranks, so one copy is enough. Activations belong to the rank's
# own tokens, and no other rank has them.
# </details>
#
# <details><summary>How much does one checkpoint around the whole model save, and what does it cost?</summary>
#
# It costs one more forward, and does not lower the peak. When backward begins, all activations are computed again, and
# all of them are in memory at once.
# </details>
#
# <details><summary>What must be the same in the second run of a layer as in the first?</summary>
#
# The inputs, the parameters, the precision of autocast, and the random numbers must be the same. And after the second
# run, the program must go on with the random numbers that it would have drawn without it.
# </details>
#
# Answer from memory: how many times D numbers per token does one layer of the course's GPT keep in each way? Its input
# has D numbers. Round to whole numbers.

# %%
kept_none = 20  # your number
kept_selective = 11  # your number
kept_full = 1  # your number

# %%
guesses = ("none", kept_none, 20), ("selective", kept_selective, 11), ("full", kept_full, 1)
for how, said, due in guesses:
    print(check.predict(f"{how}, × D?", said, due))

# %% [markdown]
# In the table, the first three rows count numbers per token and layer, and the others describe a whole step:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | A of a layer | 9D + 2KE + H + 4F + 2 | exactly as predicted | – |
# | selective, A | 5D + 2KE + H + 2F; one full layer; 3D + KE | exactly as predicted | its peak within 1 % of ours |
# | full, A | D, and one layer in full | exactly as predicted | the same peak as ours |
# | full, arithmetic | 4/3, except for the head | 1.32 × | 1.24 ×: it stops early |
# | numbers | equal to those without recomputation | the same bits | the same bits |

# %% [markdown]
# ## Beat it: the least computed again (20 minutes)
#
# This challenge is open. Besides parameters and gradients, a step of a GPT of eight layers may hold 0.56, 0.46, 0.40,
# 0.34 or 0.28 times the memory that it holds without recomputation. As in exercise 3, your function changes the model
# in place. Do as few operations again as possible. The check runs a real step, and measures its peak memory and the
# operations of matrix products and of attention. You may use `recompute` on layers or on the modules in them, a
# checkpoint of your own, or PyTorch's. The losses and gradients must not change. Some models have layers with dropout
# in their own `forward`: wrap a layer's forward, and do not rewrite it.
#
# **The bound.** Let L be the number of layers, n the tokens of the batch, m the limit in numbers, and W the operations
# of the layers' forward. Without repeating a product or attention, a layer must keep k = 4D + 2KE + H + 2F numbers per
# token; this is D less than in the table above, since the result of `down` is not needed again.
#
# operations done again ≥ 2D · max(0, L · n · k − m)
#
# No placement can beat this: each of these numbers that is not kept must be computed again, by a product or by
# attention, and this takes at least 2D operations per number.
#
# Your score is the work that you avoid, (W − operations done again) / (W − bound), in percent, as the mean over the
# five limits. If you recompute all but attention in every layer, you score 19.2. The course's answer includes the
# answer of exercise 3 as one case: find a better one.
#
# `beat.least_again.measured(fn, most)` runs one step under one limit. It returns the bytes that the step holds
# (`held`), the work done again (`again`) and its bound (`least`), as multiples of the step without recomputation and of
# W. Add tries of your own to this one:


# %%
def all_but_attention(model, most):
    recompute.recompute(model.layers.values(), keep=ATTENTION)


most = 0.28
tried = beat.least_again.measured(all_but_attention, most)
what = f"operations done again; the step holds {tried.held:.2f} ×, and may hold {most} ×"
bars = {"the bound": round(tried.least, 2), "all but attention": round(tried.again, 2)}
draw.chart(bars, "× W", caption=what)


# %%
def least_again(model, most):
    """Change `model` in place: its step holds at most `most` × the memory, and few operations
    are done again.

    model: a GPT of 8 layers
    most: 0.56, 0.46, 0.40, 0.34 or 0.28
    """
    ### BEGIN SOLUTION
    layers = list(model.layers.values())
    full = {0.56: 2, 0.46: 3, 0.40: 4, 0.34: 5, 0.28: 6}[most]
    recompute.recompute(layers[:full])
    recompute.recompute(layers[full:-1], keep=MATMULS | ATTENTION)
    ### END SOLUTION


beat.least_again(least_again)

# %% [markdown]
# The course's answer recomputes some layers in one way and some in another, and does not recompute the last layer: all
# of its activations are in memory when backward begins in any case.
#
# <details><summary>How can you do better?</summary>
#
# Avoid operations that are repeated for nothing: the second run of a layer ends with `down`, whose result is not
# needed. And choose parts of a layer: a checkpoint around the MLP alone frees more bytes per repeated operation than a
# checkpoint around the whole layer.
# </details>
#
# **Read on**: [labs/memory/recompute.py](../labs/memory/recompute.py),
# [labs/memory/selective.py](../labs/memory/selective.py). Chen et al., 2016, *Training Deep Nets with Sublinear Memory
# Cost* (arXiv 1604.06174). Korthikanti et al., 2022, *Reducing Activation Recomputation in Large Transformer Models*
# (arXiv 2205.05198); you have measured its equation 1, and the rows of its table 2 without parallelism. Dao et al.,
# 2022, *FlashAttention* (arXiv 2205.14135).
#
# **Next.** A is small now. On one or a few devices P, G and S are still large, and there are not enough ranks to divide
# them. [07b Offload](07b_offload.ipynb) moves state to a memory with more room.
#
# To get a clean copy of this notebook, run `git restore notebooks/07_memory.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
