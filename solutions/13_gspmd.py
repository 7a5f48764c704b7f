# %% [markdown]
# # GSPMD: say how arrays lie, and a compiler communicates
#
# *In every notebook so far somebody wrote down what to send. Could a compiler work that out from the layouts alone? And
# would it send as little as you did?*
#
# You need: [Mesh and DTensor](05_mesh_and_dtensor.ipynb), [FSDP](06_fsdp.ipynb) and [Tensor
# parallelism](09_tensor_parallel.ipynb).
# **Minutes**, by estimate: 30 without exercises, 60 with them, 15 more for optional parts, 25 more for the challenge.
# The machine works for a minute of it, in 1 GB of memory. It needs JAX, too: `make learn EXTRA=gspmd` adds it.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("13")

# %% [markdown]
# ## Question
#
# There are two roads to a model on many devices. On PyTorch's you say what to communicate: gather these weights, reduce
# those gradients. On the other one, which Google's models take, you write the program for *one* device, and say of some
# arrays how they are laid out on a mesh. XLA, the compiler behind JAX, works out how all others lie, and adds the
# collectives. The method is **GSPMD** (Xu et al., 2021, arXiv 2105.04663); in today's JAX its successor,
# [Shardy](https://docs.jax.dev/en/latest/shardy_jax_migration.html), works out the layouts.
#
# So: how does it know? What does it send? And is that what you would have sent?
#
# JAX can pretend that this CPU is many devices. Each job below starts a process of its own, in which JAX sees as many
# as we ask for; it never enters this notebook's process. If JAX is missing, the next cell says so.

# %%
from labs.kit.launch import jax_missing, or_skip

or_skip(jax_missing())

# %%
from dataclasses import replace
from itertools import product

import torch

from labs import gspmd, native
from labs.data import Batches, corpus
from labs.dtensor import DTensor, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.kit import beat, check, draw, play
from labs.kit.launch import on_devices, on_processes, run
from labs.kit.record import mark
from labs.kit.train import strategies
from labs.mesh import Mesh
from labs.model import GPT, PRESETS, Layer
from labs.xla.hlo import counted

# %% [markdown]
# ## Picture
#
# Here is the layout of one weight w, a matrix of 8 × 4, on a mesh of 4 × 2 devices. The axis `dp` cuts its second dim,
# and the axis `tp` its first: each device has one tile. An all-gather along `dp` is FSDP's: a device then has the part
# of w that tensor parallelism computes with. Along both axes it would give all of w, which nobody needs.

# %%
draw.blocks(Spec((8, 4), (4, 2), (Shard(1), Shard(0))), ("dp", "tp"))

# %% [markdown]
# ## Predict
#
# A matrix of 64 × 64 is tiled in this way on 32 devices, `dp` 4 times `tp` 8. How many elements of it does a device
# hold after an all-gather along `dp`?

# %%
guess_elements = 512  # your number

rows, columns = Spec((64, 64), (4, 8), (Replicate(), Shard(0))).block((0, 0)).shape
check.predict("Elements on a device:", guess_elements, rows * columns, tolerance=0)

# %% [markdown]
# ## The same model
#
# [labs/xla/pure.py](../labs/xla/pure.py) is the course's GPT once more, as functions: arrays in, arrays out. It is
# written for one device, and loads the very weights of the model that you know. Is it the same model?

# %%
config = replace(PRESETS["tiny"], depth=1, heads=8, kv_heads=8)  # a head for each device
loader = Batches(corpus().tokens, 16, config.context)
batches = [loader[step] for step in range(6)]
weights = {name: p.detach().numpy() for name, p in GPT(config).named_parameters()}
arrays = [(x.numpy(), y.numpy()) for x, y in batches]


def by_jax(weights, x, y):
    from labs.xla import pure

    return float(pure.loss(weights, x, y, config))


