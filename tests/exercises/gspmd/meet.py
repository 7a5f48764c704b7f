"""Answers to meet (13): of two letters that are cut along the same axis, the one that an operation follows."""

from labs.exercises.gspmd.meet import MET
from tests.answers import Exercise, from_notebook

answers = Exercise("meet")


@answers.right(line="right on all 11 examples")
def least_moved(dims, cut, sizes):
    known = [(own[dim], size) for own, dim, size in zip(dims, cut, sizes, strict=True) if dim is not None]
    return min((letter for letter, _ in known), key=lambda letter: sum(s for other, s in known if other != letter))


most_stays = answers.right(from_notebook("meet"))


answers.instead(MET)
