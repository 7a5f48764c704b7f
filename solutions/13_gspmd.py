# %% [markdown]
# # GSPMD: you annotate layouts, and a compiler communicates
#
# *In every notebook so far somebody wrote down what to send. Could a compiler work that out from the layouts alone? And
# would it send as little as you did?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), [FSDP](06_fsdp.ipynb) and [Tensor
# parallelism](09_tensor_parallel.ipynb).
# **Minutes**, by estimate: 25 without exercises, 70 with them, 15 more for optional parts, 25 more for the challenge.
# The machine works for a minute of it, in 1 GB of memory. It needs JAX, too: `make learn EXTRA=gspmd` adds it.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("13")

# %% [markdown]
# ## Question
#
# PaLM, with 540 billion parameters, was trained on 6,144 TPUs. In each of two pods, every weight was cut over 12 × 256
# chips: 12-way tensor parallelism times 256-way FSDP, without a pipeline, at an MFU of 46.2 % (arXiv 2204.02311,
# section 4). In its model code nobody called a collective. People *annotated* some arrays: this dim is cut along that
# mesh axis. XLA, the compiler behind JAX, worked out the layouts of all other arrays, and added the collectives. The
# method is **GSPMD** (arXiv 2105.04663); in today's JAX its successor,
# [Shardy](https://docs.jax.dev/en/latest/shardy_jax_migration.html), does this part.
#
# It does not always go so well. In March 2024 somebody annotated Llama 2 for FSDP, found the training on several
# machines slow, and wrote a test with one layer. Their question was: **why does the compiler all-gather my input, and
# not the weight?** ([pytorch/xla#6778](https://github.com/pytorch/xla/issues/6778)). Another reader of the same issue
# reports that TPUs which were used to 70 % on one machine were used to 30 % on 32.
#
# When you have finished this notebook, you can answer that question, and say what to annotate.
#
# JAX can pretend that this CPU is many devices. Each job below starts a process of its own, in which JAX sees as many
# devices as we ask for. If JAX is missing, the next cell says so.

# %%
from labs.kit.launch import jax_missing, or_skip

or_skip(jax_missing())

# %%
from dataclasses import replace
from functools import partial

import torch

from labs import gspmd
from labs.data import Batches, corpus
from labs.dtensor import Replicate, Shard
from labs.kit import beat, check, draw, play, train
from labs.kit.launch import on_devices, run
from labs.model import GPT, PRESETS, Layer
from labs.xla.hlo import counted

# %% [markdown]
# ## Predict
#
# Here is that test in JAX, with four devices along one axis, `dp`. The batch x is cut along its rows, the weight w
# along its columns, as in FSDP. Nothing is said about the result (`annotated` is for later). The compiled program is
# text, called HLO, with one operation per line; the cell looks for its all-gather. x has 8, 64, 512 or 4,096 tokens,
# and w is 256 × 256. For how many of these four batches does XLA gather the weight?

# %%
guess_weight = 2  # your number


