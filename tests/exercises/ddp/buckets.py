"""Answers to buckets(wrap): wrap(model, **options), a labs.ddp.DataParallel with an average() of its own."""

from functools import partial

import torch
import torch.distributed as dist  # noqa: F401 (spoilt answers call it)

from labs import ddp
from tests.answers import Exercise

# fmt: off
BUCKET = 128 * 1024
answers = Exercise("buckets")
LINE = "you sent 1.50 × the gradients per rank and step; the least possible is 1.50 ×"
answers.right(partial(ddp.Bucketed, bucket_bytes=BUCKET), line=LINE)


@answers.right(line=LINE)
class Buckets(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
                p.grad.copy_(mean)


DIVIDE = "flat /= self.ranks"
REDUCE = "self.all_reduce(flat, group=self.group)"
CUT, BACK = "ddp.in_buckets(self.trainable.values(), BUCKET)", "p.grad.copy_(mean)"

# ---- which numbers ------------------------------------------------------------------------------------------

spoil = partial(answers.spoil, Buckets)
spoil("the mean does not reach .grad", {BACK: "pass"})
spoil("some parameters are left out", {"ddp.unflatten(flat, bucket)": "flat.split([p.numel() for p in bucket])",
    BACK: "p.grad.reshape(-1).copy_(mean)"})


# ---- what travels, among whom -------------------------------------------------------------------------------

GROUP, EACH = "wrong in a group of only some ranks", "not one all-reduce for each bucket"
spoil(GROUP, {DIVIDE: "flat /= dist.get_world_size()"})
spoil("not with its own all-reduce", {REDUCE: "dist.all_reduce(flat, group=self.group)"})
spoil(EACH, {CUT: "([p] for bucket in " + CUT + " for p in bucket)"})
