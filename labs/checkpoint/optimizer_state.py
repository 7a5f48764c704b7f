"""What an optimizer keeps of each parameter: tensors, and the options of its group.

    entries     the tensors that are kept now; of a parameter in low precision its "master", too (labs.memory.precision)
    room        tensors for what a checkpoint kept
    take        go on with those, and nothing else
    groups      the options of each group, as JSON has them, and its parameters

Options are part of a training: a schedule has left the learning rate there.  They are remembered by parameter, since in
another layout there may be other groups; and with them the optimizer's kind, since another one has no use for them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from labs.memory.precision import Masters

# Of the process, and no part of a training: how it computes, and which parameters it has.
OURS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}

Entry = tuple[tuple[int, ...], torch.dtype]
Kept = Mapping[str, Mapping[str, Entry]]  # by name
Wanted = tuple[tuple[int, ...] | None, torch.dtype]  # the shape; None: its parameter's own, and it lies as that does
Entries = dict[Tensor, dict[str, Tensor]]
Options = dict[str, Any]


class Optimizer:
    """One of torch's, `Masters` of one, or none.  Raises ValueError for others."""

    def __init__(self, optimizer: Any):
        self.outer, self.inner = optimizer, optimizer.inner if isinstance(optimizer, Masters) else optimizer
        if not isinstance(self.inner, torch.optim.Optimizer | None):
            raise ValueError(
                f"{type(optimizer).__name__} keeps its state in a place of its own: train with one of torch's, or with "
                "labs.memory.precision.Masters of one"
            )

    def __iter__(self) -> Iterator[tuple[Options, Tensor, Tensor]]:
        """Of each parameter its group, itself, and what is updated: itself again, or its master."""
        of = dict(zip(self.outer.masters, self.outer.params, strict=True)) if self.inner is not self.outer else {}
        for group in self.inner.param_groups if self.inner else ():
            for copy in group["params"]:
                yield group, of.get(copy, copy), copy

    def entries(self) -> Entries:
        """Raises ValueError for what is no tensor."""
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
        """Where no master was kept, it is the parameter."""
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
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value  # JSON has lists alone

    def groups(self) -> list[tuple[Options, list[Tensor]]]:
        around = f"{type(self.outer).__name__} of " if self.inner is not self.outer else ""
        kind, found = f"{around}{type(self.inner).__name__}", {}
        for group, p, _ in self:
            found.setdefault(id(group), (group, []))[1].append(p)
        return [(as_json(group) | {"optimizer": kind}, of_each) for group, of_each in found.values()]


def as_json(group: Options) -> Options:
    return json.loads(json.dumps({key: x for key, x in group.items() if key not in OURS}, default=Tensor.item))
