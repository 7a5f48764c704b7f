"""Answers to forecast (15): the seconds of a published run's step."""

from labs.kit import exercises
from tests.answers import Exercise

answers = Exercise("forecast")
answers.right(exercises.forecast, line="rank correlation 0.")


def bandwidth(ranks, apart):
    neighbours = min(ranks, max(1, 8 // apart))
    return 3e11 if neighbours == ranks else min(3e11, 2.5e10 * neighbours)


@answers.right
def in_steps(run):
    share = run.tp * run.pp
    compute = 6 * run.parameters * run.tokens / share / 350e12
    tensor = 0
    if run.tp > 1:
        x = 2 * run.tokens * run.dim
        tensor = run.layers / run.pp * 8 * (run.tp - 1) / run.tp * x / bandwidth(run.tp, 1)
    each = max(compute + tensor, 0.005 * run.layers / run.pp)
    step = each * (run.microbatches + run.pp - 1)
    if run.dp > 1:
        size = 4 * run.parameters / share
        travels = 2 * size * (run.dp - 1) / run.dp / bandwidth(run.dp, run.tp)
        step += max(0, travels - 2 / 3 * compute)
    return step


@answers.right
def with_nothing_hidden(run):
    """Python's pace is left out, and no gradient is hidden: coarser, and near enough."""
    share = run.tp * run.pp
    compute = 6 * run.parameters * run.tokens / share / 300e12 + run.layers / run.pp * 2e-3
    x = 2 * run.tokens * run.dim
    tensor = run.layers / run.pp * 8 * (run.tp - 1) / run.tp * x / bandwidth(run.tp, 1)
    gradients = 8 * run.parameters / share * (run.dp - 1) / run.dp / bandwidth(run.dp, run.tp)
    return (compute + tensor) * (run.microbatches + run.pp - 1) + gradients


spoil = answers.slips(in_steps)
COUNT = "(run.microbatches + run.pp - 1)"
spoil("the micro-batches are left out", {COUNT: "run.pp"})
spoil("tokens per second, and not seconds", {"return step": "return run.tokens / step"})
spoil("tensor parallelism divides nothing", {"share = run.tp * run.pp": "share = run.pp"})
spoil("the pipeline divides nothing", {"share = run.tp * run.pp": "share = run.tp", "0.005 * run.layers / run.pp": "0"})
spoil("the bubble is left out", {COUNT: "run.microbatches"})
spoil("tensor parallelism sends nothing", {"if run.tp > 1": "if False"})
spoil("the border of a node costs nothing", {"bandwidth(run.tp, 1)": "3e11"})
spoil("gradients cost nothing", {"if run.dp > 1": "if False"})
answers.spoil(
    with_nothing_hidden,
    "gradients travel after every micro-batch",
    {"(compute + tensor)": "(compute + tensor + gradients)", ") + gradients": ")"},
    blind=True,
)
spoil("no time that a step can take", {"return step": "return -step"})
spoil("no time that a step can take", {"return step": "return 0 * step"})
spoil("", {"run.tokens / share / 350e12": "run.tokens / share / 350e9"})
spoil("", {COUNT: "run.microbatches * run.pp"})
spoil("", {"/ bandwidth(run.dp, run.tp)": "/ 1e9"})
