"""State that all groups of one model share during a training step: the begin and end of forward and backward.

    forward     begins and ends with the outermost module; at its end, ranks compare the order of their layers
    backward    begins with the first gradient; at its end, the waiting gradients are reduced: those of earlier
                micro-batches, and those of layers that only other ranks have used

PyTorch calls it FSDPStateContext, and keeps the list of reductions in an FSDPCommContext.
"""

import torch
from torch.autograd import Variable

from labs.fsdp.order import LayerOrder
from labs.fsdp.parameter_group import ParameterGroup, Reduction


class SharedState:
    """The state of a training step that the groups of one model share.

    root: the group of the outermost module.
    names: `{group: name of its module in the model}`, for all groups.
    reductions: those of the running backward, in their order.  Only the last one's reduce-scatter is in flight, so that
        at most one layer's full gradients wait.
    """

    def __init__(self, root: ParameterGroup, names: dict[ParameterGroup, str]):
        self.root, self.groups, self.order = root, list(names), LayerOrder(names)
        self.reductions: list[Reduction] = []
        self.in_backward = False
        self.asked: tuple[int, bool] = (-1, False)

    # ---- forward -----------------------------------------------------------------------------------------

    def forward_begins(self, group: ParameterGroup) -> int:
        """Return the group's place in the order of layers."""
        if group is self.root:
            if self.in_backward:
                self.give_up()
            self.order.begin()
        place = self.order.append(group)
        if group is self.root or not self.root.in_use:
            self.drop_stale(self.groups if group is self.root else [group])
        return place

    def drop_stale(self, groups: list[ParameterGroup]) -> None:
        """Drop the parameters that earlier forwards left gathered if shards were written to since.

        After a forward without gradients, ranks ask each other: a rank's own shard may be empty, so that it cannot
        see that the others were written to.
        """
        for group in groups:
            group.kept = None
        found = {group: group.is_stale() for group in groups if group.gathered}
        if idle := {group: stale for group, stale in found.items() if group.idle}:
            everyones = self.root.everybodys([*idle.values()]).values()
            for group, *stale in zip(idle, *everyones, strict=True):
                if any(stale):
                    group.drop()

    def forward_ends(self) -> None:
        """Compare the order of layers after a forward of the outermost module."""
        self.require_same("ranks use different layers", self.order.now)
        self.require_same("ranks can go back through different layers", self.order.leading)

    # ---- backward ----------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.backward_ends)

    def brings_gradients(self) -> bool:
        """Return whether this backward computes any parameter's gradient: one for inputs alone computes none."""
        backward = torch._C._current_graph_task_id()
        if self.asked[0] != backward:
            self.asked = backward, any(group.gradients_due() for group in self.groups)
        return self.asked[1]

    def reduce(self, group: ParameterGroup) -> None:
        """Start to reduce the group's gradients if any are waiting; without sync, only add them up."""
        if not group.sync:
            group.accumulate()
        elif group in self.order.waiting:
            del self.order.waiting[group]
            self.average_replicas()
            self.reductions.append(group.reduce())

    def average_replicas(self) -> None:
        if self.reductions:
            self.reductions[-1].average_replicas()

    def backward_ends(self) -> None:
        for group in reversed([*self.order.waiting]):
            self.reduce(group)
        self.average_replicas()
        for reduction in self.reductions:
            reduction.finish()
        self.reductions.clear()
        for group in self.groups:
            group.drop_after_backward()
        self.in_backward = False
        self.require_same("ranks go back through different layers", self.order.end())

    def give_up(self) -> None:
        """Drop the state and the gradients that a failed backward left behind."""
        self.average_replicas()
        self.reductions.clear()
        self.in_backward = False
        self.order.end()
        self.order.waiting.clear()
        for group in self.groups:
            group.forget()

    # ---- what must be the same on all ranks ----------------------------------------------------------------

    def require_same_prefetch(self) -> None:
        """Raise RuntimeError, on every rank, if ranks were told to prefetch different modules."""
        names = self.order.names
        self.root.require_same(
            [
                (name or "the model", [names.get(other) for other in ahead])
                for group, name in names.items()
                for ahead in (group.next_in_forward, group.next_in_backward)
                if ahead is not None
            ],
            "ranks were told to prefetch other modules: {}; give the same lists everywhere",
        )

    def require_same(self, what: str, order: list[ParameterGroup]) -> None:
        """Raise RuntimeError, on every rank, if ranks used different layers; compared only when an order is new.

        A collective in which ranks pass different layers of equal size does not fail: it mixes up their numbers.
        """
        if names := self.order.news(what, order):
            self.root.require_same(
                names,
                f"{what}: {{}}; what meets in one collective must belong to one layer, so use the same layers on all "
                "ranks, in the same order",
            )
            self.order.agreed[what] = order


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
