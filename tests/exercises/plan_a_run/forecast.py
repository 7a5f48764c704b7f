"""Answers to forecast (15): the seconds of a published run's step."""

from labs.kit import check
from tests.answers import Exercise

# fmt: off
answers = Exercise("forecast")
answers.right(check.forecast.expected, line="rank correlation 0.")


def bandwidth(ranks, apart):
    neighbours = min(ranks, max(1, 8 // apart))
    return 3e11 if neighbours == ranks else min(3e11, 2.5e10 * neighbours)


@answers.right
def in_steps(run, flops=350e12, launch=0.005, wire=bandwidth):
    share = run.tp * run.pp
    compute = 6 * run.parameters * run.tokens / share / flops
    tensor = 0
    if run.tp > 1:
        x = 2 * run.tokens * run.dim
        tensor = run.layers / run.pp * 8 * (run.tp - 1) / run.tp * x / wire(run.tp, 1)
    each = max(compute + tensor, launch * run.layers / run.pp)
    step = each * (run.microbatches + run.pp - 1)
    if run.dp > 1:
        size = 4 * run.parameters / share
        travels = 2 * size * (run.dp - 1) / run.dp / wire(run.dp, run.tp)
        step += max(0, travels - 2 / 3 * compute)
    return step


@answers.wrong("Python's time is added to the GPU's")
def with_nothing_hidden(run, flops=300e12, launch=2e-3, wire=bandwidth):
    """Return the seconds where launches are added to the GPU's time, and nothing is hidden; the order stays."""
    share = run.tp * run.pp
    compute = 6 * run.parameters * run.tokens / share / flops + run.layers / run.pp * launch
    x = 2 * run.tokens * run.dim
    tensor = run.layers / run.pp * 8 * (run.tp - 1) / run.tp * x / wire(run.tp, 1)
    gradients = 8 * run.parameters / share * (run.dp - 1) / run.dp / wire(run.dp, run.tp)
    return (compute + tensor) * (run.microbatches + run.pp - 1) + gradients


spoil = answers.slips(in_steps)
COUNT = "(run.microbatches + run.pp - 1)"
spoil("the micro-batches are left out", {COUNT: "run.pp"})
spoil("tokens per second, and not seconds", {"return step": "return run.tokens / step"})
spoil("tensor parallelism divides nothing", {"share = run.tp * run.pp": "share = run.pp"})
spoil(
    "the pipeline divides nothing", {"share = run.tp * run.pp": "share = run.tp", "launch * run.layers / run.pp": "0"}
)
spoil("the bubble is left out", {COUNT: "run.microbatches"})
spoil("tensor parallelism sends nothing", {"if run.tp > 1": "if False"})
spoil("the border of a node costs nothing", {"wire(run.tp, 1)": "3e11"})
spoil("gradients cost nothing", {"if run.dp > 1": "if False"})
answers.spoil(with_nothing_hidden, "gradients travel after every micro-batch",
    {"(compute + tensor)": "(compute + tensor + gradients)",
     ") + gradients": ")"})
for name, old, new in (
    ("the pipeline divides no Python", "launch * run.layers / run.pp", "launch * run.layers"),
    ("data parallelism divides once more", "run.tp * run.pp\n", "run.tp * run.pp * run.dp\n"),
    ("too little travels along tp", "8 * (run.tp", "2 * (run.tp"),
    ("ranks along dp are taken for neighbours", "wire(run.dp, run.tp)", "wire(run.dp, 1)"),
    ("gradients of the whole model", "4 * run.parameters / share", "4 * run.parameters"),
    ("too little travels along dp", "4 * run.parameters / share", "2 * run.parameters / share"),
    ("Python takes no time", "launch * run.layers / run.pp", "0"),
    ("gradients hide under every backward", "2 / 3 * compute", "2 / 3 * compute * run.microbatches"),
    ("flops is not used", "/ share / flops", "/ share / 350e12"),
):
    spoil(name, {old: new})
PACE, WAITS = "max(compute + tensor, launch * run.layers / run.pp)", "max(0, travels - 2 / 3 * compute)"
spoil("tensor parallelism sends once a step",
    {"compute + tensor": "compute", "if run.dp > 1": "step += tensor\n    if run.dp > 1"})
spoil("Python is counted once a step",
    {PACE: "compute + tensor", "if run.dp > 1": "step = max(step, launch * run.layers / run.pp)\n    if run.dp > 1"})
spoil("gradients that are hidden are waited for", {WAITS: "travels"})
spoil("gradients that are hidden make a step shorter", {WAITS: "travels - 2 / 3 * compute"})
spoil("no time that a step can take", {"return step": "return -step"})
