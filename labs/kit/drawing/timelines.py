"""Timelines of recorded jobs: the phases, the communication and the waiting of each rank.

timeline(recording)                                       the whole job
timeline(recording, step=2)                               one step
timeline(ours, native, step=2, names=("ours", "native"))  two jobs, one above the other, both from second 0 on
timeline(ours, native, step=(3, 1), names=...)            two jobs, with a different step of each job

Each rank has, from top to bottom: a thin band with the names of its phases; one lane for each collective that was in
flight at the same time; and a lane that shows when the rank computed and when it waited (hatched).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labs.kit.drawing.figures import LEGEND, SHOWN, WIDE, axes, finish, fitting, phases, window
from labs.kit.drawing.palette import COLLECTIVES, INK, KINDS, PAPER, SOFT, TIMELINE, ink
from labs.kit.drawing.picture import Figure
from labs.kit.drawing.tables import clock

BAND, LANE, DOING, APART, NAME = 17, 16, 9, 12, 24  # pixels: phases, a lane, compute, between ranks, a job's name
LANES = 6  # if more collectives are in flight at once, the lanes are thinner and have no labels
LONG = WIDE * SHOWN - 70  # pixels of the x axis
MARGIN = 1.01  # the x axis ends at this multiple of the longest job, so that the last bars end before the edge
EDGE = "#8A8F98"
SHORT = {
    "all_reduce": "ar", "all_gather": "ag", "reduce_scatter": "rs", "all_to_all": "a2a", "broadcast": "bc",
    "reduce": "re", "gather": "ga", "scatter": "sc", "barrier": "ba", "send": "s", "recv": "r",
}  # fmt: skip


@dataclass(frozen=True)
class Bar:
    start: float  # seconds after the beginning of the figure
    end: float
    fill: str
    labels: tuple[str, ...] = ()  # the first label that fits into the bar is drawn
    op: str = ""
    hatch: str = ""


def timeline(
    *recordings, step: int | Sequence[int] | None = None, names: Sequence[str] = (), until: float | None = None
) -> Figure:
    """Draw when each rank computed, communicated and waited; the ranks of one job share a clock.

    Several jobs are drawn one above the other, all from second 0 on.  A rank's third all-gather of the step, or of the
    job, is labelled "all-gather 3", or "ag 3" if there is less room.

    recordings: labs.kit.record.Recordings.
    step: the number of the step to show, or one number per recording; the whole job when left out.
    names: one name per recording.
    until: the last moment to show, in seconds after the beginning; the whole step or job when left out.
    Raises ValueError if a recording has no such step, or if the number of steps or names is wrong.
    """
    names = names or [""] * len(recordings)
    steps = list(step) if isinstance(step, Sequence) else [step] * len(recordings)
    if len(steps) != len(recordings):
        raise ValueError(
            f"step has {len(steps)} numbers for {len(recordings)} recordings: give one number for each, or one for all"
        )
    windows = list(map(window, recordings, steps))
    longest = max(end - start for start, end in windows)
    factor, unit = clock(longest)
    y, titles, ticks, shown = 0.0, {}, {}, []
    for recording, number, times, name in zip(recordings, steps, windows, names, strict=True):
        if name:
            titles[y + NAME / 2] = name
            y += NAME
        for rank in recording.seen:
            top = y
            for height, bars in lanes(recording, rank, number, *times):
                shown.append((y, height, bars))
                y += height
            ticks[(top + y) / 2] = f"rank {rank}"
            y += APART
    canvas, (panel,) = axes(WIDE, (y + 76) / SHOWN)
    panel.set(xlim=(0, MARGIN * factor * longest or 1), ylim=(y - APART, 0), xlabel=unit)
    panel.set_yticks(list(ticks), list(ticks.values()))
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    for top, height, bars in shown:
        paint(panel, top, height, cut(bars, longest if until is None else until), factor)
    for middle, name in titles.items():
        panel.text(0, middle, name, fontsize=9.5, fontweight="bold", va="center", color=INK)
    if until is not None:
        panel.axvline(factor * until, color=INK, linewidth=1)
    legend(panel, {bar.op for _, _, bars in shown for bar in bars})
    which = [f"step {step}"] if isinstance(step, int) else []
    summaries = [summary(*each, factor, unit) for each in zip(recordings, names, steps, strict=True)]
    text = f"Timeline({', '.join(which + [text for text, _ in summaries])})"
    return finish(canvas, text, f"Timeline of {factor * longest:.1f} {unit}. " + ". ".join(alt for _, alt in summaries))


def summary(recording, name: str, step: int | None, factor: float, unit: str) -> tuple[str, str]:
    """Return two descriptions of a recording: one that is equal in every run, and one with the measured times."""
    events = [event for event in recording.events if step in (None, event.step)]
    begin = f"{name}: " if name else ""
    waits = {rank: sum(event.waited for event in events if event.rank == rank) for rank in recording.seen}
    waited = ", ".join(f"rank {rank} waited {factor * wait:.1f} {unit}" for rank, wait in waits.items())
    return f"{begin}{recording.ranks} ranks, {len(events)} events", f"{begin}{recording.ranks} ranks; {waited}"


def cut(bars: Sequence[Bar], end: float) -> list[Bar]:
    """Return the bars of a timeline cut off at second 0 and at `end`."""
    inside = (replace(bar, start=max(0.0, bar.start), end=min(bar.end, end)) for bar in bars)
    return [bar for bar in inside if bar.start < bar.end]


def paint(panel, top: float, height: float, bars: Sequence[Bar], factor: float) -> None:
    """Draw the bars of one lane of a timeline, and the labels that fit into them."""
    pixels = LONG / panel.get_xlim()[1]
    for hatch in ("", "////"):
        alike = [bar for bar in bars if bar.hatch == hatch]
        edges = [EDGE if hatch or bar.fill == SOFT else PAPER for bar in alike]
        style = {"facecolors": [bar.fill for bar in alike], "edgecolors": edges, "hatch": hatch, "linewidth": 0.5}
        panel.broken_barh(
            [(factor * bar.start, factor * (bar.end - bar.start)) for bar in alike], (top, height), **style
        )
    for bar in bars if height > 12 else ():
        if label := fitting(bar.labels, pixels * factor * (bar.end - bar.start), size=11.6):
            middle = factor * (bar.start + bar.end) / 2, top + height / 2
            style = {"ha": "center", "va": "center_baseline", "fontsize": 8.7, "color": ink(bar.fill)}
            panel.text(*middle, label, in_layout=False, **style)


def lanes(recording, rank: int, step: int | None, start: float, end: float) -> list[tuple[float, list[Bar]]]:
    """Return the (height, bars) of each lane of a rank's timeline, from top to bottom."""
    calls = on_the_way(recording, rank, step, start, end)
    height = LANE * min(1.0, LANES / max(1, len(calls)))
    span = recording, rank, start, end
    return [(BAND, band(*span)), *((height, bars) for bars in calls), (DOING, doing(*span))]


