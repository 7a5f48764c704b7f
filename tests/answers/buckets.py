"""Answers to buckets(wrap): wrap(model, **options), a labs.ddp.DataParallel with an average() of its own."""

from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist  # noqa: F401 (spoilt answers call it)

from labs import ddp
from tests.answers import Exercise

# fmt: off
BUCKET = 128 * 1024
answers = Exercise("buckets")
LINE = "you sent 1.50 × the gradients per rank and step; the least possible is 1.50 ×"
answers.right(partial(ddp.Bucketed, bucket_bytes=BUCKET), line=LINE)


@answers.right(line=LINE, blind=True)
class Buckets(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
                p.grad.copy_(mean)


@answers.right(line=LINE, blind=True)
class OneBuffer(ddp.DataParallel):
    def average(self):
        buckets = ddp.in_buckets(self.trainable.values(), BUCKET)
        room = torch.empty(max(map(ddp.nbytes, buckets)), dtype=torch.uint8)
        for bucket in buckets:
            flat = room[: ddp.nbytes(bucket)].view(bucket[0].dtype)
            views = ddp.unflatten(flat, bucket)
            for view, p in zip(views, bucket, strict=True):
                view.copy_(p.grad)
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for view, p in zip(views, bucket, strict=True):
                p.grad.copy_(view)


@answers.right(line=LINE, blind=True, long=True)
class Slices(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(list(self.trainable.values()), bucket_bytes=BUCKET):
            ends = [0, *accumulate(p.numel() for p in bucket)]
            where = {p: slice(a, b) for p, a, b in zip(bucket, ends, ends[1:], strict=False)}
            flat = torch.zeros(ends[-1], dtype=bucket[0].dtype)
            for p, part in where.items():
                flat[part] = p.grad.flatten()
            self.all_reduce(flat, group=self.group)
            for p, part in where.items():
                p.grad[...] = (flat[part] / self.ranks).view(p.shape)


@answers.right(line=LINE, blind=True)
class AllCopiedAtTheEnd(ddp.DataParallel):
    def average(self):
        every, means = [], []
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            every += [p.grad for p in bucket]
            means += ddp.unflatten(flat.div_(self.ranks), bucket)
        torch._foreach_copy_(every, means)


CAT, DIVIDE = "torch.cat([p.grad.flatten() for p in bucket])", "flat /= self.ranks"
REDUCE = "self.all_reduce(flat, group=self.group)"
CUT, ALL, BACK = "ddp.in_buckets(self.trainable.values(), BUCKET)", "for bucket in", "p.grad.copy_(mean)"
INDENT = "\n            "
also_right = partial(answers.vary, Buckets, line=LINE, blind=True, long=True)
also_right({DIVIDE: "pass", CAT: CAT + ".div_(self.ranks)"})
also_right({CAT: "torch._utils._flatten_dense_tensors([p.grad for p in bucket])"})
also_right({CAT: "bucket[0].grad.new_empty(sum(p.numel() for p in bucket))" + INDENT
    + "torch.cat([p.grad.reshape(-1) for p in bucket], out=flat)", DIVIDE: "pass", BACK: BACK + ".div_(self.ranks)"})

# ---- which numbers ------------------------------------------------------------------------------------------

spoil = partial(answers.spoil, Buckets)
blind = partial(spoil, blind=True)

blind("summed instead of averaged", {DIVIDE: "pass"})
spoil("summed instead of averaged", {DIVIDE: "pass", BACK: BACK + INDENT + "flat /= self.ranks"}, long=True)
blind("averaged twice", {CAT: CAT + " / self.ranks"})
blind("averaged twice", {DIVIDE: "flat /= len(bucket)"})
blind("the mean does not reach .grad", {BACK: "pass"})
blind("the parameters have changed", {BACK: "p.data.copy_(mean)"})
blind("rounded on the way", {CAT: CAT + ".float()"})
blind("too many bytes", {CAT: CAT + ".double()"})
blind("rounded on the way", {CAT: CAT + ".bfloat16()"}, long=True)
blind("rounded on the way", {CAT: "torch.empty(sum(p.numel() for p in bucket))" + INDENT
    + "for view, p in zip(ddp.unflatten(flat, bucket), bucket, strict=True):" + INDENT + "    view.copy_(p.grad)"},
    long=True)
blind("", {"zip(bucket, ddp.unflatten(flat, bucket)": "zip(bucket[::-1], ddp.unflatten(flat, bucket[::-1])"}, long=True)
blind("", {"p.grad.flatten()": "(p.grad.mT if p.ndim > 1 else p.grad).flatten()"})
blind("",
    {"zip(bucket, ddp.unflatten(flat, bucket)": "zip(bucket, flat.split([p.shape[0] * p[0].numel() for p in bucket])",
    BACK: "p.grad.copy_(mean.view(p.shape))"})  # fails without dimensions
spoil("some parameters are left out", {"ddp.unflatten(flat, bucket)": "flat.split([p.numel() for p in bucket])",
    BACK: "p.grad.reshape(-1).copy_(mean)"})
blind("nothing synchronised", {CUT: CUT + "[:-1]"})
blind("some parameters are left out", {BACK: BACK + INDENT + "return"}, long=True)
blind("", {CUT: "ddp.in_buckets(self.module.parameters(), BUCKET)"}, long=True)
blind("nothing synchronised", {ALL: "for bucket in () if not self.training else"})
blind("", {ALL: "parameters = []\n        while self.trainable:\n        "
    "    parameters.insert(0, self.trainable.popitem()[1])\n        for bucket in",
    "self.trainable.values()": "parameters"})


@answers.wrong("summed instead of averaged", blind=True)
class UndividedAlone(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            flat = bucket[0].grad if len(bucket) == 1 else torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            if len(bucket) > 1:
                flat /= self.ranks
                for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
                    p.grad.copy_(mean)


@answers.wrong("the mean does not reach .grad", blind=True)
class StaleGradients(ddp.DataParallel):
    def average(self):
        if not hasattr(self, "held"):
            buckets = ddp.in_buckets(self.trainable.values(), BUCKET)
            self.held = [[p.grad for p in bucket] for bucket in buckets]
        for grads in self.held:
            flat = torch.cat([g.flatten() for g in grads])
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for g, mean in zip(grads, ddp.unflatten(flat, grads), strict=True):
                g.copy_(mean)


@answers.wrong("the mean does not reach .grad", blind=True, alone=True, long=True)
class SharedCache(ddp.DataParallel):
    """A second wrapper averages the first one's parameters."""

    cache = []  # noqa: RUF012

    def average(self):
        self.cache[:] = self.cache or ddp.in_buckets(self.trainable.values(), BUCKET)
        for bucket in self.cache:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
                p.grad.copy_(mean)


def regardless_of_dtype(parameters):
    buckets, room = [[]], BUCKET
    for p in parameters[::-1]:
        buckets[-1].append(p)
        room -= p.nbytes
        if room <= 0:
            buckets, room = [*buckets, []], BUCKET
    return [bucket for bucket in buckets if bucket]


# ---- what travels, among whom -------------------------------------------------------------------------------

GROUP, EACH = "wrong in a group of only some ranks", "not one all-reduce for each bucket"
blind("wrong in a group of only some ranks", {REDUCE: "dist.all_reduce(flat)"}, alone=True, long=True)
blind(GROUP, {REDUCE: "self.all_reduce(flat)"}, alone=True, long=True)
blind(GROUP, {DIVIDE: "flat /= dist.get_world_size()"})
blind("not with its own all-reduce", {REDUCE: "dist.all_reduce(flat, group=self.group)"})
blind("not in place", {BACK: "p.grad = mean"})
blind("not in place", {BACK: "p.grad = mean.clone()"}, long=True)
blind(EACH, {CUT: "([p] for bucket in " + CUT + " for p in bucket)"})
blind(EACH, {CUT: "ddp.in_buckets(self.trainable.values(), 2**60)"})
blind("not one all-reduce for each bucket", {CUT: "ddp.in_buckets(self.trainable.values(), BUCKET // 4)"}, long=True)
blind("too many bytes", {CUT: "regardless_of_dtype(list(self.trainable.values()))"})
blind("too many bytes", {CAT: CAT + INDENT + "size = len(flat)" + INDENT
    + "flat = torch.cat([flat, flat.new_zeros(max(0, BUCKET // flat.element_size() - size))])",
    "unflatten(flat": "unflatten(flat[:size]"}, long=True)
blind("too many bytes", {CAT: CAT + INDENT + "flat = torch.cat([flat, flat.new_ones(1)])",
    DIVIDE: "flat = flat[:-1] / flat[-1]"})
blind("too many bytes", {REDUCE: "parts = [torch.empty_like(flat) for _ in range(self.ranks)]" + INDENT
    + "dist.all_gather(parts, flat, group=self.group)", DIVIDE: "flat = torch.stack(parts).mean(0)"}, long=True)
blind("the ranks make different calls", {REDUCE: "if not flat.any():" + INDENT + "    continue" + INDENT + REDUCE},
    alone=True)
spoil("synchronised at every micro-batch",
    {"def average": "def sync(self):\n        self.average()\n\n    def average"})
spoil("full copies are kept",
    {ALL: "self.history = [[p.grad.clone() for p in self.trainable.values()] for _ in range(4)]\n        "
    + ALL})
