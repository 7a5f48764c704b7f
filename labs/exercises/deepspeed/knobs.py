"""The challenge of 14: configure DeepSpeed so that three models fit two ranks, and their messages take least time.

An answer is a configuration: the rows of a micro-batch, and the entries of zero_optimization.  DeepSpeed trains with
it.  The time is that of the third step on the busier rank, latency + bytes / bandwidth for each message.  The memory is
the peak beyond the bytes that were there before the model, on the fuller rank, in the second or third step, whichever
holds less.

The bound: the new parameters of a rank depend on all Ψ numbers of the other rank's gradient.  So these numbers, or
others computed from them, are sent, in at least one message.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.deepspeed import engine
from labs.deepspeed.configuration import MICRO, TRAIN
from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import mark
from labs.kit.watch.communication import CommunicationWatch

RANKS, STEPS, ITEM = 2, 3, 4
ADAMW = {"lr": 2e-3, "eps": 1e-4}
ZERO = "zero_optimization"
Config = Mapping[str, Any]


class Setup(NamedTuple):
    """A model of linear layers from width to width, the rows that each rank reads in a step, and the limits."""

    widths: tuple[int, ...]
    rows: int
    budget: int  # bytes
    latency: float  # s
    bandwidth: float  # bytes/s


SETUPS = {
    "few rows": Setup((32, 64, 64, 128, 64, 32), 8, 430_000, 1e-3, 1e7),
    "many rows": Setup((16, 64, 64, 64, 64, 16), 128, 302_000, 1e-3, 1e7),
    "a far rank": Setup((32, 64, 64, 128, 64, 32), 8, 410_000, 4e-3, 1e7),
}


class Measured(NamedTuple):
    messages: int
    sent: int  # bytes
    seconds: float
    held: int  # bytes


class Stack(nn.Sequential):
    def __init__(self, widths: Sequence[int], seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(*(layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())))


def parameters(setup: Setup) -> int:
    return sum(a * b + b for a, b in pairwise(setup.widths))


def bound(setup: Setup) -> float:
    return setup.latency + ITEM * parameters(setup) / setup.bandwidth


def require_config(config: Any, setup: Setup) -> None:
    if not isinstance(config, dict) or {*config} != {MICRO, ZERO} or not isinstance(config[ZERO], dict):
        raise ValueError(f"it returned {show(config)}: {{{MICRO!r}: …, {ZERO!r}: {{…}}}} is needed, and nothing else")
    for key, value in config[ZERO].items():
        if not isinstance(value, bool | int):
            raise ValueError(f"{key} is {show(value)}: a number or a switch is needed, as nothing is offloaded here")
    if not isinstance(config[MICRO], int) or config[MICRO] < 1 or setup.rows % config[MICRO]:
        raise ValueError(f"{MICRO} is {config[MICRO]!r}, which does not divide {setup.rows} rows")


def choose(fn: Function, setups: Sequence[Setup]) -> list[tuple[Setup, Config]]:
    found = [(setup, fn(*setup)) for setup in setups]
    for setup, config in found:
        require_config(config, setup)
    return found


def random_rows(setup: Setup, seed: int) -> Tensor:
    """Return the rows of all ranks, [ranks, rows, features]."""
    return torch.randn(RANKS, setup.rows, setup.widths[0], generator=torch.Generator().manual_seed(seed))


def train(setup: Setup, config: Config, seed: int) -> tuple[list[float], int, int]:
    """Train on a rank; return its loss in each step, and the messages and the bytes that it sent in the last step."""
    gc.collect()
    mark("step")  # an empty step, which records the bytes that were there before the model
    given = {"gradient_clipping": 0.0, TRAIN: RANKS * setup.rows, **config}
    made = engine.initialize(Stack(setup.widths, seed), given, partial(torch.optim.AdamW, **ADAMW))
    losses, x_RBD = [], random_rows(setup, seed)
    for _ in range(STEPS):
        gc.collect()  # so that the bytes held do not depend on Python's own collections
        mark("step")
        with CommunicationWatch() as watch:
            parts = x_RBD[dist.get_rank()].split(config[MICRO])
            losses.append(sum(one_part(made, part) for part in parts) / len(parts))
    mark("end")
    tape = [row for row in watch.tape if row["sent"]]
    return losses, len(tape), sum(row["sent"] for row in tape)


def one_part(made: Any, part: Tensor) -> float:
    loss = made(part).square().mean()
    made.backward(loss)
    made.step()
    return loss.item()


def on_a_rank(cases: Sequence[tuple[Setup, Config]], seed: int) -> list[tuple[list[float], int, int]]:
    gc.disable()
    return [train(*case, seed) for case in cases]


def run_all(cases: Sequence[tuple[Setup, Config]], seed: int) -> list[tuple[list[float], Measured]]:
    """Train all cases; return for each the ranks' mean loss in each step, and the measurements."""
    if reason := engine.missing():
        raise Wrong(reason)
    results, found = job(on_a_rank, cases, seed, ranks=RANKS, record="memory"), []
    for number, (setup, _) in enumerate(cases):
        losses, messages, sent = zip(*(of_rank[number] for of_rank in results), strict=True)
        seconds = max(m * setup.latency + s / setup.bandwidth for m, s in zip(messages, sent, strict=True))
        held = max(beyond(results.recording, rank, number * (1 + STEPS)) for rank in range(RANKS))
        mean = [sum(each) / RANKS for each in zip(*losses, strict=True)]
        found.append((mean, Measured(max(messages), max(sent), seconds, held)))
    return found


def beyond(recording: Any, rank: int, first: int) -> int:
    """Return the peak bytes of a steady step, beyond the bytes that were held when the empty step began."""
    before = sum(recording.moments(rank, first)[0][1].values())
    return min(recording.held(rank, first + step)["peak"] for step in range(2, 1 + STEPS)) - before


def alone(setup: Setup, seed: int) -> list[float]:
    model, x_BD, losses = Stack(setup.widths, seed), random_rows(setup, seed).flatten(0, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for _ in range(STEPS):
        loss = model(x_BD).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measured(called: str, *configs: Config) -> list[Measured]:
    """Return the messages, bytes and seconds of each of these configurations in a setup.

    Raises ValueError for a configuration that is not allowed.
    """
    for config in configs:
        require_config(config, SETUPS[called])
    return [each for _, each in run_all([(SETUPS[called], config) for config in configs], seed=0)]


def judge(fn: Function) -> Judged:
    seed, scores = int(torch.randint(1 << 30, (), generator=chance())), {}
    (chosen,) = job(choose, fn, [*SETUPS.values()], ranks=1, record=None)
    for (called, setup), (losses, each) in zip(SETUPS.items(), run_all(chosen, seed), strict=True):
        if not torch.allclose(torch.tensor(losses), torch.tensor(alone(setup, seed)), rtol=1e-4, atol=0):
            raise Wrong(f"{called}: the losses are not one process's", "Which knob changes numbers?")
        if each.held > setup.budget:
            raise Wrong(f"{called}: {each.held:,} bytes are held, and the budget is {setup.budget:,}", "What is large?")
        scores[called] = 100 * bound(setup) / each.seconds
    return Judged.of(scores)


knobs = Challenge(
    "knobs",
    "14",
    "The quickest file that fits",
    "Write DeepSpeed's configuration for three models on two ranks: the stage, thresholds, buckets, and the size of "
    "micro-batches. Messages are to take the least time on a wire, and each rank has so many bytes.",
    judge,
    floor=22.0,
    course=57.2,
    possible=69.5,
    cases=SETUPS,
    bound=bound,
    measured=measured,
)