# %% tags=["subject"]
def gathered(tokens, annotated=False):
    """The line of HLO that gathers something."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = PartitionSpec("dp", None), PartitionSpec(None, "dp")
    x = jax.ShapeDtypeStruct((tokens, 256), "float32", sharding=NamedSharding(mesh, rows))
    w = jax.ShapeDtypeStruct((256, 256), "float32", sharding=NamedSharding(mesh, columns))
    keep = jax.lax.with_sharding_constraint if annotated else lambda y, layout: y
    text = jax.jit(lambda x, w: keep(x @ w, NamedSharding(mesh, rows))).lower(x, w)
    text = text.compile().as_text()
    return next(line.strip() for line in text.splitlines() if " all-gather(" in line)


# %%
BATCHES = 8, 64, 512, 4096
lines = on_devices(lambda: [gathered(tokens) for tokens in BATCHES], devices=4)
print(lines[0].split(", channel")[0])
shapes = [line.split("f32")[1].split("{")[0] for line in lines]
weights_moved = shapes.count("[256,256]")
of_four = {"unit": "batches", "tolerance": 0}
check.predict("XLA gathers the weight for", guess_weight, weights_moved, **of_four)

# %% [markdown]
# The printed line gathers `f32[8,256]`: that is x, the input, as in the issue. It is no bug: XLA did what it was told,
# and with 512 tokens the same program gathers the weight. So what is the rule?
#
# ## Picture
#
# Look at a program of two products, y = x @ w1 @ w2, forward and backward, on 2 × 2 devices. Somebody gave the layouts
# of x, w1, w2 and y, and each gradient (`d` stands for "gradient of") has the layout of its tensor. Nobody said
# anything about h, the tensor between the products, or about its gradient dh.
#
# Each product is written with letters, one for each dim: the rows and columns of two matrices, `->`, and those of the
# result. A letter that the result lacks is summed over.
#
# | product | letters | so |
# |---|---|---|
# | h = x @ w1 | `ik,kj->ij` | `i`, the rows of x, are the rows of h; `j`, the columns of w1, are its columns |
# | dh = dy @ w2ᵀ | `ik,jk->ij` | w2 is transposed: its *rows*, `j`, are the columns of dh |
# | dw1 = xᵀ @ dh | `ki,kj->ij` | x is transposed: the sum over `k` is over its rows, the batch |


# %% tags=["subject"]
def two_products(x, dy, w1, w2, t=torch.t):
    h, dh = x @ w1, dy @ t(w2)
    return h @ w2, dh @ t(w1), t(x) @ dh, t(h) @ dy


SIZES, WHOLE = {"dp": 2, "tp": 2}, Replicate()
ROWS = [Shard(0), WHOLE]
GIVEN = {"x": ROWS, "dy": ROWS, "w1": [WHOLE, Shard(1)], "w2": [WHOLE, Shard(0)]}
SHAPES = {"x": (64, 32), "dy": (64, 32), "w1": (32, 128), "w2": (128, 32)}

# %%
results = {"y": ROWS, "dx": ROWS, "dw1": GIVEN["w1"], "dw2": GIVEN["w2"]}
arguments = [(SHAPES[name], layout) for name, layout in GIVEN.items()]
in_jax = partial(two_products, t=lambda matrix: matrix.T)
xla = train.by_xla(in_jax, SIZES, arguments, [*results.values()])
small = gspmd.trace(two_products, *map(torch.ones, SHAPES.values()))
ends = dict(zip(small.arguments + small.results, GIVEN | results, strict=True))
between = dict(zip((op.outputs[0] for op in small.operations[:2]), ("h", "dh"), strict=True))
known = {value: (GIVEN | results)[name] for value, name in ends.items()}
words = ", ".join(f"{kind} × {number}" for kind, number in counted(xla).items())
words = f"XLA sends {sum(each.sent for each in xla):,} bytes for the same program: {words}."
play.propagation(small, SIZES, known, ends | between, words)

# %% [markdown]
# A coloured line is a cut. Above are the four layouts that had to be worked out: `dp` passes from the rows of x to
# those of h, since both are `i`, and `tp` from the columns of w1 to those of h, along `j`. With a kernel, the slider
# plays the same, frame by frame.
#
# Below is what the layouts cost. If the inputs are cut along a letter that is summed over, each device has only a part
# of the sum. Along `tp` these are y and dx, the two all-reduces of tensor parallelism; along `dp` they are the
# gradients of the weights, the all-reduces of DDP. XLA sends as many bytes for the same layouts, in two calls, since it
# packs arrays with the same group together.
#
# ## Build: a layout passes along a letter
#
# How can a compiler know the layout of *every* tensor? By what you just saw, in both directions: if the rows of x are
# cut, `i` is cut, and then the rows of the result are. And if somebody wants the *result* cut in columns, `j` is cut,
# so w should be.
#
# ### Exercise 1: pass it on (10 minutes)
#
# `dims` has the letters of each tensor, inputs first and the result last. For each tensor, `cut` has the number of the
# dim that is cut, or None where nothing is known yet. One letter is cut. Fill in its dim for all other tensors that
# have this letter, in the list that you are given or in a new one.


# %% tags=["exercise"]
def pass_on(dims, cut):
    """pass_on(["ik", "kj", "ij"], [0, None, None]) is [0, None, 0].

    Of [None, None, 1] it makes [None, 1, 1].
    """
    ### BEGIN SOLUTION
    [letter] = {own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None}
    known = zip(dims, cut, strict=True)
    return [own.index(letter) if dim is None and letter in own else dim for own, dim in known]
    ### END SOLUTION


passed_on = check.pass_on(pass_on)
passed_on

# %% [markdown]
# ## Build: two letters, one axis
#
# Under FSDP, x is cut along `i`, its batch, and w along `j`. Both letters are cut along the same axis of the mesh, and
# a product can follow only one of them. The tensor that is cut along the other one has to move. Which one should it be?
#
# ### Exercise 2: the choice (10 minutes)
#
# To move a tensor costs its elements, which are in `sizes`. Before you write it: which letter would you follow, with
# 8,192 elements in x and 4,096 in w?


# %% tags=["exercise"]
def meet(dims, cut, sizes):
    """Return the letter to follow; of equals, that of the tensor that comes first.

    Each tensor known to be cut along a different letter must then move, with all its elements:
    choose the letter for which these are fewest.

    meet(["ik", "kj", "ij"], [0, 1, None], [8192, 4096, 4096]) is "i": only the 4096 of w move.
    """
    ### BEGIN SOLUTION
    stays = {}
    for own, dim, size in zip(dims, cut, sizes, strict=True):
        if dim is not None:
            stays[own[dim]] = stays.get(own[dim], 0) + size
    return max(stays, key=stays.get)
    ### END SOLUTION


met = check.meet(meet)
met

# %% [markdown]
# ## Build: until nothing is new
#
# Two rules, and a loop around them: that is all of the propagation. A layout may be given for any tensor, also for the
# last result, so news travel from results to inputs as well. How often do you have to visit each operation?
#
# ### Exercise 3: propagate (15 minutes)
#
# Visit the operations, and pass on what is known, until a whole round finds nothing new. If the tensors of an operation
# are cut along two letters, `meet` says which one it follows. `pass_on` takes the cuts of one letter, so give it None
# for a tensor that is cut along the other. A cut that is known stays.


# %% tags=["exercise"]
def propagate(operations, cut, sizes, pass_on, meet):
    """Return {name: dim that is cut}, for every tensor that a cut reaches.

    operations: a list of pairs, such as (["ik", "kj", "ij"], ["x", "w1", "h"]): the letters of
        the tensors, inputs first, and the names of these tensors
    cut: {name: dim} of the tensors whose cut is given
    sizes: {name: number of elements}
    pass_on, meet: the functions of exercises 1 and 2
    """
    ### BEGIN SOLUTION
    found, before = dict(cut), 0
    while len(found) > before:
        before = len(found)
        for dims, names in (*operations, *reversed(operations)):
            here = [found.get(name) for name in names]
            if any(dim is not None for dim in here):
                letter = meet(dims, here, [sizes[name] for name in names])
                pairs = zip(dims, here, strict=True)
                alike = [dim if dim == own.find(letter) else None for own, dim in pairs]
                news = zip(names, pass_on(dims, alike), strict=True)
                found = {name: dim for name, dim in news if dim is not None} | found
    return found
    ### END SOLUTION


# %%
answer = check.propagate(propagate)
answer

# %% [markdown]
# Let it work out the two products of the picture, one axis of the mesh after the other:

# %% tags=["subject"]
# yours if it passed, else the course's
pass_on = pass_on if passed_on.ok else check.pass_on.expected
meet = meet if met.ok else check.meet.expected
propagate = propagate if answer.ok else check.propagate.expected

tensor = ends | between
products = [(op.dims, [tensor[value] for value in op.values]) for op in small.operations]
elements = {name: value.bytes // 4 for value, name in tensor.items()}
for number, axis in enumerate(SIZES):
    known = {n: p[number].dim for n, p in (GIVEN | results).items() if p[number] != WHOLE}
    found = propagate(products, known, elements, pass_on, meet)
    print(f"along {axis}:", {name: dim for name, dim in found.items() if name not in known})

# %% [markdown]
# These are the four layouts that the picture worked out: along `dp`, h and dh are cut in rows (dim 0), and along `tp`
# in columns (dim 1).
#
# ### The answer to the question
#
# [labs/gspmd/propagation.py](../labs/gspmd/propagation.py) is this loop, for any mesh. Does XLA follow your two rules,
# too? Near the crossing, where x and w are equally large, the rule is put to the test. And
# what if the *result* is annotated, so that it must be cut along its rows?


# %% tags=["subject"]
def sent_by_rule(tokens, annotated=False):
    """The bytes that a device sends if labs.gspmd decides."""
    graph = gspmd.trace(lambda x, w: (x @ w,), torch.ones(tokens, 256), torch.ones(256, 256))
    given = dict(zip(graph.arguments, ([Shard(0)], [Shard(1)]), strict=True))
    given |= {graph.results[0]: [Shard(0)]} if annotated else {}
    return gspmd.lower(graph, gspmd.propagate(graph, (4,), given)).sent


TOKENS, A_ROW = (8, 64, 252, 256, 260, 1024, 4096), 768  # 3/4 of a row of 1,024 bytes
tries = [(tokens, False) for tokens in TOKENS] + [(8, True), (64, True)]

# %%
found = on_devices(lambda: [gathered(*each) for each in tries], devices=4)
sent = [A_ROW * int(line.split("f32[")[1].split(",")[0]) for line in found]
ours = [sent_by_rule(*each) for each in tries]
agree = sum(size == other for size, other in zip(sent[:7], ours[:7], strict=True))
print(f"as in the issue: XLA sends what the rule says in {agree} of {len(TOKENS)} cases")
print(f"8 tokens, the result annotated: XLA sends {sent[7]:,} bytes, labs.gspmd {ours[7]:,}")
places = [(tokens, size) for (tokens, _), size in zip(tries, sent, strict=True)]
gather = {"gather x": [(t, A_ROW * t) for t in TOKENS]}
gather |= {"gather w": [(t, A_ROW * 256) for t in TOKENS]}
dots = {"XLA, as in the issue": places[:7], "XLA, result annotated": places[7:]}
what = "x @ w on four devices: x is cut in rows, w in columns"
draw.on_scales(gather, "tokens in x", "bytes that a device sends", what, dots)

# %% [markdown]
# That is the answer to the question: here the compiler moves the smaller tensor. The lines cross where x has as
# many rows as w, and with 252 and with 260 tokens XLA is on the cheaper side. With many tokens the weight moves, which
# is FSDP. With few, the tokens move: a small batch turns FSDP into something else.
#
# The circles in the chart say what to annotate: *activations*. If the result has to be cut along its rows, XLA gathers
# w, even for 8 tokens. That is FSDP, as was wanted, and it costs many times the bytes. (`labs.gspmd` still looks for
# the fewest bytes: it gathers x, and then moves the pieces of the result.)
# [labs/xla/annotations.py](../labs/xla/annotations.py) annotates the activations between the layers.
#
# ## What is sent?
#
# Take three products in which the result is annotated. In A, x is cut along its rows and w is whole. B is FSDP. In C,
# x is cut along its columns and w along its rows, so that each device has a partial sum. For how many of the three does
# XLA send nothing?

# %%
guess_nothing = 1  # your number

LARGE = (4096, 64), (64, 128)
PRODUCTS = {
    "A": (LARGE, (Shard(0), Replicate(), Shard(0))),
    "B": (LARGE, (Shard(0), Shard(1), Shard(0))),
    "C": (LARGE, (Shard(1), Shard(0), Shard(0))),
}
sent = train.products(PRODUCTS)
nothing = sum(each["XLA"][0] == 0 for each in sent.values())
check.predict("XLA sends nothing for", guess_nothing, nothing, unit="product", tolerance=0)

# %%
draw.products(PRODUCTS, sent)

# %% [markdown]
# A sharded tensor need not be gathered: in A, the rows of the result are where the rows of x are. In B all three agree.
# In C they do not. XLA all-reduces 4,096 × 128 partial sums, and each device then keeps a quarter of the rows.
# `labs.dtensor` (notebook 05) reduce-scatters them, for half of the bytes. It decides as each operation is called: the
# pieces can be multiplied as they are, without a message, so it does that, and pays when the result is wanted.
# `labs.gspmd` knows the whole program before it runs: it moves the small inputs, and never has a partial sum. So the
# rule above is one for inputs; it does not say that XLA always sends the least.
#
# ## A layer, forward and backward
#
# Now a whole layer of the course's GPT. These layouts are given
# ([labs/gspmd/annotated_layer.py](../labs/gspmd/annotated_layer.py)), and all others follow. A gradient has the layout
# of its tensor.
#
# | the weight of | the axis that cuts its outputs | its inputs | because |
# |---|---|---|---|
# | q, k, v, gate, up | `tp` | `dp` | each rank along `tp` has its own heads, and columns of the MLP |
# | o, down | `dp` | `tp` | each rank takes the outputs of its own heads, or columns |
# | a norm | `dp` | | it has one dim |
# | tokens and activations | `dp`: the batch | | |
#
# An axis that the mesh does not have cuts nothing. So the *mesh* chooses: `dp` alone is FSDP, `tp` alone is tensor
# parallelism, and with both each matrix is tiled. Backward needs no rules of its own: it is made of products, too. How
# many all-reduces will there be in forward and backward, if the matrices are cut as in tensor parallelism?

# %%
guess_reduces = 4  # your number

config = replace(PRESETS["tiny"], depth=1, heads=8, kv_heads=8)  # a head for each device
layer = Layer(config)
names, fn = [name for name, _ in layer.named_parameters()], gspmd.forward_and_backward(layer)
tensors = [torch.randn(16, config.context, config.dim) for _ in "xg"]
tensors += [p.detach() for p in layer.parameters()]
graph = gspmd.trace(fn, *tensors)


# %% tags=["subject"]
def laid_out(sizes):
    given = gspmd.given(graph, names, tuple(sizes))
    return gspmd.lower(graph, gspmd.propagate(graph, tuple(sizes.values()), given))


LAYER = {"TP": {"tp": 4}, "FSDP": {"dp": 4}, "FSDP × TP": {"dp": 2, "tp": 2}}
programs = {name: laid_out(sizes) for name, sizes in LAYER.items()}
reduces = programs["TP"].counts["all_reduce"]
check.predict("All-reduces:", guess_reduces, reduces, tolerance=0)

# %% [markdown]
# Those are Megatron's: two in forward, two in backward, and nobody wrote them. The layouts behind them are easy to
# find: let your own loop work on the whole layer.

# %% tags=["subject"]
operations = [(op.dims, op.values) for op in graph.operations]
elements = {value: value.bytes // 4 for _, values in operations for value in values}
print(f"{len(operations)} operations on {len(elements)} values")
for axis in ("dp", "tp"):
    given = gspmd.given(graph, names, (axis,))
    known = {value: p[0].dim for value, p in given.items() if isinstance(p[0], Shard)}
    found = propagate(operations, known, elements, pass_on, meet)
    course = {v: spec.placements[0] for v, spec in gspmd.propagate(graph, (4,), given).items()}
    same = found == {v: p.dim for v, p in course.items() if p.is_shard()}
    print(f"{axis}: {len(known)} cuts given, {len(found)} found; as in labs.gspmd: {same}")

# %% [markdown]
# From a few annotations follow the layouts of all values. Is the training right? Each program also runs on
# four real ranks, on their blocks, and is compared with one process. And XLA compiles the same layer in the same
# layouts.

# %%
cases, bytes_sent = [], {}
for sizes in LAYER.values():
    given = gspmd.given(graph, names, tuple(sizes))
    arguments = [(value.shape, given[value]) for value in graph.arguments]
    cases.append((sizes, arguments, [given[value] for value in graph.results]))
compiled = train.layers_by_xla(config, names, cases)
for (name, program), xla in zip(programs.items(), compiled, strict=True):
    error = train.largest_error(program, fn, tensors, LAYER[name])
    print(f"{name}: off by at most {'1e-4' if error < 1e-4 else f'{error:.1e}'}")
    bytes_sent[f"{name}, labs.gspmd"] = program.sent
    bytes_sent[f"{name}, XLA"] = sum(each.sent for each in xla)
draw.chart(bytes_sent, "B", caption="a layer, forward and backward: bytes that a device sends")

# %% [markdown]
# * **FSDP**: XLA sends one and a half times as many bytes. We all-gather each weight once, and reduce-scatter its
#   gradient. XLA gathers it, and all-reduces the gradient, which is twice a reduce-scatter: (1 + 2)/(1 + 1).
# * **TP**: q, k and v each give a partial sum of the gradient of x. We add the three up, and all-reduce their sum. XLA
#   all-reduces each of them before it adds, and does the same for gate and up. That is 5 arrays in backward, where 2
#   would do: (2 + 5)/(2 + 2) = 1.75 times the bytes.
#
# All of this is XLA's compiler for CPUs. For GPUs and TPUs it has further passes, which can turn an all-reduce into a
# reduce-scatter; no figure of this page comes from one.
#
# ## One program, many layouts
#
# [labs/xla/gpt_in_jax.py](../labs/xla/gpt_in_jax.py) is the course's GPT in JAX, as functions of arrays. It is written
# for one device, and loads the weights of the PyTorch model that you know. Does it train the same, whatever the mesh
# is?

# %% tags=["subject"]
loader = Batches(corpus().tokens, 16, config.context)
batches = [loader[step] for step in range(6)]
weights = {name: p.detach().numpy() for name, p in GPT(config).named_parameters()}
arrays = [(x.numpy(), y.numpy()) for x, y in batches]
MESHES = {"FSDP": {"dp": 8}, "TP": {"tp": 8}, "FSDP × TP": {"dp": 4, "tp": 2}}


def trainings():
    from labs.xla.annotations import train as train_by_xla

    given = config, weights, arrays
    return [train_by_xla(*given, sizes, train.ADAMW) for sizes in MESHES.values()]


# %%
print("compiling three programs …")
jobs, one = on_devices(trainings, devices=8), train.strategies.ONE_DEVICE
one_device = partial(run, train.strategies.train, one, partial(GPT, config), [batches])
[(expected, _)] = one_device(ranks=1, device="cpu")
held = {name: job.held for name, job in zip(MESHES, jobs, strict=True)}
print("bytes of weights and AdamW's state on a device:", held)
curves = {name: job.losses for name, job in zip(MESHES, jobs, strict=True)}
draw.apart({"one process": expected} | curves)

# %% [markdown]
# Three layouts, one program, and the curve of one process. No line of the program changed.
#
# ## By hand: the collectives in JAX
#
# You may also write the collectives yourself, with `shard_map`: a function that each device runs on its own piece.
# `lax.all_gather(x, "dp", tiled=True)` gathers along the first dim, `lax.psum_scatter` with the same arguments is a
# reduce-scatter, `lax.psum(x, "dp")` an all-reduce, and `lax.axis_size("dp")` is N.
#
# ### Exercise 4: ZeRO 3 (10 minutes)
#
# In notebook 04 it took a class. (All weights are whole from forward to backward here, so the bytes are those of stage
# 2 there, and only what is held between steps is that of stage 3.) Here each device has its rows of every weight, and
# its part of the batch; you return its rows of every gradient. `loss(weights, x, y)` takes whole weights. What does
# JAX make of a gather in backward? You may leave that to JAX, or write it yourself.
#
# Budget, if all weights have n bytes: one all-gather of each, which sends (N − 1)/N n; and for the gradients no more
# than an all-reduce of each, 2 (N − 1)/N n. You can do with half of that.


# %% tags=["exercise"]
def sharded_gradients(loss, shards, x, y):
    """Returns {name: its rows of the gradient of the mean over the whole batch}.

    shards: {name: its rows of the weight}
    x, y: its part of the batch; all parts are equally large
    """
    import jax
    from jax import lax

    ### BEGIN SOLUTION
    def share(shards):
        whole = {name: lax.all_gather(w, "dp", tiled=True) for name, w in shards.items()}
        return loss(whole, x, y) / lax.axis_size("dp")

    return jax.grad(share)(shards)
    ### END SOLUTION


check.sharded_gradients(sharded_gradients)

# %% [markdown]
# JAX derives the backward, and the transpose of an all-gather *is* a reduce-scatter. Here is a step of the whole GPT,
# written in this way, on 8 devices:

# %%
counted(train.zero_3_by_hand(config, weights, arrays[0]))

# %% [markdown]
# There is one all-gather and one reduce-scatter for each of the 12 weights, on CPUs as well; the all-reduce is that of
# the loss. What you write is what is sent.
#
# ## Why, and why not
#
# * **Why**: one program serves any layout. To use another mesh you change one line, and the loss curve stays the same.
# * **Why not**: what is sent is decided elsewhere. It depends on the batch, the backend and the compiler's version, and
#   nothing in your program says so. The issue of the beginning is a case of it. So read the compiled text, annotate
#   activations as well as weights, or write the collectives yourself.

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>Which annotations make the compiler train a program as FSDP would?</summary>
#
# Weights and optimizer state are cut along one mesh axis, and the batch along the same one. The activations between the
# layers must be annotated, too: with a small batch the compiler would otherwise move the tokens and not the weights.
# </details>
#
# <details><summary>DTensor and GSPMD have the same letters. What does GSPMD know that DTensor does not?</summary>
#
# It knows the later operations. DTensor decides as an operation is called, and knows only its inputs. GSPMD has the
# whole program, so it can use a layout that is needed at the end from the beginning.
# </details>
#
# <details><summary>Why does nobody have to write ZeRO 3's reduce-scatter in shard_map?</summary>
#
# JAX derives the backward of a collective, and the transpose of an all-gather is a reduce-scatter.
# </details>
#
# On N ranks, for a weight of n bytes under FSDP, and activations of a bytes under TP:
#
# | a layer sends | predicted | ours | XLA, on CPUs |
# |---|---|---|---|
# | FSDP, for each weight | 2 (N − 1)/N n | exactly | 3 (N − 1)/N n: an all-reduce in place of a reduce-scatter |
# | TP, forward | 2 × 2 (N − 1)/N a | exactly | exactly |
# | TP, backward | 2 × 2 (N − 1)/N a | exactly | 5 × 2 (N − 1)/N a: one for each of q, k, v, gate and up |
# | numbers | one process's | within rounding | within rounding |
#
# ## Beat it: annotate two layers so that XLA sends the fewest bytes (20 minutes)
#
# Optional, and open: there is no final answer. Two layers, tanh(x @ w) each, are trained for a step on 2 × 2 × 2
# devices, with axes `a`, `b` and `c`. The weights are 128 × 128, and there are 64, 128 or 256 tokens. A device has room
# for an eighth of each array, so every array is *kept* in a layout that all three axes cut. You choose that layout, and
# the one in which the array is *used* in its product. XLA adds the collectives.
#
# **The bound.** Let N = 8 devices share a layer of T tokens and width D. One device does V = T·D²/N of the
# multiplications of each product, and keeps K = (2·T·D + D²)/N of the numbers of its three arrays.
#
# bytes that a device sends ≥ 2 layers × 4 bytes × (5.67 V^⅔ − 2 K)
#
# Nothing can beat it: for its share of the multiplications a device needs at least 5.67 V^⅔ numbers of the layer's
# arrays, and all but the 2 K that it keeps must be sent.
#
# <details><summary>Why 5.67 V^⅔?</summary>With X numbers of x and W of w, for Y sums, nobody can do more than √(X·W·Y)
# multiplications (Loomis and Whitney, 1949). A layer has three products, one in forward and two in backward, on six
# arrays: x, w, y and their gradients. Their least total is 5.67 V^⅔.</details>
#
# A point is a hundredth of bound / bytes, and the score is the mean of the three cases. `measured` compiles one case
# for you to try. FSDP cuts all arrays along their rows, and uses whole weights. It scores 26.2:

# %%
FSDP = [(("abc", ""), ("", ""))] * 2, [(("abc", ""), ("abc", ""))] * 3
challenge = beat.fewest_bytes
tried = {"FSDP": challenge.measured(256, *FSDP), "the bound": challenge.bound(256)}
draw.chart(tried, caption="256 tokens: bytes that a device sends in a step")


# %% tags=["exercise"]
def annotate(tokens, width):
    """Return the layouts of the two weights, and of the three activations: the input x, the
    array between the layers, and the output.

    Give a pair for each array: the layout in which it is kept, and the one in which it is used.
    A layout has the axes that cut dim 0, and those that cut dim 1: ("ab", "c"); ("", "") is a
    whole array.  All three axes cut an array that is kept.  FSDP, above, is an example.
    """
    ### BEGIN SOLUTION
    dp, tp = ("a", "bc") if tokens <= width else ("ab", "c")
    weights = [((dp, tp), ("", tp)), ((tp, dp), (tp, ""))]
    rows = "abc", ""
    return weights, [(rows, (dp, "")), ((dp, tp), (dp, tp)), (rows, rows)]
    ### END SOLUTION


beat.fewest_bytes(annotate)

# %% [markdown]
# The course takes FSDP × TP, with more devices along TP where there are few tokens.
#
# Here the notebook ends. **What follows is optional**: a pipeline by hand, and layouts as types.
#
# ## Optional: a pipeline by hand
#
# ### Exercise 5 (optional): a pipeline (15 minutes)
#
# Each device is a stage. In each tick it takes the array that has arrived, the first stage a fresh micro-batch, and
# sends its result on with `lax.ppermute(x, "pp", pairs)`. There are M + N − 1 ticks, and every device computes in all
# of them; at the ends, nobody uses its result. You write only the forward. `jnp.where(condition, a, b)` chooses, and
# `lax.axis_index("pp")` is the stage's number.


# %% tags=["exercise"]
def pipelined(stage, own, x):
    """What the last stage makes of all micro-batches; what the others return is not looked at.

    stage(own, one): what a stage makes of one micro-batch
    own: this stage's weights
    x: [M, ...], all micro-batches, on every device
    """
    import jax.numpy as jnp
    from jax import lax

    ### BEGIN SOLUTION
    me, stages = lax.axis_index("pp"), lax.axis_size("pp")
    arrived, made = jnp.zeros_like(x[0]), []
    for tick in range(len(x) + stages - 1):
        fresh = x[min(tick, len(x) - 1)]
        made.append(stage(own, jnp.where(me == 0, fresh, arrived)))
        arrived = lax.ppermute(made[-1], "pp", [(one, one + 1) for one in range(stages - 1)])
    return jnp.stack(made[stages - 1 :])
    ### END SOLUTION


check.pipelined(pipelined)

# %% [markdown]
# JAX derives its backward, too: there the permutation goes the other way.
# [labs/xla/shard_map.py](../labs/xla/shard_map.py) has a training with it.
#
# ## Optional: layouts in the types
#
# In JAX's **explicit** mode a layout is part of an array's type. Nothing is guessed: where two layouts do not agree,
# JAX refuses before anything runs.


# %% tags=["subject"]
def explicit():
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w = jnp.ones((8, 16), out_sharding=PartitionSpec("dp", "tp")), jnp.ones((16, 4))
        w = jax.device_put(w, PartitionSpec("tp", None))
        try:
            x @ w
        except Exception as refused:
            print(f"{type(refused).__name__}: {refused}")
        return str(jax.typeof(jnp.matmul(x, w, out_sharding=PartitionSpec("dp", None))))


on_devices(explicit, devices=4)

# %% [markdown]
# Each device has a partial sum of x @ w. All-reduce, or reduce-scatter? The compiler would choose; here *you* say
# `out_sharding`, and the type of the result shows what you have: 8 rows, cut along `dp`.
#
# **Read on**: [labs/gspmd/tracing.py](../labs/gspmd/tracing.py),
# [labs/gspmd/propagation.py](../labs/gspmd/propagation.py) and [labs/gspmd/lowering.py](../labs/gspmd/lowering.py), in
# this order; [labs/xla/annotations.py](../labs/xla/annotations.py). Xu et al., 2021, *GSPMD: General and Scalable
# Parallelization for ML Computation Graphs* (arXiv 2105.04663). JAX's documentation, *Distributed arrays and automatic
# parallelization*.
#
# **Next.** Here a compiler said what to send. On a third road a configuration file says it. What does it say, and what
# does it leave unsaid? [DeepSpeed](14_deepspeed.ipynb).
#
# A clean copy of this notebook: `git restore notebooks/13_gspmd.ipynb`, then *File > Reload Notebook from Disk*.
