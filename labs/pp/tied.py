"""Parameters that stages of several ranks share: the weight of a head that is the embedding's, too.

The first stage and the last one have it, each on its own rank: copies that begin equal, and get a part of the gradient
each.  They stay equal if every one of them takes its step with the whole gradient.  So the parts are added up once per
step, by all of these ranks in the same order.  (One process adds up micro-batch by micro-batch: the same, except for
rounding.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup

from labs.agree import require_equal


class Tied:
    """ranks: of the stages.  Raises ValueError, on every rank, where the copies do not begin equal."""

    def __init__(self, stages: Sequence[nn.Module], ranks: dict[int, int], group: ProcessGroup | None):
        self.group, self.rank = group, dist.get_rank(group)
        holders: dict[nn.Parameter, dict[int, tuple[nn.Module, str]]] = {}
        for number, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                holders.setdefault(p, {}).setdefault(ranks[number], (stage, name))
        several = {p: places for p, places in holders.items() if len(places) > 1}
        require_equal({next(iter(places.values()))[1]: p for p, places in several.items()}, group)
        # By their places, since labs.fsdp may put shards there.
        self.here = [
            Copy(*places[self.rank], p.requires_grad, list(places))
            for p, places in several.items()
            if self.rank in places
        ]
        self.earlier: dict[nn.Parameter, Tensor | None] = {}

    @property
    def shared(self) -> dict[nn.Parameter, list[int]]:
        """Those that are trained, and the ranks that have them."""
        return {copy.p: copy.ranks for copy in self.here if copy.trained}

    def is_counted(self, p: nn.Parameter) -> bool:
        """Whether this rank counts it: of all ranks that have it, only the first one does."""
        return self.shared.get(p, [self.rank])[0] == self.rank

    def begin(self) -> None:
        """What earlier batches have left in `.grad` is the whole of it: it must not be added up once more."""
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
    """One of the copies, and the ranks that have one: a parameter of this rank's stage."""

    stage: nn.Module
    name: str
    trained: bool
    ranks: list[int]

    @property
    def p(self) -> nn.Parameter:
        return dict(self.stage.named_parameters())[self.name]


def local(x: Tensor) -> Tensor:
    """Of a DTensor, this rank's piece: the parts of a sum are cut alike."""
    return x.to_local() if hasattr(x, "to_local") else x
