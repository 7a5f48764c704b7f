"""Layers as vectors: what is gathered, dropped and reduced at once.

A strategy that shards parameters would drown in messages if it moved them one by one.  So the parameters of a layer
(a module of the model) are taken out of their modules and laid side by side; in their places stand views:

    Unit          the parameters of one layer, of one dtype and `requires_grad`, in one vector: `full`, padded to a
                  multiple of N, of which this rank's `shard` is an N-th.  gather, drop, reduce
    Layer         a module, and where in it the parameters of which units stand.  gather, drop, show
    Layout          the layout of such a vector
    Dropped       stands in the place of a parameter that is not there

    in_layers, take_out                from a model to its layers, and from their places to units
    alias, when_all_have_gradients     when a layer's backward is over

A parameter that several layers share lies in the first one's unit; each of them gathers it, and its gradient is
ready when the last use has been added up.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from labs.group import all_gather, free, reduce_scatter

CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class Place(NamedTuple):
    """Where a parameter stands; `name` is its first name in the model."""

    module: nn.Module
    attribute: str
    name: str


class Unit:
    """Some parameters in one vector, and this rank's shard of it.

    full: [n], n a multiple of N.  shard: [n / N]; a part of `full` under stages 1 and 2, and under stage 3 memory of
    its own, while `full` has none unless the unit is in use.
    """

    def __init__(self, named: dict[str, nn.Parameter], stage: int, group: ProcessGroup | None, initial: Any):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.layout = Layout({name: p.shape for name, p in named.items()}, self.ranks)
        self.places: list[Place] = []  # in all layers
        self.users: set[tuple[Layer, str]] = set()
        numbers = [materialised(name, p, initial) if p.is_meta else p.detach() for name, p in named.items()]
        trained = next(iter(named.values())).requires_grad
        self.full = nn.Parameter(self.layout.flatten(numbers), trained)
        shard = self.full.data.chunk(self.ranks)[self.rank]
        self.shard = nn.Parameter(shard.clone() if stage == 3 else shard, trained)
        self.at_rest = self.shard if stage == 3 else self.full
        if stage == 3:
            self.drop()

    def gather(self, async_op: bool = False) -> dist.Work | None:
        """all_gather P: from everybody's shard."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        return all_gather(self.full.data, self.shard.data, group=self.group, async_op=async_op)

    def drop(self) -> None:
        """drop P: give the memory back, and let the modules' parameters say so."""
        self.users.clear()
        self.full.untyped_storage().resize_(0)
        why = (
            f"rank {self.rank} of {self.ranks} holds a shard of its layer, and all of it only while the layer computes"
        )
        for module, attribute, name in self.places:
            setattr(module, attribute, Dropped(name, f"{why}; zero.state_dict() has everything"))

    def reduce(self) -> None:
        """reduce_scatter G: the mean over the ranks, added to what earlier micro-batches left; `full.grad` goes."""
        gradient, self.full.grad = self.full.grad, None
        mean = reduce_scatter(gradient, self.group).div_(self.ranks)
        free(gradient)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)

    def part(self, tensors: list[Tensor]) -> Tensor:
        """This rank's part of what is in the parameters' shapes, in memory of its own."""
        return self.layout.flatten(tensors).chunk(self.ranks)[self.rank].clone()

    def whole(self, part: Tensor) -> dict[str, Tensor]:
        """By name and in the parameters' shapes, that of which every rank has a part."""
        vector = part.new_empty(part.numel() * self.ranks)
        all_gather(vector, part, group=self.group)
        return self.layout.views(vector)


class Layer:
    """A module, and the places of its parameters, by unit."""

    def __init__(self, module: nn.Module, places: list[Place], unit_of: dict[str, Unit]):
        self.module = module
        self.places: dict[Unit, list[Place]] = {}
        for place in places:
            self.places.setdefault(unit_of[place.name], []).append(place)
            unit_of[place.name].places.append(place)

    def gather(self, phase: str) -> None:
        for unit in self.places:
            if not unit.users:
                unit.gather()
            unit.users.add((self, phase))
        self.show()

    def drop(self, *phases: str) -> None:
        """A unit stays while another layer uses it, or this one in another phase: recomputation runs in backward."""
        for unit in self.places:
            unit.users -= {(self, phase) for phase in phases}
            if not unit.users:
                unit.drop()

    def show(self) -> list[Tensor]:
        """Let the module's parameters be views of `full`; their gradients come together in the tensors returned."""
        uses = []
        for unit, places in self.places.items():
            with torch.enable_grad():  # in backward, too: a recomputation needs what the forward had
                uses.append(alias(unit.full))
                views = unit.layout.views(uses[-1])
            for module, attribute, name in places:
                setattr(module, attribute, views[name])
        return uses


