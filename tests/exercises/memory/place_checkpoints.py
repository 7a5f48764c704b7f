"""Answers to place_checkpoints (07): which layers of a model are computed again in full, and which selectively."""

from functools import partial

import torch  # noqa: F401 (varied answers use it)
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

from labs.memory import recompute
from labs.memory.selective import ATTENTION, MATMULS
from tests.answers import Exercise, exchanged
from tests.exercises.memory.checkpoint import (
    FORK,
    ck_reentrant,
    ck_skeleton,
    itself,  # noqa: F401 (varied answers use it)
)

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


@answers.right(line=HALF)
def pc_halves(model):
    layers = model.layers.values()
    depth = len(layers)
    for n, layer in enumerate(layers):
        recompute.recompute([layer], keep=() if n < depth // 2 else CHEAP)


FULL = "() if n < depth // 2 else CHEAP"


@answers.right(line=HALF)
def place(model):
    first, last = halves(model)
    around(recompute.checkpoint, first)
    recompute.recompute(last, keep=CHEAP)


FIRST, LAST = "around(recompute.checkpoint, first)", "recompute.recompute(last, keep=CHEAP)"
BOTH = f"{FIRST}\n{LAST}"


# ---- wrong: which layers ---------------------------------------------------------------------------------

DEAR, KEPT, AT_ONCE = "too much is computed again", "too much is kept", "too much at once in backward"
TWICE, DEPTH = "computed more than twice", "too much is computed again at another depth"

each = answers.slips(pc_halves, FULL)
each(DEAR, "()")
each(KEPT, "CHEAP")
each(AT_ONCE, "() if n < 3 * depth // 8 else CHEAP")
each(DEPTH, "() if n < (depth + 1) // 2 else CHEAP")

instead = answers.slips(place, f"{FIRST}\n    {LAST}")
instead(TWICE, "recompute.recompute([*first, *last])\nmodel.forward = partial(recompute.checkpoint, model.forward)")
instead("right only with more than one layer", f"recompute.recompute(first)\n{LAST}")

# ---- wrong: the model ------------------------------------------------------------------------------------

NOTHING, CUT_OFF, OTHER = "nothing is recomputed", "gradients are missing", "different outputs"
CHANGED = "the parameters have changed"
DISTURBED = "the second run disturbs the random numbers"

instead(NOTHING, "pass")
instead(CUT_OFF, f"around(torch.no_grad()(lambda layer, x: layer(x)), first)\n{LAST}")
instead("requires_grad has changed", "[layer.requires_grad_(False) for layer in first]")
instead("no longer in training mode", f"model.eval()\n{BOTH}")
instead(OTHER, f"{BOTH}\nfor layer in last:\n    layer.forward = itself")
instead(CHANGED, "model.bfloat16()")
instead("other parameters", "model.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(first)})")


class Again(nn.Module):
    def __init__(self, inner, keep):
        super().__init__()
        self.inner, self.keep = inner, keep

    def forward(self, x):
        return recompute.checkpoint(self.inner, x, keep=self.keep)


@answers.wrong("parameters are renamed")
def pc_new_names(model):
    half = len(model.layers) // 2
    for n, (name, layer) in enumerate(list(model.layers.items())):
        model.layers[name] = Again(layer, frozenset() if n < half else CHEAP)


# ---- wrong: around a layer -------------------------------------------------------------------------------


def wrapped(mistake, fn, rest=True, **options):
    """Note a wrong answer that puts `fn` around the first half of the layers, and recomputes the others selectively."""

    def placed(model):
        first, last = halves(model)
        around(fn, first)
        if rest:
            recompute.recompute(last, keep=CHEAP)
        else:
            around(fn, last)

    answers.wrong(mistake, **options)(placed)


wrapped(DISTURBED, exchanged(ck_skeleton, {FORK: ""}, "without_a_fork"))
wrapped("the random numbers are not kept", partial(torchs, use_reentrant=False, preserve_rng_state=False), rest=False)
wrapped("no gradient where the input needs none", ck_reentrant)
