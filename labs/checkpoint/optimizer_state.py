"""Optimizer state: the tensors that an optimizer keeps for each parameter, and the options of its group.

    entries     returns the tensors that the optimizer has now, including the "master" of a parameter in low precision
                (labs.memory.precision)
    room        makes tensors into which a checkpoint's state can be loaded
    take        replaces all state of the optimizer by the loaded tensors
    groups      returns the options of each group, made of what JSON can hold, and its parameters

Options are part of a training, since a schedule changes the learning rate, which is an option.  Options are saved per
parameter, since another layout may group parameters otherwise.  The optimizer's class is saved with its options, since
an optimizer of another class cannot use the state.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from labs.memory.precision import Masters

# Options that belong to the process, and not to the training: how it computes, and which parameters it has.
OURS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}

Entry = tuple[tuple[int, ...], torch.dtype]
Kept = Mapping[str, Mapping[str, Entry]]  # {parameter: {state: (shape, dtype)}}
Wanted = tuple[tuple[int, ...] | None, torch.dtype]  # shape, or None for the parameter's own shape and strides
Entries = dict[Tensor, dict[str, Tensor]]
Options = dict[str, Any]


class Optimizer:
    """An optimizer of torch, `Masters` around one, or None.  Raises ValueError for any other optimizer."""

    def __init__(self, optimizer: Any):
        self.outer, self.inner = optimizer, optimizer.inner if isinstance(optimizer, Masters) else optimizer
        if not isinstance(self.inner, torch.optim.Optimizer | None):
            raise ValueError(
                f"{type(optimizer).__name__} keeps its state in a place of its own: train with an optimizer of "
                "torch.optim, or with labs.memory.precision.Masters of one"
            )

    def __iter__(self) -> Iterator[tuple[Options, Tensor, Tensor]]:
        """Yield, for each parameter, its group, the parameter, and the tensor that is updated: itself or its master."""
        of = dict(zip(self.outer.masters, self.outer.params, strict=True)) if self.inner is not self.outer else {}
        for group in self.inner.param_groups if self.inner else ():
            for copy in group["params"]:
                yield group, of.get(copy, copy), copy

    def entries(self) -> Entries:
        """Return the tensors that the optimizer has for each parameter.  Raises ValueError for other state."""
        found: Entries = {}
        for _, p, copy in self:
            found[p] = {"master": copy} if copy.dtype != p.dtype else {}
            for key, value in self.inner.state.get(copy, {}).items():
                if not isinstance(value, Tensor):
                    kind, of = type(self.inner).__name__, type(value).__name__
                    raise ValueError(f"{kind} keeps {key!r}, of type {of}: only tensors can be saved")
                found[p][key] = value
        return found

    def room(self, wanted: Mapping[Tensor, Mapping[str, Wanted]]) -> Entries:
        """Make the tensors that `wanted` describes for each parameter, except for masters, which exist already."""
        found: Entries = {}
        for group, p, copy in self:
            found[p] = {}
            for key, (shape, dtype) in wanted[p].items():
                if key == "master":
                    found[p][key] = copy
                elif shape is None:
                    found[p][key] = torch.zeros_like(copy.detach(), dtype=dtype)
                else:
                    beside_it = shape or group.get("fused") or group.get("capturable")
                    found[p][key] = torch.zeros(shape, dtype=dtype, device=copy.device if beside_it else "cpu")
        return found

    def take(self, kept: Entries, options: Mapping[Tensor, Options]) -> None:
        """Give the optimizer these tensors and options; a master that was not saved is copied from its parameter."""
        for group, p, copy in self:
            self.inner.state.pop(copy, None)
            if copy is not p and "master" not in kept[p]:
                copy.detach().copy_(p)
            if mine := {key: x for key, x in kept[p].items() if key != "master"}:
                self.inner.state[copy] = mine
            for key, value in options.get(p, {}).items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                elif key != "optimizer":
                    # JSON has turned tuples into lists.
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    def groups(self) -> list[tuple[Options, list[Tensor]]]:
        around = f"{type(self.outer).__name__} of " if self.inner is not self.outer else ""
        kind, found = f"{around}{type(self.inner).__name__}", {}
        for group, p, _ in self:
            found.setdefault(id(group), (group, []))[1].append(p)
        return [(as_json(group) | {"optimizer": kind}, of_each) for group, of_each in found.values()]


def as_json(group: Options) -> Options:
    return json.loads(json.dumps({key: x for key, x in group.items() if key not in OURS}, default=Tensor.item))