same = abs(on_devices(by_jax, weights, *arrays[0], devices=1) - GPT(config)(*batches[0]).item())
print(f"the two losses are equal to 1e-5: {same < 1e-5}")

# %% [markdown]
# ## One program, many layouts
#
# Now train it. The layouts are these five lines, the head of
# [labs/gspmd/annotated.py](../labs/gspmd/annotated.py):

# %%
print(*gspmd.annotated.__doc__.splitlines()[2:8], sep="\n")

# %% [markdown]
# The axis `tp` cuts the outputs of q, k, v, gate and up, and the inputs of o and down; `dp` cuts the other dim of each
# matrix, and the batch. An axis that the mesh does not have cuts nothing. So the *mesh* chooses: with `dp` alone this
# is FSDP, with `tp` alone tensor parallelism, and with both each matrix is tiled. No line of the program changes.

# %%
MESHES = {"FSDP": {"dp": 8}, "TP": {"tp": 8}, "FSDP × TP": {"dp": 4, "tp": 2}}
MESHES["4 × 8"] = {"dp": 4, "tp": 8}


def trainings(meshes):
    from labs.xla.annotations import train

    return [train(config, weights, arrays, sizes, strategies.ADAMW) for sizes in meshes]


print("compiling four programs …")
*first_three, last = MESHES.values()
trained = on_devices(trainings, first_three, devices=8)
trained += on_devices(trainings, [last], devices=32)
one, alone = strategies.ONE_DEVICE, {"ranks": 1, "device": "cpu"}
[(reference, _)] = run(strategies.train, one, lambda: GPT(config), [batches], **alone)

# %% [markdown]
# The collectives are read from the compiled program, which is text: an operation a line, with the groups of devices
# that take part ([labs/xla/hlo.py](../labs/xla/hlo.py)). `held` is what a device keeps of weights and optimizer state.


# %%
def row(job):
    numbers = max(abs(a - b) for a, b in zip(job.losses, reference, strict=True))
    counts = sorted(counted(job.collectives()).items())
    return {
        "collectives in a step": ", ".join(f"{count} {kind}" for kind, count in counts),
        "held, bytes": job.held,
        "one device's curve": numbers < 1e-5,
    }


draw.table([{"": name, **row(job)} for name, job in zip(MESHES, trained, strict=True)])

# %% [markdown]
# Here is such a line of the program for `TP`: an all-reduce, with the shape of its result and its group. The names of
# its inputs are left out.

# %%
line = next(line for line in trained[1].text.splitlines() if " all-reduce(" in line)
result = line.split(" = ")[1].split("(")[0]
print(f"{result}(…), replica_groups={line.split('replica_groups=')[1].split(', use')[0]}")

# %% [markdown]
# Four layouts, one program, one curve. What you know is there: FSDP gathers, TP all-reduces, and both do both.
#
# - FSDP's 15 all-gathers are those of eight matrices; of the three norms, in forward and once more in backward; and of
#   the tokens. The embedding stays where it is: what it looks up comes cut along its width, and is wanted cut along the
#   batch, so there are two all-to-alls.
# - TP's 8 all-reduces stand behind embedding, o and down, two in the loss, and in backward before head, before gate and
#   up together, and before q, k and v together.
#
# But something is missing. FSDP ends its backward with a reduce-scatter, and there is none. On CPUs, XLA does not make
# one of its own accord: it all-reduces the gradients, all in one call, and each device cuts its pieces out.
#
# XLA gathers a matrix once a step and keeps it for the backward. If it then *all-reduces* the gradient, how many times
# as much does a device send as it would with a reduce-scatter?

# %%
guess_more = 1.5  # your number

N = 8
gather, scatter, all_reduce = (N - 1) / N, (N - 1) / N, 2 * (N - 1) / N
check.predict("Times as much:", guess_more, (gather + all_reduce) / (gather + scatter))

