"""A value on one rank: what is there, what is due, and of what it is made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from labs.exercises.engine.answer import instead, show
from labs.exercises.engine.case import close, isclose, largest_of
from labs.exercises.engine.mixture import mixture
from labs.exercises.engine.scripts import Seen

Dues = Sequence[Mapping[str, Any]]  # by member and name


class One:
    """index: of the rank among the members.  tolerance: relative.  summands: those of whose sum, or mean, it is.

    pieces(world, value): of which each may be made of others, so that the first that is wrong is looked at.
    """

    def __init__(
        self,
        seen: Seen,
        index: int,
        name: str,
        expected_by_name: Dues,
        tolerance: float = 0,
        summands: Sequence[Tensor] = (),
        pieces: Callable[[Any, Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        self.seen, self.world, self.index, self.name, self.tolerance = seen, seen.world, index, name, tolerance
        self.rank, self.done, self.expected_by_name, self.summands = (
            seen.world.members[index],
            seen.done[index],
            expected_by_name,
            summands,
        )
        self.received, self.expected = self.done.values.get(name), expected_by_name[index][name]
        self.cut = partial(pieces, self.world) if pieces else lambda value: [value]

    @property
    def n(self) -> int:
        return self.world.n

    @property
    def description(self) -> str:
        return show(self.received) if not isinstance(self.received, str) else self.received

    def near(self, found: Any, expected: Any, tolerance: float | None = None) -> bool:
        if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
            return type(found) is type(expected) and found == expected
        tolerance = self.tolerance if tolerance is None else tolerance
        largest = largest_of(self.summands) if self.summands else None
        return found.dtype == expected.dtype and close(found, expected, tolerance, largest)

    @cached_property
    def right(self) -> bool:
        return self.near(self.received, self.expected)

    @property
    def first(self) -> str:
        """The first element that is wrong."""
        if any(getattr(self.received, form, None) != getattr(self.expected, form, None) for form in ("shape", "dtype")):
            return f"is {self.description}; {show(self.expected)} is due"
        found, expected = self.received.flatten(), self.expected.flatten()
        differs = ~isclose(found, expected, max(1e-5, self.tolerance) if self.tolerance else 0.0)
        at = int((differs if differs.any() else found != expected).nonzero()[0])
        return f"element {at} is {instead(found[at], expected[at])}"

    @property
    def first_by_name(self) -> str:
        """The same of a value that has a name."""
        told = f"{self.name} at {self.first}".replace(" at is ", " is ") if self.name else self.first
        no_dims = self.name and isinstance(self.expected, Tensor) and not self.expected.dim()
        return told.replace(" at element 0 is ", " is ") if no_dims else told

    @cached_property
    def times(self) -> Tensor | None:
        """How often each summand is in what was found; 1 where it is right."""
        if not self.summands or any(x.numel() != self.received.numel() for x in self.summands):
            return None
        pairs = list(zip(self.cut(self.received), self.cut(self.expected), strict=True))
        at = next((at for at, pair in enumerate(pairs) if not self.near(*pair)), 0)
        return mixture(pairs[at][0].flatten(), [self.cut(x)[at].flatten() for x in self.summands])

    def made(self, matches: Callable[[Tensor], Any]) -> str | None:
        """Where these numbers fit, in words."""
        if self.times is None or not matches(self.times):
            return None
        told = ", ".join(
            f"rank {r}'s {c:.2g} times" for r, c in zip(self.world.members, self.times.tolist(), strict=True)
        )
        return f"It has {told}, and each is due once."


def as_if(other: Callable[[Any], Any]) -> Callable[[One], bool]:
    """Whether the rank has what it would have had, were this due; several of them, one after the other, or one."""

    def matches(one: One) -> bool:
        options = other(one.world) if isinstance(one.received, Tensor) else []
        return any(
            instead_of_due(one, expected_by_name[one.index])
            for expected_by_name in (options if isinstance(options, Iterator) else [options])
        )

    def instead_of_due(one: One, value: Any) -> bool:
        value = value.get(one.name) if isinstance(value, Mapping) else value
        return (
            isinstance(value, Tensor)
            and one.near(one.received, value, 1e-5)
            and not one.near(value, one.expected, 1e-5)
        )

    return matches


def as_if_everywhere(other: Callable[[Any], Dues], tolerance: float = 1e-5) -> Callable[[One], bool]:
    """Whether every rank has all that it would have had, were this due."""

    def matches(one: One) -> bool:
        within, ranks = max(tolerance, one.tolerance), zip(one.seen.done, other(one.world), strict=True)
        return all(
            one.near(done.values[name], x, within)
            for done, expected_by_name in ranks
            for name, x in expected_by_name.items()
        )

    return matches
