"""Answers to meet (13): of two letters that are cut along the same axis, the one that an operation follows."""

from labs.exercises.gspmd.meet import MET
from tests.answers import Exercise

answers = Exercise("meet")


@answers.right(line="right on all 11 examples")
def least_moved(dims, cut, sizes):
    known = [(own[dim], size) for own, dim, size in zip(dims, cut, sizes, strict=True) if dim is not None]
    return min((letter for letter, _ in known), key=lambda letter: sum(s for other, s in known if other != letter))


@answers.right
def most_stays(dims, cut, sizes):
    stays = {}
    for own, dim, size in zip(dims, cut, sizes, strict=True):
        if dim is not None:
            stays[own[dim]] = stays.get(own[dim], 0) + size
    return max(stays, key=stays.get)


answers.spoil(most_stays, "", {"return max(stays, key=stays.get)": "return max(stays, key=stays.get).upper()"})


@answers.wrong("of equals, not the first", blind=True)
def by_the_alphabet(dims, cut, sizes):
    letters = {own[at] for own, at in zip(dims, cut, strict=True) if at is not None}

    def moves(letter):
        known = zip(dims, cut, sizes, strict=True)
        return sum(size for own, at, size in known if at is not None and own[at] != letter)

    return min(sorted(letters), key=moves)


answers.instead(MET)
