"""Before a pipeline runs: does what its ranks were given fit together?

    require_alike      the same lists on every rank
    require_same       the same stages, as far as their parameters' names tell
    require_fitting    as many ranks and stages as the lists are for; stages that take one tensor

Each raises ValueError, the first two on every rank.
"""

import inspect
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from labs.group import everybodys
from labs.pp.checker import stages_of
from labs.pp.instructions import Lists


def require_alike(lists: Lists, group: ProcessGroup | None) -> None:
    ranks, (first, *others) = everybodys(repr([*map(list, lists)]), group)
    for rank, other in zip(ranks[1:], others, strict=True):
        if other != first:
            raise ValueError(
                f"ranks {ranks[0]} and {rank} were given different schedules: give all of them the same lists"
            )


def require_same(stages: Sequence[nn.Module], group: ProcessGroup | None) -> None:
    """Compare their parameters' names, and whether these are trained: a rank may have split or sharded its own."""
    mine = [{name: p.requires_grad for name, p in stage.named_parameters()} for stage in stages]
    ranks, (first, *others) = everybodys(mine, group)
    for rank, other in zip(ranks[1:], others, strict=True):
        for number, (a, b) in enumerate(zip_longest(first, other, fillvalue={})):
            if differing := [name for name in a | b if a.get(name) != b.get(name)]:
                raise ValueError(
                    f"stage {number} is not the same on ranks {ranks[0]} and {rank}, where {differing[0]!r} is missing "
                    "or frozen on one of them: cut the same model in the same way on all ranks"
                )


def require_fitting(stages: Sequence[nn.Module], lists: Lists, group: ProcessGroup | None) -> None:
    if len(lists) != dist.get_world_size(group):
        raise ValueError(f"the schedule is for {len(lists)} ranks, and the group has {dist.get_world_size(group)}")
    if len(stages) != stages_of(lists):
        raise ValueError(f"the schedule is for {stages_of(lists)} stages, and the model is cut into {len(stages)}")
    for number, stage in enumerate(stages):
        inputs = [
            p.name
            for p in inspect.signature(stage.forward).parameters.values()
            if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
        if len(inputs) > 1:
            raise ValueError(
                f"stage {number} takes {' and '.join(inputs)}, but gets one tensor, from the stage before it: what is "
                "to skip a stage would have to travel through it, so make it a part of that tensor, or cut elsewhere"
            )
