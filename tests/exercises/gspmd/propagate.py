"""Answers to propagate (13): layouts that pass from operation to operation until nothing is new."""

from labs.exercises.gspmd.propagate import CASES, MISTAKES
from tests.answers import Exercise, from_notebook

answers = Exercise("propagate")


@answers.right(line=f"right on all {len(CASES)} examples")
def always_from_the_first(operations, cut, sizes, pass_on, meet):
    learned = True
    while learned:
        learned = False
        for dims, names in operations:
            here = [cut.get(name) for name in names]
            if here.count(None) == len(here):
                continue
            letter = meet(dims, here, [sizes[name] for name in names])
            for name, own in zip(names, dims, strict=True):
                if name not in cut and letter in own:
                    cut[name] = own.index(letter)
                    learned = True
    return cut


@answers.right
def those_that_are_touched(operations, cut, sizes, pass_on, meet):
    found, waiting = dict(cut), list(reversed(operations))
    while waiting:
        dims, names = waiting.pop()
        here = [found.get(name) for name in names]
        if set(here) == {None}:
            continue
        letter = meet(dims, here, [sizes[name] for name in names])
        pairs = zip(dims, here, strict=True)
        after = pass_on(dims, [dim if dim is not None and own[dim] == letter else None for own, dim in pairs])
        news = {name: dim for name, dim in zip(names, after, strict=True) if dim is not None and name not in found}
        found |= news
        waiting += [each for each in operations if news.keys() & set(each[1])]
    return found


there_and_back = answers.right(from_notebook("propagate"))


@answers.wrong("nothing is returned")
def nothing(operations, cut, sizes, pass_on, meet):
    always_from_the_first(operations, cut, sizes, pass_on, meet)


answers.instead(MISTAKES)
