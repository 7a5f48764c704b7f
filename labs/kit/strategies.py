"""Every strategy of the course, ours and PyTorch's own, in one table; and the one training loop they share.

The tour, the contract test and the benchmarks read STRATEGIES and nothing else: a strategy joins all three as one row.

    name      what `--strategies` calls it             side      "ours" or "native"
    apply     model -> Training                        ranks     how many it takes of those asked for
    predict   labs.cost.Job -> Prediction of a step    sent      (root, layers, ranks, rank) -> bytes, for any model
                                                             by the shapes of its layers; root: the other parts
    bitwise   on how many ranks it equals the          note      where PyTorch's differs from the stage it stands for
              micro-batched process bit by bit,
              in float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs import cost, ddp, native
from labs.kit.record import mark
from labs.zero import Zero

Batch = tuple[Tensor, Tensor]
Layers = Sequence[cost.Layer]
# A larger eps than usual: where a gradient is all but zero, Adam would blow its rounding up to a whole step.  So, 30
# steps of the tour's model leave rounding below 1e-6; with lr 3e-3 and eps 1e-6, on some texts, it grows to 1e-3.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Training:
    """A model under a strategy: what the training loop needs of it, on one rank.

    module: maps a batch to its mean loss.  optimizer: has step() and zero_grad().  trained: whose `.grad` it uses.
    finish: called between backward() and step().  full: the whole parameters by name, the same on every rank.
    """

    module: nn.Module
    optimizer: Any
    trained: Sequence[Tensor]
    full: Callable[[], Mapping[str, Tensor]]
    finish: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Strategy:
    """A row of the table, as the head of this file has it."""

    name: str
    side: str
    apply: Callable[[nn.Module], Training]
    predict: Callable[[cost.Job], cost.Prediction]
    sent: Callable[..., int]
    ranks: Callable[[int], int] = lambda asked: asked
    bitwise: tuple[int, ...] = (2,)
    note: str = ""


# ---- how each is set up ----------------------------------------------------------------------------------


def single(model: nn.Module) -> Training:
    return replicated(model, model)


def average_with(wrap: Callable[[nn.Module], ddp.DataParallel], model: nn.Module) -> Training:
    module = wrap(model)
    return replicated(model, module, finish=module.sync)


def native_ddp(model: nn.Module) -> Training:
    return replicated(model, native.ddp(model))


def zero(stage: int, model: nn.Module) -> Training:
    sharded = Zero(model, stage, partial(torch.optim.AdamW, **ADAMW))
    return Training(model, sharded, sharded.shards, lambda: sharded.state_dict()["model"], sharded.sync)


def native_zero1(model: nn.Module) -> Training:
    module, optimizer = native.zero1(model, torch.optim.AdamW, **ADAMW)
    return Training(module, optimizer, trainable(model), lambda: dict(model.named_parameters()))


def native_fsdp(reshard_after_forward: bool, model: nn.Module) -> Training:
    containers = (child for child in model.children() if isinstance(child, nn.ModuleDict))
    layers = [layer for container in containers for layer in container.children()]
    module = native.fsdp(model, layers, reshard_after_forward)
    optimizer = torch.optim.AdamW(trainable(model), **ADAMW)
    return Training(
        module, optimizer, trainable(model), lambda: {name: p.full_tensor() for name, p in model.named_parameters()}
    )


def replicated(model: nn.Module, module: nn.Module, **others: Any) -> Training:
    """Every rank holds and steps all of it."""
    trained = trainable(model)
    return Training(
        module, torch.optim.AdamW(trained, **ADAMW), trained, lambda: dict(model.named_parameters()), **others
    )


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# ---- the table -------------------------------------------------------------------------------------------


def data_parallel(
    name: str, side: str, apply: Callable[[nn.Module], Training], variant: str, **others: Any
) -> Strategy:
    """A row whose predictions are `labs.cost.ddp`'s for this variant."""

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.ddp_sent(sizes_of(root, layers), ranks, variant, rank)

    return Strategy(name, side, apply, partial(cost.ddp, variant=variant), sent, **others)


