"""A drawing of the bytes that ranks on two nodes send in a step, with a line for each pair of ranks.

wire(recording, {"dp × tp": 1, "tp × dp": 3}, {"dp": "P", "tp": "A"})
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from labs.kit.drawing.palette import INK, KINDS, MUTED, PAPER, RANKS, SOFT
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

PANEL, NODE, APART, WIDE, TALL, STEP, TOP = 372, 112, 116, 76, 42, 96, 84  # pixels
THICK = 18  # pixels: the line of the pair that sends most
Pairs = dict[tuple[int, int], tuple[str, int]]  # {(rank, higher rank): (axis, bytes each way)}


def wire(recording: Any, steps: Mapping[str, int], kinds: Mapping[str, str]) -> Drawing:
    """Draw who sends how much in some steps of a job on two nodes of two ranks, side by side.

    recording: a labs.kit.record.Recording of communication, of a job with a Link of two nodes.
    steps: {title: number of the step}.
    kinds: {mesh axis: the kind that gives its lines their colour, a key of labs.kit.draw.KINDS}.
    """
    found = {title: pairs_of(recording, step) for title, step in steps.items()}
    most = max(size for pairs in found.values() for _, size in pairs.values())
    leaving = {
        title: sum(size for (a, b), (_, size) in pairs.items() if a // 2 != b // 2) for title, pairs in found.items()
    }
    words = "; ".join(f"{title}: {megabytes(size)} leave each node" for title, size in leaving.items())
    canvas = Canvas(
        PANEL * len(steps) + 16, TOP + STEP + TALL + 84, "Bytes sent in a step, by pair of ranks", f"{words}."
    )
    for number, axis in enumerate(kinds):
        canvas.line((16 + 130 * number, 20), (44 + 130 * number, 20), stroke=KINDS[kinds[axis]], line=8)
        canvas.text(52 + 130 * number, 20, f"along {axis}", 12.5, "start")
    canvas.text(16 + 130 * len(kinds), 20, "a line's width: the bytes each way", 12.5, "start", fill=MUTED)
    for number, (title, pairs) in enumerate(found.items()):
        panel(canvas, 16 + PANEL * number, title, pairs, most, kinds)
        canvas.text(
            16 + PANEL * number + (2 * NODE + APART) / 2,
            canvas.height - 18,
            f"{megabytes(leaving[title])} leave each node",
            weight="bold",
        )
    return canvas.drawing()


def panel(canvas: Canvas, x0: float, title: str, pairs: Pairs, most: int, kinds: Mapping[str, str]) -> None:
    middle = x0 + NODE + APART / 2
    canvas.text(middle, 50, title, 15, weight="bold")
    for node in (0, 1):
        x = x0 + node * (NODE + APART)
        canvas.rect(x, TOP - 16, NODE, STEP + TALL + 48, fill=SOFT, stroke=MUTED, radius=6)
        canvas.text(x + NODE / 2, TOP + STEP + TALL + 18, f"node {node}", 12, fill=MUTED)
    places = {rank: (x0 + rank // 2 * (NODE + APART) + NODE / 2, TOP + rank % 2 * STEP + TALL / 2) for rank in range(4)}
    for (a, b), (axis, size) in pairs.items():
        (x, y), (to_x, to_y) = places[a], places[b]
        ends = (
            ((x, y + TALL / 2), (to_x, to_y - TALL / 2)) if x == to_x else ((x + WIDE / 2, y), (to_x - WIDE / 2, to_y))
        )
        canvas.line(*ends, stroke=KINDS[kinds[axis]], line=max(2, THICK * size / most))
        at = ((x + to_x) / 2, (y + to_y) / 2)
        canvas.rect(at[0] - 31, at[1] - 9, 62, 18, fill=PAPER, stroke=MUTED, line=0.5)
        canvas.text(*at, megabytes(size), 12)
    for rank, (x, y) in places.items():
        canvas.rect(x - WIDE / 2, y - TALL / 2, WIDE, TALL, fill=RANKS[rank], stroke=INK)
        canvas.text(x, y, f"rank {rank}", 13)


def pairs_of(recording: Any, step: int) -> Pairs:
    """Return the axis along which each pair of ranks sends in a step, and the bytes that the lower rank sends.

    Raises ValueError unless the job has two nodes of two ranks, and a pair sends along one axis.
    """
    if recording.ranks != 4 or recording.link is None or recording.link.nodes != 2:
        raise ValueError(f"{recording.ranks} ranks cannot be drawn: give a job of 4 ranks with a Link of 2 nodes")
    found: dict[tuple[int, int], Counter[str]] = {}
    for rank in range(recording.ranks):
        for event in recording.select(rank, step):
            for other, size in event.to.items():
                if size and rank < other:
                    found.setdefault((rank, other), Counter())[event.group.removeprefix("mesh_")] += size
    if mixed := {pair: axes for pair, axes in found.items() if len(axes) > 1}:
        raise ValueError(f"these ranks send along several axes, and a line has one colour: {mixed}")
    return {pair: next(iter(axes.items())) for pair, axes in found.items()}


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 50_000 else f"{size / 1e3:.1f} kB"
