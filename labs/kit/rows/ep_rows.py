"""Strategies of expert parallelism, which split the experts of a MoEGPT; they are no rows of STRATEGIES.

The bytes that a rank sends, and its activations, depend on the loads of the experts: `predict` takes the loads that
were counted, and expects even ones by default.  Jobs of STRATEGIES have none, since their GPT has no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labs import cost, native
from labs.agree import everybodys
from labs.checkpoint import Held
from labs.clip import global_norm, shorten
from labs.fsdp import fully_shard
from labs.kit.rows.fsdp_rows import sharded, whole
from labs.kit.rows.row import Strategy
from labs.kit.training.training_step import ADAMW, Training, backward, trainable
from labs.mesh import Mesh
from labs.moe import ExpertParallel, MoEGPT, split_experts

Apply = Callable[[MoEGPT, Mesh], Training]
Predict = Callable[..., cost.Prediction]


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


def sharded_experts(model: MoEGPT, mesh: Mesh) -> Training:
    dp, experts = mesh._flatten("dp"), split_experts(model, mesh)
    for layer, its in zip(model.layers.values(), experts, strict=True):
        fully_shard(its, mesh=mesh["edp"]).set_gradient_divide_factor(mesh.size())
        fully_shard(layer, mesh=dp)
    own = sharded(fully_shard(model, mesh=dp))
    split = {p for its in experts for p in its.parameters()}
    rest = [p for p in model.parameters() if p not in split]

    def clip(max_norm: float) -> Tensor:
        both = global_norm(rest, [dp.get_group()]), global_norm([*split], mesh.get_all_groups())
        norm = torch.stack(both).norm()
        shorten(own.trained, norm, max_norm)
        return norm

    def full() -> dict[str, Tensor]:
        mine = {name: p.detach().cpu() for name, p in own.full().items()}
        return {name: p for its in everybodys(mine, mesh.get_group("ep")).values() for name, p in its.items()}

    return replace(own, full=full, clip=clip)


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


def row(
    name: str, side: str, apply: Apply, predict: Predict, bitwise: tuple[int, ...] = (), note: str = ""
) -> Strategy:
    def predicted(job: cost.Job, loads: Sequence | None = None) -> cost.Prediction:
        """Predict a step, for the loads of all ranks, [rank][forward of a mixture][expert]; even ones by default."""
        axes: Mapping[str, int] = pairs(job.ranks)
        first = job.rank // axes["ep"] * axes["ep"]
        own = None if loads is None else list(zip(*loads[first : first + axes["ep"]], strict=True))
        return predict(job, **axes, loads=own)

    return Strategy(name, side, apply, predicted, None, pairs, ("edp", "ep"), bitwise, MoEGPT, note=note)


EP = (
    row("ep", "ours", ours, cost.expert_parallel, (2, 3)),
    row("fsdp-ep", "ours", sharded_experts, cost.fsdp_experts, (2, 3)),
    row(
        "torch-ep",
        "native",
        pytorchs,
        cost.torch_expert_parallel,
        note="averages outside of DDP; computes all ranks' rows of an expert in one product",
    ),
)
