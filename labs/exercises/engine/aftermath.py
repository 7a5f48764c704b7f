"""Traces of a function in its process: modes, defaults, random numbers, process groups; its time and its memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import torch
import torch.distributed as dist

from labs.exercises.engine.answer import Mistake
from labs.exercises.engine.case import Outcome

SECONDS = 10.0  # processor time that is enough for one call on some thousand elements, even on a slow, busy machine


class Aftermath:
    """A context around a call on a rank; `write_to(outcome)` notes what the call left changed, and what it took."""

    def __init__(self, trace: bool = False) -> None:
        self.trace = trace  # whether the bytes that Python and NumPy hold are measured, too

    def __enter__(self) -> Aftermath:
        self.before, self.python_bytes = surroundings(), 0
        if self.trace:
            tracemalloc.start()
        self.start = time.process_time()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds = time.process_time() - self.start
        if self.trace:
            self.python_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        after = surroundings()
        changed = [name for name, value in self.before.items() if value != after[name]]
        self.left = changed[0] if changed else ""

    def write_to(self, found: Outcome) -> None:
        found.left, found.seconds, found.python_bytes = self.left, self.seconds, self.python_bytes


def surroundings() -> dict[str, Any]:
    """Return what a function must leave as it found it, as `{name: value}`."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "the state of Python's random numbers": random.getstate(),
        "the number of process groups": len(dist.distributed_c10d._world.pg_map),
    }


# fmt: off
AFTERMATH = (
    Mistake("something is left behind", "What was it before your function was called, and who relies on it?",
            lambda seen: seen.left and f"after the call, {seen.left} is not what it was",
            symptom="right, but the next cell behaves strangely: a different dtype, no gradients, different random "
            "numbers"),
    Mistake("far too slow", "Which line runs once for every element?",
            lambda seen: seen.seconds > SECONDS and f"one call took {seen.seconds:.1f} s of processor time"),
)
