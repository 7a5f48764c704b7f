"""A check that an optimizer steps no parameter whose gradient nobody averages, such as that of a loss with weights.

A strategy averages the gradients of its model.  An optimizer may have other parameters, too; if each rank stepped them
with a gradient of its own, they would become different on every rank, and nothing would say so.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from labs.agree import Some, first_difference, require_same


def require_all_averaged(owner: Any, is_averaged: Callable[[Tensor], bool], groups: list[ProcessGroup | None]) -> None:
    """Raise RuntimeError in an optimizer's first step if ranks differ in a gradient that nobody averaged.

    The check is for optimizers that also have a parameter which the owner averages.  Their other parameters, such as
    those of a loss, must have the same gradient on every rank.

    owner: the strategy; the check ends when it is freed
    is_averaged: function that returns whether the owner averages a parameter's gradient
    groups: the process groups over which gradients are compared
    """
    compared: WeakSet[Optimizer] = WeakSet()

    @torch.compiler.disable
    def before_step(optimizer: Optimizer, *_: Any) -> None:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        # A DTensor is sharded by an owner of its own.
        unowned = [i for i, p in enumerate(given) if not (is_averaged(p) or hasattr(p, "to_local"))]
        others = {i: given[i].grad for i in unowned if given[i].requires_grad}
        if optimizer in compared or not others or not any(map(is_averaged, given)):
            return
        compared.add(optimizer)
        mine = {i: None if gradient is None else Some.of(gradient) for i, gradient in others.items()}
        for group in groups:
            require_same(mine, group, sentence, RuntimeError)

    def sentence(rank: int, its: dict[int, Any], other: int, others: dict[int, Any]) -> str:
        return (
            f"parameter {first_difference(its, others)} of the optimizer is none of those whose gradients are averaged "
            f"here, and its gradient differs on ranks {rank} and {other}: make it, as that of a loss, a part of the "
            "model before the model is wrapped or sharded, all of it, or average its gradient before the step"
        )

    finalize(owner, register_optimizer_step_pre_hook(before_step).remove)
