"""What a challenge is: a task, a judge, and the scores that are known.

    slow_wire = Challenge("slow_wire", "02", "The quickest sum on a slow wire", task="…", judge=judge,
                          floor=44.1, course=60.2, possible=70.3)
    slow_wire(fn)       an Answer: ✓ with the score and how the tries went, "not yet" for a stub, ✗ with the reason

judge(fn) returns a Judged, or raises Wrong: wrong numbers and unfair means score nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from labs.kit import progress
from labs.kit.challenges import scores
from labs.kit.challenges.fair import copied_from, replaced
from labs.kit.challenges.tries import drawn
from labs.kit.checks.answer import Answer, Wrong, sendable, show

Function = Callable[..., Any]


@dataclass(frozen=True)
class Judged:
    """score: 100 × the bound / what was measured, or the other way round where more is better; told: of what."""

    score: float
    told: str


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
        return Answer(self.name, True, f"{judged.score:.1f} points of 100\n  {judged.told}\n  {self}", picture=picture)

    def judged(self, fn: Function) -> Judged:
        """Raises Wrong where it scores nothing."""
        if not callable(fn):
            raise Wrong(f"it was given {show(fn)} and not a function", "Did you call it, instead of handing it over?")
        sendable(fn)
        if name := replaced():
            raise Wrong(f"{name} is not what the course or PyTorch has there: restart the kernel, and try without it")
        course = progress.learners_course()
        if course and copied_from(course, self.notebook, fn):
            raise Wrong("this is the course's own answer, which scores nothing for you", "What would you change in it?")
        return self.judge(fn)

    def __str__(self) -> str:
        known = f"straightforward {self.floor:.1f}, the course's own {self.course:.1f}"
        return f"{known}, known to be possible {self.possible:.1f}, the bound 100"
