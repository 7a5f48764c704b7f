"""Answers on paper to notebook 03: which tensors travel together, and when their all-reduces start."""

from tests.answers import Exercise

# fmt: off
starts = Exercise("started_when")


# ---- started_when: right ---------------------------------------------------------------------------------

THREE = "right on all 3 examples"


@starts.right(line=THREE)
def started(tensors, buckets):
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)}


@starts.right
def when_dict(tensors, buckets):
    by_backward = {"Naive": 0, "Bucketed": 0, "Overlapped": buckets}
    in_all = {"Naive": tensors, "Bucketed": buckets, "Overlapped": buckets}
    return {way: (n, in_all[way] - n) for way, n in by_backward.items()}


# ---- started_when: wrong ---------------------------------------------------------------------------------

OVERLAPPED = "(buckets, 0)"

starts.spoil(started, "the columns are exchanged",
    {"return ": "rows = ",
     "}": "}\n    return {name: row[::-1] for name, row in rows.items()}"})
starts.spoil(started, "Overlapped is made to send twice", {OVERLAPPED: "(buckets, buckets)"})
