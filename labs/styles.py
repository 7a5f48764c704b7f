"""The styles of a plan: how a module is split, and what crosses its borders.

Each style has two methods: `cuts`, how the module's parameters are dealt out, which raises ValueError for a module that
it does not fit; and `change`, which makes the module one of `labs.parallel_layers`.  `labs.tp` has the table of them.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor, nn

from labs.conjugate import copy, gather, join, reduce, scatter, split
from labs.mesh import Mesh
from labs.model import CrossEntropy
from labs.parallel_layers import (
    Border,
    ColumnParallelLinear,
    OnShards,
    Prepared,
    Region,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from labs.placement import Partial, Placement, Replicate, Shard
from labs.shares import Cut, Features, Keys, Queries

WHOLE, IN_FEATURES, BY_FEATURE = Replicate(), Shard(-1), Features()


@dataclass(frozen=True)
class Place:
    """Where a style is applied: the module's name, the mesh, and the Prepared block around it, if there is one."""

    name: str
    mesh: Mesh
    region: Region | None


class Style:
    """Prints what it was given, without the defaults."""

    def __repr__(self) -> str:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        words = [f"{name}={value!r}" for name, value in given if value != type(self).__dict__.get(name)]
        return f"{type(self).__name__}({', '.join(words)})"

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        return {}

    def change(self, module: nn.Module, place: Place) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class ColwiseParallel(Style):
    """Split a Linear's outputs.  heads: cut only between these."""

    input_layouts: Placement = WHOLE
    output_layouts: Placement = IN_FEATURES
    heads: Queries | Keys | Features = BY_FEATURE

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_kind(self, name, module, nn.Linear)
        cut = self.heads.cut(module.out_features, 0, ranks)
        return {"weight": cut} | ({"bias": cut} if module.bias is not None else {})

    def change(self, module: nn.Module, place: Place) -> None:
        mesh = place.mesh
        enter = place.region.enter if place.region else border(self.input_layouts, Replicate(), mesh)
        leave = partial(join, mesh=mesh, dim=-1, size=module.out_features) if is_whole(self.output_layouts) else same
        copies = self.heads.cut(module.out_features, 0, mesh.size()).copies
        become(module, ColumnParallelLinear, name=place.name, enter=enter, leave=leave, mesh=mesh, copies=copies)


@dataclass(frozen=True, kw_only=True, repr=False)
class RowwiseParallel(Style):
    """Split a Linear's inputs, or an Embedding's vocabulary.  heads: cut only between these."""

    input_layouts: Placement = IN_FEATURES
    output_layouts: Placement = WHOLE
    heads: Queries | Features = BY_FEATURE

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_kind(self, name, module, nn.Linear, nn.Embedding)
        if isinstance(module, nn.Linear):
            return {"weight": self.heads.cut(module.in_features, 1, ranks)}
        for option in ("padding_idx", "max_norm", "sparse"):
            if getattr(module, option):
                raise ValueError(
                    f"{name!r} is an Embedding with {option}, which has no split form here: leave it whole"
                )
        return {"weight": self.heads.cut(module.num_embeddings, 0, ranks)}

    def change(self, module: nn.Module, place: Place) -> None:
        leave = border(Partial(), self.output_layouts, place.mesh)
        if isinstance(module, nn.Embedding):
            become(module, VocabParallelEmbedding, leave=leave, mesh=place.mesh)
            return
        enter = partial(split, mesh=place.mesh, dim=-1) if is_whole(self.input_layouts) else same
        share = same if is_whole(self.output_layouts) else partial(copy, mesh=place.mesh)
        become(module, RowParallelLinear, name=place.name, enter=enter, leave=leave, share=share)


@dataclass(frozen=True, kw_only=True, repr=False)
class PrepareModuleInput(Style):
    """A block's first input crosses the border once: whole, or a shard of the sequence that becomes whole."""

    input_layouts: Placement = WHOLE

    def region(self, mesh: Mesh) -> Region:
        return Region(mesh, border(self.input_layouts, Replicate(), mesh), self.input_layouts.is_shard())

    def change(self, module: nn.Module, place: Place) -> None:
        become(module, Prepared, region=place.region)


@dataclass(frozen=True, repr=False)
class SequenceParallel(Style):
    """A module without a border, that each rank uses on a shard: a norm, a dropout."""

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        if next(module.children(), None):
            raise ValueError(f"{name!r} ({type(module).__name__}) has modules in it: give SequenceParallel() to each")
        return {}

    def change(self, module: nn.Module, place: Place) -> None:
        become(module, OnShards, mesh=place.mesh)


@dataclass(frozen=True, repr=False)
class LossParallel(Style):
    """The GPT's loss, of logits that are split by the vocabulary."""

    vocabulary: int

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_kind(self, name, module, CrossEntropy)
        return {}

    def change(self, module: nn.Module, place: Place) -> None:
        become(module, VocabParallelCrossEntropy, vocabulary=self.vocabulary, mesh=place.mesh)


def border(source: Placement, target: Placement, mesh: Mesh) -> Border:
    """The one that leads into a split layer (to Replicate()), or out of it (from Partial())."""
    match source, target:
        case Replicate(), Replicate():
            return partial(copy, mesh=mesh)
        case Shard(dim), Replicate():
            return partial(gather, mesh=mesh, dim=dim)
        case Partial(), Replicate():
            return partial(reduce, mesh=mesh)
        case Partial(), Shard(dim):
            return partial(scatter, mesh=mesh, dim=dim)
    raise ValueError(f"from {source!r} to {target!r} there is no border of a split layer (labs.conjugate has them)")


def same(x: Tensor) -> Tensor:
    return x


def is_whole(layout: Placement) -> bool:
    return layout.is_replicate()


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """From now on the module is of this kind, which derives from its own class or is laid over it."""
    own = type(module)
    module.__class__ = kind if issubclass(kind, own) else type(f"{kind.__name__}{own.__name__}", (kind, own), {})
    vars(module).update(attributes)


def require_kind(style: Any, name: str, module: nn.Module, *kinds: type[nn.Module]) -> None:
    if type(module) not in kinds:
        fits = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{type(style).__name__} fits {fits}, and {name!r} is of type {type(module).__name__}")
