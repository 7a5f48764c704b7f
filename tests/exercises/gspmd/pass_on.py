"""Answers to pass_on (13): which dim of each tensor is cut, once one letter is."""

from labs.exercises.gspmd.pass_on import PASSED
from tests.answers import Exercise

answers = Exercise("pass_on")
COUNT = "right on all 59 examples"


@answers.right(line=COUNT)
def by_letter(dims, cut):
    [letter] = {own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None}
    return [own.index(letter) if dim is None and letter in own else dim for own, dim in zip(dims, cut, strict=True)]


@answers.right
def in_a_loop(dims, cut):
    letter = ""
    for own, dim in zip(dims, cut, strict=True):
        if dim is not None:
            letter = own[dim]
    found = []
    for own, dim in zip(dims, cut, strict=True):
        place = own.find(letter)
        found.append(dim if dim is not None else place if place >= 0 else None)
    return found


@answers.wrong("nothing is returned")
def nothing(dims, cut):
    by_letter(dims, cut)


answers.instead(PASSED)
