"""Answers to interval (08b): seconds between two saves, by Young's formula."""

from labs.exercises.resume.interval import MISTAKES
from labs.kit import check
from tests.answers import Exercise

answers = Exercise("interval")
answers.right(check.interval.expected, line="right on all 8 examples")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def by_a_power(save, machine, machines):
    return (2 * save * machine / machines) ** 0.5


# ---- wrong -----------------------------------------------------------------------------------------------


answers.instead(MISTAKES)
