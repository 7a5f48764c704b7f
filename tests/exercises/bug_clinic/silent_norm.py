"""Answers to silent_norm: the notebook's, the function as it was shipped, and mistakes in mending it."""

from labs.exercises.bug_clinic.silent_norm import faulty
from tests.answers import Exercise, from_notebook

answers = Exercise("silent_norm")
answers.right(from_notebook("prepare"), line="the numbers are one process's")
answers.wrong("hooks on parameters that are gone")(faulty)


@answers.wrong("other numbers than one process's")
def weight_only(model, engine, add_up):
    engine(model)
    model.norm.weight.register_post_accumulate_grad_hook(add_up)


@answers.wrong("other numbers than one process's")
def in_the_first_step_only(model, engine, add_up):
    engine(model)
    seen = set()

    def once(p):
        if p not in seen:
            add_up(p)
        seen.add(p)

    for p in model.norm.parameters():
        p.register_post_accumulate_grad_hook(once)
