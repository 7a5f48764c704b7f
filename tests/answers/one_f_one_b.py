"""Answers to `one_f_one_b` of notebook 10."""

from collections import deque

import torch

from labs import pp
from labs.pp import B, F
from tests.answers import Exercise

answers = Exercise("one_f_one_b")

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(line="4 ranks, 8 micro-batches: bubble 37.5%, activations alive at most 4 3 2 1; run for ", blind=True)
def one_f_one_b(ranks, microbatches):
    lists, every = [], range(microbatches)
    for r in range(ranks):
        warm = min(microbatches, ranks - 1 - r)
        order = [F(r, m) for m in range(warm)]
        for m in range(microbatches - warm):
            order += [F(r, warm + m), B(r, m)]
        order += [B(r, m) for m in every[microbatches - warm :]]
        lists.append(order)
    return lists


@answers.right(blind=True)
def backward_first(ranks, microbatches):
    lists = []
    for r in range(ranks):
        first = min(microbatches, ranks - r)
        order = [F(r, m) for m in range(first)]
        for m in range(microbatches):
            order.append(B(r, m))
            if first + m < microbatches:
                order.append(F(r, first + m))
        lists.append(order)
    return lists


@answers.right(blind=True)
def by_sorting(ranks, microbatches):
    lists, every = [], range(microbatches)
    for r in range(ranks):
        key = {F(r, m): m - (ranks - 1 - r) - 0.5 for m in every} | {B(r, m): m for m in every}
        lists.append(sorted(key, key=key.get))
    return lists


@answers.right(blind=True, long=True)
def by_limit(ranks, microbatches):
    """A forward, whenever fewer are alive than may be."""
    lists = []
    for r in range(ranks):
        todo, back, order = deque(range(microbatches)), deque(), []
        while todo or back:
            if todo and len(back) < ranks - r:
                back.append(todo.popleft())
                order.append(F(r, back[-1]))
            else:
                order.append(B(r, back.popleft()))
        lists.append(order)
    return lists


@answers.right(blind=True, long=True)
def clockwork(ranks, microbatches):
    """All ranks step by step: a backward where one is ready, and else a forward, if there is room."""
    lists, done, now = [[] for _ in range(ranks)], {}, 0
    nf, nb, free = [0] * ranks, [0] * ranks, [0] * ranks
    while min(nb) < microbatches:
        for r in range(ranks):
            if free[r] > now:
                continue
            f, b = F(r, nf[r]), B(r, nb[r])
            given = r == 0 or done.get(F(r - 1, nf[r]), 1e9) <= now
            if nb[r] < nf[r] and done.get(B(r + 1, nb[r]) if r < ranks - 1 else F(r, nb[r]), 1e9) <= now:
                lists[r].append(b)
                nb[r] += 1
                free[r] = done[b] = now + 2
            elif nf[r] < microbatches and nf[r] - nb[r] < ranks - r and given:
                lists[r].append(f)
                nf[r] += 1
                free[r] = done[f] = now + 1
        now += 1
    return lists


@answers.right(blind=True, long=True)
def recursive(ranks, microbatches):
    def go(r, f, b):
        if b == microbatches:
            return []
        if f < microbatches and f - b < ranks - r:
            return [F(r, f), *go(r, f + 1, b)]
        return [B(r, b), *go(r, f, b + 1)]

    return [go(r, 0, 0) for r in range(ranks)]


@answers.right
def in_tensors(ranks, microbatches):
    numbers = torch.arange(max(ranks, microbatches))
    lists = pp.one_f_one_b(ranks, microbatches)
    return [[type(x)(numbers[x.stage], numbers[x.microbatch]) for x in order] for order in lists]


# ---- the warm-up -----------------------------------------------------------------------------------------


def warmed(mistake, warm, **options):
    """A right answer with another warm-up; of no fewer forwards than none, no more than there are."""
    changes = {"min(microbatches, ranks - 1 - r)": f"max(0, min(microbatches, {warm}))"}
    answers.spoil(one_f_one_b, mistake, changes, blind=True, **options)


ALIVE, FEW = "too many activations alive", "right only with no fewer micro-batches than ranks"
LONG = "the warm-up is longer than there are micro-batches"
warmed(ALIVE, "ranks - r")
warmed(ALIVE, "2 * (ranks - 1 - r)", long=True)
warmed(ALIVE, "max(1, ranks - 1 - r)")
warmed(ALIVE, "ranks - 1 - r + (0 < r < ranks - 1)", long=True)
warmed("the bubble is too large", "ranks - r - 2")
warmed("the same warm-up on every rank", "ranks - 1")
warmed("the ranks wait in a circle", "r")
warmed("all forwards first", "3 - r")
warmed("all forwards first", "microbatches")
warmed("one micro-batch at a time", "0")
warmed(FEW, "microbatches if microbatches < ranks else ranks - 1 - r")
warmed(FEW, "0 if microbatches < ranks else ranks - 1 - r", long=True)
ALL = "min(microbatches, ranks - 1 - r)"
spoil = answers.slips(one_f_one_b)
spoil(LONG, ALL, "ranks - 1 - r")
spoil(LONG, {ALL: "ranks - 1 - r", "range(warm)": "every[:warm]"}, blind=True)
REFUSES = 'if microbatches < ranks:\n        raise ValueError("too few micro-batches")\n    lists, every ='
spoil(LONG, "lists, every =", REFUSES, blind=True)


