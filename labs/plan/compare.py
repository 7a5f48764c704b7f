"""Comparison of the plan with published runs: `python -m bench.published FILE.csv`.

check("torchtitan")         returns a Report: the errors of tokens per second and bytes, and the order of layouts
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import mean, median

from labs import cost
from labs.plan.candidates import pace_reason, powers, pp_reason
from labs.plan.constants import SPARSE_TIME, TIME, WITHOUT
from labs.plan.layout import Layout, Setup
from labs.plan.pace import seconds
from labs.plan.published import RUNS, PublishedRun, read
from labs.plan.results import Plan
from labs.plan.room import held_by, peak

LEAST_IN_GROUP = 3  # fewer layouts have no meaningful order
NEAR, TOO_LARGE = 0.10, 0.05


def predicted(case: PublishedRun) -> Plan:
    """Return the plan for the case's layout; if the case leaves fields open, the fastest of those that fit."""
    plans = [Plan(case.setup, each, seconds(case.setup, each), peak(case.setup, each)) for each in completed(case)]
    fitting = [each for each in plans if each.peak <= case.setup.cluster.card]
    return min(fitting, key=lambda each: each.seconds) if fitting else min(plans, key=lambda each: each.peak)


def completed(case: PublishedRun) -> list[Layout]:
    """Return all layouts that the case may have had."""
    layout, dp = case.layout, case.layout.dp
    each = case.setup.batch // dp
    pipelines = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8)]
    choices = product(
        pipelines if "schedule" in case.free and layout.pp > 1 else [(layout.schedule, layout.stages_per_rank)],
        [n for n in powers(each) if each % n == 0] if "batch" in case.free else [layout.batch],
        cost.RECOMPUTE if "recompute" in case.free else [layout.recompute],
        [(dp, 1, 0), (1, dp, 1), (1, dp, 2)] if "zero" in case.free and dp > 1 else [layout[5:8]],
    )
    layouts = [
        layout._replace(
            schedule=schedule,
            stages_per_rank=stages,
            batch=batch,
            accumulation=each // batch,
            recompute=recompute,
            replicas=replicas,
            shards=shards,
            zero=zero,
        )
        for (schedule, stages), batch, recompute, (replicas, shards, zero) in choices
    ]
    if case.free:
        layouts = [
            x for x in layouts if not pace_reason(x) and not pp_reason(case.setup, x.pp, x.schedule, x.stages_per_rank)
        ]
    return layouts or [layout]


@dataclass(frozen=True)
class Report:
    """The errors of the plan for the runs in a table; an error is |predicted / measured - 1|.

    left_out_errors: errors of time with constants that were fitted without the runs' source.
    orders: by (model, GPUs), the rank correlation of predicted and measured speed.
    firsts: by (model, GPUs), the measured speed of the plan's first choice as a fraction of the best measured speed.
    too_large: for runs that ran, but do not fit by the plan: by which fraction of the card.
    ran: the number of runs.
    left_out: the number of rows that are not compared, by reason.
    """

    table: str
    time_errors: Sequence[float]
    left_out_errors: Sequence[float]
    memory_errors: Sequence[float]
    orders: dict[tuple[str, int], float]
    firsts: dict[tuple[str, int], float]
    too_large: Sequence[float]
    ran: int
    left_out: Counter

    def __str__(self) -> str:
        near = sum(first >= 1 - NEAR for first in self.firsts.values())
        beyond = sum(more > TOO_LARGE for more in self.too_large)
        lines = [self.table]
        lines += [f"tokens per second and GPU   {describe(self.time_errors)}"]
        lines += [f"    without this source     {describe(self.left_out_errors)}"]
        lines += [f"memory                      {describe(self.memory_errors)}"]
        if self.orders:
            lines += [
                f"order of layouts            rank correlation {median(self.orders.values()):.2f} in the median of "
                f"{len(self.orders)} (model, GPUs); the first choice is within {NEAR:.0%} of the best in {near} of them"
            ]
        lines += [
            f"fits                        of {self.ran} runs that ran, {len(self.too_large)} are called too large, "
            f"{beyond} of them by more than {TOO_LARGE:.0%}"
        ]
        lines += [f"left out                    {n:5} {reason}" for reason, n in self.left_out.most_common()]
        return "\n".join(lines)


def check(table: str = "", path: str | Path = RUNS) -> Report:
    """Compare the plan with the runs of a table, or of all tables in the file."""
    return report(table or str(path), *read(table, path))


def report(table: str, cases: Sequence[PublishedRun], left_out: Counter) -> Report:
    plans = [predicted(case) for case in cases]
    pairs = list(zip(cases, plans, strict=True))
    timed = [(case, plan) for case, plan in pairs if case.is_target]
    left_out = Counter(left_out)
    if len(pairs) > len(timed):
        left_out["no target for time (it ran, which memory is held to)"] += len(pairs) - len(timed)
    groups = defaultdict(list)
    for case, plan in timed:
        groups[case.group].append((plan.tokens_per_gpu, case.tokens))
    groups = {name: pairs for name, pairs in groups.items() if len(pairs) >= LEAST_IN_GROUP}
    return Report(
        table,
        [abs(plan.tokens_per_gpu / case.tokens - 1) for case, plan in timed],
        [abs(predicted(left_out_of(case)).tokens_per_gpu / case.tokens - 1) for case, _ in timed],
        [abs(bytes_of(case, plan) / case.bytes - 1) for case, plan in pairs if case.bytes],
        {name: rank_correlation(*zip(*pairs, strict=True)) for name, pairs in groups.items()},
        {name: max(pairs)[1] / max(true for _, true in pairs) for name, pairs in groups.items()},
        [over for case, plan in pairs if (over := plan.peak / case.setup.cluster.card - 1) > 0],
        len(pairs),
        left_out,
    )


def left_out_of(case: PublishedRun) -> PublishedRun:
    """Return the case with the constants that were fitted without its source."""
    return replace(case, setup=without(case.setup, case.source))


@lru_cache(1 << 12)
def without(setup: Setup, source: str) -> Setup:
    fitted = WITHOUT.get((setup.software, source), setup.constants)
    return replace(
        setup, constants=replace(setup.constants, **{name: getattr(fitted, name) for name in (*TIME, *SPARSE_TIME)})
    )


def bytes_of(case: PublishedRun, plan: Plan) -> int:
    return held_by(case.setup, plan.layout, 0).peak if case.of_first else plan.peak


def rank_correlation(xs: Iterable[float], ys: Iterable[float]) -> float:
    """Return Spearman's correlation of ranks; equal values share a rank."""
    xs, ys = ranks(xs), ranks(ys)
    x, y = mean(xs), mean(ys)
    covariance = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    spread = (sum((a - x) ** 2 for a in xs) * sum((b - y) ** 2 for b in ys)) ** 0.5
    return covariance / spread if spread else 0.0


def ranks(values: Iterable[float]) -> list[float]:
    values = list(values)
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def describe(errors: Sequence[float]) -> str:
    if not errors:
        return "nothing is told"
    tail = sorted(errors)[int(0.9 * len(errors))]
    return f"{len(errors)} rows, error {median(errors):.1%} in the median, {tail:.1%} at the 90th percentile"
