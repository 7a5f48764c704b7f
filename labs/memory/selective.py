"""Operations whose outputs are kept, so that a second run need not compute them again.

Recomputing all of a layer costs a forward.  Most of that time is in a few operations, and most of the memory in many
cheap ones: so keep what the few gave, and compute the rest again (Korthikanti et al. 2022, arXiv 2205.05198, section 5;
`labs.memory.recompute` has the table of what each choice holds).

    MATMULS, ATTENTION    operations by the dispatcher's names
    KeepOutputs           around the first run: collects what these gave
    HandOut               around the second: sees the operation, computes nothing, and hands out what was kept

Both stand below autograd, which sees the operation happen in either run.  What is handed out must be what was given:
an operation that draws random numbers moves them on, and an output that was changed in place afterwards is refused.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operations by the dispatcher's names; which attention a call becomes depends on device, dtype and shapes.
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
    """The names in `keep`. Raises ValueError for one that the dispatcher does not know."""
    names = frozenset(keep)
    for name in names:
        library, _, op = name.partition(".")
        if not hasattr(getattr(torch.ops, library), op):
            raise ValueError(f'keep= names operations of the dispatcher, "aten.mm" for one; {name!r} is not among them')
        if op.endswith(("_", "_like")):
            raise ValueError(f"keep= is for operations that compute what they give: {name!r} fills or changes a tensor")
    return names


class KeepOutputs(TorchDispatchMode):
    """The first run: collects the outputs of some operations."""

    def __init__(self, ops: frozenset[str]) -> None:
        super().__init__()
        self.ops = ops
        self.outputs: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) not in self.ops:
            output = func(*args, **(kwargs or {}))
            if torch.Tag.inplace_view in func.tags:  # another shape, and the same numbers
                self.outputs = [(*rest, out, seen(out, args[0], version)) for *rest, out, version in self.outputs]
            return output
        before = random_state(args)
        output = func(*args, **(kwargs or {}))
        after = random_state(args)
        drew = None if torch.equal(before, after) else after
        shapes = [(x.size(), x.stride(), x.storage_offset()) for x in tensors_of(output)]
        self.outputs.append((func, drew, shapes, output, versions(output)))
        return output

    def to_keep(self) -> list[tuple[Any, ...]]:
        """What `HandOut` asks for: operation, random numbers after it, output.  Call it once the run is over."""
        for func, _, _, output, version in self.outputs:
            if versions(output) != version:
                raise RuntimeError(
                    f"the output of {func} is to be kept, but was changed in place after it: "
                    "leave the operation out of keep=, or write the change out of place"
                )
        return [(func, drew, as_it_was(output, shapes)) for func, drew, shapes, output, _ in self.outputs]


class HandOut(TorchDispatchMode):
    """The second run: answers the same operations, in the same order, with what the first run kept."""

    def __init__(self, ops: frozenset[str], kept: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        self.ops, self.kept = ops, iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) not in self.ops:
            return func(*args, **(kwargs or {}))
        kept, drew, output = next(self.kept, (None, None, None))
        if kept is not func:
            raise RuntimeError(f"recomputed, {func} was called where the forward had called {kept}")
        if drew is not None:  # what is drawn next follows what this operation drew
            set_random_state(args, drew)
        return tree_map_only(Tensor, Tensor.detach, output)


def tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def versions(output: Any) -> list[int]:
    return [x._version for x in tensors_of(output)]


def as_it_was(output: Any, shapes: list[Any]) -> Any:
    """Without its graph, and in the shapes in which the operation gave it."""
    shape = iter(shapes)
    return tree_map_only(Tensor, lambda x: x.detach().as_strided(*next(shape)), output)


def seen(output: Any, changed: Tensor, version: list[int]) -> list[int]:
    """The version of an output when a tensor has got another shape in place, perhaps one with its memory."""
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
