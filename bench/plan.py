"""Arithmetic against the tour's rows: what a step takes, from four measurements and what a row sends.

A calibration measures a step without any communication, a short and a long all-reduce, all on the same ranks and in
turns with the steps that are predicted from it.  How often a row sends, and how much, a dry run says.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.figure import Figure, figure
from bench.step import BATCH, RANKS, rounds, stepper
from labs.kit.dry.dry import dry
from labs.kit.dry.rehearsal import rehearse
from labs.kit.strategies import ROWS
from labs.kit.tour import ONE_OF_EACH
from labs.model import PRESETS

SHORT, LONG = 64, 1_000_000  # float32 numbers
WITHIN = 0.2


def turn(name: str) -> Callable[[], object]:
    if name in ROWS:
        return stepper(name)
    x = torch.zeros(SHORT if name == "short" else LONG)
    return lambda: dist.all_reduce(x)


def sends(name: str) -> tuple[int, int]:
    """Calls and bytes of a steady step, on rank 0."""
    recording = dry(two_steps, name, ranks=RANKS).communication
    return recording.counts(0, 1).total(), recording.sent(0, 1)


def two_steps(name: str) -> None:
    for _ in rehearse(ROWS[name], PRESETS["tiny"], BATCH):
        pass


def figures(quick: bool) -> list[Figure]:
    """Rows that cut the batch alone: on cores that ranks share, a bubble is no time."""
    names = [name for name in ONE_OF_EACH if ROWS[name].parts(RANKS) == RANKS]
    took = {
        name: statistics.median(max(each["step"] for each in steps) for steps in zip(*ranks, strict=True))
        for name, ranks in rounds(["one device", "short", "long", *names], 20 if quick else 60, build=turn).items()
    }
    ring = 2 * (RANKS - 1) / RANKS
    begin, bandwidth = took["short"], ring * 4 * LONG / (took["long"] - took["short"])
    found = []
    for name in names:
        calls, sent = sends(name)
        predicted = took["one device"] + calls * begin + sent / bandwidth
        found.append(predicted / took[name])
    near = sum(abs(each - 1) <= WITHIN for each in found)
    return [(names, found, near, took)]
