"""Answers to pass_on (13): which dim of each tensor is cut, once one letter is."""

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


@answers.right
def in_a_tuple(dims, cut):
    letter = next(own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None)
    return tuple(own.index(letter) if letter in own else None for own in dims)


@answers.wrong("only from inputs to the result")
def forward(dims, cut):
    return [*cut[:-1], by_letter(dims, cut)[-1]]


@answers.wrong("only to inputs")
def backward(dims, cut):
    return [*by_letter(dims, cut)[:-1], cut[-1]]


@answers.wrong("by the number of the dim")
def the_same_number(dims, cut):
    number = next(dim for dim in cut if dim is not None)
    return [number if dim is None and number < len(own) else dim for own, dim in zip(dims, cut, strict=True)]


@answers.wrong("cut, though it lacks the letter")
def never_none(dims, cut):
    letter = next(own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None)
    return [max(0, own.find(letter)) for own in dims]


@answers.wrong("letters, and not numbers of dims")
def letters(dims, cut):
    return [None if dim is None else own[dim] for own, dim in zip(dims, by_letter(dims, cut), strict=True)]


@answers.wrong("")
def minus_one(dims, cut):
    letter = next(own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None)
    return [own.find(letter) for own in dims]


@answers.wrong("nothing is returned")
def nothing(dims, cut):
    by_letter(dims, cut)


@answers.wrong("")
def changes_what_it_is_given(dims, cut):
    cut[:] = by_letter(dims, cut)
    return cut
