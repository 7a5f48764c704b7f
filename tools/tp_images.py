"""The pictures of tensor parallelism.

tp_pair       a matrix split by columns, then one by rows, with the notebook's numbers      09
tp_borders    how x is split along half a layer                                             09
sp_borders    the same with sequence parallelism                                            09
tp_types      the types of a pair's tensors over ranks, and of their gradients                09
split_loss    three numbers per token, instead of the logits of a vocabulary                09b
"""

import torch

from labs.kit.drawing.palette import INK, KINDS, MUTED, RANKS, SOFT
from labs.kit.drawing.picture import Drawing
from tools.sketch import GONE, SENT, Sketch

CELL, HIGH = 30, 26  # size of an element in pixels
SIZE = 72  # size of an activation in pixels

# The notebook's numbers.
X = torch.tensor([[1, 2]])
UP = torch.tensor([[1, 1, 2, 1], [0, -1, 1, 3]])
DOWN = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 0]])


def matrix(canvas: Sketch, x: float, middle: float, numbers: torch.Tensor, mine: torch.Tensor, tint: str) -> float:
    """Draw a table of numbers. mine: for each number, whether this rank holds it.

    Returns the x at which the table ends.
    """
    high, wide = numbers.shape
    y = middle - HIGH * high / 2
    for row in range(high):
        for column in range(wide):
            here = bool(mine[row, column])
            style = {"fill": tint} if here else GONE
            canvas.rect(x + CELL * column, y + HIGH * row, CELL, HIGH, radius=0, **style)
            if here:
                words = str(numbers[row, column].item()).replace("-", "−")
                canvas.text(x + CELL * (column + 0.5), y + HIGH * (row + 0.5), words)
    return x + CELL * wide


def tp_pair() -> Drawing:
    hidden = (X @ UP).relu()
    canvas = Sketch(
        1010, 350, "A matrix split by columns, then one by rows, on two ranks",
        "Both ranks have all of x, which is 1 2. Rank 0 has the first two columns of up, computes two of the four "
        "hidden features, applies relu to them, and multiplies by the first two rows of down; rank 1 does the same "
        "with the other columns and rows. Each gets a summand of the result: 1 0 and 18 4. One all-reduce makes 19 4 "
        "of them.",
    )  # fmt: skip
    whole = torch.ones(1, 2)
    for x, words in ((70, "x"), (190, "up"), (390, "relu(x @ up)"), (580, "down"), (720, "a summand"), (890, "y")):
        canvas.heading(x, 26, words)
    for rank in range(2):
        middle, tint, here = 110 + 130 * rank, RANKS[rank], slice(2 * rank, 2 * rank + 2)
        columns, features, rows = torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4, 2)
        columns[:, here] = features[:, here] = 1
        rows[here] = 1
        canvas.note(16, middle, f"rank {rank}")
        steps = [(70, X, whole, "#FFFFFF"), (190, UP, columns, tint), (390, hidden, features, tint)]
        steps += [(580, DOWN, rows, tint), (720, hidden[:, here] @ DOWN[here], whole, tint)]
        ends = [matrix(canvas, x, middle, *step) for x, *step in steps]
        for number, sign in enumerate("@→@="):
            canvas.text((ends[number] + steps[number + 1][0]) / 2, middle, sign, size=15)
        canvas.arrow((ends[-1] + 8, middle), (884, middle + (52, -52)[rank]), stroke=KINDS["comm"])
    canvas.text(834, 175, "all-reduce", size=12.5, fill=SENT)
    matrix(canvas, 890, 175, hidden @ DOWN, whole, "#FFFFFF")
    canvas.note(890, 206, ["the same", "on both ranks"])
    canvas.note(16, 326, "Dashed: this part is on the other rank. Up to the last step nothing is sent.")
    return canvas.drawing()


def state(canvas: Sketch, x: float, y: float, kind: str, size: float = SIZE) -> None:
    """Draw an activation, tokens down and features across: whole, split over four ranks, or as four summands."""
    quarter = size / 4
    match kind:
        case "whole":
            canvas.rect(x, y, size, size, fill=SOFT, radius=0)
        case "tokens":
            for rank in range(4):
                canvas.rect(x, y + quarter * rank, size, quarter, fill=RANKS[rank], radius=0)
                canvas.text(x + size / 2, y + quarter * (rank + 0.5), rank, size=12)
        case "features":
            for rank in range(4):
                canvas.rect(x + quarter * rank, y, quarter, size, fill=RANKS[rank], radius=0)
                canvas.text(x + quarter * (rank + 0.5), y + size / 2, rank, size=12)
        case "summands":
            for rank in reversed(range(4)):
                canvas.rect(x + 5 * rank, y + 5 * rank, size - 15, size - 15, fill=RANKS[rank], radius=0)
            canvas.text(x + (size - 15) / 2, y + (size - 15) / 2, "+", size=22, weight="bold")


SAID = {"whole": "whole", "tokens": "by tokens", "features": "by features", "summands": "summands"}
SENDS = {  # messages in forward and in backward: labs.tp.conjugate
    "copy": ("nothing", "all-reduce"),
    "reduce": ("all-reduce", "nothing"),
    "gather": ("all-gather", "reduce-scatter"),
    "scatter": ("reduce-scatter", "all-gather"),
}


def tp_borders() -> Drawing:
    return borders(
        "whole", "copy", "reduce",
        "What x is along one half of a layer",
        "x is whole on every rank, through the norm; copy sends nothing forward and all-reduces the gradient backward; "
        "between the columns and the rows each rank has some features; then each has a summand, and reduce all-reduces "
        "forward.",
    )  # fmt: skip


