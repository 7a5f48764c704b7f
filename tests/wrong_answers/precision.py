"""Wrong answers to the exercise of notebook 01, and the right one that some of them begin with."""

import torch
from torch import nn

from tests.wrong_answers.answers import wrong


def adamw(weight, mean, square, gradient, t, lr, betas, eps, weight_decay):
    """As the notebook has it."""
    mean.lerp_(gradient, 1 - betas[0])
    square.lerp_(gradient**2, 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    weight.mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)


def remember(p):
    master = p.detach().float()
    return {"master": master, "mean": torch.zeros_like(master), "square": torch.zeros_like(master)}


@torch.no_grad()
def mixed_step(p, kept, t, **settings):
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
        p.copy_(kept["master"])


CHECK = "mixed_precision"


def remembers(mistake, **options):
    """This is how it remembers; the step is right."""
    return wrong(CHECK, mistake, functions=lambda fn: (fn, mixed_step), **options)


def steps(mistake, **options):
    """This is how it steps; what it remembers is right."""
    return wrong(CHECK, mistake, functions=lambda fn: (remember, fn), **options)


# ---- what is remembered ----------------------------------------------------------------------------------


@remembers("not these three tensors")
def nothing_is_returned(p):
    remember(p)


@remembers("not these three tensors")
def no_master(p):
    return {"mean": torch.zeros(p.shape), "square": torch.zeros(p.shape)}


@remembers("not these three tensors")
def a_tuple(p):
    return tuple(remember(p).values())


@remembers("the master is not float32")
def the_parameter_itself(p):
    return remember(p) | {"master": p.detach()}


@remembers("the master is not float32")
def a_copy_in_its_own_dtype(p):
    return remember(p) | {"master": p.detach().clone()}


@remembers("the mean is not float32")
def means_like_the_parameter(p):
    zeros = torch.zeros_like(p.detach())
    return {"master": p.detach().float(), "mean": zeros, "square": zeros.clone()}


@remembers("the square is not float32")
def squares_like_the_parameter(p):
    return remember(p) | {"square": torch.zeros_like(p.detach())}


@remembers("the master is not float32")
def in_float64(p):
    return remember(p) | {"master": p.detach().double()}


@remembers("part of a graph")
def not_detached(p):
    return remember(p) | {"master": p.float()}


@remembers("part of a graph")
def a_parameter_of_its_own(p):
    return remember(p) | {"master": nn.Parameter(p.detach().float())}


@remembers("two of them share their memory")
def one_tensor_twice(p):
    zeros = torch.zeros(p.shape)
    return {"master": p.detach().float(), "mean": zeros, "square": zeros}


@remembers("the master begins with other numbers")
def a_master_of_zeros(p):
    return remember(p) | {"master": torch.zeros(p.shape)}


@remembers("the mean begins with other numbers")
def a_mean_that_nobody_wrote(p):
    return remember(p) | {"mean": torch.empty(p.shape)}


@remembers("the square begins with other numbers")
def squares_of_ones(p):
    return remember(p) | {"square": torch.ones(p.shape)}


@remembers("right only for some shapes")
def flattened(p):
    kept = remember(p)
    return kept if p.dim() == 2 else {name: x.flatten() for name, x in kept.items()}


@remembers("right only for numbers near 1")
def by_way_of_float16(p):
    return remember(p) | {"master": p.detach().half().float()}


@remembers("more than 16 bytes per parameter")
def a_gradient_is_kept_ready(p):
    return remember(p) | {"gradient": torch.zeros(p.shape)}


@remembers("the master begins with other numbers")
def one_for_each_shape(p):
    return one_for_each_shape.__dict__.setdefault("kept", {}).setdefault(p.shape, remember(p))


# ---- how it steps ----------------------------------------------------------------------------------------


@steps("the master stands still")
@torch.no_grad()
def nothing_happens(p, kept, t, **settings):
    pass


@steps("small steps are lost")
@torch.no_grad()
def in_the_parameters_dtype(p, kept, t, **settings):
    if p.grad is not None:
        weight = p.float()
        adamw(weight, kept["mean"], kept["square"], p.grad.float(), t, **settings)
        p.copy_(weight)
        kept["master"].copy_(p)


@steps("small steps are lost")
@torch.no_grad()
def the_master_is_made_anew(p, kept, t, **settings):
    kept["master"].copy_(p)
    mixed_step(p, kept, t, **settings)
    kept["master"].copy_(p)


@steps("the master stands still")
@torch.no_grad()
def only_the_parameter(p, kept, t, **settings):
    if p.grad is not None:
        weight = p.float()
        adamw(weight, kept["mean"], kept["square"], p.grad.float(), t, **settings)
        p.copy_(weight)


@steps("the parameter does not follow")
@torch.no_grad()
def only_the_master(p, kept, t, **settings):
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)


@steps("the parameter does not follow")
@torch.no_grad()
def copied_before_the_step(p, kept, t, **settings):
    if p.grad is not None:
        p.copy_(kept["master"])
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)


