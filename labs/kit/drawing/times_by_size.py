"""A drawing of an all-reduce's seconds by its size: on two logarithmic axes, latency is flat and bandwidth a slope.

    by_size("8 ranks", {"ring": seconds, ...}, 1e6)     a line for each, and a dot on it at 1 MB

The axes are the same in every picture, so that two settings can be compared.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from labs.kit.drawing.palette import INK, MUTED, SERIES
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, Point

SIZES = 3, 11  # the x axis: 10³ to 10¹¹ bytes
TIMES = -6, 3  # the y axis: 10⁻⁶ to 10³ seconds
LEFT, TOP, LONG, HIGH = 74, 56, 480, 270  # pixels: the place and the size of the panel
Seconds = Callable[[float], float]  # bytes -> seconds


def by_size(title: str, lines: Mapping[str, Seconds | None], size: float, none: str = "") -> Drawing:
    """Draw a line of seconds by bytes for each name, and beside the plot the name's time at `size` bytes.

    lines: {name: function from bytes to seconds}; None for a name without a line.
    none: the words beside the plot for a name without a line.
    """
    labels = {name: span(seconds(size)) if seconds else none for name, seconds in lines.items()}
    alt = "; ".join(f"{name}: {label}" for name, label in labels.items())
    canvas = Canvas(LEFT + LONG + 250, TOP + HIGH + 62, title, alt)
    canvas.text(16, 18, title, anchor="start", weight="bold")
    axes(canvas)
    canvas.line((across(size), TOP), (across(size), TOP + HIGH), stroke=MUTED, dash="4 3")
    for row, (name, seconds) in enumerate(lines.items()):
        colour, y = SERIES[row + 1], TOP + 20 + 56 * row
        canvas.rect(LEFT + LONG + 24, y - 6, 18, 12, fill=colour, radius=0)
        canvas.text(LEFT + LONG + 50, y, name, anchor="start", weight="bold")
        canvas.text(LEFT + LONG + 50, y + 20, labels[name], anchor="start")
        if seconds:
            canvas.line(*inside(seconds), stroke=colour, line=2.5)
            canvas.circle(across(size), up(seconds(size)), 5, fill=colour)
    return canvas.drawing("\n".join([title, *(f"{name}: {label}" for name, label in labels.items())]))


def inside(seconds: Seconds) -> Iterator[Point]:
    """Yield the points of a line that lie within the plot."""
    low, high = SIZES
    for step in range(10 * (high - low) + 1):
        size = 10 ** (low + step / 10)
        if seconds(size) <= 10 ** TIMES[1]:
            yield across(size), up(seconds(size))


def across(size: float) -> float:
    low, high = SIZES
    return LEFT + LONG * (math.log10(size) - low) / (high - low)


def up(seconds: float) -> float:
    low, high = TIMES
    return TOP + HIGH * (high - math.log10(seconds)) / (high - low)


def axes(canvas: Canvas) -> None:
    canvas.rect(LEFT, TOP, LONG, HIGH, stroke=MUTED, radius=0)
    for power in range(SIZES[0] + 1, SIZES[1]):
        canvas.line((across(10**power), TOP), (across(10**power), TOP + HIGH), stroke="#E3E6EA")
    for power in range(SIZES[0], SIZES[1] + 1, 2):
        canvas.text(across(10**power), TOP + HIGH + 16, amount(10**power), size=12, fill=MUTED)
    for power in range(TIMES[0], TIMES[1] + 1):
        canvas.line((LEFT, up(10.0**power)), (LEFT + LONG, up(10.0**power)), stroke="#E3E6EA")
    for power in range(TIMES[0], TIMES[1] + 1, 3):
        canvas.text(LEFT - 8, up(10.0**power), span(10.0**power), size=12, anchor="end", fill=MUTED)
    canvas.text(LEFT + LONG / 2, TOP + HIGH + 42, "bytes on each rank, all-reduced →", size=12, fill=MUTED)
    canvas.text(16, TOP - 16, "↑ it takes", size=12, anchor="start", fill=INK)


def amount(size: float) -> str:
    """Return bytes in decimal units, as data sheets of links give them: "20 MB"."""
    return scaled(size, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3})


def rate(bandwidth: float) -> str:
    return f"{amount(bandwidth)}/s"


def span(seconds: float) -> str:
    return scaled(seconds, {"s": 1, "ms": 1e-3, "µs": 1e-6})


def scaled(value: float, units: dict[str, float]) -> str:
    """Return a value with three digits, in the largest unit that is not larger than the value."""
    name = next((name for name, unit in units.items() if value >= 0.9995 * unit), [*units][-1])
    return f"{float(f'{value / units[name]:.3g}'):,g} {name}"
