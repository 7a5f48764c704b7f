"""The modules of a split transformer: classes that `labs.tp` gives to modules, which hold parts of parameters.

    ColumnParallelLinear        takes the whole x, returns a piece of the features
    RowParallelLinear           takes a piece of the features, returns a summand; the bias is added once, after the sum
    VocabParallelEmbedding      takes tokens, returns a summand
    VocabParallelCrossEntropy   takes a piece of the logits, returns the loss
    Prepared                    a block with one border for all column-parallel layers in it
    OnShards                    a norm or a dropout on shards: gradients are added up, random numbers differ

`enter` and `leave` are borders of `labs.tp.conjugate`: x is whole outside of them and split inside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs.mesh import Mesh
from labs.model import CrossEntropy
from labs.tp import vocabulary
from labs.tp.conjugate import copy, gather, join, once, reduce, split
from labs.tp.first_step import FirstStep
from labs.tp.parameter_cuts import Cut

Border = Callable[[Tensor], Tensor]


class Watched:
    """A border of labs.tp.conjugate in the first step, which compares tensors that must be equal on all ranks there."""

    def __init__(self, border: Border, name: str, first_step: FirstStep):
        self.border, self.name, self.first_step = border, name, first_step

    def __call__(self, x: Tensor) -> Tensor:
        if self.border.func in (copy, split):
            self.first_step.takes_whole(self.name, x)
        if self.border.func is gather:
            self.first_step.takes_shard(self.name, x)
        y = self.border(x)
        if self.border.func in (reduce, join, once):
            self.first_step.gives_whole(self.name, y)
        return y


def unwatch(model: nn.Module) -> None:
    """Replace every watched border of a model by the border itself, after the first step."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            module.use = same
        for owner in (module, vars(module).get("region")):
            for name, value in vars(owner).items() if owner else ():
                if isinstance(value, Watched):
                    vars(owner)[name] = value.border


def same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Place:
    """The place at which a style is applied: a module's name, the mesh, and the region of the Prepared block around."""

    name: str
    mesh: Mesh
    region: "Region | None"
    first_step: FirstStep

    def watched(self, border: Border) -> Border:
        return Watched(border, self.name, self.first_step)


class ColumnParallelLinear(nn.Linear):
    """A Linear of which each rank computes a part of the outputs.

    in_parts: whether the input is a piece of its features, which `enter` gathers.
    """

    in_parts: bool
    name: str
    part: torch.Size
    use: Border
    region: "Region | None"
    enter: Border
    leave: Border
    mesh: Mesh
    cut: Cut

    def forward(self, input: Tensor) -> Tensor:
        require_part(self)
        if not self.in_parts:
            require_features(self, input, self.weight.shape[1], "all")
        weight, bias = (
            p if p is None else copy(self.use(p), self.mesh, self.cut.copies) for p in (self.weight, self.bias)
        )
        x = self.region.inside if self.region and input is self.region.given else self.enter(input)
        return self.leave(F.linear(x, weight, bias))


class RowParallelLinear(nn.Linear):
    """A Linear of which each rank has a part of the inputs, and computes a summand of all outputs.

    The bias is added once, after the sum.
    """

    name: str
    part: torch.Size
    use: Border
    enter: Border
    leave: Border
    share: Border
    cut: Cut

    def forward(self, input: Tensor) -> Tensor:
        require_part(self)
        x = self.enter(input)
        require_features(self, x, self.weight.shape[1], "this rank's part")
        y = self.leave(F.linear(x, self.use(self.weight)))
        if self.bias is None:
            return y
        require_uncut(self, y)
        return y + self.share(self.bias).to(y.dtype)  # autocast gives a linear's bias the dtype of its output


class VocabParallelEmbedding(nn.Embedding):
    """An Embedding of which each rank holds a part of the vocabulary."""

    name: str
    part: torch.Size
    use: Border
    leave: Border
    mesh: Mesh

    def forward(self, input: Tensor) -> Tensor:
        require_part(self)
        return self.leave(vocabulary.look_up(input, self.use(self.weight), self.num_embeddings, self.mesh))


