"""Answers to expert_scale: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.expert_scale import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("expert_scale")
answers.right(from_notebook("average_by_kind"), line="the numbers are one process's")
answers.wrong("divided by the copies, and not by all ranks")(faulty)
