"""A detector of operators that read or write a tensor while a collective, send or recv in flight still uses it.

    with CommunicationWatch() as watch, Touches(watch): train()

A call uses its tensors from the moment in which it is issued until the rank has waited for the call, for a later call
of the same communicator, or for another message of the same batch.  An operator touches the memory of its arguments,
each from the first byte to the last, gaps between elements included.  An operator that returns a view touches nothing,
and neither does an operator that only takes a shape.  Only the operators of the current thread are seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.kit.watch.communication import CommunicationWatch, Extent, extents
from labs.kit.watch.storages import allocates, takes_itself_apart

NOT_COMPUTING = "c10d", "_c10d_functional"
DEVICE = torch.ops.prim.device.default  # PyTorch calls this on fake tensors more often than any other operator
SHAPE_ALONE = "new_", "empty", "zeros", "ones", "full", "rand", "record_stream", "set_"


class Touches(TorchDispatchMode):
    """A dispatch mode that tells a CommunicationWatch which memory each operator reads or writes, and at which line."""

    def __init__(self, watch: CommunicationWatch) -> None:
        super().__init__()
        self.watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see labs.kit.watch.memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].device
        if types and any(map(takes_itself_apart, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if self.watch.in_flight and type(func) is OpOverload:
            for extent, writes in touched(func, args, kwargs):
                self.watch.touched(extent, writes, sys._getframe(1))
        return func(*args, **kwargs)


def touched(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Extent, bool]]:
    """Yield the memory of each tensor that an operator touches, and whether the operator writes to it."""
    if not looks(func):
        return
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments[len(args) :])]
    for argument, value in given:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        yield from ((extent, writes) for extent in extents(tensors))


@cache
def looks(func: OpOverload) -> bool:
    """Return whether an operator reads or writes the elements of a tensor."""
    name = func._schema.name.split("::")[1]
    if func.namespace in NOT_COMPUTING or name.startswith(SHAPE_ALONE) or name.endswith("_like"):
        return False
    return allocates(func) or func._schema.is_mutable
