"""Answers to interval (08b): seconds between two saves, by Young's formula."""

import math

import numpy as np
import torch

from labs.exercises.resume.interval import MISTAKES
from labs.kit import exercises
from tests.answers import Exercise

answers = Exercise("interval")
answers.right(exercises.interval, line="right on all 8 examples")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def by_a_power(save, machine, machines):
    return (2 * save * machine / machines) ** 0.5


@answers.right
def in_steps(save, machine, machines):
    between_failures = machine / machines
    return math.sqrt(2) * math.sqrt(save) * math.sqrt(between_failures)


@answers.right
def by_numpy(save, machine, machines):
    return np.sqrt(2.0 * save * (machine / machines))


@answers.right
def by_torch(save, machine, machines):
    return torch.tensor(2 * save * machine / machines, dtype=torch.float64).sqrt()


@answers.right
def least_of_what_is_lost(save, machine, machines):
    """Where save / t + t / (2 M) is least, by ternary search; 4e-62 where a save takes no time."""
    mean, low, high = machine / machines, 0.0, 1e9
    for _ in range(400):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        derivative = -save / one**2 + 1 / (2 * mean), -save / other**2 + 1 / (2 * mean)
        low, high = (one, high) if derivative[0] < 0 else (low, other)
    return (low + high) / 2


# ---- wrong -----------------------------------------------------------------------------------------------

FORMULA = "(2 * save * machine / machines) ** 0.5"

instead = answers.slips(by_a_power, FORMULA)
instead("nothing is returned", "None")
instead("a different kind of answer", f"[{FORMULA}]")
instead("", f"round({FORMULA})")
instead("", f"int({FORMULA})")
instead("", "(2 * save / machine / machines) ** 0.5")
instead("", "(2 * save * (machine / machines - save)) ** 0.5")
instead("", "(2 * save * (machine // machines)) ** 0.5")
instead("", "max(1, (2 * save * machine / machines) ** 0.5)")
instead("", f"{FORMULA} or None")
instead("", "float(torch.tensor(2 * save * machine / machines).sqrt())")


answers.instead(MISTAKES)
