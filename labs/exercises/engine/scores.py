"""A learner's tries: scores.json in the folder of the course, beside progress.json, and their drawing.

noted("slow_wire", 61.2)    returns the scores of all tries, with this one, and saves them if a learner's notebook runs
read(course)                returns {"slow_wire": [44.1, 61.2], …}
draw(…)                     the scores, try by try, with three lines: the bound, the best known score, the course's own
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labs.kit.drawing.palette import INK, KINDS, MUTED
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas
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


# ---- the drawing ----------------------------------------------------------------------------------------

LEFT, TOP, LONG, HIGH = 46, 40, 420, 150  # pixels: the place and the size of the panel
CLOSE = 7  # points: lines that are closer together than this share one label


def draw(title: str, known: str, course: float, possible: float, tries: Sequence[float]) -> Drawing:
    """Return the drawing of all tries.

    known: the scores that the challenge states, in words.
    course, possible: the points of the course's own answer, and the most known so far.
    """
    listed = ", ".join(f"{score:.1f}" for score in tries)
    canvas = Canvas(LEFT + LONG + 230, TOP + HIGH + 40, title, f"Tries: {listed}. {known}.")
    canvas.text(16, 18, title, anchor="start", weight="bold")
    canvas.rect(LEFT, TOP, LONG, HIGH, stroke=MUTED, radius=0)
    for score in (0, 50, 100):
        canvas.text(LEFT - 8, up(score), score, size=12, anchor="end", fill=MUTED)
    for score, words in levels(course, possible):
        canvas.line((LEFT, up(score)), (LEFT + LONG, up(score)), stroke=MUTED, dash="5 4")
        canvas.text(LEFT + LONG + 8, up(score), words, size=12, anchor="start")
    points = [(LEFT + LONG * (n + 0.5) / len(tries), up(score)) for n, score in enumerate(tries)]
    if len(points) > 1:
        canvas.line(*points, stroke=KINDS["P"], line=2)
    for x, y in points:
        canvas.circle(x, y, 4, fill=KINDS["P"], stroke=INK)
    canvas.text(LEFT + LONG / 2, TOP + HIGH + 20, f"tries → {len(tries)}", size=12, fill=MUTED)
    return canvas.drawing(f"tries: {listed}")


def levels(course: float, possible: float) -> list[tuple[float, str]]:
    """Return the lines of the drawing as (score, label)."""
    if possible - course < CLOSE:
        return [(100, "the bound"), (possible, f"possible {possible:.1f}; the course {course:.1f}")]
    upper = [(100, "the bound"), (possible, f"possible: {possible:.1f}")]
    if 100 - possible < CLOSE:
        upper = [(100, f"the bound; possible {possible:.1f}"), (possible, "")]
    return [*upper, (course, f"the course: {course:.1f}")]


def up(score: float) -> float:
    """Return the vertical position of a score in the drawing, in pixels."""
    return TOP + HIGH * (1 - score / 110)
