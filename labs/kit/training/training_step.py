"""A model under a strategy (Training), and one training step.

A strategy's `apply` returns a Training; `labs.kit.training.strategies.train` and the notebooks train it step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from labs.checkpoint import Held
from labs.checkpoint.parts import Savable
from labs.clip import clip_gradients
from labs.kit.record import mark
from labs.model import counted

Batch = tuple[Tensor, Tensor]

# The eps of AdamW is larger than usual, since a small eps turns the rounding of a gradient near zero into a whole step.
# With this eps, differences by rounding stay below 1e-6 in 30 steps of the tour's model; with lr 3e-3 and eps 1e-6,
# they grow to 1e-3 on some texts.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Training:
    """A model under a strategy on one rank, with everything that a training step needs.

    backward: a function (x, y, micro_batches, over) that adds up the gradients of all micro-batches, and returns the
        mean loss of each micro-batch (0-dim), or no losses on a rank that does not have the model's last layer.  If
        some targets are ignored, the sum of a rank's losses is divided by `over` (`share_of`); otherwise `over` is
        None.
    optimizer: an object with step() and zero_grad().
    trained: the tensors whose `.grad` the optimizer uses.
    full: a function that returns the full parameters by name, the same on every rank.
    finish: a function that is called between backward and step().
    reads: whether this rank reads x, and whether it reads y; backward gets None in place of what the rank does not
        read.
    divided: whether backward has divided the gradients by the number of micro-batches.
    clip: a function (largest norm) that clips the gradients by their norm over all ranks, and returns the norm before;
        every rank calls it after `finish`.
    held: a function that returns the state of this rank, as `labs.checkpoint.save` takes it, or raises ValueError.
    """

    backward: Callable[[Tensor | None, Tensor | None, int, float | None], list[Tensor]]
    optimizer: Any
    trained: Sequence[Tensor]
    full: Callable[[], Mapping[str, Tensor]]
    finish: Callable[[], Any] = lambda: None
    reads: tuple[bool, bool] = (True, True)
    divided: bool = False
    clip: Callable[[float], Tensor] | None = None
    held: Callable[[], Savable] | None = None


def replicated(model: nn.Module, backward: Callable[..., list[Tensor]], **others: Any) -> Training:
    """Return the Training of a model that every rank holds and updates in full.

    backward, others: the fields of the Training.
    """
    trained = trainable(model)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    others.setdefault("clip", partial(clip_gradients, trained))
    others.setdefault("held", partial(Held, model, optimizer=optimizer))
    return Training(backward, optimizer, trained, lambda: dict(model.named_parameters()), **others)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def share_of(targets: Sequence[Tensor]) -> float | None:
    """Return the mean number of targets per part of a batch that are not ignored; None if no target is ignored.

    If each part divides its sum of losses by this number, the mean over the parts is the mean loss of the batch.

    targets: the targets of all parts of the batch.
    """
    total = sum(map(counted, targets))
    return None if total == sum(y.numel() for y in targets) else total / len(targets)


def take_step(
    training: Training, x: Tensor | None, y: Tensor | None, micro_batches: int = 1, over: float | None = None
) -> list[Tensor]:
    """Take one training step without waiting for a GPU; return the mean loss of each micro-batch (0-dim).

    x, y: inputs and targets, [batch, time].
    """
    losses = compute_gradients(training, x, y, micro_batches, over)
    mark("optimizer")
    training.optimizer.step()
    training.optimizer.zero_grad()
    return losses


def compute_gradients(
    training: Training, x: Tensor | None, y: Tensor | None, micro_batches: int = 1, over: float | None = None
) -> list[Tensor]:
    """Compute the gradients of one training step; return the mean loss of each micro-batch (0-dim)."""
    losses = training.backward(x, y, micro_batches, over)
    mark("sync")
    training.finish()
    # Gradients are divided once, after their sum, as in data parallelism: both sums then round in the same way.
    for p in training.trained if micro_batches > 1 and not training.divided else ():
        p.grad /= micro_batches
    return losses


def step(
    training: Training, x: Tensor | None, y: Tensor | None, micro_batches: int = 1, over: float | None = None
) -> float | None:
    """Take one training step; return this rank's mean loss, or None on a rank without the model's last layer."""
    losses = take_step(training, x, y, micro_batches, over)
    # The losses are read only now, since item() waits for a GPU's work.
    return fmean(loss.item() for loss in losses) if losses else None


def backward(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    micro_batches: int,
    over: float | None = None,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> list[Tensor]:
    """Run forward and backward of each micro-batch in turn; all micro-batches but the last run within `no_sync()`.

    x, y: inputs and targets, [batch, time].
    over: the number by which the batch's sum of losses is divided (`share_of`), or None if no target is ignored.
    Returns the mean losses of the micro-batches (0-dim).
    Raises ValueError for a batch that is not divisible by `micro_batches`.
    """
    if len(x) % micro_batches:
        raise ValueError(f"a batch of {len(x)} is not divisible by {micro_batches} micro-batches: change one of them")
    losses, weighed = [], {} if over is None else {"over": over / micro_batches}
    for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        with no_sync() if len(losses) + 1 < micro_batches else nullcontext():
            mark("forward")
            loss = module(micro_x, micro_y, **weighed)
            mark("backward")
            loss.backward()
            losses.append(loss.detach())
    return losses
