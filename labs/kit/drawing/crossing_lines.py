"""A drawing of lines over a quantity that grows, with the places at which the last line rises above the others.

crossings({"DDP": [(1, 3.2), (8, 3.2)], "TP": [(1, 1.1), (8, 8.8)]}, {"DDP": "G", "TP": "A"}, "tokens", "MB sent")
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from labs.kit.drawing.palette import KINDS, MUTED
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

LEFT, TOP, LONG, HIGH, FOOT, LABEL = 62, 74, 560, 270, 54, 15  # pixels
GRID = "#E3E6EA"
Place = tuple[float, float]
Line = Sequence[Place]


def crossings(
    lines: Mapping[str, Line],
    kinds: Mapping[str, str],
    across: str,
    up: str,
    measured: Mapping[str, Iterable[Place]] | None = None,
    caption: str = "",
) -> Drawing:
    """Draw lines of formulas and measured points, and mark where the last line crosses each of the others.

    lines: {name: points, from left to right}; all lines have the same x.
    kinds: {name: the kind that gives the line its colour, a key of labs.kit.draw.KINDS}.
    across, up: the labels of the axes, which begin at 0.
    measured: {name: measured points of that line}.
    """
    *others, last = lines
    found = {name: crossing(lines[name], lines[last]) for name in others}
    (right, _), highest = lines[last][-1], max(y for line in lines.values() for _, y in line)
    step, marks = ticks(highest)
    title = caption or f"{up} by {across}"
    words = "; ".join(f"{last} crosses {name} at {x:.1f}" for name, x in found.items() if x is not None)
    room = max(width_of(name, 13) for name in lines) + 16
    canvas = Canvas(LEFT + LONG + room, TOP + HIGH + FOOT, title, f"{words}." if words else "No lines cross.")

    def at(x: float, y: float) -> Place:
        return LEFT + LONG * x / right, TOP + HIGH * (1 - y / (step * marks))

    frame(canvas, at, right, step, marks)
    canvas.text(16, 20, title, anchor="start", weight="bold")
    canvas.text(16, 48, f"↑ {up}", 12, "start", fill=MUTED)
    if measured:
        canvas.circle(LEFT + LONG - 86, 48, 5)
        canvas.text(LEFT + LONG - 74, 48, "measured", 12, "start", fill=MUTED)
    canvas.text(LEFT + LONG / 2, TOP + HIGH + 38, f"{across} →", 12, fill=MUTED)
    for row, (name, x) in enumerate(each for each in found.items() if each[1] is not None):
        canvas.line(at(x, 0), at(x, marks * step), stroke=MUTED, dash="4 4")
        place = at(x, 0)[0] + 6, TOP + HIGH - 14 - 18 * (len(found) - row)
        canvas.text(*place, f"{x:.1f}: {last} passes {name}", 12, "start", "bold")
    heights = spread([at(*line[-1])[1] for line in lines.values()])
    for (name, line), height in zip(lines.items(), heights, strict=True):
        colour = KINDS[kinds[name]]
        canvas.line(*(at(*point) for point in line), stroke=colour, line=3)
        canvas.text(LEFT + LONG + 8, height, name, 13, "start", "bold", fill=colour)
        for point in (measured or {}).get(name, ()):
            canvas.circle(*at(*point), 5, fill=colour)
    return canvas.drawing()


def crossing(flat: Line, rising: Line) -> float | None:
    """Return the x at which `rising` passes above `flat`, on the straight lines between points; None if it does not."""
    pairs = [(x, ours - theirs) for (x, theirs), (_, ours) in zip(flat, rising, strict=True)]
    for (before, below), (after, above) in pairwise(pairs):
        if below <= 0 < above:
            return before + (after - before) * below / (below - above)
    return None


def ticks(highest: float) -> tuple[float, int]:
    """Return the distance of the marks on an axis from 0 to `highest`, 1, 2 or 5 times a power of ten; their number."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if highest / (power * factor) <= 5)
    return step, math.ceil(highest / step)


def frame(canvas: Canvas, at, right: float, step: float, marks: int) -> None:
    for mark in range(marks + 1):
        canvas.line(at(0, mark * step), at(right, mark * step), stroke=GRID)
        canvas.text(LEFT - 8, at(0, mark * step)[1], f"{mark * step:g}", 12, "end", fill=MUTED)
    for mark in range(math.floor(right) + 1):
        canvas.line(at(mark, 0), at(mark, step * marks), stroke=GRID)
        canvas.text(at(mark, 0)[0], TOP + HIGH + 14, mark, 12, fill=MUTED)


def spread(heights: Sequence[float]) -> Iterator[float]:
    """Move heights apart where labels would overlap; return them in the given order."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed, lowest = {}, -math.inf
    for each in order:
        placed[each] = lowest = max(heights[each], lowest + LABEL)
    return (placed[each] for each in range(len(heights)))
