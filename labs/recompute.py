"""Activations computed twice, so that they need not be kept: activation checkpointing.

Autograd keeps every tensor that an operation's backward will read.  A recomputed layer keeps its inputs alone, and
runs its forward once more when the backward arrives at it: memory for one layer's activations, and not for all.

    recompute(model.layers.values())                                 # full: a forward more, a third more arithmetic
    recompute(model.layers.values(), keep=MATMULS | ATTENTION)       # the cheap operations again, not the expensive

                 kept from forward to backward             computed again        numbers per token and layer of a GPT
    none         all that autograd asks for                -                     9D + 2KE + H + 4F + 2
    keep=both    the input, what matmuls and attention     norms, rotation,      5D + 2KE + H + 2F
                 gave                                      silu, sums
    keep=        the input, what attention gave            the matmuls, too      2D + H
    ATTENTION
    full         the input                                 everything            D

(letters as in `labs.model`; float32, and RMSNorm as it is without a fused kernel: where one is used, none is 2D less)

While a layer's backward runs, that one layer is held as in the first row.  All rows give the same gradients, bit by
bit: the second run draws the first one's random numbers, and computes under its autocast.

How: each tensor that autograd would keep becomes an empty slot (`torch.autograd.graph.saved_tensors_hooks`).  The
first slot that the backward looks into makes the frame run the forward again, which fills them all in order.  Kept
operations are met one level lower, below autograd: in the second run the operation is noted, but the answer of the
first is handed out and nothing is computed.

A module is changed in place: no wrapper, so that parameters keep their names, and whatever hooks it has (those with
which ZeRO gathers its parameters, before forward and before backward) stay outside of both runs.

Sources: Chen et al. 2016, arXiv 1604.06174, section 4 (full); Korthikanti et al. 2022, arXiv 2205.05198, section 5
(selective).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

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


def recompute(layers: Iterable[nn.Module], keep: Iterable[str] = ()) -> None:
    """From here on these modules compute their activations again in backward, but for the outputs of `keep`'s ops.

    layers: changed in place.  keep: operations by the dispatcher's names, such as "aten.mm".  Raises TypeError for
    what is no module, ValueError for what is no such operation, for no layer at all, or one done before.
    """
    layers, ops = list(layers), operations(keep)
    if not layers:
        raise ValueError("recompute() was given no layer: nothing would be recomputed")
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"recompute() takes modules, not {layer!r:.60}: of a ModuleDict, give its .values()")
        if getattr(vars(layer).get("forward"), "func", None) is checkpoint:
            raise ValueError(f"this {type(layer).__name__} is recomputed already: call recompute() on it once")
        layer.forward = partial(checkpoint, layer.forward, keep=ops)


def checkpoint(fn: Callable[..., Any], *args: Any, keep: Iterable[str] = (), **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are computed again in backward, but for the outputs of `keep`'s ops.

    `fn` must do the same each time it is given the same; what it reads besides its arguments (parameters, say) must
    not have changed by then.  Raises RuntimeError in backward where the second run does not save what the first did.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    frame, keeping = Frame(fn, args, kwargs), KeepOutputs(operations(keep))
    with saved_tensors_hooks(frame.pack, frame.unpack), keeping if keep else nullcontext():
        output = fn(*args, **kwargs)
    if keep:
        frame.ops, frame.kept = keeping.ops, keeping.put_away()
    return output


class Slot:
    """Stands where autograd would keep a tensor; dies with the graph, and takes its tensor along."""

    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None

    def __init__(self) -> None:
        self.tensor = None


class Frame:
    """One call whose saved tensors are slots: what it takes to run it again."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.fn, self.inputs = fn, Held((args, kwargs))
        self.surroundings = Surroundings(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.ops, self.kept = frozenset(), None
        self.slots: list[weakref.ref[Slot]] = []
        self.saved: list[tuple[torch.Size, torch.dtype]] = []

    def pack(self, tensor: Tensor) -> Slot:
        slot = Slot()
        self.slots.append(weakref.ref(slot))
        self.saved.append((tensor.shape, tensor.dtype))
        return slot

    def unpack(self, slot: Slot) -> Tensor:
        if slot.tensor is None:
            self.run_again()
        return slot.tensor

    def run_again(self) -> None:
        """Fill the slots that are still alive with what a second run saves, in the same order."""
        slots, saved = iter(self.slots), []

        def fill(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()  # a slot that held its own graph would never die
            saved.append((tensor.shape, tensor.dtype))
            if (ref := next(slots, None)) and (slot := ref()):
                slot.tensor = tensor
            return tensor

        args, kwargs = self.inputs.take_out()
        handing_out = HandOut(self.ops, self.kept.take_out()) if self.ops else nullcontext()
        with self.surroundings.restored(), saved_tensors_hooks(fill, lambda tensor: tensor), handing_out:
            self.fn(*args, **kwargs)
        if saved != self.saved:
            raise RuntimeError(difference(self.fn, self.saved, saved))
        self.inputs = self.kept = None  # full slots need no third run


def difference(fn: Callable[..., Any], first: list[Any], second: list[Any]) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    again = f"{name} did not do the same when it was recomputed: its forward saved"
    way_out = "for the backward; it must depend on nothing but its arguments, its parameters and torch's random numbers"
    if len(first) != len(second):
        return f"{again} {len(first)} tensors, its recomputation {len(second)} {way_out}"
    n, (a, b) = next((n, pair) for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    return f"{again} as tensor {n} {a[1]} {tuple(a[0])}, its recomputation {b[1]} {tuple(b[0])} {way_out}"


# ---- what the second run needs ---------------------------------------------------------------------------


class SaveForBackward(torch.autograd.Function):
    """A node of the graph that does nothing: it only keeps tensors, in the way that autograd keeps them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


class Held:
    """A nest of values put away for the backward.

    The tensors in it are held by autograd: hooks around this call see them (so, a checkpoint within a checkpoint holds
    nothing while the outer one waits), and one that is changed in place meanwhile is an error.
    """

    def __init__(self, values: Any) -> None:
        leaves, self.structure = tree_flatten(values)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        self.anchor = SaveForBackward.apply(anchor, *(leaves[n] for n in self.places))

    def take_out(self) -> Any:
        leaves = list(self.others)
        for n, tensor in zip(self.places, self.anchor.grad_fn.saved_tensors, strict=True):
            leaves[n] = tensor
        return tree_unflatten(leaves, self.structure)


class Surroundings:
    """Random numbers and autocast, as they are now, on the CPU and on the tensors' devices: some 5 KB."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {x.device for x in tensors} - {torch.device("cpu"), torch.device("meta")}
        self.cpu_random = torch.get_rng_state()
        self.random = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}
        cache = torch.is_autocast_cache_enabled()
        self.autocasts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache)
            for kind in {"cpu", *(device.type for device in devices)}
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng(list(self.random)), torch.enable_grad(), ExitStack() as stack:
            torch.set_rng_state(self.cpu_random)
            for device, state in self.random.items():
                torch.get_device_module(device).set_rng_state(state, device)
            for autocast in self.autocasts:
                stack.enter_context(autocast)
            yield


# ---- how a kept operation is not run twice ---------------------------------------------------------------


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

    def put_away(self) -> "Held":
        """Call it once the run is over, with the hooks around the checkpoint back in place."""
        for func, _, _, output, version in self.outputs:
            if versions(output) != version:
                raise RuntimeError(
                    f"the output of {func} is to be kept, but was changed in place after it: "
                    "leave the operation out of keep=, or write the change out of place"
                )
        return Held([(func, drew, as_it_was(output, shapes)) for func, drew, shapes, output, _ in self.outputs])


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
        if drew is not None:  # what is drawn next follows upon what this operation drew
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
