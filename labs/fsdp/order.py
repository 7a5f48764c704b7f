"""The order of layers: which layer to prefetch next, and whether all ranks used the same layers.

    in forward     prefetch the layer that came next in the last forward, if this forward has begun in the same order
    in backward    prefetch the layer that came before this one in forward
    waiting        layers with gradients that are still to be reduced

The first forward has no earlier order, so nothing is prefetched.  A member is any object that represents a layer: this
file only puts members in order.
"""

from typing import Generic, TypeVar

Member = TypeVar("Member")


class LayerOrder(Generic[Member]):
    """The order in which layers were used in this training step and in the last.

    names: `{member: name of its module in the model}`, for all members.
    """

    def __init__(self, names: dict[Member, str]):
        self.names = names
        self.last: list[Member] = []  # the order of the last forward
        self.now: list[Member] = []  # the order of this forward
        self.leading: list[Member] = []  # members of `now` whose output requires a gradient
        self.back: list[Member] = []  # the order of this backward
        self.waiting: dict[Member, None] = {}  # an ordered set, in the order of backward
        self.agreed: dict[str, list[Member]] = {}  # orders that were the same on all ranks when they were compared

    def begin(self) -> None:
        self.last, self.now, self.leading = self.now, [], []

    def append(self, member: Member) -> int:
        """Add the next member in forward, and return its place."""
        self.now.append(member)
        return len(self.now) - 1

    def after(self) -> list[Member]:
        """Return the member that came next in the last forward, if that began in the same order; a list of 0 or 1."""
        n = len(self.now)
        return self.last[n : n + 1] if self.last[:n] == self.now else []

    def before(self, place: int) -> list[Member]:
        """Return the member before this place in forward; a list of 0 or 1."""
        return self.now[max(place - 1, 0) : place]

    def end(self) -> list[Member]:
        """Return the order of this backward, and clear it; `waiting` stays as it is."""
        back, self.back = self.back, []
        return back

    def news(self, what: str, order: list[Member]) -> list[str]:
        """Return the names in this order if the ranks have not compared it yet, else an empty list."""
        return [] if order == self.agreed.get(what) else [self.names[member] or "the model" for member in order]
