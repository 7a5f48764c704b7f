"""The picture of pipeline parallelism.

pp_flow    layers in stages, what crosses the cuts; a whole batch at once, and four micro-batches     10
"""

from labs import pp
from labs.kit.drawing.palette import INSTRUCTIONS, KINDS, MUTED, RANKS, TIMELINE
from labs.kit.drawing.picture import Drawing
from tools.sketch import SENT, Sketch

STAGES, HIGH = 4, 26  # HIGH: the height of a rank's row in pixels
BOX, GAP = 168, 76
BATCH = 4  # the time of a forward of the whole batch through a stage, in forwards of one micro-batch


def boxes(canvas: Sketch) -> None:
    """Draw a stage on each rank, with its layers, and arrows for what crosses the cuts."""
    for stage in range(STAGES):
        x = 16 + (BOX + GAP) * stage
        canvas.text(x, 56, f"rank {stage}: stage {stage}", size=13, weight="bold", anchor="start")
        canvas.rect(x, 72, BOX, 58, fill=RANKS[stage])
        ends = {0: "embedding", STAGES - 1: "norm, head, loss"}
        canvas.text(x + BOX / 2, 92, f"layers {2 * stage} and {2 * stage + 1}")
        canvas.text(x + BOX / 2, 112, ends.get(stage, ""), size=12.5, fill=MUTED)
        if stage < STAGES - 1:
            canvas.arrow((x + BOX + 5, 90), (x + BOX + GAP - 5, 90), stroke=KINDS["comm"])
            canvas.text(x + BOX + GAP / 2, 78, "x", fill=SENT)
            canvas.arrow((x + BOX + GAP - 5, 114), (x + BOX + 5, 114), stroke=KINDS["comm"])
            canvas.text(x + BOX + GAP / 2, 128, "gradient", size=12, fill=SENT)


def gantt(canvas: Sketch, left: float, top: float, unit: float, microbatches: int) -> None:
    """Draw GPipe on the four ranks. unit: pixels per forward of a micro-batch through a stage"""
    each = BATCH / microbatches
    of = pp.simulate(pp.gpipe(STAGES, microbatches), F=each, B=2 * each)
    for rank, order in enumerate(of.lists):
        y = top + (HIGH + 6) * rank
        canvas.text(left - 8, y + HIGH / 2, f"rank {rank}", size=12.5, anchor="end")
        canvas.rect(left, y, unit * of.time, HIGH, fill=TIMELINE["waiting"], stroke="none", radius=0)
        for x in order:
            fill, start, end = INSTRUCTIONS[type(x).__name__], unit * of.start[x], unit * of.end[x]
            label = x.microbatch if microbatches > 1 else "batch"
            canvas.box(left + start, y, end - start, HIGH, label, fill, size=12, radius=0)


def pp_flow() -> Drawing:
    canvas = Sketch(
        1000, 544, "Layers in stages, and micro-batches that flow through them",
        "Eight layers in four stages, one on each of four ranks; x goes from each stage to the next one, and its "
        "gradient comes back. Below, time from left to right: with the whole batch at once, only one rank works at any "
        "time. With the batch in four micro-batches, the ranks work side by side, and the step takes less than half as "
        "long.",
    )  # fmt: skip
    canvas.heading(16, 24, "Who holds what, and what is sent")
    boxes(canvas)
    canvas.heading(16, 172, "Time, with the whole batch at once")
    for place, (kind, words) in enumerate({"F": "forward", "B": "backward"}.items()):
        canvas.rect(560 + 110 * place, 164, 16, 16, fill=INSTRUCTIONS[kind], radius=0)
        canvas.note(582 + 110 * place, 172, words)
    canvas.rect(780, 164, 16, 16, fill=TIMELINE["waiting"], radius=0)
    canvas.note(802, 172, "the rank waits: the bubble")
    gantt(canvas, 76, 196, 18, microbatches=1)
    canvas.heading(16, 358, "The same, with the batch in four micro-batches, 0 to 3")
    gantt(canvas, 76, 382, 18, microbatches=4)
    canvas.arrow((76, 524), (260, 524), stroke=MUTED, line=1.2)
    canvas.note(268, 524, "time")
    return canvas.drawing()
