"""A picture of one moment of a pipeline: where each micro-batch is, and below it the schedule with that moment marked.

    picture(simulate(lists), now=3)      the ranks side by side, each with its stages below each other

A stage is a box, and the instruction that the stage runs stands in the middle of the box.  At the left stand the
micro-batches that wait for their forward in this stage.  At the right stand the micro-batches that wait for their
backward.  At the foot stand the micro-batches whose activations the stage holds.

`labs.kit.play.microbatches` makes a film of the moments at which an instruction begins.
"""

from collections.abc import Sequence

from labs.kit.drawing.palette import INSTRUCTIONS, KINDS, MUTED, SOFT, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.pipeline_colours import Fills
from labs.kit.drawing.pipeline_gantt import draw_simulation
from labs.kit.drawing.svg import Canvas, width_of
from labs.kit.explorers.prefetch import Stacked
from labs.pp.checker import ranks_of, stages_of
from labs.pp.instructions import B, F, I, Instruction, W, makes, needs
from labs.pp.simulation import Simulation

WIDE, HIGH, APART, TOP = 100, 98, 24, 78  # pixels: a stage's width and height, the gap between stages, the head
SMALL, A_ROW = 18, 5  # pixels of a micro-batch's square, and squares per row
KEY = "In a stage, at the left: waits for its forward; at the right: its gradient waits; at the foot: activations held."


def moments(of: Simulation) -> list[float]:
    """Return the times at which an instruction of a simulated schedule begins, and the time at which the last ends."""
    return sorted({*of.start.values(), of.time})


def picture(of: Simulation, now: float) -> Stacked:
    return Stacked((stages(of, now), draw_simulation(of, now)))


class PipelineState:
    """The state of a pipeline at one moment: what each stage runs, and which micro-batches it holds or waits for."""

    def __init__(self, of: Simulation, now: float):
        self.of, self.now, self.last = of, now, stages_of(of.lists)
        self.made = {makes(x) for x, end in of.end.items() if end <= now}

    def runs(self, stage: int) -> Instruction | None:
        return next(
            (x for x in self.of.end if x.stage == stage and self.of.start[x] <= self.now < self.of.end[x]), None
        )

    def waits(self, stage: int, kinds: tuple[type[Instruction], ...]) -> list[int]:
        """Return the micro-batches whose input has arrived from another stage and that `stage` has not begun.

        kinds: the classes of instructions to consider, such as F, or B and I.
        """
        return [
            x.microbatch
            for x, start in self.of.start.items()
            if x.stage == stage and isinstance(x, kinds) and start > self.now and self.sent(x)
        ]

    def sent(self, x: Instruction) -> bool:
        others = [need for need in needs(x, self.last) if need.stage != x.stage]
        return bool(others) and self.made.issuperset(others)

    def holds(self, stage: int) -> list[int]:
        begun = [x for x, start in self.of.start.items() if x.stage == stage and start <= self.now]
        gone = {x.microbatch for x in begun if isinstance(x, B | W) and self.of.end[x] <= self.now}
        return sorted({x.microbatch for x in begun if isinstance(x, F)} - gone)


def stages(of: Simulation, now: float) -> Drawing:
    """Draw the ranks of a pipeline side by side at one moment, each with its stages and their micro-batches."""
    moment, fills, ranks = PipelineState(of, now), Fills(of.lists), ranks_of(of.lists)
    rows = {s: sorted(t for t in ranks if ranks[t] == rank).index(s) for s, rank in ranks.items()}
    title = f"Time {now:.4g}"
    words = [f"Rank {rank} {doing(moment, [s for s in ranks if ranks[s] == rank])}." for rank in range(len(of.lists))]
    width = max(16 + (WIDE + APART) * len(of.lists), width_of(KEY, 12) + 32)
    height = TOP + (HIGH + APART) * (1 + max(rows.values()))
    canvas = Canvas(width, height, title, " ".join(words))
    canvas.text(16, 20, title, anchor="start", weight="bold")
    canvas.text(16, 42, KEY, size=12, anchor="start", fill=MUTED)
    corner = {s: (16 + (WIDE + APART) * ranks[s], TOP + (HIGH + APART) * rows[s]) for s in sorted(ranks)}
    for rank in range(len(of.lists)):
        canvas.text(16 + (WIDE + APART) * rank + WIDE / 2, TOP - 12, f"rank {rank}", size=12)
    for s, (x, y) in corner.items():
        if s + 1 in corner:
            flow(canvas, (x, y), corner[s + 1])
        stage(canvas, x, y, s, moment, fills)
    return canvas.drawing("\n".join([title, *words]))


