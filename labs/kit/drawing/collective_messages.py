"""Drawings of a collective: the messages between ranks, round by round, and the pieces of a tensor that ranks hold.

A message is a tuple (round, source, destination, piece): in that round, rank `source` sends piece number `piece` to
rank `destination`. A collective is drawn from the list of all its messages.

Holdings are a list with one dict per rank, {piece that the rank holds: the ranks whose data is summed in the piece}. In
[{0: {0}, 1: {0}}, {0: {0, 1}}], rank 0 holds its own pieces 0 and 1, and rank 1 holds the sum of both pieces 0.

    sends(recording)                 the messages of a recorded job
    messages(ring, ranks=4)          one small picture per round
    step(ring, ranks=4, round=2)     one round, and the pieces that each rank holds after it
"""

import math
from collections.abc import Sequence

from labs.kit.drawing.palette import KINDS, MUTED, PAPER, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of
from labs.kit.drawing.tables import short

Message = tuple[int, int, int, int | str]
Holdings = list[dict[int, set[int]]]
NODE = 15
CELL = (58, 30)


def own(ranks: int, pieces: int) -> Holdings:
    """Return the holdings before a reduction: each rank holds its own tensor, cut into `pieces` pieces."""
    return [{piece: {rank} for piece in range(pieces)} for rank in range(ranks)]


def after(held: Holdings, messages: Sequence[Message]) -> Holdings:
    """Return the holdings after the messages of one round; a piece that arrives is added to the receiver's piece."""
    new = [{piece: set(whose) for piece, whose in mine.items()} for mine in held]
    for _, source, destination, piece in messages:
        new[destination].setdefault(piece, set()).update(held[source].get(piece, set()))
    return new


def sends(recording) -> list[Message]:
    """Return the sends of a recorded job as messages.

    If every send is a piece of a tensor, and all tensors have one size, pieces are numbered by their place in the
    tensor; otherwise, a piece is named by its bytes.  A recording does not have the round of a send, so it is derived:
    a send comes one round after the latest message that its rank had sent or received when the send began, or in round
    0 if there was no such message.

    recording: a labs.kit.record.Recording of kind "communication".
    """
    events = sorted(recording.events, key=lambda event: event.start)
    on_the_way: dict[tuple[int, int], list] = {}
    for event in events:
        if event.op == "send":
            on_the_way.setdefault((event.rank, event.peer), []).append(event)
    done: dict[int, list[tuple[float, object]]] = {rank: [] for rank in recording.seen}
    for event in events:
        if event.op in ("send", "recv"):
            sent = event if event.op == "send" else on_the_way[event.peer, event.rank].pop(0)
            done[event.rank].append((event.end, sent))
    rounds: dict[int, int] = {}
    for event in (event for event in events if event.op == "send"):
        before = [rounds[id(sent)] for end, sent in done[event.rank] if end <= event.start]
        rounds[id(event)] = 1 + max(before, default=-1)
    sent = [event for event in events if event.op == "send"]
    named = numbers(sent)
    return [(rounds[id(e)], e.rank, e.peer, named[e.part] if named else short(e.bytes_in)) for e in sent]


def numbers(sent: Sequence) -> dict[tuple[int, int], int]:
    """Return {piece of a tensor: its number} if each send is a piece and all tensors have one size; otherwise {}."""
    parts = [event.part for event in sent if event.part and event.bytes_in < event.part[1]]
    alike = len(parts) == len(sent) and len({memory for _, memory in parts}) == 1
    return {part: number for number, part in enumerate(sorted(set(parts)))} if alike else {}


def by_round(messages: Sequence[Message]) -> list[list[Message]]:
    """Return one list of messages per round, in the order of the rounds, which are numbered from 0."""
    count = 1 + max((message[0] for message in messages), default=-1)
    return [sorted(message for message in messages if message[0] == number) for number in range(count)]


