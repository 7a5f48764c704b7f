"""Strategies of DeepSpeed, if it is installed: its three stages of ZeRO, under settings that match this course's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labs import cost
from labs.deepspeed import configuration, engine
from labs.kit.record import mark
from labs.kit.rows.row import Layers, Strategy
from labs.kit.training.training_step import ADAMW, Training
from labs.mesh import Mesh


class Steps:
    """DeepSpeed's engine in the role of an optimizer: its step also frees the gradients, so zero_grad does nothing."""

    def __init__(self, engine: Any) -> None:
        self.step = engine.step

    def zero_grad(self) -> None:
        pass


def deepspeed(settings: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> Training:
    """Return the training of a model by DeepSpeed's engine.

    `backward` cuts the batch into micro-batches, so DeepSpeed's configuration has one micro-batch of one sequence.
    """
    config = {**settings, configuration.MICRO: 1}
    made = engine.initialize(model, config, partial(torch.optim.AdamW, **ADAMW))
    return Training(partial(backward, made), Steps(made), (), partial(engine.full, made), divided=True)


def backward(engine: Any, x: Tensor, y: Tensor, micro_batches: int, over: float | None = None) -> list[Tensor]:
    """Run forward and backward with DeepSpeed's engine, and tell the engine which micro-batch is the step's last."""
    losses, weighed = [], {} if over is None else {"over": over / micro_batches}
    for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        engine.set_gradient_accumulation_boundary(len(losses) + 1 == micro_batches)
        mark("forward")
        loss = engine(micro_x, micro_y, **weighed)
        mark("backward")
        engine.backward(loss / micro_batches)
        losses.append(loss.detach())
    return losses


def there(asked: int) -> Mapping[str, int]:
    if reason := engine.missing():
        raise ValueError(reason)
    return {"dp": asked}


def of_stage(stage: int, note: str, bitwise: tuple[int, ...] = ()) -> Strategy:
    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.deepspeed_sent([*root[:1], *layers, *root[1:]], ranks, stage, rank, configuration.BUCKET)

    return Strategy(
        f"deepspeed-{stage}",
        "native",
        partial(deepspeed, configuration.like_zero(stage)),
        partial(cost.deepspeed, stage=stage, bucket=configuration.BUCKET),
        sent,
        axes=there,
        bitwise=bitwise,
        dtypes=(torch.float32,),
        note=note,
    )


SPARE = "holds float32 masters besides float32 parameters"
DEEPSPEED = (
    of_stage(1, f"all-reduces G, where ours reduce-scatters it, then gathers P: 3Ψ, not 2Ψ; {SPARE}", (2,)),
    of_stage(2, f"all-reduces G, as DeepSpeed's stage 1 does; {SPARE}", (2,)),
    of_stage(3, f"gathers each parameter by itself; {SPARE}"),
)


def by_file(settings: Mapping[str, Any]) -> Strategy:
    """Return the row of a training by DeepSpeed under a configuration without batch sizes; nothing predicts it."""
    return replace(DEEPSPEED[-1], apply=partial(deepspeed, settings))
