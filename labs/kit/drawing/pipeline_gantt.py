"""Drawings of pipeline schedules: which rank runs which instruction when, and how many activations the rank holds.

    schedule(lists, F=1, B=2, send=0.1)         the schedule as labs.pp simulates it
    schedule(lists, recording=job.recording)    the simulated schedule above the recorded one (pipeline_overlay.py)
    schedule(wrong)                             the instructions that can run, the first wrong one, and the reason

Each block is an instruction, and the number in it is the instruction's micro-batch.  On a rank with several stages, the
blocks of later stages are paler.
"""

from dataclasses import dataclass
from itertools import groupby, takewhile
from textwrap import wrap
from typing import Any

from labs.kit.drawing.palette import INSTRUCTIONS, KINDS, MUTED, TIMELINE, WRONG, ink
from labs.kit.drawing.picture import Drawing, Picture
from labs.kit.drawing.pipeline_colours import Fills
from labs.kit.drawing.pipeline_overlay import overlay
from labs.kit.drawing.svg import Canvas, width_of
from labs.pp.checker import WrongSchedule, is_list, microbatches_of, stages_of
from labs.pp.instructions import Instruction, Lists
from labs.pp.simulation import Cost, Simulation, as_far_as_it_goes, simulate

LONG, WIDEST = 700, 48  # pixels: the longest time axis, and the largest width of the shortest instruction's block
LEFT, ROW, HELD, APART = 76, 26, 40, 8  # pixels: left margin, row of a rank, plot of its activations, gap between rows
NAMES = {"F": "forward", "B": "backward", "I": "input's gradient", "W": "weights' gradients"}
Legend = list[tuple[str, str]]  # (fill, name), ...


def schedule(lists: Lists, recording: Any = None, step: int | None = None, **costs: Cost) -> Picture:
    """Draw which rank runs which instruction of a pipeline schedule when, and how many activations each rank holds.

    If the schedule cannot be run, draw the instructions that can run, the first wrong instruction, and the reason.

    lists: the schedule, as one list of instructions per rank.
    recording: the recording of a job that ran the schedule, its pipeline wrapped in labs.kit.record.instructions.
    step: the recorded step to show, the last when left out.
    costs: the times of F, B, I, W and send, which are arguments of labs.pp.simulate.  With a recording, these times are
        in seconds, and F, B, I and W default to the recorded times.
    """
    if recording is not None:
        return overlay(lists, recording, step, costs)
    try:
        return draw_simulation(simulate(lists, **costs))
    except WrongSchedule as error:
        if not (is_list(lists) and all(map(is_list, lists)) and any(lists)):
            raise  # the argument is no list of lists of instructions, so there is nothing to draw
        return draw_refused(lists, error, costs)


def draw_simulation(of: Simulation, now: float | None = None) -> Drawing:
    """Draw the blocks of a simulated schedule over time, and below them the activations that each rank holds.

    now: the moment to mark on the time axis, if any.
    """
    axis, title, legends = axis_of(of, of.time), headline(of), legends_of(of.lists)
    top = 44 + 22 * len(legends)
    end = top + (ROW + APART) * len(of.lists)
    middle = end + 46
    bottom = middle + HELD * len(of.lists)
    width = max(axis.x(of.time) + 96, width_of(title, 13) + 32, *map(legend_width, legends))
    canvas = Canvas(width, bottom + 12, title, " ".join(sentences(of)))
    canvas.text(16, 20, title, anchor="start", weight="bold")
    keys(canvas, 46, legends)
    gantt(canvas, top, of, axis)
    ticks(canvas, end, axis)
    alive = "micro-batches whose activations are alive" + (", in each of a rank's stages" if legends[1:] else "")
    canvas.text(16, middle - 14, alive, size=12, anchor="start", fill=MUTED)
    draw_activations(canvas, middle, of, axis)
    if now is not None:
        for first, last in ((top - 6, end - APART + 2), (middle, bottom)):
            canvas.line((axis.x(now), first), (axis.x(now), last), line=2)
    return canvas.drawing(f"{title}\n{of!r}")