# %% [markdown]
# ## When does anything travel?
#
# You may read that *if you multiply a sharded matrix by a replicated one, XLA inserts an all-gather*. Is it true? Take
# x @ w on four devices. Each of x and w is whole, or cut along its rows or columns, and so is the result, as it is
# wanted: 27 cases. In how many does XLA send nothing?

# %%
guess_nothing = 5  # your number

SHAPES = (32, 64), (64, 128)
LAYOUTS = list(product((Replicate(), Shard(0), Shard(1)), repeat=3))


def multiply(x, w):
    return (x @ w,)


def by_xla():
    from labs.xla.placed import communication

    (x, w), axes = SHAPES, {"tp": 4}
    return [communication(multiply, axes, [(x, [a]), (w, [b])], [[y]]) for a, b, y in LAYOUTS]


compiled = on_devices(by_xla, devices=4)
nothing = sum(found == [] for found in compiled)
check.predict("XLA sends nothing in", guess_nothing, nothing, unit="cases", tolerance=0)

# %% [markdown]
# The sentence is wrong as a rule. Where x is cut along its rows and w is whole, nothing has to travel, if the result is
# wanted in rows. It depends on which dim is cut, and on what is wanted.
#
# Now the same products by the course's own DTensor and by PyTorch's, on four real ranks, and by a small GSPMD that you
# will build in a moment. Of each, what the first rank sends is counted.


# %%
def as_it_is(value):
    return value


def by_dtensor(kind, on=as_it_is, said=as_it_is):
    mesh = Mesh((4,), ("tp",))
    grid = on(mesh)
    for *factors, wanted in LAYOUTS:
        specs = [Spec(shape, (4,), (p,)) for shape, p in zip(SHAPES, factors, strict=True)]
        blocks = [torch.ones(s.block((mesh.rank,)).shape) for s in specs]
        pairs = zip(blocks, factors, strict=True)
        x, w = (kind.from_local(block, grid, [said(p)]) for block, p in pairs)
        mark("step")
        (x @ w).redistribute(placements=[said(wanted)])
        mark("end")


# %%
def by_torchs():
    import logging

    from torch.distributed import tensor

    logger = logging.getLogger("torch.distributed.tensor")
    logger.setLevel(logging.ERROR)  # it tells of each gather
    by_dtensor(tensor.DTensor, native.device_mesh, native.parallelized.layout)


def by_gspmd(layouts):
    graph = gspmd.trace(multiply, *map(torch.ones, SHAPES))
    given = {v: [p] for v, p in zip((*graph.arguments, *graph.results), layouts, strict=True)}
    return gspmd.lower(graph, gspmd.propagate(graph, (4,), given))


# %%
recording = run(by_dtensor, DTensor, ranks=4, device="cpu", record="communication").recording
torchs = run(by_torchs, ranks=4, device="cpu", record="communication").recording
sent = [
    {
        "x": repr(layouts[0]), "w": repr(layouts[1]), "wanted": repr(layouts[2]),
        "XLA": sum(one.sent for one in found),
        "torch's DTensor": torchs.sent(rank=0, step=step),
        "labs.dtensor": recording.sent(rank=0, step=step),
        "labs.gspmd": by_gspmd(layouts).sent,
    }
    for step, (layouts, found) in enumerate(zip(LAYOUTS, compiled, strict=True))
]  # fmt: skip
draw.table([row for row in sent if row["XLA"]])

# %%
ours, theirs = (sum(row[name] for row in sent) for name in ("labs.gspmd", "XLA"))
assert all(row["labs.gspmd"] <= min(row["XLA"], row["labs.dtensor"]) for row in sent)
print(f"all 27 cases: XLA sends {theirs:,} bytes, labs.gspmd {ours:,}")

