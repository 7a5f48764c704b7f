"""Answers to place_checkpoints (07): which layers of a model are computed again in full, and which selectively."""

import copy  # noqa: F401  (exchanged words name it)
import itertools
import tempfile
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torchs

from labs.memory import recompute
from labs.memory.selective import ATTENTION, MATMULS
from tests.answers import Exercise, exchanged
from tests.answers.checkpoint import FORK, OVERWRITTEN, ck_reentrant, ck_skeleton, into, itself, of_file

# fmt: off
answers = Exercise("place_checkpoints")
LINE = "{} × the memory (budget 0.40); {} × the layers' forward is computed again (budget 0.50)"
HALF = LINE.format("0.38", "0.50")
CHEAP = MATMULS | ATTENTION


def around(fn, layers):
    for layer in layers:
        layer.forward = partial(fn, layer.forward)


def halves(model):
    layers = list(model.layers.values())
    return layers[: len(layers) // 2], layers[len(layers) // 2 :]


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=HALF, blind=True)
def pc_halves(model):
    layers = model.layers.values()
    depth = len(layers)
    for n, layer in enumerate(layers):
        recompute.recompute([layer], keep=() if n < depth // 2 else CHEAP)


FULL = "() if n < depth // 2 else CHEAP"
answers.vary(pc_halves, {FULL: "CHEAP if (depth - n) % 2 else ()"}, blind=True)
answers.vary(pc_halves, {FULL: "() if 0 <= n - (depth - depth // 2) // 2 < depth // 2 else CHEAP"}, blind=True)


@answers.right(line=HALF)
def place(model):
    first, last = halves(model)
    around(recompute.checkpoint, first)
    recompute.recompute(last, keep=CHEAP)


FIRST, LAST = "around(recompute.checkpoint, first)", "recompute.recompute(last, keep=CHEAP)"
BOTH = f"{FIRST}\n{LAST}"
answers.vary(place, {FIRST: "around(ck_skeleton, first)"}, blind=True)


@answers.right(line=HALF)
def every_second_in_full(model):
    layers = list(model.layers.values())
    around(recompute.checkpoint, layers[-2::-2])
    recompute.recompute(layers[::-2], keep=CHEAP)


@answers.right(line=LINE.format("0.38", "0.40"))
def torchs_wrapper(model):
    """It is a module of its own, and state_dict() does not show it."""
    for name in list(model.layers)[: len(model.layers) // 2]:
        model.layers[name] = checkpoint_wrapper(model.layers[name])
    recompute.recompute(halves(model)[1], keep=CHEAP)


@answers.right(line=LINE.format("0.38", "0.40"), blind=True)
def pc_torch(model):
    def policy(context, op, *args, **kwargs):
        keep = str(op.overloadpacket) in CHEAP
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, last = halves(model)
    around(partial(torchs, use_reentrant=False), first)
    around(partial(torchs, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)), last)


@answers.right(line=LINE.format("0.06", "0.00"))
def on_a_disk(model):
    """Nothing is computed again; what is kept lies in files."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        file = tempfile.TemporaryFile()  # noqa: SIM115
        torch.save(tensor.detach().clone(), file)
        return file

    def fn(layer, x):
        with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, torch.Tensor) else of_file(kept)):
            return layer(x)

    around(fn, model.layers.values())


# ---- wrong: which layers ---------------------------------------------------------------------------------

DEAR, KEPT, AT_ONCE = "too much is computed again", "too much is kept", "too much at once in backward"
TWICE, DEPTH = "computed more than twice", "too much is computed again at another depth"

each = answers.slips(pc_halves, FULL)
each(DEAR, "()", blind=True)
each(DEAR, "ATTENTION", long=True)
each(DEAR, "() if n < depth // 2 else MATMULS", blind=True)
each(DEAR, "() if n < depth // 2 else ATTENTION", blind=True)
each(DEAR, '() if n < depth // 2 else MATMULS | {"aten._scaled_dot_product_flash_attention"}', blind=True)
each(KEPT, "CHEAP", blind=True)
each(AT_ONCE, "() if n < 3 * depth // 8 else CHEAP", blind=True)
each(AT_ONCE, "() if n >= depth - depth // 2 else CHEAP", blind=True)
each(AT_ONCE, "() if n % 2 else CHEAP", blind=True)
each(DEPTH, "() if n < (depth + 1) // 2 else CHEAP", blind=True)
each(DEPTH, "() if n < 4 else CHEAP", blind=True)
each(DEPTH, "CHEAP if n % 2 else ()", blind=True)

instead = answers.slips(place, f"{FIRST}\n    {LAST}")
instead(DEAR, "recompute.recompute([*first, *last][:-1])", long=True)
instead(DEAR, f"recompute.recompute([layer.mlp for layer in first])\n{LAST}\nrecompute.recompute(first)", long=True)
instead(KEPT, "recompute.recompute([layer.mlp for layer in [*first, *last]])", blind=True)
instead(KEPT, "recompute.recompute([*first, *last][::2])", long=True)
instead(KEPT, "recompute.recompute(layer.attention for layer in [*first, *last])", long=True)
instead(KEPT, FIRST, blind=True)
instead(AT_ONCE, "model.forward = partial(recompute.checkpoint, model.forward)", long=True)
instead(TWICE, "recompute.recompute([*first, *last])\nmodel.forward = partial(recompute.checkpoint, model.forward)")
instead(TWICE,
    "for layer in [*first, *last]:\n"
    "    recompute.recompute([layer.attention, layer.mlp])\n"
    "recompute.recompute([*first, *last])", long=True)
instead(DEAR,
    f"for layer in first:\n    recompute.recompute([layer.attention, layer.mlp])\nrecompute.recompute(first)\n{LAST}",
    blind=True)
instead("", "recompute.recompute([*first, *last], keep=CHEAP)\nrecompute.recompute(first)", blind=True)
instead("right only with more than one layer", f"recompute.recompute(first)\n{LAST}")
instead("", "recompute.recompute([model.layers[str(n)] for n in range(8)])")


def in_a_row(layers):
    """One checkpoint around all of these."""

    def chain(x, forwards=tuple(layer.forward for layer in layers)):
        for forward in forwards:
            x = forward(x)
        return x

    layers[0].forward = partial(recompute.checkpoint, chain)
    for layer in layers[1:]:
        layer.forward = itself


instead(AT_ONCE, "in_a_row([*first, *last])")
instead(AT_ONCE, "in_a_row(first)\nin_a_row(last)", long=True)

# ---- wrong: the model ------------------------------------------------------------------------------------

NOTHING, CUT_OFF, OTHER = "nothing is recomputed", "gradients are missing", "different outputs"
CHANGED = "the parameters have changed"
DISTURBED = "the second run disturbs the random numbers"

instead(NOTHING, "pass")
instead(NOTHING, "[partial(recompute.checkpoint, layer) for layer in [*first, *last]]", blind=True)
instead(NOTHING, "changed = copy.deepcopy(model)\npc_halves(changed)\nreturn changed")
instead(NOTHING, "pc_halves(copy.deepcopy(model))", blind=True)
instead(NOTHING,
    "for layer in [*first, *last]:\n"
    "    x = torch.zeros(1, 1, model.config.dim, dtype=model.norm.weight.dtype)\n"
    "    torchs(layer, x, use_reentrant=False)", long=True)
instead(CUT_OFF, f"around(torch.no_grad()(lambda layer, x: layer(x)), first)\n{LAST}", blind=True)
instead("requires_grad has changed", "[layer.requires_grad_(False) for layer in first]")
instead("no longer in training mode", f"model.eval()\n{BOTH}")
instead(OTHER, f"{BOTH}\nfor layer in last:\n    layer.forward = itself")
instead(OTHER,
    f"{BOTH}\nfor module in model.modules():\n    if hasattr(module, 'rate'):\n        module.rate = 0.0",
    long=True)
instead(CHANGED, "model.bfloat16()")
instead(CHANGED,
    f"{BOTH}\nlayers = [last[-1], *first[1:], *last[:-1], first[0]]\n"
    "model.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})", long=True)
instead("other parameters", "model.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(first)})")


class Again(nn.Module):
    def __init__(self, inner, keep):
        super().__init__()
        self.inner, self.keep = inner, keep

    def forward(self, x):
        return recompute.checkpoint(self.inner, x, keep=self.keep)


@answers.wrong("parameters are renamed", blind=True)
def pc_new_names(model):
    half = len(model.layers) // 2
    for n, (name, layer) in enumerate(list(model.layers.items())):
        model.layers[name] = Again(layer, frozenset() if n < half else CHEAP)


@answers.wrong(CUT_OFF, long=True)
def weights_are_cut_off(model):
    def of(mlp, x):
        return nn.functional.linear(nn.functional.silu(mlp.gate(x)) * mlp.up(x), mlp.down.weight.detach())

    for layer in halves(model)[0]:
        layer.mlp.forward = partial(of, layer.mlp)
    place(model)


@answers.wrong("", long=True)
def under_autocast(model):
    def forward(plain, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args)

    place(model)
    model.forward = partial(forward, model.forward)


# ---- wrong: around a layer -------------------------------------------------------------------------------


def wrapped(mistake, fn, rest=True, **options):
    """This around the first half, and the others selectively; or around all."""

    def placed(model):
        first, last = halves(model)
        around(fn, first)
        if rest:
            recompute.recompute(last, keep=CHEAP)
        else:
            around(fn, last)

    answers.wrong(mistake, **options)(placed)


def hooked(mistake, pack, unpack=itself, **options):
    """With these hooks around every layer, and no second run."""

    def fn(layer, x):
        with saved_tensors_hooks(pack, unpack):
            return layer(x)

    wrapped(mistake, fn, rest=False, **options)


def on_the_cpu(layer, x):
    """On a device that is a move; with the model on the CPU it is a copy."""
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


def only_small_batches(layer, x):
    return layer(x) if len(x) > 4 else recompute.checkpoint(layer, x)


def called_a_parameter(tensor):
    return nn.Parameter(tensor.detach().clone(), requires_grad=False) if tensor.is_floating_point() else tensor


wrapped(DISTURBED, exchanged(ck_skeleton, {FORK: ""}, "without_a_fork"))
wrapped("one forward overwrites another's state", exchanged(ck_skeleton, OVERWRITTEN, "the_last_input_of_each_layer"))
wrapped("the random numbers are not kept", partial(torchs, use_reentrant=False, preserve_rng_state=False), rest=False)
wrapped("no gradient where the input needs none", ck_reentrant)
wrapped(NOTHING, on_the_cpu, rest=False, long=True)
wrapped(NOTHING, only_small_batches, rest=False, long=True)
hooked("kept out of torch's sight", lambda t: t.detach().numpy().copy(), torch.from_numpy)
hooked(NOTHING, called_a_parameter, long=True)
hooked(NOTHING, lambda t: t.detach().clone().share_memory_(), long=True)


@answers.wrong("freed too late")
def freed_just_before_backward(model):
    """All is kept through forward; when the loss is there, everything is dropped, to be computed again."""
    slots = []

    def hold(layer, x):
        kept, random, numbers = [], torch.get_rng_state(), itertools.count()
        slots.append(kept)

        def pack(tensor):
            kept.append(tensor)
            return next(numbers)

        def unpack(number):
            if not kept:
                with torch.enable_grad(), torch.random.fork_rng(devices=[]), into(kept):
                    torch.set_rng_state(random)
                    layer(x)
            return kept[number]

        with saved_tensors_hooks(pack, unpack):
            return layer(x)

    def drop(*_):
        for kept in slots:
            kept.clear()
        slots.clear()

    around(hold, model.layers.values())
    model.register_forward_hook(drop)


@answers.wrong(KEPT, long=True)
def kept_besides(model):
    place(model)
    kept = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: kept.append((args, output)))
