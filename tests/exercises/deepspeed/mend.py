"""Answers to mend (14): three batch sizes that do not agree on the ranks that are here."""

from labs.exercises.deepspeed.mend import CONTRADICT
from tests.answers import Exercise

answers = Exercise("mend")


@answers.right(line="right on all 8 examples")
def divided(train, micro, accumulation, ranks):
    written_for = train // (micro * accumulation)
    new, rest = divmod(train, micro * ranks)
    return written_for, None if rest else new


@answers.right
def in_proportion(train, micro, accumulation, ranks):
    written_for = train / micro / accumulation
    new = accumulation * written_for / ranks
    return written_for, new if new == int(new) else None


answers.instead(CONTRADICT)
