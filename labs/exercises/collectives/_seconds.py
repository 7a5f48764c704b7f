"""Sizes, ranks and networks on which ring_seconds and tree_seconds are tried."""

import random
from collections.abc import Callable

from labs.exercises.engine.on_paper import Sheet

Count = Callable[[int], float]  # a function from the number of ranks to a number of rounds or tensors


def sheets(expected: Callable[..., float], seed: int) -> list[Sheet]:
    """Return the sheets, with `expected(size, ranks, latency, bandwidth)` as their answers."""
    draw = random.Random(seed)
    jobs = [
        (1_000_000, 8, 20e-6, 10e9),
        (4096, 5, 2e-6, 25e9),
        (10**9, 3, 100e-6, 1e8),
        (7, 6, 5e-6, 50e9),
        (0, 4, 1e-5, 1e9),
        (64, 1, 1e-5, 1e9),
        (10**6, 2, 0.0, 1e9),
        *((draw.randrange(1, 10**8), draw.randrange(7, 1100), draw.uniform(1e-6, 1e-4), 1e9 * k) for k in (1, 10, 50)),
    ]
    return [Sheet(job, expected(*job), words(*job)) for job in jobs]


def words(size: int, ranks: int, latency: float, bandwidth: float) -> str:
    return f"{size:,} bytes, {ranks} ranks, latency {latency:.3g} s, bandwidth {bandwidth:.3g} bytes/s"


def doublings(ranks: int) -> int:
    """Return ceil(log2 ranks)."""
    return (ranks - 1).bit_length()
