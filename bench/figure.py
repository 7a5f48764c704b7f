"""What a benchmark hands over: one figure, with its spread, its count and the target that it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`value`, the median of `count` samples, and their quartiles, all in `unit` ("×" for a ratio).

    target: the bound that the course promises, as "at most 1.10" or "at least 20"; "" where it promises none.
    """

    name: str
    value: float
    low: float
    high: float
    count: int
    unit: str = "×"
    target: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if not self.target:
            return None
        sign, bound = self.target.rsplit(" ", 1)
        return self.value <= float(bound) if sign == "at most" else self.value >= float(bound)


def figure(name: str, samples: Sequence[float], unit: str = "×", target: str = "", note: str = "") -> Figure:
    low, value, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Figure(name, value, low, high, len(samples), unit, target, note)


def ratios(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """second / first, of measurements that were taken one right after the other."""
    return [second / first for first, second in pairs]
