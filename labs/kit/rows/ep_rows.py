"""Strategies of expert parallelism, which split the experts of a MoEGPT; they are no rows of STRATEGIES.

The bytes that a rank sends depend on the loads of the experts: `predict` takes them, and expects even ones by default.
The activations depend on them, too, and are not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labs import cost, native
from labs.checkpoint import Held
from labs.kit.rows.fsdp_rows import whole
from labs.kit.rows.row import Strategy
from labs.kit.training.training_step import ADAMW, Training, backward, trainable
from labs.mesh import Mesh
from labs.moe import ExpertParallel, MoEGPT


def ours(model: MoEGPT, mesh: Mesh) -> Training:
    parallel, trained = ExpertParallel(model, mesh), trainable(model)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    return Training(
        partial(backward, parallel),
        optimizer,
        trained,
        parallel.full_parameters,
        parallel.sync,
        clip=parallel.clip_gradients,
        held=partial(Held, model, optimizer=optimizer),
    )


def pytorchs(model: MoEGPT, mesh: Mesh) -> Training:
    module, average = native.expert_parallel(model, native.device_mesh(mesh))
    trained = trainable(model)
    return Training(
        partial(backward, module, no_sync=module.no_sync),
        torch.optim.AdamW(trained, **ADAMW),
        trained,
        partial(unstacked, model),
        average,
        clip=partial(native.clip_gradients, trained),
    )


def unstacked(model: nn.Module) -> dict[str, Tensor]:
    """Gather the experts of all ranks, and return `{name in the whole model: tensor}`."""
    full: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            before, _, matrix = name.rpartition(".")
            full |= {f"{before}.{e}.{matrix}.weight": each for e, each in enumerate(whole(p))}
        else:
            full[name] = p
    return full


def pairs(asked: int) -> dict[str, int]:
    """Return a mesh with ep = 2, or with all ranks along ep if their number is odd."""
    if asked < 2:
        raise ValueError(f"expert parallelism takes 2 ranks or more: not {asked}")
    return {"edp": 1, "ep": asked} if asked % 2 else {"edp": asked // 2, "ep": 2}


def row(name: str, side: str, bitwise: tuple[int, ...], note: str = "") -> Strategy:
    apply, predict = (ours, cost.expert_parallel) if side == "ours" else (pytorchs, cost.torch_expert_parallel)

    def predicted(job: cost.Job, loads: Sequence | None = None) -> cost.Prediction:
        axes: Mapping[str, int] = pairs(job.ranks)
        return predict(job, **axes, loads=loads)

    return Strategy(name, side, apply, predicted, None, pairs, ("edp", "ep"), bitwise, MoEGPT, note=note)


EP = (
    row("ep", "ours", (2, 3)),
    row("torch-ep", "native", (), "averages outside of DDP; computes all ranks' rows of an expert in one product"),
)
