"""Answers to inherited_no_sync: the notebook's, and the function as it was shipped."""

from contextlib import contextmanager

from labs.exercises.bug_clinic.inherited_no_sync import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("inherited_no_sync", given=lambda fn: (contextmanager(fn),))
answers.right(from_notebook("no_sync"), line="the numbers are one process's")
answers.wrong("every backward is the step's last", given=lambda fn: (fn,))(faulty)
