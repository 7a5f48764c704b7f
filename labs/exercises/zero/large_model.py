"""The challenge of notebook 04: train the largest model that fits four ranks of 4 MB each.

The judge hands out the layers and the batches, so it knows the model; it trains the same model on one process, and
compares the losses.  The memory of a rank is its peak from the second batch to the return, whatever the bytes are for:
AdamW's state is needed before the last batch, so no step can be postponed until after the measurement.

The bound: from step to step, AdamW in float32 holds 12 bytes for each parameter, its value and two means, somewhere
among the ranks.  The bound leaves no room for anything else, neither a gradient nor a whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import mark

RANKS, BUDGET, KEPT = 4, 4_000_000, 12  # ranks, bytes per rank, bytes per parameter
ROWS, FEATURES, STEPS = 32, 32, 3
ADAMW = {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.1}
TOLERANCE = 5e-6


class Stack(nn.Module):
    """A model of `depth` layers of width × width, between an input layer and an output layer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x)


def build(width: int, depth: int, seed: int) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(width, depth)


def alone(width: int, depth: int, seed: int, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the losses of the same model, trained in one process with AdamW."""
    model, losses = build(width, depth, seed), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for x, y in data:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_a_rank(fn: Function, seed: int, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    sizes: list[tuple[int, int]] = []

    def make(width: int, depth: int) -> Stack:
        if sizes:
            raise ValueError("make() was called before: one model is to be trained")
        sizes.append((width, depth))
        return build(width, depth, seed)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for batch in data:
            mark("step")
            yield tuple(each.chunk(RANKS)[dist.get_rank()] for each in batch)

    losses = fn(make, batches(), dict(ADAMW))
    mark("end")
    if not (isinstance(losses, list) and len(losses) == STEPS and all(isinstance(loss, float) for loss in losses)):
        raise ValueError(f"it returned {show(losses)}: the loss of each batch is needed, {STEPS} floats in a list")
    if not sizes:
        raise ValueError("make() was never called: the model to be trained comes from there")
    return {"size": sizes[0], "losses": losses}


def judge(fn: Function) -> Judged:
    generator = chance()
    data = [tuple(torch.randn(2, ROWS, FEATURES, generator=generator)) for _ in range(STEPS)]
    seed = int(torch.randint(1 << 30, (), generator=generator))
    results = job(on_a_rank, fn, seed, data, ranks=RANKS, record="memory")
    if len({found["size"] for found in results}) > 1:
        raise Wrong("the ranks do not make the same model", "What does your function know that differs there?")
    expected = alone(*results[0]["size"], seed, data)
    for step, loss in enumerate(expected):
        mean = sum(found["losses"][step] for found in results) / RANKS
        if not abs(mean - loss) <= TOLERANCE * abs(loss):
            raise Wrong(
                f"step {step}: the ranks' mean loss is {mean:.7g}, and {loss:.7g} on one process with AdamW",
                "Which parameters took no step, or another one?",
            )
    recording, steps = results.recording, range(1, STEPS)
    held = max(recording.held(rank, step)["peak"] for rank in range(RANKS) for step in steps)
    if held > BUDGET:
        raise Wrong(f"the fullest rank held {held / 1e6:.2f} MB, and may hold {BUDGET / 1e6:.0f}", "At which moment?")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Stack(*results[0]["size"]).parameters())
    details = f"{parameters:,} parameters trained; the fullest rank held {held / 1e6:.1f} of {BUDGET / 1e6:.0f} MB"
    return Judged(100 * parameters * KEPT / (RANKS * BUDGET), details)


large_model = Challenge(
    "large_model",
    "04",
    "The largest model in 4 MB a rank",
    "Train the largest model that fits four ranks of 4 MB each, counted in a steady step, whatever is held there. You "
    "choose its width and depth, and how its state is sharded; AdamW in float32, and the losses of one process.",
    judge,
    floor=15.5,
    course=62.1,
    possible=95.2,
)
