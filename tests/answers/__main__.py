"""The published figures: for each exercise, how its check judges the answers, on inputs that are drawn anew."""

import sys

from labs.kit.ranks import forkserver_preload
from labs.kit.ranks.team import FORKSERVER
from tests.answers import Answer, archived, archived_modules, exercises, tried

LINE = "{:28} {:4} of {:4} {:9} {:9} of {:3}   {}"


def row(answers: list[Answer]) -> tuple[list[int], list[str]]:
    """Return [wrong ones caught, wrong ones, caught by name, right ones accepted, right ones], and a list of errors."""
    found = tried(answers, seed=None)
    wrong = [(answer, said) for answer, said in found if not answer.right]
    right = [(answer, said) for answer, said in found if answer.right]
    caught = [said for _, said in wrong if said.ok is False]
    figures = [len(caught), len(wrong), sum(bool(said.mistake) for said in caught)]
    figures += [sum(said.ok is True for _, said in right), len(right)]
    return figures, [f"{answer.name}: {str(said).splitlines()[0]}" for answer, said in found if not answer.met(said)]


known = exercises() | archived()
FORKSERVER.stop()  # it started with the first import, and ranks need the source of the replaced functions, too
forkserver_preload.COURSE += archived_modules()
total = {True: [0] * 5, False: [0] * 5}
print(f"{'':31} wrong, caught   by name   right, accepted")
for name in sys.argv[1:] or known:
    for blind in (False, True):
        if answers := [answer for answer in known[name].answers if answer.blind is blind]:
            figures, notes = row(answers)
            total[blind] = [one + more for one, more in zip(total[blind], figures, strict=True)]
            print(LINE.format(name + ", blind" * blind, *figures, "; ".join(notes)), flush=True)
for blind, figures in total.items():
    print(LINE.format("all" + ", blind" * blind, *figures, ""))
