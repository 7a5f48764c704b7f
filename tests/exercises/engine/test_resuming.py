"""Tests of what the check of resume (08b) says; its answers are in tests/exercises/resume."""

import torch

from labs.kit import check
from tests.answers.together import together
from tests.exercises.resume.resume import remember, resume


def test_the_words():
    def by_number(state, model, optimizer, schedule, loader):
        resume(state, model, optimizer, schedule, loader)
        for p, name in zip(optimizer.param_groups[0]["params"], state["moments"], strict=True):
            optimizer.state[p] = state["moments"][name]

    def undone(state, model, *others):
        resume(state, model, *others)
        torch.nn.init.ones_(model.third.weight)

    moved, lost = together([("resume", (remember, fn), False) for fn in (by_number, undone)])
    assert (
        moved.mistake == "a moment that belongs to another parameter" and "of exp_avg of first.weight is" in moved.text
    )
    assert not lost.mistake and "after resume, element 0 of the parameter third.weight is 1, and not" in lost.text


def test_what_remains_to_be_done_is_told_where_it_fails():
    def without_frozen(model, optimizer, schedule, loader):
        state = remember(model, optimizer, schedule, loader)
        state["moments"] = {name: kept for name, kept in state["moments"].items() if kept or not loader.step}
        return state

    answer = check.resume(without_frozen, resume)
    assert "KeyError: 'first.weight'" in answer.text and 'state["moments"][name]' in answer.text
    assert "the first layer frozen" in answer.text
