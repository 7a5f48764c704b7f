"""How long does an all-reduce take, around a ring and up and down a tree?  By latency and bandwidth."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.pencil.sheet import AsIf, Sheet, as_if, on_paper

Count = Callable[[int], float]  # of something, by the number of ranks


@answered
def ring_seconds(fn: Callable[..., Any], seed: int) -> str:
    """`fn(size, ranks, latency, bandwidth) -> seconds`: 2 (N − 1) rounds, a piece in each."""
    return on_paper(fn, sheets(ring, seed), RING, "How many rounds are there, and how many bytes are sent in each?")


@answered
def tree_seconds(fn: Callable[..., Any], seed: int) -> str:
    """`fn(size, ranks, latency, bandwidth) -> seconds`: reduce, then broadcast, by whole tensors."""
    return on_paper(fn, sheets(tree, seed), TREE, "How many rounds are there, and how many bytes are sent in each?")


def sheets(due: Callable[..., float], seed: int) -> list[Sheet]:
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
    return [Sheet(job, due(*job), words(*job)) for job in jobs]


def words(size: int, ranks: int, latency: float, bandwidth: float) -> str:
    return f"{size:,} bytes, {ranks} ranks, latency {latency:.3g} s, bandwidth {bandwidth:.3g} bytes/s"


def doublings(ranks: int) -> int:
    return (ranks - 1).bit_length()


# The answers; or wrong ones, by how often the latency is paid, and how often the tensor is sent.


def ring(
    size: int,
    ranks: int,
    latency: float,
    bandwidth: float,
    rounds: Count = lambda n: 2 * (n - 1),
    tensors: Count = lambda n: 2 * (n - 1) / n,
) -> float:
    return rounds(ranks) * latency + tensors(ranks) * size / bandwidth


def tree(
    size: int,
    ranks: int,
    latency: float,
    bandwidth: float,
    rounds: Count = lambda n: 2 * doublings(n),
    tensors: Count | None = None,
) -> float:
    return rounds(ranks) * latency + (tensors or rounds)(ranks) * size / bandwidth


def multiplied(way: Callable[..., float]) -> AsIf:
    return as_if(lambda size, ranks, latency, bandwidth: way(size, ranks, latency, 1 / bandwidth))


ONCE = "Who pays the latency again, in the second round?"
FREE = "A message of no bytes arrives after how many seconds?"
UNITS = "Bytes, and bytes per second: how do they become seconds?"

# fmt: off
RING = (
    Mistake("only the first half of the ring",
            "After the reduce_scatter every rank has one piece of the sum. What is left to do?",
            as_if(ring, rounds=lambda n: n - 1, tensors=lambda n: (n - 1) / n)),
    Mistake("whole tensors travel", "How large is what leaves in one round?",
            as_if(ring, tensors=lambda n: 2 * (n - 1))),
    Mistake("the bytes of one round only", "A piece leaves in every round. How many pieces is that?",
            as_if(ring, tensors=lambda n: 1 / n)),
    Mistake("the latency is left out", FREE, as_if(ring, rounds=lambda n: 0)),
    Mistake("the latency paid only once", ONCE,
            as_if(partial(ring, rounds=lambda n: 1), partial(ring, rounds=lambda n: 2))),
    Mistake("the latency of one half only",
            "How many rounds are there in a reduce_scatter, and how many in an all_gather?",
            as_if(ring, rounds=lambda n: n - 1)),
    Mistake("a tree's rounds, and not a ring's", "Whom can a rank in a ring reach in one round?",
            as_if(ring, rounds=lambda n: 2 * doublings(n))),
    Mistake("N rounds, and not N − 1", "With two ranks, how often does a rank send?",
            as_if(ring, rounds=lambda n: 2 * n, tensors=lambda n: 2)),
    Mistake("two tensors, however few the ranks", "With two ranks, how much does a rank send?",
            as_if(ring, tensors=lambda n: 2)),
    Mistake("bytes are multiplied by bytes per second, and not divided", UNITS, multiplied(ring)),
)
TREE = (
    Mistake("the way back is left out", "The root has the sum. Who needs it?", as_if(tree, rounds=doublings)),
    Mistake("the rounds are not rounded up", "With five ranks, how many rounds does it take until all have heard?",
            as_if(*(partial(tree, rounds=rounds)
                    for rounds in (lambda n: 2 * math.log2(n), lambda n: 2 * (n.bit_length() - 1))))),
    Mistake("one round too many", "With two ranks, how many rounds does a broadcast take?",
            as_if(tree, rounds=lambda n: 2 * n.bit_length())),
    Mistake("a round for each rank, and not for each doubling", "In each round, how many ranks tell another one?",
            as_if(tree, rounds=lambda n: 2 * (n - 1))),
    Mistake("pieces travel as in a ring, and not whole tensors",
            "What does a rank in the tree hand on: a piece, or all that it has?",
            as_if(tree, tensors=lambda n: 2 * doublings(n) / n)),
    Mistake("the latency is left out", FREE, as_if(tree, rounds=lambda n: 0, tensors=lambda n: 2 * doublings(n))),
    Mistake("the latency paid only once", ONCE, as_if(tree, rounds=lambda n: 1, tensors=lambda n: 2 * doublings(n))),
    Mistake("the bytes of one round only", "A whole tensor is sent in every round. How many tensors is that?",
            as_if(tree, tensors=lambda n: 1)),
    Mistake("bytes are multiplied by bytes per second, and not divided", UNITS, multiplied(tree)),
)
