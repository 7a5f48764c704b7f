"""A figure of loss curves, as PNG: the curves, and below them each curve's distance from the first one.

apart({"yours": losses, "DeepSpeed": losses})
"""

from collections.abc import Mapping, Sequence

from labs.kit.drawing.figures import WIDE, axes, finish
from labs.kit.drawing.palette import SERIES
from labs.kit.drawing.picture import Figure

MARKS = ("", "o", "s", "^")


def apart(series: Mapping[str, Sequence[float]]) -> Figure:
    """Draw loss curves, and below them how far each is from the first; equal curves lie on the line at 0.

    series: {name: losses, step by step}; the first is the reference.
    """
    canvas, (upper, lower) = axes(WIDE, 4.6, rows=2, one_scale=False)
    first, *_ = series.values()
    for number, (name, losses) in enumerate(series.items()):
        look = {"color": SERIES[number], "linewidth": 6 if number == 0 else 1.4, "label": name}
        look |= {"marker": MARKS[number % len(MARKS)], "markersize": 4}
        upper.plot(range(len(losses)), losses, **look)
        lower.plot(range(len(losses)), [a - b for a, b in zip(losses, first, strict=True)], **look)
    upper.set_ylabel("loss", fontsize=9)
    lower.set_ylabel("distance from the first", fontsize=9)
    lower.set_xlabel("step", fontsize=9)
    lower.xaxis.get_major_locator().set_params(integer=True)
    upper.legend(fontsize=9, frameon=False, loc="upper right")
    far = {name: max(abs(a - b) for a, b in zip(losses, first, strict=True)) for name, losses in series.items()}
    alt = "; ".join(f"{name}: at most {distance:.3f} away" for name, distance in far.items())
    return finish(canvas, f"Apart({', '.join(series)}; {len(first)} steps)", f"Loss by step, and below: {alt}")
