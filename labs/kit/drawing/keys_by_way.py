"""A drawing of what one rank has in attention, in each way of context parallelism: which tokens, and which heads.

keys_by_way(ranks=4, rank=1, heads=8, kv_heads=4)
"""

from labs.kit.drawing.palette import INK, KINDS, MUTED, PAPER, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

CELL, TALL, GAP, TOP, LEFT, APART = 20, 26, 26, 84, 20, 54  # pixels
WORDS = {
    "ring": ("own tokens, all heads;", "keys pass by, a piece at a time"),
    "all-gather": ("own tokens, all heads;", "all keys of a layer at once"),
    "Ulysses": ("all tokens, some heads;", "their keys, and no others"),
}


def keys_by_way(ranks: int, rank: int, heads: int, kv_heads: int) -> Drawing:
    """Draw tokens × heads of queries and of keys for each way, and the part that one rank has while it attends.

    ranks, rank: the number of ranks, and the rank whose part is drawn.
    heads, kv_heads: numbers of heads that the ranks divide.
    """
    wide = CELL * (heads + kv_heads) + GAP + APART
    told = "; ".join(f"{way}: {' '.join(words)}" for way, words in WORDS.items())
    title = f"What rank {rank} of {ranks} has while it attends"
    canvas = Canvas(LEFT + wide * len(WORDS), TOP + TALL * ranks + 92, title, f"{told}.")
    for number, (way, words) in enumerate(WORDS.items()):
        left = LEFT + wide * number
        canvas.text(left, 18, way, 15, "start", "bold")
        canvas.lines(left, 38, [*words], 12.5, anchor="start", fill=MUTED)
        for name, many, x in (("queries", heads, left), ("keys, values", kv_heads, left + CELL * heads + GAP)):
            for row in range(ranks):
                for column in range(many):
                    here = tokens_or_heads(way, name == "queries", row, column * ranks // many, ranks, rank)
                    fill = {"has": RANKS[rank % len(RANKS)], "arrives": PAPER, "": PAPER}[here]
                    edge = KINDS["comm"] if here == "arrives" else INK if here else MUTED
                    at = x + CELL * column, TOP + TALL * row, CELL, TALL
                    line = 1.6 if here == "arrives" else 1.0 if here else 0.4
                    canvas.rect(*at, fill, edge, 0, line, dash="4 3" if here == "arrives" else "")
            canvas.text(x + CELL * many / 2, TOP + TALL * ranks + 14, name, 12.5)
    floor = TOP + TALL * ranks + 40
    canvas.text(LEFT, floor, "rows: the tokens of each rank's piece; columns: heads", 12.5, "start", fill=MUTED)
    canvas.rect(LEFT, floor + 18, 22, 16, RANKS[rank % len(RANKS)], INK, 0)
    canvas.text(LEFT + 30, floor + 26, f"rank {rank} has it", 12.5, "start")
    canvas.rect(LEFT + 150, floor + 18, 22, 16, PAPER, KINDS["comm"], 0, 1.6, dash="4 3")
    canvas.text(LEFT + 180, floor + 26, "it arrives meanwhile", 12.5, "start")
    return canvas.drawing()


def tokens_or_heads(way: str, is_query: bool, piece: int, owner: int, ranks: int, rank: int) -> str:
    """Return "has" or "arrives" for a piece of the tokens, and the heads of which `owner` is the rank; else ""."""
    if way == "Ulysses":
        return "has" if owner == rank else ""
    if piece == rank or (way == "all-gather" and not is_query):
        return "has"
    return "arrives" if not is_query and piece == (rank - 1) % ranks else ""
