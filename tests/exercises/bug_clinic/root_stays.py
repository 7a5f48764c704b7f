"""Answers to root_stays: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.root_stays import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("root_stays")
answers.right(from_notebook("after_forward"), line="the numbers are one process's")
answers.wrong("a root stays whole, and no backward comes")(faulty)
