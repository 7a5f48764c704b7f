"""Answers to root_stays: the notebook's, the function as it was shipped, and mistakes in mending it."""

import torch

from labs.exercises.bug_clinic.root_stays import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("root_stays")
answers.right(from_notebook("after_forward"), line="the numbers are one process's")
answers.wrong("a root stays whole, and no backward comes")(faulty)


@answers.wrong("other numbers than one process's")
def keeps_blocks(unit):
    if not torch.is_grad_enabled():
        unit.free()


@answers.wrong("other numbers than one process's")
def forgets_the_root(unit):
    unit.is_root = unit.is_root and torch.is_grad_enabled()
    if not unit.is_root:
        unit.free()
