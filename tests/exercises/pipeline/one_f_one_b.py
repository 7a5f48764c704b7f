"""Answers to `one_f_one_b` of notebook 10."""

from labs import pp
from labs.pp import B, F
from tests.answers import Exercise

answers = Exercise("one_f_one_b")

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(line="4 ranks, 8 micro-batches: bubble 37.5%, activations alive at most 4 3 2 1; run for ")
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


@answers.right
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


# ---- the warm-up -----------------------------------------------------------------------------------------


def warmed(mistake, warm, **options):
    """Note a wrong answer with a warm-up of `warm` forwards, but at least none and at most all."""
    changes = {"min(microbatches, ranks - 1 - r)": f"max(0, min(microbatches, {warm}))"}
    answers.spoil(one_f_one_b, mistake, changes, **options)


ALIVE, FEW = "too many activations alive", "right only with no fewer micro-batches than ranks"
LONG = "the warm-up is longer than there are micro-batches"
warmed(ALIVE, "ranks - r")
warmed("the bubble is too large", "ranks - r - 2")
warmed("the same warm-up on every rank", "ranks - 1")
warmed("the ranks wait in a circle", "r")
warmed("all forwards first", "3 - r")
warmed("one micro-batch at a time", "0")
warmed(FEW, "microbatches if microbatches < ranks else ranks - 1 - r")
ALL = "min(microbatches, ranks - 1 - r)"
spoil = answers.slips(one_f_one_b)
spoil(LONG, ALL, "ranks - 1 - r")


# ---- the turns, and what is left -------------------------------------------------------------------------

LEFT, TURNS = "every[microbatches - warm :]", "[F(r, warm + m), B(r, m)]"
spoil("the micro-batches are in another order", LEFT, f"{LEFT}[::-1]")
spoil("a backward is missing", LEFT, "()")
spoil("a backward before its forward", TURNS, "[B(r, m), F(r, warm + m)]")
spoil(
    "a micro-batch that does not exist",
    {"min(microbatches, ranks - 1 - r)": "ranks - 1 - r", "range(microbatches - warm)": "every", LEFT: "()"},
)
spoil("the same work twice", {"range(microbatches - warm)": "every", "F(r, warm + m)": "F(r, m)", LEFT: "()"})


# ---- which, and of whom ----------------------------------------------------------------------------------


@answers.wrong("a forward is missing")
def those_beyond_a_multiple_are_lost(ranks, microbatches):
    return one_f_one_b(ranks, max(microbatches // ranks, 1) * ranks)


spoil("one list for all ranks", "return lists", "return lists[0]")
STAGE_0 = "return [[type(x)(0, x.microbatch) for x in order] for order in lists]"
spoil("a stage on another rank", "return lists", STAGE_0)
answers.wrong("the backward is split")(pp.zb1p)
