"""A drawing of ring attention, step by step: the keys that each rank holds, and what the mask leaves of its products.

ring_steps(Pieces(zigzag(tokens=16, ranks=4)))

What the mask hides is asked of `labs.cp.partial_softmax.blocks`, by which the ring itself computes.
"""

from itertools import groupby

import torch
from torch import Tensor

from labs.cp.partial_softmax import blocks
from labs.cp.pieces import Pieces, Places
from labs.kit.drawing.palette import INK, KINDS, RANKS, SOFT, TIMELINE
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, Point

LEFT, TOP, GAP, FOOT = 88, 56, 42, 130  # pixels; GAP lies between two ranks
LABEL, COUNT, APART = 20, 22, 26  # above a block, below it, and between two steps
LEGIBLE = 17  # pixels of a token that has room for its place


def ring_steps(pieces: Pieces, backward: bool = False) -> Drawing:
    """Draw the block of queries × keys that each rank computes in each step, and how the keys go round.

    pieces: the tokens of every rank; documents are those of the batch's first row.
    backward: below each block, the ranks whose parts the travelling gradient of its keys has, not the products.
    """
    places, ranks = pieces.places, len(pieces.places)
    longest = max(map(len, places))
    unit = min(26.0, max(48, min(130, 336 / ranks)) / longest)
    strip = unit if unit >= LEGIBLE else 12.0
    wide, tall = strip + unit * longest + GAP, LABEL + strip + unit * longest + COUNT + APART
    sources = [[(rank - step) % ranks for rank in range(ranks)] for step in range(ranks)]
    steps = [[visible(pieces, rank, source) for rank, source in enumerate(row)] for row in sources]
    words = ". ".join(f"Step {step}: {told(*both)}" for step, both in enumerate(zip(sources, steps, strict=True)))
    words += ". Below: the ranks whose parts the keys' gradient has" * backward
    title = f"Ring attention of {sum(map(len, places))} tokens on {ranks} ranks"
    canvas = Canvas(max(LEFT + ranks * wide - 10, 560), TOP + ranks * tall - APART + FOOT, title, f"{words}.")
    for rank in range(ranks):
        canvas.rect(LEFT + rank * wide, 12, wide - GAP, 26, RANKS[rank % len(RANKS)])
        canvas.text(LEFT + rank * wide + (wide - GAP) / 2, 25, f"rank {rank}", 14, weight="bold")
    for step, row in enumerate(steps):
        y, most = TOP + tall * step + LABEL + strip, max(int(see.sum()) for see in row)
        canvas.text(14, y + unit * longest / 2, f"step {step}", 14, "start", "bold")
        for rank, (see, source) in enumerate(zip(row, sources[step], strict=True)):
            x = LEFT + rank * wide + strip
            middle = x + unit * see.shape[1] / 2
            canvas.text(middle, y - strip - LABEL / 2, f"keys of {source}", 13)
            tokens(canvas, (x, y - strip), (unit, 0), strip, places[source], RANKS[source % len(RANKS)])
            tokens(canvas, (x - strip, y), (0, unit), strip, places[rank], RANKS[rank % len(RANKS)])
            block(canvas, x, y, see, unit)
            parts = ", ".join(str((source + n) % ranks) for n in range(1, step + 1)) or "none"
            below, strong = (parts, False) if backward else (int(see.sum()), see.sum() == most)
            canvas.text(middle, y + unit * len(see) + 13, below, 14, weight="bold" * strong)
            if step < ranks - 1:
                start, end = (x + unit * see.shape[1], y - strip / 4), (x + wide, y + tall - 3 * strip / 4)
                send(canvas, start, end, x + unit * longest + GAP / 2, back=ranks * wide if rank == ranks - 1 else 0)
    legend(canvas, canvas.height - FOOT + 26, backward)
    return canvas.drawing()


def visible(pieces: Pieces, rank: int, source: int) -> Tensor:
    """Return which of the source's keys each of the rank's queries may see, [queries, keys]."""
    queries, keys = pieces[rank], pieces[source]
    see = torch.zeros(len(queries.places), len(keys.places), dtype=torch.bool)
    for rows, some, hidden in blocks(queries, keys, torch.device("cpu")):
        see[rows, some] = ~hidden.reshape(-1, *hidden.shape[-2:])[0]
    return see


def told(sources: list[int], row: list[Tensor]) -> str:
    found = enumerate(zip(sources, row, strict=True))
    return "; ".join(
        f"rank {r} has the keys of {s}, {int(see.sum())} of {see.numel()} products" for r, (s, see) in found
    )


def tokens(canvas: Canvas, at: Point, unit: Point, strip: float, places: Places, tint: str) -> None:
    """Draw tokens in a row or in a column, with their places where these fit.

    unit: the way from one token to the next, to the right and down.
    """
    (x, y), (right, down) = at, unit
    canvas.rect(x, y, right * len(places) or strip, down * len(places) or strip, tint, radius=0)
    for number, place in enumerate(places) if right + down >= LEGIBLE else ():
        canvas.rect(x + right * number, y + down * number, strip, strip, tint, radius=0, line=0.5)
        canvas.text(x + right * number + strip / 2, y + down * number + strip / 2, place, 12)


def block(canvas: Canvas, x: float, y: float, see: Tensor, unit: float) -> None:
    """Draw queries × keys: each row's products in the colour of computation, on the grey of what is hidden."""
    rows, columns = see.shape
    canvas.rect(x, y, unit * columns, unit * rows, SOFT, "none", radius=0)
    for row, line in enumerate(see.tolist()):
        for is_seen, run in groupby(range(columns), key=line.__getitem__):
            first, *more = run
            if is_seen:
                ends = x + unit * first, y + unit * row, unit * (1 + len(more)), unit
                canvas.rect(*ends, TIMELINE["compute"], TIMELINE["compute"], 0, 0.6)
    canvas.rect(x, y, unit * columns, unit * rows, "none", INK, radius=0)


def send(canvas: Canvas, start: Point, end: Point, turn: float, back: float) -> None:
    """Draw the way of keys to the next rank in the next step; the last rank's go back to the first, far on the left."""
    (x, y), (to, down) = start, end
    corners = [(turn, down - 40), (turn - back, down - 40)] if back else []
    canvas.line((x, y), (turn, y), *corners, (turn - back, down), stroke=KINDS["comm"], line=1.5)
    canvas.arrow((turn - back, down), (to - back, down), stroke=KINDS["comm"], line=1.5)


def legend(canvas: Canvas, y: float, backward: bool) -> None:
    canvas.text(16, y, "left of a block: its queries; above it: its keys, by their places in the sequence", 13, "start")
    below = "the ranks whose parts dk and dv have" if backward else "their number, bold for the most in a step"
    words = f"products; below: {below}", "hidden by the mask"
    for number, fill in enumerate((TIMELINE["compute"], SOFT)):
        canvas.rect(16, y + 18 + 26 * number, 20, 16, fill, radius=0)
        canvas.text(46, y + 26 + 26 * number, words[number], 13, "start")
    canvas.arrow((16, y + 78), (38, y + 78), stroke=KINDS["comm"], line=1.5)
    canvas.text(
        46, y + 78, "keys and values, in flight while the ranks compute" + "; dk and dv follow" * backward, 13, "start"
    )
