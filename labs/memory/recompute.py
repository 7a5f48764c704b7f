"""Activations that are computed twice, so that they need not be held until backward: activation checkpointing.

Autograd holds every tensor that an operation's backward will read.  A recomputed layer holds only its inputs, and runs
its forward once more when backward arrives at it.  So a rank holds the activations of one layer at a time, and not of
all layers.

    recompute(model.layers.values())                                 # full: one more forward, a third more arithmetic
    recompute(model.layers.values(), keep=MATMULS | ATTENTION)       # selective: only the cheap operations again

                 kept from forward to backward             computed again        numbers per token and layer of a GPT
    none         all that autograd asks for                -                     9D + 2KE + H + 4F + 2
    selective    the input, what matmuls and attention     norms, rotation,      5D + 2KE + H + 2F
                 gave                                      silu, sums
    keep=        the input, what attention gave            the matmuls, too      2D + H
    ATTENTION
    full         the input                                 everything            D

(letters as in `labs.model`; all tensors in float32; with a fused kernel for RMSNorm, the row "none" has 2D less)

While a layer's backward runs, its activations are held as in the row "none".  All choices of `keep` give the same
gradients, bit by bit: the second run draws the same random numbers as the first one, has the same autocast, and finds
the same buffers.  After the second run the buffers are as they were before it, so that a BatchNorm counts a batch once.
If something else changes between the runs, such as a generator of one's own, the two runs give different outputs; on
the CPU this is an error.

Each tensor that autograd would hold becomes an empty slot (`torch.autograd.graph.saved_tensors_hooks`).  When backward
reads the first slot, the layer's forward runs again, which fills all slots in order.  `labs.memory.selective` explains
how the second run skips some operations.

A module is changed in place, without a wrapper.  So parameters keep their names, and the module's hooks, such as those
with which ZeRO gathers parameters before forward and before backward, run outside of both runs.  The module's `forward`
then refers to the module: once nobody uses the module, its parameters are freed when Python collects such cycles, which
`gc.collect()` does at once.  Activations are in no such cycle, and are freed with their graph.

Source: Chen et al. 2016, arXiv 1604.06174, section 4.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from labs.memory.recompute_context import Stash, Surroundings, norms
from labs.memory.selective import HandOut, KeepOutputs, operations

MAY_DEPEND_ON = "it must depend on nothing but its arguments, its parameters and buffers, and torch's random numbers"
TORCHS = {"use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "early_stop"}


def recompute(layers: Iterable[nn.Module], keep: Iterable[str] = ()) -> None:
    """Make modules compute their activations again in backward, except the outputs of some operations.

    layers: modules, which are changed in place
    keep: operations whose outputs are held, by the dispatcher's names, such as "aten.mm"

    Raises TypeError for a layer that is not a module, and ValueError for an unknown operation, for no layers at all,
    and for a layer that is recomputed already.
    """
    layers, ops = list(layers), operations(keep)
    if not layers:
        raise ValueError("recompute() was given no layer: give it the modules that backward is to run again")
    for layer in layers:
        if not isinstance(layer, nn.Module):
            raise TypeError(f"recompute() takes modules, not {layer!r:.60}: for a ModuleDict, give its .values()")
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
            raise TypeError(f"a {type(layer).__name__} is never called: give recompute() the modules in it")
        if getattr(vars(layer).get("forward"), "func", None) is run_twice:
            raise ValueError(f"this {type(layer).__name__} is recomputed already: call recompute() on it once")
        layer.forward = partial(run_twice, layer.forward, ops)
        layer.register_forward_pre_hook(partial(require_itself, layer))


def require_itself(layer: nn.Module, called: nn.Module, inputs: Any) -> None:
    if called is not layer:
        raise RuntimeError(f"this is a shallow copy of a recomputed {type(layer).__name__}: make it by copy.deepcopy()")


def checkpoint(fn: Callable[..., Any], /, *args: Any, keep: Iterable[str] = (), **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)`, and let backward compute the activations of this call again.

    fn: function that does the same each time that it gets the same arguments; other tensors that it reads, such as
        parameters, must not change before backward.  In backward, too, fn runs to its end
    keep: operations whose outputs are held, by the dispatcher's names

    Raises RuntimeError in backward if the second run saves or returns other tensors than the first run, and TypeError
    for arguments that only torch's checkpoint has.
    """
    if theirs := TORCHS & kwargs.keys():
        raise TypeError(
            f"{min(theirs)}= is for torch.utils.checkpoint: leave it out here, since this function has keep= alone"
        )
    return run_twice(fn, operations(keep), *args, **kwargs)


def run_twice(fn: Callable[..., Any], ops: frozenset[str], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    frame, keeping = Frame(fn, ops, args, kwargs), KeepOutputs(ops)
    with saved_tensors_hooks(frame.pack, frame.unpack), keeping if ops else nullcontext():
        output = fn(*args, **kwargs)
    frame.given = norms(output)
    frame.surroundings.forget_what_stayed()
    frame.kept = Stash(keeping.to_keep()) if ops else None
    return output


class Slot:
    """A placeholder for a tensor that autograd would hold; it is freed with the graph, together with its tensor."""

    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None

    def __init__(self) -> None:
        self.tensor = None


class Frame:
    """A call of a function whose saved tensors are slots, with all that is needed in order to call it again."""

    def __init__(self, fn: Callable[..., Any], ops: frozenset[str], args: Any, kwargs: Any) -> None:
        self.fn, self.ops, self.inputs = fn, ops, Stash((args, kwargs))
        self.surroundings = Surroundings(fn, args, kwargs)
        self.kept = self.given = None  # until the first run is over
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
        """Fill the slots that are still alive with the tensors that a second run saves, in the same order."""
        slots, saved = iter(self.slots), []

        def fill(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()  # a slot that held its own graph would never die
            saved.append((tensor.shape, tensor.dtype))
            if (ref := next(slots, None)) and (slot := ref()):
                slot.tensor = tensor
            return tensor

        args, kwargs = self.inputs.take_out()
        if self.ops and self.given is None:
            raise RuntimeError("keep= is not for a function that calls autograd itself: checkpoint it without keep=")
        handing_out = HandOut(self.ops, self.kept.take_out()) if self.ops else nullcontext()
        with self.surroundings.restored(), saved_tensors_hooks(fill, lambda tensor: tensor), handing_out:
            output = self.fn(*args, **kwargs)
        if self.given is None:  # the function itself asks autograd, in its first run, which goes on to save more
            del saved[len(self.saved) :]
        if saved != self.saved:
            raise RuntimeError(difference(self.fn, self.saved, saved))
        if self.given is not None:
            if not torch.allclose(*map(torch.tensor, (self.given, norms(output))), 1e-6, 0, equal_nan=True):
                name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
                raise RuntimeError(f"{name} gave another output when it was recomputed: {MAY_DEPEND_ON}")
            self.inputs = self.kept = None  # full slots need no third run


def difference(fn: Callable[..., Any], first: list[Any], second: list[Any]) -> str:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    again = f"{name} did not do the same when it was recomputed: its forward saved"
    way_out = f"for the backward: {MAY_DEPEND_ON}"
    if len(first) != len(second):
        return f"{again} {len(first)} tensors, its recomputation {len(second)} {way_out}"
    n, (a, b) = next((n, pair) for n, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    return f"{again} as tensor {n} {a[1]} {tuple(a[0])}, its recomputation {b[1]} {tuple(b[0])} {way_out}"
