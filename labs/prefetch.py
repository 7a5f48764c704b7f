"""The order of layers, and what is in flight because of it: what the sharded modules of one model know of each other.

    in forward     gather the layer that came next in the last forward, if this one has begun as that did
    in backward    gather the layer that came before this one in forward
    a gradient     is reduced while the next layer's is computed; then the next one is

In the first forward nobody knows what comes next.  Where a model takes a different path from the last one, what was
gathered in vain is dropped.
"""

from typing import Any

import torch
from torch.autograd import Variable

from labs.group import everybodys

Member = Any  # labs.fsdp.Sharding: one module's part


class Step:
    """A step of one model, again and again.

    names: of all members, in the model; root: the outermost.
    """

    def __init__(self, root: Member, names: dict[Member, str]):
        self.root, self.names = root, names
        self.last: list[Member] = []  # the order of the last forward,
        self.now: list[Member] = []  # and of this one
        self.agreed: list[str] = []  # the order that all ranks know to be everybody's
        self.in_backward, self.reducing, self.averaging = False, None, []

    def forward_begins(self, member: Member) -> None:
        if in_backward():
            return
        if member is self.root:
            if self.in_backward:
                self.give_up()
            self.last, self.now = self.now, []
        self.now.append(member)

    def after(self, member: Member) -> list[Member]:
        """The one that came next in the last forward, if that began as this one does."""
        n = len(self.now)
        return self.last[n : n + 1] if self.last[:n] == self.now and not in_backward() else []

    def before(self, member: Member) -> list[Member]:
        last = max(i for i, other in enumerate(self.now) if other is member)
        return self.now[max(last - 1, 0) : last]

    def forward_ends(self, member: Member) -> None:
        for other in self.names if member is self.root and not in_backward() else ():
            if other.group.arriving:
                other.group.drop()

    def backward_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.backward_ends)

    def reduce(self, member: Member) -> None:
        """One reduction at a time is on its way, so that no more than one layer's gradients wait."""
        if not member.sync:
            member.group.accumulate()
            return
        self.finish()
        member.group.reduce()
        self.reducing = member.group
        self.averaging.append(member.group)

    def finish(self) -> None:
        if self.reducing:
            self.reducing.finish_reduce()
            self.reducing = None

    def backward_ends(self) -> None:
        self.finish()
        for group in self.averaging:
            group.finish_average()
        for member in self.names:
            if member.reshard_after_backward:
                member.group.drop()
        self.in_backward, self.averaging = False, []
        self.require_same_order()

    def give_up(self) -> None:
        """The last backward has failed: what it left must not be taken for this one's."""
        self.finish()
        self.in_backward, self.averaging = False, []
        for member in self.names:
            member.group.forget()

    def require_same_order(self) -> None:
        """Raise RuntimeError, on every rank, where ranks used different layers; asked when a new order is used.

        Nothing fails by itself where layers of equal size meet in a collective: one's numbers become the other's.
        """
        order = [self.names[member] or "the model" for member in self.now]
        if order == self.agreed:
            return
        ranks, (first, *others) = everybodys(order, self.root.group.group)
        for rank, other in zip(ranks[1:], others, strict=True):
            if other != first:
                raise RuntimeError(
                    f"ranks use different layers: rank {ranks[0]} {first}, rank {rank} {other}; what meets in one "
                    "collective must belong to one layer, so use the same layers on all ranks, in the same order"
                )
        self.agreed = order


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
