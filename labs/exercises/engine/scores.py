"""A learner's tries: scores.json in the folder of the course, beside progress.json.

noted("slow_wire", 61.2)    returns the scores of all tries, with this one, and saves them if a learner's notebook runs
read(course)                returns {"slow_wire": [44.1, 61.2], …}
"""

from __future__ import annotations

from pathlib import Path

from labs.kit.learners import progress

FILE = "scores.json"
Scores = dict[str, list[float]]


def noted(challenge: str, score: float) -> list[float]:
    """Save a score in the learner's course, if there is one; return the scores of all tries, this one last."""
    try:
        course = progress.learners_course()
        if course is None:
            return [score]
        with progress.alone_in(course):
            try:
                found = read(course)
            except ValueError:
                found = {}  # the file is broken: begin anew
            tries = [*found.get(challenge, []), round(score, 1)]
            progress.write(course, found | {challenge: tries}, FILE)
        return tries
    except OSError:
        return [score]  # the folder cannot be written to


def read(course: Path) -> Scores:
    """Return the saved scores; raise ValueError if the file is not one that `noted` has written."""
    return progress.read(course, FILE, lambda tries: isinstance(tries, list) and all(map(is_score, tries)))


def is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
