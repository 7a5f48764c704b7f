"""Ring attention: each rank keeps its queries, and the keys and values of all ranks pass by.

A rank begins with its own keys and values.  In every step it attends to those that it has, sends them to the next rank,
and receives the previous rank's; after N steps it has seen all of them.  Here are 3 ranks, and whose keys each has:

    step    rank 0    rank 1    rank 2
    0       0         1         2
    1       2         0         1
    2       1         2         0

While a rank computes, the next keys and values are in flight.  A step merges its part of the softmax with the part so
far (`labs.cp.partial_softmax`), so no rank ever holds more than two pieces of others' keys and values.

In backward they go round once more, and their gradients travel with them, one step behind: whoever has a piece adds
its own part of that piece's gradients.  The gradients leave the first rank that is not their own in step 1, and after
the last step they are at home, where the own part is added.

A rank sends, for pieces of n elements of keys and values, (N - 1) n in forward and 2 (N - 1) n in backward.  Gradients
travel in float32 at least, so that their sum is rounded once.

Source: Liu, Zaharia and Abbeel 2023, arXiv 2310.01889.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.collectives import place
from labs.cp.partial_softmax import Output, attend, attend_backward, merge
from labs.cp.pieces import Pieces, Tokens


def ring_attention(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, pieces: Pieces, group: ProcessGroup | None = None
) -> Tensor:
    """Return causal attention to the keys and values of all ranks; keys and values go round.

    q, k, v: heads of this rank's tokens; each head of keys and values serves H / K heads of queries.
    """
    q_BKGTE = q_BHTE.unflatten(1, (k_BKTE.shape[1], -1))
    return RingAttention.apply(q_BKGTE, k_BKTE, v_BKTE, pieces, group).flatten(1, 2)


class RingAttention(torch.autograd.Function):
    """Attention in N steps, whose backward sends keys and values round again, with their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, group: ProcessGroup | None) -> Tensor:
        mine, pairs = pieces[place(group)[0]], passing_by(torch.stack((k, v)), pieces, group)
        output, logsumexp = reduce(merge, (attend(q, pair, mine, pieces[source]) for source, pair in pairs))
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.pieces, ctx.group = pieces, group
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        pieces, group, (rank, _) = ctx.pieces, ctx.group, place(ctx.group)
        whole, pairs = Output.of(output, logsumexp, gradient), passing_by(torch.stack((k, v)), pieces, group)
        dq, own = attend_backward(q, next(pairs)[1], whole, pieces[rank], pieces[rank])
        arrived = None
        for source, pair in pairs:
            dq_part, part = attend_backward(q, pair, whole, pieces[rank], pieces[source])
            dq += dq_part
            if arrived:
                part += arrived()
            arrived = pass_on(part, pieces[source - 1], group)
        if arrived:
            own += arrived()
        return dq.to(q.dtype), *own.to(k.dtype), None, None


def passing_by(pair: Tensor, pieces: Pieces, group: ProcessGroup | None) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number, and its keys and values, this rank's first; the next are in flight meanwhile."""
    rank, ranks = place(group)
    for step in range(ranks - 1):
        source = (rank - step) % ranks
        arrived = pass_on(pair, pieces[source - 1], group)
        yield source, pair
        pair = arrived()
    yield (rank + 1) % ranks, pair


def pass_on(x: Tensor, theirs: Tokens, group: ProcessGroup | None) -> Callable[[], Tensor]:
    """Send x to the next rank, and return a function that waits for the previous rank's and returns it.

    x: keys and values, or their gradients [2, B, K, T, E]; it must not change before the function has returned.
    theirs: the tokens of what the previous rank sends.
    """
    rank, ranks = place(group)
    received = x.new_empty(*x.shape[:3], len(theirs.places), x.shape[4])
    # Send and receive are posted together: on NCCL, ranks that all sent first would wait for ever.
    posts = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
    ]
    works = dist.batch_isend_irecv(posts)

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return received

    return arrived
