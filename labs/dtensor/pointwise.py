"""Operations on DTensors that need no preparation: they work element by element, on tensors with equal layouts.

Nearly all operations of an optimizer are such elementwise operations:

    on_blocks     does an operation on this rank's blocks
    on_lists      does an operation on many tensors at once
    fused         does a whole step of an optimizer at once
"""

from typing import Any

import torch
from torch import Tensor

from labs.dtensor.operation import Make, is_plain, layouts, local, name_of
from labs.dtensor.rules import RULES, broadcast


def on_blocks(op: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """Do an elementwise operation on this rank's blocks.

    Returns the result's block and a DTensor with the result's layout, or None if the operation needs a preparation.
    """
    rule, tensors = RULES.get(name_of(op)), [x for x in args if isinstance(x, Tensor)]
    if not rule or rule.letters is not broadcast or rule.local or not alike(*tensors):
        return None
    if op._schema.is_mutable or tensors[0].is_contiguous():  # other inputs may give other strides
        return op(*(x._local_tensor if isinstance(x, Tensor) else x for x in args), **kwargs), tensors[0]
    return None


def on_lists(op: Any, args: Any, kwargs: Any, make: Make) -> list[Tensor] | None:
    """Do an operation on lists of DTensors: on all blocks at once if layouts are equal, and otherwise one by one."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    lists = [arg for arg in args if is_list(arg)]
    rule = RULES.get(name.rstrip("_"))
    if rule and rule.letters is broadcast and all(map(alike, *lists)):
        blocks = op(*([x._local_tensor for x in arg] if is_list(arg) else arg for arg in args), **kwargs)
        return blocks and [
            make(block, x.device_mesh, x.placements, x) for block, x in zip(blocks, lists[0], strict=True)
        ]
    results = []
    for i in range(len(args[0])):
        mine = [arg[i] if isinstance(arg, list | tuple) else arg for arg in args]
        value = {"value": mine.pop()} if name.startswith("addc") and len(mine) > 3 else {}
        if hasattr(torch.ops.aten, name):
            results.append(getattr(torch.ops.aten, name)(*mine, **value, **kwargs))
        else:  # such as maximum_, which exists in place for lists only
            mine[0].copy_(getattr(torch.ops.aten, name.rstrip("_"))(*mine, **kwargs))
    return None if name.endswith("_") else results


def fused(op: Any, args: Any, kwargs: Any) -> None:
    """Do an optimizer's step on the blocks of parameters and state, with gradients redistributed to their placements.

    Raises RuntimeError for a parameter that is Partial(), and for state that is not placed as its parameter is.
    """
    parameters, gradients, *others = args
    lists = [arg for arg in others if is_list(arg)]
    for parameter, *its in zip(parameters, *lists, strict=True):
        its = [x for x in its if not is_plain(x)]
        if not is_plain(parameter) and not alike(parameter, *its):
            raise RuntimeError(
                f"{op._schema.name} needs parameters and their state in equal placements, none of them Partial(), and "
                f"has {layouts([parameter.spec, *(x.spec for x in its)])}: make the optimizer without fused=True"
            )
    moved = [g if is_plain(g) else g.moved(p.placements) for p, g in zip(parameters, gradients, strict=True)]
    own = [[local(x) for x in arg] if is_list(arg) else arg for arg in (parameters, *others)]
    op(own[0], moved, *own[1:], **kwargs)


def is_list(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and len(arg) > 0 and isinstance(arg[0], Tensor)


def alike(first: Tensor, *others: Tensor) -> bool:
    """Return whether tensors have equal shapes and placements, without summands or copied parts: their blocks match."""
    if is_plain(first) or first.copied() or any(placement.is_partial() for placement in first.placements):
        return False
    layout = first.placements, first.shape, first.device_mesh
    return all(not is_plain(x) and not x.copied() and (x.placements, x.shape, x.device_mesh) == layout for x in others)
