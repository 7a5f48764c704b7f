"""Every strategy of the course, ours and PyTorch's own, in one table; and the one training loop they share.

The tour, the contract test and the benchmarks read STRATEGIES and nothing else: a strategy joins all three as one row.

    name      what `--strategies` calls it             side      "ours" or "native"
    apply     model -> module to train                 finish    called between backward() and optimizer.step()
    predict   (config, batch, ranks, rank) ->          sent      (sizes, ranks, rank) -> bytes, for a model that is
              labs.cost.Prediction of one step                   no GPT, from the sizes of what it trains
    ranks     how many it takes of those asked for     bitwise   on how many ranks it equals the micro-batched
                                                                 process bit by bit, in float32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs import cost, ddp, native
from labs.kit.record import mark

Batch = tuple[Tensor, Tensor]
# A larger eps than usual: where a gradient is all but zero, Adam would blow its rounding up to a whole step.  So, 30
# steps of the tour's model leave rounding below 1e-6; with lr 3e-3 and eps 1e-6, on some texts, it grows to 1e-3.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Strategy:
    """A row of the table, as the head of this file has it."""

    name: str
    side: str
    apply: Callable[[nn.Module], nn.Module]
    predict: Callable[..., cost.Prediction]
    sent: Callable[..., int]
    finish: Callable[[nn.Module], Any] = lambda module: None
    ranks: Callable[[int], int] = lambda asked: asked
    bitwise: tuple[int, ...] = (2,)


def itself(model: nn.Module) -> nn.Module:
    return model


def sync(module: nn.Module) -> None:
    module.sync()


def data_parallel(name: str, side: str, apply: Callable[..., nn.Module], variant: str, **others: Any) -> Strategy:
    """A row whose predictions are `labs.cost.ddp`'s for this variant."""
    predict, sent = partial(cost.ddp, variant=variant), partial(cost.ddp_sent, variant=variant)
    return Strategy(name, side, apply, predict, sent, **others)


ONE_DEVICE = data_parallel("one device", "ours", itself, "single", ranks=lambda asked: 1, bitwise=())
STRATEGIES = (
    data_parallel("ddp-naive", "ours", ddp.Naive, "naive", finish=sync),
    data_parallel("ddp-bucketed", "ours", ddp.Bucketed, "bucketed", finish=sync),
    data_parallel("ddp-overlapped", "ours", ddp.Overlapped, "overlapped", finish=sync),
    data_parallel("ddp", "native", native.ddp, "torch"),
)


def train(
    strategy: Strategy,
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    micro_batches: int = 1,
    keep: int = 0,
) -> tuple[list[float], list[Tensor]]:
    """Take a step for each of this rank's batches; runs on every rank of a job.

    build: makes the model, the same on every rank; it maps a batch to its mean loss.  batches[rank][step]: inputs and
    targets.  micro_batches: into how many each batch is cut, their gradients added up.  Returns this rank's loss in
    each step, and the full parameters (on the CPU) as they were after `keep` steps.
    """
    model = build()
    module = strategy.apply(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    mine = batches[dist.get_rank()]
    losses, kept = [], []
    for step, batch in enumerate(mine):
        mark("step")
        # A copy of its own, as a loader would make it, dies with its step.
        x, y = (tensor.to(torch.get_default_device(), copy=True) for tensor in batch)
        parts = backward(module, x, y, micro_batches)
        mark("sync")
        strategy.finish(module)
        # Once and at the end, as data parallelism does it: the sum over micro-batches is rounded like that over ranks.
        for p in trained if micro_batches > 1 else ():
            p.grad /= micro_batches
        mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fmean(part.item() for part in parts))  # at the end, since on a GPU this waits for everything
        if step + 1 == keep:
            mark("end")
            kept = [p.detach().to("cpu", copy=True) for p in model.parameters()]
    mark("end")
    return losses, kept


def backward(module: nn.Module, x: Tensor, y: Tensor, micro_batches: int) -> list[Tensor]:
    """Add up the gradients of all micro-batches' mean losses, and return these (0-dim)."""
    losses = []
    for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        mark("forward")
        loss = module(micro_x, micro_y)
        mark("backward")
        loss.backward()
        losses.append(loss.detach())
    return losses
