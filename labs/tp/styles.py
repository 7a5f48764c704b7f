"""Styles of a plan: the ways to split a module, and the borders (labs.tp.conjugate) that the split module gets.

Each style has the methods `cuts` and `change`.  `cuts` returns the cut of each of the module's parameters, and raises
ValueError for a module that the style does not fit.  `change` turns the module into one of `labs.tp.parallel_layers`.
`labs.tp.tp` has a table of the styles.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch import nn

from labs.dtensor import Partial, Placement, Replicate, Shard
from labs.mesh import Mesh, smaller_group
from labs.model import CrossEntropy
from labs.tp.conjugate import copy, gather, join, once, reduce, scatter, split
from labs.tp.parallel_layers import (
    Border,
    ColumnParallelLinear,
    OnShards,
    Place,
    Prepared,
    Region,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    same,
)
from labs.tp.parameter_cuts import Cut, Features, Keys, Queries

WHOLE, IN_FEATURES, BY_FEATURE = Replicate(), Shard(-1), Features()


OF_PYTORCH = {
    "use_local_output": "inputs and outputs are always plain tensors, this rank's",
    "desired_input_layouts": "a split layer takes x whole, or its part of the features",
    "desired_output_layouts": "give output_layouts to the last split layer in the block",
    "input_kwarg_layouts": "the first input crosses the border, even if it is passed by keyword",
}


class Style:
    """A way to split a module; its repr has the arguments that are not defaults."""

    def __new__(cls, *given: Any, **named: Any) -> "Style":
        takes = [each.name for each in fields(cls)]
        for name in named.keys() - takes:
            why = OF_PYTORCH.get(name, "other options of PyTorch's are not here")
            raise TypeError(f"{cls.__name__} has no {name}=: {why}; it takes {', '.join(takes) or 'nothing'}")
        return super().__new__(cls)

    def __repr__(self) -> str:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        words = [f"{name}={value!r}" for name, value in given if value != type(self).__dict__.get(name)]
        return f"{type(self).__name__}({', '.join(words)})"

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        return {}

    @property
    def takes_shards(self) -> bool:
        """Return whether the input is a shard of the sequence, or of features, that becomes whole."""
        layout = getattr(self, "input_layouts", WHOLE)
        return layout.is_shard() and not isinstance(self, RowwiseParallel)

    def change(self, module: nn.Module, place: Place) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class ColwiseParallel(Style):
    """A style that splits the outputs of a Linear.

    heads: heads of attention, if the outputs may be cut only between heads.
    parts: the number of matrices that are fused in the Linear, as in q|k|v.
    """

    input_layouts: Placement = WHOLE
    output_layouts: Placement = IN_FEATURES
    heads: Queries | Keys | Features = BY_FEATURE
    parts: int = 1

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_kind(self, name, module, nn.Linear)
        require_layouts(self, name, input_layouts=(Replicate, Shard), output_layouts=(Replicate, IN_FEATURES))
        if self.parts < 1 or module.out_features % self.parts:
            raise ValueError(f"{name!r} has {module.out_features} outputs, not {self.parts} parts of one size")
        cut = replace(self.heads.cut(module.out_features // self.parts, 0, ranks), parts=self.parts)
        if self.output_layouts.is_replicate() and cut != BY_FEATURE.cut(module.out_features, 0, ranks):
            raise ValueError(f"{name!r} is cut by heads or parts, and its output becomes whole: leave these two out")
        return {"weight": cut} | ({"bias": cut} if module.bias is not None else {})

    def change(self, module: nn.Module, place: Place) -> None:
        mesh = place.mesh
        own_border = partial(copy, mesh=mesh) if place.region else border(self.input_layouts, Replicate(), mesh)
        enter, leave = place.watched(own_border), same
        if self.output_layouts.is_replicate():
            leave = place.watched(partial(join, mesh=mesh, dim=-1, size=module.out_features))
        cut = self.cuts(place.name, module, mesh.size())["weight"]
        if 1 < cut.copies < mesh.size():
            smaller_group(mesh, cut.copies)  # all ranks must create a group, and all are here
        borders = {
            "region": place.region,
            "enter": enter,
            "leave": leave,
            "in_parts": self.input_layouts == IN_FEATURES,
        }
        become(module, ColumnParallelLinear, **own(module, place), **borders, mesh=mesh, cut=cut)


@dataclass(frozen=True, kw_only=True, repr=False)
class RowwiseParallel(Style):
    """A style that splits the inputs of a Linear, or the vocabulary of an Embedding.

    heads: heads of attention, if the inputs may be cut only between heads.
    """

    input_layouts: Placement = IN_FEATURES
    output_layouts: Placement = WHOLE
    heads: Queries | Features = BY_FEATURE

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_kind(self, name, module, nn.Linear, nn.Embedding)
        require_layouts(self, name, input_layouts=(Replicate, IN_FEATURES), output_layouts=(Replicate, Shard))
        if isinstance(module, nn.Linear):
            return {"weight": self.heads.cut(module.in_features, 1, ranks)}
        without = {"padding_idx": None, "max_norm": None, "sparse": False, "scale_grad_by_freq": False}
        for option, off in without.items():
            if getattr(module, option) != off:
                raise ValueError(
                    f"{name!r} is an Embedding with {option}, which has no split form here: leave it whole"
                )
        return {"weight": self.heads.cut(module.num_embeddings, 0, ranks)}

    def change(self, module: nn.Module, place: Place) -> None:
        leave = place.watched(border(Partial(), self.output_layouts, place.mesh))
        if isinstance(module, nn.Embedding):
            become(module, VocabParallelEmbedding, **own(module, place), leave=leave, mesh=place.mesh)
            return
        whole = self.input_layouts.is_replicate()
        enter = place.watched(partial(split, mesh=place.mesh, dim=-1)) if whole else same
        share = same if self.output_layouts.is_replicate() else partial(copy, mesh=place.mesh)
        cut = self.heads.cut(module.in_features, 1, place.mesh.size())
        become(module, RowParallelLinear, **own(module, place), enter=enter, leave=leave, share=share, cut=cut)


@dataclass(frozen=True, kw_only=True, repr=False)
class PrepareModuleInput(Style):
    """A style of a block whose first input, whole or a shard that becomes whole, crosses the border once."""

    input_layouts: Placement = WHOLE

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_layouts(self, name, input_layouts=(Replicate, Shard))
        return {}

    def region(self, place: Place) -> Region:
        aside = place.watched(partial(once, mesh=place.mesh)) if self.input_layouts.is_shard() else None
        return Region(place.name, place.watched(border(self.input_layouts, Replicate(), place.mesh)), aside)

    def change(self, module: nn.Module, place: Place) -> None:
        become(module, Prepared, region=place.region)


@dataclass(frozen=True, repr=False)
class SequenceParallel(Style):
    """A style of a module that each rank uses on its own shard of the sequence, such as a norm or a dropout."""

    takes_shards = True

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        if next(module.children(), None):
            raise ValueError(f"{name!r} ({type(module).__name__}) has modules in it: give SequenceParallel() to each")
        return {}

    def change(self, module: nn.Module, place: Place) -> None:
        become(module, OnShards, place=place, added_up=tuple(name for name, _ in module.named_parameters()))


@dataclass(frozen=True, repr=False)
class LossParallel(Style):
    """A style of the GPT's loss, for logits that are split by the vocabulary."""

    vocabulary: int

    def cuts(self, name: str, module: nn.Module, ranks: int) -> dict[str, Cut]:
        require_kind(self, name, module, CrossEntropy)
        return {}

    def change(self, module: nn.Module, place: Place) -> None:
        become(module, VocabParallelCrossEntropy, vocabulary=self.vocabulary, mesh=place.mesh)


