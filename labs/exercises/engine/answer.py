"""The answer of a check, which is one of three.

    ok = True     ✓ what was measured, beside the least possible
    ok = None     not yet: the stub is untouched, and the notebook goes on with the course's own version
    ok = False    ✗ the mistake by its name; what differs, where; one question that leads on

A check always returns an Answer and never raises, whatever the learner's function does.  An Answer is true when `ok` is
True.

A mistake is a row of a table.  The rows are tried in order, and the first row that matches gives the answer.
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

from labs.kit.learners import progress
from labs.kit.ranks.payload import pickled


@dataclass(frozen=True, repr=False)
class Answer:
    """A check's verdict on a learner's function.

    ok: True, False, or None for "not yet".
    mistake: the name of the mistake, or "".
    seed: the seed with which the check draws the same inputs again.
    picture: a drawing that the notebook shows below the answer.
    """

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
    """A row of a table: the name of a mistake, the question that leads on, and how the mistake is recognised.

    name: "" for a rejection without a name.
    question: "" for the exercise's own question.
    matches: `matches(seen)` returns a sentence about what was seen, or True if there is nothing to add; anything falsy
        if this is not the mistake.
    symptom: what a teacher sees who looks over the learner's shoulder; tools/teaching.py prints the rows that have one.
    """

    name: str
    question: str
    matches: Callable[[Any], str | bool | None]
    symptom: str = ""


NOT_DONE = "not done in time"  # nobody's mistake: a busy machine takes longer


class Wrong(Exception):
    """The exception that a judge raises at the first thing that is wrong; `answer` is its verdict."""

    def __init__(self, text: str, question: str = "", mistake: str = "", raised: bool = False) -> None:
        super().__init__(text)
        self.raised = raised  # whether the learner's own function raised the error
        self.answer = Answer("", None if mistake == NOT_DONE else False, text, question, mistake)

    @property
    def untouched(self) -> bool:
        return self.answer.text == "untouched"

    def with_name(self, mistake: str) -> Wrong:
        """Return this verdict, renamed to `mistake`: the name says that only this case is wrong.

        An empty name changes nothing; nor do the mistakes in NOT_ONLY_HERE lose their own names.
        """
        a = self.answer
        keep = not mistake or self.untouched or a.mistake in NOT_ONLY_HERE
        return self if keep else Wrong(a.text, a.question, mistake, self.raised)

    def with_row(self, mistakes: Iterable[Mistake]) -> Wrong:
        """Return this verdict with the name and question of the first row that matches the text of the raised error.

        The verdict stays as it is if no row matches, or if the learner's function raised nothing.
        """
        found = first_fit(mistakes, self.answer.text) if self.raised else None
        return Wrong(self.answer.text, found[0].question, found[0].name, raised=True) if found else self

    def with_questions(self, questions: Mapping[str, str]) -> Wrong:
        """Return this verdict with the exercise's own question, if it has one for this mistake: `{name: question}`."""
        a = self.answer
        question = a.question if self.raised else questions.get(a.mistake, a.question)
        return Wrong(a.text, question, a.mistake, self.raised)


LUCK = ("a receive that nobody waited for", "a send that nobody waited for", "changed while being sent")
NOT_ONLY_HERE = (*LUCK, "something is left behind", "far too slow", "kept out of torch's sight", NOT_DONE)


def says(pattern: str) -> Callable[[str], bool]:
    """Return a row's test: whether the text of an error contains the pattern."""
    return lambda text: bool(re.search(pattern, text))


def first_fit(mistakes: Iterable[Mistake], seen: Any) -> tuple[Mistake, str] | None:
    """Return the first row that matches and its sentence, or None if no row matches."""
    for mistake in mistakes:
        if sentence := mistake.matches(seen):
            return mistake, "" if sentence is True else str(sentence)
    return None


def first(sentences: Iterable[str]) -> str | None:
    """Return the first of the sentences, or None if there is none: a row matches if any of many things is wrong."""
    return next(iter(sentences), None)


def refuse(mistakes: Iterable[Mistake], seen: Any, where: str, question: str = "") -> None:
    """Raise Wrong for the first row that matches, with `where` before its sentence.

    question: the exercise's own question, for rows that have none.
    """
    if found := first_fit(mistakes, seen):
        mistake, sentence = found
        raise Wrong((where + sentence).rstrip(), mistake.question or question, mistake.name)


def answered(judge: Callable[..., str]) -> Callable[..., Answer]:
    """Return the check that calls `judge(*functions, seed)`, which returns the line of success or raises Wrong."""

    @functools.wraps(judge)
    def check(*functions: Callable[..., Any], seed: int | None = None) -> Answer:
        answer = verdict(*functions, seed=random.SystemRandom().randrange(10**6) if seed is None else seed)
        progress.noted(answer.check, answer.ok, answer.mistake)
        return answer

    def verdict(*functions: Callable[..., Any], seed: int) -> Answer:
        try:
            for fn in functions:
                if not callable(fn):
                    raise Wrong(
                        f"it was given {show(fn)} and not a function",
                        f"Did you call your function, instead of handing it over: check.{judge.__name__}(my_function)?",
                    )
                sendable(fn)
            return Answer(judge.__name__, True, judge(*functions, seed=seed))
        except Wrong as wrong:
            if wrong.untouched:
                return Answer(judge.__name__, None, "the stub is untouched; the notebook goes on with the course's own")
            return replace(wrong.answer, check=judge.__name__, seed=seed)

    return check


def sendable(fn: Callable[..., Any]) -> None:
    """Raise Wrong if the function cannot be pickled, and so cannot be sent to the ranks."""
    try:
        pickled(fn, (), {})
    except TypeError as error:
        raise Wrong(str(error), "Which variable from outside does the function use?") from None


def show(value: Any) -> str:
    """Return a few words for a value of the learner's: "None", "a tensor of shape (3,) and dtype float32", "a list"."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def instead(found: Tensor, expected: Tensor) -> str:
    """Return a phrase with the found and the expected number, with as many digits as it takes to tell them apart."""
    for digits in (6, 17):
        one, other = (f"{x.item():.{digits}g}" if x.is_floating_point() else str(x.item()) for x in (found, expected))
        if one != other:
            break
    return f"{one}, and not {other}"


def predict(
    question: str, guess: float | None, answer: float, unit: str = "", tolerance: float = 0.05, reason: str = ""
) -> Answer:
    """Return the verdict on a guess that was made before the measurement.

    guess: right within the relative `tolerance`; None, or ..., is "not yet", and the text does not name the answer.
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
