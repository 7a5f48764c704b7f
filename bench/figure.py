"""The result of a benchmark: one figure, with its spread, its sample count and the target that it must meet."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A median of `count` samples, `value`, with their quartiles `low` and `high`, all in `unit` ("×" for a ratio).

    target: the bound that the course promises, as "at most 1.10" or "at least 20"; "" if it promises none
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
    """Return second / first for pairs of measurements that were taken one right after the other."""
    return [second / first for first, second in pairs]
