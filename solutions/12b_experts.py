# %% [markdown]
# # Experts: a model of many MLPs, of which each token uses a few
#
# *Mixtral has 47 billion parameters, and computes like a model of 13 billion. Its experts do not fit on one GPU. How do
# tokens and experts find each other, and is it then still the same training?*
#
# You need: [Collectives](02_collectives.ipynb), [DDP](03_ddp.ipynb) and [Mesh and DTensor](05_mesh_and_dtensor.ipynb);
# for two short sections also [FSDP](06_fsdp.ipynb) and [Memory](07_memory.ipynb).
# **Minutes**, by estimate: 35 without exercises, 65 with them, 25 more for the challenge.
# Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("12b")

# %%
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from IPython.display import display

from labs import cost, moe
from labs.data import Batches, corpus
from labs.kit import beat, check, draw, train
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.moe import MOE_PRESETS, ExpertParallel, MoEGPT

# %% [markdown]
# ## Question
#
# A larger MLP makes a better model, and every token pays for it: twice the parameters are twice the arithmetic. A
# **mixture of experts** separates the two. In each layer there are E MLPs, the *experts*, and a small linear layer, the
# *router*, chooses k of them for each token (Shazeer et al., 2017, arXiv 1701.06538). Mixtral 8x7B has E = 8 and k = 2
# in each of 32 layers (Jiang et al., 2024, arXiv 2401.04088).
#
# **Predict.** Mixtral has 46.7 billion parameters. All but 1.6 billion are in experts. How many billion does one token
# use?

# %%
guess_active = 12.9  # your number

mixtral = MOE_PRESETS["mixtral-8x7b"]
P, active = (count(mixtral) / 1e9 for count in (moe.parameters, moe.active_parameters))
why = f"1.6 billion outside of experts, and 2 of 8 experts: a quarter of {P - 1.6:.1f} billion."
check.predict("Billions that a token uses:", guess_active, round(active, 1), reason=why)

# %% [markdown]
# The saving is in arithmetic, and not in memory: P, G and S have all experts, at 16 bytes per parameter. FSDP could
# shard them, but then every rank gathers every expert of every layer, though each of its tokens uses only two. The
# alternative is **expert parallelism**, EP: an expert stays on its rank, and the *tokens* travel to it and back. Which
# of the two sends fewer bytes, if each of 8 ranks has 8,192 tokens?

# %%
tokens, ranks, b = 8192, 8, 2  # b: bytes of a number in 16 bits
experts = 3 * mixtral.dim * mixtral.hidden * mixtral.experts  # parameters of a layer's experts
as_fsdp = 3 * (ranks - 1) / ranks * experts * b  # gathered twice, gradients reduced once
rows = tokens * mixtral.top_k
as_ep = 4 * (ranks - 1) / ranks * rows * mixtral.dim * b  # there and back, forward and backward
equal_at = tokens * as_fsdp / as_ep
print(f"Mixtral's state: {16 * P:.0f} GB; both send as much with {equal_at:,.0f} tokens")
both = {"weights travel (FSDP)": as_fsdp, "tokens travel (EP)": as_ep}
draw.chart(both, caption="Bytes that a rank sends in a step, for one layer of Mixtral")

# %% [markdown]
# The bytes of weights do not depend on the tokens, and those of tokens do: a rank would need sixteen times as many
# tokens until both bars are equal. Below that, moving the tokens sends less.
#
# ## Picture
#
# Two ranks have five tokens each and two of four experts each. A **row** is a pair of a token and one of its experts,
# so with k = 2 each token makes two rows. Follow one token from left to right:

# %%
generator = torch.Generator().manual_seed(3)
chosen = [torch.rand(5, 4, generator=generator).topk(2).indices.sort().values for _ in range(2)]
draw.travel(chosen, experts=4)

# %% [markdown]
# Each rank sorts its rows by expert, which also sorts them by rank. Then the ranks exchange rows by one *all-to-all*,
# in which each rank sends a different piece to each other rank. The pieces are uneven, because a router scores each
# token by itself, and does not see how many rows an expert has. Each expert computes the rows that came, and the
# results take the same way back.
#
# **Predict.** How many all-to-alls does one layer need in a training step, forward and backward together? Before rows
# can travel, each rank must know how many will come.

# %%
guess_calls = 5  # your number

# %% [markdown]
# ## Build: a router
#
# A router scores all experts and chooses the k best. Then it needs k weights for the sum of their results. Three ways
# are in use. For a token with four scores, the table shows the weights of its two best experts, their sum, and the
# weight of the best expert alone:

# %%
logits, rows = torch.tensor([2.0, 1.0, 0.0, -1.0]), []
for name, (score, weigh) in moe.SCORES.items():
    two, one = (weigh(score(logits).topk(k).values).tolist() for k in (2, 1))
    told = {f"weight {n}": f"{w:.2f}" for n, w in enumerate(two)}
    rows.append({"scores": name} | told | {"sum": f"{sum(two):.2f}", "k = 1": f"{one[0]:.2f}"})