# %% [markdown]
# Why do they differ? DTensor decides as each operation is called: to multiply where nothing moves costs nothing, and
# what comes after is not known yet. Where the cut goes from one dim to another, PyTorch's gathers on CPUs, and ours
# exchanges pieces. XLA knows the whole program, but in none of these 27 does it turn an all-reduce into a
# reduce-scatter, and in most of them it gathers where an all-to-all would do (in four rows it makes one). The last
# column looks at both ends, and has all collectives.
#
# ## Build: a layout goes along a letter
#
# How can a compiler know how *every* tensor lies? Write an operation with letters: x @ w is `ik,kj->ij`. If the rows of
# x are cut, `i` is cut, and then the rows of the result are. And it goes the other way as well: if somebody wants the
# *result* in columns, then `j` is cut, so w should be.
#
# ### Exercise 1: pass it on (10 minutes)
#
# `dims` has the letters of each tensor, inputs first and the result last. `cut` says for each of them which dim is cut,
# by number; None where nothing is known. One letter is cut. Fill in what follows for the tensors that have it, in the
# list that you are given or in a new one.


# %%
def pass_on(dims, cut):
    """pass_on(["ik", "kj", "ij"], [0, None, None]) is [0, None, 0].

    Of [None, None, 1] it makes [None, 1, 1].
    """
    ### BEGIN SOLUTION
    [letter] = {own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None}
    known = zip(dims, cut, strict=True)
    return [own.index(letter) if dim is None and letter in own else dim for own, dim in known]
    ### END SOLUTION


check.pass_on(pass_on)

# %% [markdown]
# ## Build: where two layouts meet
#
# Under FSDP, x is cut along `i`, its batch, and w along `j`. Both letters are cut along the same axis of the mesh, and
# a product can follow only one of them. What is cut along the other one has to move. Which one should that be?
#
# ### Exercise 2: the choice (10 minutes)
#
# `sizes` has the elements of each tensor.


# %%
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


check.meet(meet)

# %% [markdown]
# With many tokens, x stays and w is gathered, and that is FSDP. With few, w stays and the tokens move: by this rule a
# small batch turns FSDP into something else. To prevent that, people annotate activations, too;
# [labs/xla/annotations.py](../labs/xla/annotations.py) does so between the layers.
#
# ## A mesh axis travels
#
# Apply the two rules to a small program: y = x @ w1 @ w2, forward and backward, on 2 × 2 devices. Somebody wrote down
# how x, w1 and w2 are cut, and that y and each gradient (`d` stands for "gradient of") has the layout of its tensor.
# Nobody said anything about h, the tensor between the products, or about its gradient dh.


# %% tags=["subject"]
def two_products(x, dy, w1, w2):
    h, dh = x @ w1, dy @ w2.t()
    return h @ w2, dh @ w1.t(), x.t() @ dh, h.t() @ dy


SIZES, WHOLE = {"dp": 2, "tp": 2}, Replicate()
LAID_OUT = {"x": [Shard(0), WHOLE], "w1": [WHOLE, Shard(1)], "w2": [WHOLE, Shard(0)]}
small = gspmd.trace(two_products, *map(torch.ones, [(64, 32), (64, 32), (32, 128), (128, 32)]))
NAMES = ("x", "dy", "w1", "w2", "y", "dx", "dw1", "dw2")
ends = dict(zip(NAMES, small.arguments + small.results, strict=True))
between = dict(zip(("h", "dh"), (op.outputs[0] for op in small.operations[:2]), strict=True))
written = {v: LAID_OUT[name.removeprefix("d").replace("y", "x")] for name, v in ends.items()}
play.propagation(small, SIZES, written, {v: name for name, v in (ends | between).items()})

