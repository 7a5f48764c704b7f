"""A drawing of the products that each rank computes, step by step, under several cuts of a sequence.

work_per_rank({"contiguous": contiguous(64, 4), "zigzag": zigzag(64, 4), "striped": striped(64, 4)})
"""

from collections.abc import Mapping, Sequence

from labs.cp.pieces import Places, products
from labs.kit.drawing.palette import INK, KINDS, MUTED, TIMELINE, paler
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

LEFT, TOP, HIGH, FOOT, APART = 20, 100, 200, 84, 34  # pixels


def work_per_rank(cuts: Mapping[str, Sequence[Places]]) -> Drawing:
    """Draw, for each cut, a bar per rank of the products that no mask hides, stacked by step, and the ranks' mean.

    cuts: {name: the places of each rank's tokens}, with as many ranks in each.
    """
    found = {name: by_step(pieces) for name, pieces in cuts.items()}
    ranks = len(next(iter(found.values())))
    most = max(sum(rank) for work in found.values() for rank in work)
    each = max(26, 176 / ranks)
    wide = each * ranks + APART
    title = "Products of queries and keys per rank"
    words = ". ".join(f"{name}: {told(work)}" for name, work in found.items())
    canvas = Canvas(max(LEFT + wide * len(found), 420), TOP + HIGH + FOOT, title, f"{words}.")
    canvas.text(LEFT, 20, "products of queries and keys that no mask hides", 13, "start", fill=MUTED)
    for number, (name, work) in enumerate(found.items()):
        panel(canvas, LEFT + wide * number, name, work, each, HIGH / most)
    foot = canvas.height - 24
    canvas.line((LEFT, foot), (LEFT + 24, foot), stroke=KINDS["comm"], line=2.5)
    canvas.text(LEFT + 32, foot, "mean", 13, "start")
    for step in range(ranks):
        canvas.rect(LEFT + 92 + 24 * step, foot - 9, 24, 18, shade(step, ranks), radius=0)
        canvas.text(LEFT + 104 + 24 * step, foot, step, 12)
    canvas.text(LEFT + 100 + 24 * ranks, foot, "step of the ring", 13, "start")
    return canvas.drawing()


def by_step(pieces: Sequence[Places]) -> list[list[int]]:
    """Return [rank][step]: in step s, a rank has the keys of the rank s before it."""
    ranks = len(pieces)
    return [[row[(rank - step) % ranks] for step in range(ranks)] for rank, row in enumerate(products(pieces))]


def mean(work: list[list[int]]) -> float:
    return sum(map(sum, work)) / len(work)


def told(work: list[list[int]]) -> str:
    return ", ".join(f"rank {rank} {sum(steps):,}" for rank, steps in enumerate(work)) + f", mean {mean(work):,.10g}"


def shade(step: int, ranks: int) -> str:
    return paler(TIMELINE["compute"], 0.8 * step / max(1, ranks - 1))


def panel(canvas: Canvas, left: float, name: str, work: list[list[int]], each: float, scale: float) -> None:
    """Draw the bars of one cut."""
    totals, floor = [sum(steps) for steps in work], TOP + HIGH
    level = floor - scale * mean(work)
    canvas.text(left, 48, name, 14, "start", "bold")
    canvas.text(left, 67, f"busiest: {max(totals) / mean(work):.2f} × the mean", 13, "start", fill=MUTED)
    for rank, steps in enumerate(work):
        x, y = left + each * rank, floor
        for step, count in enumerate(steps):
            y -= scale * count
            if count:
                canvas.rect(x + 2, y, each - 4, scale * count, shade(step, len(work)), radius=0)
        if width_of(f"{max(totals):,}", 12) < each - 4 or rank == totals.index(max(totals)):
            above = level if level < y < level + 18 else y  # the number must not lie on the mean's line
            canvas.text(x + each / 2, above - 9, f"{totals[rank]:,}", 12.5)
        canvas.text(x + each / 2, floor + 13, rank, 13)
    canvas.text(left + each * len(work) / 2, floor + 31, "rank", 13, fill=MUTED)
    canvas.line((left, floor), (left + each * len(work), floor), stroke=INK)
    canvas.line((left - 5, level), (left + each * len(work) + 5, level), stroke=KINDS["comm"], line=2.5)
