"""Fit the planner's constants to published runs: `python -m tools.plan_constants` writes labs/plan/fitted.csv.

Each software has its own constants, and its runs come from several sources.  Every source counts the same, however many
runs it has.  The fit minimizes the mean over runs of |log(predicted / measured)|, and no run counts more than MOST.
It is repeated without each source, to see how good the constants are for runs that are not among these.  This takes
some minutes.
"""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from labs.plan.compare import bytes_of, predicted
from labs.plan.constants import FITS, MEMORY, SPARSE_TIME, TIME, Constants
from labs.plan.published import PublishedRun, read

MOST = 0.5  # most that a run's |log| counts: no arithmetic explains some of the runs
SPARE, BEYOND = 0.03, 100.0  # units of the card: how far a run that ran may exceed it, and the penalty for more
EVERY = 3  # the playbook has many runs: the fit uses one in this many

PLAYBOOK = ("nanotron_playbook",)
# The fit leaves out the runs of nanotron in 2024: they reach half the throughput of the same layouts in the playbook.
# NVIDIA's releases from 26.06 on are held out: their software has become faster at the same layouts.
OTHERS = (
    *("megatron", "korthikanti", "torchtitan", "mosaic_mpt", "nvidia_dgxc", "llama3_table4"),
    "nvidia_megatron_bridge",
)
FREE = ("matmul", "attention", "passes", "launch", "exposed", "step")
ONLY_HERE = ("tangle", "hidden", "ahead")  # only the playbook's runs determine these: pipelines and PyTorch's ZeRO
OF_COMPILED = ("passes",)  # three runs determine no more: the other runs use software that is not compiled
OF_MEMORY = ("slack", "logit", "reserve")

# The fit begins from the defaults, and constants that are not fitted keep them. All of nanotron's runs beyond 88 % of a
# card show that a crowded card is slow. No other source reports how much of a card it used.
START = Constants()
NANOTRON = replace(START, precision="mixed, both gradients", slack=1.11, logit=12.8, reserve=4.4e8)


def main() -> None:
    playbook, others = cases_of(PLAYBOOK), cases_of(OTHERS)
    start = fit(OF_MEMORY, START, lambda each: memory_loss(with_memory(others, each)), 80)
    nanotron = fit(OF_MEMORY, NANOTRON, lambda each: memory_loss(with_memory(playbook, each)), 80)
    runs = [case for case in [*playbook[::EVERY], *others] if case.is_target]
    fitted, without = of_software(runs, start, SOFTWARE), {}
    for software, source in sorted({left_out(case) for case in runs}):
        rest = [case for case in runs if case.source != source]
        left = software if any(case.setup.software == software for case in rest) else "pytorch"
        without[software, source] = of_software(rest, start, (left,))[left]
    proof = {name: evidence(cases, fitted[name], without) for name, cases in by_software(playbook + others)}
    proof["compiled"] |= {name: proof["pytorch"][name] for name in ("least", "most")}  # three runs determine no range
    rows = [{"software": name} | proof[name] | fields(constants, names_of(name)) for name, constants in fitted.items()]
    rows += [{"software": "nanotron"} | fields(nanotron, MEMORY)]
    rows += [
        {"software": name, "without": source} | fields(each, names_of(name)) for (name, source), each in without.items()
    ]
    FITS.write_text(text(rows), encoding="utf-8")


def fields(constants: Constants, names: Sequence[str]) -> dict[str, float | str]:
    return {name: getattr(constants, name) for name in names}


def names_of(software: str) -> tuple[str, ...]:
    """Return the constants that the runs of a software determine: only one's have experts, and products of 8 bits."""
    return (*TIME, *(SPARSE_TIME if software == "bridge" else ()), *MEMORY)


def cases_of(tables: Sequence[str]) -> list[PublishedRun]:
    return [case for table in tables for case in read(table)[0]]


# ---- fits ------------------------------------------------------------------------------------------------


def of_software(runs: Sequence[PublishedRun], start: Constants, names: Sequence[str]) -> dict[str, Constants]:
    """Return the constants of these software names.

    A compiled program's fit starts from those of the uncompiled one.
    """
    of = dict(by_software(runs))
    megatron, found = replace(start, tangle=0.0, hidden=1.0, ahead=1.0), {}
    for name in names:
        first = {"megatron": megatron, "bridge": megatron, "compiled": found.get("pytorch", start)}.get(name, start)
        more = ONLY_HERE * any(case.source == "nanotron" for case in of[name]) + SPARSE_TIME * (name == "bridge")
        free = OF_COMPILED if name == "compiled" else FREE + more
        found[name] = fit(free, first, loss_of(of[name]), TRIES)
    return found


TRIES = 120


def by_software(runs: Sequence[PublishedRun]) -> list[tuple[str, list[PublishedRun]]]:
    timed = [case for case in runs if case.is_target]
    return [(name, [case for case in timed if case.setup.software == name]) for name in SOFTWARE]


SOFTWARE = ("pytorch", "compiled", "megatron", "bridge")


