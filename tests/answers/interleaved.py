"""Answers to `interleaved` of notebook 10."""

import heapq

from labs import pp
from labs.pp import B, F
from labs.pp.schedules import in_turns
from tests.answers import Exercise, exchanged

answers = Exercise("interleaved")


def both(r, p, m, v):
    """What a rank does, in groups of as many micro-batches as there are ranks: forwards, backwards."""
    if m % p:
        raise ValueError(f"{m} is no multiple of {p}")
    stages, groups = range(r, p * v, p), [range(a, a + p) for a in range(0, m, p)]
    forwards = [F(s, i) for g in groups for s in stages for i in g]
    return forwards, [B(s, i) for g in groups for s in stages[::-1] for i in g]


# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(line="4 ranks, 8 micro-batches, 2 stages per rank: bubble 18.8%, activations alive at ", blind=True)
def interleaved(ranks, microbatches, stages_per_rank):
    p, m, v = ranks, microbatches, stages_per_rank
    if m % p:
        raise ValueError(f"{m} is no multiple of {p}")
    lists, groups = [], [range(a, a + p) for a in range(0, m, p)]
    for r in range(p):
        stages = range(r, p * v, p)
        f = [F(s, i) for g in groups for s in stages for i in g]
        b = [B(s, i) for g in groups for s in stages[::-1] for i in g]
        warm = max(0, min(m * v, (v - 1) * p + 2 * (p - 1 - r)))
        order = f[:warm]
        for x, y in zip(f[warm:], b, strict=False):
            order += [x, y]
        lists.append(order + b[len(f) - warm :])
    return lists


WARM, STAGES, GROUPS = (
    "(v - 1) * p + 2 * (p - 1 - r)",
    "range(r, p * v, p)",
    "[range(a, a + p) for a in range(0, m, p)]",
)


@answers.right(blind=True, long=True)
def by_number(ranks, microbatches, stages_per_rank):
    """By number of the step, as Megatron finds stage and micro-batch."""
    p, m, v = ranks, microbatches, stages_per_rank
    if m % p:
        raise ValueError("no multiple")

    def at(k, forward):
        group, inside = divmod(k, p * v)
        chunk, i = divmod(inside, p)
        return (chunk if forward else v - 1 - chunk), group * p + i

    lists = []
    for r in range(p):
        order, f, b = [], 0, 0
        limit = min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1)
        while b < m * v:
            if f < m * v and f - b < limit:
                c, i = at(f, True)
                order.append(F(c * p + r, i))
                f += 1
            else:
                c, i = at(b, False)
                order.append(B(c * p + r, i))
                b += 1
        lists.append(order)
    return lists


@answers.right(blind=True)
def by_in_turns(ranks, microbatches, stages_per_rank):
    lists = []
    for r in range(ranks):
        f, b = both(r, ranks, microbatches, stages_per_rank)
        lists.append(in_turns(f, b, min(len(f), (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - r))))
    return lists


@answers.right(blind=True, long=True)
def by_a_heap(ranks, microbatches, stages_per_rank):
    lists = []
    for r in range(ranks):
        f, b = both(r, ranks, microbatches, stages_per_rank)
        warm = (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - r)
        heap = [(2 * (k - warm), x.stage, x.microbatch, "F") for k, x in enumerate(f)]
        heap += [(2 * k + 1, x.stage, x.microbatch, "B") for k, x in enumerate(b)]
        heapq.heapify(heap)
        lists.append([{"F": F, "B": B}[k](s, i) for _, s, i, k in (heapq.heappop(heap) for _ in range(len(heap)))])
    return lists


@answers.right
def or_an_assert(ranks, microbatches, stages_per_rank):
    assert microbatches % ranks == 0 and stages_per_rank > 1
    return interleaved(ranks, microbatches, stages_per_rank)


answers.right(pp.interleaved)
# of fewer activations, and no larger a bubble (Narayanan et al.), and between the two
answers.right(exchanged(interleaved, {WARM: "(v - 1) * p + p - 1 - r"}, "shorter_warmup"), blind=True)
answers.right(
    exchanged(interleaved, {WARM: "(v - 1) * p + (3 * (p - 1 - r) + 1) // 2"}, "warmup_between"), blind=True, long=True
)

# ---- the warm-up -----------------------------------------------------------------------------------------

