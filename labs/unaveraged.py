"""A check that an optimizer steps no parameter whose gradient nobody averages, such as that of a loss with weights.

A strategy averages the gradients of its model.  An optimizer may have other parameters, too; if each rank stepped them
with a gradient of its own, they would become different on every rank, and nothing would say so.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from labs.agree import Sentence, Some, first_difference, require_same


def require_all_averaged(owner: Any, is_averaged: Callable[[Tensor], bool], groups: list[ProcessGroup | None]) -> None:
    """Raise RuntimeError in an optimizer's first step if ranks differ in a gradient that nobody averaged.

    The check is for optimizers that also have a parameter which the owner averages.  Their other parameters, such as
    those of a loss, must have the same gradient on every rank.

    owner: the strategy; the check ends when it is freed
    is_averaged: function that returns whether the owner averages a parameter's gradient
    groups: the process groups over which gradients are compared
    """

    def unowned(given: list[Tensor]) -> dict[int, Tensor]:
        # A DTensor is sharded by an owner of its own.
        others = {i: p for i, p in enumerate(given) if not (is_averaged(p) or hasattr(p, "to_local"))}
        return others if any(map(is_averaged, given)) else {}

    def sentence(rank: int, its: dict[int, Any], other: int, others: dict[int, Any]) -> str:
        return (
            f"parameter {first_difference(its, others)} of the optimizer is none of those whose gradients are averaged "
            f"here, and its gradient differs on ranks {rank} and {other}: make it, as that of a loss, a part of the "
            "model before the model is wrapped or sharded, all of it, or average its gradient before the step"
        )

    compare_in_first_step(owner, unowned, groups, sentence)


def require_averaged(model: nn.Module, group: ProcessGroup | None) -> None:
    """Raise RuntimeError in an optimizer's first step if ranks differ in the gradient of a parameter of the model.

    Each rank must have the same gradients by then, except those of DTensors, whose owner has averaged them.
    """
    weak = ref(model)

    def whole(given: list[Tensor]) -> dict[str, Tensor]:
        stepped = {*given}
        return {name: p for name, p in weak().named_parameters() if p in stepped and not hasattr(p, "to_local")}

    def sentence(rank: int, its: dict[str, Any], other: int, others: dict[str, Any]) -> str:
        return (
            f"parameter {first_difference(its, others)!r} has another gradient on rank {other} than on rank {rank}, "
            "which computed another part of the batch: average gradients over these ranks, too, by labs.ddp with a "
            "group, or labs.fsdp with a mesh, that has them all"
        )

    compare_in_first_step(model, whole, [group], sentence)


def compare_in_first_step(
    owner: Any,
    chosen: Callable[[list[Tensor]], Mapping[Any, Tensor]],
    groups: list[ProcessGroup | None],
    sentence: Sentence,
) -> None:
    """Compare gradients between ranks before each optimizer's first step, until the owner is freed.

    chosen: function that returns, out of an optimizer's parameters, those whose gradients are compared, by name
    """
    compared: WeakSet[Optimizer] = WeakSet()

    @torch.compiler.disable
    def before_step(optimizer: Optimizer, *_: Any) -> None:
        given = chosen([p for group in optimizer.param_groups for p in group["params"]])
        trained = {name: p for name, p in given.items() if p.requires_grad}
        if optimizer in compared or not trained:
            return
        compared.add(optimizer)
        mine = {name: None if p.grad is None else Some.of(p.grad) for name, p in trained.items()}
        for group in groups:
            require_same(mine, group, sentence, RuntimeError)

    finalize(owner, register_optimizer_step_pre_hook(before_step).remove)