def doing(moment: PipelineState, stages: Sequence[int]) -> str:
    running = next(filter(None, map(moment.runs, stages)), None)
    return f"runs {running!r}" if running else "waits"


def flow(canvas: Canvas, one: tuple[float, float], other: tuple[float, float]) -> None:
    """Draw an arrow from one stage to the next stage if the two are neighbours in the picture."""
    (x, y), (across, down) = one, other
    middle = y + HIGH / 2
    if down == y and abs(across - x) == WIDE + APART:
        start, end = (x + WIDE, across) if across > x else (x, across + WIDE)
        canvas.arrow((start + 2, middle), (end - 2, middle) if across > x else (end + 2, middle), stroke=MUTED)
    elif across == x:
        canvas.arrow((x + WIDE / 2, y + HIGH + 2), (x + WIDE / 2, down - 2), stroke=MUTED)


def stage(canvas: Canvas, x: float, y: float, s: int, moment: PipelineState, fills: Fills) -> None:
    canvas.rect(x, y, WIDE, HIGH, fill=SOFT)
    canvas.text(x + WIDE / 2, y + 11, f"stage {s}", size=11, fill=MUTED)
    if running := moment.runs(s):
        label = f"{type(running).__name__}{running.microbatch}"
        canvas.rect(x + WIDE / 2 - 20, y + 22, 40, 28, fill=fills[running])
        canvas.text(x + WIDE / 2, y + 36, label, weight="bold", fill=ink(fills[running]))
    queue(canvas, x + 4, y + 22, moment.waits(s, (F,)), INSTRUCTIONS["F"])
    queue(canvas, x + WIDE - SMALL - 4, y + 22, moment.waits(s, (B, I)), INSTRUCTIONS["B"])
    held = moment.holds(s)
    shown = held if len(held) <= 2 * A_ROW else held[: 2 * A_ROW - 1]
    for number, m in enumerate(shown):
        square(canvas, *place(x, y, number), m, KINDS["A"])
    if len(shown) < len(held):
        left, top = place(x, y, len(shown))
        canvas.text(left + SMALL / 2, top + SMALL / 2, f"+{len(held) - len(shown)}", size=10)


def place(x: float, y: float, number: int) -> tuple[float, float]:
    """Return the top left corner of a micro-batch's square, the `number`-th at the foot of a stage."""
    row, column = divmod(number, A_ROW)
    return x + 4 + (SMALL + 0.5) * column, y + 56 + (SMALL + 1) * row


def queue(canvas: Canvas, x: float, y: float, waiting: list[int], fill: str) -> None:
    """Draw the first micro-batch that waits in a stage, and the number of micro-batches that wait behind it."""
    if waiting:
        square(canvas, x, y, waiting[0], fill)
    if len(waiting) > 1:
        canvas.text(x + SMALL / 2, y + SMALL + 7, f"+{len(waiting) - 1}", size=10)


def square(canvas: Canvas, x: float, y: float, number: int, fill: str) -> None:
    canvas.rect(x, y, SMALL, SMALL, fill=fill, radius=0, line=0.8)
    canvas.text(x + SMALL / 2, y + SMALL / 2, number, size=10, fill=ink(fill))
