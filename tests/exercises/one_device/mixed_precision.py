"""Answers to mixed_precision (01): how AdamW's state is remembered, and how it steps.

A step is in no_grad, as the notebook has it: of the text that is exchanged a decorator is no part.
"""

from functools import partial

import torch

from labs.kit import check
from tests.answers import Exercise, exchanged

# fmt: off
answers = Exercise("mixed_precision")
LINE = "16.00 bytes per parameter at rest; the least possible is 16"


def steps(fn, first=None):
    """Return the two functions of an answer whose step is `fn`."""
    return first or remember, torch.no_grad()(fn)


def remembers(fn, then=None):
    """Return the two functions of an answer that remembers by `fn`."""
    return fn, torch.no_grad()(then or step)


def adamw(weight, mean, square, gradient, t, lr, betas, eps, weight_decay):
    """Update weight, mean and square in place, as the notebook's AdamW does."""
    mean.lerp_(gradient, 1 - betas[0])
    square.lerp_(gradient**2, 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    weight.mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)


# ---- right -----------------------------------------------------------------------------------------------


def step(p, kept, t, **settings):
    if p.grad is None:
        return
    gradient = p.grad.float()
    adamw(kept["master"], kept["mean"], kept["square"], gradient, t, **settings)
    p.copy_(kept["master"])


@answers.right(line=LINE, given=remembers)
def remember(p):
    master = p.detach().float()
    return {"master": master, "mean": torch.zeros_like(master), "square": torch.zeros_like(master)}


@answers.right(line=LINE, given=remembers)
def remember_and_count(p):
    return remember(p) | {"steps": 0}


answers.right(check.mixed_precision.remember, line=LINE, given=lambda fn: (fn, check.mixed_precision.mixed_step))


# ---- wrong: what is remembered ---------------------------------------------------------------------------

MASTER, MEAN, SQUARE = '"master": master', '"mean": torch.zeros_like(master)', '"square": torch.zeros_like(master)'
RETURN = "return {"
ALL = f"{RETURN}{MASTER}, {MEAN}, {SQUARE}}}"
NO_DICT, NO_FLOAT32 = "not these three tensors", "the {} is not float32"

kept = answers.slips(remember, given=remembers)
kept(NO_DICT, {RETURN: "{"})
kept(NO_FLOAT32.format("master"), {MASTER: '"master": p.detach()'})
kept(NO_FLOAT32.format("square"), {SQUARE: '"square": torch.zeros_like(p.detach())'})
kept("part of a graph", {"p.detach().float()": "p.float()"})
kept("two of them share their memory",
    {ALL: 'return {"master": master} | dict.fromkeys(("mean", "square"), torch.zeros_like(master))'})
kept("the master begins with other numbers", {MASTER: '"master": torch.zeros_like(master)'})
kept("right only for some shapes",
    {"p.detach().float()": "(p.detach() if p.dim() == 2 else p.detach().flatten()).float()"})
kept("right only for numbers near 1", {"p.detach().float()": "p.detach().half().float()"})
kept("more than 16 bytes per parameter", {RETURN: 'return {"gradient": torch.zeros_like(master), '})


# ---- wrong: how it steps ---------------------------------------------------------------------------------

FLOAT = "gradient = p.grad.float()"
ADAMW = 'adamw(kept["master"], kept["mean"], kept["square"], gradient, t, **settings)'
COPY = 'p.copy_(kept["master"])'
OTHER_WAY, BEHIND = "the master goes another way", "the parameter does not follow"
SMALL, CHANGED = "small steps are lost", "the gradient has changed"
ALWAYS = "right only where every parameter has a gradient"

spoil = answers.slips(step, given=steps)


def then(mistake, words, **options):
    """Note a wrong answer that also does `words` after the step."""
    spoil(mistake, {COPY: f"{COPY}\n    {words}"}, **options)


def by(mistake, gradient, **options):
    """Note a wrong answer that steps with another gradient."""
    spoil(mistake, {FLOAT: gradient}, **options)


def setting(mistake, words, **options):
    """Note a wrong answer that does `words` before it uses AdamW's settings."""
    spoil(mistake, {ADAMW: f"{words}\n    {ADAMW}"}, **options)


then(SMALL, 'kept["master"].copy_(p)')
setting(OTHER_WAY, 'kept["master"].copy_(p)')
spoil("the master stands still", {FLOAT: "", ADAMW: "", COPY: "pass"})
spoil(BEHIND, {COPY: ""})
spoil("the parameter is not its master, rounded",
    {ADAMW: f'before = kept["master"].clone()\n    {ADAMW}',
     COPY: 'p.add_((kept["master"] - before).to(p.dtype))'})
setting("every step counts as the first", "t = 1")
setting("the steps are counted from a different number", "t += 1")
setting(ALWAYS, 't = kept["t"] = kept.get("t", 0) + 1')
by("right only in bfloat16", f"{FLOAT} / (1024 if p.dtype is torch.float16 else 1)")
spoil("right only where no gradient is zero", {"p.grad is None": "p.grad is None or not p.grad.any()"})
spoil("the parameter has other memory", {COPY: 'p.data = kept["master"].to(p.dtype)'})
spoil("the parameter's dtype has changed", {COPY: 'p.data = kept["master"]'})
then(CHANGED, "p.grad.mul_(2)")
spoil("right only for contiguous parameters",
    {FLOAT: "gradient = p.grad.view(-1).float()",
     ADAMW: 'adamw(*(kept[name].view(-1) for name in ("master", "mean", "square")), gradient, t, **settings)'})

# ---- wrong: both -----------------------------------------------------------------------------------------

LOW = "{0} = kept[{0!r}].float()\n    "
ROUNDED = '\n    kept["{0}"].copy_({0})'
kept(
    NO_FLOAT32.format("mean"),
    {MEAN: '"mean": torch.zeros_like(p)', SQUARE: '"square": torch.zeros_like(p)'},
    given=partial(
        remembers,
        then=exchanged(
            step,
            {
                ADAMW: LOW.format("mean")
                + LOW.format("square")
                + 'adamw(kept["master"], mean, square, gradient, t, **settings)'
                + ROUNDED.format("mean")
                + ROUNDED.format("square")
            },
            "step_moments_low",
        ),
    ),
)
FLAT = {
    FLOAT: "gradient = p.grad.reshape(-1).float()",
    COPY: 'p.copy_(kept["master"].view(p.shape))',
}
kept("a different shape", {"p.detach().float()": "p.detach().float().reshape(-1)"},
    given=partial(remembers, then=exchanged(step, FLAT, "step_flat")))
