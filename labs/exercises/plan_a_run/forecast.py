"""forecast: the seconds of a step of published training runs, from their layouts.

The answers are compared with runs of the Ultra-Scale Playbook (labs/plan/published.csv).  The layouts of each
(model, GPUs) should come in the measured order, and the quickest should come first.  Before that, the check asks about
pairs of runs that differ in one thing: a cost that the function leaves out makes no difference there.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from labs import cost, plan
from labs.exercises.engine.answer import Mistake, Wrong, answered, refuse, show
from labs.exercises.engine.on_paper import Sheet, each_judged, is_number
from labs.plan.compare import LEAST_IN_GROUP, rank_correlation
from labs.plan.published import read

TABLE = "nanotron_playbook"
SEEN = "1B"  # the model whose runs the notebook shows
ORDERED, CHOSEN, NEAR = 0.4, 0.5, 0.2  # least rank correlation; least share of first choices this near to the best


class Run(NamedTuple):
    """A run on H100: a model of `layers` of width `dim`, and a micro-batch's tokens on a rank along dp."""

    parameters: int
    layers: int
    dim: int
    tokens: int
    tp: int
    pp: int
    dp: int
    microbatches: int

    @property
    def tokens_per_gpu(self) -> float:
        """Return the tokens of a step per GPU."""
        return self.tokens * self.microbatches / (self.tp * self.pp)


@dataclass(frozen=True)
class Published:
    """A published run.

    measured: the tokens per second and GPU.
    """

    group: tuple[str, int]
    run: Run
    measured: float


def published(seen: bool) -> list[Published]:
    """Return the playbook's runs that the notebook shows, or the others."""
    cases = (case for case in read(TABLE)[0] if case.is_target and (case.group[0] == SEEN) is seen)
    return [Published(case.group, run_of(case.setup, case.layout), case.tokens) for case in cases]


def run_of(setup: plan.Setup, layout: plan.Layout) -> Run:
    """Return a published layout as the Run that the exercise gives."""
    config = setup.config
    parameters = config.depth * cost.layer_matrices(config) + config.vocab * config.dim
    tokens = layout.batch * setup.context
    return Run(parameters, config.depth, config.dim, tokens, *layout[0:3:2], layout.dp, layout.accumulation)


# ---- what the exercise gives, and its answer -------------------------------------------------------------

NODE = 8
FLOPS, INSIDE, BETWEEN = 350e12, 300e9, 25e9  # the rates reached, of 989e12 FLOP/s, 450e9 and 50e9 bytes/s
LAUNCH = 5e-3  # seconds that Python takes for a layer's forward and backward


Wire = Callable[[int, int], float]


