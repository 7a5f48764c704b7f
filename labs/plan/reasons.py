"""The choice in sentences: how the best layout spends its time, and the cost of the alternatives.

evidence(setup)         says on which runs the constants were fitted, and how large their errors are
explain(found)          explains the choice in sentences
warnings(plan)          warns of tensor parallelism that crosses nodes, with its cost
"""

from collections import Counter
from dataclasses import replace
from math import inf

from labs import cost
from labs.mesh import Grid
from labs.plan.candidates import tp_reason
from labs.plan.choice import quickest
from labs.plan.constants import EVIDENCE
from labs.plan.layout import Layout, Setup
from labs.plan.pace import seconds
from labs.plan.results import NEAR, Found, Plan, gb, has, nearest


def evidence(setup: Setup) -> str:
    """Return a sentence about the runs on which the constants were fitted, and about their errors."""
    known = EVIDENCE[setup.software]
    near, far = (
        f"{known[each]:.0%} in the median, {known[f'{each}_tail']:.0%} at the 90th percentile" for each in KINDS
    )
    return (
        f"Its constants are those of {setup.software}, fitted to {known['rows']:.0f} published runs "
        f"({known['sources']}). "
        f"Their error is {near}; that of a source that was left out {far}. Four of five are in the ranges above."
    )


KINDS = ("fitted", "left_out")


def explain(found: Found) -> list[str]:
    """Return the choice in sentences; if no layout fits, the one sentence of `nearest`."""
    best = found.best
    if best is None:
        return [nearest(found)]
    says = [
        f"{len(found.feasible):,} layouts fit. The simplest within {NEAR - 1:.0%} of the quickest is {best.layout}: "
        f"{spent(best)}.",
        f"The fullest rank holds {gb(best.peak)} of {gb(found.setup.cluster.card)}: {kinds(best.held)}.",
        placed(best),
        *warnings(best),
    ]
    for name, fields in ways(found.setup).items():
        other = found.best_where(**fields)
        if other is None:
            least = next((each for each in found.too_large if has(each.layout, fields)), None)
            says += [
                f"{name} does not fit: it holds {gb(least.peak)} at least."
                if least
                else f"{name} cannot be run: {why_not(found, fields)}."
            ]
        elif not has(best.layout, fields):
            ratio = other.seconds / best.seconds
            times = f"takes {ratio:.2f} × as long" if ratio > NEAR else "is as quick, and less simple,"
            says += [f"{name} {times} at best ({other.layout}): {spent(other)}."]
    return says + crossings(found)


