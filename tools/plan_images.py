"""The picture of planning.

plan_sieves    from all layouts to one: which can be run, which fit, which is fastest              15
"""

from labs import plan
from labs.kit.drawing.palette import INK, MUTED, RANKS
from labs.kit.drawing.picture import Drawing
from labs.model import PRESETS
from tools.sketch import Sketch

SIEVES = (  # the question, and how it is answered
    ("Can it be run?", "arithmetic: sizes that multiply out,", "heads, layers, sequences to deal out"),
    ("Does it fit?", "bytes by kind: P, G, S and A", "on the fullest rank"),
    ("Is it quick?", "seconds: computation, what waits", "for a wire, and the bubble"),
)


def plan_sieves() -> Drawing:
    found = plan.search(PRESETS["llama3-70b"], plan.CLUSTERS["H100, InfiniBand"].of(32), 512, 4096)
    left = (len(found.feasible) + len(found.too_large), len(found.feasible), 1)
    canvas = Sketch(
        960, 330, "From all layouts to one",
        f"A model, machines and a batch go through three sieves. What can be run: {left[0]:,} layouts. What fits on "
        f"the cards: {left[1]:,}. What is quickest: one. The numbers are those of Llama 3 70B on 32 H100.",
    )  # fmt: skip
    canvas.rect(16, 104, 150, 92, fill=RANKS[0], radius=6)
    canvas.lines(91, 130, ["a model", "machines", "a batch"], size=14, leading=1.6)
    high = 220.0
    for number, ((question, *how), count) in enumerate(zip(SIEVES, left, strict=True)):
        x, top = 214 + 250 * number, 150 - high / 2
        lower = max(72.0, high - 84)
        canvas.area(
            (x, top), (x + 214, 150 - lower / 2), (x + 214, 150 + lower / 2), (x, 150 + high / 2), fill=RANKS[3]
        )
        canvas.arrow((x - 32, 150), (x - 4, 150), stroke=MUTED)
        canvas.column(x + 100, 138, question)
        canvas.text(x + 100, 162, f"{count:,} left", size=14, fill=INK)
        canvas.lines(x + 107, 284, how, size=12.5, fill=MUTED)
        high = lower
    canvas.text(16, 24, "Llama 3 70B, 32 × H100, 512 sequences of 4,096 tokens in a step", anchor="start", size=14)
    return canvas.drawing()
