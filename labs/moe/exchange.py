"""An uneven all-to-all: every rank sends rows to the ranks of their experts, and gets their results back.

    counts      each rank tells each other how many rows it has for each of its experts: 8 bytes per expert
    rows        sorted by expert, and so by rank: one all-to-all, whose pieces may be empty
    results     the same all-to-all, backwards

    rank 0   a a b c      a, b on rank 0      rank 0 computes   a a b  from rank 0, then  a b b  from rank 1
    rank 1   a b b d      c, d on rank 1      rank 1 computes   c      from rank 0, then  d      from rank 1

In backward, the gradients of results go where the rows went, and those of rows come back: rank by rank, the bytes of
the forward once more, without counts.

**An expert computes each rank's rows by themselves**, and not all of them in one product.  So its gradient is a sum
over ranks, in their order, and has the bits that data parallelism's sum would have.  One product for all rows would be
faster, and round otherwise.

Source: Lepikhin et al. 2020, arXiv 2006.16668, section 3.2.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs import agree
from labs.moe.mixture import Experts, read_counts, require_numbers


class AllToAll(torch.autograd.Function):
    """An all-to-all of rows, in which this rank sends sends[r] rows to rank r, and receives receives[r] from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
        ctx.back = receives, sends, group
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradient, *ctx.back), None, None, None


class ParallelExperts(Experts):
    """A rank's part of all experts, with the names that they have in the whole model.

    experts: all experts, of which the group's first ranks get one more if they cannot be divided evenly
    group: the ranks that share the experts

    Raises ValueError, on every rank, for more ranks than experts.
    """

    def __init__(self, experts: Experts, group: ProcessGroup):
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if len(experts) < ranks:
            raise ValueError(
                f"{len(experts)} experts cannot be split over ep={ranks} ranks, each of which needs one: make ep "
                f"{len(experts)} or less, and edp larger"
            )
        of_each = [part.tolist() for part in torch.arange(len(experts), device="cpu").tensor_split(ranks)]
        super().__init__({str(e): experts[str(e)] for e in of_each[rank]})
        self.group, self.rank, self.of_each = group, rank, of_each

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        counts = read_counts(counts_E, len(rows_MD))
        received = self.exchange_counts(counts_E, counts)
        sends, receives = [sum(counts[e] for e in its) for its in self.of_each], [sum(each) for each in received]
        by_rank = AllToAll.apply(rows_MD, sends, receives, self.group).split(receives)
        # Backward begins with what came last, so that the first rank's gradient is the first of the sum.
        results = [self.apply_each(rows, its) for rows, its in zip(by_rank[::-1], received[::-1], strict=True)]
        return AllToAll.apply(torch.cat(results[::-1]), receives, sends, self.group)

    def exchange_counts(self, counts_E: Tensor, counts: list[int]) -> list[list[int]]:
        """Return the number of rows from each rank for each of this rank's experts.

        counts: the numbers in counts_E; in a dry run, every rank has these
        """
        ranks = len(self.of_each)
        received = counts_E.new_empty(ranks * len(self))
        dist.all_to_all_single(received, counts_E, [len(self)] * ranks, list(map(len, self.of_each)), group=self.group)
        if agree.alone:
            return [[counts[e] for e in self.of_each[self.rank]]] * ranks
        found = received.view(ranks, len(self)).tolist()
        for rank, its in zip(dist.get_process_group_ranks(self.group), found, strict=True):
            require_numbers(its, f" on rank {rank}")
        return found
