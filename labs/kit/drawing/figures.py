"""Figures of measurements, as PNG: bars and curves (memory_over_time.py and timelines.py have figures of their own).

Measurements differ from run to run, so a notebook test does not compare these pictures.  The text beside a picture
gives only numbers that are the same in every run, such as the number of ranks; the alternative text gives what was
measured.
"""

import io
import logging
from collections.abc import Mapping, Sequence

from labs.kit.drawing.palette import INK, KINDS, MUTED, NAMES, SERIES, ink
from labs.kit.drawing.picture import Figure
from labs.kit.drawing.svg import width_of
from labs.kit.drawing.tables import short

DPI, SHOWN = 144, 96  # pixels per inch in the file and on the page; the difference keeps text sharp on today's screens
WIDE = 7.5  # inches; in a window of 1024 pixels with an open sidebar, every letter still has 9 pixels or more

LEGEND = {"columnspacing": 1.2, "handlelength": 1.2, "handletextpad": 0.5, "fontsize": 9, "frameon": False}


def axes(width: float, height: float, rows: int = 1, columns: int = 1, one_scale: bool = True):
    """Return a matplotlib figure of this size in inches, and its axes, without pyplot and its global state.

    one_scale: whether all axes have the same vertical scale.
    """
    # Matplotlib reports on stderr at its first use that it builds a list of fonts: keep that line out of the cell.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    grid = canvas.subplots(rows, columns, sharex=True, sharey=one_scale, squeeze=False)
    for each in grid.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=9)
    return canvas, grid.ravel()


def finish(canvas, text: str, alt: str) -> Figure:
    """Return the matplotlib figure as a picture that a cell can show."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None, "Description": alt})
    width, height = (round(SHOWN * inches) for inches in canvas.get_size_inches())
    return Figure(buffer.getvalue(), text, alt, width, height)


def window(recording, step: int | None, ranks: Sequence[int] | None = None) -> tuple[float, float]:
    """Return when a step of a job starts and ends, in seconds, or when the whole recording does if step is None.

    ranks: the ranks whose step counts; all ranks when left out.
    """
    if step is None:
        ends = [item.end for item in (*recording.events, *recording.spans)]
        lines = [recording.memory[rank] for rank in recording.seen] if recording.memory else []
        return 0.0, max([*ends, *(series[-1][0] for series in lines if series)], default=0.0)
    ranks = recording.seen if ranks is None else ranks
    starts, ends = zip(*(recording.window(rank, step) for rank in ranks), strict=True)
    return min(starts), max(ends)


def phases(recording, rank: int, start: float, end: float) -> list:
    """Return a rank's phases between `start` and `end`: its outermost spans, without the spans that are steps."""
    found = []
    for span in recording.spans:  # in order of their start
        inside = span.rank == rank and span.name != "step" and start <= span.start < span.end <= end
        if inside and (not found or span.start >= found[-1].end):
            found.append(span)
    return found


def kinds(canvas, names) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=KINDS[k], edgecolor=INK, linewidth=0.5, label=named(k)) for k in names]
    canvas.legend(handles=handles, loc="outside upper center", ncols=len(handles), **LEGEND)


def named(kind: str) -> str:
    return f"{kind} {NAMES[kind]}" if len(kind) == 1 else NAMES[kind]


def bars(held: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the bytes held by kind as stacked bars, such as a bar of predicted above a bar of measured bytes.

    held: {"predicted": {"P": bytes, ...}, "measured": {...}}; a key that is not in KINDS, such as "peak", becomes a
        mark above the bar.
    """
    canvas, (panel,) = axes(WIDE, 0.6 + 0.52 * len(held))
    widest = max(max(sum(v for k, v in by.items() if k in KINDS), *by.values()) for by in held.values()) or 1
    shown = [kind for kind in KINDS if any(by.get(kind) for by in held.values())]
    for row, by in enumerate(held.values()):
        left = 0.0
        for kind in shown:
            width = by.get(kind, 0)
            panel.barh(row, width, left=left, height=0.5, color=KINDS[kind], edgecolor=INK, linewidth=0.5)
            label = fitting((f"{kind} {short(width)}", kind), 0.86 * WIDE * SHOWN * width / widest)
            panel.annotate(
                label, (left + width / 2, row + 0.02), ha="center", va="center", fontsize=9, color=ink(KINDS[kind])
            )
            left += width
        for name in by.keys() - KINDS.keys():
            panel.plot([by[name]] * 2, [row - 0.55, row - 0.25], color=INK, linewidth=1.5, clip_on=False)
            panel.annotate(f"{name} {short(by[name])} ", (by[name], row - 0.42), ha="right", va="center", fontsize=9)
    panel.set(xlim=(0, 1.01 * widest), ylim=(len(held) - 0.7, -0.6))
    panel.set_yticks(range(len(held)), list(held))
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    kinds(canvas, shown)
    alt = "; ".join(f"{name}: " + ", ".join(f"{k} {short(v)}" for k, v in by.items()) for name, by in held.items())
    return finish(canvas, f"Bars({', '.join(held)}; by {' '.join(shown)})", f"Bytes held by kind. {alt}")


def fitting(labels: Sequence[str], pixels: float, size: float = 12) -> str:
    """Return the first label that is at most `pixels` wide, or "" if every label is wider."""
    return next((label for label in labels if width_of(label, size) + 8 < pixels), "")


def curves(
    series: Mapping[str, Sequence[float]],
    marks: Mapping[str, float] | None = None,
    moments: Mapping[str, float] | None = None,
) -> Figure:
    """Draw the loss curves of several runs; the first run's curve is the reference, a wide pale band under the others.

    series: {"one process": losses, "DDP": losses}.
    marks: losses to compare the curves with, such as {"unigram entropy": 3.1}.
    moments: steps at which something happens, such as {"restart": 8}.
    """
    canvas, (panel,) = axes(WIDE, 3.4)
    for number, (name, values) in enumerate(series.items()):
        reference = number == 0 and len(series) > 1
        panel.plot(
            range(len(values)),
            [float(value) for value in values],
            label=name,
            color=SERIES[number % len(SERIES)] if len(series) > 1 else INK,
            linewidth=6 if reference else 1.4,
            linestyle="-" if number == 0 else ("--", "-.", ":")[(number - 1) % 3],
        )
    for name, level in (marks or {}).items():
        panel.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        panel.annotate(name, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=9)
    for name, step in (moments or {}).items():
        panel.axvline(step, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        panel.annotate(f"{name} ", (step, 1), xycoords=("data", "axes fraction"), ha="right", va="top", fontsize=9)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylabel("loss", fontsize=9)
    panel.legend(fontsize=9, frameon=False, loc="best" if moments else "upper right")
    steps = max(len(values) for values in series.values())
    alt = "loss by step. " + "; ".join(
        f"{name}: from {values[0]:.4f} to {values[-1]:.4f}" for name, values in series.items()
    )
    return finish(canvas, f"Curves({', '.join(series)}; {steps} steps)", alt)
