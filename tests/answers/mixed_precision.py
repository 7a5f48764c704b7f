"""Answers to mixed_precision (01): how AdamW's state is remembered, and how it steps.

A step is in no_grad, as the notebook has it: of the text that is exchanged a decorator is no part.
"""

import math
from functools import partial

import torch
from torch import nn  # noqa: F401  (exchanged words name it)

from labs.kit import exercises
from tests.answers import Exercise, exchanged

# fmt: off
answers = Exercise("mixed_precision")
LINE = "16.00 bytes per parameter at rest; the least possible is 16"


def steps(fn, first=None):
    """This is how it steps."""
    return first or remember, torch.no_grad()(fn)


def remembers(fn, then=None):
    """This is how it remembers."""
    return fn, torch.no_grad()(then or step)


def adamw(weight, mean, square, gradient, t, lr, betas, eps, weight_decay):
    """As the notebook has it."""
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


def with_shapes(p):
    zeros = partial(torch.zeros, p.shape, device=p.device)
    return {"master": p.detach().clone().to(torch.float32), "mean": zeros(), "square": zeros()}


@answers.right(line=LINE, given=remembers)
def remember_and_count(p):
    return remember(p) | {"steps": 0}


answers.right(exercises.remember, line=LINE, given=lambda fn: (fn, exercises.mixed_step))


@answers.right(line=LINE, blind=True, given=partial(steps, first=with_shapes))
def step_replacing(p, kept, t, *, lr, betas, eps, weight_decay):
    """What is kept may be other tensors afterwards."""
    if p.grad is None:
        return
    g, (b1, b2) = p.grad.to(torch.float32), betas
    mean = b1 * kept["mean"] + (1 - b1) * g
    square = b2 * kept["square"] + (1 - b2) * g * g
    change = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt() + eps)
    master = kept["master"] * (1 - lr * weight_decay) - lr * change
    kept.update(master=master, mean=mean, square=square)
    p.copy_(master)


@answers.right(line=LINE, blind=True, given=steps)
def step_native(p, kept, t, **settings):
    """torch's own AdamW, made anew for each step."""
    if p.grad is None:
        return
    master = kept["master"]
    optimizer = torch.optim.AdamW([master], **settings)
    count = torch.tensor(float(t - 1))
    optimizer.state[master] = {"step": count, "exp_avg": kept["mean"], "exp_avg_sq": kept["square"]}
    master.grad = p.grad.float()
    optimizer.step()
    master.grad = None
    p.copy_(master)


@answers.right(line=LINE, blind=True, given=partial(steps, first=with_shapes))
def step_fused_ops(p, kept, t, lr, betas, eps, weight_decay):
    if p.grad is None:
        return
    g = p.grad.float()
    kept["mean"].mul_(betas[0]).add_(g, alpha=1 - betas[0])
    kept["square"].mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    denominator = kept["square"].sqrt().div_(math.sqrt(1 - betas[1] ** t)).add_(eps)
    kept["master"].mul_(1 - lr * weight_decay)
    kept["master"].addcdiv_(kept["mean"], denominator, value=-lr / (1 - betas[0] ** t))
    p.data.copy_(kept["master"])


@answers.right(line=LINE, blind=True, given=steps)
def step_by_rows(p, kept, t, **settings):
    """Some rows at a time: little temporary memory."""
    if p.grad is None:
        return
    all_of_it = (p.detach(), p.grad, kept["master"], kept["mean"], kept["square"])
    parts = [all_of_it] if p.dim() == 0 else zip(*(x.split(16) for x in all_of_it), strict=True)
    for low, grad, master, mean, square in parts:
        adamw(master, mean, square, grad.float(), t, **settings)
        low.copy_(master)


# ---- wrong: what is remembered ---------------------------------------------------------------------------

MASTER, MEAN, SQUARE = '"master": master', '"mean": torch.zeros_like(master)', '"square": torch.zeros_like(master)'
RETURN = "return {"
ALL = f"{RETURN}{MASTER}, {MEAN}, {SQUARE}}}"
NO_DICT, NO_FLOAT32, BEGUN = "not these three tensors", "the {} is not float32", "the {} begins with other numbers"
KEPT = {}

