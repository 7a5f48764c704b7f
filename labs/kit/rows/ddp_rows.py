"""Strategies of data parallelism, whose ranks hold the whole model and average gradients; and one device alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from labs import cost, ddp, native
from labs.kit.rows.row import Layers, Strategy, sizes_of
from labs.kit.training.training_step import Training, backward, replicated
from labs.mesh import Mesh


def single(model: nn.Module, mesh: Mesh) -> Training:
    return replicated(model, partial(backward, model))


def average_with(wrap: Callable[..., ddp.DataParallel], model: nn.Module, mesh: Mesh) -> Training:
    module = wrap(model, group=mesh.get_group("dp"))
    return replicated(model, partial(backward, module, no_sync=module.no_sync), finish=module.sync)


def torch_ddp(model: nn.Module, mesh: Mesh) -> Training:
    module = native.ddp(model, mesh.get_group("dp"))
    return replicated(model, partial(backward, module, no_sync=module.no_sync))


def data_parallel(name: str, side: str, apply: Callable[..., Training], variant: str, **others: Any) -> Strategy:
    """Return the row of a data-parallel strategy, whose predictions labs.cost.ddp makes for this variant."""

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.ddp_sent(sizes_of(root, layers), ranks, variant, rank)

    return Strategy(name, side, apply, partial(cost.ddp, variant=variant), sent, **others)


ONE_DEVICE = data_parallel("one device", "ours", single, "single", axes=lambda asked: {"dp": 1}, bitwise=())
DDP = (
    data_parallel("ddp-naive", "ours", partial(average_with, ddp.Naive), "naive"),
    data_parallel("ddp-bucketed", "ours", partial(average_with, ddp.Bucketed), "bucketed"),
    data_parallel("ddp-overlapped", "ours", partial(average_with, ddp.Overlapped), "overlapped"),
    data_parallel("torch-ddp", "native", torch_ddp, "torch"),
)
