"""Answers to first_epoch_again: the notebook's, the function as it was shipped, and mistakes in mending it."""

from labs.exercises.bug_clinic.first_epoch_again import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("first_epoch_again")
answers.right(from_notebook("rest_of_epoch"), line="the numbers are one process's")
answers.wrong("every epoch in the order of the first")(faulty)


@answers.wrong("other numbers than one process's")
def rest_of_the_epoch_before(make, step):
    length = len(make(epoch=0))
    epoch = max(step - 1, 0) // length
    return make(epoch=epoch)[step - epoch * length :]


@answers.wrong("other numbers than one process's")
def two_epochs(make, step):
    length = len(make(epoch=0))
    return make(epoch=int(step >= length))[step % length :]


@answers.wrong("other numbers than one process's")
def skips_the_steps_of_the_run(make, step):
    return make(epoch=step // len(make(epoch=0)))[step:]
