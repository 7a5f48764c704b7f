"""The planner explorer's picture: the layout that labs.plan chooses for a model on a cluster, and usual alternatives.

    picture(**BEGIN)      bars of the seconds of a step in each layout, and below them a table of the layouts

`labs.kit.play.planner` shows this picture below its controls.
"""

from collections.abc import Mapping, Sequence

from labs import plan
from labs.kit.drawing.charts import chart
from labs.kit.drawing.picture import Picture
from labs.kit.drawing.tables import Table, table
from labs.kit.explorers.pipeline_schedule import sentence
from labs.kit.explorers.prefetch import Stacked
from labs.model import PRESETS, Config
from labs.plan.reasons import FSDP, of_node
from labs.plan.results import Plan, gb

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
    "gpus": tuple(2**n for n in range(3, 13)),
    "sequences": tuple(2**n for n in range(3, 13)),
}
BEGIN = {"model": "llama3-70b", "cluster": "H100, InfiniBand", "gpus": 32, "sequences": 512}


def picture(model: str, cluster: str, gpus: int, sequences: int) -> Picture | Stacked:
    """Draw the seconds of a step in the layout that labs.plan chooses and in the alternatives, at these settings.

    If no layout fits, the picture is a sentence that says how many bytes are missing.  If the cluster is impossible,
    the picture is the text of the error that labs.plan raised.
    """
    try:
        found = plan.search(MODELS[model], plan.CLUSTERS[cluster].of(gpus), sequences)
    except ValueError as refused:
        return sentence(str(refused), "No plan")
    if found.best is None:
        return sentence(plan.nearest(found), "No plan")
    ways = {"plain DP": {"tp": 1, "pp": 1, "zero": 0}, "FSDP": FSDP}
    ways |= {f"TP {found.setup.cluster.node} × DP": of_node(found.setup), "pipeline × DP": {"tp": 1, "staged": True}}
    others = {name: other for name, fields in ways.items() if (other := found.best_where(**fields))}
    plans = {"the plan": found.best} | others
    caption = f"{model} on {gpus} × {cluster}: seconds of a step of {sequences} sequences"
    return Stacked((chart({name: spent(each) for name, each in plans.items()}, "s", caption=caption), listed(plans)))


def spent(each: Plan) -> dict[str, float]:
    step, slow = each.step, each.seconds / each.step.seconds
    waiting = step.bubble + step.launch + step.rest
    parts = {"compute": step.compute, "communication": step.communication, "waiting": waiting}
    return {name: slow * value for name, value in parts.items()}


def listed(plans: Mapping[str, Plan]) -> Table:
    return table(
        {"": name, "layout": str(each.layout), "held": gb(each.peak), "tokens/s/GPU": f"{each.tokens_per_gpu:,.0f}"}
        for name, each in plans.items()
    )
