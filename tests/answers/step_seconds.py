"""Answers to step_seconds (07b): how long an offloaded step takes, on paper."""

from functools import cache

import torch

from labs.exercises.offload.step_seconds import MISTAKES
from labs.kit import exercises
from tests.answers import Exercise

# fmt: off
answers = Exercise("step_seconds")
answers.right(exercises.step_seconds, line="right on all 15 examples")


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


@answers.right(blind=True)
def ss_two_clocks(fetch, update, store):
    caller = thread = sum(fetch[:1])
    come = thread
    for i in range(len(update)):
        caller = max(caller, come)
        if i + 1 < len(fetch):
            thread = come = max(thread, caller) + fetch[i + 1]
        caller += update[i]
        thread = max(thread, caller) + store[i]
    return max(caller, thread)


@answers.right(blind=True)
def ss_longest_path(fetch, update, store):
    n = len(update)

    @cache
    def begins(i):
        if i == 0:
            return fetch[0]
        return max(begins(i - 1) + update[i - 1], begins(i - 1) + (store[i - 2] if i > 1 else 0) + fetch[i])

    if n == 0:
        return 0
    free = begins(n - 1) + (store[n - 2] if n > 1 else 0)
    return max(begins(n - 1) + update[n - 1], free) + store[n - 1]


@answers.right(blind=True)
def ss_tensor(fetch, update, store):
    if not update:
        return 0.0
    f, u, s = (torch.tensor(seconds, dtype=torch.float64) for seconds in (fetch, update, store))
    zero = torch.zeros(1, dtype=torch.float64)
    slots = torch.maximum(u, torch.cat([zero, s[:-1]]) + torch.cat([f[1:], zero]))
    return (f[0] + slots.sum() + s[-1]).item()


@answers.right
def by_recursion(fetch, update, store):
    def rest(n, going):
        if n == len(update):
            return going
        return max(update[n], going + sum(fetch[n + 1 : n + 2])) + rest(n + 1, store[n])

    return sum(fetch[:1]) + rest(0, 0)


# ---- wrong: a slot ---------------------------------------------------------------------------------------

slot = answers.slips(ss_padded, "max(u, s + f)")
slot("two threads, and not one", "max(u, s, f)", blind=True)
slot("", "min(u, s + f)", blind=True)
slot("", "max(u, s) + f")
slot("", "u")
slot("", "s + f")

BEFORE, AFTER = "before, after = [0, *store], [*fetch[1:], 0]", "before, after = {}, {}"


def beside(mistake, before, after, **options):
    """Otherwise aligned: what is stored and what is fetched beside each update."""
    answers.spoil(ss_padded, mistake, {BEFORE: AFTER.format(before, after)}, **options)


beside("", "store", "[*fetch[1:], 0]", blind=True)
beside("", "[0, *store]", "fetch", blind=True)
beside("", "store", "fetch", blind=True)
beside("a store before the first update", "[*store[-1:], *store]", "[*fetch[1:], 0]", blind=True)
beside("", "[0, *store[:-2], 0]", "[*fetch[1:], 0]", blind=True)

# ---- wrong: around the slots -----------------------------------------------------------------------------

RETURNED = "sum(fetch[:1]) + slots + sum(store[-1:])"


def instead(mistake, returned, **options):
    """With another last line."""
    answers.spoil(ss_padded, mistake, {f"return {RETURNED}": returned}, **options)


instead("the first fetch is left out", "return slots + sum(store[-1:])", blind=True)
instead("the last store is left out", "return sum(fetch[:1]) + slots", blind=True)
instead("one after the other", "return sum(fetch) + sum(update) + sum(store)", blind=True)
instead("all of it at the same time", "return max(sum(update), sum(fetch) + sum(store))", blind=True)
instead("", "return sum(fetch[:1]) + max(sum(update), sum(fetch[1:]) + sum(store[:-1])) + sum(store[-1:])", blind=True)
instead("nothing is returned", f"print({RETURNED})")
instead("a different kind of answer", "return [*fetch[:1], slots, *store[-1:]]")
instead("", f"return int({RETURNED})", blind=True)
instead("", f"return -(-({RETURNED}) // 10) * 10", long=True)
instead("", f"return {RETURNED} or None")
instead("", f"update.clear()\n    return {RETURNED}")
instead("", "return fetch[0] + slots + store[-1]", blind=True)
answers.spoil(ss_padded, "the caller stores, and not the thread",
    {"max(u, s + f)": "max(u, f)",
     "sum(store[-1:])": "sum(store)"}, blind=True)


@answers.wrong("", blind=True)
def ss_all_alike(fetch, update, store):
    return ss_padded(*(seconds[:1] * len(update) for seconds in (fetch, update, store)))


@answers.wrong()
def all_as_the_mean(fetch, update, store):
    count = len(update)
    return ss_padded(*([sum(each) / count] * count for each in (fetch, update, store))) if count else 0


@answers.wrong("", blind=True)
def ss_one_parameter(fetch, update, store):
    """Of one parameter its own fetch and store are counted beside its update, too."""
    if not update:
        return 0
    slots = [max(u, s + f) for u, s, f in zip(update[1:-1], store, fetch[2:], strict=False)]
    first = max(update[0], fetch[min(1, len(fetch) - 1)])
    return fetch[0] + first + sum(slots) + max(update[-1], store[max(len(store) - 2, 0)]) + store[-1]


answers.instead(MISTAKES)
