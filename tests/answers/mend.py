"""Answers to mend (14): three batch sizes that do not agree on the ranks that are here."""

from tests.answers import Exercise

answers = Exercise("mend")


@answers.right(line="right on all 7 examples")
def divided(train, micro, accumulation, ranks):
    written_for = train // (micro * accumulation)
    new, rest = divmod(train, micro * ranks)
    return written_for, None if rest else new


@answers.right
def in_proportion(train, micro, accumulation, ranks):
    written_for = train / micro / accumulation
    new = accumulation * written_for / ranks
    return written_for, new if new == int(new) else None


answers.spoil(divided, "another batch on another number of ranks", {"None if rest else new": "accumulation"})
answers.spoil(divided, "the wrong way round", {"None if rest else new": "accumulation * ranks // written_for"})
answers.spoil(divided, "rounded, and the batch is another one", {"None if rest else new": "new"})
answers.spoil(divided, "the ranks that are here, and not those it was for", {"return written_for,": "return ranks,"})
answers.spoil(
    divided, "a different kind of answer", {"return written_for, None if rest else new": "return written_for"}
)
answers.spoil(divided, "nothing is returned", {"return written_for": "written_for"})
answers.spoil(divided, "", {"divmod(train, micro * ranks)": "divmod(train, micro)"})
