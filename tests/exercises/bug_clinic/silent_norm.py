"""Answers to silent_norm: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.silent_norm import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("silent_norm")
answers.right(from_notebook("prepare"), line="the numbers are one process's")
answers.wrong("hooks on parameters that are gone")(faulty)
