"""The pictures of checkpoints.

checkpoint     which rank writes which file, and from when on the folder counts   08
resume         a training that is killed, and continues from its checkpoint       08b
"""

from labs.kit.drawing.palette import KINDS, MUTED, PAPER, SOFT, TIMELINE, WRONG, ink
from labs.kit.drawing.palette import RANKS as TINTS
from labs.kit.drawing.picture import Drawing
from tools.memory_images import RANKS, quarters
from tools.sketch import Sketch


def checkpoint() -> Drawing:
    canvas = Sketch(
        980, 330, "Saving, side by side",
        "Four ranks, each with its quarter of P and of S. Each writes them to a file of its own, in a folder called "
        "step-12.draft. Then rank 0 writes index.json, which says what lies in which file, and renames the folder to "
        "step-12. Only from then on is it a checkpoint.",
    )  # fmt: skip
    canvas.heading(20, 24, "1. Each rank writes its share, and flushes it")
    canvas.heading(520, 24, "2. Rank 0 writes the index")
    canvas.heading(754, 24, "3. and renames the folder")
    canvas.rect(14, 168, 690, 118, fill=SOFT, dash="6 4")
    canvas.note(26, 306, "step-12.draft: nobody loads it")
    for rank in range(RANKS):
        x = 26 + 122 * rank
        canvas.text(x + 50, 50, f"rank {rank}", size=13)
        for row, kind in enumerate("PS"):
            quarters(canvas, (x, 64 + 32 * row, 100, 26), kind, [rank], across=True)
        canvas.arrow((x + 50, 126), (x + 50, 180), stroke=KINDS["comm"])
        canvas.rect(x, 184, 100, 62)
        for row, kind in enumerate("PS"):
            canvas.box(x + 36, 190 + 26 * row, 28, 22, f"{kind}{rank}", KINDS[kind], size=11, radius=0)
        canvas.text(x + 50, 262, f"rank-{rank}-of-4", size=12)
    canvas.arrow((612, 40), (612, 180), stroke=KINDS["comm"])
    canvas.rect(534, 184, 156, 62)
    canvas.lines(612, 202, ["P0: in rank-0-of-4", "P1: in rank-1-of-4 …"], size=12)
    canvas.text(612, 262, "index.json", size=12)
    canvas.arrow((712, 227), (772, 227))
    canvas.rect(778, 168, 184, 118, fill=TINTS[2])
    canvas.lines(870, 214, ["the same files,", "under the name that counts"], size=12.5)
    canvas.note(790, 306, "step-12: a checkpoint")
    return canvas.drawing()


STEPS, SAVED, KILLED = 10, 4, 6  # steps are counted from 0
# The things that change from step to step, and which rank they belong to.
FIVE = {
    "weights": ("each rank its part", KINDS["P"]),
    "moments": ("each rank its part", KINDS["S"]),
    "schedule": ("one for all ranks", PAPER),
    "place": ("one for all ranks", PAPER),
    "random": ("each rank its own", TINTS[2]),
}


def resume() -> Drawing:
    names = ", ".join(f"{name} ({whose})" for name, (whose, _) in FIVE.items())
    canvas = Sketch(
        980, 336, "Resumed, as if nothing had happened",
        f"Three rows of steps. Undisturbed: steps 0 to {STEPS - 1}. Killed: a save after step {SAVED - 1}, and the end "
        f"in step {KILLED}. Resumed: from what was saved, steps {SAVED} to {STEPS - 1}, so steps {SAVED} and "
        f"{KILLED - 1} are taken twice. What was saved: {names}.",
    )  # fmt: skip
    left, unit, high = 138, 82, 30
    at = left + unit * SAVED
    rows = {"undisturbed": (24, range(STEPS)), "killed": (92, range(KILLED + 1)), "resumed": (282, range(SAVED, STEPS))}
    for name, (y, steps) in rows.items():
        canvas.heading(20, y + high / 2, name)
        for step in steps:
            lost = name == "killed" and step >= SAVED
            fill = TIMELINE["waiting"] if lost else TIMELINE["compute"]
            canvas.rect(left + unit * step, y, unit - 8, high, fill=fill, dash="4 3" if lost else "")
            canvas.text(left + unit * step + unit / 2 - 4, y + high / 2, f"step {step}", size=12.5)
    dead = left + unit * (KILLED + 1) - 2
    canvas.text(dead, 92 + high / 2, "✕ killed", size=14, weight="bold", anchor="start", fill=WRONG)
    canvas.note(at + 12, 138, f"lost: steps {SAVED} and {KILLED - 1} are taken twice")
    canvas.arrow((at - 4, 92), (at - 4, 152), stroke=KINDS["comm"])
    canvas.text(at - 16, 138, "save", size=12.5, anchor="end")
    canvas.rect(14, 156, 952, 84, fill=SOFT)
    canvas.text(26, 198, "a checkpoint", size=13, anchor="start")
    for number, (name, (whose, fill)) in enumerate(FIVE.items()):
        x = left + 164 * number
        canvas.rect(x, 168, 152, 34, fill=fill)
        canvas.text(x + 76, 185, name, size=13, weight="bold", fill=ink(fill))
        canvas.text(x + 76, 220, whose, size=12, fill=MUTED)
    canvas.arrow((at - 4, 240), (at - 4, 280), stroke=KINDS["comm"])
    canvas.text(at - 16, 258, "load", size=12.5, anchor="end")
    return canvas.drawing()
