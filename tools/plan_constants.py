"""Fit the planner's constants on published runs: `python -m tools.plan_constants` writes labs/plan/fitted.py.

For a kind of cluster with its software, the mean over its runs of |log(predicted / measured)| is made as small as can
be, first of bytes, then of seconds; no run counts more than MOST.  The nanotron runs are many, and have their constants
to themselves.  The other sources share theirs, and have one each: `matmul`.  Takes some minutes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from labs.plan.compare import bytes_of, predicted
from labs.plan.constants import Constants
from labs.plan.published import Case, read

PLAN = Path(__file__).resolve().parent.parent / "labs" / "plan"
MOST = 0.5  # of a run's |log|: some runs no arithmetic explains
SPARE, BEYOND = 0.03, 100.0  # of the card: how far beyond it a run that ran may be; and what more of it costs

NANOTRON = ("nanotron_playbook",)
TIME = ("matmul", "attention", "passes", "launch", "tangle", "exposed", "outer", "step")
ALIKE = {  # sources with few runs: all but their `matmul` is another's
    "nanotron 2024, EFA": ("nanotron", "nanotron, EFA"),
}
OTHERS = ("megatron", "torchtitan", "mosaic_mpt", "nvidia_dgxc", "llama3_table4")
SHARED = ("attention", "passes", "launch", "exposed", "outer", "step")
MEMORY = ("slack", "logit", "reserve")

# What is not fitted stays as it is here: no other source tells a tangle; and that a crowded card is slow is seen in all
# of nanotron's runs beyond 88 % of it, but in none of MosaicML's.
BOTH, FLOAT = "mixed, both gradients", "mixed, float32 gradients"
START = Constants(0.58, 0.35, 12.8, 4.2e-3, 2.1e-3, 1.43, 0.56, 0.7, 0.01, 0.06, BOTH, 1.08, 12.0, 0.5e9, 0.93, 2.5)
OTHER_START = Constants(0.65, 0.27, 11.5, 1.2e-3, 0.0, 0.9, 0.9, 1.0, 1.0, 0.02, FLOAT, 0.9, 6.0, 0.5e9, 1.0, 1.0)


def main() -> None:
    others, own = fit_others(cases_of(OTHERS)), fit_nanotron(cases_of(NANOTRON))
    others |= {
        name: fit(("matmul",), others.get(like, own), loss_of(cases_of((table,))), 30)
        for name, (table, like) in ALIKE.items()
    }
    middle = sorted(each.matmul for each in others.values())[len(others) // 2]
    general = replace(next(iter(others.values())), matmul=middle, crowded=own.crowded, thrash=own.thrash)
    module = text({"fused kernels": general, "nanotron, EFA": own, **others})
    (PLAN / "fitted.py").write_text(module, encoding="utf-8")


def cases_of(tables: Sequence[str]) -> list[Case]:
    return [case for table in tables for case in read(PLAN / "tables" / f"{table}.csv")[0]]


def source(case: Case) -> str:
    return case.setup.cluster.fitted


# ---- fits ------------------------------------------------------------------------------------------------


def fit_nanotron(cases: Sequence[Case]) -> Constants:
    memory = fit(MEMORY, START, lambda constants: memory_loss(with_constants(cases, lambda _: constants)), 80)
    return fit(TIME, memory, loss_of(cases), 300)


def loss_of(cases: Sequence[Case]) -> Callable[[Constants], float]:
    timed = [case for case in cases if case.tokens]
    return lambda constants: time_loss(with_constants(timed, lambda _: constants))


def fit_others(cases: Sequence[Case]) -> dict[str, Constants]:
    """By source; `matmul` of each together with what they share."""
    sources = sorted(set(map(source, cases)))
    memory = fit(MEMORY, OTHER_START, lambda constants: memory_loss(with_constants(cases, lambda _: constants)), 80)

    def of(values: Sequence[float]) -> dict[str, Constants]:
        shared, own = dict(zip(SHARED, values, strict=False)), values[len(SHARED) :]
        shared["outer"] = min(shared["outer"], 1.0)  # no run needs all of it, most hide what they send
        return {name: replace(memory, matmul=x, **shared) for name, x in zip(sources, own, strict=True)}

    def loss(values: Sequence[float]) -> float:
        constants = of(values)
        return time_loss(with_constants(cases, lambda case: constants[source(case)]))

    start = [getattr(memory, name) for name in SHARED] + [memory.matmul] * len(sources)
    return of(least(loss, start, 400))


def fit(names: Sequence[str], start: Constants, loss: Callable[[Constants], float], tries: int) -> Constants:
    def of(values: Sequence[float]) -> Constants:
        return replace(start, **dict(zip(names, values, strict=True)))

    return of(least(lambda values: loss(of(values)), [getattr(start, name) for name in names], tries))


def with_constants(cases: Sequence[Case], constants: Callable[[Case], Constants]) -> list[Case]:
    """The same runs, and the same setup for all that have the same."""
    setups = {case.setup: replace(case.setup, constants=constants(case)) for case in cases}
    return [replace(case, setup=setups[case.setup]) for case in cases]


def time_loss(cases: Sequence[Case]) -> float:
    """A run weighs as much as it is near its group's quickest: it is among those that a plan chooses."""
    best = defaultdict(float)
    for case in cases:
        best[case.group] = max(best[case.group], case.tokens)
    weights = [case.tokens / best[case.group] for case in cases]
    errors = [abs(math.log(predicted(case).tokens_per_gpu / case.tokens)) for case in cases]
    return sum(w * min(error, MOST) for w, error in zip(weights, errors, strict=True)) / sum(weights)


