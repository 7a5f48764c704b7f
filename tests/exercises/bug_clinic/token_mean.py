"""Answers to token_mean: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.token_mean import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("token_mean")
answers.right(from_notebook("backward"), line="the numbers are one process's")
answers.wrong("each micro-batch counts alike, whatever its tokens")(faulty)
