"""Answers to first_epoch_again: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.first_epoch_again import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("first_epoch_again")
answers.right(from_notebook("rest_of_epoch"), line="the numbers are one process's")
answers.wrong("every epoch in the order of the first")(faulty)
