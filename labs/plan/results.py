"""The result of a search: the layouts that fit, those that do not, and a table of them.

Plan               a layout with its predicted time per step and its peak bytes
TooLarge           a layout that does not fit
Found              all layouts; it prints as a table
table(found)       returns a table of the best layouts, and the numbers of those that do not fit or cannot be run
nearest(found)     says, if nothing fits, by how much, and what would help
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from labs import cost
from labs.plan.candidates import Rejected, layouts
from labs.plan.constants import EVIDENCE
from labs.plan.layout import Layout, Setup
from labs.plan.pace import Step
from labs.plan.room import held, peak
from labs.plan.sparse import active_matrices, attention_operations


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
    def held(self) -> cost.HeldBytes:
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
        layer = 6 * active_matrices(config) + attention_operations(config, self.setup.context)
        operations = config.depth * layer + cost.head_operations(config)
        return self.tokens_per_gpu * operations / self.setup.cluster.flops


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
        return table(self)


NEAR = 1.01  # a time up to 1.01 × the fastest is as fast: the formulas are not more precise


def simplicity(layout: Layout) -> tuple:
    """Return a key that is less for a simpler layout: fewer axes, less sharding, simpler schedules, fewer passes."""
    schedule = SIMPLEST.index(layout.schedule), layout.stages_per_rank
    return (
        (layout.tp > 1) + (layout.pp > 1) + (layout.cp > 1) + (layout.ep > 1),
        layout.zero,
        layout.replicas > 1 < layout.shards,
        schedule,
        layout.accumulation,
    )


SIMPLEST = ("1f1b", "gpipe", "interleaved", "zb1p", "zbv", "dualpipev")


def has(layout: Layout, fields: dict) -> bool:
    return all(getattr(layout, name) == value for name, value in fields.items())


# ---- the table -------------------------------------------------------------------------------------------

ROWS = 10


def table(found: Found, rows: int = ROWS) -> str:
    setup = found.setup
    lines = [
        f"{setup.cluster.gpus} × {setup.cluster.name}, {setup.batch} sequences of {setup.context} tokens in a step: "
        f"{len(found.feasible):,} layouts fit, {len(found.too_large):,} do not, "
        f"{len(found.impossible):,} cannot be run"
    ]
    if not found.feasible:
        return "\n".join([*lines, nearest(found)])
    lines += [HEAD, *map(row, found.feasible[:rows])]
    return "\n".join(lines)


HEAD = f"{'a step':>9} {'tokens/s/GPU':>15} {'MFU':>10} {'held':>9}   layout"


def row(each: Plan) -> str:
    low, high = (number / each.tokens_per_gpu for number in each.range)
    mfu = f"{low * each.mfu:.0%} to {high * each.mfu:.0%}"
    return f"{each.seconds:7.2f} s {rounded(each.range):>15} {mfu:>10} {gb(each.peak):>9}   {each.layout}"


def rounded(numbers: tuple[float, float]) -> str:
    """Return a range in words, with two digits each, such as 5,800 to 8,200."""
    return " to ".join(f"{float(f'{number:.2g}'):,.0f}" for number in numbers)


def nearest(found: Found) -> str:
    """Return sentences on the layout that needs least, the memory that it lacks, and the GPUs that would do."""
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
    for factor in DOUBLINGS[1:]:
        gpus = factor * setup.cluster.gpus
        if gpus > setup.cluster.node and gpus % setup.cluster.node:
            continue
        for times in (n for n in DOUBLINGS if n <= factor):
            larger = replace(setup, cluster=setup.cluster.of(gpus), batch=times * setup.batch)
            each = min(
                ((peak(larger, each), each) for each in layouts(larger) if isinstance(each, Layout)), default=None
            )
            if each and each[0] <= setup.cluster.card:
                return f"On {gpus:,} GPUs with {larger.batch:,} sequences it would fit: {each[1]} holds {gb(each[0])}."
    return f"Not even {gpus:,} such GPUs would do: shorten the context, or take larger cards."


DOUBLINGS = (1, 2, 4, 8, 16, 32, 64)


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
