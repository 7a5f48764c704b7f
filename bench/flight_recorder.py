"""The cost of the always-on flight recorder of collectives: a step with it, and the same step without.

The steps are those of overlapped data parallelism, and those of the naive one on 2 ranks: its 39 all-reduces for such a
small model are the most calls that the course makes.  The cost of a single call is measured on one rank, which waits
for nobody.  We compare the processor time of a rank, which other work on the machine does not stretch.  A step takes a
little longer than its processor time, because it also waits, so the ratios overstate the cost.
"""

import time

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from bench.step import stepper
from labs.kit.launch import run
from labs.kit.watch import c10d_tap

CALLS = 200


def with_and_without(action, count: int) -> list[tuple[float, float]]:
    """Return pairs of the action's processor seconds, (without, with) the recorder; which comes first alternates."""
    listeners = list(c10d_tap.listeners)
    found = []
    for number in range(count + 2):
        seconds = {}
        for on in (number % 2 == 0, number % 2 == 1):
            c10d_tap.listeners[:] = listeners if on else []
            start = time.process_time()
            action()
            seconds[on] = time.process_time() - start
        found.append((seconds[False], seconds[True]))
    return found[2:]


def of_a_step(name: str, count: int) -> list[tuple[float, float]]:
    return with_and_without(stepper(name), count)


def of_a_call(count: int) -> list[tuple[float, float]]:
    tensor = torch.zeros(1000)

    def calls() -> None:
        for _ in range(CALLS):
            dist.all_reduce(tensor)

    return with_and_without(calls, count)


def figures(quick: bool) -> list[Figure]:
    count = 20 if quick else 100
    steps = {name: run(of_a_step, name, count, ranks=2, timeout=600)[0] for name in ("ddp-overlapped", "ddp-naive")}
    calls = run(of_a_call, count, ranks=1, timeout=600)[0]
    alone = [1e6 * (on - off) / CALLS for off, on in calls]
    return [
        *(
            figure(f"flight recorder: {name} step with / without", ratios(pairs), target="at most 1.02")
            for name, pairs in steps.items()
        ),
        figure("flight recorder: a collective", alone, "µs", note="what it adds, on 1 rank"),
    ]
