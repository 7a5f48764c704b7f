"""The pictures of FSDP.

fsdp_table      two parameters on two ranks: pieces, padding, the table that travels     06
fsdp_prefetch   forward with the next layer's gather in flight, and without              06
fsdp_flight     backward: which five layers' worth of memory is in flight                06
"""

from itertools import chain

from labs.kit.drawing.palette import KINDS, MUTED, RANKS, TIMELINE
from labs.kit.drawing.picture import Drawing
from tools.sketch import GONE, Sketch

CELL, HIGH = 30, 26  # size of an element in pixels


def cells(canvas: Sketch, x: float, y: float, names: list[str], rank: int) -> float:
    """Draw the elements of one rank side by side, with "" for padding. Returns the x at which they end."""
    for number, name in enumerate(names):
        style = {"fill": RANKS[rank]} if name else GONE
        canvas.rect(x + CELL * number, y, CELL, HIGH, radius=0, **style)
        canvas.text(x + CELL * (number + 0.5), y + HIGH / 2, name or "0", size=12, fill="#1F2328" if name else MUTED)
    return x + CELL * len(names)


def fsdp_table() -> Drawing:
    weight = [[f"w{row}{column}" for column in range(2)] for row in range(5)]
    bias = [f"b{row}" for row in range(3)]
    canvas = Sketch(
        990, 340, "Two parameters on two ranks, from shards to one table and back",
        "A weight of five rows and a bias of three elements. Rank 0 holds rows 0 to 2 of the weight and elements 0 and "
        "1 of the bias; rank 1 the rest. Each rank lays its pieces side by side, padded with zeros to the same length; "
        "one all-gather makes of these a table of two rows. Its columns are copied to the weight and to the bias, "
        "without the padding.",
    )  # fmt: skip
    for x, title in (
        (16, "shards, each under its own name"),
        (380, "what travels: a row for each rank"),
        (730, "full"),
    ):
        canvas.heading(x, 26, title)
    for rank, (rows, elements) in enumerate([(weight[:3], bias[:2]), (weight[3:], bias[2:])]):
        y = 60 + 128 * rank
        canvas.note(16, y + 20 + HIGH, f"rank {rank}")
        rows_of(canvas, 76, y + 20, "weight", rows, [rank] * 3)
        rows_of(canvas, 170, y + 20, "bias", [[name] for name in elements], [rank] * 2)
        padding = [""] * (6 - 2 * len(rows)), [""] * (2 - len(elements))
        end = cells(canvas, 380, 110 + HIGH * rank, [*chain(*rows), *padding[0]], rank)
        cells(canvas, end + 8, 110 + HIGH * rank, [*elements, *padding[1]], rank)
    canvas.note(380, 96, "weight")
    canvas.note(380 + 6 * CELL + 8, 96, "bias")
    canvas.arrow((240, 136), (366, 136), stroke=KINDS["comm"])
    canvas.text(303, 120, "all-gather", size=12.5)
    canvas.arrow((644, 136), (716, 136), stroke=MUTED)
    canvas.text(680, 120, "copy", size=12.5)
    rows_of(canvas, 730, 80, "weight", weight, [0, 0, 0, 1, 1])
    rows_of(canvas, 830, 80, "bias", [[name] for name in bias], [0, 0, 1])
    canvas.note(16, 322, "w31: row 3, column 1. Dashed: padding. Pale blue came from rank 0, pale red from rank 1.")
    return canvas.drawing()


def rows_of(canvas: Sketch, x: float, y: float, title: str, rows: list[list[str]], ranks: list[int]) -> None:
    """Draw the rows of a parameter one below the other, under its name. ranks: the rank that holds each row."""
    canvas.note(x, y - 14, title)
    for number, (row, rank) in enumerate(zip(rows, ranks, strict=False)):
        cells(canvas, x, y + HIGH * number, row, rank)


GATHER, COMPUTE = 0.9, 1.2  # duration of one layer's gather and computation, in units of time
LEFT, UNIT, THIN = 150, 88, 13  # pixels: where time begins, the width of a time unit, the height of a bar of memory


