"""A function that each device runs on its own piece (jax.shard_map): ZeRO 3's gradients, and a pipeline of stages.

The function runs on virtual devices.  Its result is compared with one device's, and the bytes that it sends are read
from the program that XLA has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from labs.exercises.engine import by_script
from labs.exercises.engine.answer import Mistake, Wrong
from labs.exercises.engine.by_script import Play, as_found, first_wrong, on_one_rank
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import Look, World
from labs.kit.extras import jax_devices
from labs.xla.hlo import Collective

N = 4


Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Devices(World):
    """A world of one rank, whose process has virtual devices.

    given: further arguments of the function that runs the learner's.
    """

    ranks: int = 1
    seconds: float = 60.0  # three programs are compiled
    devices: int = N
    given: tuple[int, ...] = ()
    words: str = f"{N} devices"

    def __str__(self) -> str:
        return self.words


@dataclass
class Run:
    """A run of the learner's function on virtual devices; its result and the expected result are `{name: array}`.

    sent: the collectives of the compiled program.
    own: for each device's part of the batch, the result of this part alone.
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


def run_on_devices(
    world: Devices, fn: Callable[..., Any], run: Callable[..., Run | str], mistakes: Sequence[Mistake]
) -> Iterator[Look | None]:
    """Play `run` on the devices; the look's facts are the first mistake, and the bytes that the program sends."""
    yield None
    found = jax_devices.with_devices(world.devices, run, (fn, world.seed, *world.given), {})
    if isinstance(found, str):
        yield Look({}, first_wrong(KIND, [("", found)]))
    else:
        sent = {"sent": sum(one.sent for one in found.sent), "weights": found.weights}
        yield Look({}, first_wrong(mistakes, [("", found)]) or sent)


# fmt: off
KIND = (
    Mistake("nothing is returned", "What does the docstring say is returned?", lambda found: found == "None"),
    Mistake("a different kind of answer", "What does the docstring say is returned?",
            lambda found: f"it returns {found}"),
)
# fmt: on


def play(
    worlds: Callable[[Draw], dict[int, list[Devices]]],
    run: Callable[..., Run | str],
    mistakes: Sequence[Mistake],
    question: str,
    raised: Sequence[Mistake] = (),
) -> Play:
    """Return an exercise that calls the learner's function on virtual devices; its rows describe the Run."""
    script = partial(run_on_devices, run=run, mistakes=mistakes)
    return Play(worlds, script, ((on_one_rank, as_found((*KIND, *mistakes))),), question, raised=raised)


def checked(play: Play, fn: Callable[..., Any], seed: int) -> dict[str, int]:
    """Return the bytes sent and those of the weights; raise Wrong for the first mistake, or if there is no JAX."""
    if told := jax_devices.jax_missing():
        raise Wrong(told, "Has it been added to the course's own Python?")
    return by_script.checked(play, (fn,), seed).seen[-1].done[0].facts


class OfAnotherKind(Exception):
    """An error about a returned value that cannot be compared; its text describes the value."""
