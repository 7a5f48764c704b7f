"""What all families share: a case, what a rank had when it was over, and when two numbers are the same."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

SETTLED = 0.05  # s in which a backend's thread lets go of what it sent, on a busy machine, too


@dataclass(frozen=True)
class Case:
    """One call of the learner's function, or one training with it, on `ranks` ranks; a family adds what is awkward."""

    seed: int
    ranks: int
    _: KW_ONLY
    dtype: torch.dtype = torch.float64
    only: str = ""  # the name of what is right everywhere but here

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
    """What one rank had when a call was over."""

    touched: list[int] = field(default_factory=list)  # peers whose message changed while it was being sent
    refused: bool = False  # it raised, where it may
    left: str = ""  # what is not as it was before (left.py),
    seconds: float = 0.0  # of the processor, and
    python_bytes: int = 0  # the most that Python and NumPy held meanwhile


def largest_of(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude in any of them, such as the summands of a sum."""
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def isclose(found: Tensor, expected: Tensor, tolerance: float, largest: float | None = None) -> Tensor:
    """Element by element, within `tolerance` of the element and of the largest one; whole numbers exactly.

    `largest`: of the numbers that were added up to these, which may have cancelled each other out.
    """
    if not expected.is_floating_point():
        return found == expected
    if largest is None:
        largest = largest_of([expected])
    return torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance * largest)


def close(found: Tensor, expected: Tensor, tolerance: float, largest: float | None = None) -> bool:
    return found.shape == expected.shape and bool(isclose(found, expected, tolerance, largest).all())
