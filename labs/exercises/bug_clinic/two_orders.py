"""two_orders: two process groups, whose all-reduces begin in another order on some ranks."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn
from labs.mesh import Mesh

AXES, EACH, SIZE = ("dp", "tp"), 2, 16  # buckets of each axis; elements


def faulty(ready: Sequence[tuple[str, Tensor]], groups: Mapping[str, dist.ProcessGroup]) -> list[dist.Work]:
    works = []
    for axis, bucket in ready:
        works.append(dist.all_reduce(bucket, group=groups[axis], async_op=True))
    return works


def right(ready: Sequence[tuple[str, Tensor]], groups: Mapping[str, dist.ProcessGroup]) -> list[dist.Work]:
    in_order = sorted(ready, key=itemgetter(0))
    return [dist.all_reduce(bucket, group=groups[axis], async_op=True) for axis, bucket in in_order]


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    """Add up the buckets of each axis; the backward of ranks 0 and 3 makes them ready in the other order."""
    mesh, rank = Mesh((2, 2), AXES), dist.get_rank()
    buckets = {axis: [*drawn((EACH, SIZE), seed, rank, number)] for number, axis in enumerate(AXES)}
    ready = [(axis, bucket) for axis in sorted(AXES, reverse=rank in (0, 3)) for bucket in buckets[axis]]
    for work in fn(ready, {axis: mesh.get_group(axis) for axis in AXES}):
        work.wait()
    return {axis: torch.stack(each) for axis, each in buckets.items()}


def alone(seed: int) -> list[dict[str, Tensor]]:
    def total(rank: int, number: int, other: int) -> Tensor:
        return sum(drawn((EACH, SIZE), seed, each, number) for each in (rank, other))

    return [{"dp": total(rank, 0, (rank + 2) % RANKS), "tp": total(rank, 1, rank ^ 1)} for rank in range(RANKS)]


# fmt: off
two_orders = clinic(
    "c", faulty, right, job, alone, number=11, tells={"verdict", "dry"},
    asks="`fn(ready, groups) -> works`, which starts the all-reduce of each bucket in its group; ready: pairs of "
         "an axis and its bucket, in the order in which this rank's backward has filled them; groups: the process "
         "group of each axis",
    threads=("meta-pytorch/torchrec/pull/4149 closed 2026-04-22", "NVIDIA/nccl/issues/195 closed 2019-03-18"),
    mistake="each rank in its own order",
    question="In which order does each rank start its all-reduces, and which ranks share both groups' ranks?",
)
# fmt: on