def fsdp_prefetch() -> Drawing:
    canvas = Sketch(
        990, 350, "Forward of four layers, with each gather when it is needed, and one layer ahead",
        "Above: gather 1, compute 1, gather 2, compute 2, and so on; the rank waits for every gather, and holds one "
        "layer at a time. Below: while layer 1 computes, gather 2 is under way, and so on; the rank waits for the "
        "first gather only, and holds two layers at a time. A layer is held from the start of its gather until it has "
        "computed.",
    )  # fmt: skip
    for row, (name, ahead) in enumerate({"when needed": False, "one layer ahead": True}.items()):
        y = 44 + 148 * row
        canvas.heading(16, y - 20, name, size=15)
        for title, down in (("on the wire", 14), ("computes", HIGH + 20), ("held", 2 * HIGH + 26)):
            canvas.text(LEFT - 12, y + down, title, size=12.5, anchor="end", fill=MUTED)
        done = forward(canvas, y, ahead)
        canvas.line((done, y - 8), (done, y + 96), stroke=MUTED, dash="4 3")
        canvas.note(done + 6, y + 30, "done")
    canvas.arrow((LEFT, 314), (900, 314), stroke=MUTED)
    canvas.note(908, 314, "time")
    canvas.note(16, 336, "A schematic; measured below. Held: from the start of its gather until it has computed.")
    return canvas.drawing()


def forward(canvas: Sketch, y: float, ahead: bool) -> float:
    """Draw the gathers, the layers, and the memory held for them. Returns the x at which the last one ends."""
    clock = 0.0
    for layer in range(1, 5):
        starts = max(0.0, clock - COMPUTE) if ahead else clock
        begins = max(clock, starts + GATHER)
        clock = begins + COMPUTE
        for time, long, top, fill, words in (
            (starts, GATHER, 0, KINDS["comm"], f"gather {layer}"),
            (begins, COMPUTE, HIGH + 6, TIMELINE["compute"], f"layer {layer}"),
        ):
            canvas.box(LEFT + UNIT * time, y + top, UNIT * long, HIGH + 2, words, fill, size=12)
        lane = y + 2 * HIGH + 14 + (THIN + 2) * ((layer - 1) % 2 if ahead else 0)
        canvas.box(LEFT + UNIT * starts, lane, UNIT * (clock - starts), THIN, layer, KINDS["P"], size=11, radius=0)
    return LEFT + UNIT * clock


def fsdp_flight() -> Drawing:
    canvas = Sketch(
        900, 208, "What is in flight in backward, with one layer ahead",
        "Backward, while layer 3 of four computes. Held are layer 3 itself; its gradient, being computed; layer "
        "2, whose gather is on its way; and the gradient of layer 4 twice, as this rank sends it and as the others' "
        "parts of it arrive. Five layers' worth.",
    )  # fmt: skip
    boxes = (
        ("layer 3", "P", ["gathered,", "until its backward is over"]),
        ("gradient 3", "G", ["being computed"]),
        ("layer 2", "P", ["its gather is on its way"]),
        ("gradient 4", "G", ["as this rank sends it"]),
        ("gradient 4", "G", ["the others' parts,", "as they arrive"]),
    )
    for number, (name, kind, words) in enumerate(boxes):
        x = 20 + 176 * number
        canvas.box(x, 58, 156, 44, name, KINDS[kind])
        canvas.lines(x + 78, 122, words, size=12.5, fill=MUTED)
    for first, last, title in ((0, 2, "this layer"), (2, 3, "the next one"), (3, 5, "the one before")):
        left, right = 20 + 176 * first, 176 * last
        canvas.text((left + right) / 2, 24, title, weight="bold")
        canvas.line((left, 46), (left, 40), (right, 40), (right, 46), stroke=MUTED)
    canvas.note(20, 184, "Backward, while layer 3 of four computes: five layers' worth are in flight.")
    return canvas.drawing()