@steps("the parameter is not its master, rounded")
@torch.no_grad()
def cut_off_and_not_rounded(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    if p.dtype is torch.bfloat16:
        p.copy_((kept["master"].view(torch.int32) & -65536).view(torch.float32))


@steps("the gradient is followed uphill")
@torch.no_grad()
def uphill(p, kept, t, **settings):
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], -p.grad.float(), t, **settings)
        p.copy_(kept["master"])


@steps("every step counts as the first")
@torch.no_grad()
def always_the_first(p, kept, t, **settings):
    mixed_step(p, kept, 1, **settings)


@steps("the steps are counted from a different number")
@torch.no_grad()
def counted_from_two(p, kept, t, **settings):
    mixed_step(p, kept, t + 1, **settings)


@steps("no weight decay")
@torch.no_grad()
def without_weight_decay(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings | {"weight_decay": 0.0})


@steps("a different learning rate")
@torch.no_grad()
def twice(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings | {"lr": 2 * settings["lr"]})


@steps("")
@torch.no_grad()
def two_steps(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    mixed_step(p, kept, t, **settings)


@steps("")
@torch.no_grad()
def settings_of_its_own(p, kept, t, **settings):
    mixed_step(p, kept, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@steps("the master goes another way")
@torch.no_grad()
def squares_in_the_parameters_dtype(p, kept, t, lr, betas, eps, weight_decay):
    if p.grad is not None:
        kept["mean"].lerp_(p.grad.float(), 1 - betas[0])
        kept["square"].lerp_((p.grad**2).float(), 1 - betas[1])
        scale = (kept["square"] / (1 - betas[1] ** t)).sqrt() + eps
        kept["master"].mul_(1 - lr * weight_decay).sub_(lr * kept["mean"] / (1 - betas[0] ** t) / scale)
        p.copy_(kept["master"])


@steps("the master goes another way")
@torch.no_grad()
def settings_of_the_first_step(p, kept, t, **settings):
    mixed_step(p, kept, t, **kept.setdefault("settings", settings))


@steps("right only in bfloat16")
@torch.no_grad()
def a_loss_scale_that_nobody_used(p, kept, t, **settings):
    if p.grad is not None:
        gradient = p.grad.float() / (1024 if p.dtype is torch.float16 else 1)
        adamw(kept["master"], kept["mean"], kept["square"], gradient, t, **settings)
        p.copy_(kept["master"])


@steps("right only where no gradient is zero")
@torch.no_grad()
def zeros_are_taken_for_none(p, kept, t, **settings):
    if p.grad is not None and p.grad.any():
        mixed_step(p, kept, t, **settings)


@steps("the parameter has other memory")
@torch.no_grad()
def another_tensor(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    p.data = kept["master"].to(p.dtype)


@steps("the parameter's dtype has changed")
@torch.no_grad()
def the_master_takes_its_place(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    p.data = kept["master"]


@steps("the gradient has changed")
@torch.no_grad()
def the_gradient_is_upcast(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    if p.grad is not None:
        p.grad.mul_(2)


@steps("the gradient has changed")
@torch.no_grad()
def the_gradient_is_cleared(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    p.grad = None


@steps("right only where every parameter has a gradient")
@torch.no_grad()
def zeros_for_none(p, kept, t, **settings):
    gradient = torch.zeros_like(p) if p.grad is None else p.grad
    adamw(kept["master"], kept["mean"], kept["square"], gradient.float(), t, **settings)
    p.copy_(kept["master"])


@steps("right only where every parameter has a gradient")
@torch.no_grad()
def none_is_not_expected(p, kept, t, **settings):
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_(kept["master"])


@steps("right only in bfloat16")
@torch.no_grad()
def always_bfloat16(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    p.copy_(kept["master"].bfloat16())


@steps("right only for contiguous parameters")
@torch.no_grad()
def as_one_row(p, kept, t, **settings):
    if p.grad is not None:
        master, mean, square = (kept[name].view(-1) for name in ("master", "mean", "square"))
        adamw(master, mean, square, p.grad.view(-1).float(), t, **settings)
        p.copy_(kept["master"])


@steps("")
def with_a_graph(p, kept, t, **settings):
    mixed_step(p, kept, t, **settings)
    kept["master"].requires_grad_()


@steps("something is kept from every step")
@torch.no_grad()
def keeps_every_gradient(p, kept, t, **settings):
    keeps_every_gradient.__dict__.setdefault("log", []).append(None if p.grad is None else p.grad.float())
    mixed_step(p, kept, t, **settings)


@steps("more than 16 bytes per parameter")
@torch.no_grad()
def leaves_the_gradient_in_float32(p, kept, t, **settings):
    if p.grad is not None:
        kept["gradient"] = p.grad.float()
        mixed_step(p, kept, t, **settings)


@steps("something is left behind", alone=True)
def leaves_grad_mode_off(p, kept, t, **settings):
    torch.set_grad_enabled(False)
    mixed_step(p, kept, t, **settings)
