"""Strategies that shard parameters, gradients or optimizer state over the ranks: ZeRO's stages, FSDP, and HSDP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from labs import cost, dtensor, fsdp, native
from labs.checkpoint import Held, HeldByZero
from labs.clip import clip_gradients
from labs.fsdp import MixedPrecisionPolicy
from labs.kit.rows.row import Layers, Strategy, sizes_of
from labs.kit.training.training_step import ADAMW, Training, backward, trainable
from labs.mesh import Mesh
from labs.zero import Zero


def zero(stage: int, model: nn.Module, mesh: Mesh) -> Training:
    sharded = Zero(model, stage, partial(torch.optim.AdamW, **ADAMW), group=mesh.get_group("dp"))
    return Training(
        partial(backward, model),
        sharded,
        sharded.shards,
        sharded.full_state_dict,
        sharded.sync,
        clip=partial(clip_gradients, sharded.shards, groups=(mesh.get_group("dp"),)),
        held=partial(HeldByZero, sharded),
    )


def torch_zero1(model: nn.Module, mesh: Mesh) -> Training:
    module, optimizer = native.zero1(model, torch.optim.AdamW, mesh.get_group("dp"), **ADAMW)
    steps = partial(backward, module, no_sync=module.no_sync)
    trained = trainable(model)
    full = lambda: dict(model.named_parameters())  # noqa: E731
    return Training(steps, optimizer, trained, full, clip=partial(clip_gradients, trained), held=refuse_to_save)


def our_fsdp(reshard: bool, precision: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> Training:
    policy = MixedPrecisionPolicy(**precision)
    for layer in layers_of(model):
        fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return sharded(fsdp.fully_shard(model, mesh=mesh, mp_policy=policy))


def torch_fsdp(reshard: bool, precision: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> Training:
    return sharded(native.fsdp(model, layers_of(model), native.device_mesh(mesh), reshard, **precision))


def layers_of(model: nn.Module) -> list[nn.Module]:
    containers = (child for child in model.children() if isinstance(child, nn.ModuleDict))
    return [layer for container in containers for layer in container.children()]


def sharded(model: nn.Module) -> Training:
    """Return the training of a model whose parameters are DTensors, or, under tensor parallelism, partly tensors."""
    trained = trainable(model)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    return Training(
        partial(backward, model),
        optimizer,
        trained,
        lambda: {name: whole(p) for name, p in model.named_parameters()},
        clip=partial(clip_gradients, trained),
        held=partial(Held, model, optimizer=optimizer),
    )


def refuse_to_save() -> Held:
    raise ValueError("torch-zero-1 has the optimizer's state of a parameter on one rank only: save under zero-1")


def whole(p: Tensor) -> Tensor:
    """Gather a sharded parameter on every rank.

    PyTorch warns when a DTensor is gathered along two mesh axes at once, so its DTensors are gathered axis by axis.
    """
    if isinstance(p, dtensor.DTensor):
        return p.full_tensor()
    if not isinstance(p, DTensor):
        return p
    for axis in range(p.device_mesh.ndim):
        p = p.redistribute(placements=[Replicate()] * (axis + 1) + [*p.placements[axis + 1 :]])
    return p.to_local()


def of_stage(stage: int) -> Strategy:
    """Return the row of a stage of this course's ZeRO, whose predictions labs.cost.zero makes."""

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.zero_sent([*root, *layers], ranks, stage)

    # ZeRO adds up gradients in the same order as one process, on any number of ranks.
    return Strategy(
        f"zero-{stage}", "ours", partial(zero, stage), partial(cost.zero, stage=stage), sent, bitwise=(2, 3, 4)
    )


def zero_redundancy() -> Strategy:
    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.zero_redundancy_sent(sizes_of(root, layers), ranks, rank)

    note = "shards whole parameters; all-reduces G where stage 1 reduce-scatters it, then broadcasts P: 3Ψ, not 2Ψ"
    return Strategy("torch-zero-1", "native", torch_zero1, cost.zero_redundancy, sent, note=note)


def fully_sharded(
    name: str, side: str, reshard: bool = True, computes: torch.dtype = torch.float32, **others: Any
) -> Strategy:
    """Return the row of FSDP or HSDP, which shards layers parameter by parameter, and averages gradients in float32."""
    replicas = 2 if "axes" in others else 1
    how = {"reshard_after_forward": reshard, "replicas": replicas, "itemsize": computes.itemsize}
    precision = {"param_dtype": computes, "reduce_dtype": torch.float32} if computes != torch.float32 else {}

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        trained, frozen = (tuple(chain(*(getattr(layer, kind) for layer in root))) for kind in ("trained", "frozen"))
        return cost.fully_shard_sent(cost.LayerShapes(trained, frozen), layers, ranks, rank=rank, **how)

    apply, predict = (our_fsdp, cost.fsdp) if side == "ours" else (torch_fsdp, cost.fully_shard)
    apply, predict = partial(apply, reshard, precision), partial(predict, **how)
    return Strategy(name, side, apply, predict, sent, computes=computes, **others)


def two_replicas(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(f"HSDP with 2 replicas of 2 shards or more takes 4, 6, 8, ... ranks: not {asked}")
    return {"replicate": 2, "shard": asked // 2}


HYBRID = {"axes": two_replicas, "batch": ("replicate", "shard"), "bitwise": ()}
FSDP = (
    of_stage(1),
    zero_redundancy(),
    of_stage(2),
    fully_sharded("fsdp-no-reshard", "ours", reshard=False, bitwise=(2, 3, 4)),
    fully_sharded(
        "torch-fsdp-no-reshard",
        "native",
        reshard=False,
        note="holds P whole from forward to backward only; between steps P is sharded, unlike in stage 2",
    ),
    of_stage(3),
    fully_sharded("fsdp", "ours", bitwise=(2, 3, 4)),
    fully_sharded(
        "torch-fsdp",
        "native",
        note="gathers embedding, norm and head once per step, where stage 3 gathers them twice; unlike ours, it holds "
        "P with padding, and reduces from one buffer, where our all-to-all has two",
    ),
    fully_sharded("hsdp", "ours", **HYBRID),
    fully_sharded("torch-hsdp", "native", **HYBRID),
    fully_sharded("fsdp-bf16", "ours", computes=torch.bfloat16, bitwise=(2, 3, 4)),
    fully_sharded(
        "torch-fsdp-bf16",
        "native",
        computes=torch.bfloat16,
        bitwise=(),
        note="does not convert the float32 gradients of norms to bfloat16 from PyTorch 2.15 on",
    ),
)
