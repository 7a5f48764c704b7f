"""Answers to `gpipe` of notebook 10."""

from collections import deque
from itertools import product

import numpy as np

from labs import pp
from labs.pp import B, F, I, W  # noqa: F401  (I and W in spoiled ones)
from tests.answers import Exercise

# fmt: off
answers = Exercise("gpipe")
BOTH = "[F(r, m) for m in every] + [B(r, m) for m in every]"

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(
    line="4 ranks, 8 micro-batches: bubble 37.5%, activations alive at most 8 8 8 8; run for real, the ", blind=True
)
def gpipe(ranks, microbatches):
    every = range(microbatches)
    lists = [[F(r, m) for m in every] + [B(r, m) for m in every] for r in range(ranks)]
    return lists


@answers.right(blind=True)
def rank_by_rank_within_a_micro_batch(ranks, microbatches):
    lists = [[] for _ in range(ranks)]
    for kind in (F, B):
        for m in range(microbatches):
            for r in range(ranks):
                lists[r].append(kind(r, m))
    return lists


@answers.right(blind=True, long=True)
def by_index(ranks, microbatches):
    n = microbatches
    return [[(F if i < n else B)(r, i % n) for i in range(2 * n)] for r in range(ranks)]


@answers.right(blind=True, long=True)
def by_product(ranks, microbatches):
    return [[k(r, m) for k, m in product((F, B), range(microbatches))] for r in range(ranks)]


@answers.right(blind=True, long=True)
def sorted_at_the_end(ranks, microbatches):
    every = [k(r, m) for r in range(ranks) for m in reversed(range(microbatches)) for k in (B, F)]
    lists = [[x for x in every if x.stage == r] for r in range(ranks)]
    return [sorted(order, key=lambda x: (isinstance(x, B), x.microbatch)) for order in lists]


@answers.right(blind=True, long=True)
def recursive(ranks, microbatches):
    if ranks == 0:
        return []
    every = range(microbatches)
    last = [*map(lambda m: F(ranks - 1, m), every), *map(lambda m: B(ranks - 1, m), every)]
    return [*recursive(ranks - 1, microbatches), last]


@answers.right
def by_a_generator(ranks, microbatches):
    for rank in range(ranks):
        yield (kind(rank, m) for kind in (F, B) for m in range(microbatches))


@answers.right
def in_arrays(ranks, microbatches):
    every = np.arange(microbatches)
    return tuple(deque([F(r, m) for m in every] + [B(r, m) for m in every]) for r in np.arange(ranks))


@answers.right
def from_text(ranks, microbatches):
    return [[pp.read(f"{rank}{kind}{m}") for kind in "FB" for m in range(microbatches)] for rank in range(ranks)]


# ---- what is returned ------------------------------------------------------------------------------------

returned = answers.slips(gpipe, "return lists")
returned("nothing is returned", "return None", blind=True)
returned("one list for all ranks", "return [x for order in lists for x in order]", blind=True)
returned("not a list for each rank", "return dict(enumerate(lists))", blind=True)
returned("not a list for each rank", "return [*lists, []]")
returned("not a list for each rank", "return F(0, 0)")
returned("not an instruction", "return [[repr(x) for x in order] for order in lists]", blind=True)
returned("not an instruction", "return [[F] * microbatches + [B] * microbatches for _ in lists]")
returned("the stages are in reverse", "return lists[::-1]", blind=True)
returned("the same work twice", "return [[*order, order[-1]] for order in lists]", blind=True)
returned("a stage on another rank", "return [sum(lists, [])] * ranks", blind=True)
returned("right only on more than one rank",
    "return lists if ranks > 1 else [[k(0, m) for m in every for k in (F, B)]]", blind=True)
answers.wrong("a backward before the last forward", blind=True)(pp.one_f_one_b)


@answers.wrong("not the same twice", blind=True)
def lists_of_the_first_call(ranks, microbatches, lists=[]):  # noqa: B006
    lists += gpipe(ranks, microbatches)
    return lists


@answers.wrong("not the same twice")
def lists_that_change(ranks, microbatches, lists=[]):  # noqa: B006
    lists += [[] for _ in range(ranks - len(lists))]
    found = gpipe(ranks, microbatches)
    for mine, order in zip(lists, found, strict=False):
        mine[:] = order[::-1] if mine == order else order
    return found if lists[0] == found[0] else [order[:0] for order in found]


