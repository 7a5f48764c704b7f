"""A figure of a pipeline schedule as simulated, and below it the same schedule as a job ran it, on one time axis.

    overlay(lists, job.recording, step=2, costs={})

A recording differs from run to run, so the result is a figure (PNG), which a notebook test does not compare; the text
beside the figure gives only numbers that are the same in every run.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

from labs.kit.drawing.figures import LEGEND, SHOWN, WIDE, axes, finish
from labs.kit.drawing.palette import INK, INSTRUCTIONS, TIMELINE
from labs.kit.drawing.picture import Figure
from labs.kit.drawing.pipeline_colours import Fills
from labs.kit.drawing.tables import clock
from labs.kit.drawing.timelines import APART, LANE, MARGIN, Bar, paint
from labs.pp.checker import microbatches_of, stages_of
from labs.pp.instructions import KINDS, Lists
from labs.pp.simulation import Cost, Simulation, simulate


def overlay(lists: Lists, recording: Any, step: int | None, costs: Mapping[str, Cost]) -> Figure:
    """Draw a simulated pipeline schedule and a recorded step of the same schedule, as two lanes per rank.

    lists: the schedule, as one list of instructions per rank.
    step: the recorded step, the last when left out.
    costs: the seconds of F, B, I, W and send in the simulation; F, B, I and W default to the medians of the recorded
        times, per stage.
    """
    ran = recording.schedule(lists, step)
    both = {"simulated": simulate(lists, **medians(ran) | costs), "recorded": ran}
    longest = max(of.time for of in both.values())
    factor, unit = clock(longest)
    canvas, (panel,) = axes(WIDE, ((2 * LANE + APART) * len(lists) + 96) / SHOWN)
    panel.set(xlim=(0, MARGIN * factor * longest), ylim=((2 * LANE + APART) * len(lists) - APART, 0), xlabel=unit)
    names = {}
    for rank in range(len(lists)):
        for lane, (name, of) in enumerate(both.items()):
            top = (2 * LANE + APART) * rank + LANE * lane
            paint(panel, top, LANE, bars(of, rank), factor)
            names[top + LANE / 2] = f"rank {rank} {name}" if lane == 0 else name
    panel.set_yticks(list(names), list(names.values()))
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    words = "; ".join(f"{name}: bubble {of.bubble:.1%} of {factor * of.ideal:.3g} {unit}" for name, of in both.items())
    panel.set_title(words, fontsize=9.5, loc="left", color=INK, pad=24)
    legend(panel, lists)
    sizes = f"{len(lists)} ranks, {microbatches_of(lists)} micro-batches"
    return finish(canvas, f"Schedule({sizes}, {' and '.join(both)})", f"A schedule of {sizes}, {words}")


def medians(ran: Simulation) -> dict[str, Cost]:
    """Return {kind of instruction: its median seconds in each stage}."""
    took: dict[tuple[str, int], list[float]] = {}
    for x, start in ran.start.items():
        took.setdefault((type(x).__name__, x.stage), []).append(ran.end[x] - start)
    return {kind: [median(took.get((kind, s), [0])) for s in range(stages_of(ran.lists))] for kind in KINDS}


def bars(of: Simulation, rank: int) -> list[Bar]:
    """Return the bars of a rank: a grey bar for waiting, and over it a bar for each instruction."""
    fills = Fills(of.lists)
    blocks = [Bar(of.start[x], of.end[x], fills[x], (str(x.microbatch),)) for x in of.lists[rank]]
    return [Bar(0, of.time, TIMELINE["waiting"]), *blocks]


def legend(panel, lists: Lists) -> None:
    from matplotlib.patches import Patch

    kinds = {type(x).__name__ for order in lists for x in order}
    patches = [Patch(facecolor=fill, label=kind) for kind, fill in INSTRUCTIONS.items() if kind in kinds]
    patches += [Patch(facecolor=shade, label="a later stage") for shade in [*Fills(lists).by_shade()][1:]]
    patches.append(Patch(facecolor=TIMELINE["waiting"], label="the rank waits"))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    panel.legend(handles=patches, ncols=len(patches), **place, **LEGEND)
