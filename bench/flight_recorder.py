"""What the always-on flight recorder of collectives costs: a step with it, and the same step without.

The steps are those of data parallelism that overlaps, and of the naive one, whose 39 all-reduces for a model that small
are the most calls that the course makes; on 2 ranks.  On one rank alone nothing is waited for, and the cost of a single
call shows.  What counts is the rank's processor time, which others on the machine do not stretch; a step's own is a
little longer, since it also waits, so that the ratios err on the side of the cost.
"""

import time

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from bench.step import stepper
from labs.kit.launch import run
from labs.kit.watch import tap

CALLS = 200


def with_and_without(action, count: int) -> list[tuple[float, float]]:
    """(processor seconds without, with) of the action, in pairs, now this one first and now that one."""
    listeners = list(tap.listeners)
    found = []
    for number in range(count + 2):
        seconds = {}
        for on in (number % 2 == 0, number % 2 == 1):
            tap.listeners[:] = listeners if on else []
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
