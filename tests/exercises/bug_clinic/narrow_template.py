"""Answers to narrow_template: the notebook's, and the function as it was shipped."""

from labs.exercises.bug_clinic.narrow_template import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("narrow_template")
answers.right(from_notebook("load"), line="the numbers are one process's")
answers.wrong("rounded to the template's dtype")(faulty)
