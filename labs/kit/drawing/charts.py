"""Two drawings from a handful of numbers: ranks as a grid, and the values of a formula as bars.

mesh({"data": 2, "tensor": 4})
chart({"ring": 0.0012, "tree": 0.0031}, "s", caption="8 ranks, 1 MB")
chart({"stage 0": {"P": 4, "G": 4, "S": 8}, "stage 3": {"P": 1, "G": 1, "S": 2}}, "B")
"""

from collections.abc import Mapping
from types import MappingProxyType

from labs.kit.drawing.palette import KINDS, MUTED, RANKS, SOFT, TIMELINE, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of
from labs.kit.drawing.tables import clock, short, show


def mesh(axes: Mapping[str, int], along: str = "") -> Drawing:
    """Draw ranks as a grid of one or two axes, in row-major order: {"data": 2, "tensor": 4}.

    along: the axis whose process groups are marked, each with a tint and a letter of its own.
    Raises ValueError for a mesh of more than two axes, and for an `along` that is not an axis.
    """
    if len(axes) not in (1, 2):
        raise ValueError(f"a mesh with {len(axes)} axes ({', '.join(axes)}) cannot be drawn flat: give one or two axes")
    if along and along not in axes:
        raise ValueError(f"along={along!r} is not an axis of the mesh: choose one of {', '.join(axes)}")
    (row_name, rows), (column_name, columns) = [("", 1), *axes.items()][-2:]
    title = "mesh " + " × ".join(f"{name} {extent}" for name, extent in axes.items())
    places = [divmod(rank, columns) for rank in range(rows * columns)]
    groups = [(row if along == column_name else column) if along else None for row, column in places]
    words = [
        f"Rank {rank} is at {f'{row_name} {row}, ' if row_name else ''}{column_name} {column}"
        + ("." if group is None else f", in group {'ABCDEFGH'[group % 8]} along {along}.")
        for rank, ((row, column), group) in enumerate(zip(places, groups, strict=True))
    ]
    left = 104 if row_name else 20
    title += f", groups along {along}" if along else ""
    canvas = Canvas(max(left + 64 * columns, 7 * len(title)) + 12, 64 + 48 * rows, title, " ".join(words))
    canvas.text(left + 32 * columns - 4, 18, f"{column_name} →", fill=MUTED)
    if row_name:
        canvas.text(50, 38, f"{row_name} ↓", fill=MUTED)
    for rank, ((row, column), group) in enumerate(zip(places, groups, strict=True)):
        x, y = left + 64 * column, 54 + 48 * row
        if row == 0:
            canvas.text(x + 28, 38, column, size=12, fill=MUTED)
        if column == 0 and row_name:
            canvas.text(left - 20, y + 20, row, size=12, fill=MUTED)
        canvas.rect(x, y, 56, 40, fill=SOFT if group is None else RANKS[group % len(RANKS)])
        canvas.text(x + 28, y + (20 if group is None else 14), f"rank {rank}", size=13)
        if group is not None:
            canvas.text(x + 28, y + 30, f"group {'ABCDEFGH'[group % 8]}", size=11, fill=MUTED)
    return canvas.drawing()


def chart(
    values: Mapping[str, float | Mapping[str, float]],
    unit: str = "B",
    kind: str = "comm",
    caption: str = "",
    words: Mapping[str, str] = MappingProxyType({}),
) -> Drawing:
    """Draw the values of a formula as bars.

    values: {name: value} draws one bar per name; {name: {kind: value}} stacks a name's bar by kind.
    unit: "B" for bytes, "s" for seconds, or the name of another unit.
    kind: the kind that gives the bar of a single value its colour, a key of KINDS or of TIMELINE.
    words: the words that replace the name of a kind in the picture: {"waiting": "work done again"}.
    """
    colours = KINDS | TIMELINE
    stacked = {name: value if isinstance(value, Mapping) else {kind: value} for name, value in values.items()}
    totals = {name: sum(parts.values()) for name, parts in stacked.items()}
    labels = {name: amount(total, unit) for name, total in totals.items()}
    longest, widest = max(map(len, totals)), max(totals.values()) or 1
    margin, top = width_of("m" * longest, 13) + 24, 46 if caption else 14
    text = "; ".join(f"{name}: {value}" for name, value in labels.items())
    width = max(margin + 420 + 110, width_of(caption, 13) + 30)
    canvas = Canvas(width, top + 34 * len(totals) + 6, caption or ", ".join(totals), text)
    canvas.text(16, 24, caption, anchor="start", weight="bold")
    for row, (name, parts) in enumerate(stacked.items()):
        y, x = top + 34 * row, margin
        canvas.text(margin - 10, y + 13, name, anchor="end")
        for part, value in parts.items():
            long = 420 * value / widest
            canvas.rect(x, y, long, 26, fill=colours[part])
            word = words.get(part, part)
            if len(parts) > 1 and long > width_of(word, 12) + 6:
                canvas.text(x + long / 2, y + 13, word, size=12, fill=ink(colours[part]))
            x += long
        canvas.text(x + 8, y + 13, labels[name], anchor="start")
    lines = [f"{name.ljust(longest)}  {value}" for name, value in labels.items()]
    return canvas.drawing("\n".join([caption, *lines] if caption else lines))


def amount(value: float, unit: str) -> str:
    """Return a value with its unit and a suitable prefix of the unit: "1.56 MiB", "12.3 ms"."""
    if unit == "B":
        return short(value)
    if unit == "s":
        factor, name = clock(value)
        return f"{value * factor:.3g} {name}"
    return show(value, unit)
