"""Parameters that stages of several ranks share, such as a weight that is used by both embedding and head.

The first and the last stage each hold a copy of such a weight, on their own ranks.  The copies start equal, and each
copy gets a part of the gradient.  The copies stay equal if each of them is updated with the whole gradient.  So all
ranks with a copy add up the parts of the gradient once per step, in the same order.  One process adds up the gradient
micro-batch by micro-batch, which is the same up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup

from labs.agree import require_equal


class Tied:
    """The tied parameters of a pipeline; ranks: `{stage: rank}`.

    Raises ValueError, on every rank, if the copies of a parameter do not start equal.
    """

    def __init__(self, stages: Sequence[nn.Module], ranks: dict[int, int], group: ProcessGroup | None):
        self.group, self.rank = group, dist.get_rank(group)
        holders: dict[nn.Parameter, dict[int, tuple[nn.Module, str]]] = {}
        for number, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                holders.setdefault(p, {}).setdefault(ranks[number], (stage, name))
        several = {p: places for p, places in holders.items() if len(places) > 1}
        require_equal({next(iter(places.values()))[1]: p for p, places in several.items()}, group)
        # Copies are found by module and name, since labs.fsdp may put shards in their places.
        self.here = [
            Copy(*places[self.rank], p.requires_grad, list(places))
            for p, places in several.items()
            if self.rank in places
        ]
        self.earlier: dict[nn.Parameter, Tensor | None] = {}

    @property
    def shared(self) -> dict[nn.Parameter, list[int]]:
        """Return `{this rank's copy of a trained tied parameter: ranks that hold a copy}`."""
        return {copy.p: copy.ranks for copy in self.here if copy.trained}

    def is_counted(self, p: nn.Parameter) -> bool:
        """Return whether this rank counts `p` in a norm: of all ranks that hold a copy, only the first one does."""
        return self.shared.get(p, [self.rank])[0] == self.rank

    def begin(self) -> None:
        """Set aside the gradients of earlier batches, which have been added up over the copies already.

        Raises RuntimeError if a tied parameter was frozen or unfrozen.
        """
        for copy in self.here:
            if copy.p.requires_grad != copy.trained:
                raise RuntimeError(
                    f"{copy.name!r} is tied to a parameter of another rank's stage, and was "
                    f"{'' if copy.trained else 'un'}frozen after the Pipeline was made: make a new Pipeline, in which "
                    "all ranks agree on it"
                )
        for p in self.shared:
            self.earlier[p], p.grad = p.grad, None

    def add_up(self) -> None:
        for p, ranks in self.shared.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            mine = local(p.grad).contiguous()
            parts = {rank: mine if rank == self.rank else torch.empty_like(mine) for rank in ranks}
            both_ways = [
                P2POp(op, tensor, group=self.group, group_peer=rank)
                for rank in ranks
                if rank != self.rank
                for op, tensor in ((dist.isend, mine), (dist.irecv, parts[rank]))
            ]
            for work in dist.batch_isend_irecv(both_ways):
                work.wait()
            local(p.grad).copy_(sum(parts.values()))
            if (earlier := self.earlier.pop(p)) is not None:
                local(earlier).add_(local(p.grad))
                p.grad = earlier


@dataclass(frozen=True)
class Copy:
    """A copy of a tied parameter, in a stage of this rank, and the ranks that hold a copy."""

    stage: nn.Module
    name: str
    trained: bool
    ranks: list[int]

    @property
    def p(self) -> nn.Parameter:
        return dict(self.stage.named_parameters())[self.name]


def local(x: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor, or the tensor itself; all ranks' copies are sharded alike."""
    return x.to_local() if hasattr(x, "to_local") else x
