"""Cases, their outcomes, and when two numbers are the same: what all kinds of exercises share."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

SETTLED = 0.05  # s after which a backend's thread has released the tensors that it sent, even on a busy machine


@dataclass(frozen=True)
class Case:
    """One call of the learner's function, or one training with it, on `ranks` ranks; subclasses add awkward inputs."""

    seed: int
    ranks: int
    _: KW_ONLY
    dtype: torch.dtype = torch.float64
    only: str = ""  # the mistake's name if this case alone is wrong

    def generator(self, rank: int = 0, step: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(4096 * self.seed + 64 * step + rank)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def who(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"


@dataclass
class Outcome:
    """A rank's state after a call."""

    touched: list[int] = field(default_factory=list)  # peers whose message changed while it was being sent
    refused: bool = False  # whether the function raised an error, in a case in which it may
    left: str = ""  # the first thing that is not as it was before the call (aftermath.py)
    seconds: float = 0.0  # processor time of the call
    python_bytes: int = 0  # the most bytes that Python and NumPy held during the call


def largest_of(tensors: Iterable[Tensor]) -> float:
    """Return the largest magnitude in any of the tensors, such as the summands of a sum; 0 if they are empty."""
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def isclose(found: Tensor, expected: Tensor, tolerance: float, largest: float | None = None) -> Tensor:
    """Return for each element whether it is right: within `tolerance` of itself and of the largest; integers exactly.

    largest: the largest magnitude among the numbers that were summed to these, since they may have cancelled out.
    """
    if not expected.is_floating_point():
        return found == expected
    if largest is None:
        largest = largest_of([expected])
    return torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance * largest)


def close(found: Tensor, expected: Tensor, tolerance: float, largest: float | None = None) -> bool:
    """Return whether the shape is right and all elements are close."""
    return found.shape == expected.shape and bool(isclose(found, expected, tolerance, largest).all())
