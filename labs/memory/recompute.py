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
bit: the second run draws the first one's random numbers, computes under its autocast, and finds the buffers as that
found them; afterwards they are as they were before it (a BatchNorm counts a batch once).  Where something else is
remembered between the runs, as by a generator of one's own, they give other outputs on the CPU, and that is an error.

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
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from labs.memory.selective import HandOut, KeepOutputs, operations
from labs.memory.surroundings import Stash, Surroundings, norms

MAY_DEPEND_ON = "it must depend on nothing but its arguments, its parameters and buffers, and torch's random numbers"
TORCHS = {"use_reentrant", "context_fn", "preserve_rng_state", "determinism_check", "early_stop"}


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
        if getattr(vars(layer).get("forward"), "func", None) is run_twice:
            raise ValueError(f"this {type(layer).__name__} is recomputed already: call recompute() on it once")
        layer.forward = partial(run_twice, layer.forward, ops)
        layer.register_forward_pre_hook(partial(require_itself, layer))


def require_itself(layer: nn.Module, called: nn.Module, inputs: Any) -> None:
    if called is not layer:
        raise RuntimeError(f"this is a shallow copy of a recomputed {type(layer).__name__}: make it by copy.deepcopy()")


def checkpoint(fn: Callable[..., Any], /, *args: Any, keep: Iterable[str] = (), **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are computed again in backward, except the outputs of `keep`'s
    operations.

    `fn` must do the same each time it is given the same; what it reads besides its arguments (parameters, say) must
    not have changed by then.  Both runs go to its end.  Raises RuntimeError in backward where the second one does not
    save or give what the first did, TypeError for arguments of torch's checkpoint.
    """
    if theirs := TORCHS & kwargs.keys():
        raise TypeError(f"{min(theirs)}= is for torch.utils.checkpoint: leave it out here, where keep= alone is there")
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
    """Stands where autograd would keep a tensor; dies with the graph, and takes its tensor along."""

    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None

    def __init__(self) -> None:
        self.tensor = None


class Frame:
    """One call whose saved tensors are slots: what it takes to run it again."""

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
        """Fill the slots that are still alive with what a second run saves, in the same order."""
        slots, saved = iter(self.slots), []

        def fill(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()  # a slot that held its own graph would never die
            saved.append((tensor.shape, tensor.dtype))
            if (ref := next(slots, None)) and (slot := ref()):
                slot.tensor = tensor
            return tensor

        args, kwargs = self.inputs.take_out()
        if self.ops and self.given is None:
            raise RuntimeError("keep= is not for a function that asks autograd itself: call it without keep=")
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
