"""Storages: the blocks of memory behind tensors, and the operators that allocate such blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin

PLAIN = {torch.Tensor, nn.Parameter}
NO_STORAGE = FakeTensor, UninitializedTensorMixin


def storages_of(value: Any) -> tuple[torch.UntypedStorage, ...]:
    """Return the storages behind a tensor, even a wrapped one such as a DTensor; return () for any other value."""
    is_plain = type(value) in PLAIN
    if isinstance(value, FakeTensor) and getattr(value.fake_mode, "stands_for_memory", False):
        return (value.untyped_storage(),)
    if not is_plain and (not isinstance(value, torch.Tensor) or isinstance(value, NO_STORAGE)):
        return ()
    if value.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return ()
    if not is_plain and takes_itself_apart(type(value)):
        return tuple(s for name in value.__tensor_flatten__()[0] for s in storages_of(getattr(value, name)))
    if value.layout is torch.strided:
        return (value.untyped_storage(),)
    is_sparse = value.layout is torch.sparse_coo
    return (value._indices().untyped_storage(), value._values().untyped_storage()) if is_sparse else ()


@cache
def takes_itself_apart(cls: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class, such as DTensor, wrap tensors whose operators a dispatch mode also sees."""
    return hasattr(cls, "__tensor_flatten__")


@cache
def allocates(func: Any) -> bool:
    """Return whether an operator allocates new memory for its outputs.

    torch.tensor() allocates without a visible operator: its memory first appears as the output of lift_fresh.
    """
    if isinstance(func, HigherOrderOperator) or func is torch.ops.aten.lift_fresh.default:
        return True
    return not any(output.alias_info for output in func._schema.returns)
