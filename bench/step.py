"""A training step of the tour's model with each strategy of the table, against PyTorch's DDP.

All of them live in one job of 4 ranks, and take one step each in turn, from another one on in every round.  A step
counts from a barrier to the end of the slowest rank.  Where the time goes is told for the two that overlap.
"""

import statistics
import time
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from labs.kit.launch import run
from labs.kit.strategies import STRATEGIES, Strategy
from labs.model import GPT, PRESETS

RANKS, BATCH = 4, 3
PHASES = ("forward", "backward", "finish", "optimizer")
PEER = "ddp"


def stepper(strategy: Strategy):
    """A function that takes one step and returns the seconds of each phase."""
    model = GPT(PRESETS["tiny"])
    training = strategy.apply(model)
    x_BT, y_BT = torch.randint(model.config.vocab, (2, BATCH, model.config.context))

    def step() -> list[float]:
        dist.barrier()
        times = [time.perf_counter()]
        loss = training.module(x_BT, y_BT)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        training.finish()
        times.append(time.perf_counter())
        training.optimizer.step()
        training.optimizer.zero_grad()
        times.append(time.perf_counter())
        return [end - start for start, end in pairwise(times)]

    return step


def rounds(names: list[str], count: int) -> dict[str, list[list[float]]]:
    """{name: for each round, the seconds of each phase on this rank}."""
    steps = {strategy.name: stepper(strategy) for strategy in STRATEGIES if strategy.name in names}
    order, taken = list(steps), {name: [] for name in steps}
    for number in range(count + 3):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds = steps[name]()
            if number >= 3:
                taken[name].append(seconds)
    return taken


def figures(quick: bool) -> list[Figure]:
    names = [strategy.name for strategy in STRATEGIES]
    ranks = run(partial(rounds, names, 20 if quick else 60), ranks=RANKS, device="cpu", timeout=600)
    whole = {name: slowest(ranks, name) for name in names}
    found = []
    for name in names:
        goal = "at most 1.10" if name == "ddp-overlapped" else ""
        if name != PEER:
            pairs = zip(whole[PEER], whole[name], strict=True)
            found.append(figure(f"step: {name} / {PEER}", ratios(pairs), target=goal, note=phases(ranks, name)))
    return [*found, figure(f"step: {PEER}", [1000 * s for s in whole[PEER]], "ms", note=phases(ranks, PEER))]


def slowest(ranks: list[dict[str, list[list[float]]]], name: str) -> list[float]:
    return [max(map(sum, step)) for step in zip(*(taken[name] for taken in ranks), strict=True)]


def phases(ranks: list[dict[str, list[list[float]]]], name: str) -> str:
    """Medians over all ranks and rounds: "forward 3.1 ms, backward ..."."""
    steps = [step for taken in ranks for step in taken[name]]
    medians = [1000 * statistics.median(times) for times in zip(*steps, strict=True)]
    return ", ".join(f"{phase} {ms:.1f}" for phase, ms in zip(PHASES, medians, strict=True)) + " ms"
