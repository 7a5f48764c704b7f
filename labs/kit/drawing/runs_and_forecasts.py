"""Published runs beside their forecasts: tokens per second, and the seconds that slow pipelines lose.

speeds(runs, "forecast", "1B: …")     a point for each run: its forecast speed over its measured speed
lost(runs)                            the seconds that each pipeline loses for each micro-batch, over its stages
by_kind({"1B": runs}, forecast)       a table: measured over forecast seconds, in the median of each kind
agreement(runs, {"mine": forecast})   a table: the rank correlation and the error of each forecast
yours_and_plan(fn, sizes, plan)       the bytes of exercise 2's function beside the plan's, for draw.bars
parallelism(tp, pp)                   a pipeline, tp beyond a node, or neither
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from statistics import median
from typing import NamedTuple

from labs.kit.drawing.scatters import Hovered, Point, scatter
from labs.kit.drawing.tables import Table, table
from labs.plan import Plan
from labs.plan.compare import LEAST_IN_GROUP, rank_correlation
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


def by_kind(published: Mapping[str, Sequence], forecast: Callable[..., float]) -> Table:
    """Return how much slower published runs were than their forecast, by model and kind of parallelism.

    published: {models: runs with .run and .measured}, as `check.forecast.published` returns them
    """
    rows = []
    for models, runs in published.items():
        groups: dict[str, list[float]] = {"neither": [], "a pipeline": [], f"tp beyond {NODE} GPUs": []}
        for each in runs:
            kind = 1 if each.run.pp > 1 else 2 if each.run.tp > NODE else 0
            groups[list(groups)[kind]].append(each.run.tokens_per_gpu / each.measured / forecast(each.run))
        for kind, ratios in groups.items():
            slow = sum(ratio > 2 for ratio in ratios)
            row = {"models": models, "kind": kind, "runs": len(ratios), "more than 2 ×": slow}
            rows.append(row | {"measured ÷ forecast": f"{median(ratios):.2f} ×" if ratios else "–"})
    return table(rows, caption="seconds of a step; the ratio is the median")


def agreement(published: Sequence, forecasts: Mapping[str, Callable[..., float]]) -> Table:
    """Return how well forecasts agree with published runs, as medians: the order in a group, and tokens per second.

    published: runs with .run, .group and .measured, as `check.forecast.published` returns them
    forecasts: {name: function of a run that returns the seconds of a step}
    """
    rows = []
    for name, forecast in forecasts.items():
        groups: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
        for each in published:
            groups[each.group].append((each.run.tokens_per_gpu / forecast(each.run), each.measured))
        large = [group for group in groups.values() if len(group) >= LEAST_IN_GROUP]
        order = median(rank_correlation(*zip(*group, strict=True)) for group in large)
        error = median(abs(speed / measured - 1) for group in groups.values() for speed, measured in group)
        rows.append({"": name, "rank correlation": f"{order:.2f}", "error of speed": f"{error:.0%}"})
    return table(rows, caption=f"{len(published)} runs in {len(groups)} groups of (model, GPUs); medians")


def yours_and_plan(fullest_rank: Callable[..., float], sizes: Sequence, planned: Plan) -> dict[str, dict[str, float]]:
    """Return two bars for `draw.bars`: the bytes by `fullest_rank(*sizes)`, and the plan's.

    The state that a function returns without activations is drawn in the proportions of the plan's P, G and S.
    """
    parameters, _, *others = sizes
    held, state = planned.held, fullest_rank(parameters, 0, *others)
    whole = held.P + held.G + held.S
    yours = {kind: getattr(held, kind) * state / whole for kind in "PGS"} | {"A": fullest_rank(*sizes) - state}
    theirs = {kind: getattr(held, kind) for kind in ("P", "G", "S", "A", "comm", "temporary")}
    name = planned.layout.axes
    return {f"{name}: yours": yours, f"{name}: the plan": theirs}