def of_stage(stage: int) -> Strategy:
    """A row of ours whose predictions are `labs.cost.zero`'s."""

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.zero_sent([*root, *layers], ranks, stage)

    # Its sums are those of one process, in the same order, on any number of ranks.
    return Strategy(
        f"zero-{stage}", "ours", partial(zero, stage), partial(cost.zero, stage=stage), sent, bitwise=(2, 3, 4)
    )


def zero_redundancy() -> Strategy:
    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.zero_redundancy_sent(sizes_of(root, layers), ranks, rank)

    note = "deals out whole parameters; all-reduces G where stage 1 reduce-scatters it, then broadcasts P: 3Ψ, not 2Ψ"
    return Strategy("zero1", "native", native_zero1, cost.zero_redundancy, sent, note=note)


def sharded_fully(name: str, reshard_after_forward: bool, note: str) -> Strategy:
    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        trained, frozen = (tuple(chain(*(getattr(layer, kind) for layer in root))) for kind in ("trained", "frozen"))
        return cost.fully_shard_sent(cost.Layer(trained, frozen), layers, ranks, reshard_after_forward)

    predict = partial(cost.fully_shard, reshard_after_forward=reshard_after_forward)
    return Strategy(name, "native", partial(native_fsdp, reshard_after_forward), predict, sent, note=note)


def sizes_of(root: Layers, layers: Layers) -> list[int]:
    return [size for layer in (*root, *layers) for size in layer.sizes]


ONE_DEVICE = data_parallel("one device", "ours", single, "single", ranks=lambda asked: 1, bitwise=())
STRATEGIES = (
    data_parallel("ddp-naive", "ours", partial(average_with, ddp.Naive), "naive"),
    data_parallel("ddp-bucketed", "ours", partial(average_with, ddp.Bucketed), "bucketed"),
    data_parallel("ddp-overlapped", "ours", partial(average_with, ddp.Overlapped), "overlapped"),
    data_parallel("ddp", "native", native_ddp, "torch"),
    of_stage(1),
    zero_redundancy(),
    of_stage(2),
    sharded_fully(
        "fsdp-no-reshard", False, "holds P whole from forward to backward only; at rest it is sharded, unlike stage 2's"
    ),
    of_stage(3),
    sharded_fully("fsdp", True, "gathers embedding, norm and head once a step, where stage 3 gathers them twice"),
)


# ---- the loop --------------------------------------------------------------------------------------------


def train(
    strategy: Strategy,
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    micro_batches: int = 1,
    keep: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Take a step for each of this rank's batches; runs on every rank of a job.

    build: makes the model, the same on every rank; it maps a batch to its mean loss.  batches[rank][step]: inputs and
    targets.  micro_batches: into how many each batch is cut, their gradients added up.  Returns this rank's loss in
    each step, and by name the full parameters (on the CPU) as they were after `keep` steps.
    """
    training = strategy.apply(build())
    mine = batches[dist.get_rank()]
    losses, kept = [], {}
    for step, batch in enumerate(mine):
        mark("step")
        # A copy of its own, as a loader would make it, dies with its step.
        x, y = (tensor.to(torch.get_default_device(), copy=True) for tensor in batch)
        parts = backward(training.module, x, y, micro_batches)
        mark("sync")
        training.finish()
        # Once and at the end, as data parallelism does it: the sum over micro-batches is rounded like that over ranks.
        for p in training.trained if micro_batches > 1 else ():
            p.grad /= micro_batches
        mark("optimizer")
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(fmean(part.item() for part in parts))  # at the end, since on a GPU this waits for everything
        if step + 1 == keep:
            mark("end")
            kept = {name: p.detach().to("cpu", copy=True) for name, p in training.full().items()}
    mark("end")
    return losses, kept


def backward(module: nn.Module, x: Tensor, y: Tensor, micro_batches: int) -> list[Tensor]:
    """Add up the gradients of all micro-batches' mean losses, and return these (0-dim).

    x, y: [batch, time].  Raises ValueError for a batch that does not divide by `micro_batches`.
    """
    if len(x) % micro_batches:
        raise ValueError(f"a batch of {len(x)} does not divide by {micro_batches} micro-batches")
    losses = []
    for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        mark("forward")
        loss = module(micro_x, micro_y)
        mark("backward")
        loss.backward()
        losses.append(loss.detach())
    return losses
