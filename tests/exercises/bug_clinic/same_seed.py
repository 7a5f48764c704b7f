"""Answers to same_seed: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.same_seed import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("same_seed")
answers.right(from_notebook("part_of"), line="the numbers are one process's")
answers.wrong("all parts are the same")(faulty)