class VocabParallelCrossEntropy(CrossEntropy):
    """A cross-entropy to which each rank passes the logits of its part of the vocabulary.

    Without targets, the module gathers and returns all logits.
    """

    vocabulary: int
    mesh: Mesh

    def forward(self, logits_BTv: Tensor, targets_BT: Tensor | None = None, over: float | None = None) -> Tensor:
        if targets_BT is None:
            return join(logits_BTv, self.mesh, -1, self.vocabulary)
        return vocabulary.cross_entropy(logits_BTv, targets_BT, self.vocabulary, self.mesh, over)


class Prepared(nn.Module):
    """A block whose first input crosses the border once, for all ColumnParallelLinears in it."""

    region: "Region"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = None if args else first_of(super().forward, kwargs)
        with self.region.around(args[0] if args else kwargs.get(name)) as x:
            return super().forward(x, *args[1:], **kwargs) if args else super().forward(**{**kwargs, name: x})


def first_of(function: Callable[..., Any], kwargs: dict[str, Any]) -> str | None:
    """Return the name in `kwargs` that comes first in the function's signature."""
    return next((name for name in [*signature(function).parameters, *kwargs] if name in kwargs), None)


class Region:
    """One forward of a Prepared block: its column-parallel layers share one border.

    given: the block's input x, as the modules in the block see it.
    inside: x after the border; a column-parallel layer computes with `inside` if its input is `given`, and uses a
        border of its own for any other input.
    aside: a border for all other uses of an x that was gathered from shards.
    """

    def __init__(self, name: str, border: Border, aside: Border | None):
        self.name, self.border, self.aside = name, border, aside
        self.given: Tensor | None = None
        self.inside: Tensor | None = None

    @contextmanager
    def around(self, x: Any) -> Iterator[Tensor]:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
            raise TypeError(f"{self.name!r} is prepared for a first input x that is split, and got {what}")
        self.inside = self.border(x)
        self.given = x if self.aside is None else self.aside(self.inside)
        try:
            yield self.given
        finally:
            self.given = self.inside = None


class OnShards(nn.Module):
    """A module used on other tokens or heads by each rank: gradients are added up, random numbers differ."""

    place: Place
    added_up: tuple[str, ...]  # names of its parameters; labs.zero may take them out later
    within = False  # whether its forward is running, which may call it again

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.within:
            return super().forward(*args, **kwargs)
        with copied(self, (args, kwargs)) if self.added_up else random_by_rank(self.place.mesh, self.training):
            return super().forward(*args, **kwargs)


@contextmanager
def copied(module: OnShards, given: Any) -> Iterator[None]:
    """Replace a module's parameters, inside this context, by copies whose backward adds up all ranks' gradients."""
    place, before = module.place, []
    for name in module.added_up:
        owner = vars(module) if name in vars(module) else module._parameters
        if (p := owner[name]) is not None:
            before.append((owner, name, p))
            owner[name] = mine = copy(p, place.mesh)
            place.first_step.takes_shards(f"{place.name}.{name}", given, mine)
    module.within = True
    try:
        yield
    finally:
        del module.within
        for owner, name, p in before:
            owner[name] = p


@contextmanager
def random_by_rank(mesh: Mesh, training: bool) -> Iterator[None]:
    """Let this rank draw its own random numbers, from a seed that all ranks draw, so that ranks stay in step."""
    if not training:
        yield
        return
    seed = torch.randint(2**48, (), device="cpu").item()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed * mesh.size() + mesh.get_local_rank())
        yield


# The classes of modules that have been split.
SPLIT = (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelCrossEntropy,
    Prepared,
    OnShards,
)


def require_part(module: Any) -> None:
    if module.weight.shape != module.part:
        raise ValueError(
            f"the weight of {module.name!r} was replaced by one of shape {tuple(module.weight.shape)}, and this rank's "
            f"part of it is {tuple(module.part)}: replace it before parallelize(), or by the part in labs.tp.slices"
        )


def require_features(module: Any, x: Tensor, features: int, which: str) -> None:
    if x.shape[-1] != features:
        raise ValueError(
            f"{module.name!r} ({type(module).__name__}) takes {which} of its {module.in_features} features, "
            f"{features}, and got {x.shape[-1]}: between columns and rows x stays in parts, elsewhere it is whole"
        )


def require_uncut(module: Any, y: Tensor) -> None:
    if y.shape[-1] != module.out_features:
        raise ValueError(
            f"{module.name!r} has a bias of {module.out_features} features, and its output is cut to {y.shape[-1]} of "
            "them: cut another dim, as in output_layouts=Shard(1)"
        )
