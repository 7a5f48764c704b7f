"""Answers to step_seconds (07b): how long an offloaded step takes, on paper."""

from labs.exercises.offload.step_seconds import MISTAKES
from labs.kit import check
from tests.answers import Exercise

# fmt: off
answers = Exercise("step_seconds")
answers.right(check.step_seconds.expected, line="right on all 15 examples")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(blind=True)
def ss_padded(fetch, update, store):
    before, after = [0, *store], [*fetch[1:], 0]
    slots = sum(max(u, s + f) for u, s, f in zip(update, before, after, strict=False))
    return sum(fetch[:1]) + slots + sum(store[-1:])


@answers.right(blind=True)
def ss_slots(fetch, update, store):
    n = len(update)
    if n == 0:
        return 0.0
    total = fetch[0]
    for i in range(n):
        beside = (store[i - 1] if i > 0 else 0) + (fetch[i + 1] if i + 1 < n else 0)
        total += max(update[i], beside)
    return total + store[-1]


# ---- wrong: a slot ---------------------------------------------------------------------------------------

slot = answers.slips(ss_padded, "max(u, s + f)")
slot("two threads, and not one", "max(u, s, f)", blind=True)
slot("", "min(u, s + f)", blind=True)

BEFORE, AFTER = "before, after = [0, *store], [*fetch[1:], 0]", "before, after = {}, {}"


def beside(mistake, before, after, **options):
    """Otherwise aligned: what is stored and what is fetched beside each update."""
    answers.spoil(ss_padded, mistake, {BEFORE: AFTER.format(before, after)}, **options)
beside("a store before the first update", "[*store[-1:], *store]", "[*fetch[1:], 0]", blind=True)

# ---- wrong: around the slots -----------------------------------------------------------------------------

RETURNED = "sum(fetch[:1]) + slots + sum(store[-1:])"


def instead(mistake, returned, **options):
    """Note a wrong answer that has another last line."""
    answers.spoil(ss_padded, mistake, {f"return {RETURNED}": returned}, **options)


instead("the first fetch is left out", "return slots + sum(store[-1:])", blind=True)
instead("the last store is left out", "return sum(fetch[:1]) + slots", blind=True)
instead("one after the other", "return sum(fetch) + sum(update) + sum(store)", blind=True)
instead("all of it at the same time", "return max(sum(update), sum(fetch) + sum(store))", blind=True)
answers.spoil(ss_padded, "the caller stores, and not the thread",
    {"max(u, s + f)": "max(u, f)",
     "sum(store[-1:])": "sum(store)"}, blind=True)


answers.instead(MISTAKES)