# %% [markdown]
# Each row is a product, with its letters. Begin at slider position 0, and go on step by step. A coloured line is a cut;
# the tinted tensor is the one whose layout was worked out last. `dp` passes from the rows of x to those of h, and `tp`
# from the columns of w1 to those of h. The last frame shows what the layouts cost: the product that sums over a cut
# letter leaves each device with a partial sum. Along `tp` these are y and dx, the two all-reduces of tensor
# parallelism; along `dp` they are the gradients of the weights, the all-reduces of DDP.
#
# ## A layer, forward and backward
#
# These two rules, over and over, from the few layouts that are given to all others, are
# [labs/gspmd/propagation.py](../labs/gspmd/propagation.py). Backward needs nothing of its own: it is made of products,
# too. The next cell traces all operations of a layer's forward and backward, and counts them. How many all-reduces will
# there be, if the matrices are cut as in tensor parallelism?

# %%
guess_reduces = 4  # your number

layer = Layer(config)
names = [name for name, _ in layer.named_parameters()]
tensors = [torch.randn(16, config.context, config.dim) for _ in "xg"]
tensors += [p.detach() for p in layer.parameters()]
graph = gspmd.trace(gspmd.forward_and_backward(layer), *tensors)


def laid_out(sizes):
    given = gspmd.given(graph, names, tuple(sizes))
    return gspmd.lower(graph, gspmd.propagate(graph, tuple(sizes.values()), given))


program = laid_out({"tp": 4})
given = gspmd.given(graph, names, ("tp",))
print(f"{len(graph.operations)} operations, of which {len(given)} values were given a layout")
check.predict("All-reduces:", guess_reduces, program.counts["all_reduce"], tolerance=0)

# %% [markdown]
# Those are Megatron's: two in forward, two in backward, and nobody wrote them. Here are the operations with which
# something moves:

# %%
heading, *lines = repr(program).splitlines()
print(heading, *(line for line in lines if line.endswith("bytes")), sep="\n")

# %% [markdown]
# Is it right? The same program runs on four real ranks, on their blocks; and XLA compiles the same layer in the same
# layouts.


# %%
def on_blocks(program, sizes):
    """How far this rank's results are from those of one process, at most."""
    mesh, place = Mesh(tuple(sizes.values()), tuple(sizes)), program.layouts

    def blocks(values, wholes):
        pairs = zip(values, wholes, strict=True)
        return [whole[place[v].block(mesh.get_coordinate()).slices] for v, whole in pairs]

    results = gspmd.execute(program, mesh, *blocks(graph.arguments, tensors))
    due = blocks(graph.results, gspmd.forward_and_backward(layer)(*tensors))
    return max((a - b).abs().max().item() for a, b in zip(results, due, strict=True))


# %%
def layer_by_xla(all_sizes, layouts):
    import jax

    from labs.xla import placed, pure

    def both_ways(x, gradient, *weights):
        def forward(x, *weights):
            return pure.layer(dict(zip(names, weights, strict=True)), x, config)

        y, back = jax.vjp(forward, x, *weights)
        return y, *back(gradient)

    pairs = zip(all_sizes, layouts, strict=True)
    return [placed.communication(both_ways, sizes, *known) for sizes, known in pairs]


# %%
LAYER = {"TP": {"tp": 4}, "FSDP": {"dp": 4}, "FSDP × TP": {"dp": 2, "tp": 2}}
programs = {name: laid_out(sizes) for name, sizes in LAYER.items()}
known = []
for sizes in LAYER.values():
    given = gspmd.given(graph, names, tuple(sizes))
    arguments = [(v.shape, given[v]) for v in graph.arguments]
    known.append((arguments, [given[v] for v in graph.results]))
found = on_devices(layer_by_xla, list(LAYER.values()), known, devices=4)
for name, sizes in LAYER.items():
    worst = max(run(on_blocks, programs[name], sizes, ranks=4, device="cpu"))
    print(f"{name}: equal to one process to 1e-4: {worst < 1e-4}")

# %%
draw.table(
    [
        {
            "": name, "labs.gspmd": str(programs[name].counts), "XLA": str(counted(xla)),
            "bytes, labs.gspmd": programs[name].sent,
            "bytes, XLA": sum(one.sent for one in xla),
        }
        for name, xla in zip(LAYER, found, strict=True)
    ]
)  # fmt: skip

