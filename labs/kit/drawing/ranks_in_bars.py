"""A drawing of what each rank sends along each axis and holds of P, G and S: measured bars, and a line per prediction.

sent_and_held(predicted, {"ours": [{"pp": 4096, ..., "S": 9216} of each rank], "PyTorch's": [...]})
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from labs.kit.drawing.bytes_of_axes import AXES
from labs.kit.drawing.palette import INK, KINDS, MUTED
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

PerRank = Sequence[Mapping[str, int]]
PANELS = {  # {title: {name: (label, colour)}}
    "A rank sends in a step, in bytes": {axis: (f"along {axis}", AXES[axis]) for axis in ("tp", "shard", "pp")},
    "A rank holds, in bytes": {
        kind: (name, KINDS[kind]) for kind, name in (("S", "optimizer state S"), ("G", "gradients G"), ("P", "P"))
    },
}
LEFT, EACH, BAR, HIGH, TALL, FOOT = 16, 84, 30, 130, 206, 34  # pixels


def sent_and_held(predicted: PerRank, measured: Mapping[str, PerRank]) -> Drawing:
    """Draw two panels, what the ranks send and what they hold, with a stacked bar per rank and implementation.

    predicted: the bytes of each rank, along "pp", "shard" and "tp", and of "P", "G" and "S".
    measured: {implementation: the same bytes, measured}.
    """
    words = "; ".join(f"{name}: {furthest(predicted, ranks)}" for name, ranks in measured.items())
    title = "What each rank sends and holds, measured and predicted"
    canvas = Canvas(2 * LEFT + EACH * max(8, len(predicted)), len(PANELS) * TALL + FOOT, title, words)
    for number, (heading, names) in enumerate(PANELS.items()):
        panel(canvas, 20 + TALL * number, heading, names, predicted, measured)
    canvas.line((LEFT, canvas.height - 18), (LEFT + 26, canvas.height - 18), line=3)
    bars = ", ".join(f"{side} bar: {name}" for side, name in zip(("left", "right"), measured, strict=False))
    canvas.text(LEFT + 34, canvas.height - 18, f"predicted; {bars}; on top: the sum, predicted", 12.5, "start")
    return canvas.drawing()


def furthest(predicted: PerRank, ranks: PerRank) -> str:
    """Return how far measured bytes are from predicted ones at most, in words."""
    names = [name for panel in PANELS.values() for name in panel]
    most = max(abs(own[name] - due[name]) for own, due in zip(ranks, predicted, strict=True) for name in names)
    return f"off by at most {most:,} bytes" if most else "equal to the prediction"


def panel(
    canvas: Canvas,
    top: float,
    heading: str,
    names: Mapping[str, tuple[str, str]],
    predicted: PerRank,
    measured: Mapping[str, PerRank],
) -> None:
    canvas.text(LEFT, top, heading, 13.5, "start", "bold")
    for number, (label, colour) in enumerate(reversed(names.values())):
        canvas.rect(LEFT + 270 + 130 * number, top - 7, 14, 14, colour)
        canvas.text(LEFT + 290 + 130 * number, top, label, 12.5, "start")
    sides, foot = [predicted, *measured.values()], top + 42 + HIGH
    most = max(sum(rank[name] for name in names) for side in sides for rank in side)
    for rank, due in enumerate(predicted):
        x0 = LEFT + EACH * rank
        for number, ranks in enumerate(measured.values()):
            below = 0.0
            for name, (_, colour) in names.items():
                height = HIGH * ranks[rank][name] / most
                canvas.rect(x0 + 8 + number * (BAR + 4), foot - below - height, BAR, height, colour, radius=0)
                below += height
        for level in accumulate(due[name] for name in names):
            y = foot - HIGH * level / most
            canvas.line((x0 + 3, y), (x0 + 13 + len(measured) * (BAR + 4), y), stroke=INK, line=3)
        total = sum(due[name] for name in names)
        middle = x0 + 6 + len(measured) * (BAR + 4) / 2
        canvas.text(middle, foot - HIGH * total / most - 12, f"{total:,}", 12)
        canvas.text(middle, foot + 11, f"rank {rank}", 12, fill=MUTED)
