"""Answers to late_gather: the notebook's, the function as it was shipped, and a mistake in mending it."""

from labs.exercises.bug_clinic.late_gather import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("late_gather")
answers.right(from_notebook("update_and_gather"), line="the numbers are one process's")
answers.wrong("all gathers wait for all updates", alone=True)(faulty)


@answers.wrong("less runs at the same time than in the right program", alone=True)
def gathers_the_one_before(buckets):
    before, works = None, []
    for bucket in buckets:
        bucket.update()
        if before:
            works.append(before.gather())
        before = bucket
    works.append(before.gather())
    for work in works:
        work.wait()
