"""The speed of this machine, measured in turns with the steps that a forecast is made for.

    took, _ = run(calibrated, 8, config, {"dp 2": ("ddp-bucketed", 1)}, ranks=2)      {name: seconds}

Measurements and steps alternate, so that other work on the machine slows all of them alike.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from labs.kit.training import strategies
from labs.kit.training.training_step import step
from labs.model import GPT, Config

SEQUENCES, NUMBERS = 8, 1_000_000  # of a step; in the measured all-reduce


def calibrated(rounds: int, config: Config, layouts: Mapping[str, tuple[str, int]]) -> dict[str, float]:
    """Return the median seconds of each measurement and of each layout's step, as {name: seconds}.

    "compute" is a forward and backward of four sequences, "Python" one with next to nothing to compute, and "wire" an
    all-reduce of a million float32.

    layouts: {name: (row of the table of strategies, number of micro-batches)}.
    """
    model, x, wire = GPT(config), torch.randint(256, (4, config.context)), torch.zeros(NUMBERS)
    turns = {
        "compute": lambda: model(x, x).backward(),
        "Python": lambda: model(x[:1, :8], x[:1, :8]).backward(),
        "wire": lambda: dist.all_reduce(wire),
    }
    turns |= {name: stepper(config, *layout) for name, layout in layouts.items()}
    taken = [{name: timed(turn) for name, turn in turns.items()} for _ in range(rounds)]
    return {name: median(each[name] for each in taken[2:]) for name in turns}


def stepper(config: Config, name: str, cuts: int) -> Callable[[], object]:
    row, ranks = strategies.ROWS[name], dist.get_world_size()
    training, _ = strategies.set_up(row, GPT(config))
    torch.manual_seed(0)  # ranks along tp and pp read the same
    tokens = torch.randint(256, (2, SEQUENCES // row.parts(ranks), config.context))
    x, y = (each if reads else None for each, reads in zip(tokens, training.reads, strict=True))
    return partial(step, training, x, y, cuts)


def timed(turn: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    turn()
    dist.barrier()
    return time.perf_counter() - start
