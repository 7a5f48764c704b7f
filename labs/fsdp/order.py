"""The order of layers, and what is in flight because of it: what the sharded modules of one model know of each other.

    in forward     gather the layer that came next in the last forward, if this one has begun as that did
    in backward    gather the layer that came before this one in forward
    a gradient     is reduced while the next layer's is computed; then the next one is
    at the end     of a backward all gradients are reduced that still wait, those of earlier micro-batches, too

In the first forward nobody knows what comes next.  Where a model takes a different path from the last one, what was
gathered in vain is dropped.

Checkpoints may be reentrant, and run a backward inside of a backward: the outermost one's end is meant.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

Member = Any  # labs.fsdp.Sharding: one module's part


class Step:
    """A step of one model, again and again.

    names: of all members, in the model; root: the outermost.
    """

    def __init__(self, root: Member, names: dict[Member, str]):
        self.root, self.names = root, names
        self.last: list[Member] = []  # the order of the last forward,
        self.now: list[Member] = []  # and of this one,
        self.leading: list[Member] = []  # what of it has made something that a backward could begin with,
        self.back: list[Member] = []  # and where this backward was
        self.agreed: dict[str, list[Member]] = {}  # orders that all ranks know to be everybody's
        self.in_backward = False
        self.waiting: dict[Member, None] = {}  # for their gradients to be reduced, in the order of backward
        self.reducing: Callable[[], Callable[[], None]] | None = None
        self.averaging: list[Callable[[], None]] = []
        self.asked: tuple[int, bool] = (-1, False)

    def forward_begins(self, member: Member) -> None:
        if in_backward():  # a recomputation
            self.backward_begins()
            return
        if member is self.root:
            if self.in_backward:
                self.give_up()
            self.last, self.now, self.leading = self.now, [], []
        member.place = len(self.now)
        self.now.append(member)

    def after(self, member: Member) -> list[Member]:
        """The one that came next in the last forward, if that began as this one does."""
        n = len(self.now)
        return self.last[n : n + 1] if self.last[:n] == self.now and not in_backward() else []

    def before(self, place: int) -> list[Member]:
        """The one that came before this place in forward."""
        return self.now[max(place - 1, 0) : place]

    def forward_ends(self, member: Member, leads_back: bool, failed: bool) -> None:
        if in_backward():
            return
        if leads_back:
            self.leading.append(member)
        if member is self.root:
            for other in self.names:
                if other.group.arriving:
                    other.group.drop()
            if not failed:
                self.require_same("ranks use different layers", self.now)
                self.require_same("ranks can go back through different layers", self.leading)

    def backward_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.backward_ends)

    def brings_gradients(self) -> bool:
        """Whether this backward brings any parameter a gradient: one that is asked for inputs' gradients does not."""
        backward = torch._C._current_graph_task_id()
        if self.asked[0] != backward:
            self.asked = backward, any(member.gradients_due() for member in self.names)
        return self.asked[1]

    def nothing_else(self, member: Member) -> bool:
        """Whether no other member has gradients that wait, or a backward before it."""
        return self.waiting.keys() == {member} and set(self.leading) <= set(self.back)

    def reduce(self, member: Member) -> None:
        """One reduction at a time is on its way, so that no more than one layer's gradients wait."""
        if not member.sync:
            member.group.accumulate()
        elif member in self.waiting:
            del self.waiting[member]
            self.finish()
            self.reducing = member.group.reduce()

    def finish(self) -> None:
        if self.reducing:
            self.averaging.append(self.reducing())
            self.reducing = None

    def backward_ends(self) -> None:
        for member in reversed([*self.waiting]):
            self.reduce(member)
        self.finish()
        for average in self.averaging:
            average()
        for member in self.names:
            if member.reshard_after_backward and not member.running:
                member.group.drop()
        self.in_backward, self.averaging = False, []
        back, self.back = self.back, []
        self.require_same("ranks go back through different layers", back)

    def give_up(self) -> None:
        """The last backward has failed: what it left must not be taken for this one's."""
        self.finish()
        self.in_backward, self.waiting, self.averaging, self.back = False, {}, [], []
        for member in self.names:
            member.group.forget()

    def require_same(self, differ: str, order: list[Member]) -> None:
        """Raise RuntimeError, on every rank, where they differ in what they used; asked when a new order is used.

        Nothing fails by itself where layers of equal size meet in a collective: one's numbers become the other's.
        """
        if order and order != self.agreed.get(differ):
            self.root.group.require_same(
                [self.names[member] or "the model" for member in order],
                f"{differ}: {{}}; what meets in one collective must belong to one layer, so use the same layers on all "
                "ranks, in the same order",
            )
            self.agreed[differ] = order


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
