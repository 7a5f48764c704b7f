"""What XLA makes of two layouts, where JAX is installed: one process, on as many virtual devices as there are ranks.

Its communication does not pass through PyTorch: what is sent is read from the compiled program, what is held from the
compiler's own account.  Neither is predicted, but for P and S, which lie as they were told to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from labs import cost
from labs.kit import virtual
from labs.kit.rows.row import Strategy
from labs.kit.rows.tp_rows import pair


@dataclass(frozen=True)
class Compiled:
    """As a Strategy; predict: of the one of ours that holds as much of P."""

    name: str
    axes: Callable[[int], Mapping[str, int]]
    predict: Callable[[cost.Job], cost.Prediction]
    note: str
    side: str = "native"
    computes: torch.dtype = torch.float32

    ranks, fits = Strategy.ranks, Strategy.fits


def there(axes: Callable[[int], Mapping[str, int]], asked: int) -> Mapping[str, int]:
    if reason := virtual.missing():
        raise ValueError(reason)
    if asked & (asked - 1):
        raise ValueError("XLA cuts into equal parts, which sizes of 2, 4 and 8 do here")
    return axes(asked)


def all_of_them(asked: int) -> Mapping[str, int]:
    return {"dp": asked}


HOW = "is one process with virtual devices, whose bytes are XLA's own account"
GSPMD = (
    Compiled("gspmd-fsdp", partial(there, all_of_them), cost.fsdp, f"{HOW}; on CPUs it all-reduces G"),
    Compiled("gspmd-tp", partial(there, pair), cost.tp, HOW),
)
