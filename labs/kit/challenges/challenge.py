"""What a challenge is: a task, a judge, and the scores that are known.

    slow_wire = Challenge("slow_wire", "02", "The quickest sum on a slow wire", task="…", judge=judge,
                          floor=44.1, course=60.2, possible=70.3)
    slow_wire(fn)       an Answer: ✓ with the score and how the tries went, "not yet" for a stub, ✗ with the reason

judge(fn) returns a Judged, or raises Wrong: wrong numbers and unfair means score nothing.  Its jobs are run by `job`,
which asks each rank at the end whether names stand for something else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labs.kit import progress
from labs.kit.challenges import scores
from labs.kit.challenges.fair import altered, copied_from, replaced
from labs.kit.challenges.tries import drawn
from labs.kit.checks import launching
from labs.kit.checks.answer import Answer, Wrong, sendable, show
from labs.kit.launch import Results

Function = Callable[..., Any]
LIMIT = 120.0  # s of the processor for one job: a search that is too long is ended there
REPLACED = re.compile(r"failed: RuntimeError: (.* was put in another's place.*)")


@dataclass(frozen=True)
class Judged:
    """score: 100 × the bound / what was measured, or the other way round where more is better; told: of what."""

    score: float
    told: str

    @classmethod
    def of(cls, scores: Mapping[str, float]) -> Judged:
        """The mean of several cases, by what they are called."""
        return cls(
            sum(scores.values()) / len(scores), ", ".join(f"{name} {score:.0f}" for name, score in scores.items())
        )


@dataclass(frozen=True)
class Challenge:
    """floor: the points of a straightforward answer; course: of the course's own; possible: the most known so far."""

    name: str
    notebook: str  # its number
    title: str
    task: str
    judge: Callable[[Function], Judged]
    floor: float
    course: float
    possible: float

    def __call__(self, fn: Function) -> Answer:
        try:
            judged = self.judged(fn)
        except Wrong as wrong:
            if wrong.untouched:
                return Answer(self.name, None, f"the stub is untouched; the course's own answer has {self.course:.1f}")
            return replace(wrong.answer, check=self.name)
        tries = scores.noted(self.name, judged.score)
        picture = None if os.environ.get("LABS_PLOT") == "off" else drawn(self, tries)
        points = ": ".join([f"{judged.score:.1f} points of 100", *self.news(tries)])
        return Answer(self.name, True, f"{points}\n  {judged.told}\n  {self}", picture=picture)

    def news(self, tries: Sequence[float]) -> list[str]:
        """What the last try has beaten, in a clause, if it has."""
        *before, score = [round(each, 1) for each in tries]
        if score > self.possible:
            return ["above all that is known, so tell us"]
        best = ["your best so far"] if before and score > max(before) else []
        clause = " and ".join(best + ["above the course's own"] * (score > self.course))
        return [clause] if clause else []

    def judged(self, fn: Function) -> Judged:
        """Raises Wrong where it scores nothing."""
        if not callable(fn):
            raise Wrong(f"it was given {show(fn)} and not a function", "Did you call it, instead of handing it over?")
        sendable(fn)
        if name := replaced() or altered():
            raise Wrong(f"{name} is not what the course or PyTorch has there: restart the kernel, and try without it")
        course = progress.learners_course()
        if course and copied_from(course, self.notebook, fn):
            raise Wrong("this is the course's own answer, which scores nothing for you", "What would you change in it?")
        return self.judge(fn)

    def __str__(self) -> str:
        known = f"straightforward {self.floor:.1f}, the course's own {self.course:.1f}"
        return f"{known}, known to be possible {self.possible:.1f}, the bound 100"


def job(body: Callable[..., Any], *args: Any, ranks: int, record: str | None = "communication") -> Results:
    """A check's job, with time for a function that searches."""
    try:
        return launching.job(fairly, body, *args, ranks=ranks, record=record, seconds=LIMIT)
    except Wrong as wrong:
        if unfair := REPLACED.search(wrong.answer.text):
            raise Wrong(unfair[1]) from None
        if wrong.answer.mistake == launching.NEVER_ENDS:
            raise Wrong(
                f"it took longer than {LIMIT:g} s of the processor\n{wrong.answer.text}",
                "Does it search for that long, or is there a loop without an end?",
            ) from None
        raise


def fairly(body: Callable[..., Any], *args: Any) -> Any:
    """On a rank, also where it fails: a name that stands for something else may be why."""
    try:
        return body(*args)
    finally:
        if name := replaced():
            raise RuntimeError(f"{name} was put in another's place, so nobody can tell what was sent or held") from None
