"""Answers to average_gradients(model)."""

from functools import partial

import torch
import torch.distributed as dist

from labs import collectives, ddp  # noqa: F401 (a varied answer calls it)
from tests.answers import Exercise, from_notebook

# fmt: off
answers = Exercise("average_gradients")
LINE = "you sent 1.50 × the gradients per rank; the least possible is 1.50 ×"

one_by_one = answers.right(from_notebook("average_gradients"), line=LINE)


ALL, IF = "for p in model.parameters():", "if p.grad is not None:"
SUM, MEAN = "dist.all_reduce(p.grad)", "p.grad /= dist.get_world_size()"
answers.spoil(one_by_one, "right only where all that has a gradient is trained",
    {IF: "if p.requires_grad and p.grad is not None:"})
@answers.right(line=LINE)
def all_on_their_way_at_once(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(g, async_op=True) for g in grads]
    for g, work in zip(grads, works, strict=True):
        work.wait()
        g.div_(dist.get_world_size())


# ---- which numbers ------------------------------------------------------------------------------------------

spoil = partial(answers.spoil, one_by_one)
spoil("parameters averaged instead of gradients", {SUM: "dist.all_reduce(p.data)",
    MEAN: "p.data /= dist.get_world_size()"})
spoil("one rank's gradient everywhere", {SUM: "dist.broadcast(p.grad, 0)", MEAN: "pass"})
spoil("right on some ranks only", {MEAN: "p.grad /= dist.get_world_size() if dist.get_rank() == 0 else 1"})
spoil("the mean does not reach .grad", {SUM: "mean = p.grad.clone()\n            dist.all_reduce(mean)",
    MEAN: "mean /= dist.get_world_size()"})


# ---- of which parameters ------------------------------------------------------------------------------------

LEFT_OUT, TIED = "some parameters are left out", "a tied weight reduced twice"
NAMED = "for _, p in model.named_parameters(remove_duplicate=False):"
spoil("a frozen parameter has a gradient",
    {IF: "if True:\n            p.grad = torch.zeros_like(p) if p.grad is None else p.grad"})
spoil("zeros where nobody has a gradient",
    {IF: "if p.requires_grad:\n            p.grad = torch.zeros_like(p) if p.grad is None else p.grad"})
spoil("frozen parameters are sent",
    {IF: "if True:\n            g = torch.zeros_like(p) if p.grad is None else p.grad", SUM: "dist.all_reduce(g)",
    MEAN: "g /= dist.get_world_size()"})
spoil(TIED, {ALL: NAMED})
spoil(LEFT_OUT, {IF: "if p.grad is not None and p.ndim:"})
spoil("the ranks make different calls", {IF: "if p.grad is not None and p.grad.any():"}, alone=True)


# ---- what travels --------------------------------------------------------------------------------------------

spoil("one rank does the work for all", {SUM: "dist.reduce(p.grad, dst=0)", MEAN: MEAN
    + "\n            dist.broadcast(p.grad, src=0)"})
spoil("nobody waited", {SUM: "dist.all_reduce(p.grad, async_op=True)"})


@answers.wrong("too many bytes")
def one_vector(model):
    """Send one vector, in the largest dtype if dtypes are mixed."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, mean in zip(grads, ddp.unflatten(flat, grads), strict=True):
        g.copy_(mean)


@answers.wrong("buffers are sent")
def buffers_too(model):
    one_by_one(model)
    for b in model.buffers():
        dist.all_reduce(b)
        b /= dist.get_world_size()


# ---- what is left --------------------------------------------------------------------------------------------

spoil("not in place", {MEAN: "p.grad = p.grad / dist.get_world_size()"})
spoil("hooks are left behind", {MEAN: MEAN + "\n            p.register_hook(lambda gradient: gradient)"})
spoil("requires_grad has changed", {ALL: "model.requires_grad_(True)\n    " + ALL})
spoil("no longer in training mode", {ALL: "model.eval()\n    " + ALL})


@answers.wrong("something is kept from every step")
def remembers(model, history=[]):  # noqa: B006
    one_by_one(model)
    history.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