# %% [markdown]
# FSDP: XLA sends one and a half times as much, as you predicted: it all-reduces where we reduce-scatter. TP: of q, k
# and v, each gives a summand of the gradient of x. We add the three up and all-reduce their sum. XLA all-reduces each
# of them, and each of gate's and up's: two in forward and five in backward, where two would do. It packs them together,
# which is why you see fewer. (On GPUs and TPUs, XLA has further passes. No figure here comes from one.)
#
# ## The other way in JAX: by hand
#
# You may also write the collectives yourself, with `shard_map`: a function that each device runs on its own piece. You
# need four of them: `lax.all_gather(x, "dp", tiled=True)` along the first dim, `lax.psum_scatter` with the same
# arguments, `lax.psum(x, "dp")`, and `lax.ppermute(x, "dp", pairs)`, which sends from one device to another. And
# `lax.axis_size("dp")` is N.
#
# ### Exercise 3: ZeRO 3 (10 minutes)
#
# In notebook 04 it took a class. Here each device has its rows of every weight, and its part of the batch; you return
# its rows of every gradient. `loss(weights, x, y)` takes whole weights. What does JAX make of a gather when it goes
# backward? You may leave that to it, or write it yourself. Budget, by what XLA has compiled: each weight is gathered
# once, so a device sends (N − 1)/N of their bytes; and to add up gradients it all-reduces no more than their bytes.


# %%
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
# JAX derives the backward, and the transpose of an all-gather *is* a reduce-scatter. On the GPT, with 8 devices:


# %%
def compiled_by_hand():
    import jax
    from jax.sharding import PartitionSpec

    from labs.xla import annotations, hlo, mapped

    step = mapped.zero_3(annotations.mesh_of({"dp": 8}), "dp", config, strategies.ADAMW)
    cut = jax.NamedSharding(annotations.mesh_of({"dp": 8}), PartitionSpec("dp"))
    now = jax.device_put(weights, cut)
    moments = jax.tree.map(lambda w: (0 * w, 0 * w), now)
    program = jax.jit(step).lower(now, moments, 1.0, *arrays[0]).compile()
    return hlo.collectives(program.as_text())


counted(on_devices(compiled_by_hand, devices=8))

# %% [markdown]
# One gather and one reduce-scatter for each of the weights, on CPUs as well (and an all-reduce: of the loss). What is
# written is what is sent.
#
# ### Optional, exercise 4: a pipeline (15 minutes)
#
# Each device is a stage. In each tick it takes what has arrived, the first one a fresh micro-batch, and hands on what
# it made. There are M + N − 1 ticks, and every device computes in all of them; at the ends, what it makes is of no use.
# You write forward alone. `jnp.where(condition, a, b)` chooses, and `lax.axis_index("pp")` is the stage's number.


# %%
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
# It trains, too: backward, the permutation goes the other way. [labs/xla/mapped.py](../labs/xla/mapped.py) has both.
#
# ## The third way: layouts in the types
#
# In JAX's **explicit** mode a layout is part of an array's type. Nothing is guessed: what follows from the layouts is
# done, and where two do not agree, it refuses before anything runs.


# %%
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
# Each device has a summand of x @ w. All-reduce, or reduce-scatter? The compiler would choose; here *you* say
# `out_sharding`, and the type of the result tells you what you have: 8 rows, cut along `dp`.
#
# ## In several processes
#
# So far, the devices were virtual ones of one process. On a cluster, each host has a process with its devices, and
# `jax.distributed.initialize` lets them know of each other. Then the program stays as it is: FSDP on four devices, of
# which two real processes have two each.


# %%
def two_steps():
    from labs.xla.annotations import train

    return train(config, weights, arrays[:2], {"dp": 4}, strategies.ADAMW).losses


