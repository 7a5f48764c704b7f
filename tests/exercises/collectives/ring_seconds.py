"""Answers on paper to notebook 02: how long an all-reduce takes, as a ring and as a tree; what rings send."""

from labs.exercises.collectives.ring_seconds import RING
from tests.answers import Exercise

# fmt: off
rings = Exercise("ring_seconds")
TEN = "right on all 10 examples"

# ---- ring_seconds: right ---------------------------------------------------------------------------------


@rings.right(line=TEN)
def ring(size, ranks, latency, bandwidth):
    rounds = 2 * (ranks - 1)
    piece = size / ranks
    return rounds * latency + rounds * piece / bandwidth


LATENCY, BYTES = "rounds * latency", "rounds * piece / bandwidth"
TOTAL = f"{LATENCY} + {BYTES}"
EACH = "latency + piece / bandwidth"

rings.vary(ring, {TOTAL: f"rounds * ({EACH})"}, line=TEN)
# ---- ring_seconds: wrong ---------------------------------------------------------------------------------

rings.spoil(ring, "a different kind of answer", {" + ": ", "})


# ---- sent_by_rings: wrong --------------------------------------------------------------------------------


rings.instead(RING)
