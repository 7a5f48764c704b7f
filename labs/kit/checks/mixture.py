"""What is this made of?  A vector as a mixture of known ones, by least squares."""

from __future__ import annotations

import torch
from torch import Tensor


def mixture(found: Tensor, sources: list[Tensor]) -> Tensor | None:
    """The numbers c with found = Σ c_i sources_i (all of them vectors of one length).

    None where there are none, or too few elements to tell.
    """
    matrix, right = torch.stack(sources, 1).double(), found.double()
    if len(right) <= len(sources) or not right.isfinite().all():
        return None
    solution = torch.linalg.lstsq(matrix, right).solution
    exact = torch.allclose(matrix @ solution, right, rtol=1e-3, atol=1e-3 * float(right.abs().max() + 1e-12))
    return solution if exact else None
