"""Activations computed twice, so that they need not be kept: activation checkpointing.

Autograd keeps every tensor that an operation's backward will read.  A recomputed layer keeps only its inputs, and runs
its forward once more when the backward arrives at it: memory for one layer's activations, and not for all.

    recompute(model.layers.values())                                 # full: one more forward, a third more arithmetic
    recompute(model.layers.values(), keep=MATMULS | ATTENTION)       # selective: only the cheap operations again

                 kept from forward to backward             computed again        numbers per token and layer of a GPT
    none         all that autograd asks for                -                     9D + 2KE + H + 4F + 2
    selective    the input, what matmuls and attention     norms, rotation,      5D + 2KE + H + 2F
                 gave                                      silu, sums
    keep=        the input, what attention gave            the matmuls, too      2D + H
    ATTENTION
    full         the input                                 everything            D

(letters as in `labs.model`; float32, and RMSNorm as it is without a fused kernel: where one is used, none is 2D less)

While a layer's backward runs, that one layer is held as in the first row.  All rows give the same gradients, bit by
bit: the second run draws the first one's random numbers, and computes under its autocast.

How: each tensor that autograd would keep becomes an empty slot (`torch.autograd.graph.saved_tensors_hooks`).  The
first slot that the backward looks into makes the frame run the forward again, which fills them all in order.  How the
second run skips the kept operations is explained in `labs.memory.selective`.

A module is changed in place: no wrapper, so that parameters keep their names, and whatever hooks it has (those with
which ZeRO gathers its parameters, before forward and before backward) stay outside of both runs.  Its own `forward`
then leads back to it: once nobody uses the module, its parameters stay until Python collects such cycles, which
`gc.collect()` does at once.  Activations are in no cycle, and go with their graph.

Source: Chen et al. 2016, arXiv 1604.06174, section 4.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from labs.memory.selective import HandOut, KeepOutputs, operations


def recompute(layers: Iterable[nn.Module], keep: Iterable[str] = ()) -> None:
    """From here on these modules compute their activations again in backward, except the outputs of `keep`'s
    operations.

    layers: changed in place.  keep: operations by the dispatcher's names, such as "aten.mm".  Raises TypeError for what
    is not a module, ValueError for an unknown operation, for no layer at all, or for one done before.
    """
    layers, ops = list(layers), operations(keep)
    if not layers:
        raise ValueError("recompute() was given no layer: nothing would be recomputed")
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"recompute() takes modules, not {layer!r:.60}: for a ModuleDict, give its .values()")
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
            raise TypeError(f"a {type(layer).__name__} is never called: give recompute() the modules in it")
        if getattr(vars(layer).get("forward"), "func", None) is checkpoint:
            raise ValueError(f"this {type(layer).__name__} is recomputed already: call recompute() on it once")
        layer.forward = partial(checkpoint, layer.forward, keep=ops)


def checkpoint(fn: Callable[..., Any], *args: Any, keep: Iterable[str] = (), **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are computed again in backward, except the outputs of `keep`'s
    operations.

    `fn` must do the same each time it is given the same; what it reads besides its arguments (parameters, say) must
    not have changed by then.  Raises RuntimeError in backward where the second run does not save what the first did.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    frame, keeping = Frame(fn, args, kwargs), KeepOutputs(operations(keep))
    with saved_tensors_hooks(frame.pack, frame.unpack), keeping if keep else nullcontext():
        output = fn(*args, **kwargs)
    if keep:
        frame.ops, frame.kept = keeping.ops, Stash(keeping.to_keep())
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
        self.fn, self.inputs = fn, Stash((args, kwargs))
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


class Stash:
    """A nest of values put away for the backward.

    The tensors in it are held by autograd: hooks around this call see them (so, a checkpoint within a checkpoint holds
    nothing while the outer one waits), and one that is changed in place meanwhile is an error.
    """

    def __init__(self, values: Any) -> None:
        leaves, self.structure = tree_flatten(values)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        self.anchor = SaveForBackward.apply(anchor, *(leaves[n] for n in self.indices))

    def take_out(self) -> Any:
        leaves = list(self.others)
        for n, tensor in zip(self.indices, self.anchor.grad_fn.saved_tensors, strict=True):
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
