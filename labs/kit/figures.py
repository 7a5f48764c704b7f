"""Figures of what was measured, as PNG: timeline, memory, bars, curves.

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

from labs.kit.palette import INK, KINDS, MUTED, NAMES, SERIES, TIMELINE, ink
from labs.kit.tables import clock, short

DPI = 144  # twice the size at which it is shown, for sharp text on today's screens


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
    width, height = (int(72 * inches) for inches in canvas.get_size_inches())
    return Figure(buffer.getvalue(), text, alt, width, height)


def timeline(recording, start: float = 0.0, end: float | None = None, until: float | None = None) -> Figure:
    """Who did what when, on the job's one clock: two lanes a rank, what was on the way and what it computed.

    recording: a labs.kit.record.Recording. start, end: the seconds to show (all of them when left out);
    until: show only what had happened by then. Waiting is drawn over the rank's lane of compute, up to the
    end of the event that it waited for.
    """
    last = max([x.end for x in [*recording.events, *recording.spans]], default=0.0)
    end = last if end is None else end
    now = end if until is None else until
    factor, unit = clock(end - start)
    canvas, (lane,) = axes(9.5, 0.9 + 0.55 * recording.ranks)

    def bar(rank: int, begin: float, finish: float, doing: str, label: str = "") -> None:
        begin, finish = max(begin, start), min(finish, now, end)
        if finish <= begin:
            return
        low, high = (0.04, 0.40) if doing == "communication" else (0.46, 0.90)
        hatch = "////" if doing == "waiting" else None
        lane.barh(
            rank + (low + high) / 2 - 0.5,
            factor * (finish - begin),
            left=factor * (begin - start),
            height=high - low,
            color=TIMELINE[doing],
            edgecolor="#8A8F98" if hatch else "white",
            linewidth=0.4,
            hatch=hatch,
            zorder=3 if hatch else 2,
        )
        if len(label) * 0.008 * (end - start) < finish - begin:
            middle = factor * ((begin + finish) / 2 - start)
            colour = ink(TIMELINE[doing])
            height = rank + (low + high) / 2 - 0.5
            lane.text(middle, height, label, ha="center", va="center", fontsize=7.5, color=colour, zorder=4)

    for span in recording.spans:
        if span.name != "step":
            bar(span.rank, span.start, span.end, "compute", span.name)
    for event in recording.events:
        bar(event.rank, event.start, event.end, "communication", event.op)
        bar(event.rank, event.end - event.waited, event.end, "waiting")
    if until is not None:
        lane.axvline(factor * (until - start), color=INK, linewidth=1)
    lane.set(xlim=(0, factor * (end - start) or 1), ylim=(recording.ranks - 0.5, -0.5), xlabel=unit)
    lane.set_yticks(range(recording.ranks), [f"rank {rank}" for rank in range(recording.ranks)])
    legend(lane, TIMELINE)
    waits = [sum(e.waited for e in recording.events if e.rank == rank) for rank in range(recording.ranks)]
    alt = (
        f"Timeline of {recording.ranks} ranks over {factor * (end - start):.1f} {unit}. Waiting: "
        + ", ".join(f"rank {rank} {factor * wait:.1f} {unit}" for rank, wait in enumerate(waits))
    )
    return finish(canvas, f"Timeline({recording.ranks} ranks, {len(recording.events)} events)", alt)


def legend(lane, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor="#8A8F98", label=name, hatch="////" if name == "waiting" else None)
        for name, colour in colours.items()
    ]
    lane.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )


def memory(recording, ranks: Sequence[int] | None = None) -> Figure:
    """Bytes held over time, by kind, one panel a rank; the highest total is marked.

    recording: a labs.kit.record.Recording of kind "memory"; ranks: which to show (all when left out).
    Raises ValueError when the recording holds no memory.
    """
    ranks = range(recording.ranks) if ranks is None else ranks
    if not any(recording.memory):
        raise ValueError(
            f'a recording of kind {recording.kind!r} holds no memory: run(..., record="memory") does'
        )
    columns = min(2, len(ranks))
    rows = math.ceil(len(ranks) / columns)
    canvas, panels = axes(4.75 * columns, 0.6 + 2.0 * rows, rows, columns)
    factor, unit = clock(max(series[-1][0] for series in recording.memory if series))
    peaks = []
    for panel, rank in zip(panels, ranks, strict=False):
        times = [factor * t for t, _ in recording.memory[rank]]
        held = {kind: [h.get(kind, 0) / 2**20 for _, h in recording.memory[rank]] for kind in KINDS}
        areas = panel.stackplot(times, held.values(), colors=KINDS.values(), step="post")
        for area in areas:
            area.set(edgecolor="white", linewidth=0.3)
        totals = [sum(values) for values in zip(*held.values(), strict=True)]
        peak = max(range(len(totals)), key=totals.__getitem__)
        peaks.append(totals[peak])
        panel.plot(times[peak], totals[peak], marker="v", color=INK, markersize=5, clip_on=False)
        side = "right" if times[peak] > (times[0] + times[-1]) / 2 else "left"
        panel.annotate(
            f"  peak {totals[peak]:.2f} MiB  ",
            (times[peak], 1.03 * totals[peak]),
            ha=side,
            va="bottom",
            fontsize=8,
        )
        panel.set_title(f"rank {rank}", fontsize=9, loc="left", color=MUTED)
        panel.margins(x=0, y=0.2)
    for panel in panels[len(ranks) :]:
        panel.set_visible(False)
    canvas.supylabel("MiB held", fontsize=9)
    canvas.supxlabel(unit, fontsize=9)
    kinds(canvas, KINDS)
    alt = "Bytes held over time by kind. Peaks: " + ", ".join(
        f"rank {rank} {peak:.2f} MiB" for rank, peak in zip(ranks, peaks, strict=True)
    )
    return finish(canvas, f"Memory({len(ranks)} ranks, by {' '.join(KINDS)})", alt)


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
                panel.text(
                    left + width / 2, row, label, ha="center", va="center", fontsize=8, color=ink(KINDS[kind])
                )
            left += width
        for name in by.keys() - KINDS.keys():
            panel.plot([by[name]] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=2)
            panel.annotate(f"  {name} {short(by[name])}", (max(left, by[name]), row), va="center", fontsize=8)
    panel.set(xlim=(0, 1.18 * widest), ylim=(len(held) - 0.5, -0.5))
    panel.set_yticks(range(len(held)), list(held))
    panel.set_xticks([])
    panel.spines["bottom"].set_visible(False)
    kinds(canvas, shown)
    alt = "; ".join(
        f"{name}: " + ", ".join(f"{k} {short(v)}" for k, v in by.items()) for name, by in held.items()
    )
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
        panel.annotate(
            name, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylabel(ylabel, fontsize=9)
    panel.legend(fontsize=8.5, frameon=False, loc="upper right")
    steps = max(len(values) for values in series.values())
    alt = f"{ylabel} by step. " + "; ".join(
        f"{name}: from {values[0]:.4f} to {values[-1]:.4f}" for name, values in series.items()
    )
    return finish(canvas, f"Curves({', '.join(series)}; {steps} steps)", alt)