def band(recording, rank: int, start: float, end: float) -> list[Bar]:
    """Return the phases of a rank as bars of the timeline, or its steps if the job marked no phases."""
    steps = [span for span in recording.spans if span.rank == rank and span.name == "step"]
    return [Bar(s.start - start, s.end - start, SOFT, (s.name,)) for s in phases(recording, rank, start, end) or steps]


def on_the_way(recording, rank: int, step: int | None, start: float, end: float) -> list[list[Bar]]:
    """Return the lanes of a rank's communication: each call takes the first free lane; receives come last.

    Calls of the shown step are numbered, separately for each op; calls of other steps have no label.
    """
    seen, above, below = Counter(), [], []
    for event in recording.events:  # sorted by their start
        if event.rank != rank or event.start >= end or event.end <= start:
            continue
        op, labels = called(event), ()
        if step in (None, event.step):
            seen[op] += 1
            number = str(seen[op])
            labels = f"{op.replace('_', '-')} {number}", f"{SHORT.get(op, op)} {number}", number
        bar = Bar(event.start - start, event.end - start, fill_of(op), labels, op)
        lanes = below if event.op == "recv" else above
        lane = next((lane for lane in lanes if lane[-1].end <= bar.start), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(bar)
    return above + below


def called(event) -> str:
    """Return the op that an event is part of: on gloo, labs.group builds a reduce-scatter from an all-to-all."""
    return "reduce_scatter" if event.issuer.endswith("start_reduce_scatter") else event.op


def fill_of(op: str) -> str:
    return COLLECTIVES.get(op, KINDS["comm"])


def doing(recording, rank: int, start: float, end: float) -> list[Bar]:
    """Return bars for the times in which a rank computed, and over them bars for the times in which it waited."""
    waits = [wait for event in recording.events if event.rank == rank for wait in event.waits]
    return [
        *(Bar(each.start, each.end, TIMELINE["compute"]) for each in band(recording, rank, start, end)),
        *(Bar(a - start, b - start, TIMELINE["waiting"], hatch="////") for a, b in waits if a < end and b > start),
    ]


def legend(panel, ops: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=TIMELINE["compute"], label="compute"),
        Patch(facecolor=TIMELINE["waiting"], edgecolor=EDGE, hatch="////", label="waiting"),
        *(
            Patch(facecolor=fill_of(op), label=f"{short} {op.replace('_', '-')}")
            for op, short in SHORT.items()
            if op in ops
        ),
    ]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    panel.legend(handles=patches, ncols=len(patches), **place, **LEGEND)