def wire(ranks: int, apart: int) -> float:
    """Return the bytes per second around a ring of ranks, each `apart` ranks from the next, in nodes of 8 H100."""
    on_a_node = max(1, min(ranks, NODE // apart))
    return INSIDE if on_a_node == ranks else min(INSIDE, on_a_node * BETWEEN)


def seconds(run: Run, flops: float = FLOPS, launch: float = LAUNCH, wire: Wire = wire) -> float:
    """Return the seconds of a step, by the exercise's formula."""
    compute = 6 * run.parameters * run.tokens / (run.tp * run.pp) / flops
    layers, x = run.layers / run.pp, 2 * run.tokens * run.dim
    tensor = layers * 4 * 2 * (run.tp - 1) / run.tp * x / wire(run.tp, 1)
    each = max(compute + tensor, layers * launch)
    gradients = 2 * (run.dp - 1) / run.dp * 4 * run.parameters / (run.tp * run.pp) / wire(run.dp, run.tp)
    return (run.microbatches + run.pp - 1) * each + max(0.0, gradients - compute * 2 / 3)


BASE = Run(7_000_000_000, 32, 4096, 32_768, 1, 1, 1, 64)
PROBES = {
    "base": BASE,
    "more micro-batches": BASE._replace(microbatches=128),
    "tp": BASE._replace(tp=8),
    "pp": BASE._replace(pp=8),
    "wide tp": BASE._replace(tp=16, parameters=10**6, tokens=10**6),  # all traffic
    "narrow tp": BASE._replace(tp=8, parameters=10**6, tokens=10**6),
    "a short pipeline step": BASE._replace(pp=8, microbatches=8),
    "a long pipeline step": BASE._replace(pp=8, microbatches=800),
    "one": BASE._replace(microbatches=1, tokens=1024),
    "many": BASE._replace(microbatches=1, tokens=1024, dp=512),
    "one, accumulated": BASE._replace(microbatches=100, tokens=1024),
    "many, accumulated": BASE._replace(microbatches=100, tokens=1024, dp=512),
    "dp": BASE._replace(dp=8),
    "idle": BASE._replace(tokens=1),  # nearly all of it Python
    "idle pp": BASE._replace(tokens=1, pp=8),
    "narrow tp, once": BASE._replace(tp=8, parameters=10**6, tokens=10**6, microbatches=1),
    "idle, once": BASE._replace(tokens=1, microbatches=1),
    "short": BASE._replace(microbatches=1, tokens=4096),
    "short, many": BASE._replace(microbatches=1, tokens=4096, dp=512),  # gradients take nearly as long as backward
    "long, many": BASE._replace(microbatches=1, tokens=32_768, dp=512),  # and here a tenth of that time
    "near": BASE._replace(microbatches=1, tokens=1, dp=8, parameters=10**12),  # nearly all of it gradients
    "far": BASE._replace(microbatches=1, tokens=1, dp=8, tp=8, parameters=10**12),
}
GIVEN = {  # the same with other constants
    "slow GPUs": ("base", {"flops": FLOPS / 10}),
    "slow Python": ("idle", {"launch": LAUNCH * 10}),
    "slow Python, much work": ("base", {"launch": LAUNCH * 10}),
    "a slow wire": ("narrow tp", {"wire": lambda ranks, apart: wire(ranks, apart) / 10}),
}


@dataclass(frozen=True)
class ForecastAnswers:
    """The answers about the probes, and how well those about the runs agree with the measurements.

    order: the rank correlation, as a median over (model, GPUs).
    chosen: the number of (model, GPUs) whose first choice is near to the best.
    groups: the number of (model, GPUs) with enough layouts.
    error: the relative error of the tokens per second, as a median over the runs.
    """

    probes: dict[str, float]
    order: float
    chosen: int
    groups: int
    error: float

    @property
    def description(self) -> str:
        return (
            f"rank correlation {self.order:.2f} in the median of {self.groups} (model, GPUs); its first choice is "
            f"within {NEAR:.0%} of the best in {self.chosen}; off by {self.error:.0%} in the median"
        )


@answered
def forecast(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(run) -> seconds` of a step; return the text of the ✓ line, with the agreement."""
    runs = published(seen=False)
    probes = [(run, {}) for run in PROBES.values()] + [(PROBES[name], given) for name, given in GIVEN.values()]
    asked = [*probes, *((each.run, {}) for each in runs)]
    sheet = Sheet((asked,), None, f"{len(runs)} published runs")
    (seen,) = each_judged(partial(of_each, fn), [sheet], partial(judged, runs))
    return seen.description


def judged(runs: Sequence[Published], sheet: Sheet, returned: Sequence[Any]) -> ForecastAnswers:
    for (run, _), found in zip(*sheet.arguments, returned, strict=True):
        if not (is_number(found) and 0 < found < math.inf):
            raise Wrong(f"{run}: it says {show(found)}", "Does a step take so long?", "no time that a step can take")
    seen = seen_in(runs, returned)
    refuse(MISTAKES, seen, "", "What does a rank of this layout wait for, and how long?")
    return seen


def of_each(fn: Callable[..., Any], asked: Sequence[tuple[Run, dict[str, Any]]]) -> list[Any]:
    """Return the answers to all questions, on a rank."""
    return [fn(run, **given) for run, given in asked]


def seen_in(runs: Sequence[Published], found: Sequence[float]) -> ForecastAnswers:
    """Return how well the answers agree with the measurements, and what they say of the probes."""
    probes, of_runs = dict(zip([*PROBES, *GIVEN], found, strict=False)), found[len(PROBES) + len(GIVEN) :]
    predicted = [each.run.tokens_per_gpu / seconds for each, seconds in zip(runs, of_runs, strict=True)]
    groups = defaultdict(list)
    for each, speed in zip(runs, predicted, strict=True):
        groups[each.group].append((speed, each.measured))
    pairs = [each for each in groups.values() if len(each) >= LEAST_IN_GROUP]
    chosen = sum(max(each)[1] >= (1 - NEAR) * max(true for _, true in each) for each in pairs)
    errors = [abs(speed / each.measured - 1) for each, speed in zip(runs, predicted, strict=True)]
    order = median(rank_correlation(*zip(*each, strict=True)) for each in pairs)
    return ForecastAnswers(probes, order, chosen, len(pairs), median(errors))


def compared(
    one: str, other: str, ratio: Callable[[float], bool], told: str
) -> Callable[[ForecastAnswers], str | None]:
    """Return a row's test: whether `ratio` holds for the seconds of one probe over those of another.

    told: the beginning of the sentence about them
    """

    def matches(seen: ForecastAnswers) -> str | None:
        found = seen.probes[one] / seen.probes[other]
        return f"{told} takes {found:.3g} × as long" if ratio(found) else None

    return matches


def unused(constant: str, one: str, other: str) -> Mistake:
    """Return the row for a function that ignores one of the constants that it is given."""
    return Mistake(
        f"{constant} is not used",
        "The function is given the constants of other machines: what does it do with them?",
        compared(one, other, lambda x: x < 5, f"with {one}, a step that is nearly all that"),
    )


def less_than_expected(name: str, least: float, told: str) -> Callable[[ForecastAnswers], str | None]:
    """Return a row's test: whether the seconds of a probe are less than this share of the expected ones."""

    def matches(seen: ForecastAnswers) -> str | None:
        share = seen.probes[name] / seconds(PROBES[name])
        return f"{told} takes {share:.2f} × what is due" if share < least else None

    return matches


def hidden_often(seen: ForecastAnswers) -> str | None:
    """Return a sentence if 512 ranks along dp no longer wait for gradients, once there are 100 micro-batches."""
    once, often = (seen.probes["many" + more] - seen.probes["one" + more] for more in ("", ", accumulated"))
    if often < once / 10:
        return f"with 100 micro-batches in place of 1, 512 copies wait {often / once:.3g} × as long for their gradients"


def reduced_often(seen: ForecastAnswers) -> str | None:
    """Return a sentence if the time that 512 ranks along dp wait for gradients grows with the micro-batches."""
    once, often = (seen.probes["many" + more] - seen.probes["one" + more] for more in ("", ", accumulated"))
    if often > 10 * once > 0:
        return f"with 100 micro-batches in place of 1, 512 copies wait {often / once:.3g} × as long for their gradients"


# fmt: off
MISTAKES = (
    Mistake("tokens per second, and not seconds", "Is more work done in less time?",
            compared("slow GPUs", "base", lambda x: x < 0.5, "with GPUs of a tenth of the pace, a step")),
    Mistake("the micro-batches are left out", "How often does a rank compute a micro-batch in a step?",
            compared("more micro-batches", "base", lambda x: 0.95 < x < 1.5, "a step of twice as many micro-batches")),
    Mistake("tokens per second, and not seconds", "Is more work done in less time?",
            compared("more micro-batches", "base", lambda x: x <= 0.95, "a step of twice as many micro-batches")),
    Mistake("tensor parallelism divides nothing", "How much of a layer's work has each of 8 ranks?",
            compared("tp", "base", lambda x: x > 0.9, "the same on 8 ranks along tp")),
    Mistake("the pipeline divides nothing", "How many of the layers has each of 8 ranks?",
            compared("pp", "base", lambda x: x > 0.9, "the same on 8 ranks along pp")),
    Mistake("the pipeline divides no Python", "How many of the layers has each of 8 ranks?",
            compared("idle pp", "idle", lambda x: x > 0.5, "a step of nearly no tokens on 8 ranks along pp")),
    Mistake("data parallelism divides once more", "Whose are the tokens of a micro-batch: all ranks' along dp?",
            compared("dp", "base", lambda x: x < 0.5, "as many tokens a rank on 8 ranks along dp")),
    Mistake("the bubble is left out", "For how long does the last stage have nothing to do at the start?",
            compared("a long pipeline step", "a short pipeline step", lambda x: x > 90,
                     "in a pipeline of 8, a step of 100 times as many micro-batches"),
            symptom="a plan that takes a long pipeline for a step of few micro-batches"),
    Mistake("tensor parallelism sends once a step", "In how many micro-batches does each layer wait for its sums?",
            compared("narrow tp", "narrow tp, once", lambda x: x < 8,
                     "of nearly all traffic along tp, a step of 64 micro-batches")),
    Mistake("tensor parallelism sends nothing", "What does each layer wait for, four times?",
            compared("tp", "base", lambda x: x < 1.01 / 8, "the same on 8 ranks along tp")),
    Mistake("too little travels along tp", "How many all-reduces of x are there in a layer, and what does a ring send?",
            less_than_expected("narrow tp", 0.7, "a step that is nearly all traffic along tp")),
    Mistake("the border of a node costs nothing", "Over which wire do 16 ranks along tp send, in nodes of 8?",
            compared("wide tp", "narrow tp", lambda x: x < 1.2, "what is nearly all traffic, on 16 ranks, not 8,")),
    Mistake("gradients cost nothing", "What do 512 copies of the model do after each backward?",
            compared("many", "one", lambda x: x < 1.01, "a step of one micro-batch on 512 ranks, not one along dp,")),
    Mistake("gradients travel after every micro-batch", "When does a step need the sum over all ranks?", reduced_often),
    Mistake("gradients hide under every backward", "Under which backwards can the sum of all micro-batches travel?",
            hidden_often),
    Mistake("ranks along dp are taken for neighbours", "With tp 8 in nodes of 8, where is the next rank along dp?",
            compared("far", "near", lambda x: x < 0.5, "an eighth of the gradients, but between nodes,")),
    Mistake("gradients of the whole model", "Of which parameters has a rank gradients, if tp is 8?",
            compared("far", "near", lambda x: x > 5, "an eighth of the gradients, but between nodes,")),
    Mistake("too little travels along dp", "How many bytes has a gradient here, and what does a ring send?",
            less_than_expected("near", 0.7, "a step that is nearly all gradients")),
    Mistake("Python is counted once a step", "In how many micro-batches does Python go through each layer?",
            compared("idle", "idle, once", lambda x: x < 8, "of nearly no tokens, a step of 64 micro-batches")),
    Mistake("Python takes no time", "What does a GPU do in the 5 ms that Python takes for a layer?",
            less_than_expected("idle", 0.1, "a step of nearly no tokens")),
    Mistake("Python's time is added to the GPU's", "What does Python do while the GPU computes: is it waited for?",
            compared("slow Python, much work", "base", lambda x: x > 1.1,
                     "where the GPU computes for longer than Python takes, with Python 10 times as slow, a step")),
    Mistake("gradients that are hidden make a step shorter", "What does a step wait for, if they come before its end?",
            compared("long, many", "base", lambda x: x < 0.95 / 64,
                     "a micro-batch of 32,768 tokens on 512 ranks along dp, and not 64 of them on one,")),
    Mistake("gradients that are hidden are waited for", "Under which backward do they travel?",
            compared("short, many", "short", lambda x: x > 1.1,
                     "a step of 4,096 tokens, whose backward takes longer than its gradients, on 512 ranks, not one,")),
    unused("flops", "slow GPUs", "base"),
    unused("wire", "a slow wire", "narrow tp"),
    unused("launch", "slow Python", "idle"),
    Mistake("another order than the published one", "Which of the six things at the exercise has the largest error?",
            lambda seen: seen.order < ORDERED and seen.description),
    Mistake("the wrong first choice", "Which layouts does it take for quick, and what is dear in them?",
            lambda seen: seen.chosen < CHOSEN * seen.groups and seen.description),
)
# fmt: on

forecast.expected = seconds  # the notebook goes on with this function, if the learner's is not right yet
forecast.Run, forecast.published = Run, published  # the notebook draws published runs, and makes runs of its own
