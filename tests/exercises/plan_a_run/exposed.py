"""Answers to exposed (15): what a step waits for gradients after its last backward."""

from labs.exercises.plan_a_run.exposed import MISTAKES
from labs.kit import check
from tests.answers import Exercise, from_notebook

answers = Exercise("exposed")
answers.right(check.exposed.expected, line="right on all 13 examples")

answers.right(from_notebook("exposed"))

answers.instead(MISTAKES)
