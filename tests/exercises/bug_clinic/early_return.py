"""Answers to early_return: the notebook's, the function as it was shipped, and mistakes in mending it."""

import torch
import torch.distributed as dist

from labs.exercises.bug_clinic.early_return import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("early_return")
answers.right(from_notebook("gradient_norm"), line="the numbers are one process's")
answers.wrong("a rank without gradients leaves before the others meet", alone=True)(faulty)


@answers.wrong("other numbers than one process's")
def squares_in_place(gradients):
    total = torch.zeros((), dtype=torch.float64)
    for g in gradients:
        total += g.square_().sum()
    dist.all_reduce(total)
    return total.sqrt()


answers.spoil(from_notebook("gradient_norm"), "other numbers than one process's", {"g.double()": "g"})
