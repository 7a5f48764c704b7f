"""The borders of a split layer: the collectives that a tensor needs there in forward, and its gradient in backward.

Inside a split layer, each rank computes with its own part of the weights.  So the input must be whole, and the output
is either a piece of the result or a summand of it.  Each border is a pair of moves of `labs.dtensor.redistribute`, one
for a tensor and one for its gradient:

    border     a tensor goes from, to         its gradient from, to          sends forward     backward
    copy       Replicate()   Replicate()      Partial()      Replicate()     -                 all_reduce
    reduce     Partial()     Replicate()      Replicate()    Replicate()     all_reduce        -
    gather     Shard(dim)    Replicate()      Partial()      Shard(dim)      all_gather        reduce_scatter
    scatter    Partial()     Shard(dim)       Shard(dim)     Replicate()     reduce_scatter    all_gather
    join       Shard(dim)    Replicate()      Replicate()    Shard(dim)      all_gather        -
    split      Replicate()   Shard(dim)       Shard(dim)     Replicate()     -                 all_gather
    once       Replicate()   Replicate()      Replicate()    Partial()       -                 -

`copy` and `reduce` are conjugate: each does in forward what the other does in backward.  `gather` and `scatter` are
conjugate, too, and together send as many bytes as `copy` and `reduce`, since an all-reduce is a reduce-scatter and an
all-gather.  `join` and `split` are the third conjugate pair.

Why does `copy` send anything?  Every rank used the whole x, but only for its own part of the weights, so each rank has
only a summand of the gradient.  The backward of `join` sends nothing: the operations after it are the same on every
rank, and so is the gradient.  The backward of `gather` adds up the ranks' gradients.  Operations that all ranks do
alike have the same gradient on each rank, which must count once: so `once` goes before them, if other operations follow
the same `gather`.

Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3, which calls copy f and reduce g; Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2, for sequences.
"""

from typing import Any

import torch
from torch import Tensor

from labs.dtensor import Partial, Placement, Replicate, Shard
from labs.dtensor.redistribute import MOVES, Line
from labs.mesh import Mesh, smaller_group

Way = tuple[Placement, Placement]


def copy(x: Tensor, mesh: Mesh, among: int | None = None) -> Tensor:
    """Pass a whole x into a split layer, and add up its gradient over the ranks in backward.

    among: the number of neighbours over which the gradient is added up; all ranks by default.
    """
    ranks = mesh.size() if among is None else among
    if ranks == 1:
        return x
    group = mesh.get_group() if ranks == mesh.size() else smaller_group(mesh, ranks)
    neighbours = Line(tuple(x.shape), ranks, mesh.get_local_rank() % ranks, group)
    return Border.apply(x, neighbours, (Replicate(), Replicate()), (Partial(), Replicate()))


def reduce(x: Tensor, mesh: Mesh) -> Tensor:
    """Add up the summands that come out of a split layer."""
    return Border.apply(x, line(x, mesh), (Partial(), Replicate()), (Replicate(), Replicate()))


def gather(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """Gather shards of x, and pass the whole into a split layer."""
    dim %= x.ndim
    return Border.apply(x, line(x, mesh, dim), (Shard(dim), Replicate()), (Partial(), Shard(dim)))


def scatter(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """Add up the summands that come out of a split layer, and return this rank's shard of the sum.

    Raises ValueError if the size of `dim` is not divisible by the number of ranks.
    """
    dim %= x.ndim
    require_equal_shards(x, mesh, dim)
    return Border.apply(x, line(x, mesh), (Partial(), Shard(dim)), (Shard(dim), Replicate()))


def join(x: Tensor, mesh: Mesh, dim: int, size: int | None = None) -> Tensor:
    """Gather shards for operations that all ranks do alike; size: the whole dim's size, if shards are uneven."""
    dim %= x.ndim
    return Border.apply(x, line(x, mesh, dim, size), (Shard(dim), Replicate()), (Replicate(), Shard(dim)))


def split(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """Return this rank's shard of an x that all ranks have."""
    dim %= x.ndim
    return Border.apply(x, line(x, mesh), (Replicate(), Shard(dim)), (Shard(dim), Replicate()))


def once(x: Tensor, mesh: Mesh) -> Tensor:
    """Pass a whole x into operations that all ranks do alike, while split layers use the same x."""
    return Border.apply(x, line(x, mesh), (Replicate(), Replicate()), (Replicate(), Partial()))


class Border(torch.autograd.Function):
    """The autograd function of a border; its backward is the border with both moves exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, forward: Way, backward: Way) -> Tensor:
        ctx.line, ctx.ways = line, (backward, forward)
        return move(x, line, *forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Border.apply(gradient, ctx.line, *ctx.ways), None, None, None


def move(x: Tensor, line: Line, source: Placement, target: Placement) -> Tensor:
    if line.ranks == 1:
        return x.clone()
    if source == target:
        return x.view_as(x)
    moved = MOVES[type(source), type(target)].move(x, line, source, target)
    # The result may be a view, which autograd would not let a model change in place; _unsafe_view returns no view.
    return torch.ops.aten._unsafe_view(moved, moved.shape)


def line(x: Tensor, mesh: Mesh, sharded: int | None = None, size: int | None = None) -> Line:
    """Return the ranks of a mesh with one axis as a Line, with the shape of the whole tensor.

    sharded: the dim along which x is a shard, or None if x is whole.
    size: the size of the whole dim; by default, that of the shard times the number of ranks.
    """
    shape = list(x.shape)
    if sharded is not None:
        shape[sharded] = size or shape[sharded] * mesh.size()
    return Line(tuple(shape), mesh.size(), mesh.get_local_rank(), mesh.get_group())


def require_equal_shards(x: Tensor, mesh: Mesh, dim: int) -> None:
    size, ranks = x.shape[dim], mesh.size()
    if size % ranks:
        fits = size - size % ranks
        raise ValueError(
            f"{size} positions (dim {dim} of {tuple(x.shape)}) are not divisible by {ranks} ranks: use "
            f"{f'{fits} or ' if fits else ''}{fits + ranks}, or a plan without sequence parallelism"
        )
