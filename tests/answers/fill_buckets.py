"""Answers on paper to notebook 03: which tensors travel together, and when their all-reduces start."""

from itertools import accumulate

import numpy as np
import torch

from labs.exercises.ddp.fill_buckets import MISTAKES
from tests.answers import Exercise

# fmt: off
answers, starts = Exercise("fill_buckets"), Exercise("started_when")
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

answers.vary(fill, {NONE: "[], 0", FULL: "has <= 0", "has = 0": "has = bucket_bytes", "+=": "-="}, blind=True)
answers.vary(fill, {FULL: "not buckets or sum(nbytes[j] for j in buckets[-1]) >= bucket_bytes"}, blind=True)


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


@answers.right(blind=True)
def fill_while(nbytes, bucket_bytes):
    buckets, i = [], len(nbytes) - 1
    while i >= 0:
        bucket, size = [], 0
        while i >= 0 and size < bucket_bytes:
            bucket.append(i)
            size += nbytes[i]
            i -= 1
        buckets.append(bucket)
    return buckets


def cuts(nbytes, bucket_bytes):
    bucket, size = [], 0
    for place, n in zip(range(len(nbytes))[::-1], nbytes[::-1], strict=True):
        bucket, size = [*bucket, place], size + n
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@answers.right(blind=True)
def fill_generator(nbytes, bucket_bytes):
    return list(cuts(nbytes, bucket_bytes))


@answers.right(blind=True)
def fill_by_prefix_sums(nbytes, bucket_bytes):
    total, ends = [0, *accumulate(reversed(nbytes))], []
    begin, n = 0, len(nbytes)
    for end in range(1, n + 1):
        if total[end] - total[begin] >= bucket_bytes or end == n:
            ends.append((begin, end))
            begin = end
    return [[n - 1 - k for k in range(a, b)] for a, b in ends]


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


@answers.right(line=LINE)
def by_accumulate(nbytes, bucket_bytes):
    def add(state, i):
        number, has = state
        return (number + 1, nbytes[i]) if has >= bucket_bytes else (number, has + nbytes[i])

    order = list(reversed(range(len(nbytes))))
    numbers = [number for number, _ in accumulate(order, add, initial=(-1, bucket_bytes))][1:]
    return [[i for i, n in zip(order, numbers, strict=True) if n == k] for k in range(max(numbers, default=-1) + 1)]


# ---- fill_buckets: wrong ---------------------------------------------------------------------------------

MISSING = "a tensor is missing, or travels twice"
OPENED = "        if has >= bucket_bytes:\n            buckets.append([])\n            has = 0\n"
ADDED = "        has += nbytes[i]\n"

instead = answers.slips(fill)
instead("begun at the wrong end", {BACK: "for i in range(len(nbytes)):"}, blind=True)
instead("closed before it is full",
    {NONE: "[], 0",
     FULL: "not buckets or has + nbytes[i] > bucket_bytes"}, blind=True)
instead("closed one tensor too late", {NONE: f"{NONE} + 1", FULL: "has > bucket_bytes"}, blind=True)
instead("an empty bucket", {NONE: "[[]], 0"}, blind=True)
instead("an empty bucket", {NONE: "[[]], 0", OPENED: "", ADDED: ADDED + OPENED}, blind=True)
answers.spoil(current, MISSING, {"return [*buckets, current] if current else buckets": ALL}, blind=True)
answers.spoil(current, MISSING, {"if current else": "if size else"}, blind=True)
instead(MISSING, {TAKEN: "append(list(nbytes).index(nbytes[i]))"}, blind=True)
instead(MISSING, {ALL: "return [[i for i in bucket if i] for bucket in buckets if bucket != [0]]"}, long=True)
instead("nothing is returned", {ALL: "pass"})
instead("a different kind of answer", {ALL: "return len(buckets)"})
instead("", {ALL: "return [sorted(bucket) for bucket in buckets]"}, blind=True)
instead("", {"has = 0": "has -= bucket_bytes"}, blind=True)
instead("", {BACK: "while nbytes:\n        n, i = nbytes.pop(), len(nbytes)", "nbytes[i]": "n"}, blind=True)
instead("", {TAKEN: "append(len(nbytes) - 1 - i)"}, blind=True)
instead("", {ALL: "return [sum(buckets, [])] if nbytes and sum(nbytes) <= 2 * bucket_bytes else buckets"}, blind=True)
instead("", {TAKEN: "append(nbytes[i])"})
instead("",
    {"(nbytes, bucket_bytes):": "(nbytes, bucket_bytes, buckets=[]):",
     f"buckets, has = {NONE}": "has = bucket_bytes"})