def why_not(found: Found, fields: dict) -> str:
    """Return the reason why no layout with these fields can be run."""
    setup, tp = found.setup, fields.get("tp", 1)
    if reason := tp_reason(setup, tp, False):
        return reason
    pp = fields.get("pp")
    if pp is None:
        others = [each.reason for each in found.impossible if not each.layout.startswith("pp 1 ")]
        return Counter(others).most_common(1)[0][0] if others else f"{setup.cluster.gpus} GPUs have no stages"
    dp, rest = divmod(setup.cluster.gpus, tp * pp)
    if rest:
        return f"{setup.cluster.gpus} GPUs do not divide by {tp * pp}"
    if setup.batch % dp:
        more = -(-setup.batch // dp) * dp
        return f"{setup.batch} sequences do not divide by {dp}, but {more} would"
    return "no mesh of these GPUs is such a one"


FSDP = {"tp": 1, "pp": 1, "cp": 1, "zero": 3, "replicas": 1}


def ways(setup: Setup) -> dict[str, dict]:
    """Return the usual alternatives, as `{name: fields of the layout}`."""
    names = {
        "Plain data parallelism": {"tp": 1, "pp": 1, "cp": 1, "zero": 0},
        f"FSDP over all {setup.cluster.gpus} GPUs": FSDP,
    }
    if setup.cluster.nodes > 1:
        names[f"{node_name(setup)} and data parallelism across"] = of_node(setup)
    return names | {"A pipeline without tensor parallelism": {"tp": 1, "cp": 1, "staged": True}}


def node_name(setup: Setup) -> str:
    return f"Tensor parallelism of {setup.cluster.node} inside a node"


def of_node(setup: Setup) -> dict:
    return {"tp": setup.cluster.node, "pp": 1, "cp": 1}


def spent(plan: Plan) -> str:
    """Return the time of a step in words, by what it is spent on, such as: 12.30 s a step, 80% computation, ..."""
    inner = plan.layout.cp > 1 or plan.layout.ep > 1
    names = {
        "compute": "computation",
        "launch": "Python",
        "tensor": "messages inside of layers" if inner else "tensor parallelism",
        "pipeline": "sends",
        "data": "gradients and parameters",
    }
    parts = sorted(((value, names.get(name, name)) for name, value in plan.step._asdict().items()), reverse=True)
    parts_in_words = ", ".join(
        f"{value / plan.step.seconds:.0%} {name}" for value, name in parts if value >= 0.01 * plan.step.seconds
    )
    slow = f" (and {plan.setup.constants.thrash} × that, since the card is nearly full)" if plan.crowded else ""
    return f"{plan.step.seconds:.2f} s a step, {parts_in_words}{slow}"


def kinds(held: cost.HeldBytes) -> str:
    names = {
        "P": "parameters",
        "G": "gradients",
        "S": "optimizer state",
        "A": "activations",
        "comm": "buffers of collectives",
        "temporary": "logits and the allocator's own",
    }
    return ", ".join(f"{gb(size)} {name}" for key, name in names.items() if (size := getattr(held, key)))


def placed(each: Plan) -> str:
    """Return a sentence that says which axes are inside a node, and which cross nodes."""
    cluster, layout, stride, says = each.setup.cluster, each.layout, 1, []
    for name in ("tp", "cp", "shards", "replicas", "pp"):
        size = getattr(layout, name)
        if size > 1:
            local = cluster.local(size, stride)
            where = "inside a node" if local == size else f"across nodes, {local} of them on each"
            says += [f"the {size} ranks of {name} are {where}"]
        stride *= size
    return f"On {cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.node}: {'; '.join(says) or 'one rank'}."


def warnings(each: Plan) -> list[str]:
    tp, node = each.layout.tp, each.setup.cluster.node
    if tp <= node:
        return []
    inside = replace(
        each.setup, cluster=replace(each.setup.cluster, node=tp, gpus=-(-each.setup.cluster.gpus // tp) * tp)
    )
    price = seconds(each.setup, each.layout).tensor - seconds(inside, each.layout).tensor
    return [
        f"Warning: tensor parallelism of {tp} crosses nodes of {node}: that costs {price:.2f} s of a step's "
        f"{each.step.seconds:.2f} s, since each layer waits for the links between nodes."
    ]


# ---- changes that would make another strategy faster -----------------------------------------------------


def crossings(found: Found) -> list[str]:
    """Return a sentence on the cards, links, batch or context for which another strategy would be faster.

    The two strategies are FSDP over all GPUs, and tensor parallelism inside a node with data parallelism across.
    """
    setup, cluster = found.setup, found.setup.cluster
    if cluster.nodes == 1 or not (found.best_where(**FSDP) and found.best_where(**of_node(setup))):
        return []
    now_wins, says = fsdp_wins(setup), []
    for words, (now, changed) in {
        "cards of {:,.0f} GB": (cluster.card / 1e9, lambda f: with_cluster(setup, card=f)),
        "links between nodes of {:,.0f} GB/s a GPU": (cluster.between / 1e9, lambda f: with_cluster(setup, between=f)),
        "sequences of {:,.0f} tokens": (setup.context, lambda f: with_context(setup, f)),
        "{:,.0f} sequences in a step": (setup.batch, lambda f: replace(setup, batch=max(1, round(setup.batch * f)))),
    }.items():
        factor = next((f for f in FACTORS if fsdp_wins(changed(f)) is (not now_wins)), None)
        if factor:
            says += [f"{words.format(now * factor)} instead of {now:,.0f}"]
    if not says:
        return []
    rival, longer = node_name(setup).replace("T", "t", 1), "no longer " * bool(now_wins)
    return [f"FSDP over all {cluster.gpus} GPUs would {longer}be quicker than {rival} with {', or '.join(says)}."]


FACTORS = (1.5, 2, 4, 8, 1 / 2, 1 / 4, 1 / 8)  # the smaller changes first, up and down


def with_cluster(setup: Setup, **factors: float) -> Setup:
    fields = {name: getattr(setup.cluster, name) * factor for name, factor in factors.items()}
    return replace(setup, cluster=replace(setup.cluster, **fields))


def with_context(setup: Setup, factor: float) -> Setup:
    context = max(1, round(setup.context * factor))
    return replace(setup, context=context, config=replace(setup.config, context=max(context, setup.config.context)))


def fsdp_wins(setup: Setup) -> bool | None:
    """Return whether FSDP over all GPUs is faster than its rival; None if neither fits."""
    fsdp, rival = (
        each.seconds if each else inf for each in (quickest(setup, **FSDP), quickest(setup, **of_node(setup)))
    )
    return None if fsdp == rival == inf else fsdp < rival


# ---- the picture -----------------------------------------------------------------------------------------


def mesh(layout: Layout) -> Grid:
    """Return the ranks as a grid, with the axes in order, outermost first."""
    sizes = {"pp": layout.pp, "replicas": layout.replicas, "shards": layout.shards, "cp": layout.cp, "tp": layout.tp}
    kept = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return Grid(tuple(kept.values()), tuple(kept))
