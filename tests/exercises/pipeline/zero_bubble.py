"""Answers to `zero_bubble` of notebook 10."""

from itertools import chain  # noqa: F401  (exchanged words name it)

from labs import pp
from labs.pp import (
    B,  # noqa: F401 (varied answers use it)
    F,
    I,
    W,
)
from tests.answers import Exercise

# fmt: off
answers = Exercise("zero_bubble")

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(
    line="4 ranks, 8 micro-batches: bubble 12.5%, activations alive at most 4 4 4 4; run for real, the "
)
def zero_bubble(ranks, microbatches):
    """F and I as in 1F1B; the W of micro-batch i behind the I of i + late, those left at the end."""
    lists, n = [], microbatches
    for r in range(ranks):
        warmup = ranks - 1 - r
        late = r
        first = max(0, min(n, warmup))
        order = [F(r, i) for i in range(first)]
        for i in range(n):
            order += [F(r, first + i)] if first + i < n else []
            order += [I(r, i)]
            order += [W(r, i - late)] if i >= late else []
        order += [W(r, i) for i in range(max(0, n - late), n)]
        lists.append(order)
    return lists


@answers.right
def of_the_course(ranks, microbatches):
    return pp.zb1p(ranks, microbatches)


# ---- when each W comes -----------------------------------------------------------------------------------

PLACES = "W's in the wrong places"
late = answers.slips(zero_bubble, "late = r")  # as many I's go by before a W
late("W directly after its I", "late = 0")
late("all W at the end", "late = n")
late(PLACES, "late = r + 1")
late("right only with no fewer micro-batches than ranks", "late = 0 if n < ranks else r")
answers.spoil(zero_bubble, "W before its I",
    {"late = r": "late = 0",
     "order += [I(r, i)]": "order += [W(r, i)]",
     "order += [W(r, i - late)]": "order += [I(r, i - late)]"})

# ---- the warm-up -----------------------------------------------------------------------------------------

warmup = answers.slips(zero_bubble, "warmup = ranks - 1 - r")
warmup("too many activations alive", "warmup = 2 * (ranks - 1 - r)")
warmup("the bubble is too large", "warmup = 3 - r")

# ---- what is returned ------------------------------------------------------------------------------------

returned = answers.slips(zero_bubble, "return lists")
answers.wrong("the backward is not split")(pp.one_f_one_b)
returned("all forwards first",
    "return [[F(r, i) for i in range(n)] + [k(r, i) for i in range(n) for k in (I, W)] for r in range(ranks)]")
returned("one list for all ranks", "return list(chain.from_iterable(lists))")
returned("a W is missing", "return [[x for x in order if not isinstance(x, W)] for order in lists]")
returned("a backward is missing", "return [[x for x in order if not isinstance(x, I)] for order in lists]")
returned("the same work twice", "return [[*order, W(r, n - 1)] for r, order in enumerate(lists)]")
returned("both a whole backward and a half of it",
    "return [[B(r, x.microbatch) if isinstance(x, I) else x for x in o] for r, o in enumerate(lists)]")
returned("a stage on another rank",
    "return [[W(0, x.microbatch) if isinstance(x, W) else x for x in order] for order in lists]")
