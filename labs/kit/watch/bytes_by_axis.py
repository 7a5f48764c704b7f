"""The bytes that a rank of a mesh sent in a step, by mesh axis, and those that it held."""

from __future__ import annotations

from collections import Counter
from typing import Any


def by_axis(recording: Any, rank: int, step: int = 1) -> Counter[str]:
    """Return {axis: bytes} that a rank sent in a step of a recorded job whose process groups are those of a mesh.

    The norm's few bytes (float64) do not count, nor do the messages about shapes that PyTorch sends before its first
    step.
    """
    sent: Counter[str] = Counter()
    for event in recording.select(rank, step):
        if event.dtype != "float64" and not event.meta:
            sent[event.group.removeprefix("mesh_")] += event.sent
    return sent


def sent_and_held(sending: Any, holding: Any) -> list[dict[str, int]]:
    """Return, for each rank, the bytes that it sends along each axis in a step, and those of P, G and S that it holds.

    sending, holding: recordings of the communication and of the memory of the same two steps.
    """
    kinds = [holding.moments(rank, 1)[0][1] | {"G": holding.steady(rank)["G"]} for rank in range(holding.ranks)]
    return [by_axis(sending, rank) | held for rank, held in enumerate(kinds)]
