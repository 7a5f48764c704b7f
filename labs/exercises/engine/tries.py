"""A drawing of the scores, try by try, with three lines: the bound, the best known score, the course's own."""

from __future__ import annotations

from collections.abc import Sequence

from labs.kit.drawing.palette import INK, KINDS, MUTED
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

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
    """Return the vertical place of a score, in pixels."""
    return TOP + HIGH * (1 - score / 110)
