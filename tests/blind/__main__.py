"""The published figures: for each exercise, what its check says of answers that were written blind."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

import tests.blind
from labs.kit.checks.answer import Answer
from labs.kit.checks.launching import FAILURES
from tests.answers.together import together

ENDS = {mistake.name for mistake in FAILURES if mistake.name}  # of a job, and of all answers in it


def said(check: str, answers: Sequence[tuple[Callable, ...]]) -> list[Answer]:
    """What the check says; an answer in whose job something ended or hung is tried again alone."""
    found = together([(check, functions, False) for functions in answers])
    for place, functions in enumerate(answers):
        if found[place].mistake in ENDS:
            found[place] = together([(check, functions, True)])[0]
    return found


def functions_of(answer: Callable | tuple[Callable, ...]) -> tuple[Callable, ...]:
    return answer if isinstance(answer, tuple) else (answer,)


def tried(check: str, wrong: Sequence, right: Sequence) -> tuple[list[int], str]:
    """[caught, wrong ones, named, accepted, right ones], and the names of those that the check misjudges."""
    told = [said(check, [functions_of(answer) for _, answer in listed]) for listed in (wrong, right)]
    past = [name for (name, _), answer in zip(wrong, told[0], strict=True) if answer.ok is not False]
    refused = [name for (name, _), answer in zip(right, told[1], strict=True) if answer.ok is not True]
    named = sum(answer.ok is False and bool(answer.mistake) for answer in told[0])
    notes = [f"{what}: {', '.join(names)}" for what, names in (("let past", past), ("refused", refused)) if names]
    return [len(wrong) - len(past), len(wrong), named, len(right) - len(refused), len(right)], "; ".join(notes)


LINE = "{:15} {:20} {:4} of {:4} {:9} {:9} of {:3}  {}"
files = sys.argv[1:] or [module.name for module in iter_modules(tests.blind.__path__) if module.name != "__main__"]
total = [0] * 5
print(f"{'':36} wrong, caught   by name   right, accepted")
for file in files:
    module = import_module(f"tests.blind.{file}")
    for check, wrong in module.WRONG.items():
        row, notes = tried(check, wrong, module.RIGHT[check])
        total = [one + more for one, more in zip(total, row, strict=True)]
        print(LINE.format(file, check, *row, notes), flush=True)
print(LINE.format("all", "", *total, ""))
