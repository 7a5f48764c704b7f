"""The order of layers: what comes next, what came before, and what all ranks must have done alike.

    in forward     after this layer comes the one that came next in the last forward, if this one has begun as that did
    in backward    before it came the one before it in forward
    waiting        layers with gradients that are still to be reduced

In the first forward nobody knows what comes next.  Members are whatever stands for layers: nothing is done with them
here, they are only put in order.
"""

from typing import Generic, TypeVar

Member = TypeVar("Member")


class LayerOrder(Generic[Member]):
    """names: of all members, in the model."""

    def __init__(self, names: dict[Member, str]):
        self.names = names
        self.last: list[Member] = []  # the order of the last forward,
        self.now: list[Member] = []  # and of this one,
        self.leading: list[Member] = []  # what of it has made something that a backward could begin with,
        self.back: list[Member] = []  # and where this backward was
        self.waiting: dict[Member, None] = {}  # in the order of backward
        self.agreed: dict[str, list[Member]] = {}  # orders that all ranks know to be everybody's

    def begin(self) -> None:
        self.last, self.now, self.leading = self.now, [], []

    def append(self, member: Member) -> int:
        """The next in forward; its place."""
        self.now.append(member)
        return len(self.now) - 1

    def after(self) -> list[Member]:
        """The one that came next in the last forward, if that began as this one does."""
        n = len(self.now)
        return self.last[n : n + 1] if self.last[:n] == self.now else []

    def before(self, place: int) -> list[Member]:
        """The one that came before this place in forward."""
        return self.now[max(place - 1, 0) : place]

    def end(self) -> list[Member]:
        """Where this backward was; what still waits goes on waiting."""
        back, self.back = self.back, []
        return back

    def news(self, what: str, order: list[Member]) -> list[str]:
        """The names in an order that ranks have not compared yet."""
        return [] if order == self.agreed.get(what) else [self.names[member] or "the model" for member in order]
