"""Layers as flat vectors, which are gathered, dropped and reduced at once.

A strategy that sent parameters one by one would send too many messages.  So the parameters of a layer (a module of the
model) are taken out of their modules by `labs.zero.layers` and laid side by side.  Views of the vector stand in the
places of the parameters, their homes:

    Unit          the parameters of one layer, of one dtype and `requires_grad`, in one vector, `full`, padded to a
                  multiple of N; this rank's `shard` is an N-th of it.  Methods: gather, drop, reduce
    FlatLayer     a module, and the homes of each unit's parameters in it.  Methods: gather, drop, show
    Layout        the place of each parameter in such a vector

A parameter that several layers share lies in the first layer's unit.  Each of these layers gathers the unit, and its
gradient is ready when the last use has been added up.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.agree import Order
from labs.dropped import Dropped, Moved, Versions
from labs.group import all_gather, divisor_before, free, reduce_scatter
from labs.hooks import LayerCall, alias
from labs.zero.flattenable import ANEW, NO_HOOKS, is_hooked, refuse_alone
from labs.zero.hidden_gradients import AtRest, forget_gradient, own_gradient
from labs.zero.layers import Home


class Unit:
    """Parameters of a layer in one flat vector, and this rank's shard of the vector; N is the number of ranks.

    full: [n], n a multiple of N; under stage 3 it has memory only while the unit is in use.
    shard: [n / N]; a part of `full` under stages 1 and 2, and its own memory under stage 3.
    """

    def __init__(self, named: dict[str, nn.Parameter], stage: int, group: ProcessGroup | None, initial: Any):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.layout = Layout({name: p.shape for name, p in named.items()}, self.ranks)
        self.name = next(iter(named))
        self.homes: dict[Home, tuple[Any, bool]] = {}  # {home: (the view there, whether it is trained)}, in all layers
        self.users: set[tuple[FlatLayer, str]] = set()
        numbers = [materialised(name, p, initial) if p.is_meta else p.detach() for name, p in named.items()]
        self.trained = trained = next(iter(named.values())).requires_grad
        self.full = nn.Parameter(self.layout.flatten(numbers), trained)
        shard = self.full.data.chunk(self.ranks)[self.rank]
        self.shard = nn.Parameter(shard.clone() if stage == 3 else shard, trained)
        self.at_rest = AtRest.of(nn.Parameter(self.shard.detach(), trained) if stage == 3 else self.full, self)
        self.versions, self.version = Versions(self.full), self.shard._version
        self.memory = memory_of(self.at_rest)
        for name, p in named.items():
            Moved.mark(p, name, "give the optimizer to Zero")
        if stage == 3:
            self.drop()

    def stand_in(self, module: nn.Module, name: str) -> None:
        """Register in `module` the vector that `model.parameters()` shows between steps."""
        module.register_parameter(name, self.at_rest)
        self.place = module, name

    def gather(self, async_op: bool = False) -> dist.Work | None:
        """All-gather P: fill `full` from the shards of all ranks."""
        self.require_as_sharded()
        self.full.untyped_storage().resize_(self.full.nbytes)
        return all_gather(self.full.data, self.shard.data, group=self.group, async_op=async_op)

    def drop(self) -> None:
        """Drop P: free the memory of `full`, and replace its views by placeholders that raise an error when used."""
        self.users.clear()
        self.full.untyped_storage().resize_(0)
        self.versions.forbid()
        why = (
            f"rank {self.rank} of {self.ranks} holds a shard of its layer, and all of it only while the layer computes"
        )
        for home in self.homes:
            self.put(home, Dropped(home.name, f"{why}; zero.full_state_dict() has everything"), False)

    def put(self, home: Home, x: Any, trained: bool) -> None:
        setattr(home.module, home.attribute, x)
        self.homes[home] = x, trained

    def renew(self) -> None:
        """Accept the shard's new numbers after an update; backwards of earlier forwards are refused from now on."""
        self.versions.renew()
        self.version = self.shard._version

    def require_no_gradient_at_rest(self) -> None:
        if self.at_rest is not self.full and own_gradient(self.at_rest) is not None:
            raise RuntimeError(
                f"the shard of {self.name!r} got a gradient, since the loss reads model.parameters(), which stage 3 "
                "does not train: read weights in their layer's forward; for weight decay give the optimizer "
                "weight_decay="
            )

    def has_gradient(self) -> bool:
        return own_gradient(self.full) is not None or self.shard.grad is not None

    def forget(self) -> None:
        """Drop the gradients of the unit, reduced or not."""
        forget_gradient(self.full)
        self.shard.grad = None

    def reduce(self) -> None:
        """Reduce-scatter G: add the mean over the ranks to the gradient of the shard, and free `full.grad`."""
        self.require_as_sharded()
        gradient = own_gradient(self.full)
        forget_gradient(self.full)
        before = divisor_before(gradient.dtype, self.ranks)
        mean = reduce_scatter(gradient.div_(before), self.group).div_(self.ranks / before)
        free(gradient)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)

    def require_as_sharded(self) -> None:
        """Raise RuntimeError if the unit's vector was replaced, moved or changed, which other ranks would not see."""
        own = self.shard.dtype, self.shard.device
        if any((x.dtype, x.device) != own for x in (self.full, self.at_rest)):
            now = f"{self.at_rest.dtype} on {self.at_rest.device}"
            raise RuntimeError(f"the vector of {self.name!r} became {now}: convert or move a model before sharding it")
        if self.at_rest.requires_grad and not self.trained:
            raise RuntimeError(f"{self.name!r} was unfrozen after it was sharded, and no optimizer has it: {ANEW}")
        if self.at_rest is self.full and self.shard._version != self.version:
            raise RuntimeError(
                f"the shard of {self.name!r} was changed, and other ranks have what it was: after such a change, call "
                "zero.refresh(zero.units) on all ranks"
            )
        shown = self.at_rest
        if shown is not self.full and (is_hooked(shown) or self.shard._backward_hooks):
            raise RuntimeError(f"the shard of {self.name!r} has a hook, which backward does not call: {NO_HOOKS}")
        if shown is not self.full and memory_of(shown) == self.memory:
            shown.data = self.shard.data  # the shard may have been moved, as into a file of labs.memory
            self.memory = memory_of(shown)
        if not memory_of(shown) == memory_of(self.shard) == self.memory:
            raise RuntimeError(
                f"the vector of {self.name!r} was given other memory (by .data = ...): change the numbers that are "
                "there, with .data.copy_(...)"
            )
        module, name = self.place
        if module._parameters.get(name) is not self.at_rest:
            raise RuntimeError(
                f"{name!r}, the vector of {self.name!r}, was replaced, as torch.func.functional_call does: "
                "layers compute with its views, so replace it before the model is sharded"
            )
        for home in self.homes:
            self.require_as_put(home)

    def require_as_put(self, home: Home) -> None:
        """Raise RuntimeError if the view that stands at `home` was replaced, unfrozen or given other memory."""
        (module, attribute, name), (x, trained) = home, self.homes[home]
        if vars(module).get(attribute) is not x:
            raise RuntimeError(f"parameter {name!r} was replaced after its model was sharded: replace it before")
        if x is None or isinstance(x, Dropped):
            return
        if x.requires_grad and not (trained or self.full.requires_grad):
            raise RuntimeError(f"{name!r} was unfrozen after it was sharded, and no optimizer has it: {ANEW}")
        if x._backward_hooks and self.at_rest is self.full:
            raise RuntimeError(f"{name!r} has a hook, which the next step would drop: {NO_HOOKS}")
        parts = (x, self.shard) if self.at_rest is self.full else (x,)
        if any(part.untyped_storage()._cdata != self.full.untyped_storage()._cdata for part in parts):
            raise RuntimeError(
                f"{name!r} was given other memory (by .data = ...), but is a part of a vector: "
                "change the numbers that are there, with .data.copy_(...)"
            )

    def whole(self, part: Tensor) -> dict[str, Tensor]:
        """Gather the parts of all ranks, each [n / N]; return `{name: full tensor}` in the parameters' shapes."""
        vector = part.new_empty(part.numel() * self.ranks)
        all_gather(vector, part, group=self.group)
        return self.layout.views(vector)


