"""A drawing of formulas as lines on two logarithmic axes, with dots that were measured, and marks where lines cross.

on_scales({"gather x": [(8, 6e3), (64, 5e4)], "gather w": ...}, "tokens", "bytes", dots={"XLA": [(8, 6e3)]})
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from labs.kit.drawing.crossing_lines import spread
from labs.kit.drawing.palette import GROUPS, MUTED, PAPER
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.scatters import GRID, Axis, axis
from labs.kit.drawing.svg import Canvas, width_of

LEFT, TOP, LONG, HIGH, FOOT = 76, 84, 560, 290, 54  # pixels
FILLED, RING = (5, "#000000"), (7, PAPER)  # radius and fill of dots
Line = Sequence[tuple[float, float]]


def on_scales(
    lines: Mapping[str, Line], across: str, up: str, caption: str = "", dots: Mapping[str, Line] | None = None
) -> Drawing:
    """Draw lines on two logarithmic axes, and say at which x each two of them cross.

    lines: {name: points, from left to right}; all lines have the same x.
    across, up: the labels of the axes.
    dots: {what the dots are: points}; the first are filled, the second are rings.
    """
    dots = dots or {}
    everything = [place for line in (*lines.values(), *dots.values()) for place in line]
    x, y = axis([x for x, _ in everything], LEFT, LONG), axis([y for _, y in everything], TOP + HIGH, -HIGH)
    met = {(a, b): crossing(lines[a], lines[b]) for a, b in combinations(lines, 2)}
    met = {pair: place for pair, place in met.items() if place}
    title = caption or f"{up} by {across}"
    words = [f"{a} and {b} cross at {at:,.0f}" for (a, b), (at, _) in met.items()]
    words += [f"{name}: " + ", ".join(f"{b:,.0f} at {a:,.0f}" for a, b in line) for name, line in dots.items()]
    room = 16 + max(width_of(name, 13) for name in lines)
    canvas = Canvas(LEFT + LONG + room, TOP + HIGH + FOOT, title, "; ".join(words))
    canvas.text(16, 20, title, anchor="start", weight="bold")
    frame(canvas, x, y, across, up)
    for colour, line in zip(GROUPS, lines.values(), strict=False):
        canvas.line(*((x.at(a), y.at(b)) for a, b in line), stroke=colour, line=3)
    for row, (at, height) in enumerate(met.values()):
        is_low = y.at(height) > TOP + HIGH / 2
        canvas.line((x.at(at), y.at(height)), (x.at(at), TOP if is_low else TOP + HIGH), stroke=MUTED, dash="3 3")
        level = TOP + 12 + 17 * row if is_low else TOP + HIGH - 12 - 17 * row
        aside, anchor = (-5, "end") if row % 2 else (5, "start")
        canvas.text(x.at(at) + aside, level, f"{at:,.0f}", 12, anchor, "bold")
    place = 24.0
    for (name, places), (radius, fill) in zip(dots.items(), (FILLED, RING), strict=False):
        canvas.circle(place, 44, radius, fill, line=2)
        canvas.text(place + 14, 44, name, 12.5, "start")
        place += 40 + width_of(name, 11.5)
        for a, b in places:
            canvas.circle(x.at(a), y.at(b), radius, fill, line=2)
    heights = spread([y.at(line[-1][1]) for line in lines.values()])
    for colour, name, height in zip(GROUPS, lines, heights, strict=False):
        canvas.text(LEFT + LONG + 8, height, name, 13, "start", "bold", fill=colour)
    return canvas.drawing()


def crossing(one: Line, other: Line) -> tuple[float, float] | None:
    """Return where two lines cross, both straight between points on logarithmic axes; None if they do not."""
    logs = [(math.log(x), math.log(a), math.log(a / b)) for (x, a), (_, b) in zip(one, other, strict=True)]
    for (x, a, apart), (next_x, next_a, then) in pairwise(logs):
        if apart * then < 0 or (then == 0 and apart):
            share = apart / (apart - then)
            return math.exp(x + share * (next_x - x)), math.exp(a + share * (next_a - a))
    return None


def frame(canvas: Canvas, x: Axis, y: Axis, across: str, up: str) -> None:
    canvas.rect(LEFT, TOP, LONG, HIGH, stroke=MUTED, radius=0)
    for mark in x.marks:
        canvas.line((x.at(mark), TOP), (x.at(mark), TOP + HIGH), stroke=GRID)
        canvas.text(x.at(mark), TOP + HIGH + 14, f"{mark:,.0f}", 12, fill=MUTED)
    for mark in y.marks:
        canvas.line((LEFT, y.at(mark)), (LEFT + LONG, y.at(mark)), stroke=GRID)
        canvas.text(LEFT - 8, y.at(mark), f"{mark:,.4g}" if mark < 1e4 else f"{mark:,.0f}", 12, "end", fill=MUTED)
    canvas.text(LEFT + LONG / 2, TOP + HIGH + 38, f"{across} →", 12, fill=MUTED)
    canvas.text(16, TOP - 16, f"↑ {up}", 12, "start", fill=MUTED)
