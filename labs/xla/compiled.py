"""What a training in JAX leaves behind, without any of JAX: it can be sent to a process that has none."""

from dataclasses import dataclass

import numpy as np

from labs.xla.hlo import Collective, collectives


@dataclass(frozen=True)
class Trained:
    """losses, seconds: by step.  weights: whole, after the last one, or the one asked for.  text: the step, in HLO.

    held: bytes of a device's weights and moments.  temporary, peak: of a device in a step, by the compiler's account.
    """

    losses: list[float]
    weights: dict[str, np.ndarray]
    text: str
    held: int
    seconds: list[float]
    temporary: int
    peak: int

    def collectives(self) -> list[Collective]:
        """Those of a step."""
        return collectives(self.text)

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives())
