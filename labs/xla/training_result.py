"""Result of a training in JAX, without any object of JAX, so that a process without JAX can receive it."""

from dataclasses import dataclass

import numpy as np

from labs.xla.hlo import Collective, collectives


@dataclass(frozen=True)
class Trained:
    """The result of a training in JAX.

    losses, seconds: one number for each step
    weights: full weights, after the last step or the step `kept_after`
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
        """Return the collectives of the compiled training step."""
        return collectives(self.text)

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends in a training step."""
        return sum(one.sent for one in self.collectives())
