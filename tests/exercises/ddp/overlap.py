"""Answers to overlap(wrap): wrap(model, bucket_bytes, **options), a labs.ddp.Overlapped with hooks of its own."""

from contextlib import contextmanager  # noqa: F401 (a spoilt answer calls it)
from functools import partial

import torch
import torch.distributed as dist  # noqa: F401 (spoilt answers call it)

from labs import ddp
from tests.answers import Exercise, from_notebook

# fmt: off
answers = Exercise("overlap")
LINE = "4 of 4 all-reduces begin during backward, and nobody waits there"
answers.right(ddp.Overlapped, line=LINE)

InTurn = answers.right(from_notebook("Overlap"), line=LINE)


# ---- when a bucket begins -------------------------------------------------------------------------------------

spoil = partial(answers.spoil, InTurn)
COLLECT, ALL = "bucket.collect(p)", "for bucket in self.buckets[len(self.works) :]:"
BEGIN = "self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))"
INDENT = "\n            "
ORDER, EARLY = "buckets begin in different orders on different ranks", "a bucket begins before it is full"
NEVER, WAITS = "a bucket's all-reduce never begins", "waited for during backward"


@answers.wrong(ORDER, alone=True)
class WhicheverIsFull(InTurn):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if not bucket.waiting_for:
                self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@answers.wrong("a full bucket lies idle")
class OneAtATime(InTurn):
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))
            if any(bucket.waiting_for for bucket in self.buckets):
                return
spoil(EARLY, {"if bucket.waiting_for:": "if len(bucket.waiting_for) > 1:"})
spoil(NEVER, {BEGIN: BEGIN + INDENT + "return"})
spoil("more works than buckets", {ALL: "for bucket in list(self.buckets):", BEGIN: "self.buckets.pop(0)" + INDENT
    + BEGIN})


@answers.wrong("nothing is sent during backward")
class AfterBackward(ddp.Overlapped):
    def gradient_ready(self, p):
        pass

    def average(self):
        for p in self.trainable.values():
            super().gradient_ready(p)
        super().average()


@answers.wrong("some buckets begin after backward")
class LeavesTheLast(ddp.Overlapped):
    def gradient_ready(self, p):
        if p is next(iter(self.trainable.values())) and torch._C._current_graph_task_id() != -1:
            return
        super().gradient_ready(p)


# ---- who waits for it -----------------------------------------------------------------------------------------


spoil(WAITS, {BEGIN: BEGIN + INDENT + "self.works[-1].wait()"})
spoil("not one all-reduce for each bucket", {BEGIN: "dist.barrier(group=self.group)" + INDENT + BEGIN})


# ---- what travels, and where it goes ----------------------------------------------------------------------------

spoil("wrong in a group of only some ranks", {"group=self.group, ": ""}, alone=True)
spoil("not with its own all-reduce", {"self.all_reduce": "dist.all_reduce"})
spoil("gradients are held outside their buckets", {COLLECT: "if self.syncing:" + INDENT + COLLECT})
spoil("the mean does not reach .grad", {COLLECT: "bucket.views[p].copy_(p.grad)"})
spoil("synchronised at every micro-batch", {"    def start":
    "    @contextmanager\n    def no_sync(self):\n        yield\n        self.sync()\n\n    def start"})
