"""Figures of the bytes that ranks hold over time, by kind: one panel per rank, all panels on one scale.

memory(recording)                      the whole recording, a panel per rank
memory(recording, step=2, ranks=[0])   one step of one rank
memory(ddp, zero, step=2, ranks=[0], names=("DDP", "stage 1"))

If names are given, the panels are compared: every later panel shows the outline of the first panel behind its own
areas, and says how much lower its peak is.  All phases of a step are drawn equally wide: recording the memory slows
many small operations down more than a few large ones, so true durations would mislead.
"""

import math
from collections.abc import Sequence

import numpy

from labs.kit.drawing.figures import WIDE, axes, finish, kinds, phases, window
from labs.kit.drawing.palette import INK, KINDS, MUTED, SOFT
from labs.kit.drawing.picture import Figure
from labs.kit.drawing.tables import clock

Series = list[tuple[float, dict[str, float]]]  # (x, bytes by kind), ...
HEADROOM = 1.35  # the y axis ends at this multiple of the highest peak, so that the peak's label has room


def memory(
    *recordings, step: int | None = None, ranks: Sequence[int] | None = None, names: Sequence[str] = ()
) -> Figure:
    """Draw the bytes held over time by kind, one panel for each rank of each recording, with a mark at the peak.

    recordings: labs.kit.record.Recordings of kind "memory".
    step: the step to show, the whole job when left out.
    ranks: the ranks to show, all when left out.
    names: one name per panel, if the panels are to be compared with the first panel.
    Raises ValueError if a recording is not of kind "memory" or has no such step, or the number of names is wrong.
    """
    for each in recordings:
        if each.kind != "memory":
            raise ValueError(f'a recording of kind {each.kind!r} has no bytes held: use run(..., record="memory")')
    shown = [(each, rank) for each in recordings for rank in (each.seen if ranks is None else ranks)]
    if names and len(names) != len(shown):
        raise ValueError(f"{len(names)} names for {len(shown)} panels: give one for each rank of each recording")
    titles = [
        f"{name}, rank {rank}" if name else f"rank {rank}"
        for name, (_, rank) in zip(names or [""] * len(shown), shown, strict=True)
    ]
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    high = 2.75 - 0.5 * columns  # inches
    canvas, panels = axes(WIDE, 0.6 + high * rows, rows, columns)
    lines = spread(panels, shown, step)
    scale = max(map(top, lines)) or 1.0
    panels[0].set_ylim(0, HEADROOM * scale)
    for panel, series, title in zip(panels, lines, titles, strict=False):
        panel.set_title(title, fontsize=9, loc="left", color=INK if names else MUTED)
        if names and series is not lines[0]:
            panel.set_title(f"dashed: {names[0]}", fontsize=9, loc="right", color=MUTED)
            ghost(panel, lines[0])
        panel.stackplot(*stacked(series), colors=KINDS.values(), step="post", linewidth=0, zorder=2)
        xs = [x for x, _ in series]
        # The outline makes a short peak visible, whose area is too narrow to be seen.
        panel.step(xs, totals(series), where="post", color=INK, linewidth=0.6, zorder=2)
        peak(panel, series, top(lines[0]) if names else top(series), scale)
    for panel in panels[: len(shown)]:
        panel.tick_params(axis="x", labelbottom=True)
    for panel in panels[: len(shown) : columns]:
        panel.set_ylabel("MiB held", fontsize=9)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    kinds(canvas, KINDS)
    alt = ", ".join(f"{title} {top(series):.2f} MiB" for title, series in zip(titles, lines, strict=True))
    which = "" if step is None else f"step {step}, "
    text = f"Memory({which}{', '.join(names) or f'{len(shown)} ranks'}, by {' '.join(KINDS)})"
    return finish(canvas, text, f"Bytes held over time by kind. Peaks: {alt}")