draw.table(rows)

# %% [markdown]
# Switch uses the first with k = 1 (Fedus et al., 2021), Mixtral the second, DeepSeek-V3 the third. The weights are the
# router's only link to the loss, since a choice has no gradient. So with k = 1 the last two ways never train the
# router: the weight is always 1. The course's `MoEConfig` refuses them.
#
# Nothing makes the loads of the experts equal. The first systems gave each expert a fixed **capacity**, a multiple of
# the mean load, so that all tensors had fixed sizes. A row above the capacity is *dropped*: its expert adds nothing to
# its token. A **dropless** mixture lets each expert have all of its rows. How many rows does an untrained model drop?

# %%
CONFIG = replace(MOE_PRESETS["tiny-moe"], depth=2, context=32)  # 8 experts, top-2
loader = Batches(corpus().tokens, 8, CONFIG.context)
batches = [loader[number] for number in range(3)]

every = batches[0][0].numel() * CONFIG.top_k * CONFIG.depth
for capacity in (None, 2.0, 1.25, 1.0):
    model = MoEGPT(replace(CONFIG, capacity=capacity)).double()
    model(*batches[0])
    print(f"capacity {capacity or 'none':>4}: {moe.dropped(model):3} of {every} rows dropped")

# %% [markdown]
# A capacity of 1.25 cuts the bars of busy experts, while others stay below it. In the first layer:

# %%
model = MoEGPT(CONFIG).double()  # without a capacity, to see what each expert would have
model(*batches[0])
loads, bars = model.layers["0"].mlp.router.load_E.int().tolist(), {}
most = int(1.25 * sum(loads) / len(loads))
for expert, load in enumerate(loads):
    bars[f"expert {expert}"] = {"compute": min(load, most), "waiting": max(0, load - most)}
words = {"compute": "computed", "waiting": "dropped"}
draw.chart(bars, "rows", caption=f"Rows of each expert; {most} fit", words=words)

# %% [markdown]
# Whoever trains with a capacity should print the number of dropped rows in every step. From here on, our mixtures are
# dropless.
#
# ## Build: tokens travel
#
# ### Exercise 1: count the rows (10 minutes)
#
# Before the all-to-all of rows, each rank needs two lists: how many rows it sends to each rank, and how many it
# receives from each. It can count the first list alone. The second is known only to the others, so the ranks exchange
# counts first.
#
# A token with two experts on one rank is two rows. A rank's rows for its own experts count, too. The check tries
# experts that lie on the ranks in any order, ranks without tokens, experts without rows, and a sub-group. Budget: a
# rank sends at most 8 bytes for each expert that another rank has.


# %% tags=["exercise"]
def count_rows(chosen, rank_of, group=None):
    """Return (sends, receives): two lists with a whole number for each rank of the group.

    chosen: [tokens, top_k], the numbers of the experts of this rank's tokens
    rank_of: a list, rank_of[e] is the rank in the group that has expert e
    sends: sends[r] is the number of rows that this rank sends to rank r
    receives: receives[r] is the number of rows that this rank receives from rank r
    """
    ### BEGIN SOLUTION
    rank_of_rows = torch.tensor(rank_of)[chosen.flatten()]
    sends = torch.bincount(rank_of_rows, minlength=dist.get_world_size(group))
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends, group=group)
    return sends.tolist(), receives.tolist()
    ### END SOLUTION


counted = check.count_rows(count_rows)
counted

# %% [markdown]
# ### Exercise 2: bring the results back (10 minutes)
#
# Now suppose that the rows have travelled, and that each expert has computed its rows. The results must return to their
# tokens. There are three things to undo: the all-to-all, the sort, and the k copies of each token. When a rank sorted
# its rows, it kept `order`: the i-th row that it sent was number `order[i]` of its tokens × top_k rows.
#
# Weigh each result with the router's weight, and add up the k products of each token **in the order of the experts'
# numbers**. The router names a token's experts in ascending order, so column 0 of `weights` belongs to the lowest
# number. The results come back rank by rank, which may be another order. With three experts per token or more, a sum in
# the order of arrival would have other last bits as soon as somebody moves an expert to another rank.
#
# Only forward is asked. Budget: each result is sent once, to the rank of its token.


# %% tags=["exercise"]
def bring_back(results, order, sends, receives, weights, group=None):
    """Return y [tokens, D], the weighted sum of each token's results; change no argument.

    results: [rows received, D], of the rows that came to this rank
    order: [rows sent], the place in [tokens × top_k] of each row that this rank sent
    sends, receives: lists, the numbers of rows that went to each rank and came from it
    weights: [tokens, top_k], the router's weights
    """
    ### BEGIN SOLUTION
    came_back = results.new_empty(sum(sends), results.shape[1])
    dist.all_to_all_single(came_back, results, sends, receives, group=group)
    by_token = torch.empty_like(came_back)
    by_token[order] = came_back
    by_token = by_token.view(*weights.shape, results.shape[1])
    return (weights.unsqueeze(2) * by_token).sum(dim=1)
    ### END SOLUTION


