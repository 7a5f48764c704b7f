"""Arithmetic against the tour's rows: a step's seconds from three measurements and what a row sends.

A calibration takes turns with the steps that are predicted from it, on the same ranks: a step without communication, a
short and a long all-reduce.  How often a row sends, and how much, a dry run says.  Of rows that cut the batch alone: on
cores that ranks share, a bubble is no time.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from bench.figure import Figure, figure
from bench.step import BATCH, RANKS, rounds, stepper
from labs.kit.dry.dry import dry
from labs.kit.dry.rehearsal import rehearse
from labs.kit.strategies import ROWS, backward, replicated, step
from labs.kit.tour import ONE_OF_EACH
from labs.model import GPT, PRESETS

ALONE, SHORT, LONG = "no communication", "short all-reduce", "long all-reduce"
NUMBERS = {SHORT: 64, LONG: 1_000_000}  # of float32


def turn(name: str) -> Callable[[], object]:
    if name in NUMBERS:
        return partial(dist.all_reduce, torch.zeros(NUMBERS[name]))
    if name in ROWS:
        return stepper(name)
    model = GPT(PRESETS["tiny"])
    x_BT = torch.randint(model.config.vocab, (BATCH, model.config.context))
    return partial(step, replicated(model, partial(backward, model)), x_BT, x_BT)


def sends(name: str) -> tuple[int, int]:
    """Calls and bytes of a steady step, on rank 0."""
    recording = dry(two_steps, name, ranks=RANKS).communication
    return recording.counts(0, 1).total(), recording.sent(0, 1)


def two_steps(name: str) -> None:
    for _ in rehearse(ROWS[name], PRESETS["tiny"], BATCH):
        pass


def figures(quick: bool) -> list[Figure]:
    names = [name for name in ONE_OF_EACH if ROWS[name].parts(RANKS) == RANKS]
    ranks = rounds([ALONE, SHORT, LONG, *names], 20 if quick else 60, build=turn)
    took = {name: [max(s["step"] for s in steps) for steps in zip(*each, strict=True)] for name, each in ranks.items()}
    ring, long = 2 * (RANKS - 1) / RANKS * 4 * NUMBERS[LONG], statistics.median(took[LONG])
    begin = statistics.median(took[SHORT])
    found = []
    for name in names:
        calls, sent = sends(name)
        travels = calls * begin + sent / ring * (long - begin)
        samples = [(alone + travels) / real for alone, real in zip(took[ALONE], took[name], strict=True)]
        found.append(figure(f"{name}: predicted / measured", samples, note=f"{calls} calls, {sent:,} bytes"))
    return found
