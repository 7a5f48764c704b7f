"""Exercises for paper: a function of a few numbers, judged by its result.

    @answered
    def bubble(fn, seed):
        sheets = [Sheet((ranks, m), expected=(ranks - 1) / m, words=f"{ranks} ranks, {m} micro-batches") for …]
        return on_paper(fn, sheets, MISTAKES, question="Who waits for whom at the start?")

    MISTAKES = (
        Mistake("the last rank does not wait", "How often …?", as_if(lambda ranks, m: ranks / m)),
        …
    )

The function is called twice on each sheet, in two processes.  It must change nothing in the process, and send nothing.
Numbers may differ in their last digits, and may be integers or floats of Python, NumPy or torch; lists and tuples are
the same, and dictionaries are compared by key.  The rows of the table are tried on the first wrong sheet, before the
three rows that all exercises share.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.answer import Mistake, Wrong, refuse, show
from labs.exercises.engine.around_a_call import AFTERMATH, Aftermath, Outcome
from labs.exercises.engine.learner_job import job, noted
from labs.kit.launch import Results
from labs.kit.record import mark

PROCESSES = 2
LARGEST = 400  # characters of an answer that are shown
LONG = 6  # items; a longer list is shown by its first item that differs
SENT = "sent, and not worked out"


@dataclass(frozen=True)
class Sheet:
    """One call: its arguments, the expected answer, and words that name the call.

    secret: whether the expected answer is never shown.
    only: the mistake's name if this sheet alone is wrong.
    fills: whether the function may write into its arguments.
    """

    arguments: tuple[Any, ...]
    expected: Any
    words: str
    _: KW_ONLY
    secret: bool = False
    only: str = ""
    fills: bool = False

    def read(self, returned: Any) -> Any:
        """Return the part of a learner's result that is compared, in plain numbers and words."""
        return plain(returned)

    def __str__(self) -> str:
        return self.words


@dataclass
class Written(Outcome):
    """The results of two calls on one sheet, and whether the first has changed its arguments."""

    returned: Any = None
    again: Any = None
    changed: bool = False


@dataclass(frozen=True)
class WrongSheet:
    """The first sheet that has a wrong answer, with the answers received for all sheets."""

    sheet: Sheet
    received: Any
    written: list[tuple[Sheet, Any]]

    @property
    def description(self) -> str:
        if not self.sheet.secret:
            return first_that_differs(self.received, self.sheet.expected)
        if form(self.received) != form(self.sheet.expected):
            return f"it says {cut(self.received)}"
        found, expected = plain(self.received), plain(self.sheet.expected)
        return next(f"for {key!r} it says {cut(found[key])}" for key in expected if not same(found[key], expected[key]))


def on_paper(fn: Callable[..., Any], sheets: Sequence[Sheet], mistakes: Sequence[Mistake], question: str) -> str:
    """Return the line of success; raise Wrong for the first sheet that is wrong."""
    results = job(all_sheets, fn, list(sheets), ranks=PROCESSES)
    for outcomes in results:
        judge(sheets, outcomes, mistakes, question)
    require_nothing_sent(results)
    return f"right on all {len(sheets)} examples" if len(sheets) > 1 else "right"


def each_judged(fn: Callable[..., Any], sheets: Sequence[Sheet], judged: Callable[[Any, Any], Any]) -> list[Any]:
    """Return `judged(sheet, answer)` for each sheet, if many answers are right; `judged` raises Wrong for others."""
    try:
        results = job(all_sheets, fn, list(sheets), ranks=PROCESSES)
    except Wrong as wrong:
        at = next((at for at, sheet in enumerate(sheets) if f"(with {sheet})" in wrong.answer.text), 0)
        if at:  # a wrong answer on an earlier sheet tells more than an error on a later one
            each_judged(fn, sheets[:at], judged)
        raise wrong.with_name(sheets[at].only) from None
    found = []
    for sheet, outcome, other in zip(sheets, *results, strict=True):
        found.append(judged(sheet, outcome.returned))
        require_nothing_kept(sheet, outcome, other.returned, other.again)
    require_nothing_sent(results)
    return found


