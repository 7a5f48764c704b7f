"""Search of all layouts of a model on a cluster, the fastest first; and for each that cannot be run, the reason.

    found = search(PRESETS["llama3-70b"], CLUSTERS["H100, InfiniBand"].of(32), batch=512)
    found.best, found.feasible, found.rejected

A layout does not fit if a rank holds more than the card.  If it leaves less than 7 % of the card free, it fits, but the
allocator has to return memory and request it again: all published runs like that were 2.5 to 20 times slower.
"""

from labs.plan.candidates import Rejected, layouts, require
from labs.plan.layout import Layout, Setup
from labs.plan.machines import Cluster
from labs.plan.pace import seconds
from labs.plan.results import Found, Plan, TooLarge, has
from labs.plan.room import peak
from labs.plan.sparse import Shape


def plan(setup: Setup, layout: Layout) -> Plan:
    """Return the plan of one layout, whether it fits or not; raise ValueError for one that the cluster cannot run."""
    require(setup, layout)
    return Plan(setup, layout, seconds(setup, layout), peak(setup, layout))


def search(
    config: Shape,
    cluster: Cluster,
    batch: int,
    context: int | None = None,
    software: str = "pytorch",
    bits: int = 16,
) -> Found:
    """Return every layout: those that fit, those that do not, and those that cannot be run.

    batch: sequences per step, on all GPUs together.
    context: tokens per sequence; by default the config's.
    software: the training software, a name in FITTED.
    bits: of the numbers that matrix products multiply, 16 or 8.
    """
    setup = Setup(config, cluster, batch, context, software=software, bits=bits)
    feasible, too_large, impossible, card = [], [], [], setup.cluster.card
    for layout in layouts(setup):
        if isinstance(layout, Rejected):
            impossible.append(layout)
        elif (most := peak(setup, layout)) > card:
            too_large.append(TooLarge(setup, layout, most))
        else:
            feasible.append(Plan(setup, layout, seconds(setup, layout), most))
    # Python 3.12 and later add floats more precisely than 3.11: rounded, equal times are equal on both.
    feasible.sort(key=lambda each: (round(each.seconds, 9), each.peak))
    too_large.sort(key=lambda each: each.peak)
    return Found(setup, feasible, too_large, impossible)


def quickest(setup: Setup, **fields) -> Plan | None:
    """Return the fastest plan that fits and whose layout has these fields; None if none fits."""
    plans = (
        Plan(setup, layout, seconds(setup, layout), most)
        for layout in layouts(setup)
        if isinstance(layout, Layout) and has(layout, fields) and (most := peak(setup, layout)) <= setup.cluster.card
    )
    return min(plans, key=lambda each: each.seconds, default=None)


def priced(found: Found, **fields) -> Plan:
    """Return the fastest plan that fits and whose layout has these fields; if none fits, the one that holds least.

    Raises ValueError for a field that no layout has, and for a layout that cannot be run.
    """
    if unknown := fields.keys() - {*Layout._fields}:
        raise ValueError(f"a layout has no {', '.join(sorted(unknown))}: it has {', '.join(Layout._fields)}")
    if fitting := found.best_where(**fields):
        return fitting
    if least := next((each for each in found.too_large if has(each.layout, fields)), None):
        return plan(found.setup, least.layout)
    asked = Layout(**fields)
    asked = asked._replace(zero=fields.get("zero", 3 if asked.shards > 1 else 0))
    each = max(1, found.setup.batch // (asked.dp * asked.batch)) if asked.dp > 0 < asked.batch else 1
    return plan(found.setup, asked._replace(accumulation=fields.get("accumulation", each)))
