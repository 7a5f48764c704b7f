"""The challenge of 15: find the fastest layout of a model on a cluster with five questions to the plan.

Models, clusters and batches are drawn from six seeds.  The plan predicts the time and the memory of a layout.

The bound: labs.plan.search tries all layouts, and the fastest that fits is 100 points.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from labs import plan
from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, job
from labs.model import PRESETS, Config

QUESTIONS, SEEDS = 5, (1, 24, 27, 32, 35, 37)
MODELS = (
    Config(50_257, 2048, 24, 16, 16, 5504, context=2048),
    Config(32_000, 3200, 26, 32, 32, 8640, context=4096),
    replace(PRESETS["llama3-8b"], context=4096),
    Config(32_000, 5120, 40, 40, 40, 13_824, context=4096),
)


def setup_of(seed: int) -> plan.Setup:
    any_of = random.Random(seed).choice
    flops = any_of((125e12, 165e12, 312e12, 989e12))
    cluster = plan.Cluster(
        name=f"cluster {seed}",
        flops=flops,
        gpus=any_of((16, 32)),
        node=any_of((4, 8)),
        card=any_of((24e9, 40e9, 80e9)),
        memory=flops / 200,
        inside=any_of((25e9, 100e9, 300e9)),
        between=any_of((1.25e9, 3e9, 12.5e9, 50e9)),
    )
    return plan.Setup(any_of(MODELS), cluster, any_of((32, 64, 128)))


@cache
def quickest(seed: int) -> float:
    """Return the seconds of a step in the fastest layout that fits."""
    setup = setup_of(seed)
    return plan.search(setup.config, setup.cluster, setup.batch, setup.context).feasible[0].seconds


def measured(fn: Function, setup: plan.Setup) -> dict[str, float]:
    """Return the planned seconds of each layout that `fn` asks about in one case; infinity where it does not fit."""
    asking, seconds = Asking(setup), {}

    def ask(layout: plan.Layout) -> plan.Plan:
        planned = asking(layout)
        seconds[str(layout)] = planned.seconds if planned.peak <= setup.cluster.card else math.inf
        return planned

    fn(setup, ask)
    return seconds


class Asking:
    """A function that returns the plan of a layout, and can be called QUESTIONS times."""

    def __init__(self, setup: plan.Setup) -> None:
        self.setup, self.left = setup, QUESTIONS

    def __call__(self, layout: plan.Layout) -> plan.Plan:
        if not self.left:
            raise RuntimeError(f"{self.setup.cluster.name}: it has asked {QUESTIONS} times, and asks once more")
        self.left -= 1
        return plan.plan(self.setup, layout)


def on_a_rank(fn: Function, setups: Sequence[plan.Setup]) -> list[plan.Layout]:
    found = []
    for setup in setups:
        layout = fn(setup, Asking(setup))
        if not isinstance(layout, plan.Layout):
            raise ValueError(f"{setup.cluster.name}: it returned {show(layout)}, and a plan.Layout is needed")
        found.append(layout)
    return found


def judge(fn: Function) -> Judged:
    setups, scores = [setup_of(seed) for seed in SEEDS], {}
    (chosen,) = job(on_a_rank, fn, setups, ranks=1, record=None)
    for seed, setup, layout in zip(SEEDS, setups, chosen, strict=True):
        try:
            planned = plan.plan(setup, layout)
        except ValueError as error:
            raise Wrong(f"{setup.cluster.name}: {error}", "Which sizes must multiply to what?") from None
        if (over := planned.peak - setup.cluster.card) > 0:
            text = f"{setup.cluster.name}: {layout} holds {over / 1e9:.1f} GB more than a card"
            raise Wrong(text, "Which of its parts needs most?")
        scores[setup.cluster.name] = 100 * quickest(seed) / planned.seconds
    return Judged.of(scores)


five_questions = Challenge(
    "five_questions",
    "15",
    "A layout by five questions",
    "Six models, each on a cluster of 16 or 32 GPUs, drawn by seeds. Choose a layout that fits and is quick; the plan "
    "answers five questions about each. What counts is how near it comes to the quickest of all.",
    judge,
    floor=53.0,
    course=72.5,
    possible=84.4,
    cases=tuple(map(setup_of, SEEDS)),
    measured=measured,
)
