"""Drawings of a recorded step by mesh axis: what leaves a node in several orders of axes, and one rank's timeline.

orders({"pp × shard × tp": recording, ...}, step=1)     two nodes per order; the arrow's width is the bytes that leave
rank_by_axis(recording, rank=0, step=1)                 a lane for each axis, with a bar for each call, as PNG
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from labs.kit.drawing.figures import WIDE, axes, finish, window
from labs.kit.drawing.palette import INK, KINDS, MUTED, PAPER, SOFT, TIMELINE
from labs.kit.drawing.picture import Drawing, Figure
from labs.kit.drawing.svg import Canvas

AXES = {"pp": KINDS["A"], "replicate": KINDS["S"], "shard": KINDS["P"], "tp": KINDS["comm"]}
CELL, NODE, BETWEEN, THICK, TALL, LEFT = 36, 160, 220, 30, 126, 150  # pixels


def orders(recordings: Mapping[str, Any], step: int, sizes: Mapping[str, int]) -> Drawing:
    """Draw the bytes that leave node 0 in a step, by axis, for each order of the axes.

    recordings: {"pp × shard × tp", an order of axes: a recording of communication of a job with a Link}.
    sizes: {axis: its number of ranks}.
    """
    found = {name: leaving(recording, step) for name, recording in recordings.items()}
    most = max(sum(sent.values()) for sent in found.values())
    words = "; ".join(
        f"{name}: " + ", ".join(f"{size:,} bytes along {axis}" for axis, size in sent.items())
        for name, sent in found.items()
    )
    canvas = Canvas(LEFT + 2 * NODE + BETWEEN + 20, 54 + TALL * len(found), "Bytes that leave a node in a step", words)
    shown = [axis for axis in AXES if any(axis in sent for sent in found.values())]
    for number, axis in enumerate(shown):
        canvas.line((16 + 120 * number, 20), (44 + 120 * number, 20), stroke=AXES[axis], line=8)
        canvas.text(52 + 120 * number, 20, f"along {axis}", 12.5, "start")
    canvas.text(16 + 120 * len(shown), 20, "an arrow's width: the bytes that leave node 0", 12.5, "start", fill=MUTED)
    for row, (name, sent) in enumerate(found.items()):
        y, recording, order = 44 + TALL * row, recordings[name], name.split(" × ")
        canvas.text(16, y + 52, name, 14, "start", "bold")
        half = recording.ranks // 2
        for rank in range(recording.ranks):
            node, place = divmod(rank, half)
            x = LEFT + node * (NODE + BETWEEN)
            if not place:
                canvas.rect(x, y, NODE, 104, SOFT, MUTED, radius=6)
                canvas.text(x + NODE / 2, y + 12, f"node {node}", 12, fill=MUTED)
            canvas.rect(x + 8 + place * CELL, y + 24, CELL - 4, 74, PAPER)
            middle, rest = x + 6 + place * CELL + CELL / 2, rank
            canvas.text(middle, y + 35, rank, 13, weight="bold")
            for line in reversed(range(len(order))):
                rest, at = divmod(rest, sizes[order[line]])
                canvas.text(middle, y + 52 + 16 * line, f"{order[line][0]} {at}", 12, weight="" if line else "bold")
        for axis, size in sent.items():
            width = max(2.0, THICK * size / most)
            ends = (LEFT + NODE + 6, y + 60), (LEFT + NODE + BETWEEN - 6, y + 60)
            canvas.arrow(*ends, stroke=AXES[axis], line=width, head=max(12.0, 1.2 * width))
            canvas.text(LEFT + NODE + BETWEEN / 2, y + 34, f"{size:,} bytes", 13, weight="bold")
    return canvas.drawing()


def leaving(recording: Any, step: int) -> Counter[str]:
    """Return {axis: bytes that the ranks of node 0 send to other nodes}."""
    sent: Counter[str] = Counter()
    for rank in range(recording.ranks // recording.link.nodes):
        for event in recording.select(rank, step):
            if size := recording.link.across(rank, event.to, recording.ranks):
                sent[event.group.removeprefix("mesh_")] += size
    return sent


def waited_from(event: Any) -> float:
    """Return when a rank began to wait for a message, which was posted long before; its end if it did not wait."""
    return min([a for a, _ in event.waits], default=event.end)


def rank_by_axis(recording: Any, rank: int, step: int) -> Figure:
    """Draw the calls of a rank in a step, with a lane for each axis, and when the rank waited for them.

    Along pp, where messages are posted long before they arrive, a bar is the wait for one, or a thin mark without it.
    """
    start, end = window(recording, step, [rank])
    events = [event for event in recording.select(rank, step) if len(event.ranks) > 1]
    lanes = [axis for axis in AXES if any(event.group.removeprefix("mesh_") == axis for event in events)]
    canvas, (panel,) = axes(WIDE, 0.9 + 0.38 * (len(lanes) + 1))
    for number, axis in enumerate(lanes):
        own = [event for event in events if event.group.removeprefix("mesh_") == axis]
        begun = [waited_from(event) if axis == "pp" else event.start for event in own]
        bars = [(1e3 * (b - start), max(0.2, 1e3 * (e.end - b))) for b, e in zip(begun, own, strict=True)]
        panel.broken_barh(bars, (number, 0.8), facecolors=AXES[axis], edgecolors=INK, linewidth=0.3)
    waits = [(1e3 * (a - start), 1e3 * (b - a)) for event in events for a, b in event.waits]
    panel.broken_barh([(0, 1e3 * (end - start))], (len(lanes), 0.8), facecolors=TIMELINE["compute"])
    panel.broken_barh(waits, (len(lanes), 0.8), facecolors=TIMELINE["waiting"], edgecolors=MUTED, hatch="////")
    counts = Counter(event.group.removeprefix("mesh_") for event in events)
    labels = [f"{axis}: {counts[axis]} calls" for axis in lanes] + ["computes, or waits ////"]
    panel.set(xlim=(0, 1e3 * (end - start)), ylim=(len(lanes) + 1, -0.2), xlabel="ms")
    panel.set_yticks([number + 0.4 for number in range(len(labels))], labels)
    panel.tick_params(axis="y", length=0)
    text = f"Rank {rank} in a step: " + ", ".join(f"{counts[axis]} calls along {axis}" for axis in lanes)
    return finish(canvas, text, text)
