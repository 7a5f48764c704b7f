"""A model under a strategy, as every training loop of the course sees it; and one step of it.

What a strategy's `apply` returns is a Training: `labs.kit.strategies.train` takes its steps, and so do the notebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from labs.kit.record import mark
from labs.model import counted

Batch = tuple[Tensor, Tensor]

# A larger eps than usual: where a gradient is all but zero, Adam would blow its rounding up to a whole step.  So, 30
# steps of the tour's model leave rounding below 1e-6; with lr 3e-3 and eps 1e-6, on some texts, it grows to 1e-3.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Training:
    """A model under a strategy: what a step needs of it, on one rank.

    backward: (x, y, micro_batches, over) -> the mean loss of each (0-dim), whose gradients it has added up; no losses
    on a rank that does not have the model's end.  over: None, or what the sum of a rank's losses is divided by, where
    targets are ignored (`share_of`).
    optimizer: has step() and zero_grad().  trained: whose `.grad` it uses.
    full: the whole parameters by name, the same on every rank.  finish: called between backward and step().
    reads: whether this rank reads x, and whether y; where it does not, it is given None.
    divided: whether backward has divided the gradients by the number of micro-batches.
    """

    backward: Callable[[Tensor | None, Tensor | None, int, float | None], list[Tensor]]
    optimizer: Any
    trained: Sequence[Tensor]
    full: Callable[[], Mapping[str, Tensor]]
    finish: Callable[[], Any] = lambda: None
    reads: tuple[bool, bool] = (True, True)
    divided: bool = False


def replicated(model: nn.Module, backward: Callable[..., list[Tensor]], **others: Any) -> Training:
    """Every rank holds and steps all of it."""
    trained = trainable(model)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    return Training(backward, optimizer, trained, lambda: dict(model.named_parameters()), **others)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def share_of(targets: Sequence[Tensor]) -> float | None:
    """Return how many targets count in a batch, divided by the number of its parts; None where none is ignored.

    targets: of all parts.  A part's sum of losses, divided by this, has the batch's mean as its mean over the parts.
    """
    total = sum(map(counted, targets))
    return None if total == sum(y.numel() for y in targets) else total / len(targets)


def take_step(
    training: Training, x: Tensor | None, y: Tensor | None, micro_batches: int = 1, over: float | None = None
) -> list[Tensor]:
    """Take one step on x, y: [batch, time]; the mean losses of its micro-batches (0-dim), not waited for."""
    losses = training.backward(x, y, micro_batches, over)
    mark("sync")
    training.finish()
    # Once and at the end, as data parallelism does it: the sum over micro-batches is rounded like that over ranks.
    for p in training.trained if micro_batches > 1 and not training.divided else ():
        p.grad /= micro_batches
    mark("optimizer")
    training.optimizer.step()
    training.optimizer.zero_grad()
    return losses


def step(
    training: Training, x: Tensor | None, y: Tensor | None, micro_batches: int = 1, over: float | None = None
) -> float | None:
    """Take one step; this rank's mean loss, or None where it does not have the model's end."""
    losses = take_step(training, x, y, micro_batches, over)
    # Only now, since on a GPU this waits for everything.
    return fmean(loss.item() for loss in losses) if losses else None


def backward(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    micro_batches: int,
    over: float | None = None,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> list[Tensor]:
    """Forward and backward of each micro-batch in turn, all but the last within `no_sync()`; their mean losses (0-dim).

    x, y: [batch, time].  Raises ValueError for a batch that is not divisible by `micro_batches`.
    """
    if len(x) % micro_batches:
        raise ValueError(f"a batch of {len(x)} is not divisible by {micro_batches} micro-batches")
    losses, weighed = [], {} if over is None else {"over": over / micro_batches}
    for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        with no_sync() if len(losses) + 1 < micro_batches else nullcontext():
            mark("forward")
            loss = module(micro_x, micro_y, **weighed)
            mark("backward")
            loss.backward()
            losses.append(loss.detach())
    return losses