# ---- layout ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The layout of a vector: tensors of these shapes by name, then padding, so that it divides by `ranks`."""

    shapes: dict[str, torch.Size]
    ranks: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each, and of the padding."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        return [*sizes, -sum(sizes) % self.ranks]

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """[n]: the tensors, in the order of the names, side by side."""
        first, *others = tensors
        return torch.cat([x.flatten() for x in (first, *others)] + [first.new_zeros(self.sizes[-1])])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors as parts of such a vector."""
        *parts, _ = vector.split(self.sizes)
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


def materialised(name: str, p: Tensor, initial: Callable[[str, torch.Size], Tensor]) -> Tensor:
    return initial(name, p.shape).to(torch.get_default_device(), p.dtype)


class Dropped:
    """Stands where a parameter was.  Whatever is done with it raises RuntimeError."""

    def __init__(self, name: str, why: str):
        self.text = f"parameter {name!r} is dropped: {why}"

    def __repr__(self) -> str:
        return f"Dropped({self.text})"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python and IPython ask for these of anything
            raise AttributeError(attribute)
        raise RuntimeError(self.text)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(next(x.text for x in tree_leaves((args, kwargs)) if isinstance(x, cls)))

    def refuse(self, *others: Any) -> Any:
        raise RuntimeError(self.text)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = __len__ = __float__ = refuse


# ---- from a model to its units ---------------------------------------------------------------------------


def in_layers(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> dict[nn.Module, list[Place]]:
    """The places of all parameters, by the layer that they are in; layers without any are left out.

    By default the layers are the children of the model, containers opened, and the model itself for what is left.
    Raises ValueError where the layers miss a parameter.
    """
    chosen = list(dict.fromkeys([*opened(model), model] if layers is None else layers))
    own = set(model.modules())
    for layer in chosen:
        if layer not in own:
            raise ValueError(
                f"layers has {layer!r:.60}, which is no module of the model: of a ModuleDict, give .values()"
            )
        if "flat0" in layer._parameters:
            raise ValueError(f"this {type(layer).__name__} lies in vectors already: shard a model once")
    names = {id(p): name for name, p in model.named_parameters()}
    places = {
        layer: [Place(module, attribute, names[id(p)]) for module, attribute, p in parameters_of(layer, chosen)]
        for layer in chosen
    }
    covered = {place.name for within in places.values() for place in within}
    if missing := [name for name in names.values() if name not in covered]:
        raise ValueError(
            f"layers miss {', '.join(map(repr, missing))}: "
            "add the modules that hold them, or the model itself, for all that no other layer has"
        )
    return {layer: within for layer, within in places.items() if within}


def opened(model: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; in place of containers, theirs."""
    for child in model.children():
        yield from opened(child) if isinstance(child, CONTAINERS) else (child,)


def parameters_of(layer: nn.Module, chosen: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) of all within a layer that is not within another one."""
    for attribute, p in layer._parameters.items():
        if p is not None:
            yield layer, attribute, p
    for child in layer.children():
        if child not in chosen:
            yield from parameters_of(child, chosen)


def take_out(places: list[Place], but: Iterable[str]) -> list[dict[str, nn.Parameter]]:
    """The parameters at these places, out of their modules: one dict for each dtype and `requires_grad`.

    but: names of parameters that were taken out before, at another place.
    """
    kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for module, attribute, name in places:
        p = module._parameters.pop(attribute, None)
        if p is not None and name not in but:
            kinds.setdefault((p.dtype, p.requires_grad), {})[name] = p
    return list(kinds.values())


# ---- when ------------------------------------------------------------------------------------------------


def alias(x: Any) -> Any:
    """The same numbers, as a tensor whose gradient is there when all uses of this one tensor are over."""
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x


def differentiable(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]


def when_all_have_gradients(tensors: list[Tensor], then: Callable[[], None]) -> None:
    # torch.autograd.graph.register_multi_grad_hook would keep all of these gradients until the last one is there.
    uses, there = len(tensors), 0  # not the tensors themselves: a hook that knew its own tensor would keep it alive

    def one_more(gradient: Tensor) -> None:
        nonlocal there
        there += 1
        if there % uses == 0:
            then()

    for x in tensors:
        x.register_hook(one_more)
