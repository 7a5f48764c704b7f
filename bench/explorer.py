"""The planner explorer: the seconds from a move of a control to the new picture, over settings drawn at random."""

import random
import time

from bench.figure import Figure, figure
from labs.kit.explorers import fastest_layout


def figures(quick: bool) -> list[Figure]:
    any_of = random.Random(0).choice
    samples = [
        seconds({name: any_of(list(values)) for name, values in fastest_layout.CONTROLS.items()}) for _ in range(30)
    ]
    samples = samples[:10] if quick else samples
    slowest = max(samples)
    return [
        figure("planner explorer: a move", samples, "s", "at most 0.5"),
        Figure("planner explorer: the slowest move", slowest, slowest, slowest, len(samples), "s"),
    ]


def seconds(settings: dict) -> float:
    start = time.perf_counter()
    fastest_layout.picture(**settings)
    return time.perf_counter() - start
