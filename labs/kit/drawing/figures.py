"""Figures of what was measured, as PNG: memory, bars, curves (and the timeline, in timelines.py).

They differ from run to run, so a notebook test does not compare them; the text beside each says only what
stays the same (how many ranks, events, curves), and the alternative text in its metadata says the rest.
"""

import base64
import io
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from labs.kit.drawing.palette import INK, KINDS, MUTED, NAMES, SERIES, ink
from labs.kit.drawing.tables import clock, short

DPI, SHOWN = 144, 96  # pixels to an inch in the file and on the page: sharp text on today's screens


@dataclass(frozen=True)
class Figure:
    """A PNG picture. text: what it shows, the same in each run; alt: for a reader who cannot see it."""

    png: bytes
    text: str
    alt: str
    width: int
    height: int

    @property
    def html(self) -> str:
        source = base64.b64encode(self.png).decode()
        size = f'width="{self.width}" height="{self.height}"'
        return f'<img alt="{escape(self.alt)}" {size} src="data:image/png;base64,{source}">'

    def save(self, path) -> None:
        """Write the picture to a file."""
        with open(path, "wb") as file:
            file.write(self.png)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        shown = {"alt": self.alt, "width": self.width, "height": self.height}
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.text}
        return data, {"image/png": shown}


def axes(width: float, height: float, rows: int = 1, columns: int = 1):
    """A matplotlib figure in inches, and its axes; pyplot and its global state stay out of it."""
    # On its first use matplotlib says on stderr that it lists the fonts: no reader of a cell needs to know.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    grid = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for each in grid.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=9)
    return canvas, grid.ravel()


