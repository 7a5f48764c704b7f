"""Answers to mesh_sizes (15): the sizes of tp, pp and dp that a cluster can run a model with."""

from labs.exercises.plan_a_run.mesh_sizes import MISTAKES
from labs.kit import check
from tests.answers import Exercise, from_notebook

answers = Exercise("mesh_sizes")
answers.right(check.mesh_sizes.expected, line="right on all 7 examples")

by_loops = answers.right(from_notebook("mesh_sizes"))


spoil = answers.slips(by_loops)
spoil("not sorted, or not each once", "return found", "return found[::-1]")

answers.instead(MISTAKES)
