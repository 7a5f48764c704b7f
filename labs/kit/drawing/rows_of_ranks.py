"""A drawing of the rows that each rank computes, in clusters of bars: the longest bar is what all ranks wait for.

rows_by_rank({"balanced": [128, 130, 126, 128], "skewed": [512, 0, 0, 0]}, least=[128, 128])
"""

from collections.abc import Mapping, Sequence

from labs.kit.drawing.palette import INK, KINDS, MUTED, PAPER, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

BAR, HIGH, TOP, LEFT, APART = 44, 150, 66, 24, 34  # pixels; APART is between two clusters


def rows_by_rank(rows: Mapping[str, Sequence[int]], least: Sequence[float] = (), title: str = "") -> Drawing:
    """Draw a cluster of bars for each name, a bar per rank; the busiest rank's is framed.

    rows: {name: the rows of each rank}
    least: for each name, the fewest rows that its busiest rank could have, as a dashed line
    """
    title = title or "Rows that each rank computes"
    most = max(1, *(n for each in rows.values() for n in each))
    words = "; ".join(
        f"{name}: {', '.join(map(str, each))} on ranks 0 to {len(each) - 1}"
        + (f", of which the largest is at least {least[number]:g}" if least else "")
        for number, (name, each) in enumerate(rows.items())
    )
    wide = sum(BAR * len(each) + APART for each in rows.values())
    canvas = Canvas(max(LEFT + wide, 560), TOP + HIGH + 52, title, words + ".")
    canvas.text(LEFT, 18, title, anchor="start", weight="bold")
    legend(canvas, bool(least))
    x = LEFT
    for number, (name, each) in enumerate(rows.items()):
        for rank, n in enumerate(each):
            high, busiest = HIGH * n / most, n == max(each)
            y = TOP + HIGH - high
            colour = KINDS["comm"] if busiest else INK
            canvas.rect(x + 3, y, BAR - 6, high, RANKS[rank % len(RANKS)], colour, 0, 3 if busiest else 1)
            canvas.text(x + BAR / 2, TOP + HIGH + 12, rank, 12, fill=MUTED)
            x += BAR
        start = x - BAR * len(each)
        if least:
            level = TOP + HIGH * (1 - least[number] / most)
            canvas.line((start, level), (x, level), line=1.6, dash="6 4")
        for rank, n in enumerate(each):
            middle, y = start + BAR * (rank + 0.5), TOP + HIGH * (1 - n / most) - 10
            canvas.rect(middle - 14, y - 7, 28, 14, PAPER, "none", 0)  # the dashed line does not cross a number
            canvas.text(middle, y, n, 12, weight="bold" if n == max(each) else "")
        canvas.text((start + x) / 2, TOP + HIGH + 34, name, 13)
        x += APART
    lines = [f"{name}: {list(each)}" for name, each in rows.items()]
    return canvas.drawing("\n".join([title, *lines]))


def legend(canvas: Canvas, has_least: bool) -> None:
    canvas.rect(LEFT, 32, 14, 12, RANKS[0], KINDS["comm"], 0, 3)
    canvas.text(LEFT + 22, 38, "the busiest rank, for which all others wait", 12, anchor="start")
    if has_least:
        canvas.line((LEFT + 290, 38), (LEFT + 322, 38), line=1.6, dash="6 4")
        canvas.text(LEFT + 330, 38, "the fewest that it could have", 12, anchor="start")
