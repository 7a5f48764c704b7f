"""Selective recomputation: the outputs of some operations are held, so that the second run need not compute them again.

Recomputing all of a layer costs a forward.  Most of a forward's time is spent in a few operations, but most of its
activations are outputs of many cheap operations.  So hold the outputs of the few expensive operations, and compute the
cheap ones again (Korthikanti et al. 2022, arXiv 2205.05198, section 5).  `labs.memory.recompute` has a table of the
memory that each choice needs.

    MATMULS, ATTENTION    operations, by the dispatcher's names
    KeepOutputs           a mode for the first run, which collects the outputs of such operations
    HandOut               a mode for the second run, which returns these outputs in place of computing them

Both modes work below autograd, which records the operation in either run.  The second run of a recomputed layer must
get the same values as the first.  So where an operation drew random numbers, the second run sets the generator to the
state that it had after this operation.  If a kept output was changed in place later, an error is raised.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operations by the dispatcher's names; device, dtype and shapes decide which of these attentions a call becomes.
MATMULS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})
ATTENTION = frozenset(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
    }
)


def operations(keep: Iterable[str]) -> frozenset[str]:
    """Return the names of operations in `keep` as a set.

    Raises ValueError for a name that the dispatcher does not know, and for an operation that fills or changes a tensor.
    """
    names = frozenset(keep)
    for name in names:
        library, _, op = name.partition(".")
        if not hasattr(getattr(torch.ops, library), op):
            raise ValueError(f'keep= names operations of the dispatcher, "aten.mm" for one; {name!r} is not among them')
        if op.endswith(("_", "_like")):
            raise ValueError(f"keep= is for operations that compute a new output: {name!r} fills or changes a tensor")
    return names


class KeepOutputs(TorchDispatchMode):
    """A mode for the first run, which collects the outputs of some operations."""

    def __init__(self, ops: frozenset[str]) -> None:
        super().__init__()
        self.ops = ops
        self.outputs: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) not in self.ops:
            output = func(*args, **(kwargs or {}))
            if torch.Tag.inplace_view in func.tags:  # the tensor has another shape now, and the same numbers
                self.outputs = [
                    (*rest, out, version_after(out, args[0], before)) for *rest, out, before in self.outputs
                ]
            return output
        before = random_state(args)
        output = func(*args, **(kwargs or {}))
        after = random_state(args)
        drew = None if torch.equal(before, after) else after
        shapes = [(x.size(), x.stride(), x.storage_offset()) for x in tensors_of(output)]
        self.outputs.append((func, drew, shapes, output, versions(output)))
        return output

    def to_keep(self) -> list[tuple[Any, ...]]:
        """Return a list for `HandOut`: (operation, state of the generator after it, output).  Call it after the run."""
        for func, _, _, output, version in self.outputs:
            if versions(output) != version:
                raise RuntimeError(
                    f"the output of {func} is to be kept, but was changed in place after it: "
                    "leave the operation out of keep=, or write the change out of place"
                )
        return [(func, drew, as_it_was(output, shapes)) for func, drew, shapes, output, _ in self.outputs]


class HandOut(TorchDispatchMode):
    """A mode for the second run, which returns the held outputs for the same operations, in the same order."""

    def __init__(self, ops: frozenset[str], kept: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        self.ops, self.kept = ops, iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) not in self.ops:
            return func(*args, **(kwargs or {}))
        kept, drew, output = next(self.kept, (None, None, None))
        if kept is not func:
            raise RuntimeError(
                f"in recomputation, {func} was called where the forward had called {kept}: both must do the same"
            )
        if drew is not None:  # the next random numbers follow those that this operation drew
            set_random_state(args, drew)
        return tree_map_only(Tensor, Tensor.detach, output)


def tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def versions(output: Any) -> list[int]:
    return [x._version for x in tensors_of(output)]


def as_it_was(output: Any, shapes: list[Any]) -> Any:
    """Return an operation's output without its graph, in the shape that it had when the operation returned it."""
    shape = iter(shapes)
    return tree_map_only(Tensor, lambda x: x.detach().as_strided(*next(shape)), output)


def version_after(output: Any, changed: Tensor, version: list[int]) -> list[int]:
    """Return an output's version after `changed` got another shape in place: one more if it has the output's memory."""
    same = any(x.data_ptr() == changed.data_ptr() for x in tensors_of(output))
    return [number + 1 for number in version] if same else version


def random_state(args: Any) -> Tensor:
    device = device_of(args)
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(args: Any, state: Tensor) -> None:
    device = device_of(args)
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def device_of(args: Any) -> torch.device:
    return next((leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), torch.device("cpu"))
