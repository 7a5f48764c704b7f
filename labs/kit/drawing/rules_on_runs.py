"""Rules of thumb held to published runs, and how far a planned ratio of two runs may be believed.

ratio_errors(runs)     for all pairs of runs of one model on as many GPUs: the error of the planned ratio, sorted
pairs(runs)            how often the planned quicker run was the quicker one, by the planned ratio
rules(runs, shaded)    the time of each rule's best run over that of the best other run, measured and planned
rule_times(rule, f)    the same by a search of the plan, for one rule
verdict(1.2, 0.1, 0.4) a ratio of times as words: a tie, one towards which the plan leans, or one that decides
order(runs)            the rank correlation of planned and measured speed in a group, in the median

A run is (a case of `labs.plan.published.read`, the tokens per second and GPU that the plan says).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from math import exp, log
from statistics import median

from labs.kit.drawing.palette import GROUPS, INK, MUTED, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.scatters import GRID
from labs.kit.drawing.svg import Canvas
from labs.kit.drawing.tables import Table, table
from labs.plan import Found
from labs.plan.compare import LEAST_IN_GROUP, rank_correlation
from labs.plan.layout import Layout
from labs.plan.published import PublishedRun

Run = tuple[PublishedRun, float]
RULES: dict[str, tuple[tuple[str, ...], Callable[[Layout], bool]]] = {
    "split the batch": (("1B",), lambda layout: layout.tp == layout.pp == 1),
    "shard": (("3B",), lambda layout: layout.tp == layout.pp == 1 and layout.zero > 0),
    "a pipeline": (("8B",), lambda layout: layout.pp > 1),
    "tp and pp": (("80B",), lambda layout: layout.tp > 1 and layout.pp > 1),
}
TIE, SURE = 0.11, 0.45  # errors of the ratios of healthy runs of the playbook: the median, the 90th percentile
EDGES = (1, 1.05, 1.11, 1.25, 1.45, 2, 1e9)
LEFT, TOP, LONG, ROW, LEAST, MOST = 240, 76, 480, 19, 0.35, 2.5


def grouped(runs: Sequence[Run]) -> list[list[tuple[float, float]]]:
    """Return the planned and measured speeds of the runs of each model on as many GPUs."""
    groups = defaultdict(list)
    for case, planned in runs:
        groups[case.group].append((planned, case.tokens))
    return list(groups.values())


def order(runs: Sequence[Run]) -> float:
    groups = (group for group in grouped(runs) if len(group) >= LEAST_IN_GROUP)
    return median(rank_correlation(*zip(*group, strict=True)) for group in groups)


def compared(runs: Sequence[Run]) -> Iterator[tuple[float, float]]:
    """Yield the planned and the measured ratio of every pair of runs of one model on as many GPUs."""
    for group in grouped(runs):
        for one, other in combinations(group, 2):
            yield one[0] / other[0], one[1] / other[1]


def ratio_errors(runs: Sequence[Run]) -> list[float]:
    """Return by which factor, less 1, the planned ratio of each pair misses the measured one: the least first."""
    return sorted(exp(abs(log(planned / measured))) - 1 for planned, measured in compared(runs))


def pairs(runs: Sequence[Run]) -> Table:
    """Return a table: of the pairs with such a planned ratio, in how many the planned quicker run was quicker."""
    found = [(max(p, 1 / p), (p > 1) == (m > 1)) for p, m in compared(runs)]
    rows = []
    for least, most in pairwise(EDGES):
        right = [each for ratio, each in found if least <= ratio < most]
        name = f"{least:g} to {most:g}" if most < EDGES[-1] else f"{least:g} and more"
        share = f"{sum(right) / len(right):.0%}" if right else "–"
        rows.append({"planned ratio": name, "pairs": len(right), "the planned quicker run was quicker": share})
    return table(rows)


def of_rule(runs: Sequence[Run], models: Sequence[str], obeys: Callable[[Layout], bool]) -> Iterator[tuple]:
    """Yield (model, GPUs, measured ratio, planned ratio) of times: the best run that obeys over the best other."""
    groups = defaultdict(lambda: ([], []))
    for case, planned in runs:
        groups[case.group][obeys(case.layout)].append((case.tokens, planned))
    for (model, gpus), (others, those) in sorted(groups.items(), key=lambda item: item[0]):
        if model in models and others and those:
            (tokens, planned), (best, of_best) = max(those), max(others)
            yield model, gpus, best / tokens, of_best / planned


def rule_times(rule: str, found: Found) -> float:
    """Return the planned time of the best layout that obeys the rule over that of the best other layout."""
    (others, those), obeys = ([], []), RULES[rule][1]
    for each in found.feasible:
        (those if obeys(each.layout) else others).append(each.seconds)
    return min(those) / min(others)


def verdict(times: float, tie: float = TIE, sure: float = SURE) -> str:
    """Return a planned ratio of times in words; tie, sure: errors of ratios below which it says nothing, or a hint."""
    more = max(times, 1 / times)
    words = f"{more:.1f} × as {'long' if times > 1 else 'quick'}"
    return "a tie" if more - 1 < tie else f"{words}: leans" if more - 1 < sure else f"{words}: decides"


def rules(runs: Sequence[Run], shaded: float, batch: int = 256) -> Drawing:
    """Draw, for each rule, the time of its best run over that of the best other run: a dot measured, a ring planned.

    shaded: the error of a ratio; within it two runs are a tie
    """
    rows = [(rule, *row) for rule, (models, obeys) in RULES.items() for row in of_rule(runs, models, obeys)]
    words = [f"{rule}: {model} on {gpus} GPUs {true:.2f} ×" for rule, model, gpus, true, _ in rows]
    title = "Time of the rule's best run ÷ time of the best other run"
    high = ROW * (len(rows) + len(RULES))
    canvas = Canvas(LEFT + LONG + 76, TOP + high + 40, title, "; ".join(words) + ".")
    canvas.text(16, 20, title, anchor="start", weight="bold")
    canvas.circle(24, 46, 5, fill=INK)
    canvas.text(36, 46, "measured", size=12.5, anchor="start")
    canvas.circle(124, 46, 5)
    canvas.text(136, 46, "planned, without these runs", size=12.5, anchor="start")
    canvas.rect(336, 39, 20, 14, fill=RANKS[3], stroke="none", radius=0)
    canvas.text(362, 46, f"a tie: a ratio up to {1 + shaded:.2f}", size=12.5, anchor="start")
    canvas.rect(at(1 / (1 + shaded)), TOP, at(1 + shaded) - at(1 / (1 + shaded)), high, RANKS[3], "none", 0)
    for mark in (0.5, 0.7, 1, 1.4, 2):
        canvas.line((at(mark), TOP), (at(mark), TOP + high), stroke=MUTED if mark == 1 else GRID)
        canvas.text(at(mark), TOP + high + 12, f"{mark:g}", size=12, fill=MUTED)
    canvas.text(at(LEAST), TOP + high + 30, "← the rule's way is quicker", size=12, anchor="start", fill=MUTED)
    canvas.text(at(MOST), TOP + high + 30, "the rule's way is slower →", size=12, anchor="end", fill=MUTED)
    canvas.text(LEFT + LONG + 62, TOP - 14, "measured", size=12, anchor="end", fill=MUTED)
    y, colours, before = TOP - ROW / 2, dict(zip(RULES, GROUPS, strict=False)), ""
    for rule, model, gpus, true, planned in rows:
        if rule != before:
            y, before = y + ROW, rule
            canvas.text(16, y, rule, size=12.5, anchor="start", weight="bold", fill=colours[rule])
        y += ROW
        name = f"{model}, {gpus} GPUs: {batch / gpus:g} sequences each"
        canvas.text(LEFT - 8, y, name, size=11.5, anchor="end")
        canvas.line((at(true), y), (at(planned), y), stroke=MUTED)
        canvas.circle(at(planned), y, 5, line=1.5)
        canvas.circle(at(true), y, 5, fill=colours[rule])
        canvas.text(LEFT + LONG + 62, y, f"{true:.2f} ×", size=12, anchor="end")
    return canvas.drawing(title + "\n" + "\n".join(words))


def at(ratio: float) -> float:
    """Return the pixel of a ratio on the logarithmic axis; a ratio beyond it stands at its end."""
    ratio = min(max(ratio, LEAST), MOST)
    return LEFT + LONG * log(ratio / LEAST) / log(MOST / LEAST)
