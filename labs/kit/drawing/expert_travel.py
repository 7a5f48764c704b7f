"""A drawing of tokens that travel to the ranks of their experts and back, by an uneven all-to-all.

travel([chosen_NK of rank 0, chosen_NK of rank 1], experts=4)
"""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from labs.kit.drawing.palette import EXPERTS, MUTED, RANKS, ink, paler
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

LEFT, WIDE, GAP, TOP, HEAD, FOOT = 36, 66, 88, 64, 44, 92  # pixels; HEAD is above the rows of a rank
BADGE = 28  # pixels of a box that are for the number of an expert
COLUMNS = "tokens", "sorted by expert", "at their experts", "back in place"
MOVES = "sort →", "all-to-all →", "all-to-all, back →"


class Row(NamedTuple):
    """A token on its way to one of its experts."""

    home: int
    token: int
    expert: int


def travel(chosen: Sequence[Tensor], experts: int) -> Drawing:
    """Draw each rank's tokens at home, sorted by expert, on the ranks of their experts, and back in their places.

    chosen: the experts that a router chose on each rank, [tokens, k].
    experts: number of experts, of which each rank holds an equal part, as in `labs.moe.ParallelExperts`.
    """
    held = [part.tolist() for part in torch.arange(experts).tensor_split(len(chosen))]
    owner = {expert: rank for rank, its in enumerate(held) for expert in its}
    columns = home, by_expert, away, _ = rows_of_columns(chosen, owner)
    sends = [[sum(row in rows for row in got) for got in away] for rows in by_expert]
    sent = [", ".join(f"{n} to rank {to}" for to, n in enumerate(each)) for each in sends]
    words = ". ".join(f"Rank {rank} sends rows: {each}" for rank, each in enumerate(sent))
    counts = {1: ("sends", sends), 2: ("gets", list(zip(*sends, strict=True)))}
    tall = max(17.0, min(22.0, 800 / max(1, sum(map(len, home)))))
    high = TOP + sum(HEAD + tall * len(rows) for rows in home)
    width, title = 2 * LEFT + 4 * WIDE + 3 * GAP, "Tokens travel to their experts and back"
    canvas = Canvas(width, high + FOOT, title, f"{words}.")
    places = [places_of(column, tall) for column in columns]
    for number, (before, after) in enumerate(pairwise(places)):
        x = LEFT + WIDE + number * (WIDE + GAP)
        canvas.text(x + GAP / 2, 42, MOVES[number], 12.5, fill=MUTED)
        for row, y in before.items():
            colour = paler(EXPERTS[owner[row.expert] % len(EXPERTS)], 0.2)
            ends = (x + 2, y + tall / 2), (x + GAP - 2, after[row] + tall / 2)
            canvas.arrow(*ends, stroke=colour, line=1.2, head=6)
    for number, (name, column) in enumerate(zip(COLUMNS, columns, strict=True)):
        x, y = LEFT + number * (WIDE + GAP), TOP
        canvas.text(x + WIDE / 2, 20, name, 13.5, weight="bold")
        for rank, rows in enumerate(column):
            canvas.text(x + WIDE / 2, y + 16, f"rank {rank}", 12.5, weight="bold")
            if number in counts:
                verb, each = counts[number]
                canvas.text(x + WIDE / 2, y + 32, f"{verb} {listed(each[rank])}", 12)
            y += HEAD + tall * len(rows)
        for row, y in places[number].items():
            left, fill = x + (0 if number else WIDE - BADGE), EXPERTS[owner[row.expert] % len(EXPERTS)]
            box(canvas, left, y, BADGE, tall, fill, f"e{row.expert}", "bold")
        together = chosen[0].shape[1] if column is home else 1  # boxes of one token
        for row in chain(*(rows[::together] for rows in column)):
            left, fill = x + (BADGE if number else 0), RANKS[row.home % len(RANKS)]
            box(canvas, left, places[number][row], WIDE - BADGE, tall * together, fill, f"t{row.token}")
    legend(canvas, held, high + 20)
    return canvas.drawing()


def rows_of_columns(chosen: Sequence[Tensor], owner: Mapping[int, int]) -> tuple[list[list[Row]], ...]:
    """Return each column's rows, by rank: at home, sorted by expert, at the experts, and at home again."""
    home = [[Row(r, t, e) for t, its in enumerate(each.tolist()) for e in its] for r, each in enumerate(chosen)]
    by_expert = [sorted(rows, key=lambda row: row.expert) for rows in home]
    away = [[row for row in chain(*by_expert) if owner[row.expert] == rank] for rank in range(len(chosen))]
    return home, by_expert, away, home


def listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def places_of(column: Sequence[Sequence[Row]], tall: float) -> dict[Row, float]:
    """Return the top of each row."""
    places, y = {}, float(TOP)
    for rows in column:
        y += HEAD
        for row in rows:
            places[row] = y
            y += tall
    return places


def box(canvas: Canvas, x: float, y: float, wide: float, tall: float, fill: str, words: str, weight: str = "") -> None:
    canvas.rect(x, y + 1, wide, tall - 2, fill)
    canvas.text(x + wide / 2, y + tall / 2, words, 11.5, weight=weight, fill=ink(fill))


def legend(canvas: Canvas, held: Sequence[Sequence[int]], y: float) -> None:
    canvas.text(16, y, "tint: the home of token t; strong colour: the rank that holds expert e", 13, "start")
    each = (canvas.width - 32) / max(4, len(held))
    for rank, its in enumerate(held):
        x = 16 + each * rank
        for at, colours in enumerate((RANKS, EXPERTS)):
            canvas.rect(x + 16 * at, y + 16, 16, 16, colours[rank % len(colours)], radius=0)
        names = f"e{its[0]}" if len(its) == 1 else f"e{its[0]}–e{its[-1]}"
        canvas.text(x + 38, y + 24, f"rank {rank}: {names}", 12.5, "start")
    order = ", ".join(f"rank {rank}" for rank in range(len(held)))
    canvas.text(16, y + 50, f"sends, gets: rows to and from {order}, in this order", 13, "start")