@answers.wrong("it does not come to an end", alone=True)
def endless(ranks, microbatches):
    def forever(rank):
        while True:
            yield F(rank, 0)

    return [forever(rank) for rank in range(ranks)]


# ---- how many, and of what -------------------------------------------------------------------------------

counted = answers.slips(gpipe, "range(microbatches)")
counted("a forward is missing", "range(max(1, microbatches - 1))", blind=True)
counted("a micro-batch that does not exist", "range(microbatches + 1)", blind=True)
counted("right only with no fewer micro-batches than ranks", "range(max(ranks, microbatches))", blind=True)
counted("a micro-batch that does not exist", "range(8)", blind=True)
counted("micro-batches are counted from 1", "range(1, microbatches + 1)", blind=True)
counted("the micro-batches are in another order", "sorted(range(microbatches), key=str)", blind=True)
FEW = 'if microbatches < ranks:\n        raise ValueError("too few micro-batches")\n    every ='
spoil = answers.slips(gpipe)
spoil("right only with no fewer micro-batches than ranks", "every =", FEW, blind=True)
spoil("not a list for each rank", "range(ranks)", "range(4)", blind=True)
spoil("a backward is missing", " + [B(r, m) for m in every]", "")
spoil("a backward is missing", "B(r, m) for m in every", "B(r, m) for m in every if r < ranks - 1", blind=True)
spoil("the backward is split", BOTH, "[k(r, m) for k in (F, I, W) for m in every]", blind=True)
spoil("the backward is split", "[B(r, m) for m in every]", "[k(r, m) for m in every for k in (I, W)]", long=True)
spoil("a stage on another rank", {"F(r, m)": "F(m, r)", "B(r, m)": "B(m, r)"}, blind=True)
spoil("a stage on another rank", {"F(r, m)": "F(0, m)", "B(r, m)": "B(0, m)"}, blind=True)
spoil("not a list for each rank",
    {"r in range(ranks)": "m in every",
     "F(r, m) for m in every": "F(r, m) for r in range(ranks)",
     "B(r, m) for m in every": "B(r, m) for r in range(ranks)[::-1]"}, blind=True)


@answers.wrong("a stage on another rank")
def all_stages_on_each_rank(ranks, microbatches):
    """As one process would do it."""
    stages, every = range(ranks), range(microbatches)
    order = [F(s, m) for m in every for s in stages] + [B(s, m) for m in every for s in reversed(stages)]
    return [order] * ranks


# ---- in which order --------------------------------------------------------------------------------------

ORDER = "the micro-batches are in another order"
LAST = "lists[-1][microbatches:] = lists[-1][microbatches:][::-1]\n    return lists"
spoil(ORDER, "B(r, m) for m in every", "B(r, m) for m in every[::-1]", blind=True)  # as in the paper
spoil(ORDER, "B(r, m) for m in every", "B(r, m) for m in (every if r % 2 else every[::-1])", long=True)
spoil(ORDER, "F(r, m) for m in every", "F(r, m) for m in every[::-1]", blind=True)
spoil(ORDER, "return lists", LAST, blind=True)
spoil("a backward before its forward", BOTH, "[B(r, m) for m in every] + [F(r, m) for m in every]")
spoil("a backward before the last forward", BOTH, "[k(r, m) for m in every for k in (F, B)]", blind=True)


@answers.wrong("a backward before the last forward", blind=True)
def in_groups_of_ranks(ranks, microbatches):
    lists = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        group = range(first, min(microbatches, first + ranks))
        for r in range(ranks):
            lists[r] += [F(r, m) for m in group] + [B(r, m) for m in group]
    return lists


@answers.wrong("the ranks wait in a circle")
def crossed(ranks, microbatches):
    """On the last rank its second forward comes before its first: but the backward behind waits for the other."""
    *others, last = pp.one_f_one_b(ranks, microbatches)
    if len(last) < 4 or not others:
        return [*others, last]
    (f0, b0, f1, b1), rest = last[:4], last[4:]
    first, *behind = others[0]
    return [[first, B(0, 0), *(x for x in behind if x != B(0, 0))], *others[1:], [f1, b1, f0, b0, *rest]]
