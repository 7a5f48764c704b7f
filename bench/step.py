"""A training step of the tour's model with each strategy that splits only the batch, against PyTorch's DDP.

All of them run in one job of 4 ranks.  They take turns, one step each, and every round begins with another one.  A step
is timed from a barrier to the end of the slowest rank.  The time of each phase stands beside it.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from labs import agree
from labs.kit.launch import run
from labs.kit.record import Recording, mark
from labs.kit.training.strategies import ROWS, STRATEGIES, set_up, step
from labs.model import GPT, PRESETS
from labs.moe import MOE_PRESETS, MoEGPT

RANKS, BATCH, WARM_UP = 4, 3, 3
PEER = "torch-ddp"
Steps = list[dict[str, float]]  # one strategy: per step, the seconds of each phase and of the whole "step"
Stepper = Callable[[], object]


def stepper(name: str, batch: int = BATCH) -> Stepper:
    """Return a function that takes one step with this strategy."""
    with_experts = ROWS[name].takes is MoEGPT
    model = MoEGPT(MOE_PRESETS["tiny-moe"]) if with_experts else GPT(PRESETS["tiny"])
    training, _ = set_up(ROWS[name], model)
    tokens = torch.randint(model.config.vocab, (2, batch, model.config.context), generator=torch.Generator())
    # alone, no other rank tells this one how many tokens there are
    unread = tokens[0].to("meta") if agree.alone else None
    x_BT, y_BT = (each if reads else unread for each, reads in zip(tokens, training.reads, strict=True))
    return lambda: step(training, x_BT, y_BT)


def take(turns: Sequence[str], build: Callable[[str], Stepper]) -> None:
    """Take a step with each of these in turn, on a rank."""
    steppers = {name: build(name) for name in dict.fromkeys(turns)}
    for name in turns:
        dist.barrier()
        mark("step")
        steppers[name]()
        mark("end")


def rounds(
    names: Sequence[str],
    count: int,
    ranks: int = RANKS,
    build: Callable[[str], Stepper] = stepper,
    warm_up: int = WARM_UP,
) -> dict[str, list[Steps]]:
    """Run all of them in one job, and return {name: the durations of its steps, per rank}."""
    turns = [name for number in range(count + warm_up) for name in rotated(names, number)]
    recording = run(take, turns, build, ranks=ranks, record="time", timeout=900).recording
    steps_by_rank = [list(zip(turns, durations(recording, rank), strict=True)) for rank in range(ranks)]
    return {
        name: [[taken for turn, taken in rank if turn == name][warm_up:] for rank in steps_by_rank] for name in names
    }


def rotated(names: Sequence[str], by: int) -> Sequence[str]:
    first = by % len(names)
    return [*names[first:], *names[:first]]


def durations(recording: Recording, rank: int) -> Steps:
    """Return the durations of each step that a rank took."""
    steps: Steps = []
    for span in sorted((span for span in recording.spans if span.rank == rank), key=lambda span: span.start):
        if span.name == "step":
            steps.append({})
        steps[-1][span.name] = steps[-1].get(span.name, 0) + span.end - span.start
    return steps


def figures(quick: bool) -> list[Figure]:
    names = [strategy.name for strategy in STRATEGIES if strategy.parts(RANKS) == RANKS]
    ranks = rounds(names, 20 if quick else 60)
    found = []
    for name in names:
        goal = "at most 1.10" if name == "ddp-overlapped" else ""
        if name != PEER:
            pairs = zip(slowest(ranks[PEER]), slowest(ranks[name]), strict=True)
            found.append(figure(f"step: {name} / {PEER}", ratios(pairs), target=goal, note=phases(ranks[name])))
    peer = [1000 * seconds for seconds in slowest(ranks[PEER])]
    found.append(figure(f"step: {PEER}", peer, "ms", note=phases(ranks[PEER])))
    return [*found, *side_by_side("step, experts", ["ep"], quick)]


def slowest(ranks: list[Steps]) -> list[float]:
    """Return the seconds of each step, on the rank that took longest."""
    return [max(taken["step"] for taken in turn) for turn in zip(*ranks, strict=True)]


def phases(ranks: list[Steps]) -> str:
    """Return the medians over all ranks and rounds as "forward 3.1 ms, backward ..."."""
    steps = [taken for rank in ranks for taken in rank]
    names = [name for name in steps[0] if name not in ("step", "end")]
    medians = {name: statistics.median(1000 * taken[name] for taken in steps) for name in names}
    return ", ".join(f"{name} {ms:.1f}" for name, ms in medians.items()) + " ms"


def side_by_side(title: str, names: Sequence[str], quick: bool, batch: int = BATCH) -> list[Figure]:
    """Time each of our rows beside PyTorch's, in a job with as many ranks as the row takes."""
    found = []
    for name in names:
        peer, ranks = f"torch-{name}", ROWS[name].ranks(RANKS)
        taken = rounds([name, peer], 20 if quick else 60, ranks, partial(stepper, batch=batch))
        pairs = zip(slowest(taken[peer]), slowest(taken[name]), strict=True)
        note = "; ".join(f"{each}: {phases(taken[each])}" for each in (name, peer))
        found.append(figure(f"{title}: {name} / {peer}", ratios(pairs), target="at most 1.05", note=note))
    return found
