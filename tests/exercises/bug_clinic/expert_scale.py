"""Answers to expert_scale: the notebook's, the function as it was shipped, and a mistake in mending it."""

from labs.exercises.bug_clinic.expert_scale import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("expert_scale")
answers.right(from_notebook("average_by_kind"), line="the numbers are one process's")
answers.wrong("divided by the copies, and not by all ranks")(faulty)
answers.spoil(
    from_notebook("average_by_kind"),
    "other numbers than one process's",
    {"            p.grad /= ranks": "        p.grad /= ranks"},  # of the last parameter only
)
