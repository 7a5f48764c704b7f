"""torch.distributed.pipelining: the schedules of `labs.pp` by their names, and what PyTorch does not refuse."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

V = "zbv", "dualpipev"  # schedules in which a rank has two stages that follow one another: the last rank, at its turn
HAS_V = torch.__version__ >= "2.12"


def pp(
    stages: Sequence[nn.Module],
    name: str,
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    group: ProcessGroup | None = None,
) -> Any:
    """`labs.pp.Pipeline`, with a schedule of `labs.pp.SCHEDULES` by its name; `.step(x, target=y, losses=[])` runs it.

    x is for the rank of the first stage, target and losses are for that of the last one.  All gradients are divided by
    the number of micro-batches at the end of a step, those of earlier steps, too.  A parameter that stages share is not
    handled: all-reduce its gradient before the optimizer's step.  Under the schedules that split the backward, W goes
    through the whole of what F has kept.

    Raises NotImplementedError for zbv and dualpipev over gloo before PyTorch 2.12; ValueError for fewer micro-batches
    than ranks, and for stages whose layers FSDP reshards after forward, where a schedule splits the backward: gradients
    would be wrong, without a word.
    """
    from torch.distributed.pipelining import PipelineStage, schedules  # not at the head: each rank would wait

    kind = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb1p": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    rank, ranks, is_v = dist.get_rank(group), dist.get_world_size(group), name in V
    require_runnable(name, microbatches, ranks, dist.get_backend(group))
    mine = [rank, 2 * ranks - 1 - rank] if is_v else range(rank, len(stages), ranks)
    if name in ("zb1p", *V):
        require_gathered(name, {s: stages[s] for s in mine})
    device = torch.get_default_device()
    parts = [PipelineStage(stages[s], s, len(stages), device, group=group) for s in mine]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(parts[0] if single else parts, microbatches, loss_fn=loss)


def require_runnable(name: str, microbatches: int, ranks: int, backend: str) -> None:
    if name in V and not HAS_V and backend == "gloo":
        raise NotImplementedError(
            f"PyTorch {torch.__version__} sends a message from a stage to the next one before it runs {name}, and gloo "
            "has none from a rank to itself: take PyTorch 2.12 or later, or labs.pp"
        )
    if microbatches < ranks:
        raise ValueError(
            f"{microbatches} micro-batches are fewer than the {ranks} ranks along pp, some of which would always wait: "
            f"cut the batch into {ranks} or more"
        )


def require_gathered(schedule: str, stages: Mapping[int, nn.Module]) -> None:
    for number, stage in stages.items():
        for name, module in stage.named_modules():
            if isinstance(module, FSDPModule) and reshards(module):
                raise ValueError(
                    f"{schedule} splits the backward, and FSDP reshards stage {number}{name and f', {name},'} after "
                    "forward: PyTorch's gradients would be wrong, without a word; call "
                    "stage.set_reshard_after_forward(False) before"
                )


def reshards(module: FSDPModule) -> bool:
    """Unless told otherwise it does; for a whole stage, which is a root, PyTorch decides in its first forward."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group._reshard_after_forward
