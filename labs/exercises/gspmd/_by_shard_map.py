"""A function that each device runs on its own piece (jax.shard_map): ZeRO 3's gradients, and a pipeline of stages.

It runs on virtual devices.  What it gives is compared with one device's, and what it sends is read from what XLA has
compiled: missing numbers, and needless bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labs.exercises.engine.answer import Wrong
from labs.exercises.engine.launching import job
from labs.kit import virtual
from labs.xla.hlo import Collective

N = 4


COMPILING = 60.0  # s of the processor: three programs in a job


Arrays = dict[str, np.ndarray]


@dataclass
class Run:
    """By name: found, what it gave; due; own: what would be due of each part alone.

    sent: the collectives of the compiled program; weights: bytes; at_once: micro-batches in one call of a stage;
    stages, microbatches: of a pipeline; each: bytes of a micro-batch.
    """

    received: Any
    expected: Arrays
    sent: Sequence[Collective]
    own: Sequence[Arrays] = ()
    weights: int = 0
    at_once: int = 1
    stages: int = N
    microbatches: int = 0
    each: int = 0

    def __len__(self) -> int:
        """What comes out of a pipeline, in micro-batches."""
        return len(self.received["what comes out"])

    def is_due(self, times: float = 1.0) -> bool:
        return self.is_like({name: times * value for name, value in self.expected.items()})

    def is_like(self, other: Arrays) -> bool:
        return all(
            np.shape(self.received[name]) == value.shape
            and np.allclose(self.received[name], value, rtol=1e-4, atol=1e-5)
            for name, value in other.items()
        )

    def bytes_of(self, kind: str) -> int:
        return sum(one.sent for one in self.sent if one.kind == kind)

    @property
    def description(self) -> str:
        """The first that is not as it should be, and where."""
        for name, expected in self.expected.items():
            if (shape := np.shape(self.received[name])) != expected.shape:
                return f"{name!r} is {shape} on all devices together, and not {expected.shape}"
            if not np.allclose(self.received[name], expected, rtol=1e-4, atol=1e-5):
                at = tuple(map(int, np.argwhere(~np.isclose(self.received[name], expected, rtol=1e-4, atol=1e-5))[0]))
                return f"{name!r} at {list(at)} is {self.received[name][at]:.4g}, and not {expected[at]:.4g}"
        return ""


def on_virtual_devices(script: Callable[..., Run | str], fn: Callable[..., Any], *given: int, devices: int = N) -> Run:
    if told := virtual.missing():
        raise Wrong(told, "Has it been added to the course's own Python?")
    run = job(virtual.with_devices, devices, script, (fn, *given), {}, ranks=1, seconds=COMPILING)[0]
    if isinstance(run, str):
        mistake = "nothing is returned" if run == "None" else "a different kind of answer"
        raise Wrong(f"it returns {run}", "What does the docstring say is returned?", mistake)
    return run


class OfAnotherKind(Exception):
    """What was returned cannot be looked at; it says what it is."""
