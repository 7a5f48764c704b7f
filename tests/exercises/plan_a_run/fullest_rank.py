"""Answers to fullest_rank (15): the bytes on the first rank of a pipeline."""

from labs.exercises.plan_a_run.fullest_rank import MISTAKES
from labs.kit import check
from tests.answers import Exercise

answers = Exercise("fullest_rank")
answers.right(check.fullest_rank.expected, line="right on all 10 examples")


@answers.right
def in_steps(parameters, activations, tp, pp, dp, zero, microbatches):
    mine = parameters / tp / pp
    weights, gradients, state = 2 * mine, 2 * mine, 12 * mine
    if zero >= 1:
        state /= dp
    if zero >= 2:
        gradients /= dp
    if zero == 3:
        weights /= dp
    alive = min(pp, microbatches)
    return weights + gradients + state + activations / tp / pp * alive


answers.instead(MISTAKES)
