"""What this rank holds of a training, by name, whichever strategy has cut it.

    key                     of what
    model/<name>            a parameter or buffer, under each of its names in `model.state_dict()`
    optimizer/<name>/<key>  what the optimizer keeps of a parameter, by the parameter's name: numbers are another
                            parameter's where the model was put together otherwise

    a parameter is                    this rank has
    an ordinary one                   all of it
    split by labs.tp                  its slices
    a DTensor, as labs.fsdp makes     the block that its placements say, of what tensor parallelism has left
    in a vector of labs.zero          a range of its elements, which is some blocks

The tensors of a Part are no copies: what is loaded into them is where the training reads it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from labs.checkpoint.extents import of_range, whole
from labs.dtensor import DTensor
from labs.dtensor.placement import Block
from labs.tp.shares import Cut
from labs.zero import Zero
from labs.zero.flat import Unit


@dataclass(frozen=True)
class Part:
    """Of a tensor of this shape and dtype, the blocks that this rank holds, each where its numbers are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: dict[Block, Tensor]


Parts = dict[str, Part]
Entry = tuple[tuple[int, ...], torch.dtype]
Kept = Mapping[str, Mapping[str, Entry]]  # by parameter, what an optimizer keeps of it


class Held:
    """Of a model, or of this rank's stages of a pipeline, and of what their optimizer keeps.

    Raises ValueError for an optimizer with a parameter that no model has.
    """

    def __init__(self, *models: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        self.optimizer = optimizer
        self.tensors = {name: x for model in models for name, x in model.state_dict(keep_vars=True).items()}
        self.names: dict[Tensor, list[str]] = {}
        for name, x in self.tensors.items():
            self.names.setdefault(x, []).append(name)
        self.cuts = dict(cut for model in models for cut in cuts_in(model))
        for p in self.trained:
            if p not in self.names:
                raise ValueError(f"the optimizer has a parameter of shape {tuple(p.shape)} that is in no model given")

    @property
    def trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]] if self.optimizer else []

    def parts(self) -> Parts:
        found = {f"model/{name}": part_of(x, self.cuts.get(x)) for name, x in self.tensors.items()}
        for p in self.trained:
            for key, value in entries_of(self.optimizer, p):
                part = part_of(value, self.cuts.get(p) if value.shape == p.shape else None)
                found |= {f"optimizer/{name}/{key}": part for name in self.names[p]}
        return found

    def make_room(self, kept: Kept) -> None:
        """Let the optimizer have entries for what a checkpoint kept, and no others."""
        for p in self.trained:
            room_for(self.optimizer, p, part_of(p, self.cuts.get(p)).shape, kept.get(self.names[p][0], {}))

    def optimized(self) -> set[str]:
        """The names of what the optimizer has on this rank."""
        return {name for p in self.trained for name in self.names[p]}

    def loaded(self) -> None:
        """Called when all parts have their numbers."""


class HeldByZero(Held):
    """Of a model in `Zero`, and of its optimizer."""

    def __init__(self, zero: Zero):
        self.zero, self.optimizer = zero, zero.optimizer

    def parts(self) -> Parts:
        buffers = dict(self.zero.model.named_buffers(remove_duplicate=False))
        by_name = {name: part_of(x, None) for name, x in buffers.items()}
        for unit in self.zero.units:
            by_name |= in_vector(unit, unit.shard.detach())
        found = {f"model/{key}": by_name[name] for key, name in self.zero.keys.items()}
        for unit in self.zero.trained:
            for entry, value in entries_of(self.optimizer, unit.shard):
                if value.shape == unit.shard.shape:
                    of_each = in_vector(unit, value)
                else:
                    of_each = dict.fromkeys(unit.layout.shapes, part_of(value, None))
                keys = [(key, name) for key, name in self.zero.keys.items() if name in of_each]
                found |= {f"optimizer/{key}/{entry}": of_each[name] for key, name in keys}
        return found

    def make_room(self, kept: Kept) -> None:
        for unit in self.zero.trained:
            name, shape = next(iter(unit.layout.shapes.items()))
            room_for(self.optimizer, unit.shard, tuple(shape), kept.get(name, {}))

    def optimized(self) -> set[str]:
        return {key for unit in self.zero.trained for key, name in self.zero.keys.items() if name in unit.layout.shapes}

    def loaded(self) -> None:
        self.zero.refresh(self.zero.units)


def cuts_in(model: nn.Module) -> Iterator[tuple[Tensor, tuple[Cut, int]]]:
    """The parameters that tensor parallelism has split, how, and this rank's place among those that have the others."""
    if hasattr(model, "tensor_parallel"):
        of = model.tensor_parallel
        parameters = dict(model.named_parameters())
        for name, cut in of.cuts.items():
            yield parameters[name], (cut, of.mesh.get_local_rank())


def part_of(x: Tensor, cut: tuple[Cut, int] | None) -> Part:
    block, local = whole(x.shape), x.detach()
    if isinstance(x, DTensor):
        block, local = x.spec.block(x.device_mesh.get_coordinate()), local.to_local()
    shape, offset = list(x.shape), list(block.offset)
    if cut is not None:
        how, rank = cut
        shape[how.dim], offset[how.dim] = max(how.stops), offset[how.dim] + how.starts[rank]
    has_some = local.numel() or not prod(shape)
    return Part(tuple(shape), x.dtype, {Block(tuple(offset), block.shape): local} if has_some else {})


def in_vector(unit: Unit, shard: Tensor) -> Parts:
    """By name, what lies in this rank's part of a vector."""
    sizes = [shape.numel() for shape in unit.layout.shapes.values()]
    first, last = unit.rank * len(shard), (unit.rank + 1) * len(shard)
    found = {}
    for (name, shape), end, size in zip(unit.layout.shapes.items(), accumulate(sizes), sizes, strict=True):
        at = max(end - size, first)
        mine = {}
        for block in of_range(shape, at - (end - size), min(end, last) - (end - size)):
            n = prod(block.shape)
            mine[block] = shard[at - first : at - first + n].view(block.shape)
            at += n
        found[name] = Part(tuple(shape), shard.dtype, mine)
    return found


def entries_of(optimizer: torch.optim.Optimizer, p: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What it keeps of a parameter.  Raises ValueError for what is no tensor."""
    for key, value in optimizer.state.get(p, {}).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}: only tensors")
        yield key, value


def room_for(optimizer: torch.optim.Optimizer, p: Tensor, shape: tuple[int, ...], entries: Mapping[str, Entry]) -> None:
    """Entries of a parameter, whose whole has this shape: those of the same shape lie as it does."""
    optimizer.state.pop(p, None)
    for key, (its, dtype) in entries.items():
        like_it = torch.zeros_like(p.detach(), dtype=dtype) if its == shape else torch.zeros(its, dtype=dtype)
        optimizer.state[p][key] = like_it