def sp_borders() -> Drawing:
    return borders(
        "tokens", "gather", "scatter",
        "What x is along one half of a layer, with sequence parallelism",
        "Each rank has some of the tokens, through the norm; gather is an all-gather forward and a reduce-scatter "
        "backward; between the columns and the rows each rank has some features; then each has a summand; scatter is a "
        "reduce-scatter forward and an all-gather backward, after which each rank has some of the tokens again.",
    )  # fmt: skip


def borders(outside: str, enter: str, leave: str, title: str, description: str) -> Drawing:
    canvas, pitch = Sketch(1010, 210, title, description), (978 - SIZE) / 5
    for place, kind in enumerate((outside, outside, "whole", "features", "summands", outside)):
        state(canvas, 16 + pitch * place, 24, kind)
        canvas.text(16 + pitch * place + SIZE / 2, SIZE + 40, SAID[kind], size=13.5, fill=MUTED)
    for place, step in enumerate(("norm", enter, "columns", "rows", leave)):
        x, middle, crosses = 16 + pitch * place, 24 + SIZE / 2, step in SENDS
        canvas.arrow((x + SIZE + 6, middle), (x + pitch - 6, middle), stroke=KINDS["comm"] if crosses else INK)
        x += (SIZE + pitch) / 2
        canvas.text(x, middle - 14, step, size=13.5, weight="bold" if crosses else "")
        if crosses:
            canvas.lines(x, middle + 20, [f"→ {SENDS[step][0]}", f"← {SENDS[step][1]}"], size=12, fill=SENT)
    words = (
        "A square is one activation: tokens down, features across. Grey: every rank has all of it. A number: this rank "
    )
    canvas.note(16, 158, f"{words}has that part.")
    words = "Columns are q, k and v, or gate and up; rows are o, or down. → is sent forward, ← backward."
    canvas.note(16, 180, words)
    return canvas.drawing()


def tp_types() -> Drawing:
    canvas, pitch = Sketch(
        1010, 320, "The tensors of a pair, and their gradients, with their types",
        "Above, the tensors from left to right: x is whole on every rank, before copy and after it; after the columns "
        "each rank has some features; after the rows it has a summand; after reduce all have the sum. Below, their "
        "gradients from right to left: whole after reduce, and before it; some features on each rank; a summand on "
        "each rank between copy and the columns; whole before copy. The types are I, R, V, P and I.",
    ), (978 - SIZE - 60) / 4  # fmt: skip
    canvas.note(16, 60, ["the", "tensor"])
    canvas.note(16, 196, ["its", "gradient"])
    kinds = (
        ("whole", "whole"),
        ("whole", "summands"),
        ("features", "features"),
        ("summands", "whole"),
        ("whole", "whole"),
    )
    for place, (letter, pair) in enumerate(zip("IRVPI", kinds, strict=True)):
        x = 76 + pitch * place
        for y, kind in zip((24, 160), pair, strict=True):
            state(canvas, x, y, kind)
            canvas.text(x + SIZE / 2, y + SIZE + 16, SAID[kind], size=13.5, fill=MUTED)
        canvas.text(x + SIZE / 2, 274, letter, size=20, weight="bold")
    for place, step in enumerate(("copy", "columns", "rows", "reduce")):
        start, end, sends = 76 + pitch * place + SIZE + 6, 76 + pitch * (place + 1) - 6, SENDS.get(step)
        for number, (y, ends) in enumerate(((60, (start, end)), (196, (end, start)))):
            sent = sends and sends[number] != "nothing"
            canvas.arrow((ends[0], y), (ends[1], y), stroke=KINDS["comm"] if sent else INK)
            canvas.text(
                (start + end) / 2, y + 18, sends[number] if sends else "", size=12, fill=SENT if sent else MUTED
            )
        canvas.text((start + end) / 2, 46, step, size=13.5, weight="bold" if sends else "")
    canvas.note(
        16, 304, "Grey: every rank has all of it. A number: this rank has that part. +: each rank has a summand."
    )
    return canvas.drawing()


def split_loss() -> Drawing:
    """Draw the split loss. A row is a token; sizes are not to scale."""
    canvas = Sketch(
        900, 312, "The loss of a vocabulary that is split over four ranks",
        "Each rank has the logits of all tokens for a quarter of the vocabulary. Per token three numbers leave it: the "
        "highest logit, the sum of the exponentials, and the target's logit, which only one rank has. The loss is made "
        "of them, the same on every rank.",
    )  # fmt: skip
    targets = [2, 0, 3, 1, 0]  # the rank that holds each token's target
    for rank in range(4):
        x, tint = 24 + 214 * rank, RANKS[rank]
        canvas.text(x + 60, 26, f"rank {rank}", weight="bold")
        canvas.text(x + 60, 48, f"vocabulary, part {rank}", size=12.5, fill=MUTED)
        for token, owner in enumerate(targets):
            y = 74 + HIGH * token
            canvas.rect(x, y, 120, HIGH, fill=tint, radius=0)
            if owner == rank:
                canvas.rect(x + 24 + 16 * token, y + 4, 18, HIGH - 8, fill=INK, radius=0)
            for place in range(3):
                filled = place < 2 or owner == rank
                style = {"fill": KINDS["comm"]} if filled else GONE
                canvas.rect(x + 128 + 20 * place, y + 4, 18, HIGH - 8, radius=0, **style)
        canvas.arrow((x + 157, 208), (x + 157, 234), stroke=KINDS["comm"])
    canvas.line((181, 238), (823, 238), stroke=KINDS["comm"], line=2)
    words = "per token three numbers, from left to right: the highest logit, the sum of exp, the target's logit"
    canvas.text(450, 258, words, size=13, fill=SENT)
    canvas.note(24, 286, "A row is a token. Black: the target's logit. Dashed: the target is elsewhere.")
    return canvas.drawing()
