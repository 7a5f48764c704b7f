"""Checks of the arguments of a pipeline: do lists, stages and ranks fit together?

    require_same_lists    all ranks have the same lists
    require_same_stages   all ranks have the same list of all stages, judged by the parameters' names
    require_fitting       the lists are for this number of ranks and stages, and each stage takes one tensor
    require_known         the parameters that a stage or the loss uses belong to the pipeline

Each of these checks raises ValueError; the first two raise it on every rank.
"""

import inspect
from collections.abc import Sequence, Set
from functools import partial
from itertools import zip_longest

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from labs.agree import first_difference, on_all_ranks, require_same
from labs.ddp import DataParallel
from labs.pp.checker import stages_of
from labs.pp.instructions import Instruction, Lists


def require_same_lists(lists: Lists, group: ProcessGroup | None) -> None:
    require_same(
        repr([*map(list, lists)]),
        group,
        lambda rank, its, other, others: (
            f"ranks {rank} and {other} were given different schedules: give all of them the same lists"
        ),
    )


def require_same_stages(stages: Sequence[nn.Module], group: ProcessGroup | None) -> None:
    """Raise ValueError, on every rank, if the ranks' lists of all stages differ.

    Parameters' names are compared, and whether they are trained, but not shapes: a rank may have split its own stages.
    """
    on_all_ranks(partial(require_bare, stages), group)
    mine = [{name: p.requires_grad for name, p in stage.named_parameters()} for stage in stages]

    def sentence(rank: int, its: list[dict[str, bool]], other: int, others: list[dict[str, bool]]) -> str:
        stages = enumerate(zip_longest(its, others, fillvalue={}))
        number, name = next((number, first_difference(a, b)) for number, (a, b) in stages if a != b)
        return (
            f"stage {number} is not the same on ranks {rank} and {other}, where {name!r} is missing or frozen on one "
            "of them: cut the same model in the same way on all ranks"
        )

    require_same(mine, group, sentence)


def require_bare(stages: Sequence[nn.Module]) -> None:
    for number, stage in enumerate(stages):
        if isinstance(stage, DataParallel | DistributedDataParallel):
            raise ValueError(
                f"stage {number} is wrapped in {type(stage).__name__}, which averages gradients in each micro-batch's "
                "backward: give the stage itself, and average each p.grad after forward_backward, or take labs.parallel"
            )


def require_known(x: Instruction, y: Tensor, known: Set[Tensor]) -> None:
    """Raise ValueError if y, the output of instruction x, depends on a parameter that is not in `known`.

    No optimizer would update a parameter that the pipeline does not know, and no rank would send its gradient.
    """
    nodes, seen = [y.grad_fn], {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            p = getattr(node, "variable", None)
            if isinstance(p, nn.Parameter) and p not in known and not hasattr(p, "to_local"):
                raise ValueError(
                    f"{x!r} used a parameter of shape {tuple(p.shape)} that no stage of this rank had when the "
                    "Pipeline was made: tie and replace parameters before, and put those of a loss into the last stage"
                )


def require_fitting(stages: Sequence[nn.Module], lists: Lists, group: ProcessGroup | None) -> None:
    if len(lists) != dist.get_world_size(group):
        raise ValueError(
            f"the schedule is for {len(lists)} ranks, and the group has {dist.get_world_size(group)}: change one"
        )
    if len(stages) != stages_of(lists):
        raise ValueError(
            f"the schedule is for {stages_of(lists)} stages, and the model is cut into {len(stages)}: change one"
        )
    for number, stage in enumerate(stages):
        inputs = [
            p.name
            for p in inspect.signature(stage.forward).parameters.values()
            if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
        if len(inputs) > 1:
            raise ValueError(
                f"stage {number} takes {' and '.join(inputs)}, but gets one tensor, from the stage before it: make "
                "a tensor that skips a stage a part of that tensor, or cut the model elsewhere"
            )
