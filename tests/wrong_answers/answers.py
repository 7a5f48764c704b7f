"""The list of wrong answers, and how they are tried."""

from collections.abc import Callable
from typing import NamedTuple

from labs.kit.checks.answer import Answer
from tests.answers.together import SEED, together


class WrongAnswer(NamedTuple):
    """`alone`: it ends or hangs its job, or leaves something behind; `listed`: tried in every run of the tests."""

    check: str
    mistake: str
    functions: tuple[Callable, ...]
    alone: bool
    listed: bool

    def caught(self, answer: Answer) -> bool:
        """Rejected, with a question, by its name where it has one."""
        named = not self.mistake or str(answer).startswith(f"✗ {self.check}: {self.mistake}\n")
        return answer.ok is False and named and bool(answer.question and answer.text) and answer.seed is not None


ANSWERS: list[WrongAnswer] = []


def wrong(check, mistake="", *, functions=None, alone=False, listed=True):
    """`functions(fn)`: what the check is given, where that is not fn alone."""

    def note(fn):
        ANSWERS.append(WrongAnswer(check, mistake, functions(fn) if functions else (fn,), alone, listed))
        return fn

    return note


def tried(check: str, listed: bool = True, seed: int | None = SEED) -> list[tuple[WrongAnswer, Answer]]:
    """What the check says of each of its wrong answers, those of the list or the others."""
    answers = [answer for answer in ANSWERS if answer.check == check and answer.listed is listed]
    said = together([(check, answer.functions, answer.alone) for answer in answers], seed)
    return list(zip(answers, said, strict=True))


def let_past(check: str, listed: bool = True, seed: int | None = SEED) -> str:
    """Those that were not caught, with what was said of them."""
    missed = [(wrong, answer) for wrong, answer in tried(check, listed, seed) if not wrong.caught(answer)]
    return "\n\n".join(
        f"{'-'.join(fn.__name__ for fn in wrong.functions)}: wanted {wrong.mistake!r}\n{answer}"
        for wrong, answer in missed
    )