class FlatLayer:
    """A layer whose parameters lie in vectors: the module, and for each unit the homes of its parameters in it."""

    def __init__(self, module: nn.Module, homes: list[Home], unit_of: dict[str, Unit], order: Order):
        self.module, self.order = module, order
        self.call: LayerCall | None = None  # the call whose forward is running
        self.homes: dict[Unit, list[Home]] = {}
        for home in homes:
            self.homes.setdefault(unit_of[home.name], []).append(home)
            unit_of[home.name].homes[home] = None, False

    def gather(self, phase: str) -> None:
        for unit in self.homes:
            if not unit.users:
                self.order.add(f"gathers the layer of {unit.name!r}")
                unit.gather()
                unit.versions.allow()
            unit.users.add((self, phase))
        self.show()

    def drop(self, *phases: str) -> None:
        """End these phases of the layer, and drop each unit that no layer uses any more.

        Recomputation runs a forward inside of a backward, so that one layer may use a unit in both phases.
        """
        for unit in self.homes:
            used = bool(unit.users)
            unit.users -= {(self, phase) for phase in phases}
            if used and not unit.users:
                unit.drop()

    def show(self) -> list[Tensor]:
        """Put views of `full` at the homes; return a tensor per trained unit, which sums the views' gradients."""
        uses = []
        for unit, homes in self.homes.items():
            unit.full.requires_grad_(unit.at_rest.requires_grad)  # users freeze what `model.parameters()` shows
            with torch.enable_grad():  # a recomputation in backward needs the same graph as the forward
                uses.append(alias(unit.full))
                views = unit.layout.views(uses[-1])
            for home in homes:
                views[home.name].requires_grad_ = partial(refuse_alone, home.name)
                unit.put(home, views[home.name], uses[-1].requires_grad)
        return [use for use in uses if use.requires_grad]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"a {type(self.module).__name__} cannot be copied or pickled after Zero has laid its parameters into "
            "vectors: average zero.shards, or load zero.full_state_dict() into a model that is not sharded"
        )


@dataclass(frozen=True)
class Layout:
    """The layout of a vector: tensors of these shapes by name, then padding, so that it divides by `ranks`."""

    shapes: dict[str, torch.Size]
    ranks: int

    @property
    def sizes(self) -> list[int]:
        """Return the number of elements of each tensor, and of the padding."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        return [*sizes, -sum(sizes) % self.ranks]

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the tensors side by side in one vector, in the order of the names, with the padding: [n]."""
        first, *others = tensors
        return torch.cat([x.flatten() for x in (first, *others)] + [first.new_zeros(self.sizes[-1])])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return `{name: view}`: the tensors as parts of `vector`, [n]."""
        *parts, _ = vector.split(self.sizes)
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


def memory_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def materialised(name: str, p: Tensor, initial: Callable[[str, torch.Size], Tensor]) -> Tensor:
    return initial(name, p.shape).to(torch.get_default_device(), p.dtype)
