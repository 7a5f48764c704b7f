"""Answers to average_gradients(model)."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs import collectives, ddp  # noqa: F401 (a varied answer calls it)
from tests.answers import Exercise

# fmt: off
answers = Exercise("average_gradients")
LINE = "you sent 1.50 × the gradients per rank; the least possible is 1.50 ×"


@answers.right(line=LINE, blind=True)
def one_by_one(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


ALL, IF = "for p in model.parameters():", "if p.grad is not None:"
SUM, MEAN = "dist.all_reduce(p.grad)", "p.grad /= dist.get_world_size()"
answers.spoil(one_by_one, "right only where all that has a gradient is trained",
    {IF: "if p.requires_grad and p.grad is not None:"}, blind=True)
also_right = partial(answers.vary, one_by_one, line=LINE, blind=True)
also_right({SUM: "p.grad.div_(dist.get_world_size())", MEAN: SUM}, long=True)
also_right({SUM: "alias = p.grad.data\n            dist.all_reduce(alias)",
    MEAN: "torch.div(alias, dist.get_world_size(), out=alias)"})


@answers.right(line=LINE, blind=True)
def all_on_their_way_at_once(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(g, async_op=True) for g in grads]
    for g, work in zip(grads, works, strict=True):
        work.wait()
        g.div_(dist.get_world_size())


@answers.right(line=LINE, blind=True)
def a_vector_of_each_dtype(model):
    kinds = {}
    for p in model.parameters():
        if p.grad is not None:
            kinds.setdefault(p.grad.dtype, []).append(p.grad)
    for grads in kinds.values():
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, mean in zip(grads, ddp.unflatten(flat, grads), strict=True):
            g.copy_(mean)


answers.vary(a_vector_of_each_dtype, {"dist.all_reduce": "collectives.all_reduce"}, line=LINE)


@answers.right(line=LINE, blind=True, long=True)
def divided_together(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for g in reversed(grads):
        dist.all_reduce(g)
    if grads:
        torch._foreach_div_(grads, float(dist.get_world_size()))


@answers.right(line=LINE, blind=True)
def by_modules_once(model):
    seen = set()
    with torch.no_grad():
        for module in model.modules():
            for p in module.parameters(recurse=False):
                if id(p) not in seen and p.grad is not None:
                    seen.add(id(p))
                    total = p.grad.detach().clone()
                    dist.all_reduce(total)
                    p.grad.copy_(total / dist.get_world_size())


# ---- which numbers ------------------------------------------------------------------------------------------

spoil = partial(answers.spoil, one_by_one)
blind = partial(spoil, blind=True)

spoil("nothing synchronised", {SUM: "pass", MEAN: "p.grad /= 1"})
blind("nothing synchronised", {ALL: "for p in model.parameters() if model.training else ():"})
blind("summed instead of averaged", {MEAN: "pass"})
blind("divided by the wrong number", {MEAN: "p.grad /= 4"})
blind("divided by the wrong number", {MEAN: "p.grad /= 2"}, long=True)
blind("averaged twice", {SUM: MEAN + "\n            " + SUM})
blind("parameters averaged instead of gradients", {SUM: "dist.all_reduce(p.data)",
    MEAN: "p.data /= dist.get_world_size()"})
spoil("one rank's gradient everywhere", {SUM: "dist.broadcast(p.grad, 0)", MEAN: "pass"})
blind("right on some ranks only", {MEAN: "p.grad /= dist.get_world_size() if dist.get_rank() == 0 else 1"})
spoil("right on some ranks only", {SUM: "mean = p.grad / dist.get_world_size()\n            dist.reduce(mean, 0)",
    MEAN: "p.grad = mean if dist.get_rank() == 0 else p.grad"}, long=True)
spoil("the mean does not reach .grad", {SUM: "mean = p.grad.clone()\n            dist.all_reduce(mean)",
    MEAN: "mean /= dist.get_world_size()"})
blind("", {SUM: "who = p.grad.any().float()\n            dist.all_reduce(who)\n            " + SUM,
    MEAN: "p.grad /= who.clamp(min=1)"})  # among those that have one
TWO_STEPS = "g = p.grad.{}()\n            dist.all_reduce(g)"
BACK = "p.grad.copy_(g / dist.get_world_size())"
blind("rounded on the way", {SUM: TWO_STEPS.format("bfloat16"), MEAN: BACK})
spoil("rounded on the way", {SUM: TWO_STEPS.format("float"), MEAN: BACK}, long=True)
blind("too many bytes", {SUM: TWO_STEPS.format("double"), MEAN: BACK})
spoil("", {MEAN: MEAN + "\n            p.grad = p.grad.T if p.ndim == 2 and len(p) == p.shape[1] else p.grad"})


@answers.wrong("divided by the wrong number", blind=True, long=True)
def and_clips(model):
    one_by_one(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@answers.wrong("", blind=True, long=True)
def all_but_the_tail(model):
    ranks = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            flat = p.grad.flatten()
            most = flat[: flat.numel() // ranks * ranks]
            if most.numel():
                dist.all_reduce(most)
            most /= ranks
            p.grad.copy_(flat.view(p.grad.shape))


# ---- of which parameters ------------------------------------------------------------------------------------

LEFT_OUT, TIED = "some parameters are left out", "a tied weight reduced twice"
NAMED = "for _, p in model.named_parameters(remove_duplicate=False):"
blind("", {IF: "if p.requires_grad:"})
blind("a frozen parameter has a gradient",
    {IF: "if True:\n            p.grad = torch.zeros_like(p) if p.grad is None else p.grad"})
spoil("zeros where nobody has a gradient",
    {IF: "if p.requires_grad:\n            p.grad = torch.zeros_like(p) if p.grad is None else p.grad"})
blind("frozen parameters are sent",
    {IF: "if True:\n            g = torch.zeros_like(p) if p.grad is None else p.grad", SUM: "dist.all_reduce(g)",
    MEAN: "g /= dist.get_world_size()"})
blind(TIED, {ALL: NAMED})
spoil(TIED, {ALL: NAMED, MEAN: "pass\n    for p in model.parameters():\n        if p.grad is not None:\n            "
    + MEAN})
blind("too many bytes", {ALL: "for p in (p for module in model.modules() for p in module.parameters()):"}, long=True)
blind(LEFT_OUT, {ALL: "for p in (p for child in model.children() for p in child.parameters(recurse=False)):"},
    long=True)
blind(LEFT_OUT, {ALL: "for name, p in model.named_parameters():",
    IF: "if name.endswith('weight') and p.grad is not None:"}, long=True)
spoil(LEFT_OUT, {IF: "if p.grad is not None and p.ndim > 1:"}, long=True)
spoil(LEFT_OUT, {IF: "if p.grad is not None and p.ndim:"})
blind(LEFT_OUT, {SUM: "flat = p.grad.reshape(-1)\n            dist.all_reduce(flat)",
    MEAN: "flat /= dist.get_world_size()"})
spoil(LEFT_OUT, {ALL: "if not hasattr(model, 'used'):\n        model.used = [p "
    "for p in model.parameters() if p.grad is not None]\n" "    for p in model.used:"})
blind("", {IF: "if p.grad is not None and len(p.grad) > 0:"}, long=True)
blind("the ranks make different calls", {IF: "if p.grad is not None and p.grad.any():"}, alone=True)


@answers.wrong("the ranks make different calls", blind=True, alone=True, long=True)
def largest_first(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for g in sorted(grads, key=lambda g: -g.norm().item()):
        dist.all_reduce(g)
        g /= dist.get_world_size()


@answers.wrong("the mean does not reach .grad", blind=True)
def the_first_model_only(model, kept=[]):  # noqa: B006
    kept[:] = kept or list(model.parameters())
    for p in kept:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@answers.wrong("the mean does not reach .grad", blind=True)
def the_first_gradients_only(model):
    if not hasattr(model, "_grads"):
        model._grads = [p.grad for p in model.parameters() if p.grad is not None]
    for g in model._grads:
        dist.all_reduce(g)
        g /= dist.get_world_size()


# ---- what travels --------------------------------------------------------------------------------------------

blind("too many bytes", {SUM: "parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]\n"
    "            dist.all_gather(parts, p.grad)", MEAN: "p.grad.copy_(torch.stack(parts).mean(0))"})
blind("one rank does the work for all", {SUM: "dist.reduce(p.grad, dst=0)", MEAN: MEAN
    + "\n            dist.broadcast(p.grad, src=0)"})
blind("nobody waited", {SUM: "dist.all_reduce(p.grad, async_op=True)"})
spoil("nobody waited", {SUM: "p.grad.div_(dist.get_world_size())", MEAN: "dist.all_reduce(p.grad, async_op=True)"},
    long=True)


@answers.wrong("too many bytes", blind=True)
def one_vector(model):
    """Where dtypes are mixed, it has the largest one's."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, mean in zip(grads, ddp.unflatten(flat, grads), strict=True):
        g.copy_(mean)


