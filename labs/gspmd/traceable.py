"""Checks that refuse, during the trace, what a graph of operations cannot express.

A graph has values, and no memory: it cannot express that a write to one tensor changes an argument, a constant or a
view. A graph is the same for all numbers: it cannot express that Python reads a number, and branches on it or
multiplies by it.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NUMBERS = (
    "a graph is the same whatever the arguments' numbers are, so Python can neither read them nor decide by them: "
    "compute with tensors, as torch.where does, or pass the number in"
)
RANDOM = (
    "a tensor that depends on no argument is computed once, so these random numbers would never change: pass them in"
)
LIFT = torch.ops.aten.lift_fresh.default  # the operation that torch.tensor(...) ends with


class Known(Protocol):
    """A trace that knows whether a tensor depends on an argument, and whether nothing else sees a write to it."""

    def follows(self, x: Tensor) -> bool: ...

    def is_own(self, x: Tensor, follows: bool) -> bool: ...


def require_sayable(op: Any, args: Any, options: dict[str, Any], follows: bool, known: Known) -> None:
    """Raise NotImplementedError for an operation that a graph cannot have.

    follows: whether the operation depends on arguments of the function
    """
    if (torch.Tag.data_dependent_output if follows else torch.Tag.nondeterministic_seeded) in op.tags:
        raise NotImplementedError(f"{op}: {NUMBERS if follows else RANDOM}")
    for name, x in options.items():
        if follows and isinstance(x, Tensor) and (known.follows(x) or x.shape[:-2].numel() > 1):
            raise NotImplementedError(
                f"{op}, {name}: a tensor given as a keyword argument gets no layout: leave it out"
            )
    written = [x for x, of in zip(args, op._schema.arguments, strict=False) if of.alias_info and of.alias_info.is_write]
    for x in tree_leaves(written):
        if not known.is_own(x, follows):
            raise NotImplementedError(
                f"{op} writes to a tensor of shape {tuple(x.shape)} that is an argument, a constant, from outside of "
                "the function, or shares its memory with a view, and a graph has values, no memory: make a new tensor, "
                "as y = y + 1 does, or torch.cat of parts"
            )


class NoNumbers(TorchFunctionMode):
    """A mode that refuses the ways by which Python reads numbers without an operation."""

    def __init__(self, follows: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.follows = follows

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and self.follows(args[0]):
            raise NotImplementedError(f"{fn.__name__}: {NUMBERS}")
        return fn(*args, **(kwargs or {}))
