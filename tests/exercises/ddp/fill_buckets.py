"""Answers on paper to notebook 03: which tensors travel together, and when their all-reduces start."""

import numpy as np
import torch

from labs.exercises.ddp.fill_buckets import MISTAKES
from tests.answers import Exercise

# fmt: off
answers = Exercise("fill_buckets")
LINE = "right on all 14 examples"

# ---- fill_buckets: right ---------------------------------------------------------------------------------


@answers.right(line=LINE)
def fill(nbytes, bucket_bytes):
    buckets, has = [], bucket_bytes
    for i in reversed(range(len(nbytes))):
        if has >= bucket_bytes:
            buckets.append([])
            has = 0
        buckets[-1].append(i)
        has += nbytes[i]
    return buckets


BACK = "for i in reversed(range(len(nbytes))):"
NONE, FULL, TAKEN, ALL = "[], bucket_bytes", "has >= bucket_bytes", "append(i)", "return buckets"


@answers.right(blind=True)
def current(nbytes, bucket_bytes):
    buckets, current, size = [], [], 0
    for i, n in reversed(list(enumerate(nbytes))):
        current.append(i)
        size += n
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], 0
    return [*buckets, current] if current else buckets


@answers.right(line=LINE)
def by_recursion(nbytes, bucket_bytes):
    def rest(end):
        if end == 0:
            return ()
        start = end - 1
        while start > 0 and sum(nbytes[start:end]) < bucket_bytes:
            start -= 1
        return (tuple(range(end - 1, start - 1, -1)), *rest(start))

    return rest(len(nbytes))


@answers.right(line=LINE)
def by_numpy(nbytes, bucket_bytes):
    places, buckets = np.arange(len(nbytes))[::-1], []
    while len(places):
        full = np.cumsum(np.array(nbytes)[places]) >= bucket_bytes
        count = int(full.argmax()) + 1 if full.any() else len(places)
        buckets.append(torch.from_numpy(places[:count].copy()))
        places = places[count:]
    return buckets


# ---- fill_buckets: wrong ---------------------------------------------------------------------------------

MISSING = "a tensor is missing, or travels twice"

instead = answers.slips(fill)
instead("begun at the wrong end", {BACK: "for i in range(len(nbytes)):"}, blind=True)
instead("closed before it is full",
    {NONE: "[], 0",
     FULL: "not buckets or has + nbytes[i] > bucket_bytes"}, blind=True)
instead("closed one tensor too late", {NONE: f"{NONE} + 1", FULL: "has > bucket_bytes"}, blind=True)
instead("an empty bucket", {NONE: "[[]], 0"}, blind=True)
answers.spoil(current, MISSING, {"return [*buckets, current] if current else buckets": ALL}, blind=True)
instead("", {ALL: "return [sorted(bucket) for bucket in buckets]"}, blind=True)


# ---- started_when: wrong ---------------------------------------------------------------------------------


answers.instead(MISTAKES)
