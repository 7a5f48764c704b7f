"""Answers on paper to notebook 03: which tensors travel together, and when their all-reduces start."""

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


NONE, ALL = "[], bucket_bytes", "return buckets"


@answers.right
def current(nbytes, bucket_bytes):
    buckets, current, size = [], [], 0
    for i, n in reversed(list(enumerate(nbytes))):
        current.append(i)
        size += n
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], 0
    return [*buckets, current] if current else buckets


# ---- fill_buckets: wrong ---------------------------------------------------------------------------------

MISSING = "a tensor is missing, or travels twice"

instead = answers.slips(fill)
instead("an empty bucket", {NONE: "[[]], 0"})
answers.spoil(current, MISSING, {"return [*buckets, current] if current else buckets": ALL})


# ---- started_when: wrong ---------------------------------------------------------------------------------


answers.instead(MISTAKES)