@answers.wrong(LONG, blind=True)
def no_such_micro_batch(ranks, microbatches):
    """An IndexError."""
    lists = []
    for r in range(ranks):
        f, b = [F(r, m) for m in range(microbatches)], [B(r, m) for m in range(microbatches)]
        order = [f[m] for m in range(ranks - 1 - r)]
        for m in range(ranks - 1 - r, microbatches):
            order += [f[m], b[m - (ranks - 1 - r)]]
        lists.append(order + b[microbatches - (ranks - 1 - r) :])
    return lists


# ---- the turns, and what is left -------------------------------------------------------------------------

LEFT, TURNS = "every[microbatches - warm :]", "[F(r, warm + m), B(r, m)]"
spoil("the micro-batches are in another order", LEFT, f"{LEFT}[::-1]", blind=True)
spoil("a backward is missing", LEFT, "()", blind=True)
spoil("a backward before its forward", TURNS, "[B(r, m), F(r, warm + m)]", blind=True)
spoil(
    "a micro-batch that does not exist",
    {"min(microbatches, ranks - 1 - r)": "ranks - 1 - r", "range(microbatches - warm)": "every", LEFT: "()"},
    blind=True,
)
spoil("the same work twice", {"range(microbatches - warm)": "every", "F(r, warm + m)": "F(r, m)", LEFT: "()"})


@answers.wrong(ALIVE, blind=True)
def turns_for_as_many_as_ranks(ranks, microbatches):
    """Then all forwards, all backwards."""
    lists = []
    for r, o in enumerate(one_f_one_b(ranks, microbatches)):
        cut = min(microbatches, ranks - 1 - r) + 2 * ranks
        lists.append(o[:cut] + [x for x in o[cut:] if isinstance(x, F)] + [x for x in o[cut:] if isinstance(x, B)])
    return lists


@answers.wrong(ALIVE, blind=True, long=True)
def two_and_two(ranks, microbatches):
    """Two forwards, two backwards."""
    lists = []
    for r in range(ranks):
        warm = min(microbatches, ranks - 1 - r)
        order, f, b = [F(r, m) for m in range(warm)], warm, 0
        while b < microbatches:
            n = min(2, microbatches - f)
            order += [F(r, f + i) for i in range(n)]
            f += n
            k = n or microbatches - b
            order += [B(r, b + i) for i in range(k)]
            b += k
        lists.append(order)
    return lists


@answers.wrong("the bubble is too large", blind=True)
def drained_after_each_group(ranks, microbatches):
    lists = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        for r, o in enumerate(one_f_one_b(ranks, min(ranks, microbatches - first))):
            lists[r] += [type(x)(r, first + x.microbatch) for x in o]
    return lists


@answers.wrong("the ranks wait in a circle")
def gradients_asked_for_too_early(ranks, microbatches):
    """The first rank waits for micro-batch 0's gradient before its second forward, the others need both."""
    lists = one_f_one_b(ranks, microbatches)
    if ranks < 2 or microbatches < 2:
        return lists
    first = [F(0, 0), B(0, 0), *(x for x in lists[0][1:] if x != B(0, 0))]
    second = [F(1, 0), F(1, 1), *(x for x in lists[1] if not isinstance(x, F) or x.microbatch > 1)]
    return [first, second[:-2] + second[:-3:-1], *lists[2:]]


# ---- which, and of whom ----------------------------------------------------------------------------------


@answers.wrong("a micro-batch that does not exist", blind=True)
def from_one_on_the_last_rank(ranks, microbatches):
    """Its forwards alone."""
    lists = one_f_one_b(ranks, microbatches)
    lists[-1] = [F(x.stage, x.microbatch + 1) if isinstance(x, F) else x for x in lists[-1]]
    return lists


@answers.wrong("a forward is missing", blind=True)
def those_beyond_a_multiple_are_lost(ranks, microbatches):
    return one_f_one_b(ranks, max(microbatches // ranks, 1) * ranks)


spoil("one list for all ranks", "return lists", "return lists[0]", blind=True)
STAGE_0 = "return [[type(x)(0, x.microbatch) for x in order] for order in lists]"
spoil("a stage on another rank", "return lists", STAGE_0)
answers.wrong("the backward is split")(pp.zb1p)
