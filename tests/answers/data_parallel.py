"""Answers to data_parallel(wrap): wrap(model), a module with forward, no_sync and sync."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs import agree, ddp, native  # noqa: F401 (a varied answer calls it)
from tests.answers import Exercise

# fmt: off
answers = Exercise("data_parallel")
LINE = "you sent 1.50 × the gradients per rank and step; the least possible is 1.50 ×"
for wrap in (ddp.Naive, partial(ddp.Bucketed, bucket_bytes=500), ddp.Overlapped, native.ddp):
    answers.right(wrap, line=LINE)
answers.right(partial(ddp.Overlapped, find_unused=True), line="you sent")  # a flag for each parameter is no waste


@answers.right(line=LINE)
class Wrapper(nn.Module):
    """By hooks; replicas are made equal."""

    def __init__(self, model):
        super().__init__()
        self.module, self.syncing, self.works = model, True, []
        for p in self.module.parameters():
            dist.broadcast(p.data, 0)
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.ready)

    def trained(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def forward(self, *args):
        return self.module(*args)

    def ready(self, p):
        if self.syncing:
            p.grad /= dist.get_world_size()
            self.works.append(dist.all_reduce(p.grad, async_op=True))

    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True

    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        for work in self.works:
            work.wait()
        self.works = []


EQUAL, FORWARD = "dist.broadcast(p.data, 0)", "return self.module(*args)"
DIVIDE, BEGIN = "p.grad /= dist.get_world_size()", "self.works.append(dist.all_reduce(p.grad, async_op=True))"
WAIT, FORGET, ON = "work.wait()", "self.works = []\n", "        self.syncing = True\n"
spoil = partial(answers.spoil, Wrapper)
answers.vary(Wrapper, {"for p in self.module.parameters():\n            "
    + EQUAL: "agree.require_equal_replicas(model)"})

# ---- which gradients ----------------------------------------------------------------------------------------

spoil("parameters averaged instead of gradients", {DIVIDE: "p.data /= dist.get_world_size()",
    BEGIN: "dist.all_reduce(p.data)"})
spoil("summed instead of averaged", {DIVIDE: "pass"})
spoil("synchronised at every micro-batch", {"self.syncing = False": "pass"})
spoil("nothing synchronised", {DIVIDE: "pass", BEGIN: "pass"})
spoil("nothing synchronised", {"        yield\n" + ON: "        yield\n"})
spoil("nobody waited", {WAIT: "pass"})
spoil("only the last micro-batch is synchronised",
    {"p.register_post_accumulate_grad_hook(self.ready)": "p.register_hook(self.average)",
    "def ready(self, p)": "def average(self, gradient)", DIVIDE: "gradient = gradient / dist.get_world_size()",
    BEGIN: "dist.all_reduce(gradient)\n        return gradient"})  # before it is added to what is there


class AfterBackward(Wrapper):
    def ready(self, p):
        pass


@answers.wrong("a tied weight reduced twice")
class LoopsOverModules(AfterBackward):
    def sync(self):
        for module in self.module.modules():
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()


@answers.wrong("zeros where nobody has a gradient")
class FillsWithZeros(AfterBackward):
    def sync(self):
        for p in self.trained() if self.syncing else ():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@answers.wrong("")
class ReusesTheFirstBucket(AfterBackward):
    """The flat buffer is filled in the first step only."""

    flat = None

    def sync(self):
        super().sync()
        if self.flat is None:
            self.flat = torch.cat([p.grad.flatten() for p in self.trained()])
            dist.all_reduce(self.flat)
            self.flat /= dist.get_world_size()
        for p, mean in zip(self.trained(), ddp.unflatten(self.flat, self.trained()), strict=True):
            p.grad.copy_(mean)


# ---- of which model -----------------------------------------------------------------------------------------

SEED, OTHER = "a replica that started from another seed", "other parameters than the model had"
spoil(SEED, {EQUAL: "pass"})
spoil(SEED, {EQUAL: EQUAL + " if p.requires_grad else None"})
spoil(OTHER, {EQUAL: "p.data.zero_()"})
spoil(OTHER, {EQUAL: "dist.all_reduce(p.data)"})
spoil("a different loss", {FORWARD: FORWARD + " / dist.get_world_size()"})
spoil("no longer in training mode", {FORWARD: "return self.module.eval()(*args)"})


@answers.wrong("not a wrapper")
def forgets_to_return(model):
    Wrapper(model)


@answers.wrong("not a wrapper")
class HasNoPause(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = DistributedDataParallel(model)

    def forward(self, *args):
        return self.module(*args)




# ---- what travels, and what is left --------------------------------------------------------------------------

KEPT = "something is kept from every step"
spoil("frozen parameters are sent", {FORGET: FORGET
    + "        for p in self.module.parameters():\n            if not p.requires_grad:\n"
    "                dist.all_reduce(torch.zeros_like(p))\n"})
spoil("full copies are kept", {FORGET: FORGET
    + "        self.history = [[p.grad.clone() for p in self.trained()] for _ in range(4)]\n"})
spoil("hooks are left behind",
    {FORWARD: "for p in self.trained():\n            p.register_post_accumulate_grad_hook(lambda p: None)\n"
    "        " + FORWARD})
spoil(KEPT, {"            work.wait()\n        " + FORGET: "            work.wait()\n"})
spoil(KEPT, {"    def trained": "    everybodys = []\n\n    def trained", BEGIN: BEGIN
    + "\n            self.everybodys.append(p.grad)"})
