"""The choice in sentences: what the best layout spends its time on, and what each other way would cost.

table(found)            the best layouts, and how many there are of each kind that cannot be run
explain(found)          sentences
warnings(plan)          what is allowed and dear: tensor parallelism that crosses a node, with its price
nearest(found)          where nothing fits: by how much, and what would help
"""

from collections import Counter
from dataclasses import replace
from math import inf

from labs import cost
from labs.mesh import Grid
from labs.plan.candidates import layouts
from labs.plan.choice import Found, Plan, gb, has, quickest
from labs.plan.layout import Layout, Setup
from labs.plan.pace import seconds
from labs.plan.room import peak

ROWS = 10


def table(found: Found) -> str:
    setup = found.setup
    lines = [
        f"{setup.cluster.gpus} × {setup.cluster.name}, {setup.batch} sequences of {setup.context} tokens in a step: "
        f"{len(found.feasible):,} layouts fit, {len(found.too_large):,} do not, "
        f"{len(found.impossible):,} cannot be run"
    ]
    if not found.feasible:
        return "\n".join([*lines, nearest(found)])
    lines += [f"{'a step':>9} {'tokens/s/GPU':>13} {'MFU':>6} {'held':>9}   layout"]
    for each in found.feasible[:ROWS]:
        lines += [
            f"{each.seconds:7.2f} s {each.tokens_per_gpu:13,.0f} {each.mfu:6.1%} {gb(each.peak):>9}   {each.layout}"
        ]
    return "\n".join(lines)


def explain(found: Found) -> list[str]:
    """Raises nothing: where no layout fits, the one sentence is `nearest`."""
    best = found.best
    if best is None:
        return [nearest(found)]
    says = [
        f"The quickest of {len(found.feasible):,} layouts that fit is {best.layout}: {spent(best)}.",
        f"The fullest rank holds {gb(best.peak)} of {gb(found.setup.cluster.card)}: {kinds(best.held)}.",
        placed(best),
        *warnings(best),
    ]
    for name, fields in ways(found.setup).items():
        other = found.best_where(**fields)
        if other is None:
            least = next((each for each in found.too_large if has(each.layout, fields)), None)
            says += [f"{name} does not fit: it holds {gb(least.peak)} at least." if least else f"{name} cannot be run."]
        elif not has(best.layout, fields):
            times = f"{other.seconds / best.seconds:.2f} × as long"
            says += [f"{name} takes {times} at best ({other.layout}): {spent(other)}."]
    return says + crossings(found)


FSDP = {"tp": 1, "pp": 1, "zero": 3, "replicas": 1}


def ways(setup: Setup) -> dict[str, dict]:
    """What the field would think of first: a name, and fields of the layout."""
    names = {
        "Plain data parallelism": {"tp": 1, "pp": 1, "zero": 0},
        f"FSDP over all {setup.cluster.gpus} GPUs": FSDP,
    }
    if setup.cluster.nodes > 1:
        names[f"{node_name(setup)} and data parallelism across"] = of_node(setup)
    return names | {"A pipeline without tensor parallelism": {"tp": 1, "staged": True}}


def node_name(setup: Setup) -> str:
    return f"Tensor parallelism of {setup.cluster.node} inside a node"


def of_node(setup: Setup) -> dict:
    return {"tp": setup.cluster.node, "pp": 1}


def spent(plan: Plan) -> str:
    """12.3 s a step, of which 80 % is computation, 15 % ..."""
    names = {
        "compute": "computation",
        "launch": "Python",
        "tensor": "tensor parallelism",
        "pipeline": "sends",
        "data": "gradients and parameters",
    }
    parts = sorted(((value, names.get(name, name)) for name, value in plan.step._asdict().items()), reverse=True)
    told = ", ".join(
        f"{value / plan.step.seconds:.0%} {name}" for value, name in parts if value >= 0.01 * plan.step.seconds
    )
    slow = f" (and {plan.setup.constants.thrash} × that, since the card is nearly full)" if plan.crowded else ""
    return f"{plan.step.seconds:.2f} s a step, {told}{slow}"


def kinds(held: cost.Held) -> str:
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
    """Which axis is inside of a node, and which crosses nodes."""
    cluster, layout, stride, says = each.setup.cluster, each.layout, 1, []
    for name in ("tp", "shards", "replicas", "pp"):
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


# ---- what would have to be different ---------------------------------------------------------------------


def crossings(found: Found) -> list[str]:
    """With which cards, links, batch or context FSDP over all GPUs would be quicker than tensor parallelism inside a
    node and data parallelism across; or no longer would be, where it is."""
    setup, cluster = found.setup, found.setup.cluster
    if cluster.nodes == 1 or not (found.best_where(**FSDP) and found.best_where(**of_node(setup))):
        return []
    now_wins, says = fsdp_wins(setup), []
    for told, (now, changed) in {
        "cards of {:,.0f} GB": (cluster.card / 1e9, lambda f: with_cluster(setup, card=f)),
        "links between nodes of {:,.0f} GB/s a GPU": (cluster.between / 1e9, lambda f: with_cluster(setup, between=f)),
        "sequences of {:,.0f} tokens": (setup.context, lambda f: with_context(setup, f)),
        "{:,.0f} sequences in a step": (setup.batch, lambda f: replace(setup, batch=max(1, round(setup.batch * f)))),
    }.items():
        factor = next((f for f in FACTORS if fsdp_wins(changed(f)) is (not now_wins)), None)
        if factor:
            says += [f"{told.format(now * factor)} instead of {now:,.0f}"]
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
    """None where neither can be run."""
    fsdp, rival = (
        each.seconds if each else inf for each in (quickest(setup, **FSDP), quickest(setup, **of_node(setup)))
    )
    return None if fsdp == rival == inf else fsdp < rival


# ---- where nothing fits ----------------------------------------------------------------------------------


def nearest(found: Found) -> str:
    """The layout that needs least, what it lacks, and from how many GPUs on the model would fit."""
    setup = found.setup
    if not found.too_large:
        reasons = Counter(each.reason for each in found.impossible).most_common(1)
        return f"No layout can be run at all: {reasons[0][0]}." if reasons else "No layout can be run at all."
    least, card = found.too_large[0], setup.cluster.card
    says = (
        f"No layout fits. The nearest is {least.layout}, which holds {gb(least.peak)} on the fullest rank: "
        f"{least.peak / card:.2f} × the card's {gb(card)}, {gb(least.peak - card)} too much."
    )
    return f"{says} {more_gpus(setup)}"


def more_gpus(setup: Setup) -> str:
    for factor in (2, 4, 8, 16, 32, 64):
        larger = replace(setup, cluster=setup.cluster.of(factor * setup.cluster.gpus), batch=factor * setup.batch)
        least = min((peak(larger, each), each) for each in layouts(larger) if isinstance(each, Layout))
        if least[0] <= setup.cluster.card:
            return (
                f"On {larger.cluster.gpus:,} GPUs with {larger.batch:,} sequences it would fit: {least[1]} holds "
                f"{gb(least[0])}."
            )
    return f"Not even {larger.cluster.gpus:,} such GPUs would do: shorten the context, or take larger cards."


# ---- its picture -----------------------------------------------------------------------------------------


def mesh(layout: Layout) -> Grid:
    """The ranks as a grid, with the axes in their order on the wire."""
    sizes = {"pp": layout.pp, "replicas": layout.replicas, "shards": layout.shards, "tp": layout.tp}
    kept = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return Grid(tuple(kept.values()), tuple(kept))
