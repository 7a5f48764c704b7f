"""Answers to early_return: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.early_return import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("early_return")
answers.right(from_notebook("gradient_norm"), line="the numbers are one process's")
answers.wrong("a rank without gradients leaves before the others meet", alone=True)(faulty)
