"""Answers to same_seed: the notebook's, the function as it was shipped, and a mistake in mending it."""

import torch
import torch.distributed as dist

from labs.exercises.bug_clinic.same_seed import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("same_seed")
answers.right(from_notebook("part_of"), line="the numbers are one process's")
answers.wrong("all parts are the same")(faulty)


@answers.wrong("other numbers than one process's")
def a_seed_for_each_rank(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randn(rows // dist.get_world_size(), columns, generator=generator, dtype=torch.float64)
