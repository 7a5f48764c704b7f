"""Published runs beside their forecasts: tokens per second, and the seconds that slow pipelines lose.

speeds(runs, "forecast", "1B: …")     a point for each run: its forecast speed over its measured speed
lost(runs)                            the seconds that each pipeline loses for each micro-batch, over its stages
parallelism(tp, pp)                   a pipeline, tp beyond a node, or neither
"""

from collections.abc import Iterable
from itertools import starmap
from typing import NamedTuple

from labs.kit.drawing.scatters import Hovered, Point, scatter
from labs.plan.layout import Layout

NODE = 8  # GPUs in a node of every published run
STAGES = (2, 4, 8, 16, 32)
BESIDE = {"1B": 0.88, "3B": 0.96, "8B": 1.04, "80B": 1.13}  # the models' points stand side by side


class Run(NamedTuple):
    """A published run and its forecast, both in tokens per second and GPU."""

    gpus: int
    layout: Layout
    measured: float
    forecast: float


class Lost(NamedTuple):
    """A slow pipeline run: its model, its stages, and the seconds that it loses for each micro-batch."""

    model: str
    stages: int
    seconds: float


def parallelism(tp: int, pp: int) -> str:
    return "a pipeline" if pp > 1 else "tp beyond a node" if tp > NODE else "neither"


def speeds(runs: Iterable[tuple], up: str, caption: str) -> Hovered:
    """Draw each run's forecast over its measurement, coloured by its kind of parallelism; runs: fields of Run."""
    points = []
    for run in starmap(Run, runs):
        batches = f"{run.layout.accumulation} micro-batches of {run.layout.batch}"
        words = f"{run.gpus} GPUs, {run.layout.axes}, {batches}: {run.measured:,.0f}, {up} {run.forecast:,.0f}"
        points.append(Point(run.measured, run.forecast, parallelism(run.layout.tp, run.layout.pp), words))
    return scatter(points, "measured", up, caption, diagonal=True)


def lost(runs: Iterable[tuple]) -> Hovered:
    """Draw the seconds that each slow pipeline loses for each micro-batch; runs: fields of Lost."""
    points = [
        Point(each.stages * BESIDE[each.model], each.seconds, each.model, f"{each.model}: {each.seconds:.2f} s")
        for each in starmap(Lost, runs)
    ]
    words = "Pipelines that are more than twice as slow as planned"
    return scatter(points, "stages", "seconds lost for each micro-batch", words, marks=STAGES)
