"""Arithmetic against the tour's rows: a step's seconds on 4 ranks, from those on one rank and what a row sends.

A calibration takes turns with the steps that are predicted from it, on the same ranks: each row's step on a mesh of one
rank, where nothing is sent; and of each kind of collective short and long ones.  (gloo's own reduce-scatter sends as
much as an all-reduce, ours as theory says, so each kind has its own seconds.)  How many of each there are, and of how
many bytes, a dry run says; which part of the optimizer's state a rank steps, `labs.cost`.  Of rows that cut the batch
alone: on cores that ranks share, a bubble is no time.
"""

import statistics
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist

from bench.figure import Figure, figure
from bench.step import BATCH, RANKS, Steps, rounds, stepper
from labs.cost import Job
from labs.group import all_gather, reduce_scatter, reduce_scatter_single
from labs.kit.dry.dry import dry
from labs.kit.dry.rehearsal import rehearse
from labs.kit.strategies import ROWS
from labs.kit.tour import ONE_OF_EACH
from labs.mesh import Mesh
from labs.model import PRESETS

ALONE = " on one rank"
SHORT, LONG, TIMES = 64, 200_000, 4  # numbers of float32; so many calls in a row, since the first one waits for ranks
COLLECTIVES = {  # full, part -> what to call
    "all_reduce": lambda full, part: dist.all_reduce(full),
    "all_gather": lambda full, part: all_gather(full, part),
    "all_to_all": lambda full, part: reduce_scatter(full, None),
    "reduce_scatter": lambda full, part: reduce_scatter_single(part, full),
}
CALLS = {f"{op} of {n}": (op, n) for op, n in product(COLLECTIVES, (SHORT, LONG))}
TINY = PRESETS["tiny"]


def turn(name: str) -> Callable[[], object]:
    if name in CALLS:
        op, numbers = CALLS[name]
        full, part = torch.zeros(numbers), torch.zeros(numbers // RANKS)
        return lambda: [COLLECTIVES[op](full, part) for _ in range(TIMES)]
    if name.endswith(ALONE):
        return stepper(name.removesuffix(ALONE), mesh=Mesh((RANKS, 1), ("apart", "dp"))["dp"])
    return stepper(name)


def sends(name: str) -> list[tuple[str, int]]:
    """Each collective of a steady step, and the bytes that rank 0 sends in it."""
    events = dry(two_steps, name, ranks=RANKS).communication.select(0, 1)
    return [(event.op if event.op in COLLECTIVES else "all_gather", event.sent) for event in events]


def two_steps(name: str) -> None:
    for _ in rehearse(ROWS[name], TINY, BATCH):
        pass


def figures(quick: bool) -> list[Figure]:
    names = [name for name in ONE_OF_EACH if ROWS[name].parts(RANKS) == RANKS]
    turns = [each for name in names for each in (name, name + ALONE)]
    ranks = rounds([*CALLS, *turns], 20 if quick else 60, build=turn)
    took = {CALLS[name]: statistics.median(slowest(ranks[name])) / TIMES for name in CALLS}
    found = []
    for name in names:
        job, calls = Job(TINY, BATCH, RANKS), sends(name)
        state = ROWS[name].predict(job).held.S / ROWS[ONE_OF_EACH[0]].predict(job).held.S
        travels = sum(call_seconds(took, *call) for call in calls)
        pairs = zip(slowest(ranks[name + ALONE], but=1 - state), slowest(ranks[name]), strict=True)
        samples = [(alone + travels) / real for alone, real in pairs]
        note = f"{len(calls)} calls, {sum(sent for _, sent in calls):,} bytes"
        found.append(figure(f"{name}: predicted / measured", samples, note=note))
    return found


def call_seconds(took: dict[tuple[str, int], float], op: str, sent: int) -> float:
    """Of a collective in which a rank sends so many bytes: between a short one and a long one, or in proportion."""
    of_long = (2 if op == "all_reduce" else 1) * (RANKS - 1) / RANKS * 4 * LONG
    return took[op, SHORT] + sent / of_long * max(0.0, took[op, LONG] - took[op, SHORT])


def slowest(ranks: list[Steps], but: float = 0.0) -> list[float]:
    """Seconds of each step, without this part of its optimizer's, on the rank that took longest."""
    return [max(s["step"] - but * s.get("optimizer", 0.0) for s in steps) for steps in zip(*ranks, strict=True)]
