"""The part of a training's state that this rank holds, by name, whichever strategy has sharded it.

    key                     tensor
    model/<name>            a parameter or buffer, under each of its names in `model.state_dict()`
    optimizer/<name>/<key>  a tensor of the optimizer's state for a parameter, under the parameter's name; its number in
                            the optimizer could belong to another parameter in another layout

A tensor with several names, such as a tied parameter, is one Part under all of them.

    a parameter is                    this rank holds
    an ordinary one                   all of it
    split by labs.tp                  its slices
    a DTensor, as labs.fsdp makes     the block that its placements say, within its slice of tensor parallelism, if any
    a DTensor of PyTorch's            the block that PyTorch says
    in a vector of labs.zero          a range of its elements, which is some blocks

The tensors of a Part are not copies: when numbers are loaded into them, the training uses these numbers at once.
Tensors that `state_dict()` makes anew, such as extra state, are given back to the model by `load_state_dict()`.
Non-persistent buffers are not saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor as TorchDTensor

from labs.checkpoint.optimizer_state import Entries, Kept, Optimizer, Options, Wanted
from labs.checkpoint.tensor_blocks import of_range, whole
from labs.dtensor import DTensor
from labs.dtensor.placement import Block
from labs.tp.parameter_cuts import Cut
from labs.zero import Zero
from labs.zero.flat import Unit

COUNTERS = {"step", "mu_product", "eta", "mu"}  # in the state of torch's optimizers
DTYPES = {  # those of which safetensors can read a part
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor that a checkpoint will hold.

    shape, dtype: the whole tensor's shape and dtype
    blocks: the blocks of the tensor that this rank holds, each with the local tensor that has its numbers
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: dict[Block, Tensor]


Parts = dict[str, Part]
Groups = list[tuple[Options, list[list[str]]]]  # options, and the names of each parameter that they are for


class Savable(Protocol):
    """An object that `save` can save: training changes only the numbers in the parts that it returns."""

    def parts(self) -> Parts: ...

    def groups(self) -> Groups: ...


class Held:
    """The state of a model, or of this rank's stages of a pipeline, and of their optimizer.

    Raises ValueError if the optimizer has a parameter that no model has, and for tensors that a checkpoint cannot hold.
    """

    def __init__(self, *models: nn.Module, optimizer: Any = None):
        self.models, self.kept = models, Optimizer(optimizer)
        self.cuts = dict(cut for model in models for cut in cuts_in(model))
        self.parts({})  # so that an error is raised now, and not at the first save

    @property
    def names(self) -> dict[Tensor, list[str]]:
        """Return the names of all tensors that the models have now: a buffer may have been replaced in the meantime."""
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
                    raise ValueError(f"two of the models have a {name!r}: put them into one module, under two names")
                if hasattr(x, "in_zero"):
                    raise ValueError(f"{name!r} is a vector of a model that is in Zero: give HeldByZero(zero)")
        return found

    def parts(self, kept: Entries | None = None) -> Parts:
        """Return the parts of all tensors that this rank holds, by key.

        kept: the optimizer's state; by default the state that the optimizer has now
        """
        names, found = self.names, {}
        for x, its in names.items():
            found |= {f"model/{name}": part for name, part in self.laid_out(x, x, its).items()}
        for p, its_own in (self.kept.entries() if kept is None else kept).items():
            for key, value in its_own.items():
                found |= {f"optimizer/{name}/{key}": part for name, part in self.laid_out(p, value, names[p]).items()}
        return found

    def laid_out(self, p: Tensor, x: Tensor, names: list[str]) -> Parts:
        """Return this rank's part of `x` under each name: split like `p` if `x` has p's shape, and whole otherwise."""
        return dict.fromkeys(names, part_of(x, self.cuts.get(p) if x.shape == p.shape else None))

    def groups(self) -> Groups:
        """Return the optimizer's options, and the names of the parameters that each set of options is for."""
        names = self.names
        return [(options, [names[p] for p in of_each]) for options, of_each in self.kept.groups()]

    def give_back(self, parts: Parts) -> None:
        """Give the tensors that `state_dict()` made anew, with the loaded numbers, to `load_state_dict()`."""
        for model in self.models:
            one, two = model.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
            anew = [key for key, x in one.items() if x is not two[key] and x.data_ptr() != two[key].data_ptr()]
            made = {key: next(iter(parts[f"model/{key}"].blocks.values())) for key in anew}
            if unknown := model.load_state_dict(made, strict=False).unexpected_keys if made else ():
                why = "is made by state_dict(), and load_state_dict() does not know it: keep it in a buffer, or have a"
                raise ValueError(f"{unknown[0]!r} {why} register_load_state_dict_pre_hook() that takes it back")

    def room(self, kept: Kept) -> Entries:
        """Make the tensors into which a checkpoint's optimizer state will be loaded."""
        wanted: dict[Tensor, dict[str, Wanted]] = {}
        for p, names in self.names.items():
            wholes = self.laid_out(p, p, names)
            wanted[p] = {
                key: (None if is_cut(key, names, kept, wholes) else shape, dtype)
                for key, (shape, dtype) in kept.get(names[0], {}).items()
            }
        return self.kept.room(wanted)

    def loaded(self, kept: Entries, options: Mapping[str, Options]) -> None:
        """Finish the loading of a checkpoint whose tensors are filled: hand its state and options to the optimizer."""
        for x in self.names:  # even if this rank's block of it is empty
            if isinstance(x, DTensor):
                increment_version(x)
        self.kept.take(kept, {p: options.get(names[0], {}) for p, names in self.names.items()})