def border(source: Placement, target: Placement, mesh: Mesh) -> Border:
    """Return the border that leads into a split layer, to Replicate(), or out of it, from Partial()."""
    match source, target:
        case Replicate(), Replicate():
            return partial(copy, mesh=mesh)
        case Shard(dim), Replicate():
            return partial(gather, mesh=mesh, dim=dim)
        case Partial(), Replicate():
            return partial(reduce, mesh=mesh)
        case Partial(), Shard(dim):
            return partial(scatter, mesh=mesh, dim=dim)
    raise ValueError(f"from {source!r} to {target!r} there is no border of a split layer: see labs.tp.conjugate")


def own(module: nn.Module, place: Place) -> dict[str, Any]:
    return {"name": place.name, "part": module.weight.shape, "use": place.first_step.parts.use}


def become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change a module's class to `kind`, or to a new class of `kind` and its own class; set attributes."""
    own = type(module)
    module.__class__ = kind if issubclass(kind, own) else type(f"{kind.__name__}{own.__name__}", (kind, own), {})
    vars(module).update(attributes)


def require_kind(style: Any, name: str, module: nn.Module, *kinds: type[nn.Module]) -> None:
    if type(module) not in kinds:
        fits = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{type(style).__name__} fits {fits}, and {name!r} is of type {type(module).__name__}")


def require_layouts(style: Style, name: str, **ends: tuple[Any, ...]) -> None:
    """Raise ValueError for a layout that the style does not have; ends: allowed placements or classes, by argument."""
    for end, fits in ends.items():
        layout = getattr(style, end)
        if layout not in fits and type(layout) not in fits:
            words = {Replicate: "Replicate()", Shard: "Shard(dim)", IN_FEATURES: "Shard(-1)"}
            give = " or ".join(words[fit] for fit in fits)
            raise ValueError(f"{name!r} has {type(style).__name__}({end}={layout!r}): give {give}, of labs.dtensor")
