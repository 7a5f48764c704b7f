"""A challenge: a task, a judge, and the scores that are known.

    slow_wire = Challenge("slow_wire", "02", "The quickest sum on a slow wire", task="…", judge=judge,
                          floor=44.1, course=60.2, possible=70.3)
    slow_wire(fn)       an Answer: ✓ with the score and a drawing of the tries, "not yet" for a stub, ✗ with the reason

`judge(fn)` returns a Judged, or raises Wrong for an answer that scores nothing; its jobs are run by `job`.  A score
stays on its learner's machine, so nothing here looks for ways to forge one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from labs.exercises.engine import learner_job, scores
from labs.exercises.engine.answer import Answer, Wrong, sendable, show
from labs.kit.launch import Results

Function = Callable[..., Any]
LIMIT = 120.0  # s of processor time for one job, after which a search is stopped


@dataclass(frozen=True)
class Judged:
    """A judge's verdict on an answer that is right.

    score: 100 × the bound / the measured value, or 100 × the measured value / the bound where more is better.
    details: a line that names the parts of the score.
    """

    score: float
    details: str

    @classmethod
    def of(cls, scores: Mapping[str, float]) -> Judged:
        """Return the verdict whose score is the mean of several cases' scores, {name: score}."""
        return cls(
            sum(scores.values()) / len(scores), ", ".join(f"{name} {score:.0f}" for name, score in scores.items())
        )


@dataclass(frozen=True)
class Challenge:
    """An open task with a judge, which a learner calls with an answer.

    floor: the points of a straightforward answer.
    course: the points of the course's own answer.
    possible: the most points known so far.
    cases: what is scored, for the notebook's table.
    bound: the least that a case can take, as the notebook derives it.
    measured: what an answer takes in a case, to try it without the judge.
    """

    name: str
    notebook: str  # the number of its notebook
    title: str
    task: str
    judge: Callable[[Function], Judged]
    floor: float
    course: float
    possible: float
    cases: Any = ()
    bound: Callable[..., Any] | None = None
    measured: Callable[..., Any] | None = None

    def __call__(self, fn: Function) -> Answer:
        try:
            judged = self.judged(fn)
        except Wrong as wrong:
            if wrong.untouched:
                return Answer(self.name, None, f"the stub is untouched; the course's own answer has {self.course:.1f}")
            return replace(wrong.answer, check=self.name)
        tries = scores.noted(self.name, judged.score)
        picture = (
            None
            if os.environ.get("LABS_PLOT") == "off"
            else scores.draw(self.title, str(self), self.course, self.possible, tries)
        )
        points = ": ".join([f"{judged.score:.1f} points of 100", *self.news(tries)])
        return Answer(self.name, True, f"{points}\n  {judged.details}\n  {self}", picture=picture)

    def news(self, tries: Sequence[float]) -> list[str]:
        """Return a clause that names the scores that the last try has beaten, or nothing if it has beaten none."""
        *before, score = [round(each, 1) for each in tries]
        if score > self.possible:
            return ["above all that is known, so tell us"]
        best = ["your best so far"] if before and score > max(before) else []
        clause = " and ".join(best + ["above the course's own"] * (score > self.course))
        return [clause] if clause else []

    def judged(self, fn: Function) -> Judged:
        """Judge an answer; raise Wrong if it scores nothing."""
        if not callable(fn):
            raise Wrong(f"it was given {show(fn)} and not a function", "Did you call it, instead of handing it over?")
        sendable(fn)
        return self.judge(fn)

    def __str__(self) -> str:
        known = f"straightforward {self.floor:.1f}, the course's own {self.course:.1f}"
        return f"{known}, known to be possible {self.possible:.1f}, the bound 100"


def job(body: Callable[..., Any], *args: Any, ranks: int, record: str | None = "communication") -> Results:
    """Run a job as a check does, with enough time for a function that searches."""
    try:
        return learner_job.job(body, *args, ranks=ranks, record=record, seconds=LIMIT)
    except Wrong as wrong:
        if wrong.answer.mistake == learner_job.NEVER_ENDS:
            raise Wrong(
                f"it took longer than {LIMIT:g} s of processor time\n{wrong.answer.text}",
                "Does it search for that long, or is there a loop without an end?",
            ) from None
        raise


def chance() -> torch.Generator:
    """Return a generator without a known seed: the inputs of a rank are drawn on the rank, and cannot be foretold."""
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))
