"""Answers to stage_3 (04): one step, event by event."""

from contextlib import contextmanager

import torch.distributed as dist  # noqa: F401  (exchanged words name it)

from tests.answers import Exercise, from_notebook

# fmt: off
answers = Exercise("stage_3")
LINE = (
    "{} gathers and 5 reduce-scatters for 5 layers, and never more than one layer whole; "
    "with one layer at a time 9 gathers are the least possible"
)


# ---- right -----------------------------------------------------------------------------------------------

loops = answers.right(from_notebook("stage_3"), line=LINE.format(10))


@answers.right(line=LINE.format(9))
def that_keeps_the_last(layers, x, loss):
    """Backward begins with the last layer: it need not be dropped before."""
    *others, last = layers
    for layer in others:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    last.gather()
    dy = last.backward(loss(last.forward(x)))
    last.drop()
    last.reduce()
    last.update()
    for layer in reversed(others):
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()
        layer.update()


@contextmanager
def whole(layer):
    layer.gather()
    try:
        yield layer
    finally:
        layer.drop()


# ---- wrong: forward --------------------------------------------------------------------------------------

spoil = answers.slips(loops)
FORWARD = "    for layer in layers:\n        layer.gather()\n        x = layer.forward(x)\n        layer.drop()\n"
BACK = "        layer.gather()\n        dy = layer.backward(dy)\n        layer.reduce()\n        layer.drop()\n"
UPDATE = "    for layer in layers:\n        layer.update()\n"
KEPT = FORWARD.replace("        layer.drop()\n", "")
WITHOUT_GATHER = BACK.replace("        layer.gather()\n", "")

spoil("layers stay whole from forward to backward", {FORWARD: KEPT, BACK: WITHOUT_GATHER})
spoil("more than one layer is whole",
    {FORWARD: "    layers[0].gather()\n"
         "    for layer, following in zip(layers, [*layers[1:], None]):\n"
         "        if following:\n            following.gather()\n"
         "        x = layer.forward(x)\n        layer.drop()\n"})
spoil("forward runs twice",
    {FORWARD: f"    layers[0].gather()\n    layers[0].forward(x)\n    layers[0].drop()\n{FORWARD}"})

# ---- wrong: backward -------------------------------------------------------------------------------------

spoil("gradients wait for each other",
    {BACK: BACK.replace("        layer.reduce()\n", ""),
     UPDATE: f"    for layer in layers[::-1]:\n        layer.reduce()\n{UPDATE}"})
spoil("not one process's parameters", {"reversed(layers)": "layers"})
spoil("a layer without backward()",
    {"reversed(layers)": "layers[:0:-1]",
     UPDATE: UPDATE.replace("layers:", "layers[1:]:")})
TURNED = "    layers.reverse()\n    for layer in layers:\n"
spoil("the list of layers has changed", {"    for layer in reversed(layers):\n": TURNED})


# ---- wrong: the end --------------------------------------------------------------------------------------

spoil("a layer stays whole after the step", {UPDATE: f"{UPDATE}    layers[0].gather()\n"})
spoil("gathered too often",
    {UPDATE: f"{UPDATE}    for layer in layers:\n        layer.gather()\n        layer.drop()\n"})
spoil("a layer without update()", {UPDATE: ""})
