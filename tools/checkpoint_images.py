"""The pictures of checkpoints.

checkpoint     which rank writes which file, and from when on the folder counts   08
cheap_save     the calls of one save on four ranks, and what its time is made of   08
resume         a training that is killed, and continues from its checkpoint       08b
async_save     a thread that writes a copy while training continues               08b
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


WRITES = (3.2, 1.9, 2.6, 1.2)  # ms that each rank writes; a flush takes 0.5 ms


def cheap_save() -> Drawing:
    canvas = Sketch(
        980, 250, "One save of four ranks, call by call",
        "Ranks 0 to 3 each write a file and flush it, side by side; a shorter write is followed by waiting. At a "
        "meeting all ranks wait for the slowest. Then rank 0 writes a draft of the index, flushes it, renames it and "
        "flushes the names. At the second meeting the save is over. Until the rename the index leads to the state of "
        "the save before, and from the rename on to the new one.",
    )  # fmt: skip
    left, unit, high = 90, 118, 30
    met = left + unit * (max(WRITES) + 0.5)
    over = met + unit * (0.9 + 0.5 + 0.5)
    for rank, writes in enumerate(WRITES):
        y = 46 + 40 * rank
        canvas.text(left - 14, y + high / 2, f"rank {rank}", size=13, anchor="end")
        canvas.box(left, y, unit * writes, high, "write its file: bytes / W", TIMELINE["compute"], size=12, radius=0)
        canvas.box(left + unit * writes, y, unit * 0.5, high, "flush", KINDS["comm"], size=12, radius=0)
        if (x := left + unit * (writes + 0.5)) < met:
            canvas.box(x, y, met - x, high, "wait", TIMELINE["waiting"], size=12, radius=0)
        if rank:
            canvas.box(met, y, over - met, high, "wait", TIMELINE["waiting"], size=12, radius=0)
    canvas.box(met, 46, unit * 0.9, high, "write the index", TIMELINE["compute"], size=12, radius=0)
    canvas.box(met + unit * 0.9, 46, unit * 0.5, high, "flush", KINDS["comm"], size=12, radius=0)
    canvas.box(met + unit * 1.4, 46, unit * 0.5, high, "names", KINDS["comm"], size=12, radius=0)
    for x in (met, over):
        canvas.line((x, 30), (x, 214), line=2)
        canvas.text(x, 18, "meet", size=13, weight="bold")
    renamed = met + unit * 1.4
    canvas.line((renamed, 30), (renamed, 240), stroke=WRONG, line=2, dash="5 3")
    canvas.text(renamed, 18, "rename", size=13, weight="bold", fill=WRONG)
    canvas.note(left, 232, "until the rename, the index leads to the files of the save before")
    canvas.note(renamed + 10, 232, "then it leads to the new files")
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


def async_save() -> Drawing:
    canvas = Sketch(
        980, 236, "A save, and an asynchronous save",
        "Save: training takes step 3, waits while all bytes are written, and then takes steps 4 to 7. Asynchronous "
        "save: training takes step 3, makes a copy of its tensors, and takes steps 4 to 7. Meanwhile a thread writes "
        "the copy. After step 7 training makes the next copy, since the thread is idle again.",
    )  # fmt: skip
    left, unit, high = 150, 82, 34
    lanes = {"save": 20, "asynchronous save": 102}
    for name, y in lanes.items():
        canvas.heading(20, y, name)
        canvas.text(left - 14, y + 30, "training", size=13, anchor="end")
    step, copy, write = TIMELINE["compute"], TINTS[6], KINDS["S"]

    def row(y, boxes):
        x = left
        for words, width, fill in boxes:
            canvas.box(x, y, unit * width - 4, high, words, fill, size=12.5, radius=0)
            x += unit * width

    row(34, [("step 3", 1, step), ("write: training waits", 3, write), *[(f"step {n}", 1, step) for n in (4, 5, 6, 7)]])
    copied = [*[(f"step {n}", 1, step) for n in (4, 5, 6, 7)], ("copy", 0.6, copy), ("step 8", 1, step)]
    row(116, [("step 3", 1, step), ("copy", 0.6, copy), *copied, ("step 9", 1, step)])
    canvas.text(left - 14, 181, "thread", size=13, anchor="end")
    for start, width, words in ((1.6, 3, "write the copy"), (6.2, 3, "write the copy")):
        canvas.box(left + unit * start, 164, unit * width - 4, high, words, write, size=12.5, radius=0)
        canvas.arrow((left + unit * (start - 0.3), 150), (left + unit * start + 6, 164), stroke=KINDS["comm"])
    canvas.note(left, 220, "Training waits only for the copy. The price is the memory of the copy.")
    return canvas.drawing()