def judge(sheets: Sequence[Sheet], outcomes: Sequence[Written], mistakes: Sequence[Mistake], question: str) -> None:
    """Raise Wrong for the first sheet that is wrong, or on which the function has left something behind."""
    written = [(sheet, outcome.returned) for sheet, outcome in zip(sheets, outcomes, strict=True)]
    for sheet, outcome in zip(sheets, outcomes, strict=True):
        try:
            if not same(outcome.returned, sheet.expected):
                refuse((*mistakes, *EVERYWHERE), WrongSheet(sheet, outcome.returned, written), f"{sheet}: ", question)
            if outcome.changed and not sheet.fills:
                raise Wrong(f"{sheet}: what it was given has changed afterwards", "Whose list is that?")
            require_nothing_kept(sheet, outcome)
        except Wrong as wrong:
            raise wrong.with_name(sheet.only) from None


def require_nothing_kept(sheet: Sheet, outcome: Written, *others: Any) -> None:
    """Raise Wrong if the function keeps something from call to call, or leaves something behind in the process.

    others: results of another process for the same sheet.
    """
    for again in (outcome.again, *others):
        if again != outcome.returned and not same(again, outcome.returned):
            raise Wrong(f"{sheet}: a second call says {cut(again)}", "What is kept between them?", "not the same twice")
    refuse(AFTERMATH, outcome, f"{sheet}: afterwards ")


def require_nothing_sent(results: Results) -> None:
    """Raise Wrong if one of the two processes has sent a message."""
    if results.recording.events:
        raise Wrong(f"it calls {results.recording.events[0].op}", "What would the others tell you?", SENT)


@dataclass(frozen=True)
class AsIf:
    """A row's test: whether the learner's function gives the answers of one of these other functions, on every sheet.

    part: the name of the part of the answer that is compared, or "" for all of it.
    """

    others: tuple[Callable[..., Any], ...]
    part: str = ""

    def __call__(self, seen: WrongSheet) -> str | None:
        found = [self.part_of(found) for _, found in seen.written]
        for other in self.others:
            if all(same(each, other(*sheet.arguments)) for each, (sheet, _) in zip(found, seen.written, strict=True)):
                return describe_part(seen, self.part) if self.part else seen.description
        return None

    def part_of(self, found: Any) -> Any:
        return (found.get(self.part) if isinstance(found, dict) else None) if self.part else found


def as_if(*others: Callable[..., Any], **options: Any) -> AsIf:
    """Return a row's test: whether the learner computed one of these other functions, called with these options."""
    return AsIf(tuple(partial(other, **options) for other in others) if options else others)


def part_as_if(name: str, *others: Callable[..., Any]) -> AsIf:
    """Return a row's test: whether the part of the answer with this name is that of one of these other functions."""
    return AsIf(others, name)


def part_is(
    name: str, test: Callable[[Any, Any], bool] = lambda found, expected: True
) -> Callable[[WrongSheet], str | None]:
    """Return a row's test: whether the answer's part with this name is wrong, and passes `test(received, expected)`."""

    def matches(seen: WrongSheet) -> str | None:
        found = seen.received.get(name) if isinstance(seen.received, dict) else None
        wrong = found is not None and not same(found, seen.sheet.expected[name])
        return describe_part(seen, name) if wrong and test(found, seen.sheet.expected[name]) else None

    return matches


def describe_part(seen: WrongSheet, name: str) -> str:
    return f"{name!r} is {cut(seen.received[name])}, and not {cut(seen.sheet.expected[name])}"


def answer_is(test: Callable[[Any, Any], bool]) -> Callable[[WrongSheet], str | None]:
    """Return a row's test: whether the wrong answer passes `test(received, expected)`."""
    return lambda seen: seen.description if test(seen.received, seen.sheet.expected) else None


