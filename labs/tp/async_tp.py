"""Overlap of gather and matrix product: x is multiplied in chunks, each chunk while the next one is in flight.

Under sequence parallelism, a split layer begins with an all-gather, for which its matrix products wait.  The layer ends
with a reduce-scatter, which waits for the last product.  But the product of one rank's tokens needs no other rank's
tokens. So the shards of x go round the ring one by one, and each shard is multiplied while the next one is in flight:

    gather_linear     shards of x go round; each rank multiplies the one that it has:   y = gather(x) @ weight.T
    linear_scatter    sums go round; each rank adds the product of its own part:        y = scatter(x @ weight.T)

    rank 1 of 4       step 0          step 1          step 2          step 3
    multiplies        x1              x0              x3              x2
    receives          x0              x3              x2

The backward of gather_linear works like the forward of linear_scatter, and the other way round: the gradient of a
gathered tensor is a sum that goes round, and the gradient of a scattered tensor goes round to be multiplied.  x is
gathered again for the weight's gradient, so that only its shard is kept.  Both functions send as many bytes as gather
and scatter of `labs.tp.conjugate`, in N - 1 messages.

The overlap pays if a chunk takes about as long to multiply as to send; on small chunks a GPU works less efficiently.
In PyTorch, torch.compile applies this overlap to a plan, under the name async tensor parallelism.  Source: Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from labs.mesh import Mesh


def gather_linear(x_BtD: Tensor, weights: list[Tensor], mesh: Mesh) -> tuple[Tensor, ...]:
    """Return the product of the whole sequence with each of this rank's weights [f, D]: [B, T, f] each; t = T / N."""
    return GatherLinear.apply(x_BtD, mesh, *weights)


def linear_scatter(x_BTf: Tensor, weight_Df: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's shard, along the sequence, of the sum of all ranks' products: [B, t, D]; t = T / N.

    Raises ValueError if N does not divide T.
    """
    if x_BTf.shape[1] % mesh.size():
        raise ValueError(f"{x_BTf.shape[1]} positions are not divisible by {mesh.size()} ranks")
    return LinearScatter.apply(x_BTf, weight_Df, mesh)


class GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        ctx.save_for_backward(x, *weights)
        products = [x.new_empty(len(x), mesh.size(), x.shape[1], len(weight)) for weight in weights]
        for place, chunk in going_round(x, mesh):
            for product, weight in zip(products, weights, strict=True):
                product[:, place] = chunk @ weight.T
        return tuple(product.flatten(1, 2) for product in products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        chunks = [gradient.unflatten(1, (ctx.mesh.size(), -1)) for gradient in gradients]
        of_weights = [torch.zeros_like(weight) for weight in weights]
        for place, chunk in going_round(x, ctx.mesh):
            for of_weight, gradient in zip(of_weights, chunks, strict=True):
                of_weight += gradient[:, place].flatten(0, 1).T @ chunk.flatten(0, 1)

        def product(place: int) -> Tensor:
            return sum(gradient[:, place] @ weight for gradient, weight in zip(chunks, weights, strict=True))

        return sum_going_round(product, x, ctx.mesh), None, *of_weights


class LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        ctx.save_for_backward(x, weight)
        chunks = x.unflatten(1, (mesh.size(), -1))
        shard = x.new_empty(len(x), chunks.shape[2], len(weight))
        return sum_going_round(lambda place: chunks[:, place] @ weight.T, shard, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        chunks, of_weight = x.unflatten(1, (ctx.mesh.size(), -1)), torch.zeros_like(weight)
        of_x = torch.empty_like(chunks)
        for place, chunk in going_round(gradient, ctx.mesh):
            of_x[:, place] = chunk @ weight
            of_weight += chunk.flatten(0, 1).T @ chunks[:, place].flatten(0, 1)
        return of_x.flatten(1, 2), of_weight, None


def going_round(mine: Tensor, mesh: Mesh) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its shard) for all ranks, this rank first; the next shard is in flight while the caller uses one."""
    rank, ranks, shard = mesh.get_local_rank(), mesh.size(), mine.contiguous()
    for step in range(ranks):
        coming = torch.empty_like(shard)
        works = exchange(mesh, send=shard, receive=coming) if step < ranks - 1 else []
        yield (rank - step) % ranks, shard
        for work in works:
            work.wait()
        shard = coming


def sum_going_round(part: Callable[[int], Tensor], like: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's shard of a sum over all ranks, of the shape of `like`.

    The sum for a rank's shard starts at the next rank of the ring, and passes through all other ranks; while it is in
    flight, its receiver computes a summand.

    part: a function that returns this rank's summand of rank r's shard.
    """
    rank, ranks, works, total = mesh.get_local_rank(), mesh.size(), [], None
    for step in range(ranks):
        coming = torch.empty_like(like) if total is not None else None
        works = exchange(mesh, send=total, receive=coming) if total is not None else []
        mine = part((rank - step - 1) % ranks)
        for work in works:
            work.wait()
        total = (mine if coming is None else mine.add_(coming)).contiguous()
    return total


def exchange(mesh: Mesh, send: Tensor, receive: Tensor) -> list[dist.Work]:
    """Start to send to the next rank of the ring and to receive from the rank before; return the works to wait for."""
    rank, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    posts = [
        dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % ranks),
        dist.P2POp(dist.irecv, receive, group=group, group_peer=(rank - 1) % ranks),
    ]
    return dist.batch_isend_irecv(posts)