instead("", {TAKEN: "extend([i] if nbytes[i] else [])"})
LARGE = "if n >= bucket_bytes and current:\n            buckets.append(current)\n            current, size = [], 0\n"
answers.spoil(current, "", {"current.append(i)": f"{LARGE}        current.append(i)"}, blind=True)


@answers.wrong(blind=True)
def fill_by_running_total(nbytes, bucket_bytes):
    buckets, offset = {}, 0
    for i in reversed(range(len(nbytes))):
        buckets.setdefault(offset // bucket_bytes, []).append(i)
        offset += nbytes[i]
    return list(buckets.values())


@answers.wrong(blind=True)
def fill_recursive(nbytes, bucket_bytes):
    """Python stops at a depth of a thousand."""

    def rest(i, bucket, size):
        if i < 0:
            return [bucket] if bucket else []
        bucket, size = [*bucket, i], size + nbytes[i]
        return [bucket, *rest(i - 1, [], 0)] if size >= bucket_bytes else rest(i - 1, bucket, size)

    return rest(len(nbytes) - 1, [], 0)


@answers.wrong(blind=True)
def fill_evenly(nbytes, bucket_bytes):
    places = list(reversed(range(len(nbytes))))
    count = max(1, -(-sum(nbytes) // bucket_bytes))
    each = max(1, -(-len(places) // count))
    return [places[i : i + each] for i in range(0, len(places), each)]


# ---- started_when: right ---------------------------------------------------------------------------------

THREE = "right on all 3 examples"


@starts.right(line=THREE, blind=True)
def started(tensors, buckets):
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)}


@starts.right(blind=True)
def when_dict(tensors, buckets):
    by_backward = {"Naive": 0, "Bucketed": 0, "Overlapped": buckets}
    in_all = {"Naive": tensors, "Bucketed": buckets, "Overlapped": buckets}
    return {way: (n, in_all[way] - n) for way, n in by_backward.items()}


@starts.right(blind=True)
def when_zip(tensors, buckets):
    ways = ("Naive", "Bucketed", "Overlapped")
    return dict(zip(ways, zip((0, 0, buckets), (tensors, buckets, 0), strict=True), strict=True))


@starts.right(blind=True)
def when_step_by_step(tensors, buckets):
    answer = {}
    for way in ("Overlapped", "Bucketed", "Naive"):
        count = tensors if way == "Naive" else buckets
        answer[way] = (count, 0) if way == "Overlapped" else (0, count)
    return answer


starts.vary(started,
    {"(0, tensors)": "torch.tensor([0, tensors])",
     "(0, buckets)": "np.array([0, buckets])",
     "(buckets, 0)": "[float(buckets), 0.0]"}, line=THREE)

# ---- started_when: wrong ---------------------------------------------------------------------------------

NAIVE, BUCKETED, OVERLAPPED = "(0, tensors)", "(0, buckets)", "(buckets, 0)"

starts.spoil(started, "the columns are exchanged",
    {"return ": "rows = ",
     "}": "}\n    return {name: row[::-1] for name, row in rows.items()}"}, blind=True)
starts.spoil(started, "Overlapped is made to send twice", {OVERLAPPED: "(buckets, buckets)"}, blind=True)
starts.spoil(started, "", {NAIVE: "(tensors, 0)"}, blind=True)
starts.spoil(started, "", {NAIVE: "(0, 39)", BUCKETED: "(0, 6)", OVERLAPPED: "(6, 0)"}, blind=True)
starts.spoil(started, "", {"(tensors, buckets)": "(buckets, tensors)"}, blind=True)
starts.spoil(started, "", {BUCKETED: "(buckets, 0)"}, blind=True)
starts.spoil(started, "", {BUCKETED: "(0, 1)"}, blind=True)
starts.spoil(started, "", {BUCKETED: "(0, tensors)"}, blind=True)
starts.spoil(started, "", {OVERLAPPED: "(tensors, 0)"}, blind=True)
starts.spoil(started, "", {OVERLAPPED: "(buckets - 1, 1)"}, blind=True)
starts.spoil(started, "", {NAIVE: "tensors", BUCKETED: "buckets", OVERLAPPED: "buckets"})

answers.instead(MISTAKES)