returned = check.bring_back(bring_back)
returned

# %% [markdown]
# Both together are a layer. The next cells run it on four ranks with two experts each, and compare each rank's tokens
# with the same layer in one process:

# %%
# from here on yours if they passed, else the course's
count_rows = count_rows if counted.ok else check.count_rows.expected
bring_back = bring_back if returned.ok else check.bring_back.expected


def there(x, order, sends, receives):
    """Send rows to the ranks of their experts."""
    came = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(came, x[order], receives, sends)
    return came


# %% tags=["subject"]
def layer_on_ranks(K=CONFIG.top_k):
    """Return whether this rank's tokens get what they get in one process."""
    mixture, me = MoEGPT(CONFIG).double().layers["0"].mlp.requires_grad_(False), dist.get_rank()
    torch.manual_seed(me)
    x = torch.randn(20 + me, CONFIG.dim, dtype=torch.float64)  # ranks have unequal numbers
    chosen, weights = mixture.router(x)
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    sends, receives = count_rows(chosen, [e // 2 for e in range(CONFIG.experts)])
    rows = there(x.repeat_interleave(K, 0), order, sends, receives)
    expert = there(chosen.flatten(), order, sends, receives)  # the expert of each row that came
    results = torch.zeros_like(rows)
    for e in (2 * me, 2 * me + 1):  # this rank's
        results[expert == e] = mixture.experts[str(e)](rows[expert == e])
    y = bring_back(results, order, sends, receives, weights)
    return torch.allclose(y, mixture(x), atol=1e-12), sends, receives


# %%
on_cpu = partial(run, device="cpu")
for rank, (same, sends, receives) in enumerate(on_cpu(layer_on_ranks, ranks=4)):
    print(f"rank {rank} sends {sends} and receives {receives} rows; as one process: {same}")

# %% [markdown]
# Backward takes the same way. The gradient of an all-to-all is the all-to-all in the other direction, as
# [labs/moe/exchange.py](../labs/moe/exchange.py) shows in twenty lines. So a layer of
# the course makes five all-to-alls: counts, rows and results in forward; the gradients of results and of rows in
# backward. It exchanges one count per *expert*, so that a receiver knows which rows are for which of its experts. The
# layer above has one count per rank, and must send the experts' numbers, too.
#
# ## Build: whose gradient is a mean over whom?
#
# Experts are most of the parameters, so they are divided over `ep` ranks. If a job has more ranks than that, several
# groups of `ep` ranks hold copies of the same experts. Everything else is small, and has a copy on every rank. So the
# mesh is *folded*: the same ranks are one long axis for attention and routers, and two axes for experts.
#
# | axis | ranks along it hold | their tokens |
# |---|---|---|
# | `ep` | **different** experts | differ, and travel between them |
# | `edp` | **copies** of the same experts | differ, and do not meet |
# | both together | copies of all the rest | differ |
#
# On eight ranks, for example, each group of two in the picture has copies of the same experts:

# %%
draw.mesh({"edp": 2, "ep": 4}, along="edp")

# %% [markdown]
# ### Exercise 3: the scale of an expert's gradient (10 minutes)
#
# Every rank reads as many tokens as any other, and the loss of the training is the *mean* of all ranks' losses. Each
# rank starts backward from its own loss, and ends with a gradient of each of its parameters. Make each of them the
# gradient of the mean. Before you write, follow one row in the first picture to its expert, and its gradient back:
# whose losses are in an expert's gradient by now, and whose are in a router's?
#
# A mesh has `mesh.get_group(axis)`, `mesh.size(axis)`, and `mesh.size()`, which counts all ranks. The check tries
# meshes of 4 and 6 ranks; its figures for 2 × 4 ranks are calculated, not run. Budget: one all-reduce over the ranks
# whose gradients are missing.


# %% tags=["exercise"]
def expert_gradient(gradient, is_expert, mesh):
    """Replace the gradient, in place, by the gradient of the mean of all ranks' losses.

    gradient: this rank's gradient of one parameter, [any shape]
    is_expert: whether the parameter belongs to an expert
    mesh: a labs.mesh.Mesh with the axes edp and ep
    """
    ### BEGIN SOLUTION
    group = mesh.get_group("edp") if is_expert else None
    dist.all_reduce(gradient, group=group)
    gradient /= mesh.size()
    ### END SOLUTION


scaled = check.expert_gradient(expert_gradient)
scaled

# %% [markdown]
# Whose losses were they? On a mesh of 2 × 2, the next cells let one rank's loss count at a time, and ask which
# gradients it reaches before anybody adds up anything. Ranks 0 and 1 are neighbours along `ep`; ranks 0 and 2 hold
# copies of the same experts.


# %% tags=["subject"]
def reached():
    """Return, by rank whose loss counts, whether this rank's experts and router are reached."""
    model, me, found = MoEGPT(CONFIG).double(), dist.get_rank(), []
    parallel = ExpertParallel(model, Mesh((2, 2), ("edp", "ep")))
    x, y = (part.chunk(4)[me] for part in loader[0])
    for source in range(4):
        model.zero_grad()
        (parallel(x, y) * (me == source)).backward()  # others' losses count nothing
        mlp = model.layers["0"].mlp
        parts = [[*mlp.experts.parameters()], [*mlp.router.parameters()]]
        found.append([any(p.grad.any() for p in part) for part in parts])
    return found


# %%
rows, by_rank = [], on_cpu(reached, ranks=4)
for which, name in enumerate(("experts", "router")):
    for rank, found in enumerate(by_rank):
        losses = {f"loss of rank {n}": bool(each[which]) for n, each in enumerate(found)}
        rows.append({"gradient of": f"{name}, rank {rank}"} | losses)
draw.table(rows)

# %% [markdown]
# An expert's gradient *is already a sum* over the ranks along `ep`: their rows came to it, and backward brought the
# rows' gradients. Only the sums of its copies, along `edp`, are missing. The mean is still over the losses of all
# ranks, so the divisor is the number of all ranks.

# %% [markdown]
# ### What went wrong in the wild
#
# *Symptom*: the norm of the gradients depends on the number of expert ranks; loss curves look equal. *Cause*: FSDP
# averages an expert's gradient over the ranks that hold its copies. That divides by edp, and not by edp × ep. In August
# 2025 a reporter found doubled gradients with two expert ranks, in a copy of torchtitan's layer
# ([pytorch#160285](https://github.com/pytorch/pytorch/issues/160285), open; torchtitan's fix,
# [#1551](https://github.com/pytorch/torchtitan/pull/1551), was made a day later). In July 2026 a new test of Megatron's
# FSDP found the same factor ([Megatron-LM#5956](https://github.com/NVIDIA/Megatron-LM/pull/5956), merged).
#
# The next cells repeat it on a mesh of 2 × 2 ranks, in float64. They take eight steps with each average, and compare
# the first norm with that of one process:


# %% tags=["subject"]
def by_copies(gradient, is_expert, mesh):
    """Average over the ranks that hold a copy: the bug."""
    group = mesh.get_group("edp") if is_expert else None
    dist.all_reduce(gradient, group=group)
    gradient /= dist.get_world_size(group)


right = expert_gradient if scaled.ok else check.expert_gradient.expected
AVERAGES, exact = {"all ranks": right, "its copies": by_copies}, lambda: MoEGPT(CONFIG).double()


def both():
    steps = [loader[number] for number in range(8)]
    return [train.norms_by(average, exact, steps) for average in AVERAGES.values()]


# %%
model, rows, MOST = exact(), [], 0.5  # MOST: the norm to which gradients would be clipped
for x, y in zip(*(part.chunk(4) for part in loader[0]), strict=True):
    (model(x, y) / 4).backward()
due = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
for name, steps in zip(AVERAGES, on_cpu(both, ranks=4)[0], strict=True):
    (norm, others, first), (*_, last) = steps[0], steps[-1]
    told = {"norm": f"{norm:.4f}", "one process": f"{due:.4f}"}
    told["all else, clipped"] = f"{others * MOST / norm:.4f}"
    rows.append({"the mean over": name} | told | {"loss": f"falls by {first - last:.1f}"})
draw.table(rows)

# %% [markdown]
# The loss hardly shows it: AdamW divides a gradient by its own size, so a factor that is always the same nearly
# cancels. The norm shows it, since it differs from one process's. And clipping by this norm changes other gradients.
# The column *all else, clipped* is the norm of all gradients outside of experts, after the whole has been clipped to
# 0.5: these gradients were right, and are now shorter than they should be. So compare the norm of the first step with
# that of one process, or of another mesh, before you train for a week.
#
# ## Measure: the four ledgers
#
# `labs.moe.ExpertParallel` does what your three functions do, for every layer: `split_experts` leaves each rank its
# experts, and `sync` scales the gradients. Below it trains for three steps on 2 × 2 ranks, beside two others. `fsdp-ep`
# also *shards* what `ep` copies: experts along `edp`, and everything else over all ranks, with the same scale as FSDP's
# divide factor. `torch-ep` is PyTorch's own, as torchtitan composes it: experts in three DTensors,
# `all_to_all_single_autograd`, and DDP for the rest
# ([labs/native/grouped_experts.py](../labs/native/grouped_experts.py)).


# %%
WAYS = {row.name: row for row in train.strategies.EXPERTS}


def build():
    return MoEGPT(CONFIG)


def in_both_dtypes():
    """Train in float32, and once more in float64."""
    return [train.with_experts(WAYS, make, batches) for make in (build, exact)]


told = {"record": "memory", "tell": "held"}
talk = on_cpu(in_both_dtypes, ranks=4, record="communication", tell="sent")
watched = on_cpu(train.with_experts, WAYS, build, batches, keep=False, ranks=4, **told)

# %% [markdown]
# **Numbers.** One process takes the same steps, with the four ranks' parts as micro-batches:

# %%
ONE = train.strategies.ONE_DEVICE
steps = {"micro_batches": 4, "keep": len(batches)}
[(_, alone)] = on_cpu(train.strategies.train, ONE, exact, [batches], **steps, ranks=1)
rows = []
for name in WAYS:
    parameters_of = talk[0][1][name][0]
    off = max((parameters_of[key] - p).abs().max() for key, p in alone.items())
    rows.append({"": name, "within 1e-12 of one process": bool(off < 1e-12)})
draw.table(rows)

# %% [markdown]
# **Bytes sent.** In a layer let L of a rank's rows leave it, and C rows come to it. In forward it sends L rows and C
# results; in backward, as many gradients. So the rank sends 2 (L + C) × D numbers, and 8 bytes for the count of each
# expert elsewhere ([labs/cost/experts.py](../labs/cost/experts.py)). L and C depend on the router, so the formula takes
# the loads that the run has counted. The average of gradients comes on top. **Bytes held** are P, G and S:

# %%
job, ledgers = cost.Job(CONFIG, batch=2, ranks=4), {}
for number, name in enumerate(WAYS):
    predicted = WAYS[name].predict(job, loads=[each[0][name][1] for each in talk])
    step = len(batches) * (number + 1) - 1
    calls = talk.recording.counts(0, step)["all_to_all"]
    ledgers[f"{name}: sent"] = predicted.sent, talk.recording.sent(0, step)
    said, held = predicted.held, watched.recording.held(0, step)
    ledgers |= {f"{name}: {kind}": (getattr(said, kind), held[kind]) for kind in "PGS"}
ledger = draw.ledger(ledgers, within=0)
assert ledger.agrees
ledger

# %% [markdown]
# All three agree with the formulas to the byte. `ep` and PyTorch's send the same. `fsdp-ep` holds less than half of P,
# G and S, and sends a third more for it.

# %%
why = "Counts, rows and results in forward; two kinds of gradients in backward."
calls //= CONFIG.depth  # of one layer
check.predict("All-to-alls of a layer in a step:", guess_calls, calls, reason=why)

# %% [markdown]
# **Time** depends on the router. Nobody can combine results until the busiest rank has computed its rows. The next
# cells run one layer of 8 experts on four ranks twice: with a router that has been balanced, and with one that prefers
# experts 0 and 1, which are both on rank 0. Each row takes 150 µs longer than it would here, as in a larger model:


# %% tags=["subject"]
def one_step(skewed):
    model = MoEGPT(replace(CONFIG, depth=1, context=64, is_biased=True)).double()
    parallel = ExpertParallel(model, Mesh((1, 4), ("edp", "ep")))
    part = [each.chunk(4)[dist.get_rank()] for each in Batches(corpus().tokens, 8, 64)[0]]
    for _ in range(30):
        parallel(*part)
        moe.balance_biases(model, 0.006)
    model.layers["0"].mlp.router.bias[:2] += 10 * skewed
    train.slow_experts(model, 150e-6)
    mark("step")
    parallel(*part).backward()
    mark("end")
    return train.take_loads(model)[0]


# %%
KINDS, runs, rows = {"balanced": False, "skewed": True}, {}, {}
for name, skewed in KINDS.items():
    runs[name] = on_cpu(one_step, skewed, ranks=4, record="communication")
    loads = [sum(each) for each in zip(*runs[name], strict=True)]
    rows[name] = [sum(loads[2 * rank : 2 * rank + 2]) for rank in range(4)]
display(draw.rows_by_rank(rows, [sum(each) / 4 for each in rows.values()]))
draw.timeline(*(job.recording for job in runs.values()), step=0, names=list(runs))

# %% [markdown]
# A balanced rank has about a quarter of the 1,024 rows. The busiest skewed one has all of them, so the 150 µs of a row
# add up to 154 ms there, and to about 38 ms on a balanced one; the rest of each step is the same in both, and is no
# small part of it on a laptop. The other three ranks wait in the third all-to-all, which brings results back.
# **Memory** follows the rows, too: a rank keeps the activations of all rows that it computes.

# %%
watch = partial(on_cpu, one_step, ranks=4, record="memory")
heavy = [watch(skewed).recording for skewed in KINDS.values()]
before, after = ([each.held(rank, 0)["A"] for rank in (0, 3)] for each in heavy)
assert after[0] > before[0] and after[1] < before[1]
for rank in (0, 3):
    display(draw.memory(*heavy, step=0, ranks=[rank], names=[*KINDS]))

# %% [markdown]
# With the rows, the activations of rank 0 grow, and those of rank 3 shrink. So a rank's peak follows from what its
# router chooses, and nobody knows it before the run. A GPU that is nearly full runs out of memory in the step in which
# many tokens choose its experts.
#
# ## Keep the loads even
#
# Why would a router prefer an expert? An expert with more rows gets more training, and may become better, so that the
# router prefers it more. There are two remedies, both in [labs/moe/router.py](../labs/moe/router.py):
#
# * The **balance loss** is E Σ f P, summed over the experts, where f is the fraction of rows that an expert got and P
#   its mean score. It is 1 if all loads are equal and a token's scores sum to 1. It is added to the model's loss with a
#   small weight, and its gradient mixes with the loss's own.
# * A **bias** for each expert is added to its score for the *choice* alone (DeepSeek-AI, 2024, arXiv 2412.19437). After
#   each step it rises by a fixed rate if the expert had fewer rows than the mean, and falls if it had more. No
#   gradient changes.
#
# Three trainings of the same model follow, one on each rank. They differ in the remedy, and the one with the bias also
# in its scores: DeepSeek-V3's, which are sigmoids. Each is then measured on text that it has not read.


# %%
from torch.nn.functional import cross_entropy

REMEDIES = {"no balancing": {"balance": 0.0}, "balance loss": {"balance": 0.02}}
REMEDIES["bias"] = {"balance": 0.0, "is_biased": True, "scores": "sigmoid"}


# %% tags=["subject"]
def one_training(steps=60):
    """Train as this rank's remedy says; return the rows of the last layer, and a loss."""
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    model = MoEGPT(replace(CONFIG, context=64, **[*REMEDIES.values()][dist.get_rank()]))
    optimizer = torch.optim.AdamW(model.parameters(), **train.ADAMW)
    data, found = Batches(corpus().tokens, 6, 64), []
    for step in range(steps):
        model(*data[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.layers["1"].mlp.router.load_E.tolist())
        moe.balance_biases(model, 0.01, alone)  # changes only a router that has biases
        train.take_loads(model)
    x, y = (torch.cat(part) for part in zip(*(data[steps + n] for n in range(20)), strict=True))
    return found, cross_entropy(model(x).flatten(0, 1), y.flatten()).item()  # no balance loss


# %%
by_step, losses = zip(*on_cpu(one_training, ranks=3, tell="three trainings"), strict=True)
for name, loss in zip(REMEDIES, losses, strict=True):
    print(f"{name:14} loss {loss:.3f}")
draw.expert_loads(dict(zip(REMEDIES, by_step, strict=True)))

# %% [markdown]
# Every token chooses two of eight experts, so an expert can have four times its even share at most. Without balancing,
# one expert ends there, with nearly every token, and others learn nothing. With either remedy all experts stay in use.
# The losses hardly differ: in two more trainings of each kind, on other parts of the corpus, they were at most 0.04
# apart, in other orders. So short a run cannot show what unused experts cost. A balance loss is computed for each
# micro-batch of each rank, so it asks each of them to be even. The bias looks at the sum over all ranks.
#
# ## What went wrong in the wild: recomputation routes anew
#
# With activation checkpointing, a layer runs once more in backward. If the router is inside, it chooses once more. On a
# GPU, sums may round differently in the second run, and a token whose second and third scores are nearly equal then
# changes an expert. In NeMo Automodel the two runs had different numbers of rows, and the first backward failed. A fix
# of June 2026 saves the router's output ([#2635](https://github.com/NVIDIA-NeMo/Automodel/pull/2635), merged). In July
# a report says that this is not enough where rows are sent to other ranks
# ([#3325](https://github.com/NVIDIA-NeMo/Automodel/issues/3325), open). On this CPU both runs round alike, so here the
# router gets a little noise:

# %%
from torch.utils.checkpoint import CheckpointError, checkpoint

from labs.memory.recompute import recompute
from labs.model import MLP


class Unsteady(moe.Router):
    """A router whose input differs a little from run to run."""

    def forward(self, x_ND):
        return super().forward(x_ND + 0.02 * torch.randn(x_ND.shape, generator=NOISE))


NOISE = torch.Generator()


# %% tags=["subject"]
def backward_of(way, capacity):
    """Return x's gradient and the error, for a layer that runs once, or partly again."""
    torch.manual_seed(0)
    NOISE.manual_seed(1)
    experts = moe.Experts({str(e): MLP(CONFIG) for e in range(8)})
    layer = moe.Mixture(Unsteady(64, 8, 2, CONFIG.scores, False), experts, None, capacity)
    x = torch.randn(256, 64, requires_grad=True)
    recompute(experts.values()) if way == "experts again" else None
    y = checkpoint(layer, x, use_reentrant=False) if way == "layer again" else layer(x)
    try:
        y.square().sum().backward()
    except CheckpointError:
        return None, "CheckpointError"
    return x.grad, ""


# %%
rows = []
for capacity in (None, 0.5):
    due, _ = backward_of("once", capacity)
    for way in ("layer again", "experts again"):
        gradient, error = backward_of(way, capacity)
        right = "right" if not error and torch.equal(gradient, due) else "wrong"
        told = {"capacity": capacity or "none", "computed": way, "PyTorch": error or "no error"}
        rows.append(told | {"gradient": right})
draw.table(rows)

# %% [markdown]
# Without a capacity the experts get other numbers of rows in the second run, and PyTorch raises an error. *With* this
# capacity, of half the even share, all experts are full in both runs: all shapes are the same, other tokens are in
# them, and nothing is reported. Only the numbers tell. The remedy is to choose once: recompute the experts, and keep
# the router out of it.
#
# ## Why, and why not
#
# **Why**: experts add parameters without adding arithmetic. EP divides their P, G and S by ep without sending a weight.
# What it sends grows with the tokens, and not with the number of experts.
#
# **Why not**: all-to-alls wait in the middle of every layer, so ep stays inside fast links as tp does, or the model
# limits how many nodes a token may visit. With few tokens per rank each expert gets too few rows for an efficient
# product. And a rank's time and memory depend on the data. If all experts fit with FSDP, and ranks have many tokens,
# FSDP alone is simpler.
#
# ## Optional: the names of Mixtral
#
# `labs.moe.load_mixtral` reads Mixtral's weights under Hugging Face's names, and Qwen3-MoE's, also into a model whose
# experts are split: then a rank reads its own experts alone.

# %%
from labs.moe.mixtral import names

listed = names(CONFIG)
for ours in ("layers.0.mlp.router.gate.weight", "layers.0.mlp.experts.7.down.weight"):
    print(f"{ours:36} {listed[ours]}")

# %% [markdown]
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>What must ranks tell each other before rows can travel, and what do they send in backward?</summary>
#
# They exchange counts: how many rows each rank has for each expert of each other rank. In backward, the gradients of
# results go where the rows went, and the gradients of rows come back. Counts are known by then.
# </details>
#
# <details><summary>Over which ranks is an expert's gradient added up, and by what is it divided? Why would a mean over
# its copies be wrong?</summary>
#
# It is added up over edp, and divided by edp × ep. It already is a sum over the tokens of all ranks along ep, so a mean
# over the copies would be ep times too large.
# </details>
#
# <details><summary>A mixture has a capacity and is recomputed in backward. Why can its gradient be wrong without an
# error?</summary>
#
# If the router chooses anew and some tokens change their experts, full experts still have as many rows as before. All
# shapes are the same, so nothing can be noticed but the numbers.
# </details>
#
# Let a rank have M rows of D numbers with b bytes, of which L leave it, while C come, in a job of edp × ep ranks:
#
# | | predicted | ours | PyTorch's |
# |---|---|---|---|
# | all-to-alls of a layer | 5 | 5 | 5 |
# | rows, gradients included | 2 (L + C) D b, and 8 bytes per expert elsewhere | exactly | exactly |
# | even loads | L = C = (ep − 1)/ep × M | | |
# | P, G, S of experts | 1/ep | exactly | exactly |
# | numbers | equal to one process's | within 1e-12, in float64 | within 1e-12, in float64 |
#
# ## Beat it: the busiest rank computes least (25 minutes)
#
# You cannot choose the loads, but you can choose the rank of each expert. Place 16 experts on four ranks, four on each.
# You know the loads that a run has recorded, of three layers with four micro-batches each. An expert may be busy in one
# micro-batch and idle in the next. Try a placement of the first layer: edit the list, and run the cell. The rows travel
# in a real job, and the picture counts those that each rank receives:

# %%
mine = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]  # the rank of each expert
first = beat.place_experts.cases["first layer"]
tried = beat.place_experts.measured("first layer", mine)
least = [max(sum(load) / 4, *load) for load in first]
draw.rows_by_rank({f"micro-batch {n}": rows for n, rows in enumerate(tried)}, least)

# %% [markdown]
# **The bound.** In micro-batch m let expert e have w(m, e) rows, and let R = 4 be the number of ranks. Then the busiest
# rank of this micro-batch computes at least
#
# > max(Σₑ w(m, e) / R, maxₑ w(m, e)) rows.
#
# Nothing can beat it, since R ranks share all rows, so one of them has at least an R-th, and no expert is on two ranks.
#
# The score of a layer is 100 × the sum of the bounds / the sum of the busiest ranks' rows, and yours is the mean over
# three layers. Experts side by side, as `ExpertParallel` places them, score 69.4. No placement scores more than 91.9: a
# search has tried all of them.


# %% tags=["exercise"]
def place_experts(loads, ranks):
    """Return the rank of each expert, a list; every rank gets equally many experts.

    loads: loads[m][e] is the number of rows of expert e in micro-batch m
    """
    ### BEGIN SOLUTION
    totals = [sum(of_expert) for of_expert in zip(*loads, strict=True)]
    on_rank = [[] for _ in range(ranks)]
    for e in sorted(range(len(totals)), key=lambda e: -totals[e]):
        free = [own for own in on_rank if len(own) < len(totals) // ranks]
        min(free, key=lambda own: sum(totals[i] for i in own)).append(e)
    return [next(r for r in range(ranks) if e in on_rank[r]) for e in range(len(totals))]
    ### END SOLUTION


beat.place_experts(place_experts)

# %% [markdown]
# The course's answer goes from the busiest expert to the idlest, and gives each to the rank with the fewest rows in
# all four micro-batches together. It does not see that two experts may be busy at the same time.
#
# ## The way out
#
# An ordinary script does all of this without the course's tools: [scripts/ep.py](../scripts/ep.py). Only the data and
# the model with its router are the course's. From the root of the repository, run
# `torchrun --nproc-per-node 4 scripts/ep.py`.
#
# <details><summary>The script</summary>
#
# ```python
# from dataclasses import replace
#
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.distributed._functional_collectives import all_to_all_single_autograd
#
# from labs.data import Batches, corpus
# from labs.moe import MOE_PRESETS, MoEGPT
#
# dist.init_process_group()
# rank, ranks = dist.get_rank(), dist.get_world_size()
# device = "cuda" if torch.cuda.is_available() else "cpu"
# if device == "cuda":
#     torch.cuda.set_device(rank % torch.cuda.device_count())
#
#
# class SplitExperts(nn.Module):
#     """The experts of this rank; rows come to them from all ranks, and their results go back."""
#
#     def __init__(self, experts):
#         super().__init__()
#         self.each = len(experts) // ranks  # the ranks must divide the experts
#         self.experts = nn.ModuleList(list(experts.values())[rank * self.each : (rank + 1) * self.each])
#
#     def forward(self, rows, counts):  # rows sorted by expert, and the number of rows of each expert
#         received = torch.empty_like(counts)
#         dist.all_to_all_single(received, counts)
#         sends, receives = (each.view(ranks, -1).sum(1).tolist() for each in (counts, received))
#         rows = all_to_all_single_autograd(rows, receives, sends, dist.group.WORLD)
#         parts = rows.split(received.tolist())  # rank by rank, and expert by expert
#         results = torch.cat([self.experts[n % self.each](part) for n, part in enumerate(parts)])
#         return all_to_all_single_autograd(results, sends, receives, dist.group.WORLD)
#
#
# config = MOE_PRESETS["tiny-moe"]
# model = MoEGPT(replace(config, balance=0.0)).to(device)  # a balance loss would be each rank's own
# for layer in model.layers.values():
#     layer.mlp.experts = SplitExperts(layer.mlp.experts)
#
# optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
# batches = Batches(corpus().tokens, 8, config.context, rank=rank, ranks=ranks)
# for step in range(10):
#     x, y = (part.to(device) for part in batches[step])
#     loss = model(x, y)
#     loss.backward()
#     for name, p in model.named_parameters():
#         if ".experts." not in name:  # an expert's gradient has the tokens of all ranks already
#             dist.all_reduce(p.grad)
#         p.grad /= ranks
#     optimizer.step()
#     optimizer.zero_grad()
#     mean = loss.detach().clone()
#     dist.all_reduce(mean)
#     if rank == 0:
#         print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)
#
# dist.barrier()
# dist.destroy_process_group()
# ```
# </details>
#
# **Read on**: [labs/moe/router.py](../labs/moe/router.py), [labs/moe/mixture.py](../labs/moe/mixture.py),
# [labs/moe/exchange.py](../labs/moe/exchange.py) and
# [labs/moe/expert_parallel.py](../labs/moe/expert_parallel.py), in this order. Lepikhin et al., 2020, *GShard* (arXiv
# 2006.16668), section 3.2. Fedus et al., 2021, *Switch Transformers* (arXiv 2101.03961). DeepSeek-AI, 2024,
# *DeepSeek-V3 Technical Report* (arXiv 2412.19437), sections 2.1.2 and 3.2.2.
#
# **Next.** What is still unsolved: all strategies so far were written by hand, one for each way to split. Could a
# compiler work out what is to be sent, so that only the mesh is left to choose? [GSPMD](13_gspmd.ipynb).
#
# To get a clean copy of this notebook, run `git restore notebooks/12b_experts.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
