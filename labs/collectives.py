"""Collectives, written with send and receive alone.

A collective is a program that every rank of a group runs at the same moment.  Each collective in this file is written
with `isend` and `irecv`, in an algorithm that has a name.  The table shows how many elements rank r of N ranks sends,
for a tensor of n elements.
A tensor is cut into N pieces as `tensor_split` cuts it: as evenly as possible, the longer pieces first; c_i is the size
of piece i, indices modulo N.

    collective             algorithm                rounds            elements that rank r sends
    broadcast              binomial tree            ceil(log2 N)      n to each of its children
    reduce                 the same tree, upwards   ceil(log2 N)      n, the root nothing
    reduce_scatter         ring                     N - 1             n - c_r
    all_gather             ring                     N - 1             n - c_(r+1)
    all_reduce             reduce_scatter, then     2 (N - 1)         2n - c_r - c_(r+1)
                           all_gather
    all_reduce_doubling    recursive doubling       log2 N            n log2 N (if N is a power of 2)
    all_to_all             pairwise exchange        N - 1             all but the piece that it keeps
    barrier                dissemination            ceil(log2 N)      1 per round

The ring sends the fewest elements that an all-reduce can send, 2 (N-1)/N n per rank; the tree and the doubling need the
fewest rounds.  So rings win on large tensors and doubling on small ones (Thakur, Rabenseifner and Gropp, 2005,
"Optimization of Collective Communication Operations in MPICH"; `labs.cost` has the arithmetic).

All collectives in this file work in place on contiguous tensors of any shape, size (empty, too) and dtype, on one
rank or many, for `group=None` (all ranks) or any subgroup; `src` and `dst` are global ranks, as in
`torch.distributed`.  NCCL requires that the first operation on a group involves all of its ranks.  The first
round of a tree involves only two ranks, so call `dist.barrier()` once before a broadcast or reduce.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

COMBINE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


# ---- trees -----------------------------------------------------------------------------------------------


def broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """Copy global rank `src`'s `tensor` to all ranks; in each round, every rank that has it sends it to one more."""
    rank, ranks = place(group)
    flat, root = flatten(tensor), group_rank(src, group)
    me = (rank - root) % ranks
    for distance in powers_of_two(below=ranks):
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))