def draw_refused(lists: Lists, error: WrongSchedule, costs: dict[str, Cost]) -> Drawing:
    """Draw the instructions of a wrong schedule that can run, frame the wrong instructions, and give the reason."""
    of = before(lists, error, costs)
    axis = axis_of(of, max(of.end.values(), default=0) or 1)
    reason, legends = wrap(str(error), 96), legends_of(of.lists)
    head = 34 + 19 * len(reason)
    top = head + 22 * len(legends) + 16
    bottom = top + (ROW + APART) * len(lists)
    words = width_of("m" * max(map(len, reason)), 13) + 32
    title = "This schedule cannot be run"
    canvas = Canvas(max(axis.x(axis.end) + 90, words, *map(legend_width, legends)), bottom + 30, title, f"{error}.")
    canvas.text(16, 20, title, anchor="start", weight="bold")
    canvas.lines(16, 42, reason, anchor="start", fill=WRONG)
    keys(canvas, head + 18, legends)
    gantt(canvas, top, of, axis)
    ticks(canvas, bottom, axis)
    for rank, place in error.places:
        start = max((of.end[x] for x in of.lists[rank]), default=0)
        label = f"{lists[rank][place]!r:.8}" if place < len(lists[rank]) else "?"
        framed(canvas, axis.x(start), top + (ROW + APART) * rank, label)
    return canvas.drawing(f"{title}\n{error}")


def before(lists: Lists, error: WrongSchedule, costs: dict[str, Cost]) -> Simulation:
    """Simulate the instructions of a wrong schedule that can run without the first wrong instruction."""
    orders = [[*takewhile(lambda x: isinstance(x, Instruction), order)] for order in lists]
    stages = stages_of(orders)
    orders[error.rank] = orders[error.rank][: error.place]
    return as_far_as_it_goes(orders, stages, **dict(F=1, B=2, I=1, W=1, send=0) | costs)


# ---- parts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """The time axis of a drawn schedule."""

    scale: float  # pixels per unit of time
    end: float

    def x(self, moment: float) -> float:
        return LEFT + self.scale * moment


def axis_of(of: Simulation, end: float) -> Axis:
    shortest = min((of.end[x] - of.start[x] for x in of.end if of.end[x] > of.start[x]), default=1)
    return Axis(min(LONG / (end or 1), WIDEST / shortest), end)


def gantt(canvas: Canvas, top: float, of: Simulation, axis: Axis) -> None:
    """Draw a row for each rank: a grey bar for waiting, and over it the instructions that the rank computes."""
    fills = Fills(of.lists)
    size = 12 if all(room(of, x, axis) > width_of(str(x.microbatch), 12) + 2 for x in of.end) else 10
    for rank, order in enumerate(of.lists):
        y = top + (ROW + APART) * rank
        canvas.text(16, y + ROW / 2, f"rank {rank}", anchor="start")
        canvas.rect(LEFT, y, axis.x(axis.end) - LEFT, ROW, fill=TIMELINE["waiting"], stroke="none", radius=0)
        for x in order:
            fill, long = fills[x], room(of, x, axis)
            canvas.rect(axis.x(of.start[x]), y, long, ROW, fill=fill, radius=0, line=min(0.8, long / 8))
            if width_of(str(x.microbatch), size) + 2 < long:
                canvas.text(axis.x(of.start[x]) + long / 2, y + ROW / 2, x.microbatch, size=size, fill=ink(fill))


def framed(canvas: Canvas, x: float, y: float, label: str) -> None:
    """Draw a wrong instruction as a dashed frame with its name."""
    long = max(ROW, width_of(label, 12) + 12)
    canvas.rect(x, y - 2, long, ROW + 4, stroke=WRONG, line=2.5, dash="5 3")
    canvas.text(x + long / 2, y + ROW / 2, label, size=12, weight="bold", fill=WRONG)


