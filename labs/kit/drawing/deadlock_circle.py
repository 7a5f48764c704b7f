"""A drawing of a deadlock: ranks on a circle, with an arrow from each rank to the rank that it waits for."""

import math

from labs.kit.drawing.collective_messages import NODE, shorten
from labs.kit.drawing.palette import INK, MUTED, RANKS, WRONG
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of
from labs.kit.nccl.deadlock_replay import Standstill, Stop

SIZE = 11.5


def circle(standstill: Standstill, text: str = "") -> Drawing:
    """Draw the ranks of a deadlock on a circle, and beside it two lines of text for each rank that waits.

    text: the lines that a plain terminal shows instead of the picture.
    """
    stops = standstill.stops
    ranks = list(dict.fromkeys(rank for stop in stops for rank in (stop.rank, stop.awaited)))
    radius = max(56, 18 * len(ranks))
    legend = 2 * radius + 96
    widest = max(width_of(line, SIZE) for stop in stops for line in words(stop))
    height = max(2 * radius + 76, 56 + 42 * len(stops))
    title = f"{len(ranks)} ranks wait for each other" if standstill.is_circle else f"rank {ranks[-1]} never comes"
    canvas = Canvas(legend + widest + 16, height, title, f"{standstill}.")
    angles = {rank: 2 * math.pi * number / len(ranks) - math.pi / 2 for number, rank in enumerate(ranks)}
    middle = legend / 2 - 8, 30 + (height - 30) / 2
    places = {r: (middle[0] + radius * math.cos(a), middle[1] + radius * math.sin(a)) for r, a in angles.items()}
    canvas.text(20, 20, title, size=14, weight="bold", anchor="start")
    for number, stop in enumerate(stops):
        start, end = shorten(places[stop.rank], places[stop.awaited], NODE + 4)
        canvas.arrow(start, end, 0.25, WRONG)
        canvas.lines(legend, 52 + 42 * number, words(stop)[:1], size=SIZE, anchor="start", fill=INK)
        canvas.lines(legend, 52 + 42 * number + 17, words(stop)[1:], size=SIZE, anchor="start", fill=MUTED)
    for rank, place in places.items():
        canvas.circle(*place, NODE, fill=RANKS[rank % len(RANKS)])
        canvas.text(*place, rank, weight="bold")
    return canvas.drawing(text)


def words(stop: Stop) -> list[str]:
    event = stop.event
    whom = {"send": f" to {event.peer}", "recv": f" from {event.peer}"}.get(event.op, "")
    members = " and ".join(map(str, event.ranks))
    first = f"first use by ranks {members}, in " if stop.first_use and len(event.ranks) == 2 else ""
    return [f"rank {stop.rank} waits for rank {stop.awaited} in {first}{event.op}{whom}", event.issuer]
