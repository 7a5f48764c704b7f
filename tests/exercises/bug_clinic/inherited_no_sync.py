"""Answers to inherited_no_sync: the notebook's, the function as it was shipped, and mistakes in mending it."""

from contextlib import contextmanager

from labs.exercises.bug_clinic.inherited_no_sync import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("inherited_no_sync", given=lambda fn: (contextmanager(fn),))
answers.right(from_notebook("no_sync"), line="the numbers are one process's")
answers.wrong("every backward is the step's last", given=lambda fn: (fn,))(faulty)


@answers.wrong("other numbers than one process's")
def no_finally(engine):
    before, engine.last = engine.last, False
    yield
    engine.last = before


@answers.wrong("other numbers than one process's")
def ends_the_outer_context(engine):
    engine.last = False
    try:
        yield
    finally:
        engine.last = True


@answers.wrong("other numbers than one process's")
def flips(engine):
    engine.last = not engine.last
    try:
        yield
    finally:
        engine.last = not engine.last