def room(of: Simulation, x: Instruction, axis: Axis) -> float:
    return axis.scale * (of.end[x] - of.start[x])


def draw_activations(canvas: Canvas, top: float, of: Simulation, axis: Axis) -> None:
    """Draw for each rank, over time, the number of micro-batches whose activations the rank holds."""
    most = [max((number for _, number in series), default=0) for series in of.alive]
    unit = (HELD - 6) / max(1, *most)
    for rank, series in enumerate(of.alive):
        base = top + HELD * (rank + 1)
        canvas.text(16, base - HELD / 2, f"rank {rank}", anchor="start")
        points, before = [(LEFT, base)], 0
        for moment, number in {**dict(series), of.time: 0}.items():  # several changes at one moment: the last counts
            points += [(axis.x(moment), base - unit * before), (axis.x(moment), base - unit * number)]
            before = number
        canvas.area(*points, fill=KINDS["A"], line=0.8)
        canvas.line((LEFT, base), (axis.x(axis.end), base), line=0.8)
        canvas.text(axis.x(axis.end) + 8, base - HELD / 2, f"at most {most[rank]}", size=12, anchor="start")


def ticks(canvas: Canvas, y: float, axis: Axis) -> None:
    """Draw the time axis below the rows of the ranks."""
    steps = (digit * 10.0**power for power in range(-9, 12) for digit in (1, 2, 5))
    step = next(step for step in steps if axis.scale * step >= 44)  # at least 44 pixels per number of the axis
    for number in range(int(axis.end / step + 1e-9) + 1):
        x = axis.x(number * step)
        canvas.line((x, y - 5), (x, y + 1), stroke=MUTED)
        canvas.text(x, y + 9, f"{number * step:.4g}", size=11, fill=MUTED)
    canvas.text(16, y + 9, "time", size=11, anchor="start", fill=MUTED)


def legends_of(lists: Lists) -> list[Legend]:
    """Return the legend's lines: one for the kinds of instructions, and one for the stages if a rank has several."""
    kinds = {type(x).__name__ for order in lists for x in order}
    first = [(INSTRUCTIONS[kind], f"{kind} {name}") for kind, name in NAMES.items() if kind in kinds]
    first.append((TIMELINE["waiting"], "the rank waits"))
    fills = Fills(lists)
    second = [(fill, f"stages {ranges(stages)}") for fill, stages in fills.by_shade().items()]
    return [first, second] if len(second) > 1 else [first]


def ranges(numbers: list[int]) -> str:
    """Return integers as ranges in words: "0–3, 5" for 0, 1, 2, 3 and 5."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def keys(canvas: Canvas, y: float, legends: list[Legend]) -> None:
    for number, legend in enumerate(legends):
        x = 16
        for fill, name in legend:
            canvas.rect(x, y + 22 * number - 8, 16, 16, fill=fill, radius=0)
            canvas.text(x + 22, y + 22 * number, name, size=12, anchor="start", fill=MUTED)
            x += 36 + width_of(name, 12)


def legend_width(legend: Legend) -> float:
    return 16 + sum(36 + width_of(name, 12) for _, name in legend)


# ---- in words --------------------------------------------------------------------------------------------


def headline(of: Simulation) -> str:
    sizes = f"{len(of.lists)} ranks, {microbatches_of(of.lists)} micro-batches"
    return f"{sizes}: bubble {of.bubble:.1%} (takes {of.time:.4g}, and the busiest rank computes {of.ideal:.4g})"


def sentences(of: Simulation) -> list[str]:
    """Return one sentence per rank, with its instructions and the most micro-batches whose activations it holds."""
    most = [max((number for _, number in series), default=0) for series in of.alive]
    return [
        f"Rank {rank} runs {' '.join(map(repr, order))}; at most {number} micro-batches' activations are alive."
        for rank, (order, number) in enumerate(zip(of.lists, most, strict=True))
    ]
