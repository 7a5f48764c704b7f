"""The pictures of FSDP.

fsdp_table      two parameters on two ranks: pieces, padding, the table that travels     06
fsdp_prefetch   forward with the next layer on its way, and without                      06
"""

from itertools import chain

from labs.kit.drawing.palette import KINDS, MUTED, RANKS, TIMELINE, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

NOTE = {"size": 12.5, "anchor": "start", "fill": MUTED}
CELL, HIGH = 30, 26  # pixels of an element
PADDING = {"fill": "#FFFFFF", "stroke": "#B0B5BC", "dash": "3 3"}


def cells(canvas: Canvas, x: float, y: float, names: list[str], rank: int) -> float:
    """Elements of one rank side by side, "" for padding; returns where they end."""
    for number, name in enumerate(names):
        style = {"fill": RANKS[rank]} if name else PADDING
        canvas.rect(x + CELL * number, y, CELL, HIGH, radius=0, **style)
        canvas.text(x + CELL * (number + 0.5), y + HIGH / 2, name or "0", size=12, fill="#1F2328" if name else MUTED)
    return x + CELL * len(names)


def fsdp_table() -> Drawing:
    weight = [[f"w{row}{column}" for column in range(2)] for row in range(5)]
    bias = [f"b{row}" for row in range(3)]
    canvas = Canvas(
        990, 330, "Two parameters on two ranks, from shards to one table and back",
        "A weight of five rows and a bias of three elements. Rank 0 holds rows 0 to 2 of the weight and elements 0 and "
        "1 of the bias; rank 1 the rest, padded with zeros to the same length. Each rank lays its pieces side by side; "
        "one all-gather makes of these a table of two rows. Its columns are copied to the weight and to the bias, "
        "without the padding.",
    )  # fmt: skip
    flat = [*chain(*weight)]
    pieces = [(flat[:6], bias[:2]), ([*flat[6:], "", ""], [*bias[2:], ""])]
    for x, title in (
        (16, "shards, each under its own name"),
        (380, "what travels: a row for each rank"),
        (730, "full"),
    ):
        canvas.text(x, 26, title, size=14, weight="bold", anchor="start")
    for rank, (of_weight, of_bias) in enumerate(pieces):
        y = 60 + 130 * rank
        canvas.text(16, y - 10, f"rank {rank}", **NOTE)
        rows = [of_weight[i : i + 2] for i in range(0, 6, 2)]
        for number, row in enumerate(row for row in rows if row[0]):
            cells(canvas, 16, y + 6 + HIGH * number, row, rank)
        cells(canvas, 110, y + 6, [name for name in of_bias if name], rank)
        canvas.text(16, y + 96, "weight", **NOTE)
        canvas.text(110, y + 96, "bias", **NOTE)
        end = cells(canvas, 380, 110 + HIGH * rank, of_weight, rank)
        cells(canvas, end + 8, 110 + HIGH * rank, of_bias, rank)
    canvas.text(380, 96, "weight", **NOTE)
    canvas.text(380 + 6 * CELL + 8, 96, "bias", **NOTE)
    canvas.arrow((210, 136), (366, 136), stroke=KINDS["comm"])
    canvas.text(288, 120, "all-gather", size=12.5)
    canvas.arrow((644, 136), (716, 136), stroke=MUTED)
    canvas.text(680, 120, "copy", size=12.5)
    for number, row in enumerate(weight):
        cells(canvas, 730, 66 + HIGH * number, row, number // 3)
    for number, name in enumerate(bias):
        cells(canvas, 830, 66 + HIGH * number, [name], number // 2)
    canvas.text(730, 52, "weight", **NOTE)
    canvas.text(830, 52, "bias", **NOTE)
    canvas.text(
        16, 312, "w31: row 3, column 1. Dashed: padding. Pale blue came from rank 0, pale red from rank 1.", **NOTE
    )
    return canvas.drawing()


def fsdp_prefetch() -> Drawing:
    canvas = Canvas(
        990, 300, "Forward of four layers, with each gather when it is needed, and one layer ahead",
        "Above: gather 1, compute 1, gather 2, compute 2, and so on; the rank waits for every gather. Below: while "
        "layer 1 computes, gather 2 is under way, and so on; the rank waits for the first gather only, and holds two "
        "layers at a time.",
    )  # fmt: skip
    left, unit = 150, 88
    for row, (name, ahead) in enumerate({"when needed": False, "one ahead": True}.items()):
        y = 60 + 120 * row
        canvas.text(16, y + 30, name, size=15, weight="bold", anchor="start")
        clock = 0.0
        for layer in range(1, 5):
            sets_out = clock if layer == 1 or not ahead else clock - 1.2
            canvas.rect(left + unit * sets_out, y, unit * 0.9, HIGH + 2, fill=KINDS["comm"])
            canvas.text(left + unit * (sets_out + 0.45), y + 14, f"gather {layer}", size=12, fill=ink(KINDS["comm"]))
            clock = max(clock, sets_out + 0.9)
            canvas.rect(left + unit * clock, y + HIGH + 6, unit * 1.2, HIGH + 2, fill=TIMELINE["compute"])
            canvas.text(left + unit * (clock + 0.6), y + HIGH + 20, f"layer {layer}", size=12)
            clock += 1.2
        canvas.line((left + unit * clock, y - 8), (left + unit * clock, y + 70), stroke=MUTED, dash="4 3")
        canvas.text(left + unit * clock + 6, y + 30, "done", **NOTE)
    canvas.text(16, 282, "Schematic: a layer is dropped when it has computed. The notebook measures.", **NOTE)
    return canvas.drawing()