def reduce(tensor: Tensor, dst: int = 0, op=ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Reduce over all ranks into global rank `dst`'s `tensor`; afterwards the others' tensors hold partial results."""
    rank, ranks = place(group)
    flat, root = flatten(tensor), group_rank(dst, group)
    received = torch.empty_like(flat)
    me = (rank - root) % ranks
    for distance in reversed(powers_of_two(below=ranks)):
        if me < distance and me + distance < ranks:
            exchange(group, receive=(received, rank + distance))
            combine(op, flat, received)
        elif distance <= me < 2 * distance:
            exchange(group, send=(flat, rank - distance))


# ---- rings -----------------------------------------------------------------------------------------------


def reduce_scatter(tensor: Tensor, op=ReduceOp.SUM, group: ProcessGroup | None = None) -> Tensor:
    """Reduce piece r of `tensor` over all ranks into rank r's tensor, and return that piece: 1-D, a view of `tensor`.

    A partial result starts from each rank and travels once around the ring.  Every rank on the way adds its own piece,
    and the result ends on the rank whose piece it is.  Afterwards the other pieces of `tensor` hold partial results.
    """
    rank, ranks = place(group)
    pieces = flatten(tensor).tensor_split(ranks)
    buffer = torch.empty_like(pieces[0])
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        received = buffer[: mine.numel()]
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(received, rank - 1))
        combine(op, mine, received)
    return pieces[rank]


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Gather piece r of `tensor` from each rank r; afterwards every rank has all pieces.

    Each rank sends its own piece first, and then in each round the piece that it received in the round before.
    """
    rank, ranks = place(group)
    pieces = flatten(tensor).tensor_split(ranks)
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


def all_reduce(
    tensor: Tensor, op=ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> "Work | None":
    """Reduce every rank's `tensor` over all ranks, with the same bits everywhere.

    With `async_op`, the ring runs beside the caller, who must `wait()` for the returned work before touching
    `tensor` or calling another collective of this file on the same ranks.
    """
    if async_op:
        return Work(STREAM.submit(all_reduce, tensor, op, group))
    reduce_scatter(tensor, op, group)
    all_gather(tensor, group)


# ---- recursive doubling ----------------------------------------------------------------------------------


def all_reduce_doubling(tensor: Tensor, op=ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """All-reduce in the fewest rounds: ranks at the distances 1, 2, 4, ... exchange whole tensors.

    Recursive doubling needs a number of ranks that is a power of two.  If N = power + extra, the last `extra` ranks
    first send their tensors to the first `extra` ranks, which combine them with their own.  At the end the first
    `extra` ranks send the result back. So an N that is no power of two costs two more rounds of n elements each.
    """
    rank, ranks = place(group)
    flat = flatten(tensor)
    received = torch.empty_like(flat)
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power

    if rank >= power:
        exchange(group, send=(flat, rank - power))
    elif rank < extra:
        exchange(group, receive=(received, rank + power))
        combine(op, flat, received)

    if rank < power:
        for distance in powers_of_two(below=power):
            partner = rank ^ distance
            exchange(group, send=(flat, partner), receive=(received, partner))
            combine(op, flat, received)

    if rank >= power:
        exchange(group, receive=(flat, rank - power))
    elif rank < extra:
        exchange(group, send=(flat, rank + power))


# ---- everybody to everybody ------------------------------------------------------------------------------


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Copy rank i's `inputs[r]` into rank r's `outputs[i]`, for all i and r.

    outputs, inputs: N tensors each, of any sizes on which sender and receiver agree.
    """
    rank, ranks = place(group)
    if not len(outputs) == len(inputs) == ranks:
        given = f"{len(outputs)} and {len(inputs)}"
        raise ValueError(f"all_to_all on {ranks} ranks needs {ranks} outputs and {ranks} inputs, not {given}")
    outputs, inputs = [flatten(x) for x in outputs], [flatten(x) for x in inputs]
    outputs[rank].copy_(inputs[rank])
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        exchange(group, send=(inputs[to], to), receive=(outputs[source], source))


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every rank has called this function; after k rounds, a rank knows that 2^k ranks have.

    By its message, a rank tells the receiver that all ranks of which it knows have called the function.
    """
    rank, ranks = place(group)
    token = torch.zeros(2, dtype=torch.uint8)
    for distance in powers_of_two(below=ranks):
        exchange(group, send=(token[:1], rank + distance), receive=(token[1:], rank - distance))


# ---- building blocks -------------------------------------------------------------------------------------


def exchange(
    group: ProcessGroup | None,
    send: tuple[Tensor, int] | None = None,
    receive: tuple[Tensor, int] | None = None,
) -> None:
    """Run one round of a collective: post a send and a receive together, and wait for both.

    send, receive: (tensor, peer), where peers count modulo N; an empty tensor is not sent.

    On NCCL a send does not return before its receive has been posted.  A ring of ranks that all send first and receive
    afterwards would never move, so a rank posts its send and its receive together.
    """
    ranks = dist.get_world_size(group)
    posts = [
        dist.P2POp(post, message[0], group=group, group_peer=message[1] % ranks)
        for post, message in ((dist.isend, send), (dist.irecv, receive))
        if message and message[0].numel()
    ]
    for work in dist.batch_isend_irecv(posts) if posts else []:
        work.wait()


def combine(op, mine: Tensor, received: Tensor) -> None:
    """Compute mine = mine (op) received, in place."""
    if op not in COMBINE:
        raise ValueError(f"cannot reduce with {op}: use one of {', '.join(str(known) for known in COMBINE)}")
    COMBINE[op](mine, received, out=mine)


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's number within the group, and the group's size."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of this group: call it on members only")
    return rank, dist.get_world_size(group)


def group_rank(global_rank: int, group: ProcessGroup | None) -> int:
    return dist.get_group_rank(group or dist.group.WORLD, global_rank)


def flatten(tensor: Tensor) -> Tensor:
    """Return `tensor` as a vector over the same memory, detached from autograd."""
    if not tensor.is_contiguous():
        raise ValueError(f"this tensor of shape {tuple(tensor.shape)} is not contiguous: call .contiguous() first")
    return tensor.detach().view(-1)


def powers_of_two(below: int) -> list[int]:
    """Return the powers of two, 1, 2, 4, ..., that are smaller than `below`."""
    return [1 << k for k in range((below - 1).bit_length())]


# A single thread runs collectives in the order of issue, as a CUDA stream does for NCCL.
STREAM = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collectives")


@dataclass
class Work:
    """An all-reduce in flight."""

    future: Future

    def wait(self) -> None:
        """Wait for the reduction, and raise the error that it raised, if any."""
        self.future.result()
