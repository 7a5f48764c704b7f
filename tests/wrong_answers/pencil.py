"""Wrong answers to the exercises on paper, and the right one that they spoil."""

from tests.wrong_answers.answers import wrong


def bubbles(p, m, v, **other):
    bubble = (p - 1) / m
    return {"GPipe": bubble, "1F1B": bubble, "interleaved": bubble / v, "zero bubble": bubble / 3} | other


@wrong("bubbles", "1F1B is given a smaller bubble than GPipe")
def half_by_1f1b(p, m, v):
    return bubbles(p, m, v, **{"1F1B": (p - 1) / m / 2})


@wrong("bubbles", "a fraction of the whole time, and not of the ideal one")
def of_the_whole(p, m, v):
    return {name: x / (1 + x) for name, x in bubbles(p, m, v).items()}


@wrong("bubbles", "interleaved has not been divided by v")
def interleaved_like_1f1b(p, m, v):
    return bubbles(p, m, v, interleaved=(p - 1) / m)


@wrong("bubbles", "p over m, and not p − 1")
def p_in_place_of_p_less_one(p, m, v):
    return {"GPipe": p / m, "1F1B": p / m, "interleaved": p / m / v, "zero bubble": p / m / 3}


@wrong("bubbles")
def no_bubble_at_all(p, m, v):
    return bubbles(p, m, v, **{"zero bubble": 0})


@wrong("bubbles")
def half_of_the_backward(p, m, v):
    return bubbles(p, m, v, **{"zero bubble": (p - 1) / m / 2})


@wrong("bubbles")
def of_the_interleaved(p, m, v):
    return bubbles(p, m, v, **{"zero bubble": (p - 1) / m / v / 3})


@wrong("bubbles")
def inverted(p, m, v):
    return {name: m / (p - 1) if p > 1 else 0 for name in bubbles(p, m, v)}
