"""Answers to checkpoint (07): a layer's forward, with nothing kept but its input until backward."""

import itertools
import warnings

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torchs

from labs.memory import recompute
from tests.answers import Exercise

# fmt: off
answers = Exercise("checkpoint")
LINE = "{} × the memory (budget 0.30); {} × the layers' forward is computed again (budget 1.00)"
answers.right(recompute.checkpoint, line=LINE.format("0.20", "1.00"))
def itself(tensor):
    return tensor


def into(values):
    """Append what a second run saves to `values`, in order and without its graph."""
    return saved_tensors_hooks(lambda tensor: values.append(tensor.detach()), itself)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE.format("0.21", "1.00"))
def ck_skeleton(layer, x):
    random, again, numbers = torch.get_rng_state(), [], itertools.count()

    def unpack(number):
        if not again:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), into(again):
                torch.set_rng_state(random)
                layer(x)
        return again[number]

    with saved_tensors_hooks(lambda tensor: next(numbers), unpack):
        return layer(x)


# ---- wrong: the second run -------------------------------------------------------------------------------

FORGOTTEN, DISTURBED = "the random numbers are not kept", "the second run disturbs the random numbers"
NO_GRAPH, TOO_OFTEN, NOT_FREED = "the second run builds no graph", "computed more than twice", "not freed after use"
FORK, GRAD, STATE = "torch.random.fork_rng(devices=[]), ", "torch.enable_grad(), ", "torch.set_rng_state(random)"
HOOKS = "saved_tensors_hooks(lambda tensor: next(numbers), unpack)"
OTHER = "different outputs"

spoil = answers.slips(ck_skeleton)
spoil(NO_GRAPH, {GRAD: ""})
spoil(FORGOTTEN, {STATE: "pass"})
spoil(DISTURBED, {FORK: ""})
spoil(OTHER, {f"    with {HOOKS}": f"    with {FORK}{HOOKS}"})
TWICE = f"with torch.no_grad():\n                    layer(x)\n                {STATE}\n"
spoil(TOO_OFTEN, {f"{STATE}\n": f"{STATE}\n                {TWICE}"})
spoil(
    NOT_FREED, {"into(again)": "saved_tensors_hooks(again.append, itself)"}
)  # its graph knows the hooks, they the list


@answers.wrong("too much is kept")
def ck_at_once(layer, x):
    """Run the layer a second time at once, so that everything is kept from forward on."""
    random, again, numbers = torch.get_rng_state(), [], itertools.count()
    with saved_tensors_hooks(lambda tensor: next(numbers), lambda number: again[number]):
        y = layer(x)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), into(again):
        torch.set_rng_state(random)
        layer(x)
    return y


@answers.wrong("the random numbers are not kept")
def ck_torch_forgetful(layer, x):
    return torchs(layer, x, use_reentrant=False, preserve_rng_state=False)


# ---- wrong: inputs and outputs ---------------------------------------------------------------------------

NOTHING, CUT_OFF = "nothing is recomputed", "gradients are missing"
NO_GRADIENT = "no gradient where the input needs none"
FROZEN = "nothing is recomputed where the input needs no gradient"


@answers.wrong(NO_GRADIENT)
def ck_reentrant(layer, x):
    with warnings.catch_warnings(action="ignore"):
        return torchs(layer, x, use_reentrant=True)


class Recomputed(torch.autograd.Function):
    """A node as in many tutorials: the parameters are not among its inputs."""

    @staticmethod
    def forward(ctx, layer, random, x, factor=1):
        ctx.layer, ctx.random, ctx.factor = layer, random, factor
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random)
            y = ctx.layer(x)
        y.backward(gradient)
        return None, None, ctx.factor * x.grad, None


@answers.wrong("different gradients")
def the_gradient_of_the_input_twice(layer, x):
    return Recomputed.apply(layer, torch.get_rng_state(), x, 2)


@answers.wrong(NOTHING)
def ck_none(layer, x):
    return layer(x)


def ending(mistake, words, **options):
    """Note a wrong answer that returns `words` in place of the layer's output."""
    answers.spoil(ck_none, mistake, {"return layer(x)": words}, **options)


ending(CUT_OFF, "with torch.no_grad():\n        return layer(x)")
ending(FROZEN, "return ck_skeleton(layer, x) if x.requires_grad else layer(x)")