def spread(panels, shown: Sequence[tuple], step: int | None) -> list[Series]:
    """Return the bytes of each (recording, rank) over one x axis, and label that axis: time, or a step's phases."""
    found = [parts(recording, rank, step) for recording, rank in shown]
    if any(names != found[0][0] for names, _ in found):  # if phases differ, only a step's ends are comparable
        found = [([""], [moments[0], moments[-1]]) for _, moments in found]
    names, longest = found[0][0], max(moments[-1] - moments[0] for _, moments in found)
    factor, unit = clock(longest)
    lines = []
    for (recording, rank), (_, moments) in zip(shown, found, strict=True):
        places = [factor * (moment - moments[0]) for moment in moments] if step is None else range(len(moments))
        series = cut(recording.memory[rank], moments[0], moments[-1])
        xs = numpy.interp([moment for moment, _ in series], moments, places)
        lines.append([(x, held) for x, (_, held) in zip(xs, series, strict=True)])
    panels[0].set_xlim(0, factor * longest or 1 if step is None else len(names))
    if step is None:
        panels[0].figure.supxlabel(unit, fontsize=9)
    else:
        panels[0].set_xticks([number + 0.5 for number in range(len(names))], names)
    for panel in panels:
        panel.tick_params(axis="x", length=3 if step is None else 0)
        for border in range(1, len(names)):
            style = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (1, 2)), "zorder": 3}
            panel.axvline(border, ymax=1 / HEADROOM, **style)
    return lines


def parts(recording, rank: int, step: int | None) -> tuple[list[str], list[float]]:
    """Return the names of a step's phases, and the moments when each phase begins and the last phase ends.

    A whole job counts as a single phase without a name.
    """
    start, end = window(recording, step, [rank])
    found = [] if step is None else phases(recording, rank, start, end)
    return [span.name for span in found] or [""], [start, *(span.start for span in found[1:]), end]


def cut(series: Series, start: float, end: float) -> Series:
    """Return the bytes held between `start` and `end`, with an entry at both of these moments."""
    before = [held for moment, held in series if moment <= start]
    inside = [(moment, held) for moment, held in series if start < moment < end]
    first = [(start, before[-1] if before else {})]
    return first + inside + [(end, (first + inside)[-1][1])]


def stacked(series: Series) -> tuple[list[float], list[list[float]]]:
    """Return the x values of a series, and for each kind of bytes its MiB at each x."""
    return [x for x, _ in series], [[held.get(kind, 0) / 2**20 for _, held in series] for kind in KINDS]


def totals(series: Series) -> list[float]:
    return [sum(held.get(kind, 0) for kind in KINDS) / 2**20 for _, held in series]


def top(series: Series) -> float:
    return max(totals(series))


def ghost(panel, series: Series) -> None:
    """Draw the outline of another panel's total bytes behind the areas of this panel."""
    xs = [x for x, _ in series]
    panel.fill_between(xs, totals(series), step="post", color=SOFT, linewidth=0, zorder=1)
    panel.step(xs, totals(series), where="post", color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)


def peak(panel, series: Series, before: float, scale: float) -> None:
    """Draw a stem at the panel's peak, and above it the peak in MiB and how far the peak is below `before`."""
    from matplotlib.markers import CARETDOWN

    highest = top(series)
    x = series[totals(series).index(highest)][0]
    left, right = panel.get_xlim()
    panel.plot([x, x], [highest, 1.1 * scale], color=INK, linewidth=1, zorder=4)
    panel.plot(x, highest, marker=CARETDOWN, color=INK, markersize=6, zorder=4)
    side, aside = ("right", -4) if x > (left + right) / 2 else ("left", 4)
    style = {"textcoords": "offset points", "fontsize": 9, "ha": side, "zorder": 5}
    less = f" (−{before - highest:.2f} MiB)" if before - highest > 0.005 * before else ""
    panel.annotate(f"peak {highest:.2f} MiB{less}", (x, 1.1 * scale), (aside, 0), va="center", **style)
