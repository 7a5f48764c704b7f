"""Strategies of tensor parallelism, which split each matrix over the ranks, alone or with FSDP along another axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from labs import cost, native
from labs.kit.rows.fsdp_rows import layers_of, our_fsdp, sharded
from labs.kit.rows.row import Strategy
from labs.kit.training.training_step import Training, backward, replicated
from labs.mesh import Mesh
from labs.model import GPT
from labs.tp import clip_gradients, full_parameters, gpt_plan, parallelize
from labs.tp.styles import Style


def split_by(plan: Mapping[str, Style], model: nn.Module, mesh: Mesh) -> Training:
    parallelize(model, mesh, plan)
    clip = partial(clip_gradients, model)
    return replace(replicated(model, partial(backward, model), clip=clip), full=partial(full_parameters, model))


def our_tp(sequence_parallel: bool, model: GPT, mesh: Mesh) -> Training:
    return split_by(gpt_plan(model.config, sequence_parallel), model, mesh)


def torch_tp(sequence_parallel: bool, model: GPT, mesh: Mesh) -> Training:
    native.tp(model, native.device_mesh(mesh), gpt_plan(model.config, sequence_parallel))
    return of_split_logits(model)


def our_fsdp_tp(model: GPT, mesh: Mesh) -> Training:
    parallelize(model, mesh["tp"], gpt_plan(model.config))
    clip = partial(clip_gradients, model, groups=(mesh.get_group("dp"),))
    return replace(our_fsdp(True, {}, model, mesh["dp"]), full=partial(full_parameters, model), clip=clip)


def torch_fsdp_tp(model: GPT, mesh: Mesh) -> Training:
    grid = native.device_mesh(mesh)
    native.tp(model, grid["tp"], gpt_plan(model.config))
    native.fsdp(model, layers_of(model), grid["dp"])
    return of_split_logits(model)


def of_split_logits(model: GPT) -> Training:
    own = sharded(model)
    clip = partial(native.clip_gradients, own.trained)
    return replace(own, backward=partial(backward_of_split_logits, model), clip=clip)


def backward_of_split_logits(
    model: nn.Module, x: Tensor, y: Tensor, micro_batches: int, over: float | None = None
) -> list[Tensor]:
    with loss_parallel():
        return backward(model, x, y, micro_batches, over)


def split(name: str, side: str, sequence_parallel: bool = False, **others: Any) -> Strategy:
    """Return the row of a strategy of tensor parallelism."""
    apply, predict = (our_tp, cost.tp) if side == "ours" else (torch_tp, cost.parallelize_module)
    predict = partial(predict, sequence_parallel=sequence_parallel)
    return Strategy(name, side, partial(apply, sequence_parallel), predict, None, **others, **PAIR)


# In all sizes of the GPT, two ranks can share the heads of keys and values equally; small GPTs have too few heads
# for more ranks.
def pair(asked: int) -> dict[str, int]:
    if asked < 2:
        raise ValueError(f"tensor parallelism takes 2 ranks: not {asked}")
    return {"tp": 2}


def rows_of_two(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(f"FSDP with tensor parallelism over 2 ranks takes 4, 6, 8, ... ranks: not {asked}")
    return {"dp": asked // 2, "tp": 2}


PAIR = {"axes": pair, "batch": (), "bitwise": (), "takes": GPT}
GRID = {"sent": None, "axes": rows_of_two, "bitwise": (), "takes": GPT}
TP = (
    split("tp", "ours"),
    split(
        "torch-tp",
        "native",
        note="sends the loss's three numbers per token one by one, and holds the embedding's gradient for the whole "
        "vocabulary on each rank",
    ),
    split("tp-sp", "ours", sequence_parallel=True),
    split(
        "torch-tp-sp",
        "native",
        sequence_parallel=True,
        note="sends and holds as torch-tp does; adds up the gradients of norms only where AdamW uses them, three times "
        "per step",
    ),
    Strategy("fsdp-tp", "ours", our_fsdp_tp, cost.fsdp_tp, **GRID),
    Strategy(
        "torch-fsdp-tp",
        "native",
        torch_fsdp_tp,
        cost.fully_shard_tp,
        **GRID,
        note="sends and holds more for the reasons of torch-tp and torch-fsdp",
    ),
)


def by_plan(plan: Mapping[str, Style]) -> Strategy:
    """Return the row of tensor parallelism over all ranks by the given plan of parallel styles."""
    return replace(TP[0], apply=partial(split_by, plan), axes=all_ranks)


def all_ranks(asked: int) -> dict[str, int]:
    return {"tp": asked}