def memory_loss(cases: Sequence[Case]) -> float:
    total = 0.0
    for case in cases:
        plan = predicted(case)
        if case.bytes:
            total += min(abs(math.log(bytes_of(case, plan) / case.bytes)), MOST)
        total += BEYOND * max(0.0, plan.peak / case.setup.cluster.card - 1 - SPARE)
    return total / len(cases)


def least(loss: Callable[[list[float]], float], start: Sequence[float], tries: int) -> list[float]:
    """Where a loss is least, by Nelder and Mead's simplex [1965], in logarithms: all of them are positive."""

    def at(logs: Sequence[float]) -> tuple[float, list[float]]:
        return loss([math.exp(x) for x in logs]), list(logs)

    def between(a: Sequence[float], b: Sequence[float], part: float) -> list[float]:
        return [x + part * (y - x) for x, y in zip(a, b, strict=True)]

    logs = [math.log(x) for x in start]
    corners = [at(logs), *(at([x + STRIDE * (i == j) for j, x in enumerate(logs)]) for i in range(len(logs)))]
    for _ in range(tries):
        corners.sort()
        *kept, worst = corners
        middle = [sum(xs) / len(kept) for xs in zip(*(logs for _, logs in kept), strict=True)]
        corner = at(between(middle, worst[1], -1))
        if corner < kept[0]:
            corner = min(corner, at(between(middle, worst[1], -2)))
        elif corner >= kept[-1]:
            corner = at(between(middle, worst[1], 0.5))
        if corner < worst:
            corners = [*kept, corner]
        else:
            corners = [corners[0], *(at(between(corners[0][1], logs, 0.5)) for _, logs in corners[1:])]
    return [math.exp(x) for x in min(corners)[1]]


STRIDE = 0.2  # of the first simplex, in logarithms


# ---- the module ------------------------------------------------------------------------------------------


def text(constants: dict[str, Constants]) -> str:
    """With three digits of each number."""
    lines = [f'"""{HEAD}"""', "", "from labs.plan.constants import Constants", "", "FITTED = {"]
    for name, each in constants.items():
        fields = [f"        {field}={told(value)}," for field, value in asdict(each).items()]
        lines += [f'    "{name}": Constants(', *fields, "    ),"]
    return "\n".join([*lines, "}", ""])


def told(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:.3g}".replace("e+", "e")


HEAD = "Written by `python -m tools.plan_constants`: do not edit."


if __name__ == "__main__":
    main()
