"""Answers to step_seconds (07b): how long an offloaded step takes, on paper."""

from labs.exercises.offload.step_seconds import MISTAKES
from labs.kit import check
from tests.answers import Exercise

# fmt: off
answers = Exercise("step_seconds")
answers.right(check.step_seconds.expected, line="right on all 15 examples")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def ss_padded(fetch, update, store):
    before, after = [0, *store], [*fetch[1:], 0]
    slots = sum(max(u, s + f) for u, s, f in zip(update, before, after, strict=False))
    return sum(fetch[:1]) + slots + sum(store[-1:])


# ---- wrong: a slot ---------------------------------------------------------------------------------------


BEFORE, AFTER = "before, after = [0, *store], [*fetch[1:], 0]", "before, after = {}, {}"


def beside(mistake, before, after, **options):
    """Otherwise aligned: what is stored and what is fetched beside each update."""
    answers.spoil(ss_padded, mistake, {BEFORE: AFTER.format(before, after)}, **options)

# ---- wrong: around the slots -----------------------------------------------------------------------------


answers.instead(MISTAKES)