def evidence(cases: Sequence[PublishedRun], fitted: Constants, without: dict) -> dict[str, float | str]:
    """Return the fit's data and errors, and the ratios between which four of five runs lie."""
    near, far = ratios(cases, lambda _: fitted), ratios(cases, lambda case: without[left_out(case)])
    least, most = (sorted(far)[int(part * len(far))] for part in (0.1, 0.9))
    told = {"rows": len(cases), "sources": ", ".join(sorted({case.source for case in cases}))}
    for name, each in {"fitted": near, "left_out": far}.items():
        errors = sorted(abs(1 / ratio - 1) for ratio in each)
        told |= {name: errors[len(errors) // 2], f"{name}_tail": errors[int(0.9 * len(errors))]}
    return told | {"least": least, "most": most}


def ratios(cases: Sequence[PublishedRun], constants: Callable[[PublishedRun], Constants]) -> list[float]:
    """Return the ratios measured / predicted."""
    return [case.tokens / predicted(with_time([case], constants(case))[0]).tokens_per_gpu for case in cases]


def left_out(case: PublishedRun) -> tuple[str, str]:
    return case.setup.software, case.source


def loss_of(cases: Sequence[PublishedRun]) -> Callable[[Constants], float]:
    return lambda constants: time_loss(with_time(cases, constants))


def fit(names: Sequence[str], start: Constants, loss: Callable[[Constants], float], tries: int) -> Constants:
    def of(values: Sequence[float]) -> Constants:
        return replace(start, **{name: min(x, MOST_OF.get(name, x)) for name, x in zip(names, values, strict=True)})

    return of(least(lambda values: loss(of(values)), [getattr(start, name) for name in names], tries))


# A ring is at least two thirds as fast as its link, and fused attention at most as fast as FlashAttention-3's 75 % of
# an H100 [Shah et al. 2024, arXiv 2407.08608]. Megatron-LM's runs, nearly all with tensor parallelism, cannot tell
# these apart.
MOST_OF = {"matmul": 1.0, "attention": 0.75, "exposed": 1.5, "hidden": 1.0, "ahead": 1.0}
MOST_OF |= {"eight": 2.0, "grouped": 1.0, "exchanged": 1.5}  # a data sheet's 8-bit products are twice as fast


def with_time(cases: Sequence[PublishedRun], constants: Constants) -> list[PublishedRun]:
    """Return the same runs with these constants, except for what a table says of its own runs' memory."""
    return with_constants(cases, lambda own: replace(constants, **{name: getattr(own, name) for name in OWN}))


OWN = (*MEMORY, "thrash")


def with_memory(cases: Sequence[PublishedRun], constants: Constants) -> list[PublishedRun]:
    fields = {name: getattr(constants, name) for name in OF_MEMORY}
    return with_constants(cases, lambda own: replace(own, **fields))


def with_constants(cases: Sequence[PublishedRun], constants: Callable[[Constants], Constants]) -> list[PublishedRun]:
    """Return the same runs with new constants; runs that shared a setup share the new one."""
    setups = {case.setup: replace(case.setup, constants=constants(case.setup.constants)) for case in cases}
    return [replace(case, setup=setups[case.setup]) for case in cases]


def time_loss(cases: Sequence[PublishedRun]) -> float:
    """Return the mean error of the predicted times.

    A run weighs more the nearer it is to its group's fastest, since a plan chooses among those.
    """
    best, total = defaultdict(float), defaultdict(float)
    for case in cases:
        best[case.group] = max(best[case.group], case.tokens)
    weights = [case.tokens / best[case.group] for case in cases]
    for case, weight in zip(cases, weights, strict=True):
        total[case.source] += weight
    errors = [abs(math.log(predicted(case).tokens_per_gpu / case.tokens)) for case in cases]
    of_runs = zip(cases, weights, errors, strict=True)
    return sum(w * min(error, MOST) / total[case.source] for case, w, error in of_runs) / len(total)


def memory_loss(cases: Sequence[PublishedRun]) -> float:
    total = 0.0
    for case in cases:
        plan = predicted(case)
        if case.bytes:
            total += min(abs(math.log(bytes_of(case, plan) / case.bytes)), MOST)
        total += BEYOND * max(0.0, plan.peak / case.setup.cluster.card - 1 - SPARE)
    return total / len(cases)


def least(loss: Callable[[list[float]], float], start: Sequence[float], tries: int) -> list[float]:
    """Minimize a loss with Nelder and Mead's simplex [1965], in logarithms, since all values are positive."""

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


STRIDE = 0.2  # edge of the first simplex, in logarithms


# ---- the table -------------------------------------------------------------------------------------------


def text(rows: Sequence[dict]) -> str:
    """Return the text of labs/plan/fitted.csv, with three digits of each number."""
    file = io.StringIO()
    writer = csv.DictWriter(file, ("software", "without", *EVIDENCE, *names_of("bridge")), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: as_text(cell) for name, cell in row.items()} for row in rows)
    return file.getvalue()


def as_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}".replace("e+", "e")


EVIDENCE = ("rows", "sources", "fitted", "fitted_tail", "left_out", "left_out_tail", "least", "most")


if __name__ == "__main__":
    main()
