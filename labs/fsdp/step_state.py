"""State that all modules of one model share during a training step: the begin and end of forward and backward.

    forward     begins and ends with the outermost module; at its end, ranks compare the order of their layers
    backward    begins with the first gradient; at its end, the waiting gradients are reduced: those of earlier
                micro-batches, and those of layers that only other ranks have used

PyTorch calls it FSDPStateContext.
"""

from typing import Protocol

import torch
from torch.autograd import Variable

from labs.agree import require_all_averaged
from labs.fsdp.order import LayerOrder
from labs.fsdp.parameter_group import ParameterGroup, Reductions


class Member(Protocol):
    """The attributes of a Sharding (labs.fsdp.module_events) that this file uses."""

    group: ParameterGroup
    place: int
    running: bool
    ahead: "list[list[Member] | None]"

    def end_turn(self) -> None: ...

    def reduce(self) -> None: ...

    def drop_after_backward(self) -> None: ...


class SharedState:
    """The state of a training step that the groups of one model share.

    root: the group of the outermost module.
    names: `{member: name of its module in the model}`, for all groups.
    """

    def __init__(self, root: Member, names: dict[Member, str]):
        self.root, self.members, self.order = root, list(names), LayerOrder(names)
        self.reductions = Reductions()
        self.in_backward = False
        self.asked: tuple[int, bool] = (-1, False)
        groups = [group for group in (root.group.group, root.group.replicas) if group]
        shards = {p.shard for member in names for p in member.group.parameters}
        require_all_averaged(self, shards.__contains__, groups)

    def forward_begins(self, member: Member) -> None:
        if in_backward():  # a recomputation
            self.backward_begins()
            return
        if member is self.root:
            if self.in_backward:
                self.give_up()
            self.order.begin()
        member.place = self.order.append(member)

    def drop_stale(self, member: Member) -> None:
        """Drop the parameters that earlier forwards left gathered if shards were written to since.

        After a forward without gradients, ranks ask each other: a rank's own shard may be empty, so that it cannot
        see that the others were written to.
        """
        groups = [each.group for each in (self.members if member is self.root else [member])]
        for group in groups:
            group.kept = None
        found = {group: group.is_stale() for group in groups if group.gathered}
        if idle := {group: stale for group, stale in found.items() if group.idle}:
            everyones = self.root.group.everybodys([*idle.values()]).values()
            for group, *stale in zip(idle, *everyones, strict=True):
                if any(stale):
                    group.drop()

    def after(self) -> list[Member]:
        return [] if in_backward() else self.order.after()

    def forward_ends(self, member: Member, leads_back: bool, failed: bool) -> None:
        if in_backward():
            return
        if leads_back:
            self.order.leading.append(member)
        if member is self.root:
            for other in self.members:
                if other.running:  # not all modules of its list were called
                    other.end_turn()
                if other.group.arriving:  # a prefetch in vain
                    other.group.drop()
            if not failed:
                self.require_same("ranks use different layers", self.order.now)
                self.require_same("ranks can go back through different layers", self.order.leading)

    def backward_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.backward_ends)

    def brings_gradients(self) -> bool:
        """Return whether this backward computes any parameter's gradient: one for inputs alone computes none."""
        backward = torch._C._current_graph_task_id()
        if self.asked[0] != backward:
            self.asked = backward, any(member.group.gradients_due() for member in self.members)
        return self.asked[1]

    def backward_ends(self) -> None:
        for member in reversed([*self.order.waiting]):
            member.reduce()
        self.reductions.finish()
        for member in self.members:
            member.drop_after_backward()
        self.in_backward = False
        self.require_same("ranks go back through different layers", self.order.end())

    def require_same_prefetch(self) -> None:
        """Raise RuntimeError, on every rank, if ranks were told to prefetch different modules."""
        names = self.order.names
        lists = [(name, each) for member, name in names.items() for each in member.ahead if each is not None]
        self.root.group.require_same(
            [(name or "the model", [names.get(other) for other in others]) for name, others in lists],
            "ranks were told to prefetch other modules: {}; give the same lists everywhere",
        )

    def give_up(self) -> None:
        """Drop the state and the gradients that a failed backward left behind."""
        self.reductions.give_up()
        self.in_backward = False
        self.order.end()
        self.order.waiting.clear()
        for member in self.members:
            member.group.forget()

    def require_same(self, what: str, order: list[Member]) -> None:
        """Raise RuntimeError, on every rank, if ranks used different layers; compared only when an order is new.

        A collective in which ranks pass different layers of equal size does not fail: it mixes up their numbers.
        """
        if names := self.order.news(what, order):
            self.root.group.require_same(
                names,
                f"{what}: {{}}; what meets in one collective must belong to one layer, so use the same layers on all "
                "ranks, in the same order",
            )
            self.order.agreed[what] = order


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
