"""Search of all layouts of a model on a cluster, the fastest first; and for each that cannot be run, the reason.

    found = search(PRESETS["llama3-70b"], CLUSTERS["H100, InfiniBand"].of(32), batch=512)
    found.best, found.feasible, found.rejected

A layout does not fit if a rank holds more than the card.  If it leaves less than 7 % of the card free, it fits, but the
allocator has to return memory and request it again: all published runs like that were 2.5 to 20 times slower.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from labs import cost
from labs.model import Config
from labs.plan.candidates import Rejected, layouts, require
from labs.plan.fitted import EVIDENCE
from labs.plan.layout import Layout, Setup
from labs.plan.machines import Cluster
from labs.plan.pace import Step, seconds
from labs.plan.room import held, peak


class Plan(NamedTuple):
    """A layout with its predicted time per step and its peak bytes; it is crowded if the card is nearly full."""

    setup: Setup
    layout: Layout
    step: Step
    peak: int

    @property
    def crowded(self) -> bool:
        return self.peak > self.setup.constants.crowded * self.setup.cluster.card

    @property
    def seconds(self) -> float:
        return self.step.seconds * (self.setup.constants.thrash if self.crowded else 1)

    @property
    def held(self) -> cost.Held:
        """Return the bytes on the fullest rank, by kind."""
        return held(self.setup, self.layout)

    @property
    def tokens_per_gpu(self) -> float:
        """Return the tokens per second and GPU."""
        return self.setup.batch * self.setup.context / self.seconds / self.setup.cluster.gpus

    @property
    def range(self) -> tuple[float, float]:
        """Return the range of tokens per second and GPU in which four of five published runs were."""
        evidence = EVIDENCE[self.setup.software]
        return evidence["least"] * self.tokens_per_gpu, evidence["most"] * self.tokens_per_gpu

    @property
    def mfu(self) -> float:
        """Return the useful operations per second as a fraction of the card's peak: 6 N + 6 L D T for each token.

        Attention counts as causal.
        """
        config = self.setup.config
        operations = config.depth * cost.layer_operations(config, self.setup.context) + cost.head_operations(config)
        return self.tokens_per_gpu * operations / self.setup.cluster.flops


def plan(setup: Setup, layout: Layout) -> Plan:
    """Return the plan of one layout, whether it fits or not; raise ValueError for one that the cluster cannot run."""
    require(setup, layout)
    return Plan(setup, layout, seconds(setup, layout), peak(setup, layout))


class TooLarge(NamedTuple):
    """A layout whose fullest rank holds more bytes than the card, and its peak."""

    setup: Setup
    layout: Layout
    peak: int

    @property
    def reason(self) -> str:
        card = self.setup.cluster.card
        return f"{gb(self.peak)} on the fullest rank, {gb(self.peak - card)} more than the card's {gb(card)}"


@dataclass(frozen=True)
class Found:
    """The result of a search.

    feasible: layouts that fit, the fastest first.
    too_large: layouts that do not fit, the one that holds least first.
    impossible: layouts that cannot be run.
    """

    setup: Setup
    feasible: list[Plan]
    too_large: list[TooLarge]
    impossible: list[Rejected]

    @cached_property
    def best(self) -> Plan | None:
        """Return the simplest plan within 1 % of the fastest; None if nothing fits."""
        near = [each for each in self.feasible if each.seconds <= NEAR * self.feasible[0].seconds]
        return min(near, key=lambda each: (simplicity(each.layout), each.seconds), default=None)

    @cached_property
    def front(self) -> list[Plan]:
        """Return the plans for which no other is both faster and smaller, the fastest first."""
        least, found = inf, []
        for each in self.feasible:
            if each.peak < least:
                least = each.peak
                found.append(each)
        return found

    @cached_property
    def rejected(self) -> list[TooLarge | Rejected]:
        return [*self.too_large, *self.impossible]

    def best_where(self, **fields) -> Plan | None:
        """Return the fastest plan whose layout has these fields, such as tp=1, pp=1; None if none fits."""
        return next((each for each in self.feasible if has(each.layout, fields)), None)

    def __repr__(self) -> str:
        from labs.plan.reasons import table

        return table(self)


NEAR = 1.01  # a time up to 1.01 × the fastest is as fast: the formulas are not more precise


def simplicity(layout: Layout) -> tuple:
    """Return a key that is less for a simpler layout: fewer axes, less sharding, simpler schedules, fewer passes."""
    schedule = SIMPLEST.index(layout.schedule), layout.stages_per_rank
    return (
        (layout.tp > 1) + (layout.pp > 1),
        layout.zero,
        layout.replicas > 1 < layout.shards,
        schedule,
        layout.accumulation,
    )


SIMPLEST = ("1f1b", "gpipe", "interleaved", "zb1p", "zbv", "dualpipev")


def has(layout: Layout, fields: dict) -> bool:
    return all(getattr(layout, name) == value for name, value in fields.items())


def search(
    config: Config, cluster: Cluster, batch: int, context: int | None = None, software: str = "pytorch"
) -> Found:
    """Return every layout: those that fit, those that do not, and those that cannot be run.

    batch: sequences per step, on all GPUs together.
    context: tokens per sequence; by default the config's.
    software: the training software, a name in FITTED.
    """
    setup = Setup(config, cluster, batch, context, software=software)
    feasible, too_large, impossible, card = [], [], [], setup.cluster.card
    for layout in layouts(setup):
        if isinstance(layout, Rejected):
            impossible.append(layout)
        elif (most := peak(setup, layout)) > card:
            too_large.append(TooLarge(setup, layout, most))
        else:
            feasible.append(Plan(setup, layout, seconds(setup, layout), most))
    feasible.sort(key=lambda each: (each.seconds, each.peak))
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


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
