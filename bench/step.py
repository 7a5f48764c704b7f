"""A training step of the tour's model with each strategy of the table, against PyTorch's DDP.

All of them live in one job of 4 ranks, and take one step each in turn, from another one on in every round.  A step
counts from a barrier to the end of the slowest rank.  Where the time goes is told for the two that overlap.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from labs.kit.launch import run
from labs.kit.record import Recording, Span, mark
from labs.kit.strategies import ROWS, STRATEGIES, set_up, step
from labs.model import GPT, PRESETS

RANKS, BATCH, WARM_UP = 4, 3, 3
PHASES = ("forward", "backward", "sync", "optimizer")
PEER = "torch-ddp"
Steps = list[dict[str, float]]  # of one strategy: the seconds of each phase, and of the whole "step"


def stepper(name: str) -> Callable[[], float]:
    """A function that takes one step with this strategy."""
    model = GPT(PRESETS["tiny"])
    training, _ = set_up(ROWS[name], model)
    x_BT, y_BT = torch.randint(model.config.vocab, (2, BATCH, model.config.context))
    return lambda: step(training, x_BT, y_BT)


def take(turns: Sequence[str]) -> None:
    """On a rank: a step with each of these strategies, one after the other."""
    steppers = {name: stepper(name) for name in dict.fromkeys(turns)}
    for name in turns:
        dist.barrier()
        mark("step")
        steppers[name]()
        mark("end")


def rounds(names: Sequence[str], count: int) -> dict[str, list[Steps]]:
    """{name: for each rank, what its steps took}, all of them in one job."""
    turns = [name for number in range(count + WARM_UP) for name in rotated(names, number)]
    recording = run(take, turns, ranks=RANKS, device="cpu", record="time", timeout=600).recording
    ranks = [list(zip(turns, durations(recording, rank), strict=True)) for rank in range(RANKS)]
    return {name: [[taken for turn, taken in rank if turn == name][WARM_UP:] for rank in ranks] for name in names}


def rotated(names: Sequence[str], by: int) -> Sequence[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def durations(recording: Recording, rank: int) -> Steps:
    """Of each step that a rank took."""
    steps: list[list[Span]] = []
    for span in sorted((span for span in recording.spans if span.rank == rank), key=lambda span: span.start):
        if span.name == "step":
            steps.append([])
        steps[-1].append(span)
    return [{span.name: span.end - span.start for span in spans} for spans in steps]


def figures(quick: bool) -> list[Figure]:
    names = [strategy.name for strategy in STRATEGIES]
    ranks = rounds(names, 20 if quick else 60)
    found = []
    for name in names:
        goal = "at most 1.10" if name == "ddp-overlapped" else ""
        if name != PEER:
            pairs = zip(slowest(ranks[PEER]), slowest(ranks[name]), strict=True)
            found.append(figure(f"step: {name} / {PEER}", ratios(pairs), target=goal, note=phases(ranks[name])))
    peer = [1000 * seconds for seconds in slowest(ranks[PEER])]
    return [*found, figure(f"step: {PEER}", peer, "ms", note=phases(ranks[PEER]))]


def slowest(ranks: list[Steps]) -> list[float]:
    """Seconds of each step, on the rank that took longest."""
    return [max(taken["step"] for taken in turn) for turn in zip(*ranks, strict=True)]


def phases(ranks: list[Steps]) -> str:
    """Medians over all ranks and rounds: "forward 3.1 ms, backward ..."."""
    medians = {phase: statistics.median(1000 * taken[phase] for steps in ranks for taken in steps) for phase in PHASES}
    return ", ".join(f"{phase} {ms:.1f}" for phase, ms in medians.items()) + " ms"