warmed = answers.slips(interleaved, WARM)
REFUSES_NOTHING = {"m % p": "False"}
ALIVE, EARLY, ALL = "too many activations alive", "a backward before its forward", "all forwards first"
warmed(EARLY, "0", blind=True)
warmed(EARLY, "p - 1 - r", blind=True)
warmed(EARLY, "(v - 1) * p + p - 1 - r - 1", blind=True, long=True)
warmed(ALIVE, f"{WARM} + 1", blind=True)
warmed(ALIVE, "v * p + 2 * (p - 1 - r)", blind=True, long=True)
warmed(ALIVE, "(v - 1) * p + 2 * (p - r)", blind=True, long=True)
warmed(ALIVE, "v * (p - 1) + 2 * (p - 1 - r)", blind=True)
warmed("the ranks wait in a circle", "(v - 1) * p + 3 * (p - 1 - r)", blind=True)
warmed(ALL, "m * v if m == p else (v - 1) * p + 2 * (p - 1 - r)", blind=True)  # Megatron's old special case
warmed(ALL, "v * p if m == p else (v - 1) * p + 2 * (p - 1 - r)", long=True)
warmed(ALL, "(v - 1) * 4 + 2 * (3 - r)", blind=True, long=True)
warmed(ALL, "10**6", blind=True)
warmed("the same warm-up on every rank", "(v - 1) * p + 2 * (p - 1)", blind=True)
warmed("right only with two stages per rank", "p + 2 * (p - 1 - r)", blind=True)
CLAMPED = f"max(0, min(m * v, {WARM}))"
spoil = answers.slips(interleaved)
spoil("a backward is missing", {CLAMPED: WARM} | REFUSES_NOTHING, blind=True)

# ---- groups, and stages ----------------------------------------------------------------------------------

CIRCLE = "the ranks wait in a circle"
spoil(EARLY, GROUPS, "[range(m)]", blind=True)
spoil(ALIVE, {GROUPS: "[range(m)]", WARM: "(v - 1) * m + 2 * (p - 1 - r)"}, blind=True)
spoil(CIRCLE, GROUPS, "[range(i, i + 1) for i in range(m)]", blind=True)
spoil("a forward is missing", {GROUPS: "[range(p)]", "min(m * v": "min(p * v"} | REFUSES_NOTHING, blind=True)
spoil("the same work twice", GROUPS, "[range(p)] * (m // p)", blind=True)
spoil("neighbouring stages on one rank", {STAGES: "range(r * v, (r + 1) * v)"} | REFUSES_NOTHING, blind=True)
spoil("a stage on another rank", STAGES, "range(v)", blind=True)
spoil(CIRCLE, {"stages[::-1]": "stages"} | REFUSES_NOTHING, blind=True)
spoil(EARLY, {"stages[::-1] for i in g]": "stages[::-1] for i in g[::-1]]"} | REFUSES_NOTHING, blind=True, long=True)
spoil(EARLY, {WARM: "(v - 1) * p + (p - 1 - r)", "[x, y]": "[y, x]"} | REFUSES_NOTHING, blind=True, long=True)
spoil("right only with two stages per rank", "stages_per_rank\n    if", "2\n    if", blind=True)
spoil("", "m % p", "m % p or m < 2 * p")
BENT = "[*range(r, p * v, p)[:1], *(3 * p - 1 - s for s in range(r, p * v, p)[1:])]"
spoil("a stage on another rank", STAGES, BENT, long=True)  # along a V
ONE_BY_ONE = "[z for i in range(m) for z in [F(s, i) for s in stages] + [B(s, i) for s in stages[::-1]]]"
spoil("one micro-batch at a time", "order + b[len(f) - warm :]", ONE_BY_ONE)

# ---- what is returned ------------------------------------------------------------------------------------

spoil("a backward is missing", " + b[len(f) - warm :]", "", blind=True)
spoil("not a list for each rank", "return lists", "return dict(enumerate(lists))", blind=True)
OF_STAGES = "return [[x for o in lists for x in o if x.stage == s] for s in range(p * v)]"
spoil("not a list for each rank", "return lists", OF_STAGES, blind=True)
spoil("a stage on another rank", "return lists", "return lists[::-1]", blind=True)


@answers.wrong("a forward is missing", blind=True)
def one_stage_a_rank(ranks, microbatches, stages_per_rank):
    return pp.one_f_one_b(ranks, microbatches)


@answers.wrong(ALL)
def breadth_first(ranks, microbatches, stages_per_rank):
    mine, every = [range(rank, ranks * stages_per_rank, ranks) for rank in range(ranks)], range(microbatches)
    return [[F(s, m) for s in of for m in every] + [B(s, m) for s in of[::-1] for m in every] for of in mine]
