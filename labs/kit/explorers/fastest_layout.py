"""The planner explorer's picture: the fastest layout of a model on a cluster, by labs.plan, and usual alternatives.

    picture(**BEGIN)      bars of the seconds of a step in each layout, and below them a table of the layouts
    searched(setup)       the layouts among which the plan chooses, in a fraction of labs.plan.search's time

A layout that does not fit has a dashed bar: the bytes that it holds at least.  `labs.kit.play.planner` shows this
picture below its controls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from labs import plan
from labs.kit.drawing import rules_on_runs
from labs.kit.drawing.palette import MUTED, TIMELINE, WRONG
from labs.kit.drawing.picture import Drawing, Picture
from labs.kit.drawing.svg import Canvas, width_of
from labs.kit.drawing.tables import Table, table
from labs.kit.explorers.pipeline_schedule import sentence
from labs.kit.explorers.prefetch import Stacked
from labs.model import PRESETS, Config
from labs.plan.layout import Layout, Setup
from labs.plan.reasons import FSDP, of_node
from labs.plan.results import Found, Plan, TooLarge, gb, has
from labs.plan.room import peak

MODELS = {
    "0.4B": Config(50_257, 1024, 24, 16, 16, 2752, context=1024),
    **{name: PRESETS[name] for name in ("llama3-8b", "llama3-70b", "llama3-405b")},
    "700B": Config(100_256, 18_432, 160, 144, 8, 64_512, context=8192),  # about as large as GPT-4, but dense
}
# CONTROLS has the values of each control, by its name: a sequence becomes a slider, a mapping becomes a menu.
# BEGIN has the control's first value.
CONTROLS: dict[str, Sequence | Mapping] = {
    "model": {name: name for name in MODELS},
    "cluster": {name: name for name in plan.CLUSTERS},
    "gpus": tuple(2**n for n in range(3, 12)),
    "sequences": tuple(2**n for n in range(3, 12)),
    "context": tuple(2**n for n in range(10, 18)),
}
BEGIN = {"model": "llama3-70b", "cluster": "H100, InfiniBand", "gpus": 32, "sequences": 512, "context": 4096}
LEFT, LONG, ROW, TOP = 132, 420, 34, 76  # pixels


def picture(model: str, cluster: str, gpus: int, sequences: int, context: int) -> Picture | Stacked:
    """Draw the seconds of a step in the layout that labs.plan chooses and in the alternatives, at these settings.

    If the cluster is impossible, the picture is the text of the error that labs.plan raised.
    """
    config = replace(MODELS[model], context=max(context, MODELS[model].context))
    try:
        setup = Setup(config, plan.CLUSTERS[cluster].of(gpus), sequences, context)
        found = searched(setup)
    except ValueError as refused:
        return sentence(str(refused), "No plan")
    ways = {"plain DP": {"tp": 1, "pp": 1, "zero": 0}, "FSDP": FSDP}
    ways |= {f"TP {setup.cluster.node} × DP": of_node(setup), "pipeline × DP": {"tp": 1, "staged": True}}
    plans = {"the plan": found.best or least(found)} | {
        name: found.best_where(**fields) or least(found, **fields) for name, fields in ways.items()
    }
    if not any(plans.values()):
        return sentence(plan.nearest(plan.search(config, setup.cluster, sequences, context)), "No plan")
    words = f"{model} on {gpus} × {cluster}: seconds of a step of {sequences:,} sequences of {context:,} tokens"
    return Stacked((drawn(words, plans, setup), listed(plans)))


# ---- the search ------------------------------------------------------------------------------------------


def searched(setup: Setup) -> Found:
    """Search as labs.plan.search does, but skip layouts that cannot be faster than one that was found.

    Recomputing more makes no step faster, but a step that waits for Python may recompute at no cost: where a layout
    fits, leaves the card room, and does not wait for Python, no further way of recomputing is tried.
    """
    feasible, too_large, settled = [], [], None
    for layout in runnable(setup):
        if layout[:-1] == settled:
            continue
        most = peak(setup, layout)
        if most > setup.cluster.card:
            too_large.append(TooLarge(setup, layout, most))
            continue
        feasible.append(Plan(setup, layout, plan.seconds(setup, layout), most))
        if not feasible[-1].crowded and not feasible[-1].step.launch:
            settled = layout[:-1]
    feasible.sort(key=lambda each: (round(each.seconds, 9), each.peak))
    too_large.sort(key=lambda each: each.peak)
    return Found(setup, feasible, too_large, [])


def runnable(setup: Setup) -> Iterator[Layout]:
    return (each for each in plan.layouts(setup) if isinstance(each, Layout))


def least(found: Found, **fields) -> TooLarge | None:
    """Return the layout with these fields that holds least, though it is too large; None if none can be run."""
    return next((each for each in found.too_large if has(each.layout, fields)), None)


# ---- the picture -----------------------------------------------------------------------------------------


def drawn(words: str, plans: Mapping[str, Plan | TooLarge | None], setup: Setup) -> Drawing:
    """Draw a bar of seconds for each plan, and a dashed bar without seconds for each layout that does not fit."""
    longest = max((each.seconds for each in plans.values() if isinstance(each, Plan)), default=1)
    said = {name: verdict(each, setup) for name, each in plans.items()}
    title = "; ".join(f"{name}: {text}" for name, text in said.items())
    canvas = Canvas(max(LEFT + LONG + 230, width_of(words, 13)), TOP + ROW * len(plans), words, title)
    canvas.text(16, 22, words, anchor="start", weight="bold")
    place = 16.0
    for name, colour in TIMELINE.items():
        canvas.rect(place, 42, 14, 14, fill=colour)
        canvas.text(place + 20, 49, name, 12, "start")
        place += width_of(name, 12) + 40
    canvas.rect(place, 42, 14, 14, stroke=WRONG, dash="4 3")
    canvas.text(place + 20, 49, "does not fit", 12, "start")
    for row, (name, each) in enumerate(plans.items()):
        y, x = TOP + ROW * row, LEFT
        canvas.text(LEFT - 10, y + 13, name, anchor="end")
        if isinstance(each, Plan):
            for part, value in spent(each).items():
                long = LONG * value / longest
                canvas.rect(x, y, long, 26, fill=TIMELINE[part])
                x += long
            canvas.text(x + 8, y + 13, said[name], anchor="start")
        else:
            canvas.rect(x, y, LONG, 26, stroke=WRONG if each else MUTED, dash="4 3")
            canvas.text(x + 10, y + 13, said[name], anchor="start", fill=WRONG if each else MUTED)
    lines = [f"{name.ljust(14)} {text}" for name, text in said.items()]
    return canvas.drawing("\n".join([words, *lines]))


def verdict(each: Plan | TooLarge | None, setup: Setup) -> str:
    if each is None:
        return "cannot be run in these sizes"
    if isinstance(each, TooLarge):
        return f"does not fit: {gb(each.peak)} at least, the card has {gb(setup.cluster.card)}"
    return f"{each.seconds:,.0f} s" if each.seconds >= 100 else f"{each.seconds:.3g} s"


def spent(each: Plan) -> dict[str, float]:
    step, slow = each.step, each.seconds / each.step.seconds
    waiting = step.bubble + step.launch + step.rest
    parts = {"compute": step.compute, "communication": step.communication, "waiting": waiting}
    return {name: slow * value for name, value in parts.items()}


def listed(plans: Mapping[str, Plan | TooLarge | None]) -> Table:
    """Return a table of the layouts, with a verdict on each beside the plan's choice."""
    best = plans["the plan"]
    rows = []
    for name, each in plans.items():
        if each is None:
            continue
        row = {"": name, "layout": str(each.layout), "held": gb(each.peak)}
        if isinstance(each, Plan):
            times = each.seconds / best.seconds
            same = "" if each is best else rules_on_runs.verdict(times)
            row |= {"tokens/s/GPU": f"{each.tokens_per_gpu:,.0f}", "beside the plan": same}
        else:
            row |= {"tokens/s/GPU": "", "beside the plan": "does not fit"}
        rows.append(row)
    return table(rows)
