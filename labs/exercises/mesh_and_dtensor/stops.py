"""The challenge of notebook 05: choose the stops at which a tensor changes its layout, for the fewest bytes sent.

A real job takes each path with `DTensor.redistribute`, and the recording counts the bytes.

The bound counts element by element.  A rank that needs an element and does not have it must receive it once.  If ranks
have only summands, P different ones, the first rank that knows the sum does so after at least P - 1 messages, and each
other rank that needs the sum must receive something after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from labs.dtensor import DTensor, Partial, Placement, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import mark
from labs.mesh import Mesh

SHAPE, MESH = (24, 16), (2, 2, 2)
RANKS, ITEM = prod(MESH), 8  # bytes of a float64
MOST = 12  # stops of a path; more are not needed, and each takes time
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
Layout = tuple[Placement, ...]
Way = tuple[Layout, Layout]
WAYS: tuple[Way, ...] = (
    ((S1, P, S1), (R, R, S1)),
    ((S1, P, P), (R, S0, R)),
    ((R, S1, S0), (S1, S0, S1)),
    ((S0, P, P), (R, S0, S0)),
    ((S0, P, S1), (S0, R, R)),
    ((S1, P, S1), (R, R, R)),
    ((S0, S1, R), (R, S1, S1)),
    ((S1, S1, P), (S1, R, S0)),
    ((P, S0, P), (S1, R, S1)),
    ((S1, S0, S1), (R, R, S0)),
    ((P, R, S1), (R, S0, S0)),
    ((P, S1, S1), (S0, S1, S0)),
)


def bound(source: Layout, target: Layout) -> int:
    """Return the least bytes that all ranks together must send."""
    has, needs = (holders(layout) for layout in (source, target))
    if (summands := prod(n for n, p in zip(MESH, source, strict=True) if p.is_partial())) > 1:
        return ITEM * int((summands - 1 + needs.sum(0) - 1).sum())
    return ITEM * int((needs & ~has).sum())


def holders(layout: Layout) -> torch.Tensor:
    """Return [rank, *SHAPE]: whether a rank has this element, or a summand of it."""
    found = torch.zeros(RANKS, *SHAPE, dtype=torch.bool)
    for rank, place in enumerate(product(*map(range, MESH))):
        found[rank][Spec(SHAPE, MESH, layout).block(place).slices] = True
    return found


def on_a_rank(fn: Function, ways: Sequence[Way], whole: torch.Tensor) -> list[torch.Tensor]:
    """Redistribute this rank's block of each tensor along the chosen path, and return the local results.

    whole: the tensors, [way, summand, *SHAPE].
    """
    mesh, found = Mesh(MESH, ("a", "b", "c")), []
    for (source, target), summands in zip(ways, whole, strict=True):
        spec = Spec(SHAPE, MESH, source)
        number = sum(place << axis for axis, place in enumerate(mesh.get_coordinate()) if source[axis].is_partial())
        mine = summands[number][spec.block(mesh.get_coordinate()).slices].contiguous()
        path = fn(spec, target)
        require_path(path, target)
        x = DTensor.from_local(mine, mesh, source)
        mark("step")
        for placements in path:
            x = x.redistribute(placements=placements)
        mark("end")
        found.append(x.to_local())
    return found


def require_path(path: Any, target: Layout) -> None:
    if not isinstance(path, list | tuple) or not 1 <= len(path) <= MOST:
        raise ValueError(f"it returned {show(path)}: a list of 1 to {MOST} stops is needed")
    for stop in path:
        if not isinstance(stop, list | tuple) or not all(isinstance(p, Placement) for p in stop):
            raise ValueError(f"{stop!r} is not a stop: give a placement for each of {len(target)} axes")
    if tuple(path[-1]) != target:
        raise ValueError(f"the last stop is {tuple(path[-1])}, and not the target {target}")


def judge(fn: Function) -> Judged:
    scores = [100 * bound(*way) / sent for way, sent in zip(WAYS, bytes_sent(fn, WAYS), strict=True)]
    return Judged(sum(scores) / len(scores), "by way: " + ", ".join(f"{score:.0f}" for score in scores))


def measured(fn: Function, source: Layout, target: Layout) -> int:
    """Return the bytes that all ranks together send from one layout to another, counted as the judge does."""
    return bytes_sent(fn, [(source, target)])[0]


def bytes_sent(fn: Function, ways: Sequence[Way]) -> list[int]:
    """Return the bytes sent for each way; raise Wrong if a path loses numbers."""
    whole = torch.randn(len(ways), RANKS, *SHAPE, dtype=torch.float64, generator=chance())
    results = job(on_a_rank, fn, ways, whole, ranks=RANKS)
    for number, (source, target) in enumerate(ways):
        summands = {sum(bit << axis for axis, bit in enumerate(place)) for place in product(*map(choices, source))}
        expected = torch.stack([whole[number][summand] for summand in sorted(summands)]).sum(0)
        for rank, place in enumerate(product(*map(range, MESH))):
            block = expected[Spec(SHAPE, MESH, target).block(place).slices]
            if not torch.allclose(results[rank][number], block, rtol=1e-12, atol=1e-12):
                raise Wrong(f"{source} to {target}: the numbers on rank {rank} are wrong", "Which stop lost them?")
    return [sum(results.recording.sent(rank, number) for rank in range(RANKS)) for number in range(len(ways))]


def choices(placement: Placement) -> Sequence[int]:
    return range(2) if placement.is_partial() else range(1)


stops = Challenge(
    "stops",
    "05",
    "The fewest bytes from layout to layout",
    "Twelve tensors on 2 × 2 × 2 ranks go from one layout to another. You choose the layouts at which they stop on the "
    "way; from stop to stop they go by redistribute, and what all ranks send together is counted.",
    judge,
    floor=53.9,
    course=57.4,
    possible=82.1,
    cases=WAYS,
    bound=bound,
    measured=measured,
)