def messages(messages: Sequence[Message], ranks: int) -> Drawing:
    """Draw one panel per round: the ranks on a circle, and an arrow with the piece for each message."""
    rounds = by_round(messages)
    side, tall = 2 * radius(ranks) + 72, 2 * radius(ranks) + 76
    rows = math.ceil(len(rounds) / (1000 // side)) or 1
    columns = math.ceil(len(rounds) / rows) or 1
    title = f"{len(messages)} messages between {ranks} ranks in {len(rounds)} rounds"
    canvas = Canvas(columns * side, rows * tall + 8, title, "\n".join(sentences(messages)) or "No messages.")
    if not rounds:
        canvas.text(side / 2, tall / 2, "no messages", fill=MUTED)
    for number, sent in enumerate(rounds):
        row, column = divmod(number, columns)
        x, y = column * side + side / 2, row * tall + 18
        canvas.text(x, y, f"round {number + 1}{common(sent)}", size=13, weight="bold")
        circle(canvas, x, y + 38 + radius(ranks), ranks, sent)
    return canvas.drawing()


def common(sent: Sequence[Message]) -> str:
    """Return the piece that all messages of a round carry, for the panel's title, or "" if the pieces differ."""
    carried = {message[3] for message in sent}
    return f": {spoken(carried.pop())}" if len(carried) == 1 else ""


def spoken(piece: int | str) -> str:
    return f"piece {piece}" if isinstance(piece, int) else piece


def sentences(messages: Sequence[Message]) -> list[str]:
    """Return the messages in words, as one line per round."""
    return [
        f"Round {number + 1}: " + ", ".join(f"rank {s} sends {spoken(p)} to rank {d}" for _, s, d, p in sent) + "."
        for number, sent in enumerate(by_round(messages))
    ]


def radius(ranks: int) -> int:
    return max(58, 15 * ranks)


def circle(canvas: Canvas, x: float, y: float, ranks: int, sent: Sequence[Message]) -> None:
    """Draw the ranks around (x, y), clockwise from rank 0 on top, with one round's messages as arrows."""
    angles = [2 * math.pi * rank / ranks - math.pi / 2 for rank in range(ranks)]
    places = [(x + radius(ranks) * math.cos(a), y + radius(ranks) * math.sin(a)) for a in angles]
    pairs: dict[tuple[int, int], list[int]] = {}
    for _, source, destination, piece in sent:
        pairs.setdefault((source, destination), []).append(piece)
    chips = []
    for (source, destination), which in pairs.items():
        apart = (destination - source) % ranks
        both = (destination, source) in pairs
        outwards = -1 if apart == ranks - 1 and ranks > 2 and not both else 1
        bend = outwards * (0.3 if both and apart in (1, ranks - 1) else 0.18 if apart in (1, ranks - 1) else 0.1)
        start, end = shorten(places[source], places[destination], NODE + 4)
        at = 0.5 if apart in (1, ranks - 1) and not both else 0.24
        chips.append((canvas.arrow(start, end, bend, KINDS["comm"], at=at), ",".join(map(str, which))))
    for rank, place in enumerate(places):
        canvas.circle(*place, NODE, fill=RANKS[rank % len(RANKS)])
        canvas.text(*place, rank, size=13, weight="bold")
    for (middle_x, middle_y), label in [] if common(sent) else chips:
        width = width_of(label, 11) + 8
        canvas.rect(middle_x - width / 2, middle_y - 8, width, 16, stroke=KINDS["comm"], radius=8)
        canvas.text(middle_x, middle_y, label, size=11)


def shorten(start, end, by: float):
    """Return the two ends of the line from `start` to `end` after `by` pixels are cut off at both ends."""
    (x0, y0), (x1, y1) = start, end
    share = by / math.dist(start, end)
    dx, dy = share * (x1 - x0), share * (y1 - y0)
    return (x0 + dx, y0 + dy), (x1 - dx, y1 - dy)


def step(messages: Sequence[Message], ranks: int, round: int, held: Holdings | None = None) -> Drawing:
    """Draw one round of a collective: its messages, and the pieces that each rank holds after it.

    round: the round to draw, from 1 on; 0 draws the start, before any message.
    held: the pieces that the ranks hold at the start; if left out, each rank holds its own tensor.
    Raises ValueError if the collective has no such round.
    """
    rounds = by_round(messages)
    if not 0 <= round <= len(rounds):
        raise ValueError(f"round {round} of a collective with {len(rounds)} rounds: choose 0 to {len(rounds)}")
    held = own(ranks, 1 + max(m[3] for m in messages)) if held is None else held
    columns = sorted({piece for mine in held for piece in mine} | {m[3] for m in messages})
    for sent in rounds[:round]:
        held = after(held, sent)
    sent = rounds[round - 1] if round else []
    side = 2 * radius(ranks) + 64
    height = max(side, CELL[1] * ranks) + 34
    title = f"round {round} of {len(rounds)}{common(sent)}" if round else f"start, before round 1 of {len(rounds)}"
    canvas = Canvas(side + 84 + CELL[0] * len(columns), height, title, "\n".join([*sentences(sent), *holdings(held)]))
    canvas.text(20, 22, title, size=14, weight="bold", anchor="start")
    circle(canvas, side / 2, 34 + (height - 34) / 2, ranks, sent)
    top = 34 + (height - 34 - CELL[1] * ranks) / 2
    grid(canvas, side + 64, top, held, columns, {(m[2], m[3]) for m in sent})
    return canvas.drawing()


def holdings(held: Holdings) -> list[str]:
    """Describe the pieces that each rank holds, in a line of words per rank."""
    return [
        f"Rank {rank} holds "
        + (
            ", ".join(f"piece {p} of {' + '.join(map(str, sorted(w)))}" for p, w in sorted(mine.items()) if w)
            or "nothing"
        )
        + "."
        for rank, mine in enumerate(held)
    ]


def grid(canvas: Canvas, x, y, held: Holdings, columns: Sequence[int], new=frozenset(), cell=CELL, named=True) -> None:
    """Draw one row per rank and one column per piece; `new` is the (rank, piece) of each piece that just arrived."""
    width, height = cell
    for rank, mine in enumerate(held):
        if named:
            canvas.text(x - 8, y + (rank + 0.5) * height, f"rank {rank}", size=12, anchor="end", fill=MUTED)
        for column, piece in enumerate(columns):
            box = (x + column * width + 2, y + rank * height + 2, width - 4, height - 4)
            whose = sorted(mine.get(piece, ()))
            stripes(canvas, box, whose, label(piece, whose, len(held)), (rank, piece) in new)


def stripes(canvas: Canvas, box, whose: Sequence[int], label: str, new: bool = False) -> None:
    """Draw the cell of a piece: a stripe for each rank whose data is summed in it, and a label; dashed if empty."""
    x, y, width, height = box
    if not whose:
        canvas.rect(*box, fill=PAPER, stroke="#B0B5BC", dash="3 3")
        return
    for number, rank in enumerate(whose):
        left = x + number * width / len(whose)
        canvas.rect(left, y, width / len(whose), height, fill=RANKS[rank % len(RANKS)], stroke="none", radius=0)
    stroke, line = (KINDS["comm"], 2.5) if new else ("#8A8F98", 1)
    canvas.rect(*box, fill="none", stroke=stroke, line=line)
    canvas.text(x + width / 2, y + height / 2, label, size=min(12, 0.48 * height))


def label(piece: int, whose: Sequence[int], ranks: int) -> str:
    """Return a piece's label: "b2" for piece 2 of rank 1, "a+b" for a sum of two ranks, "Σ2" for a sum of all ranks."""
    if not whose:
        return ""
    letters = [chr(ord("a") + rank) for rank in whose]
    if len(whose) == 1:
        return f"{letters[0]}{piece}"
    if len(whose) == ranks:
        return f"Σ{piece}"
    return "+".join(letters) if len(whose) < 4 else f"{len(whose)} of {ranks}"
