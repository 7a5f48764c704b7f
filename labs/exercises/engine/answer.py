"""What a check answers, in one of three ways.

    ok = True     ✓ what was measured, beside the least possible
    ok = None     not yet: the stub is untouched, and the notebook goes on with the course's own version
    ok = False    ✗ the mistake by its name; what differs, where; one question that leads on

Whatever the learner's function does ends in an Answer and never in an exception.  An Answer is true when `ok` is True.

A mistake is a row of its family's table.  The rows are tried in order, and the first that fits gives the answer.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from torch import Tensor

from labs.kit import progress
from labs.kit.ranks.payload import pickled


@dataclass(frozen=True, repr=False)
class Answer:
    """`ok`: True, False, or None for not yet.  `mistake`: its name, where it has one; `picture`: of what is wrong."""

    check: str
    ok: bool | None
    text: str
    question: str = ""
    mistake: str = ""
    seed: int | None = None
    picture: Any = None

    def __bool__(self) -> bool:
        return self.ok is True

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        if self.ok:
            return [f"✓ {self.check}: {self.text}"]
        wrong = self.ok is False
        first, *rest = [self.mistake, *self.text.splitlines()] if self.mistake and wrong else self.text.splitlines()
        lines = [f"✗ {self.check}: {first}" if wrong else f"not yet: {self.check} ({first})"]
        lines += [f"  {line}" for line in rest]
        lines += [f"  → {self.question}"] if self.question else []
        again = [f"  (for the same numbers again: seed={self.seed})"] if self.seed is not None and wrong else []
        return lines + again

    def _repr_html_(self) -> str:
        colour = {True: "#117733", None: "#57606A", False: "#882255"}[self.ok]
        first, *rest = map(escape, self.lines())
        return (
            f'<div style="border-left: 4px solid {colour}; padding-left: 0.8em; white-space: pre-wrap">'
            + "\n".join([f"<b>{first}</b>" if self.ok is False else first, *rest])
            + "</div>"
            + (self.picture.html if self.picture else "")
        )


@dataclass(frozen=True)
class Mistake:
    """A row: what is wrong, the question that leads on, and when it is this and no other.

    `fits(seen)` is a sentence on what was seen, or True where there is nothing to add; falsy where it does not fit.
    A name of "" is a rejection without a name, a question of "" the exercise's own.  `shows` is what a teacher sees
    who looks over the learner's shoulder: tools/teaching.py prints the rows that have it.
    """

    name: str
    question: str
    matches: Callable[[Any], str | bool | None]
    symptom: str = ""


NOT_DONE = "not done in time"  # which is nobody's mistake: a busy machine takes longer


class Wrong(Exception):
    """What a judge raises at the first thing that is not as it must be."""

    def __init__(self, text: str, question: str = "", mistake: str = "", raised: bool = False) -> None:
        super().__init__(text)
        self.raised = raised  # by the learner's own function
        self.answer = Answer("", None if mistake == NOT_DONE else False, text, question, mistake)

    @property
    def untouched(self) -> bool:
        return self.answer.text == "untouched"

    def also(self, mistake: str) -> Wrong:
        """The same by the name `mistake`: what is right elsewhere and wrong only here has its name from here."""
        a = self.answer
        keep = not mistake or self.untouched or a.mistake in NOT_ONLY_HERE
        return self if keep else Wrong(a.text, a.question, mistake, self.raised)

    def told_by(self, mistakes: Iterable[Mistake]) -> Wrong:
        """The same by the name of the first of these rows about an error, if it is one and they know it."""
        found = first_fit(mistakes, self.answer.text) if self.raised else None
        return Wrong(self.answer.text, found[0].question, found[0].name, raised=True) if found else self

    def asking(self, questions: Mapping[str, str]) -> Wrong:
        """The same, with the question that an exercise has in the place of the row's, by the mistake's name."""
        a = self.answer
        question = a.question if self.raised else questions.get(a.mistake, a.question)
        return Wrong(a.text, question, a.mistake, self.raised)


LUCK = ("a receive that nobody waited for", "a send that nobody waited for", "changed while being sent")
NOT_ONLY_HERE = (*LUCK, "something is left behind", "far too slow", "kept out of torch's sight", NOT_DONE)


def says(pattern: str) -> Callable[[str], bool]:
    """Of what is told of an error."""
    return lambda text: bool(re.search(pattern, text))


def first_fit(mistakes: Iterable[Mistake], seen: Any) -> tuple[Mistake, str] | None:
    """The first row that fits, and its sentence."""
    for mistake in mistakes:
        if sentence := mistake.matches(seen):
            return mistake, "" if sentence is True else str(sentence)
    return None


def first(sentences: Iterable[str]) -> str | None:
    """None where there is none: for what fits where anything of many is so."""
    return next(iter(sentences), None)


def refuse(mistakes: Iterable[Mistake], seen: Any, where: str, question: str = "") -> None:
    """Raise Wrong by the first row that fits; `where` stands before its sentence, `question` is the exercise's own."""
    if found := first_fit(mistakes, seen):
        mistake, sentence = found
        raise Wrong((where + sentence).rstrip(), mistake.question or question, mistake.name)


def answered(judge: Callable[..., str]) -> Callable[..., Answer]:
    """Make a check of `judge(*functions, seed)`, which returns the line of success or raises Wrong."""

    @functools.wraps(judge)
    def check(*functions: Callable[..., Any], seed: int | None = None) -> Answer:
        seed = random.SystemRandom().randrange(10**6) if seed is None else seed
        try:
            for fn in functions:
                if not callable(fn):
                    raise Wrong(
                        f"it was given {show(fn)} and not a function",
                        f"Did you call your function, instead of handing it over: check.{judge.__name__}(my_function)?",
                    )
                sendable(fn)
            answer = Answer(judge.__name__, True, judge(*functions, seed=seed))
            progress.passed(answer.check)
            return answer
        except Wrong as wrong:
            if wrong.untouched:
                return Answer(judge.__name__, None, "the stub is untouched; the notebook goes on with the course's own")
            return replace(wrong.answer, check=judge.__name__, seed=seed)

    return check


def sendable(fn: Callable[..., Any]) -> None:
    try:
        pickled(fn, (), {})
    except TypeError as error:
        raise Wrong(str(error), "Which variable from outside does the function use?") from None


def show(value: Any) -> str:
    """A value in a few words: "None", "a tensor of shape (3,) and dtype float32", "a list"."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def instead(found: Tensor, expected: Tensor) -> str:
    """Two numbers, with as many digits as it takes to tell them apart."""
    for digits in (6, 17):
        one, other = (f"{x.item():.{digits}g}" if x.is_floating_point() else str(x.item()) for x in (found, expected))
        if one != other:
            break
    return f"{one}, and not {other}"


def predict(
    question: str, guess: float | None, answer: float, unit: str = "", tolerance: float = 0.05, reason: str = ""
) -> Answer:
    """A guess made before the measurement: right within `tolerance` (relative); None is not yet.

    The text names the answer only once there is a guess.
    """
    unit = f" {unit}" if unit else ""
    if guess is None or guess is ...:
        return Answer("predict", None, f"{question} Type a number before you go on")
    try:
        near = math.isclose(float(guess), float(answer), rel_tol=tolerance, abs_tol=1e-12)
    except (TypeError, ValueError):
        return Answer("predict", False, f"{question} The guess is {show(guess)}: type a number")
    because = f" {reason}" if reason else ""
    found = f"{question} {number(answer)}{unit}."
    if near:
        return Answer("predict", True, found + because)
    return Answer("predict", False, f"{found} You said {number(guess)}{unit}.{because}")


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