kept = answers.slips(remember, given=remembers)
kept(NO_DICT, {RETURN: "{"})
kept(NO_DICT, {f"{MASTER}, ": ""})
kept(NO_DICT, {ALL: "return master, torch.zeros_like(master), torch.zeros_like(master)"})
kept(NO_FLOAT32.format("master"), {MASTER: '"master": p.detach()'})
kept(NO_FLOAT32.format("master"), {MASTER: '"master": master.double()'})
kept(NO_FLOAT32.format("square"), {SQUARE: '"square": torch.zeros_like(p.detach())'})
kept("part of a graph", {"p.detach().float()": "p.float()"})
kept("part of a graph", {MASTER: '"master": nn.Parameter(master)'})
kept("two of them share their memory",
    {ALL: 'return {"master": master} | dict.fromkeys(("mean", "square"), torch.zeros_like(master))'},
    blind=True)
kept(BEGUN.format("master"), {MASTER: '"master": torch.zeros_like(master)'}, blind=True)
kept(BEGUN.format("mean"), {MEAN: '"mean": torch.empty_like(master)'})
kept(BEGUN.format("square"), {SQUARE: '"square": torch.ones_like(master)'})
kept(BEGUN.format("master"), {RETURN: "return KEPT.setdefault(p.shape, {", "(master)}": "(master)})"})
kept("right only for some shapes",
    {"p.detach().float()": "(p.detach() if p.dim() == 2 else p.detach().flatten()).float()"})
kept("right only for numbers near 1", {"p.detach().float()": "p.detach().half().float()"})
kept("more than 16 bytes per parameter", {RETURN: 'return {"gradient": torch.zeros_like(master), '})


# ---- wrong: how it steps ---------------------------------------------------------------------------------

FLOAT = "gradient = p.grad.float()"
ADAMW = 'adamw(kept["master"], kept["mean"], kept["square"], gradient, t, **settings)'
COPY = 'p.copy_(kept["master"])'
NONE = "    if p.grad is None:\n        return\n"
OTHER_WAY, STILL, BEHIND = "the master goes another way", "the master stands still", "the parameter does not follow"
SMALL, CHANGED = "small steps are lost", "the gradient has changed"
ALWAYS = "right only where every parameter has a gradient"

spoil = answers.slips(step, given=steps)


def then(mistake, words, **options):
    """With these after the step."""
    spoil(mistake, {COPY: f"{COPY}\n    {words}"}, **options)


def by(mistake, gradient, **options):
    """With another gradient."""
    spoil(mistake, {FLOAT: gradient}, **options)


def setting(mistake, words, **options):
    """With these words before AdamW's settings are used."""
    spoil(mistake, {ADAMW: f"{words}\n    {ADAMW}"}, **options)


spoil(STILL, {FLOAT: "", ADAMW: "", COPY: "pass"})
WEIGHT = {ADAMW: "weight = p.float()\n    " + ADAMW.replace('kept["master"]', "weight")}
spoil(STILL, WEIGHT | {COPY: "p.copy_(weight)"})
then(SMALL, 'kept["master"].copy_(p)')
setting(OTHER_WAY, 'kept["master"].copy_(p)', blind=True)
spoil(BEHIND, {COPY: ""})
spoil(BEHIND, {COPY: 'p = kept["master"].to(p.dtype)'}, blind=True)
spoil(BEHIND, {COPY: "", ADAMW: f"{COPY}\n    {ADAMW}"}, blind=True)
spoil("the parameter is not its master, rounded",
    {ADAMW: f'before = kept["master"].clone()\n    {ADAMW}',
     COPY: 'p.add_((kept["master"] - before).to(p.dtype))'}, blind=True)
CUT = 'p.copy_((kept["master"].contiguous().view(torch.int32) & -65536).view(torch.float32))'
spoil("the parameter is not its master, rounded", {COPY: CUT}, blind=True)
by("the gradient is followed uphill", "gradient = -p.grad.float()")
setting("every step counts as the first", "t = 1")
setting("the steps are counted from a different number", "t += 1", blind=True)
setting(ALWAYS, 't = kept["t"] = kept.get("t", 0) + 1', blind=True)
setting("no weight decay", 'settings["weight_decay"] = 0.0')
setting("a different learning rate", 'settings["lr"] *= 2')
setting(OTHER_WAY, ADAMW)
setting(OTHER_WAY, "settings = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)")
setting(OTHER_WAY, 'settings["betas"] = 0.9, 0.999', blind=True)
setting(OTHER_WAY, 'settings = kept.setdefault("settings", settings)', blind=True)
setting(OTHER_WAY, 'settings = kept.setdefault("settings", settings) | {"lr": settings["lr"]}', blind=True)
by("", f'{FLOAT} + settings["weight_decay"] * kept["master"]\n    settings["weight_decay"] = 0.0', blind=True)
by("right only in bfloat16", f"{FLOAT} / (1024 if p.dtype is torch.float16 else 1)")
by("more than 16 bytes per parameter",
    'gradient = KEPT.setdefault(p, torch.empty_like(kept["master"])).copy_(p.grad)', blind=True)