for process, losses in enumerate(on_processes(two_steps, processes=2, devices=2)):
    far = max(abs(a - b) for a, b in zip(losses, reference, strict=False))
    print(f"process {process}: one device's curve: {far < 1e-5}")

# %% [markdown]
# ## Why, and why not
#
# * **Why**: one program for any layout. Another mesh is one line, and the curve stays.
# * **Why not**: what travels is decided elsewhere. It depends on the batch, the backend and the compiler's version, and
#   nothing in your program tells you. You can see it in the text of the compiled program, or say it yourself, as
#   in the two sections before.

# %% [markdown]
# ## Say it back
#
# Answer each aloud before you unfold it.
#
# <details><summary>What must be said, so that a program is trained as by FSDP?</summary>
#
# That weights and state are cut along an axis, and the batch along the same one. With a small batch also that
# activations stay cut along it; else the compiler may leave the weights where they are and move the tokens.
# </details>
#
# <details><summary>DTensor and GSPMD have the same letters. What does GSPMD know that DTensor does not?</summary>
#
# What comes after. DTensor decides as an operation is called, and can only ask what its inputs cost. GSPMD has the
# whole program, so a layout that is wanted at the end can be had from the beginning.
# </details>
#
# <details><summary>Why does nobody have to write ZeRO 3's reduce-scatter in shard_map?</summary>
#
# Because JAX derives the backward of a collective, and the transpose of an all-gather is a reduce-scatter.
# </details>
#
# On N ranks, for a weight of n bytes under FSDP, and activations of a bytes under TP:
#
# | a layer sends | predicted | ours | XLA, on CPUs |
# |---|---|---|---|
# | FSDP, for each weight | 2 (N − 1)/N n | exactly | 3 (N − 1)/N n: an all-reduce in its place |
# | TP, forward | 2 × 2 (N − 1)/N a | exactly | exactly |
# | TP, backward | 2 × 2 (N − 1)/N a | exactly | 5 × 2 (N − 1)/N a: one for each of q, k, v, gate and up |
# | numbers | one process's | to rounding | to rounding |
#
# ## Beat it: the annotations with which XLA sends least (20 minutes)
#
# Optional, and open: no answer is the last one. Two layers, tanh(x @ w) each, are trained for a step on 2 × 2 × 2
# devices, with axes `a`, `b` and `c`. The weights are 128 × 128, and there are 64, 128 or 256 tokens. A device has room
# for an eighth of each array, so every array is *kept* in a layout that all three axes cut. You choose that one, and
# the layout in which the array is *used* in its product. XLA does the rest, and what a device sends is read from the
# compiled program, forward and backward.
#
# **The bound**, for a layer of T × D by D × H: one of N devices makes V = TDH/N of the multiplications. With X numbers
# of x and W of w, for Y sums, it can make no more than √(XWY) of them (Loomis and Whitney, 1949), so X W Y ≥ V². The
# two products of the backward are like it, with gradients in place of y, of x and of w. The six numbers are least
# together where x, w and the gradient of y, which are in two products each, have twice as many as the others: 5.67 V to
# the power of 2/3. An Nth of each array is there. All else must come, or is a summand that must go.
# A score is 100 × bound / bytes.
#
# FSDP cuts all arrays along their rows, and uses weights that are whole. It scores 26.2.

# %%
challenge, rows = beat.fewest_bytes, []
for tokens in challenge.cases:
    rows.append({"tokens": tokens, "bytes at least": round(challenge.bound(tokens))})
draw.table(rows)


# %%
def annotate(tokens, width):
    """Returns the layouts of the two weights, and of the three activations: x, what is between
    the layers, and what comes out.

    For each array a pair: as it is kept, and as it is used.  A layout says which axes cut dim
    0, and which dim 1: ("ab", "c"); whole is ("", "").  All three axes cut what is kept.
    FSDP: [(("abc", ""), ("", ""))] * 2, [(("abc", ""), ("abc", ""))] * 3
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

# %% [markdown]
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
