"""What this rank holds of a training, by name, whichever strategy has cut it.

    key                     of what
    model/<name>            a parameter or buffer, under each of its names in `model.state_dict()`
    optimizer/<name>/<key>  what the optimizer keeps of a parameter, by the parameter's name: numbers are another
                            parameter's where the model was put together otherwise

What has several names, as a tied parameter has, is one Part under all of them.

    a parameter is                    this rank has
    an ordinary one                   all of it
    split by labs.tp                  its slices
    a DTensor, as labs.fsdp makes     the block that its placements say, of what tensor parallelism has left
    in a vector of labs.zero          a range of its elements, which is some blocks

The tensors of a Part are no copies: what is loaded into them is where the training reads it.  What `state_dict()` makes
anew, as extra state, goes back by `load_state_dict()`.  Buffers that are not persistent are in neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from labs.checkpoint.extents import of_range, whole
from labs.checkpoint.optimizer_state import Entries, Kept, Optimizer, Options, Wanted
from labs.dtensor import DTensor
from labs.dtensor.placement import Block
from labs.tp.shares import Cut
from labs.zero import Zero
from labs.zero.flat import Unit

COUNTERS = {"step", "mu_product", "eta", "mu"}  # of torch's optimizers
DTYPES = {  # that safetensors knows, and reads a part of
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Of a tensor of this shape and dtype, the blocks that this rank holds, each where its numbers are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: dict[Block, Tensor]


Parts = dict[str, Part]
Groups = list[tuple[Options, list[list[str]]]]  # the names of each parameter


class Savable(Protocol):
    """What `save` asks of what it saves.  Neither answer changes afterwards, but for the numbers in the tensors."""

    def parts(self) -> Parts: ...

    def groups(self) -> Groups: ...


class Held:
    """Of a model, or of this rank's stages of a pipeline, and of what their optimizer keeps.

    Raises ValueError for an optimizer with a parameter that no model has, and for what a checkpoint cannot have.
    """

    def __init__(self, *models: nn.Module, optimizer: Any = None):
        self.models, self.kept = models, Optimizer(optimizer)
        self.cuts = dict(cut for model in models for cut in cuts_in(model))
        self.parts({})  # raises now what it would raise when all is saved

    @property
    def names(self) -> dict[Tensor, list[str]]:
        """Of what the models have at this moment: a buffer may be another tensor by now."""
        names = names_of(self.named())
        for _, p, _ in self.kept:
            if p not in names:
                raise ValueError(f"the optimizer has a parameter of shape {tuple(p.shape)} that is in no model given")
        return names

    def named(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for model in self.models:
            for name, x in model.state_dict(keep_vars=True).items():
                if found.setdefault(name, x) is not x:
                    raise ValueError(f"two of the models have a {name!r}: put them into one, under a name each")
                if hasattr(x, "in_zero"):
                    raise ValueError(f"{name!r} is a vector of a model that is in Zero: give HeldByZero(zero)")
        return found

    def parts(self, kept: Entries | None = None) -> Parts:
        """kept: of the optimizer, these, in place of what it keeps now."""
        names, found = self.names, {}
        for x, its in names.items():
            found |= {f"model/{name}": part for name, part in self.laid_out(x, x, its).items()}
        for p, its_own in (self.kept.entries() if kept is None else kept).items():
            for key, value in its_own.items():
                found |= {f"optimizer/{name}/{key}": part for name, part in self.laid_out(p, value, names[p]).items()}
        return found

    def laid_out(self, p: Tensor, x: Tensor, names: list[str]) -> Parts:
        """By name, what this rank has of a tensor of this shape that is cut as `p` is; else it has all of it."""
        return dict.fromkeys(names, part_of(x, self.cuts.get(p) if x.shape == p.shape else None))

    def groups(self) -> Groups:
        """The optimizer's."""
        names = self.names
        return [(options, [names[p] for p in of_each]) for options, of_each in self.kept.groups()]

    def give_back(self, parts: Parts) -> None:
        """Hand what `state_dict()` has made anew, and now has its numbers, to `load_state_dict()`."""
        for model in self.models:
            one, two = model.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
            anew = [key for key, x in one.items() if x is not two[key] and x.data_ptr() != two[key].data_ptr()]
            made = {key: next(iter(parts[f"model/{key}"].blocks.values())) for key in anew}
            if unknown := model.load_state_dict(made, strict=False).unexpected_keys if made else ():
                told = "is made by state_dict(), and load_state_dict() does not know it: keep it in a buffer, or have a"
                raise ValueError(f"{unknown[0]!r} {told} register_load_state_dict_pre_hook() that takes it back")

    def room(self, kept: Kept) -> Entries:
        """Tensors for what a checkpoint kept."""
        wanted: dict[Tensor, dict[str, Wanted]] = {}
        for p, names in self.names.items():
            wholes = self.laid_out(p, p, names)
            wanted[p] = {
                key: (None if is_cut(key, names, kept, wholes) else shape, dtype)
                for key, (shape, dtype) in kept.get(names[0], {}).items()
            }
        return self.kept.room(wanted)

    def loaded(self, kept: Entries, options: Mapping[str, Options]) -> None:
        """Called when all parts have their numbers."""
        for x in self.names:  # on ranks, too, that hold nothing of one
            if isinstance(x, DTensor):
                increment_version(x)
        self.kept.take(kept, {p: options.get(names[0], {}) for p, names in self.names.items()})


