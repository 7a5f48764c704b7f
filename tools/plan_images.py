"""The picture of planning.

plan_sieves    from all layouts to one: which can be run, which fit, which is fastest              15
plan_exposed   the backwards of four layers, and their all-reduces on one link                  15
plan_forecast  the six rules of a forecast, as arrows at the parts of a step                    15
"""

from labs import plan
from labs.kit.drawing.palette import INK, KINDS, MUTED, PAPER, RANKS, TIMELINE
from labs.kit.drawing.picture import Drawing
from labs.model import PRESETS
from tools.sketch import Sketch

SIEVES = (  # the question, and how it is answered
    ("Can it be run?", "sizes that multiply to the GPUs;", "whole heads, layers and sequences"),
    ("Does it fit?", "bytes by kind: P, G, S and A", "on the fullest rank"),
    ("Is it quick?", "seconds: computation, exposed", "communication, and the bubble"),
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
    heights = (236.0, 160.0, 96.0, 10.0)
    for number, ((question, *how), count) in enumerate(zip(SIEVES, left, strict=True)):
        high, lower = heights[number : number + 2]
        x, top = 214 + 250 * number, 150 - high / 2
        canvas.area(
            (x, top), (x + 214, 150 - lower / 2), (x + 214, 150 + lower / 2), (x, 150 + high / 2), fill=RANKS[3]
        )
        canvas.arrow((x - 32, 150), (x - 4, 150), stroke=MUTED)
        middle = x + (80 if count == 1 else 100)
        canvas.column(middle, 138, question)
        canvas.text(middle, 162, f"{count:,} left", size=14, fill=INK)
        canvas.lines(x + 107, 284, how, size=12.5, fill=MUTED)
    setup = "Llama 3 70B, 32 × H100, 512 sequences of 4,096 tokens in a step; the heights are not to scale"
    canvas.text(16, 16, setup, anchor="start", size=14)
    return canvas.drawing()


def plan_exposed() -> Drawing:
    canvas = Sketch(
        960, 168, "The exposed part of four all-reduces",
        "Left, each all-reduce takes 0.9 of a backward: each is over before the next begins, and only the last one is "
        "exposed. Right, each takes 1.4 of a backward: they take turns on the link, and the exposed part grows with "
        "each layer.",
    )  # fmt: skip
    unit, layers = 52, 4
    for left, takes in ((110, 0.9), (570, 1.4)):
        canvas.heading(left, 18, f"an all-reduce takes {takes} of a backward")
        for words, y in (("GPU", 58), ("link", 104)):
            canvas.text(left - 12, y, words, anchor="end", size=13)
        free = 0.0
        for layer in range(layers):
            canvas.box(left + unit * layer, 40, unit, 36, f"B{layers - layer}", TIMELINE["compute"])
            free = max(layer + 1.0, free)
            canvas.box(left + unit * free, 86, unit * takes, 36, f"g{layers - layer}", KINDS["comm"])
            free += takes
        canvas.box(left + unit * layers, 40, unit * (free - layers), 36, "exposed", TIMELINE["waiting"], size=10)
    canvas.note(110, 150, "B4 is the backward of layer 4, and g4 the all-reduce of its gradients.")
    return canvas.drawing()


def plan_forecast() -> Drawing:
    canvas = Sketch(
        960, 356, "The six rules of a forecast",
        "A step of one rank as a timeline of three micro-batches and a bubble as long as two more. Six arrows: "
        "1, a micro-batch computes. 2, it waits for all-reduces along tp. 3, Python launches the layers at the same "
        "time. 4, this repeats for every micro-batch. 5, the bubble lasts as long as pp − 1 more. 6, the all-reduce "
        "of gradients along dp hides under the last backward, and the rest is waited for.",
    )  # fmt: skip
    compute, waiting, sends = TIMELINE["compute"], TIMELINE["waiting"], KINDS["comm"]
    top, wide, tensor, left = 130, 130, 34, 120
    work = left + 2 * wide
    end = work + 3 * wide
    for row, name in enumerate(("GPU", "Python", "link along dp")):
        canvas.text(left - 16, top + 20 + 56 * row, name, anchor="end", size=13)
    canvas.box(left, top, 2 * wide, 40, "bubble", fill=waiting, size=12)
    for number in range(3):
        x = work + wide * number
        canvas.box(x, top, wide - tensor, 40, f"micro-batch {number}", fill=compute, size=12)
        canvas.rect(x + wide - tensor, top, tensor, 40, fill=sends)
        canvas.box(x, top + 56, wide - 44, 40, "launches", fill=RANKS[3], size=12)
    canvas.box(end - 87, top + 112, 167, 40, "all-reduce of gradients", fill=sends, size=12)
    canvas.box(end, top, 80, 40, "waits", fill=waiting, size=12)
    canvas.line((end, top - 6), (end, top + 160), stroke=MUTED, dash="4 3")
    arrows = (  # the rule, the words, the middle of the words, and the tip of the arrow
        (5, ["pp − 1 further", "micro-batches"], (250, 48), (left + wide, top - 3)),
        (1, ["6 operations per", "parameter and token"], (430, 48), (work + 48, top - 3)),
        (2, ["4 all-reduces of x", "in each layer"], (610, 48), (work + wide - 17, top - 3)),
        (4, ["× the number of", "micro-batches"], (640, 300), (work + 2 * wide - 17, top + 42)),
        (3, ["launches: they count only", "where they take longer"], (380, 300), (work + 40, top + 99)),
        (6, ["what the last backward", "does not hide"], (800, 48), (end + 40, top - 3)),
    )
    for rule, words, (at, y), tip in arrows:
        up = y > tip[1]
        canvas.arrow((at, y - 18 if up else y + 34), tip, stroke=INK, line=1.5)
        canvas.circle(at - 92, y + 6, 11, fill=INK)
        canvas.text(at - 92, y + 6, rule, size=13, fill=PAPER, weight="bold")
        canvas.lines(at - 74, y - 2, words, size=12.5, anchor="start")
    canvas.text(16, 18, "One step of one rank, time to the right", anchor="start", size=14, weight="bold")
    words = (
        "The last backward ends at the dashed line. The bubble is drawn in one piece; in a run, parts lie elsewhere."
    )
    canvas.text(16, 342, words,
                anchor="start", size=12.5, fill=MUTED)  # fmt: skip
    return canvas.drawing()
