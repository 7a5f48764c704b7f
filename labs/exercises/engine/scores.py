"""A learner's tries: scores.json in the folder of the course, beside progress.json.

noted("slow_wire", 61.2)    the scores of all tries, with this one; kept where a learner's notebook runs
read(course)                {"slow_wire": [44.1, 61.2], …}
"""

from __future__ import annotations

from pathlib import Path

from labs.kit import progress

FILE = "scores.json"
Scores = dict[str, list[float]]


def noted(challenge: str, score: float) -> list[float]:
    try:
        course = progress.learners_course()
        if course is None:
            return [score]
        with progress.alone_in(course):
            try:
                found = read(course)
            except ValueError:
                found = {}  # broken: it begins anew
            tries = [*found.get(challenge, []), round(score, 1)]
            progress.write(course, found | {challenge: tries}, FILE)
        return tries
    except OSError:
        return [score]  # in a folder that cannot be written to


def read(course: Path) -> Scores:
    """The scores there.  Raises ValueError where the file is not what `noted` has written."""
    return progress.read(course, FILE, lambda tries: isinstance(tries, list) and all(map(is_score, tries)))


def is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
