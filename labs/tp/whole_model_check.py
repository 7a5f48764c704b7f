"""A comparison of a split model's first forward with the whole model's: results equal on all ranks may be wrong.

Between a column-parallel layer and the next row-parallel one, each rank has some of the features.  An operation between
them that works on each feature by itself is right.  An operation between them that needs all features is wrong, without
an error: a fused matrix whose output is cut in three, a fixed number of heads, a norm or a softmax over features.

So after the first forward of a training, each rank runs the model twice more, in evaluation mode and without a
graph: once as it is split, and once with all features, which are gathered after each column-parallel layer and cut
again before each row-parallel one.  The outputs of the row-parallel layers must be equal in both runs, up to rounding.
No weight is sent, and no rank multiplies a whole matrix.

Some models are not compared: a model that draws random numbers in evaluation mode, a model whose input is a shard, and
a model that cannot run whole, since the number of its heads was divided by hand.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from labs.agree import Some, everybodys
from labs.hooks import tensors_in
from labs.mesh import Mesh
from labs.tp import vocabulary
from labs.tp.conjugate import reduce
from labs.tp.first_step import random_states
from labs.tp.parallel_layers import (
    SPLIT,
    ColumnParallelLinear,
    OnShards,
    Prepared,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from labs.tp.parameter_cuts import Features

ANOTHER_RESULT = (
    "{name} is not what the whole model has there: in front of it each rank has some of the features (in shards, some "
    "of the tokens), and an operation takes them for all. Cut a fused matrix by its parts (ColwiseParallel(parts=3)), "
    "and attention between heads (heads=Queries(...), with -1 for their number in view()); an operation that needs all "
    "features, as a norm or a softmax over them, gets them from ColwiseParallel(output_layouts=Replicate())"
)
SOFTMAX = (
    "the loss takes a softmax over the model's output, of which each rank has a piece of {features} features, so that "
    "each has a loss of its own (F.cross_entropy outside of the model?): make the output whole "
    "(output_layouts=Replicate() of the last ColwiseParallel()), or give the model's own loss LossParallel()"
)

Forward = Callable[..., Any]


def compare(model: nn.Module, mesh: Mesh, args: Any, kwargs: Any, output: Any) -> None:
    """Raise RuntimeError, on every rank, if the split model computes another result than the whole model."""
    split, whole = WholeRun(), WholeRun()
    try:
        with at_rest(model):
            split.go(model, args, kwargs, split.noting)
            whole.go(model, args, kwargs, partial(whole.as_whole, mesh=mesh, split=split))
    except Exception:  # the rest cannot be compared; the model's own errors were raised before
        pass
    everyones = everybodys(whole.difference(split), mesh.get_group()).values()
    if found := [difference for difference in everyones if difference]:
        raise RuntimeError(ANOTHER_RESULT.format(name=found[0]))
    for x, mine, all_of_it in zip(tensors_in(output, set()), split.outputs, whole.outputs, strict=False):
        if x.requires_grad and x.ndim and mine.shape[-1] < all_of_it.shape[-1]:
            x.register_hook(partial(require_no_softmax, mesh, all_of_it.shape[-1]))


class WholeRun:
    """One run of the model: some numbers of each row-parallel layer's output, in order, and the model's outputs."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, torch.Size, Some | None]] = []
        self.outputs: list[Tensor] = []

    def go(self, model: nn.Module, args: Any, kwargs: Any, other: Callable[[nn.Module], Forward]) -> None:
        """Run the model once, with other forwards of its split modules.

        other: a function that returns the forward to use for a module.
        """
        args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
        own = {module: vars(module).get("forward") for module in model.modules() if isinstance(module, SPLIT)}
        before = random_states()
        try:
            for module in own:
                module.forward = other(module)
            outputs = tensors_in(model(*args, **kwargs), set())
        finally:
            for module, forward in own.items():
                del module.forward
                if forward is not None:
                    module.forward = forward
        if not all(map(torch.equal, before, random_states())):
            self.rows.clear()
            raise RuntimeError("random numbers were drawn, other ones in each run")
        self.outputs = outputs

    def noting(self, module: nn.Module) -> Forward:
        usual = type(module).forward.__get__(module)
        if not isinstance(module, RowParallelLinear):
            return usual

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            y = usual(*args, **kwargs)
            self.rows.append((module.name, y.shape, Some.of(y)))
            return y

        return forward

    def as_whole(self, module: Any, mesh: Mesh, split: "WholeRun") -> Forward:
        def column(input: Tensor) -> Tensor:
            y = F.linear(input, module.weight, module.bias)
            return replace(module.cut, dim=y.ndim - 1).whole(y, mesh)

        def row(input: Tensor) -> Tensor:
            x = input
            shape = split.rows[len(self.rows)][1]
            if x.shape[-1] != module.in_features:
                self.rows.append((module.name, shape, None))
                raise ValueError("no column-parallel layer has made it")
            mine = replace(module.cut, dim=x.ndim - 1).part(x, mesh.get_local_rank())
            y = reduce(F.linear(mine, module.weight), mesh)
            y = y if module.bias is None else y + module.bias.to(y.dtype)
            self.rows.append((module.name, shape, Some.of(shard(y, shape, mesh))))
            return y

        def embedding(input: Tensor) -> Tensor:
            return reduce(vocabulary.look_up(input, module.weight, module.num_embeddings, mesh), mesh)

        def loss(logits: Tensor, targets: Tensor | None = None, over: float | None = None) -> Tensor:
            if targets is None:
                return logits
            mine = Features().cut(logits.shape[-1], logits.ndim - 1, mesh.size()).part(logits, mesh.get_local_rank())
            return vocabulary.cross_entropy(mine, targets, module.vocabulary, mesh, over)

        kinds = {
            ColumnParallelLinear: column,
            RowParallelLinear: row,
            VocabParallelEmbedding: embedding,
            VocabParallelCrossEntropy: loss,
        }
        laid_over = next((kind for kind in (Prepared, OnShards) if isinstance(module, kind)), None)
        if laid_over:
            return super(laid_over, module).forward
        return next(forward for kind, forward in kinds.items() if isinstance(module, kind))

    def difference(self, split: "WholeRun") -> str | None:
        """Return, in words, the first layer at which two runs differ, or None."""
        for (name, shape, mine), (other, _, its) in zip(self.rows, split.rows, strict=False):
            if name != other:
                return None  # the runs went through different layers and cannot be compared
            if mine != its:
                return f"what {name!r} makes of {tuple(shape)}"
        return None


def shard(y: Tensor, shape: torch.Size, mesh: Mesh) -> Tensor:
    """Return this rank's shard of a whole y; shape: the shard's shape."""
    for dim, size in enumerate(shape):
        if size != y.shape[dim]:
            y = y.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return y


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Let the model run in evaluation mode, without a graph or warnings; restore its state afterwards."""
    trained = [module for module in model.modules() if module.training]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings(action="ignore"):
        try:
            for module in trained:
                module.training = False
            for module, own in buffers:
                module._buffers.update({name: None if x is None else x.clone() for name, x in own.items()})
            yield
        finally:
            for module in trained:
                module.training = True
            for module, own in buffers:
                module._buffers.clear()
                module._buffers.update(own)


def require_no_softmax(mesh: Mesh, features: int, gradient: Tensor) -> None:
    """Raise RuntimeError if each rank took a softmax over its piece of the features.

    A softmax does not change if its input is shifted, so the gradients of its inputs sum up to zero on every rank.
    """
    sums, sizes = gradient.sum(-1).abs().max(), gradient.abs().sum(-1).max()
    if all(everybodys((sizes > 0 and sums <= 1e-3 * sizes).item(), mesh.get_group()).values()):
        raise RuntimeError(SOFTMAX.format(features=features))
