"""Answers to late_gather: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.late_gather import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("late_gather")
answers.right(from_notebook("update_and_gather"), line="the numbers are one process's")
answers.wrong("all gathers wait for all updates", alone=True)(faulty)