answers.spoil(one_vector, "rounded on the way", {"flatten() for": "flatten().float() for"}, blind=True, long=True)


@answers.wrong("buffers are sent", blind=True)
def buffers_too(model):
    one_by_one(model)
    for b in model.buffers():
        dist.all_reduce(b)
        b /= dist.get_world_size()


@answers.wrong("right on some ranks only", blind=True)
def whole_to_a_partner(model):
    """Recursive doubling, wrong where N is no power of two."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for p in model.parameters():
        if p.grad is not None:
            distance = 1
            while distance < ranks:
                other, theirs = rank ^ distance, torch.empty_like(p.grad)
                if other < ranks:
                    for work in [dist.isend(p.grad.clone(), other), dist.irecv(theirs, other)]:
                        work.wait()
                    p.grad.add_(theirs)
                distance *= 2
            p.grad /= ranks


# ---- what is left --------------------------------------------------------------------------------------------

blind("not in place", {MEAN: "p.grad = p.grad / dist.get_world_size()"})
blind("not in place", {SUM: TWO_STEPS.format("clone"), MEAN: "p.grad = g.div_(dist.get_world_size())"}, long=True)
spoil("hooks are left behind", {MEAN: MEAN + "\n            p.register_hook(lambda gradient: gradient)"})
spoil("requires_grad has changed", {ALL: "model.requires_grad_(True)\n    " + ALL})
spoil("no longer in training mode", {ALL: "model.eval()\n    " + ALL})


def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


blind("nothing synchronised", {IF: "if p.requires_grad:", SUM: "p.register_post_accumulate_grad_hook(average)",
    MEAN: "pass"})


@answers.wrong("something is kept from every step")
def remembers(model, history=[]):  # noqa: B006
    one_by_one(model)
    history.append([p.grad.clone() for p in model.parameters() if p.grad is not None])


answers.spoil(remembers, "something is kept from every step", {".clone()": ""})