def finish(canvas, text: str, alt: str) -> Figure:
    """The matplotlib figure as a picture that a cell can show."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None, "Description": alt})
    width, height = (round(SHOWN * inches) for inches in canvas.get_size_inches())
    return Figure(buffer.getvalue(), text, alt, width, height)


def window(recording, step: int | None, ranks: Sequence[int] | None = None) -> tuple[float, float]:
    """Start and end, over these ranks (all when left out), of a step or of all that was recorded (s)."""
    if step is None:
        ends = [item.end for item in (*recording.events, *recording.spans)]
        return 0.0, max([*ends, *(series[-1][0] for series in recording.memory if series)], default=0.0)
    ranks = range(recording.ranks) if ranks is None else ranks
    starts, ends = zip(*(recording.window(rank, step) for rank in ranks), strict=True)
    return min(starts), max(ends)


def memory(recording, step: int | None = None, ranks: Sequence[int] | None = None) -> Figure:
    """Bytes held over time, by kind, one panel a rank; the highest total is marked.

    recording: a labs.kit.record.Recording of kind "memory"; step: the one to show, ranks: which to show (all
    when left out). Raises ValueError when the recording holds no memory, or has no such step.
    """
    if not any(recording.memory):
        raise ValueError(f'a recording of kind {recording.kind!r} holds no memory: run(..., record="memory") does')
    ranks = range(recording.ranks) if ranks is None else ranks
    columns = min(2, len(ranks))
    rows = math.ceil(len(ranks) / columns)
    canvas, panels = axes(9.5, 0.6 + (2.8 - 0.4 * columns) * rows, rows, columns)
    start, end = window(recording, step, ranks)
    factor, unit = clock(end - start)
    peaks = {}
    for panel, rank in zip(panels, ranks, strict=False):
        series = cut(recording.memory[rank], start, end)
        peaks[rank] = areas(panel, [(factor * (moment - start), held) for moment, held in series])
        panel.set_title(f"rank {rank}", fontsize=9, loc="left", color=MUTED)
        for span in recording.spans if step is not None else ():
            if span.rank == rank and span.name != "step" and start <= span.start < span.end <= end:
                phase(panel, span.name, factor * (span.start - start), factor * (span.end - span.start))
    for panel in panels[len(ranks) :]:
        panel.set_visible(False)
    canvas.supylabel("MiB held", fontsize=9)
    canvas.supxlabel(unit, fontsize=9)
    kinds(canvas, KINDS)
    alt = ", ".join(f"rank {rank} {peak:.2f} MiB" for rank, peak in peaks.items())
    which = "" if step is None else f"step {step}, "
    text = f"Memory({which}{len(ranks)} ranks, by {' '.join(KINDS)})"
    return finish(canvas, text, f"Bytes held over time by kind. Peaks: {alt}")


def cut(series, start: float, end: float):
    """The part of (time, bytes by kind) from start to end, with what was there at both ends."""
    before = [held for moment, held in series if moment <= start]
    inside = [(moment, held) for moment, held in series if start < moment < end]
    first = [(start, before[-1] if before else {})]
    return first + inside + [(end, (first + inside)[-1][1])]


def areas(panel, series) -> float:
    """Stack (time, bytes by kind) into areas and mark the highest total; returns it in MiB."""
    times = [time for time, _ in series]
    held = {kind: [now.get(kind, 0) / 2**20 for _, now in series] for kind in KINDS}
    panel.stackplot(times, held.values(), colors=KINDS.values(), step="post", linewidth=0)
    totals = [sum(values) for values in zip(*held.values(), strict=True)]
    top = max(totals)
    moment = times[totals.index(top)]
    panel.plot(moment, top, marker="v", color=INK, markersize=5, clip_on=False)
    side = "right" if moment > (times[0] + times[-1]) / 2 else "left"
    panel.annotate(f"peak {top:.2f} MiB", (moment, 1.04 * top), ha=side, va="bottom", fontsize=8)
    panel.margins(x=0, y=0.3)
    return top


def phase(panel, name: str, start: float, long: float) -> None:
    """A dotted line where a phase begins, and its name at the top if there is room for it."""
    panel.axvline(start, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    if long > 0.012 * len(name) * panel.get_xlim()[1]:
        place = (start + long / 2, 0.99)
        panel.annotate(name, place, xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=8, color=MUTED)


def kinds(canvas, names) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=KINDS[k], edgecolor=INK, linewidth=0.5, label=named(k)) for k in names]
    canvas.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)


def named(kind: str) -> str:
    return f"{kind} {NAMES[kind]}" if len(kind) == 1 else NAMES[kind]


def bars(held: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes by kind, one stacked bar a name, the predicted beside the measured.

    held: {"predicted": {"P": bytes, ...}, "measured": {...}}; what is not in KINDS, such as "peak", is a line
    across the bar.
    """
    canvas, (panel,) = axes(9.5, 1.0 + 0.42 * len(held))
    widest = max(max(sum(v for k, v in by.items() if k in KINDS), *by.values()) for by in held.values()) or 1
    shown = [kind for kind in KINDS if any(by.get(kind) for by in held.values())]
    for row, by in enumerate(held.values()):
        left = 0.0
        for kind in shown:
            width = by.get(kind, 0)
            panel.barh(row, width, left=left, height=0.66, color=KINDS[kind], edgecolor=INK, linewidth=0.5)
            if width > 0.1 * widest:
                label = f"{kind} {short(width)}"
                panel.text(left + width / 2, row, label, ha="center", va="center", fontsize=8, color=ink(KINDS[kind]))
            left += width
        for name in by.keys() - KINDS.keys():
            panel.plot([by[name]] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2)
            panel.annotate(f"  {name} {short(by[name])}", (max(left, by[name]), row), va="center", fontsize=8)
    panel.set(xlim=(0, 1.18 * widest), ylim=(len(held) - 0.5, -0.5))
    panel.set_yticks(range(len(held)), list(held))
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    kinds(canvas, shown)
    alt = "; ".join(f"{name}: " + ", ".join(f"{k} {short(v)}" for k, v in by.items()) for name, by in held.items())
    return finish(canvas, f"Bars({', '.join(held)}; by {' '.join(shown)})", f"Bytes held by kind. {alt}")


def curves(
    series: Mapping[str, Sequence[float]], ylabel: str = "loss", marks: Mapping[str, float] | None = None
) -> Figure:
    """Several runs on one axes, step by step. The first is the reference: a wide pale band under the others.

    series: {"one process": losses, "DDP": losses}; marks: levels to compare with: {"unigram entropy": 3.1}.
    """
    canvas, (panel,) = axes(9.5, 3.4)
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
        panel.annotate(name, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylabel(ylabel, fontsize=9)
    panel.legend(fontsize=8.5, frameon=False, loc="upper right")
    steps = max(len(values) for values in series.values())
    alt = f"{ylabel} by step. " + "; ".join(
        f"{name}: from {values[0]:.4f} to {values[-1]:.4f}" for name, values in series.items()
    )
    return finish(canvas, f"Curves({', '.join(series)}; {steps} steps)", alt)
