"""Answers to overlap(wrap): wrap(model, bucket_bytes, **options), a labs.ddp.Overlapped with hooks of its own."""

from contextlib import contextmanager  # noqa: F401 (a spoilt answer calls it)
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist  # noqa: F401 (spoilt answers call it)

from labs import ddp
from tests.answers import Exercise

# fmt: off
answers = Exercise("overlap")
LINE = "4 of 4 all-reduces begin during backward, and nobody waits there"
answers.right(ddp.Overlapped, line=LINE)


@answers.right(line=LINE, blind=True)
class InTurn(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()

    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@answers.right(line=LINE, blind=True)
class WhileFull(ddp.Overlapped):
    def gradient_ready(self, p):
        self.bucket_of[p].collect(p)
        if not self.syncing:
            return
        self.bucket_of[p].waiting_for.discard(p)
        while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting_for:
            flat = self.buckets[len(self.works)].flat
            self.works.append(self.all_reduce(flat, group=self.group, async_op=True))


@answers.right(line=LINE, blind=True, long=True)
class TakeWhile(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for = bucket.waiting_for - {p}
            if not bucket.waiting_for:
                self.start_full_buckets()

    def start_full_buckets(self):
        full = takewhile(lambda bucket: not bucket.waiting_for, self.buckets[len(self.works) :])
        self.works += [self.all_reduce(bucket.flat, group=self.group, async_op=True) for bucket in list(full)]


@answers.right(line=LINE, blind=True, long=True)
class OnlyOnItsTurn(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        if self.syncing and p not in bucket.waiting_for:
            raise RuntimeError("a second backward before sync()")
        if p.grad is not bucket.views[p]:
            bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if bucket is self.buckets[len(self.works)]:
                self.start_full_buckets()


@answers.right(line=LINE)
class DividedBeforehand(InTurn):
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            bucket.flat /= self.ranks
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))

    def average(self):
        for bucket in self.buckets:
            for p in list(bucket.waiting_for):
                self.gradient_ready(p)
        for bucket, work in zip(self.buckets, self.works, strict=True):
            work.wait()
            bucket.waiting_for = set(bucket.views)
        self.works = []


# ---- when a bucket begins -------------------------------------------------------------------------------------

spoil = partial(answers.spoil, InTurn)
blind = partial(spoil, blind=True)
COLLECT, ALL = "bucket.collect(p)", "for bucket in self.buckets[len(self.works) :]:"
READY, CROSS = "bucket.waiting_for.remove(p)\n            self.start_full_buckets()", "bucket.waiting_for.remove(p)"
IF, ASKS = "        if self.syncing:\n            ", "if self.syncing"
BEGIN = "self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))"
INDENT = "\n            "
ORDER, EARLY = "buckets begin in different orders on different ranks", "a bucket begins before it is full"
NEVER, WAITS = "a bucket's all-reduce never begins", "waited for during backward"
EACH = "not one all-reduce for each bucket"



@answers.wrong(ORDER, blind=True, alone=True)
class WhicheverIsFull(InTurn):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if not bucket.waiting_for:
                self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@answers.wrong(ORDER, alone=True, long=True)
class AsTheyFill(ddp.Overlapped):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes=bucket_bytes)
        self.begun = set()

    def start_full_buckets(self):
        for bucket in self.buckets:
            if not bucket.waiting_for and bucket not in self.begun:
                self.begun.add(bucket)
                self.works.append(self.all_reduce(bucket.flat, async_op=True))

    def average(self):
        for bucket in self.buckets:
            for p in list(bucket.waiting_for):
                self.gradient_ready(p)
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            bucket.flat /= self.ranks
            bucket.waiting_for = set(bucket.views)
        self.works, self.begun = [], set()


@answers.wrong("a full bucket lies idle", blind=True)
class OneAtATime(InTurn):
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))
            if any(bucket.waiting_for for bucket in self.buckets):
                return


blind("buckets begin in different orders on different ranks", {"return": "continue"}, alone=True)
blind(EARLY, {"if bucket.waiting_for:": "if len(bucket.waiting_for) > 1:"})
blind("", {COLLECT: "pass", READY: READY + "\n        bucket.collect(p)"})  # and then it collects
blind("", {IF + CROSS: "        bucket.waiting_for.discard(p)\n" + IF.rstrip()}, long=True)
blind("", {IF + CROSS: "        bucket.waiting_for.remove(p)\n" + IF.rstrip()}, long=True)
blind("", {IF + READY: "        bucket.waiting_for.remove(p)\n        self.start_full_buckets()"}, long=True)
blind("", {ASKS: "if not self.syncing"})
blind("a full bucket lies idle",
    {ALL: "if any(bucket.waiting_for for bucket in self.buckets):\n            return\n        " + ALL})
blind("a full bucket lies idle",
    {ALL: "for bucket, following in zip(self.buckets, [*self.buckets[1:], self.buckets[-1]], strict=True):" + INDENT
    + "if self.buckets.index(bucket) < len(self.works):" + INDENT + "    continue",
    "if bucket.waiting_for:": "if bucket.waiting_for or following.waiting_for:"}, long=True)
