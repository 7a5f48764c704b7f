"""Drawings of products of matrices, in which a coloured line shows along which dim each matrix is cut.

products(cases, sent)     a row for each product x @ w, with the bytes that a rank sends for it
matrix(canvas, ...)       one matrix with its cuts; the film of a propagation draws its rows with it
"""

from collections.abc import Mapping, Sequence

from labs.dtensor.placement import Placement, Shard
from labs.kit.drawing.palette import INK, KINDS, MUTED, SOFT
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

COLOURS = KINDS["P"], KINDS["comm"]  # one for each axis of the mesh
WIDE, HIGH = 84, 44
Product = tuple[Sequence[Sequence[int]], Sequence[Placement]]


def matrix(
    canvas: Canvas, x: float, y: float, name: str, placements: Sequence[Placement | None], fill: str, new: bool = False
) -> None:
    """Draw a matrix: a line across it where its rows are cut, a line down where its columns are.

    placements: one for each axis of the mesh; None for a layout that is not known yet.
    """
    canvas.rect(x, y, WIDE, HIGH, fill, dash="4 3" if None in placements else "", line=2.5 if new else 1)
    for colour, placement in zip(COLOURS, placements, strict=False):
        if isinstance(placement, Shard):
            across = placement.dim == 0
            ends = ((x, y + 10), (x + WIDE, y + 10)) if across else ((x + 10, y), (x + 10, y + HIGH))
            canvas.line(*ends, stroke=colour, line=4)
    canvas.text(x + WIDE / 2 + 4, y + HIGH / 2 + 4, name, 13, weight="bold")


def products(cases: Mapping[str, Product], sent: Mapping[str, Mapping[str, tuple[int, str]]]) -> Drawing:
    """Draw each product with its layouts, and the bytes that a rank sends.

    cases: {name: (shapes of x and w, placements of x, w and the result)}.
    sent: {name: {who decides: (bytes, names of the collectives)}}.
    """
    left, apart, top, row = 60, 124, 84, 96
    columns = list(next(iter(sent.values())))
    words = " ".join(
        f"{name}: " + "; ".join(f"{who} sends {size:,} bytes, {how}" for who, (size, how) in each.items()) + "."
        for name, each in sent.items()
    )
    start = left + 3 * apart + 30
    canvas = Canvas(start + 190 * len(columns), top + row * len(cases), "What a rank sends for a product", words)
    canvas.line((16, 24), (44, 24), stroke=COLOURS[0], line=4)
    canvas.text(52, 24, "cut here: each of 4 ranks holds a quarter of the rows, or of the columns", 13, "start")
    for number, who in enumerate(columns):
        canvas.text(start + 190 * number, 58, who, 13, "start", "bold")
    for place, (name, (shapes, placements)) in enumerate(cases.items()):
        y = top + row * place
        canvas.text(16, y + HIGH / 2, name, 16, "start", "bold")
        (rows, inner), (_, outer) = shapes
        sides = zip("xwy", placements, ((rows, inner), (inner, outer), (rows, outer)), "×= ", strict=True)
        for number, (letter, placement, shape, sign) in enumerate(sides):
            x = left + apart * number
            matrix(canvas, x, y, letter, [placement], SOFT)
            canvas.text(x + WIDE / 2, y + HIGH + 14, f"{shape[0]:,} × {shape[1]:,}", 12, fill=MUTED)
            canvas.text(x + WIDE + 20, y + HIGH / 2, sign.strip(), 16, fill=INK)
        for number, (size, how) in enumerate(sent[name].values()):
            x = start + 190 * number
            canvas.text(x, y + 12, f"{size:,} bytes" if size else "nothing", 13, "start", "bold" if size else "")
            canvas.lines(x, y + 32, how.split(" + ") if size else [], 12, anchor="start", fill=MUTED)
    return canvas.drawing()
