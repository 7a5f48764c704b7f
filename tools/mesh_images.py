"""The picture of three dimensions.

three_axes    eight ranks as a block: what they share along each axis, and what travels along it     11
"""

from itertools import product

from labs.kit.drawing.palette import INK, KINDS, MUTED, RANKS
from labs.kit.drawing.picture import Drawing
from labs.mesh import Mesh
from tools.sketch import Sketch

AXES = {  # an axis: what differs between its ranks, what travels, and its colour
    "pp": ("different layers", "activations at the cut, and their gradients", KINDS["A"]),
    "shard": ("different sequences, different pieces of the state", "parameters and gradients", KINDS["P"]),
    "tp": ("different parts of each matrix", "activations, in every layer", KINDS["comm"]),
}
WIDE, HIGH = 152, 62


def corner(p: int, d: int, t: int) -> tuple[float, float]:
    return 60 + 250 * t + 96 * d, 136 + 140 * p - 74 * d


def three_axes() -> Drawing:
    words = "; ".join(f"along {axis}: {differs}; {sent} travel" for axis, (differs, sent, _) in AXES.items())
    canvas = Sketch(
        1000, 352, "Eight ranks in three dimensions",
        f"A block of 2 × 2 × 2 ranks. {words}. Each rank has one half of the layers, of the sequences, and of every "
        "matrix.",
    )  # fmt: skip
    mesh = Mesh((2, 2, 2), tuple(AXES)).mesh
    middle = {at: (corner(*at)[0] + WIDE / 2, corner(*at)[1] + HIGH / 2) for at in product(range(2), repeat=3)}
    places = sorted(middle, key=lambda at: -at[1])  # the ones at the back first
    for at in places:
        for number, (_, _, colour) in enumerate(AXES.values()):
            if at[number] == 0:
                other = tuple(1 if i == number else x for i, x in enumerate(at))
                canvas.line(middle[at], middle[other], stroke=colour, line=4)
    for p, d, t in places:
        x, y = corner(p, d, t)
        canvas.rect(x, y, WIDE, HIGH, fill=RANKS[2 * p], stroke=INK, radius=5)
        canvas.text(x + WIDE / 2, y + 15, f"rank {int(mesh[p, d, t])}", size=14, weight="bold")
        canvas.text(x + WIDE / 2, y + 31, f"stage {p}, part {t}", size=12)
        canvas.text(x + WIDE / 2, y + 47, f"sequences {'ab'[d]}", size=12, fill=MUTED)
    canvas.heading(24, 24, "Each rank has three neighbours, and talks to each about something else")  # fmt: skip
    for line, (axis, (differs, sent, colour)) in enumerate(AXES.items()):
        y = 84 + 86 * line
        canvas.line((640, y), (680, y), stroke=colour, line=5)
        canvas.text(694, y, f"along {axis}", size=14, weight="bold", anchor="start")
        canvas.text(640, y + 22, differs, size=13, anchor="start")
        canvas.text(640, y + 42, f"→ {sent}", size=13, anchor="start", fill=MUTED)
    return canvas.drawing()
