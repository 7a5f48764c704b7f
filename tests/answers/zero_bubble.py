"""Answers to `zero_bubble` of notebook 10."""

from collections import deque
from itertools import chain  # noqa: F401  (exchanged words name it)

from labs import pp
from labs.pp import B, F, I, W
from tests.answers import Exercise

# fmt: off
answers = Exercise("zero_bubble")

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(
    line="4 ranks, 8 micro-batches: bubble 12.5%, activations alive at most 4 4 4 4; run for real, the ", blind=True
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


@answers.right(blind=True)
def by_a_queue(ranks, microbatches):
    lists = []
    for rank, whole in enumerate(pp.one_f_one_b(ranks, microbatches)):
        order, waiting = [], deque()
        for x in whole:
            if isinstance(x, F):
                order.append(x)
                continue
            order.append(I(rank, x.microbatch))
            waiting.append(W(rank, x.microbatch))
            if len(waiting) > rank:
                order.append(waiting.popleft())
        lists.append(order + list(waiting))
    return lists


@answers.right(blind=True, long=True)
def by_sorting(ranks, microbatches):
    lists = []
    for r in range(ranks):
        key = {}
        for m in range(microbatches):
            key[F(r, m)] = (m - (ranks - 1 - r), 0, m)
            key[I(r, m)] = (m, 1, m)
            key[W(r, m)] = (m + r, 2, m)
        lists.append(sorted(key, key=key.get))
    return lists


@answers.right(blind=True, long=True)
def by_counters(ranks, microbatches):
    """A rank by itself, by what it has done so far."""
    lists = []
    for r in range(ranks):
        f = i = w = 0
        order = []
        while w < microbatches:
            if i - w > r or i == microbatches:
                order.append(W(r, w))
                w += 1
            elif f < microbatches and f - i < ranks - r:
                order.append(F(r, f))
                f += 1
            else:
                order.append(I(r, i))
                i += 1
        lists.append(order)
    return lists


@answers.right(blind=True, long=True)
def backward_first(ranks, microbatches):
    lists = []
    for r in range(ranks):
        first = min(microbatches, ranks - r)
        order = [F(r, m) for m in range(first)]
        for m in range(microbatches):
            order.append(I(r, m))
            order += [W(r, m - r)] if m >= r else []
            order += [F(r, first + m)] if first + m < microbatches else []
        order += [W(r, m) for m in range(microbatches) if W(r, m) not in order]
        lists.append(order)
    return lists


@answers.right(blind=True, long=True)
def by_inserting(ranks, microbatches):
    lists = []
    for r, whole in enumerate(pp.one_f_one_b(ranks, microbatches)):
        order = [I(r, x.microbatch) if isinstance(x, B) else x for x in whole]
        for m in range(microbatches):
            after = I(r, m + r)
            order.insert(order.index(after) + 1 if after in order else len(order), W(r, m))
        lists.append(order)
    return lists


@answers.right
def of_the_course(ranks, microbatches):
    return pp.zb1p(ranks, microbatches)


@answers.right
def found_by_simulation(ranks, microbatches):
    """On a common clock: a forward while few enough are alive, else an I, and a W where a rank would wait."""
    lists, done = [[] for _ in range(ranks)], set()
    count = [{F: 0, I: 0, W: 0} for _ in range(ranks)]
    while any(each[W] < microbatches for each in count):
        now = []
        for r, each in enumerate(count):
            few = each[F] - each[I] < ranks - r and each[F] - each[W] < ranks
            can = {
                F: few and each[F] < microbatches and (r == 0 or F(r - 1, each[F]) in done),
                I: each[I] < each[F] and (r == ranks - 1 or I(r + 1, each[I]) in done),
                W: each[W] < each[I],
            }
            if kind := next((kind for kind in can if can[kind]), None):
                now.append(kind(r, each[kind]))
                each[kind] += 1
        for x in now:
            lists[x.stage].append(x)
        done.update(now)
    return lists


# Nobody waits for the gradient of the tokens.  Its writer took it for wrong.
answers.vary(zero_bubble, {"return lists": "return [pp.one_f_one_b(ranks, n)[0], *lists[1:]]"}, blind=True)
answers.vary(zero_bubble,
    {"return lists": "ends = [3 * n - min(r + 1, n) for r in range(ranks)]\n"
         "    return [order[:end] + order[end:][::-1] for order, end in zip(lists, ends)]"})

# ---- when each W comes -----------------------------------------------------------------------------------

PLACES = "W's in the wrong places"
late = answers.slips(zero_bubble, "late = r")  # as many I's go by before a W
late("W directly after its I", "late = 0", blind=True)
late("all W at the end", "late = n", blind=True)
late(PLACES, "late = r + 1", blind=True)
late(PLACES, "late = max(0, r - 1)", blind=True)
late(PLACES, "late = ranks - 1 - r", blind=True, long=True)
late(PLACES, "late = ranks - 1", blind=True, long=True)
late(PLACES, "late = n if r == ranks - 1 else r", blind=True, long=True)
late(PLACES, "late = min(r, 1)", blind=True, long=True)
late("right only with no fewer micro-batches than ranks", "late = 0 if n < ranks else r", blind=True)
W_THEN_I = {
    "order += [I(r, i)]": "order += [W(r, i - 1)] if i else []",
    "order += [W(r, i - late)] if i >= late else []": "order += [I(r, i)]",
    "late = r": "late = 1",
}
answers.spoil(zero_bubble, PLACES, W_THEN_I, blind=True, long=True)
answers.spoil(zero_bubble, "W before its I",
    {"late = r": "late = 0",
     "order += [I(r, i)]": "order += [W(r, i)]",
     "order += [W(r, i - late)]": "order += [I(r, i - late)]"}, blind=True)

# ---- the warm-up -----------------------------------------------------------------------------------------

warmup = answers.slips(zero_bubble, "warmup = ranks - 1 - r")
warmup("too many activations alive", "warmup = 2 * (ranks - 1 - r)", blind=True)
DOUBLED = {"ranks - 1 - r": "2 * (ranks - 1 - r)", "late = r": "late = 2 * r"}
answers.spoil(zero_bubble, "too many activations alive", DOUBLED)
warmup("the bubble is too large", "warmup = 3 - r", blind=True)
warmup("the bubble is too large", "warmup = 0", blind=True)

# ---- what is returned ------------------------------------------------------------------------------------

returned = answers.slips(zero_bubble, "return lists")
answers.wrong("the backward is not split", blind=True)(pp.one_f_one_b)
returned("all W at the end",
    "return [[k(r, i) for k in (F, I, W) for i in range(n)] for r in range(ranks)]", blind=True)
returned("all forwards first",
    "return [[F(r, i) for i in range(n)] + [k(r, i) for i in range(n) for k in (I, W)] for r in range(ranks)]")
returned("one list for all ranks", "return list(chain.from_iterable(lists))", blind=True)
returned("a W is missing", "return [[x for x in order if not isinstance(x, W)] for order in lists]", blind=True)
returned("a W is missing", "return [order[:3 * n - min(r, n)] for r, order in enumerate(lists)]", blind=True)
returned("a backward is missing", "return [[x for x in order if not isinstance(x, I)] for order in lists]")
returned("the same work twice", "return [[*order, W(r, n - 1)] for r, order in enumerate(lists)]", blind=True)
returned("both a whole backward and a half of it",
    "return [[B(r, x.microbatch) if isinstance(x, I) else x for x in o] for r, o in enumerate(lists)]", blind=True)
returned("a stage on another rank",
    "return [[W(0, x.microbatch) if isinstance(x, W) else x for x in order] for order in lists]", blind=True)
FEW = 'if microbatches < ranks:\n        raise ValueError("too few")\n    lists, n ='
answers.spoil(zero_bubble, "right only with no fewer micro-batches than ranks", {"lists, n =": FEW}, blind=True)


@answers.wrong("right only with no fewer micro-batches than ranks", blind=True, long=True)
def counted_from_the_end(ranks, microbatches):
    lists = []
    for r, whole in enumerate(pp.one_f_one_b(ranks, microbatches)):
        ws, order = [W(r, m) for m in range(microbatches)], []
        for x in whole:
            if isinstance(x, F):
                order.append(x)
            else:
                order.append(I(r, x.microbatch))
                if x.microbatch >= r:
                    order.append(ws[x.microbatch - r])
        lists.append(order + (ws[-r:] if r else []) if microbatches >= r else order + ws[microbatches - r :])
    return lists


@answers.wrong("not the same twice", blind=True)
def lists_of_the_first_call(ranks, microbatches, lists=[]):  # noqa: B006
    lists += zero_bubble(ranks, microbatches)
    return lists
