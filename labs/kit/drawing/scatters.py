"""A scatter plot on two logarithmic axes, with a tooltip on each point.

    scatter([Point(3100, 2950, "pipeline", "64 GPUs, tp 2"), …], across="measured", up="predicted", diagonal=True)

The tooltips are an HTML image map over the image.  An untrusted notebook shows an SVG only in an `<img>`, where the
SVG's own tooltips do not appear.  An image map fits one size only, so this picture does not shrink with the window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple
from zlib import crc32

from labs.kit.drawing.palette import GROUPS, MUTED
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

LEFT, TOP, LONG, HIGH = 86, 84, 620, 360  # pixels: the place and the size of the plot
RADIUS = 4
GRID = "#E3E6EA"
DIGITS = {1.3: (1, 1.5, 2, 3, 4, 6, 8), 2.5: (1, 2, 5), math.inf: (1,)}  # {decades up to: digits of an axis' marks}


class Point(NamedTuple):
    x: float
    y: float
    series: str
    words: str


@dataclass(frozen=True, repr=False)
class Hovered(Drawing):
    """A drawing with tooltips.

    areas: the (x, y, text) of each tooltip, with its place in pixels.
    """

    areas: tuple[tuple[float, float, str], ...] = ()

    @property
    def html(self) -> str:
        name = f"points-{crc32(self.data):08x}"
        spots = "".join(
            f'<area shape="circle" coords="{x:.0f},{y:.0f},{RADIUS + 1}" title="{escape(words)}">'
            for x, y, words in self.areas
        )
        image = super().html.replace("max-width:100%", "max-width:none").replace("<img ", f'<img usemap="#{name}" ', 1)
        return f'{image}<map name="{name}">{spots}</map>'


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis of `long` pixels that begins at pixel `start`.

    least, most: the powers of ten at the two ends of the axis.
    marks: the values at which the axis has a label.
    """

    least: float
    most: float
    start: float
    long: float
    marks: tuple[float, ...]

    def at(self, value: float) -> float:
        return self.start + self.long * (math.log10(value) - self.least) / (self.most - self.least)


def scatter(
    points: Sequence[Point],
    across: str,
    up: str,
    caption: str = "",
    diagonal: bool = False,
    marks: Sequence[float] = (),
) -> Hovered:
    """Draw the points of a scatter plot, with one colour per series.

    across, up: the labels of the axes.
    diagonal: whether both axes have the same range, with a line at x = y.
    marks: the values that have a label on the horizontal axis; round values when left out.
    Raises ValueError if there is no point, or a coordinate is not above 0.
    """
    if not points or min(min(point[:2]) for point in points) <= 0:
        raise ValueError("a scatter needs at least one point, and logarithmic axes need coordinates above 0")
    xs, ys = ([point[place] for point in points] for place in (0, 1))
    x, y = axis(xs + ys * diagonal, LEFT, LONG), axis(ys + xs * diagonal, TOP + HIGH, -HIGH)
    x = replace(x, marks=tuple(marks)) if marks else x
    series = sorted({point.series for point in points}, key=lambda name: (len(name), name))  # 8B is before 80B
    title = caption or f"{up} by {across}"
    counts = "; ".join(f"{sum(point.series == name for point in points)} {name}" for name in series)
    canvas = Canvas(LEFT + LONG + 40, TOP + HIGH + 54, title, f"{len(points)} points: {counts}.")
    canvas.text(16, 20, title, anchor="start", weight="bold")
    panel(canvas, x, y, across, up)
    if diagonal:
        canvas.line((LEFT, TOP + HIGH), (LEFT + LONG, TOP), stroke=MUTED, dash="5 4")
        canvas.line((LEFT + LONG - 190, 46), (LEFT + LONG - 170, 46), stroke=MUTED, dash="5 4")
        canvas.text(LEFT + LONG - 164, 46, f"{up} = {across}", size=12.5, anchor="start")
    place = 16.0
    for colour, name in zip(GROUPS, series, strict=False):
        canvas.circle(place + 6, 46, RADIUS + 1, fill=colour)
        canvas.text(place + 18, 46, name, size=12.5, anchor="start")
        place += width_of(name, 12.5) + 34
        for point in points:
            if point.series == name:
                canvas.circle(x.at(point.x), y.at(point.y), RADIUS, fill=colour, line=0.5)
    drawing = canvas.drawing()
    areas = tuple((x.at(point.x), y.at(point.y), point.words) for point in points)
    return Hovered(drawing.data, drawing.text, drawing.alt, drawing.width, drawing.height, areas)


def axis(values: Sequence[float], start: float, long: float) -> Axis:
    """Return an axis that ends where the values do, so that the points use its room."""
    least, most = math.log10(min(values) / 1.05), math.log10(max(values) * 1.05)
    digits = next(digits for decades, digits in DIGITS.items() if most - least <= decades)
    marks = (digit * 10.0**power for power in range(math.floor(least), math.ceil(most)) for digit in digits)
    return Axis(least, most, start, long, tuple(each for each in marks if least <= math.log10(each) <= most))


def panel(canvas: Canvas, x: Axis, y: Axis, across: str, up: str) -> None:
    canvas.rect(LEFT, TOP, LONG, HIGH, stroke=MUTED, radius=0)
    for mark in x.marks:
        canvas.line((x.at(mark), TOP), (x.at(mark), TOP + HIGH), stroke=GRID)
        canvas.text(x.at(mark), TOP + HIGH + 14, f"{mark:,g}", size=12, fill=MUTED)
    for mark in y.marks:
        canvas.line((LEFT, y.at(mark)), (LEFT + LONG, y.at(mark)), stroke=GRID)
        canvas.text(LEFT - 8, y.at(mark), f"{mark:,g}", size=12, anchor="end", fill=MUTED)
    canvas.text(LEFT + LONG / 2, TOP + HIGH + 38, f"{across} →", size=12, fill=MUTED)
    canvas.text(16, TOP - 14, f"↑ {up}", size=12, anchor="start", fill=MUTED)
