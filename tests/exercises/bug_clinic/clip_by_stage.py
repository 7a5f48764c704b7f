"""Answers to clip_by_stage: the notebook's, the function as it was shipped, and mistakes in mending it."""

import torch.distributed as dist

from labs.exercises.bug_clinic.clip_by_stage import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("clip_by_stage")
answers.right(from_notebook("clip_all_stages"), line="the numbers are one process's")
answers.wrong("each stage has a norm of its own")(faulty)


@answers.wrong("other numbers than one process's")
def makes_short_gradients_longer(gradients, max_norm):
    total = sum(g.square().sum() for g in gradients)
    dist.all_reduce(total)
    for g in gradients:
        g *= max_norm / total.sqrt()
    return total.sqrt()


@answers.wrong("one side of a message or a collective is missing", alone=True)
def a_call_for_each_gradient(gradients, max_norm):
    squares = [g.square().sum() for g in gradients]
    for square in squares:
        dist.all_reduce(square)
    norm = sum(squares).sqrt()
    for g in gradients:
        g *= (max_norm / norm).clamp(max=1)
    return norm
