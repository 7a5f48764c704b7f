"""A drawing of ratios as bars on a logarithmic axis, which begin at 1.

ratios({"8B": {"NVLink": 0.35, "Ethernet": 112}}, ("hidden", "waits"), "seconds of communication per second")
"""

from collections.abc import Mapping
from math import ceil, floor, log10

from labs.kit.drawing.palette import INK, MUTED, TIMELINE
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.scatters import GRID
from labs.kit.drawing.svg import Canvas, width_of

TOP, LONG, ROW, NUMBER = 62, 460, 26, 56  # pixels: above the bars, the axis, a bar, and its number


def ratios(groups: Mapping[str, Mapping[str, float]], words: tuple[str, str], caption: str) -> Drawing:
    """Draw ratios as bars from 1: to the left if they are smaller, and to the right if they are larger.

    groups: {title: {name: ratio}}
    words: what a ratio below 1 means, and what a ratio above 1 means
    """
    found = [ratio for bars in groups.values() for ratio in bars.values()]
    least, most = min(-1, floor(log10(min(found)))), max(1, ceil(log10(max(found))))
    left = 40 + max(width_of(name, 13) for bars in groups.values() for name in bars) + NUMBER

    def at(ratio: float) -> float:
        return left + LONG * (log10(ratio) - least) / (most - least)

    rows = sum(len(bars) + 1 for bars in groups.values())
    told = "; ".join(f"{title}, {name}: {ratio:.3g}" for title, bars in groups.items() for name, ratio in bars.items())
    canvas = Canvas(left + LONG + NUMBER + 16, TOP + ROW * rows + 30, caption, f"{told}.")
    canvas.text(16, 20, caption, anchor="start", weight="bold")
    canvas.text(at(1) - 10, 46, f"← {words[0]}", 12, "end", fill=MUTED)
    canvas.text(at(1) + 10, 46, f"{words[1]} →", 12, "start", fill=MUTED)
    for power in range(least, most + 1):
        x = at(10.0**power)
        canvas.line((x, TOP), (x, TOP + ROW * rows), stroke=INK if power == 0 else GRID)
        canvas.text(x, TOP + ROW * rows + 14, f"{10.0**power:g}", 12, fill=MUTED)
    y = TOP + ROW / 2
    for title, bars in groups.items():
        canvas.text(16, y, title, 13, "start", "bold")
        for name, ratio in bars.items():
            y += ROW
            x, above = at(ratio), ratio > 1
            canvas.rect(min(x, at(1)), y - 9, abs(x - at(1)), 18, TIMELINE["communication" if above else "compute"])
            canvas.text(left - NUMBER, y, name, 13, "end")
            canvas.text(x + (8 if above else -8), y, f"{ratio:.3g}", 13, "start" if above else "end", "bold")
        y += ROW
    return canvas.drawing("\n".join([caption, *told.split("; ")]))