# fmt: off
EVERYWHERE = (
    Mistake("nothing is returned", "What does the caller want to know?",
            answer_is(lambda found, expected: found is None)),
    Mistake("a different kind of answer", "What does the docstring say is returned?",
            answer_is(lambda found, expected: form(found) != form(expected))),
    Mistake("", "", answer_is(lambda found, expected: True)),
)
# fmt: on


# ---- on a process ----------------------------------------------------------------------------------------


def all_sheets(fn: Callable[..., Any], sheets: list[Sheet]) -> list[Written]:
    """Return the answers for all sheets.

    Process 1 goes from the last sheet to the first, so an answer that depends on earlier sheets differs there.
    """
    mark("step")
    if dist.get_rank() == 0:
        return [one_sheet(fn, sheet) for sheet in sheets]
    return [one_sheet_or_error(fn, sheet) for sheet in reversed(sheets)][::-1]


def one_sheet_or_error(fn: Callable[..., Any], sheet: Sheet) -> Written:
    """Return the answers for a sheet, or the error in words; in process 0, raise an error that both processes have."""
    try:
        return one_sheet(fn, sheet)
    except Exception as error:
        return Written(returned=f"{type(error).__name__}: {error}")


def one_sheet(fn: Callable[..., Any], sheet: Sheet) -> Written:
    """Return the answers of two calls of the learner's function on one sheet."""
    given = copy.deepcopy(sheet.arguments)
    with Aftermath() as aftermath:
        returned = noted(sheet, written_on, sheet, fn, given)
    written = Written(returned=returned, changed=sheet.read(given) != sheet.read(sheet.arguments))
    written.again = noted(sheet, written_on, sheet, fn, copy.deepcopy(sheet.arguments))
    aftermath.write_to(written)
    return written


def written_on(sheet: Sheet, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return sheet.read(fn(*arguments))


def plain(value: Any) -> Any:
    """Return a value as numbers and strings, and lists and dictionaries of them; anything else becomes words."""
    if hasattr(value, "tolist"):  # torch or NumPy
        return value.detach().tolist() if isinstance(value, Tensor) else value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, Real | str) else show(value)


# ---- when two answers are the same -----------------------------------------------------------------------


def same(found: Any, expected: Any) -> bool:
    """Return whether two answers are the same but for the last digits of numbers."""
    found, expected = plain(found), plain(expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if is_number(expected) and is_number(found):
        return math.isclose(found, expected, rel_tol=1e-9, abs_tol=0 if expected else 1e-12)
    return type(found) is type(expected) and found == expected


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def form(value: Any) -> Any:
    """Return the form of an answer: everything but its numbers and lengths."""
    value = plain(value)
    if isinstance(value, list):
        return "list"
    return set(value) if isinstance(value, dict) else "number" if is_number(value) else type(value)


def first_that_differs(found: Any, expected: Any) -> str:
    """Return a phrase with both answers; for a long list, only with the first item that differs and the lengths."""
    found, expected = plain(found), plain(expected)
    if not (isinstance(found, list) and isinstance(expected, list) and len(expected) > LONG):
        return f"it says {cut(found)}, and not {cut(expected)}"
    at = next(
        i for i in range(len(expected) + 1) if i >= min(len(found), len(expected)) or not same(found[i], expected[i])
    )
    items = [cut(each[at]) if at < len(each) else "missing" for each in (found, expected)]
    where = (
        f"item {at} is {items[0]}, and not {items[1]}" if at < len(expected) else f"item {at}, {items[0]}, is not due"
    )
    return where + f"; it has {len(found)} items, and not {len(expected)}" * (len(found) != len(expected))


def cut(value: Any) -> str:
    """Return a value in words, cut off after LARGEST characters."""
    text = f"{value:,}" if type(value) is int else repr(value)
    return text if len(text) <= LARGEST else f"{text[:LARGEST]} …"
