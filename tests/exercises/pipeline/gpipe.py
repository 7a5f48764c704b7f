"""Answers to `gpipe` of notebook 10."""

from labs import pp
from labs.pp import B, F, I, W  # noqa: F401  (I and W in spoiled ones)
from tests.answers import Exercise

# fmt: off
answers = Exercise("gpipe")
BOTH = "[F(r, m) for m in every] + [B(r, m) for m in every]"

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(
    line="4 ranks, 8 micro-batches: bubble 37.5%, activations alive at most 8 8 8 8; run for real, the "
)
def gpipe(ranks, microbatches):
    every = range(microbatches)
    lists = [[F(r, m) for m in every] + [B(r, m) for m in every] for r in range(ranks)]
    return lists


@answers.right
def by_a_generator(ranks, microbatches):
    for rank in range(ranks):
        yield (kind(rank, m) for kind in (F, B) for m in range(microbatches))


# ---- what is returned ------------------------------------------------------------------------------------

returned = answers.slips(gpipe, "return lists")
returned("one list for all ranks", "return [x for order in lists for x in order]")
returned("not a list for each rank", "return dict(enumerate(lists))")
returned("not an instruction", "return [[repr(x) for x in order] for order in lists]")
returned("the stages are in reverse", "return lists[::-1]")
returned("the same work twice", "return [[*order, order[-1]] for order in lists]")
returned("a stage on another rank", "return [sum(lists, [])] * ranks")
answers.wrong("a backward before the last forward")(pp.one_f_one_b)


@answers.wrong("not the same twice")
def lists_of_the_first_call(ranks, microbatches, lists=[]):  # noqa: B006
    lists += gpipe(ranks, microbatches)
    return lists


@answers.wrong("it does not come to an end", alone=True)
def endless(ranks, microbatches):
    def forever(rank):
        while True:
            yield F(rank, 0)

    return [forever(rank) for rank in range(ranks)]


# ---- how many, and of what -------------------------------------------------------------------------------

counted = answers.slips(gpipe, "range(microbatches)")
counted("a forward is missing", "range(max(1, microbatches - 1))")
counted("a micro-batch that does not exist", "range(microbatches + 1)")
counted("right only with no fewer micro-batches than ranks", "range(max(ranks, microbatches))")
counted("micro-batches are counted from 1", "range(1, microbatches + 1)")
counted("the micro-batches are in another order", "sorted(range(microbatches), key=str)")
spoil = answers.slips(gpipe)
spoil("a backward is missing", " + [B(r, m) for m in every]", "")
spoil("the backward is split", BOTH, "[k(r, m) for k in (F, I, W) for m in every]")


# ---- in which order --------------------------------------------------------------------------------------

spoil("a backward before its forward", BOTH, "[B(r, m) for m in every] + [F(r, m) for m in every]")


@answers.wrong("the ranks wait in a circle")
def crossed(ranks, microbatches):
    """Let the last rank begin with its second micro-batch, while rank 0 waits for the backward of its first."""
    *others, last = pp.one_f_one_b(ranks, microbatches)
    if len(last) < 4 or not others:
        return [*others, last]
    (f0, b0, f1, b1), rest = last[:4], last[4:]
    first, *behind = others[0]
    return [[first, B(0, 0), *(x for x in behind if x != B(0, 0))], *others[1:], [f1, b1, f0, b0, *rest]]
