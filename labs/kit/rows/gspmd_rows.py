"""Strategies of XLA's compiler (GSPMD), if JAX is installed: one process, with a virtual device for each rank.

XLA's communication does not pass through PyTorch: the bytes sent are read from the compiled program, and the bytes held
from the compiler's own figures.  Only P and S are predicted, since the compiler keeps the layout that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from labs import cost
from labs.kit.extras import jax_devices
from labs.kit.rows.row import Strategy
from labs.kit.rows.tp_rows import pair


@dataclass(frozen=True)
class Compiled:
    """A row of the table for a program that XLA compiles.

    predict: the prediction for the strategy of this course that holds the same share of P.
    """

    name: str
    axes: Callable[[int], Mapping[str, int]]
    predict: Callable[[cost.Job], cost.Prediction]
    note: str
    side: str = "native"
    computes: torch.dtype = torch.float32

    ranks, fits = Strategy.ranks, Strategy.fits


def there(axes: Callable[[int], Mapping[str, int]], asked: int) -> Mapping[str, int]:
    if reason := jax_devices.jax_missing():
        raise ValueError(reason)
    if asked & (asked - 1):
        raise ValueError(f"XLA cuts tensors into equal parts, which 2, 4 or 8 ranks do: not {asked}")
    return axes(asked)


def all_of_them(asked: int) -> Mapping[str, int]:
    return {"dp": asked}


HOW = "is one process with virtual devices, whose bytes XLA reports"
GSPMD = (
    Compiled("gspmd-fsdp", partial(there, all_of_them), cost.fsdp, f"{HOW}; on CPUs it all-reduces G"),
    Compiled("gspmd-tp", partial(there, pair), cost.tp, HOW),
)