class HeldByZero(Held):
    """Of a model in `Zero`, and of its optimizer."""

    def __init__(self, zero: Zero):
        self.zero, self.units = zero, {unit.shard: unit for unit in zero.units}
        super().__init__(optimizer=zero.optimizer)
        self.models = (zero.model,)

    def named(self) -> dict[str, Any]:
        found: dict[str, Any] = self.zero.model.state_dict(keep_vars=True)
        found |= self.zero.model.named_buffers(remove_duplicate=False)
        found |= {name: unit.shard for unit in self.zero.units for name in unit.layout.shapes}
        return {key: found.get(name) for key, name in self.zero.keys.items()}

    def laid_out(self, p: Tensor, x: Tensor, names: list[str]) -> Parts:
        if p not in self.units or x.shape != p.shape:
            return super().laid_out(p, x, names)
        by_name = in_vector(self.units[p], x.detach())
        return {key: by_name[self.zero.keys[key]] for key in names}

    def loaded(self, kept: Entries, options: Mapping[str, Options]) -> None:
        super().loaded(kept, options)
        self.zero.refresh(self.zero.units)


def names_of(tensors: Mapping[str, Any]) -> dict[Tensor, list[str]]:
    """A tied one has several."""
    found: dict[Tensor, list[str]] = {}
    for name, x in tensors.items():
        if odd := what_is_odd(x):
            raise ValueError(f"{name!r} {odd}")
        found.setdefault(x, []).append(name)
    return found


def what_is_odd(x: Any) -> str | None:
    """Why it cannot be in a checkpoint."""
    if not isinstance(x, Tensor):
        return "is no tensor: give what is in it to save(values=)"
    if "torch.distributed" in type(x).__module__:
        return f"is a {type(x).__name__} of torch's: torch.distributed.checkpoint saves those"
    if nn.parameter.is_lazy(x):
        return "is lazy: run a forward before, so that it has a shape"
    if isinstance(x, DTensor) and any(placement.is_partial() for placement in x.placements):
        return "has a summand on each rank: redistribute() it to Replicate() or Shard(dim)"
    if x.is_meta:
        return "is on the meta device: give it numbers before"
    if x.layout is not torch.strided:
        return f"is {x.layout}: a checkpoint has dense tensors, so make it one, or keep it out of state_dict()"
    if x.dtype not in DTYPES:
        return f"is {x.dtype}, which safetensors does not know: keep it in a dtype that it does, or as several tensors"
    if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
        return "is expanded, so that it cannot be written to: make it contiguous()"
    return None


def is_cut(key: str, names: Sequence[str], kept: Kept, wholes: Parts) -> bool:
    """Whether it was kept by element.  Of a parameter without dims, a counter has the shape, too."""
    return key not in COUNTERS and all(kept[name][key][0] == wholes[name].shape for name in names)


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
