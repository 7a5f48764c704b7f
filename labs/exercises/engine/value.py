"""A value on one rank, received and expected: when they are equal, and of which summands a wrong one is made."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import instead, show
from labs.exercises.engine.scripts import StepOutcomes

Values = Sequence[Mapping[str, Any]]  # {name: value}, for each member


class One:
    """A value on one rank, as it was received and as it is expected.

    index: the rank's place among the members.
    tolerance: relative.
    summands: the tensors whose sum the expected value is, or whose mean.
    pieces: `pieces(world, value)` cuts a value into pieces that may be made of different summands, so that only the
        first wrong piece is looked at.
    """

    def __init__(
        self,
        seen: StepOutcomes,
        index: int,
        name: str,
        expected_by_name: Values,
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
        """A phrase about the first element that is wrong, or about a wrong shape or dtype."""
        if any(getattr(self.received, form, None) != getattr(self.expected, form, None) for form in ("shape", "dtype")):
            return f"is {self.description}; {show(self.expected)} is due"
        found, expected = self.received.flatten(), self.expected.flatten()
        differs = ~isclose(found, expected, max(1e-5, self.tolerance) if self.tolerance else 0.0)
        at = int((differs if differs.any() else found != expected).nonzero()[0])
        return f"element {at} is {instead(found[at], expected[at])}"

    @property
    def first_by_name(self) -> str:
        """The phrase about the first wrong element, with the value's name if it has one."""
        phrase = f"{self.name} at {self.first}".replace(" at is ", " is ") if self.name else self.first
        no_dims = self.name and isinstance(self.expected, Tensor) and not self.expected.dim()
        return phrase.replace(" at element 0 is ", " is ") if no_dims else phrase

    @cached_property
    def times(self) -> Tensor | None:
        """The number of times that each summand is in the received value; None if they cannot be worked out."""
        if not self.summands or any(x.numel() != self.received.numel() for x in self.summands):
            return None
        pairs = list(zip(self.cut(self.received), self.cut(self.expected), strict=True))
        at = next((at for at, pair in enumerate(pairs) if not self.near(*pair)), 0)
        return mixture(pairs[at][0].flatten(), [self.cut(x)[at].flatten() for x in self.summands])

    def describe_times(self, matches: Callable[[Tensor], Any]) -> str | None:
        """Return a sentence that says how often each summand is in the value, if `matches(times)`; else None."""
        if self.times is None or not matches(self.times):
            return None
        times = ", ".join(
            f"rank {r}'s {c:.2g} times" for r, c in zip(self.world.members, self.times.tolist(), strict=True)
        )
        return f"It has {times}, and each is due once."


def as_if(other: Callable[[Any], Any]) -> Callable[[One], bool]:
    """Return a row's test: whether a rank received the value of `other(world)` instead of the expected one.

    other: returns the values of all members; or an iterator over several such lists, which are tried in turn.
    """

    def matches(one: One) -> bool:
        options = other(one.world) if isinstance(one.received, Tensor) else []
        return any(
            is_instead(one, expected_by_name[one.index])
            for expected_by_name in (options if isinstance(options, Iterator) else [options])
        )

    def is_instead(one: One, value: Any) -> bool:
        value = value.get(one.name) if isinstance(value, Mapping) else value
        return (
            isinstance(value, Tensor)
            and one.near(one.received, value, 1e-5)
            and not one.near(value, one.expected, 1e-5)
        )

    return matches


def as_if_everywhere(other: Callable[[Any], Values], tolerance: float = 1e-5) -> Callable[[One], bool]:
    """Return a row's test: whether all ranks received all values of `other(world)`."""

    def matches(one: One) -> bool:
        within, ranks = max(tolerance, one.tolerance), zip(one.seen.done, other(one.world), strict=True)
        return all(
            one.near(done.values[name], x, within)
            for done, expected_by_name in ranks
            for name, x in expected_by_name.items()
        )

    return matches


# ---- equal numbers, and sums ----------------------------------------------------------------------------


def largest_of(tensors: Iterable[Tensor]) -> float:
    """Return the largest magnitude in any of the tensors, such as the summands of a sum; 0 if they are empty."""
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def isclose(found: Tensor, expected: Tensor, tolerance: float, largest: float | None = None) -> Tensor:
    """Return for each element whether it is right: within `tolerance` × (itself + the largest), or equal for integers.

    largest: the largest magnitude among the numbers that were summed to these, since they may have cancelled out.
    """
    if not expected.is_floating_point():
        return found == expected
    if largest is None:
        largest = largest_of([expected])
    return torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance * largest)


def close(found: Tensor, expected: Tensor, tolerance: float, largest: float | None = None) -> bool:
    """Return whether a tensor has the expected shape, and each of its elements is close to the expected one."""
    return found.shape == expected.shape and bool(isclose(found, expected, tolerance, largest).all())


def mixture(found: Tensor, sources: list[Tensor]) -> Tensor | None:
    """Return the numbers c with found = Σ c_i sources_i, where all are vectors of one length.

    Return None if there are no such numbers, or too few elements to tell.
    """
    matrix, right = torch.stack(sources, 1).double(), found.double()
    if len(right) <= len(sources) or not right.isfinite().all():
        return None
    solution = torch.linalg.lstsq(matrix, right).solution
    exact = torch.allclose(matrix @ solution, right, rtol=1e-3, atol=1e-3 * float(right.abs().max() + 1e-12))
    return solution.round(decimals=6) + 0.0 if exact else None  # 1e-17 and -0 become 0


def all_are(part: Tensor, value: float) -> bool:
    return torch.allclose(part, torch.full_like(part, value), atol=2e-3, rtol=2e-3)
