"""The timeline of a recorded job: who did what when, two lanes a rank.

timeline(recording)              all of it
timeline(recording, step=2)      one step
"""

from collections.abc import Mapping

from labs.kit.drawing.figures import Figure, axes, finish, window
from labs.kit.drawing.palette import INK, TIMELINE, ink
from labs.kit.drawing.tables import clock

LANES = {  # top, height; a send and a recv of one exchange are under way together
    "communication": (-0.46, 0.36),
    "send": (-0.46, 0.18),
    "recv": (-0.28, 0.18),
    "compute": (-0.04, 0.44),
    "waiting": (-0.04, 0.44),
}


def timeline(recording, step: int | None = None, until: float | None = None) -> Figure:
    """Who did what when, on the job's one clock: two lanes a rank, what was on the way and what it computed.

    recording: a labs.kit.record.Recording; step: the one to show, by number (all of the job when left out);
    until: show only what had happened by then (s). Waiting is drawn over the rank's lane of compute, up to the
    end of the event that it waited for. Raises ValueError when there is no such step.
    """
    start, end = window(recording, step)
    factor, unit = clock(end - start)
    chip = {"boxstyle": "square,pad=0.15", "linewidth": 0}
    now = end if until is None else until
    canvas, (panel,) = axes(9.5, 0.9 + 0.55 * recording.ranks)
    for rank in range(recording.ranks):
        for doing, bars in doings(recording, rank).items():
            top, height = LANES[doing]
            fill = TIMELINE.get(doing, TIMELINE["communication"])
            inside = [(max(b, start), min(e, now, end), name) for b, e, name in bars if b < min(now, end) and e > start]
            panel.broken_barh(
                [(factor * (b - start), factor * (e - b)) for b, e, _ in inside],
                (rank + top, height),
                facecolor=fill,
                edgecolor="#8A8F98" if doing == "waiting" else "white",
                linewidth=0.4,
                hatch="////" if doing == "waiting" else None,
            )
            for b, e, name in inside:
                if len(name) * 0.009 * (end - start) < e - b:
                    place, colour = (
                        (factor * ((b + e) / 2 - start), rank + top + height / 2),
                        ink(fill),
                    )
                    panel.text(
                        *place,
                        name,
                        ha="center",
                        va="center",
                        fontsize=7.5 if height > 0.2 else 6.5,
                        color=colour,
                        bbox=chip | {"color": fill} if height > 0.2 else None,
                    )
    if until is not None:
        panel.axvline(factor * (until - start), color=INK, linewidth=1)
    panel.set(xlim=(0, factor * (end - start) or 1), ylim=(recording.ranks - 0.5, -0.55), xlabel=unit)
    panel.set_yticks(range(recording.ranks), [f"rank {rank}" for rank in range(recording.ranks)])
    legend(panel, TIMELINE)
    events = [event for event in recording.events if step in (None, event.step)]
    waits = [sum(event.waited for event in events if event.rank == rank) for rank in range(recording.ranks)]
    alt = f"Timeline of {recording.ranks} ranks over {factor * (end - start):.1f} {unit}. Waited: " + ", ".join(
        f"rank {rank} {factor * wait:.1f} {unit}" for rank, wait in enumerate(waits)
    )
    which = "" if step is None else f"step {step}, "
    return finish(canvas, f"Timeline({which}{recording.ranks} ranks, {len(events)} events)", alt)


def doings(recording, rank: int) -> dict[str, list[tuple[float, float, str]]]:
    """(start, end, label) of the bars of a rank, by what it did; a step without phases is one bar."""
    spans = [span for span in recording.spans if span.rank == rank]
    phases = [span for span in spans if span.name != "step"] or spans
    events = [event for event in recording.events if event.rank == rank]
    return {
        "compute": [(span.start, span.end, span.name) for span in phases],
        "communication": [(e.start, e.end, e.op) for e in events if e.op not in ("send", "recv")],
        "send": [(event.start, event.end, event.op) for event in events if event.op == "send"],
        "recv": [(event.start, event.end, event.op) for event in events if event.op == "recv"],
        "waiting": [(event.end - event.waited, event.end, "") for event in events if event.waited],
    }


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
