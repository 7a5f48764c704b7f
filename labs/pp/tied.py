"""Parameters that stages of several ranks share: the weight of a head that is the embedding's, too.

The first stage and the last one have it, each on its own rank: copies that begin equal, and get a part of the gradient
each.  They stay equal if every one of them takes its step with the whole gradient.  So the parts are added up once per
step, by all of these ranks in the same order.  (One process adds up micro-batch by micro-batch: the same, except for
rounding.)
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup

from labs.agree import require_equal


class Tied:
    """ranks: of the stages.  Raises ValueError, on every rank, where the copies do not begin equal."""

    def __init__(self, stages: Sequence[nn.Module], ranks: dict[int, int], group: ProcessGroup | None):
        self.group, self.rank = group, dist.get_rank(group)
        holders: dict[nn.Parameter, dict[int, str]] = {}
        for number, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                holders.setdefault(p, {}).setdefault(ranks[number], name)
        several = {p: names for p, names in holders.items() if len(names) > 1}
        require_equal({next(iter(names.values())): p for p, names in several.items()}, group)
        self.here = {p: (names[self.rank], p.requires_grad) for p, names in several.items() if self.rank in names}
        self.shared = {p: list(several[p]) for p, (_, trained) in self.here.items() if trained}
        self.earlier: dict[nn.Parameter, Tensor | None] = {}

    def is_counted(self, p: nn.Parameter) -> bool:
        """Whether this rank counts it: of all ranks that have it, only the first one does."""
        return self.shared.get(p, [self.rank])[0] == self.rank

    def begin(self) -> None:
        """What earlier batches have left in `.grad` is the whole of it: it must not be added up once more."""
        for p, (name, trained) in self.here.items():
            if p.requires_grad != trained:
                raise RuntimeError(
                    f"{name!r} is tied to a parameter of another rank's stage, and was {'' if trained else 'un'}frozen "
                    "after the Pipeline was made: make a new Pipeline, in which all ranks agree on it"
                )
        for p in self.shared:
            self.earlier[p], p.grad = p.grad, None

    def add_up(self) -> None:
        for p, ranks in self.shared.items():
            mine = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            parts = {rank: mine if rank == self.rank else torch.empty_like(mine) for rank in ranks}
            both_ways = [
                P2POp(op, tensor, group=self.group, group_peer=rank)
                for rank in ranks
                if rank != self.rank
                for op, tensor in ((dist.isend, mine), (dist.irecv, parts[rank]))
            ]
            for work in dist.batch_isend_irecv(both_ways):
                work.wait()
            earlier = self.earlier.pop(p)
            total = sum(parts.values())
            p.grad = total if earlier is None else earlier.add_(total)
