"""Result of a training in JAX, without any object of JAX: it can be sent to a process that has no JAX."""

from dataclasses import dataclass

import numpy as np

from labs.xla.hlo import Collective, collectives


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    losses, seconds: one number for each step
    weights: full weights, after the last step or the one asked for
    text: the compiled step, in HLO
    held: bytes of a device's weights and moments
    temporary, peak: a device's bytes in a step, by the compiler's account
    """

    losses: list[float]
    weights: dict[str, np.ndarray]
    text: str
    held: int
    seconds: list[float]
    temporary: int
    peak: int

    def collectives(self) -> list[Collective]:
        """Return the collectives of a step."""
        return collectives(self.text)

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives())
