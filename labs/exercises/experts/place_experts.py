"""The challenge of 12b: place experts on ranks, so that the busiest rank computes as few rows as possible.

The loads are those of a GPT with 16 experts in each of three layers, of which a token uses two, after 60 steps with a
balance loss of weight 0.02; each micro-batch has two sequences of 64 tokens.  Rows travel in a real job as placed, and
what each rank receives is counted.

The bound: four ranks share all rows of a micro-batch, and an expert's rows are on one rank.  So the busiest rank
computes at least a quarter of all rows, and at least those of the busiest expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labs.agree import require_same
from labs.exercises.engine.answer import show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.launch import Results
from labs.kit.record import mark
from labs.moe import AllToAll

Loads = Sequence[Sequence[int]]  # [micro-batch][expert]

RANKS, DIM = 4, 3
CASES: dict[str, Loads] = {
    "first layer": (
        (11, 11, 39, 11, 16, 13, 2, 16, 17, 33, 15, 15, 13, 20, 15, 9),
        (13, 5, 45, 11, 11, 7, 4, 10, 45, 30, 27, 1, 23, 4, 8, 12),
        (14, 19, 23, 31, 16, 8, 2, 11, 49, 23, 2, 11, 17, 4, 13, 13),
        (20, 19, 32, 17, 19, 4, 3, 10, 54, 7, 12, 7, 24, 2, 19, 7),
    ),
    "second layer": (
        (8, 23, 0, 36, 1, 37, 12, 10, 13, 14, 7, 13, 10, 35, 28, 9),
        (15, 12, 0, 20, 3, 44, 5, 3, 15, 6, 7, 52, 6, 36, 9, 23),
        (21, 44, 1, 0, 17, 5, 6, 6, 15, 11, 16, 17, 7, 41, 8, 41),
        (18, 33, 0, 25, 5, 6, 7, 1, 24, 6, 27, 20, 3, 45, 6, 30),
    ),
    "third layer": (
        (8, 20, 11, 6, 9, 38, 51, 6, 13, 21, 4, 10, 8, 34, 16, 1),
        (2, 9, 10, 35, 43, 6, 49, 11, 17, 45, 3, 3, 16, 0, 7, 0),
        (6, 17, 14, 10, 50, 3, 12, 30, 22, 22, 9, 15, 28, 3, 5, 10),
        (11, 7, 16, 12, 37, 2, 28, 38, 24, 33, 3, 4, 31, 0, 6, 4),
    ),
}


def bound(loads: Loads) -> int:
    """Return the fewest rows that the busiest ranks of all micro-batches compute together."""
    return sum(max(-(-sum(each) // RANKS), *each) for each in loads)


def on_a_rank(fn: Function, cases: Sequence[Loads], seed: int) -> list[int]:
    """Send the rows of each micro-batch of each case as placed; return the rows that this rank keeps in each."""
    kept, me = [], dist.get_rank()
    for loads in cases:
        placed = fn([[*each] for each in loads], RANKS)
        require_placement(placed, len(loads[0]))
        require_same(placed, None, "rank {} places the experts as {}, and rank {} as {}".format)
        rank_of = torch.tensor(placed)
        for load in loads:
            own = torch.tensor(load).add(RANKS - 1 - me) // RANKS  # as even as possible
            chosen = torch.arange(len(load)).repeat_interleave(own)
            x = torch.randn(len(chosen), DIM, generator=torch.Generator().manual_seed(seed + me))
            order = rank_of[chosen].argsort(stable=True)
            sends = rank_of[chosen].bincount(minlength=RANKS)
            mark("step")
            receives = torch.empty_like(sends)
            dist.all_to_all_single(receives, sends)
            sides = sends.tolist(), receives.tolist()
            rows = AllToAll.apply(torch.cat([x, chosen[:, None] + 1.0], 1)[order], *sides, None)
            back = AllToAll.apply(rows[:, :DIM] * rows[:, DIM:], *sides[::-1], None)
            mark("end")
            assert torch.equal(back, (x * (chosen[:, None] + 1))[order])
            kept.append(sides[0][me])
    return kept


def require_placement(placed: Any, experts: int) -> None:
    if not isinstance(placed, list | tuple) or not all(type(rank) is int for rank in placed):
        raise ValueError(f"it returned {show(placed)}: a list with the rank of each expert is needed, whole numbers")
    if len(placed) != experts:
        raise ValueError(f"it placed {len(placed)} experts, and there are {experts}")
    if any(placed.count(rank) != experts // RANKS for rank in range(RANKS)):
        raise ValueError(f"{placed}: each of the {RANKS} ranks has room for {experts // RANKS} experts")


def rows_by_rank(results: Results, step: int) -> list[int]:
    """Return the rows that each rank computes in a step: those that it keeps, and those that are sent to it."""
    rows = [kept[step] for kept in results]
    for rank in range(RANKS):
        there = next(event for event in results.recording.select(rank, step) if event.dtype == "float32")
        for to, size in there.to.items():
            rows[to] += size // (4 * (DIM + 1)) if to != rank else 0
    return rows


def measured(name: str, placed: Sequence[int]) -> list[list[int]]:
    """Return the rows that each rank computes, [micro-batch][rank], for one case and placement.

    Raises ValueError for a placement that is not allowed.
    """
    require_placement(placed, len(CASES[name][0]))
    results = job(on_a_rank, lambda loads, ranks: placed, [CASES[name]], 0, ranks=RANKS)
    return [rows_by_rank(results, step) for step in range(len(CASES[name]))]


def judge(fn: Function) -> Judged:
    results = job(on_a_rank, fn, list(CASES.values()), chance().initial_seed() % 2**40, ranks=RANKS)
    scores, step = {}, 0
    for name, loads in CASES.items():
        busiest = [max(rows_by_rank(results, step + number)) for number in range(len(loads))]
        scores[name], step = 100 * bound(loads) / sum(busiest), step + len(loads)
    return Judged.of(scores)


place_experts = Challenge(
    "place_experts",
    "12b",
    "Place experts so that the busiest rank computes least",
    "Sixteen experts on four ranks, four on each. Choose the rank of each expert for the recorded loads of three "
    "layers; rows travel in a real job, and the rows of the busiest rank of each micro-batch are counted.",
    judge,
    floor=69.4,
    course=73.8,
    possible=91.9,
    cases=CASES,
    bound=bound,
    measured=measured,
)
