"""A function that each device runs on its own piece (jax.shard_map): ZeRO 3's gradients, and a pipeline of stages.

The function runs on virtual devices.  Its result is compared with one device's, and the bytes that it sends are read
from the program that XLA has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labs.exercises.engine.answer import Wrong
from labs.exercises.engine.launching import job
from labs.kit.extras import jax_devices
from labs.xla.hlo import Collective

N = 4


COMPILING = 60.0  # s of processor time, in which a job compiles three programs


Arrays = dict[str, np.ndarray]


@dataclass
class Run:
    """A run of the learner's function, with its result and the expected one, as `{name: array}`.

    sent: the collectives of the compiled program.
    own: for each part, the result that would be expected of it alone.
    weights: the bytes of the weights.
    at_once: the number of micro-batches in one call of a stage.
    stages, microbatches: the sizes of a pipeline.
    each: the bytes of a micro-batch.
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
        """Return the number of micro-batches that come out of a pipeline."""
        return len(self.received["what comes out"])

    def is_expected(self, times: float = 1.0) -> bool:
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
        """Return a sentence about the first wrong value, or "" if all are right."""
        for name, expected in self.expected.items():
            if (shape := np.shape(self.received[name])) != expected.shape:
                return f"{name!r} is {shape} on all devices together, and not {expected.shape}"
            if not np.allclose(self.received[name], expected, rtol=1e-4, atol=1e-5):
                at = tuple(map(int, np.argwhere(~np.isclose(self.received[name], expected, rtol=1e-4, atol=1e-5))[0]))
                return f"{name!r} at {list(at)} is {self.received[name][at]:.4g}, and not {expected[at]:.4g}"
        return ""


def on_virtual_devices(script: Callable[..., Run | str], fn: Callable[..., Any], *given: int, devices: int = N) -> Run:
    if told := jax_devices.jax_missing():
        raise Wrong(told, "Has it been added to the course's own Python?")
    run = job(jax_devices.with_devices, devices, script, (fn, *given), {}, ranks=1, seconds=COMPILING)[0]
    if isinstance(run, str):
        mistake = "nothing is returned" if run == "None" else "a different kind of answer"
        raise Wrong(f"it returns {run}", "What does the docstring say is returned?", mistake)
    return run


class OfAnotherKind(Exception):
    """An error about a returned value that cannot be compared; its text describes the value."""
