"""The modules of a split transformer: what `labs.tp` makes of a model's own, each with the same parameters, in part.

    ColumnParallelLinear        all of x in, a piece of the features out
    RowParallelLinear           a piece of the features in, a summand out; the bias once, behind the sum
    VocabParallelEmbedding      tokens in, a summand out
    VocabParallelCrossEntropy   a piece of the logits in, the loss out
    Prepared                    a block: one border for all columns in it
    OnShards                    a norm or a dropout: gradients are added up, random numbers differ

Where x crosses from whole to split and back, is a border of `labs.conjugate`: `enter` and `leave`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs import vocabulary
from labs.conjugate import copy, join
from labs.mesh import Mesh
from labs.model import CrossEntropy

Border = Callable[[Tensor], Tensor]


class ColumnParallelLinear(nn.Linear):
    """Of the outputs, a rank computes its part.  copies: so many neighbours have the same part."""

    name: str
    enter: Border
    leave: Border
    mesh: Mesh
    copies: int

    def forward(self, x: Tensor) -> Tensor:
        require_features(self, x, self.weight.shape[1], "all")
        weight, bias = (p if p is None else copy(p, self.mesh, self.copies) for p in (self.weight, self.bias))
        return self.leave(F.linear(self.enter(x), weight, bias))


class RowParallelLinear(nn.Linear):
    """Of the inputs, a rank has its part, and computes what these add to all outputs.

    The bias comes once, behind the sum.
    """

    name: str
    enter: Border
    leave: Border
    share: Border

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        require_features(self, x, self.weight.shape[1], "this rank's part")
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.share(self.bias)


class VocabParallelEmbedding(nn.Embedding):
    """Of the vocabulary, a rank has its part."""

    leave: Border
    mesh: Mesh

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(vocabulary.look_up(tokens, self.weight, self.num_embeddings, self.mesh))


class VocabParallelCrossEntropy(CrossEntropy):
    """Of the logits, a rank has its part of the vocabulary; without targets they are put together."""

    vocabulary: int
    mesh: Mesh

    def forward(self, logits_BTv: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is None:
            return join(logits_BTv, self.mesh, -1, self.vocabulary)
        return vocabulary.cross_entropy(logits_BTv, targets_BT, self.vocabulary, self.mesh)


class Prepared(nn.Module):
    """A block whose first input crosses the border once, for all ColumnParallelLinears in it."""

    region: "Region"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = None if args else next(iter(kwargs))
        with self.region.around(args[0] if args else kwargs[name]) as x:
            return super().forward(x, *args[1:], **kwargs) if args else super().forward(**{**kwargs, name: x})


class Region:
    """One forward of a Prepared block.

    A whole x stays what it is for all but the columns, which share one copy.  A shard of the sequence becomes whole for
    all that is in the block.
    """

    def __init__(self, mesh: Mesh, border: Border, sequence: bool):
        self.mesh, self.border, self.sequence = mesh, border, sequence
        self.given: Tensor | None = None
        self.inside: Tensor | None = None

    @contextmanager
    def around(self, x: Tensor) -> Iterator[Tensor]:
        self.inside = self.border(x)
        self.given = self.inside if self.sequence else x
        try:
            yield self.given
        finally:
            self.given = self.inside = None

    def enter(self, x: Tensor) -> Tensor:
        """What a ColumnParallelLinear computes with: nothing else than the block's x has crossed its border."""
        if x is self.given:
            return self.inside
        return x if self.sequence else copy(x, self.mesh)


class OnShards(nn.Module):
    """Each rank has other tokens here (or heads): gradients of parameters are added up, random numbers differ."""

    mesh: Mesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with copied(self, self.mesh) if self._parameters else random_by_rank(self.mesh, self.training):
            return super().forward(*args, **kwargs)


@contextmanager
def copied(module: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Let the module find copies of its parameters, whose backward adds up all ranks' gradients."""
    before = {name: vars(module).get(name) for name in module._parameters}
    for name, p in module._parameters.items():
        if p is not None:
            vars(module)[name] = copy(getattr(module, name), mesh)
    try:
        yield
    finally:
        for name, shown in before.items():
            vars(module).pop(name, None)
            if shown is not None:
                vars(module)[name] = shown


@contextmanager
def random_by_rank(mesh: Mesh, training: bool) -> Iterator[None]:
    """Random numbers of this rank's own, from one that all ranks draw alike: so they stay in step."""
    if not training:
        yield
        return
    seed = torch.randint(2**48, (), device="cpu").item()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed * mesh.size() + mesh.get_local_rank())
        yield


def require_features(module: Any, x: Tensor, features: int, which: str) -> None:
    if x.shape[-1] != features:
        raise ValueError(
            f"{module.name!r} ({type(module).__name__}) takes {which} of its {module.in_features} features, "
            f"{features}, and got {x.shape[-1]}: between columns and rows x stays in parts, elsewhere it is whole"
        )