by("something is kept from every step", f'{FLOAT}\n    KEPT.setdefault("log", []).append(gradient)')
by("more than 16 bytes per parameter", f'{FLOAT}\n    kept["gradient"] = gradient')
by("more than 16 bytes per parameter", f'{FLOAT}\n    kept["gradient"] = gradient', blind=True,
    given=partial(steps, first=lambda p: remember(p) | {"gradient": torch.zeros(p.shape)}))
spoil("right only where no gradient is zero", {"p.grad is None": "p.grad is None or not p.grad.any()"}, blind=True)
spoil(ALWAYS, {NONE: "", FLOAT: "gradient = torch.zeros(p.shape) if p.grad is None else p.grad.float()"}, blind=True)
spoil(ALWAYS, {NONE: ""}, blind=True)
spoil("the parameter has other memory", {COPY: 'p.data = kept["master"].to(p.dtype)'}, blind=True)
spoil("the parameter's dtype has changed", {COPY: 'p.data = kept["master"]'})
then(CHANGED, "p.grad.mul_(2)")
then(CHANGED, "p.grad = None", blind=True)
by(CHANGED, f"p.grad.clamp_(-1, 1)\n    {FLOAT}", blind=True)
spoil("right only in bfloat16", {COPY: 'p.copy_(kept["master"].bfloat16())'}, blind=True)
spoil("right only for contiguous parameters",
    {FLOAT: "gradient = p.grad.view(-1).float()",
     ADAMW: 'adamw(*(kept[name].view(-1) for name in ("master", "mean", "square")), gradient, t, **settings)'})
spoil("right only for some shapes",
    {ADAMW: "for row in range(len(p)):\n"
         '        adamw(*(kept[k][row] for k in ("master", "mean", "square")), gradient[row], t, **settings)'},
    blind=True)
then("part of a graph", 'kept["master"].requires_grad_()')
spoil("something is left behind", {NONE: f"    torch.set_grad_enabled(False)\n{NONE}"}, alone=True,
    given=lambda fn: (remember, fn))


@answers.wrong(OTHER_WAY, blind=True, given=steps)
def step_squares_low(p, kept, t, lr, betas, eps, weight_decay):
    """Squared before it is float32."""
    if p.grad is None:
        return
    mean, square = kept["mean"], kept["square"]
    mean.lerp_(p.grad.float(), 1 - betas[0])
    square.lerp_((p.grad**2).float(), 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    kept["master"].mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)
    p.copy_(kept["master"])


answers.spoil(step_squares_low, OTHER_WAY,
    {"mean.lerp_(p.grad.float()": "mean = mean.lerp(p.grad.float()",
     "square.lerp_((p.grad**2).float()": "square = square.lerp(p.grad.float() ** 2"}, blind=True, given=steps)

# ---- wrong: both -----------------------------------------------------------------------------------------

LOW = "{0} = kept[{0!r}].float()\n    "
ROUNDED = '\n    kept["{0}"].copy_({0})'
kept(
    NO_FLOAT32.format("master"),
    {MASTER: '"master": p.detach().clone()'},
    blind=True,
    given=partial(
        remembers,
        then=exchanged(
            step,
            {
                ADAMW: LOW.format("master") + ADAMW.replace('kept["master"]', "master") + ROUNDED.format("master"),
                COPY: "p.copy_(master)",
            },
            "step_master_low",
        ),
    ),
)
kept(
    NO_FLOAT32.format("mean"),
    {MEAN: '"mean": torch.zeros_like(p)', SQUARE: '"square": torch.zeros_like(p)'},
    blind=True,
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
kept("a different shape", {"p.detach().float()": "p.detach().float().reshape(-1)"}, blind=True,
    given=partial(remembers, then=exchanged(step, FLAT, "step_flat")))
