"""The borders of a split layer: what crosses them forward, and what its gradient does backward.

Inside a split layer each rank computes with its own part of the weights.  So what goes in must be whole, and what comes
out is either a piece of the result or a summand of it.  Each border is a pair of moves of `labs.dtensor.redistribute`,
one for a tensor and one for its gradient:

    border     a tensor goes from, to         its gradient from, to          sends forward     backward
    copy       Replicate()   Replicate()      Partial()      Replicate()     -                 all_reduce
    reduce     Partial()     Replicate()      Replicate()    Replicate()     all_reduce        -
    gather     Shard(dim)    Replicate()      Partial()      Shard(dim)      all_gather        reduce_scatter
    scatter    Partial()     Shard(dim)       Shard(dim)     Replicate()     reduce_scatter    all_gather
    join       Shard(dim)    Replicate()      Replicate()    Shard(dim)      all_gather        -
    split      Replicate()   Shard(dim)       Shard(dim)     Replicate()     -                 all_gather
    once       Replicate()   Replicate()      Replicate()    Partial()       -                 -

`copy` and `reduce` are conjugate: each does forward what the other does backward.  So are `gather` and `scatter`, which
send as much, since an all-reduce is a reduce-scatter and an all-gather; and `join` and `split`.

Why `copy` sends anything at all: every rank used the whole x, but only for its own part of the weights, and so has only
a summand of its gradient.  A `join` has none of this: all that follows it is the same on every rank, and so is the
gradient that comes back.  Where both kinds of use follow one `gather`, whose backward adds up, `once` stands before the
second kind: of a gradient that all ranks have, only one rank's counts.

Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (f and g); Korthikanti et al. 2022, arXiv 2205.05198, section
4.2 (g and its conjugate for sequences).
"""

from typing import Any

import torch
from torch import Tensor

from labs.dtensor import Partial, Placement, Replicate, Shard
from labs.dtensor.redistribute import MOVES, Line
from labs.mesh import Mesh, smaller_group

Way = tuple[Placement, Placement]


def copy(x: Tensor, mesh: Mesh, among: int | None = None) -> Tensor:
    """A whole x goes into a split layer; among: over this many neighbours, if not over all ranks."""
    ranks = mesh.size() if among is None else among
    if ranks == 1:
        return x
    group = mesh.get_group() if ranks == mesh.size() else smaller_group(mesh, ranks)
    neighbours = Line(tuple(x.shape), ranks, mesh.get_local_rank() % ranks, group)
    return Border.apply(x, neighbours, (Replicate(), Replicate()), (Partial(), Replicate()))


def reduce(x: Tensor, mesh: Mesh) -> Tensor:
    """Summands come out of a split layer, and their sum goes on."""
    return Border.apply(x, line(x, mesh), (Partial(), Replicate()), (Replicate(), Replicate()))


def gather(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """Shards of x are put together, and go into a split layer."""
    dim %= x.ndim
    return Border.apply(x, line(x, mesh, dim), (Shard(dim), Replicate()), (Partial(), Shard(dim)))


def scatter(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """Summands come out of a split layer, and each rank goes on with a shard of their sum.

    Raises ValueError for a dim that the ranks cannot share equally.
    """
    dim %= x.ndim
    require_equal_shards(x, mesh, dim)
    return Border.apply(x, line(x, mesh), (Partial(), Shard(dim)), (Shard(dim), Replicate()))


def join(x: Tensor, mesh: Mesh, dim: int, size: int | None = None) -> Tensor:
    """Shards become whole for what all ranks do alike; size: of the whole dim, where shards are uneven."""
    dim %= x.ndim
    return Border.apply(x, line(x, mesh, dim, size), (Shard(dim), Replicate()), (Replicate(), Shard(dim)))


def split(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """All ranks have the same x, and each goes on with a shard of it."""
    dim %= x.ndim
    return Border.apply(x, line(x, mesh), (Replicate(), Shard(dim)), (Shard(dim), Replicate()))


def once(x: Tensor, mesh: Mesh) -> Tensor:
    """A whole x that split layers use, too, goes into what all ranks do alike."""
    return Border.apply(x, line(x, mesh), (Replicate(), Replicate()), (Replicate(), Partial()))


class Border(torch.autograd.Function):
    """Its gradient crosses a border, too, and the gradient of that goes the way that the tensor went."""

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
    # It is nobody else's, but may be a view, which autograd would not let a model change in place: this is not one.
    return torch.ops.aten._unsafe_view(moved, moved.shape)


def line(x: Tensor, mesh: Mesh, sharded: int | None = None, size: int | None = None) -> Line:
    """The ranks of a mesh of one axis, and the shape of what they have between them; of x, if that is not a shard."""
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