blind("more works than buckets", {ALL: "for bucket in self.buckets:"}, alone=True, long=True)
blind("", {ALL: "for bucket in self.buckets[::-1][len(self.works) :]:"}, alone=True, long=True)
blind(NEVER, {BEGIN: BEGIN + INDENT + "return"})
blind(NEVER, {"len(self.works) :]": "len(self.works) : -1]"}, long=True)
blind("a bucket's all-reduce never begins", {"    def start": "    begun = 0\n\n    def start",
    "len(self.works) :]": "self.begun :]", BEGIN: BEGIN + INDENT + "self.begun += 1"})
blind("more works than buckets", {ALL: "for bucket in list(self.buckets):", BEGIN: "self.buckets.pop(0)" + INDENT
    + BEGIN})
blind("a bucket's all-reduce never begins", {COLLECT: COLLECT + "\n        if not p.grad.any():\n            return"},
    alone=True, long=True)
blind("a bucket's all-reduce never begins", {ALL: ALL.replace(" in ", " in () if dist.get_rank(self.group) else ")},
    alone=True, long=True)


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


answers.spoil(WhicheverIsFull, NEVER,  # those that were full before their turn are forgotten
    {"if not bucket.waiting_for:":
         "if not bucket.waiting_for and self.buckets.index(bucket) == len(self.works):"}, blind=True, long=True)


@answers.wrong(EARLY)
class BeforeItIsFull(ddp.Overlapped):
    def start_full_buckets(self):
        if len(self.works) < len(self.buckets):
            self.works.append(self.all_reduce(self.buckets[len(self.works)].flat, async_op=True))


@answers.wrong("")
class OnlyOnce(ddp.Overlapped):
    """Its buckets wait for nothing in the second step."""

    def average(self):
        for bucket, work in zip(self.buckets, self.works, strict=True):
            work.wait()
            bucket.flat /= self.ranks
        self.works = []


# ---- who waits for it -----------------------------------------------------------------------------------------


class Works:
    def __init__(self, *works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


blind(WAITS, {BEGIN: BEGIN + INDENT + "self.works[-1].wait()"})
blind(WAITS, {BEGIN: "if self.works:" + INDENT + "    self.works[-1].wait()" + INDENT + BEGIN}, long=True)
blind(WAITS, {READY: READY + INDENT + "for work in self.works if len(self.works) == len(self.buckets) else ():"
    + INDENT + "    work.wait()"})
blind("waited for during backward", {BEGIN: "self.all_reduce(bucket.flat, group=self.group)" + INDENT
    + "self.works.append(Works())"})
blind("not one all-reduce for each bucket", {BEGIN: "dist.barrier(group=self.group)" + INDENT + BEGIN})
blind("too many bytes", {BEGIN: "self.all_reduce(torch.ones(()), group=self.group)" + INDENT + BEGIN}, long=True)


@answers.wrong("nobody waited")
class NobodyWaits(ddp.Overlapped):
    def average(self):
        for bucket in self.buckets:
            bucket.flat /= self.ranks
            bucket.waiting_for = set(bucket.views)
        self.works = []


# ---- what travels, and where it goes ----------------------------------------------------------------------------

blind("wrong in a group of only some ranks", {"group=self.group, ": ""}, alone=True)
blind("not with its own all-reduce", {"self.all_reduce": "dist.all_reduce"})
blind("averaged twice", {BEGIN: "bucket.flat /= self.ranks" + INDENT + BEGIN})
blind("the mean does not reach .grad", {"bucket.flat,": "bucket.flat.clone(),"}, long=True)
blind("gradients are held outside their buckets", {COLLECT: "if self.syncing:" + INDENT + COLLECT})
blind("the mean does not reach .grad", {COLLECT: "bucket.views[p].copy_(p.grad)"})
blind("", {COLLECT: "bucket.views[p].add_(p.grad)\n        p.grad = bucket.views[p]"})
blind("", {COLLECT: COLLECT + "\n        p.grad = None"}, long=True)
blind("", {COLLECT: "bucket.views[p].copy_(p.detach())\n        p.grad = bucket.views[p]"})
blind(EACH,
    {BEGIN: "halves = [self.all_reduce(x, group=self.group, async_op=True) for x in bucket.flat.tensor_split(2)]"
    + INDENT + "self.works.append(Works(*halves))"})
spoil("synchronised at every micro-batch", {"    def start":
    "    @contextmanager\n    def no_sync(self):\n        yield\n        self.sync()\n\n    def start"})


@answers.wrong("summed instead of averaged")
class NeverDivides(ddp.Overlapped):
    def average(self):
        super().average()
        for bucket in self.buckets:
            bucket.flat *= self.ranks


@answers.wrong("not one all-reduce for each bucket", blind=True, alone=True)
class OnePerGradient(InTurn):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            parts = self.__dict__.setdefault("parts", {})
            work = self.all_reduce(bucket.views[p], group=self.group, async_op=True)
            parts.setdefault(bucket, []).append(work)
            if not any(b.waiting_for for b in self.buckets):
                self.works = [Works(*parts.pop(b)) for b in self.buckets]
