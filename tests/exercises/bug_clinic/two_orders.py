"""Answers to two_orders: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.two_orders import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("two_orders")
answers.right(from_notebook("start"), line="the numbers are one process's")
answers.wrong("each rank in its own order")(faulty)