class HeldByZero(Held):
    """The state of a model in `Zero`, and of its optimizer."""

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
    """Return each tensor's names, several if it is tied.  Raises ValueError if a checkpoint cannot hold a tensor."""
    found: dict[Tensor, list[str]] = {}
    for name, x in tensors.items():
        if odd := what_is_odd(x):
            raise ValueError(f"{name!r} {odd}")
        found.setdefault(x, []).append(name)
    return found


def what_is_odd(x: Any) -> str | None:
    """Return the reason why a checkpoint cannot hold `x`, or None."""
    if not isinstance(x, Tensor):
        return "is no tensor: give what is in it to save(values=)"
    if nn.parameter.is_lazy(x):
        return "is lazy: run a forward before, so that it has a shape"
    if isinstance(x, DTensor | TorchDTensor) and any(placement.is_partial() for placement in x.placements):
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
    """Return whether an optimizer's state has one number per element of its parameter, and so is sharded like it.

    The state's shape decides, except for step counters, which could be taken for the state of a 0-dim parameter.
    """
    return key not in COUNTERS and all(kept[name][key][0] == wholes[name].shape for name in names)


def cuts_in(model: nn.Module) -> Iterator[tuple[Tensor, tuple[Cut, int]]]:
    """Yield each parameter that tensor parallelism has split, with its cut and this rank's number in the group."""
    if hasattr(model, "tensor_parallel"):
        of = model.tensor_parallel
        parameters = dict(model.named_parameters())
        for name, cut in of.cuts.items():
            yield parameters[name], (cut, of.mesh.get_local_rank())


def part_of(x: Tensor, cut: tuple[Cut, int] | None) -> Part:
    block, local = whole(x.shape), x.detach()
    if isinstance(x, DTensor):
        block, local = x.spec.block(x.device_mesh.get_coordinate()), local.to_local()
    elif isinstance(x, TorchDTensor):
        [mine] = x.__create_chunk_list__()
        block, local = Block(tuple(mine.offsets), tuple(mine.sizes)), local.to_local()
    shape, offset = list(x.shape), list(block.offset)
    if cut is not None:
        how, rank = cut
        shape[how.dim], offset[how.dim] = max(how.stops), offset[how.dim] + how.starts[rank]
    has_some = local.numel() or not prod(shape)
    return Part(tuple(shape), x.dtype, {Block(tuple(offset), block.shape): local} if has_some else {})


def in_vector(unit: Unit, shard: Tensor) -> Parts:
    """Return, for each parameter in a flat vector, the part that lies in this rank's shard of the vector."""
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
