"""Pipelines by torch.distributed.pipelining: the schedules of `labs.pp`, and checks that PyTorch does not make."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

V = "zbv", "dualpipev"  # V-shaped schedules: the last rank has two stages that follow one another
HAS_V = torch.__version__ >= "2.12"


def pp(
    stages: Sequence[nn.Module],
    name: str,
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    group: ProcessGroup | None = None,
) -> Any:
    """Return a pipeline like `labs.pp.Pipeline`; `.step(x, target=y, losses=[])` runs a step.

    Pass x on the rank of the first stage, and target and losses on the rank of the last stage.  At the end of a step,
    all gradients are divided by the number of micro-batches, even gradients of earlier steps.  A parameter that stages
    share is not handled: all-reduce its gradient before the optimizer's step.  In the schedules that split the
    backward, W holds all activations that F has saved.

    stages: all stages of the model; this rank's stages must be modules, the others may be None
    name: a schedule's name in `labs.pp.SCHEDULES`
    microbatches: number of micro-batches in a step
    loss: a function of a micro-batch's output and its targets
    group: the ranks along pp; by default all ranks

    Raises NotImplementedError for zbv and dualpipev over gloo before PyTorch 2.12.  Raises ValueError for fewer
    micro-batches than ranks; and, if the schedule splits the backward, for layers that FSDP reshards after forward,
    since their gradients would be silently wrong.
    """
    from torch.distributed.pipelining import PipelineStage, schedules  # a late import, since each rank would wait

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
                    "forward: PyTorch's gradients would be wrong, without an error; call "
                    "stage.set_reshard_after_forward(False) before"
                )


def reshards(module: FSDPModule) -> bool:
    """Return whether FSDP reshards a module after forward, which is the default.

    For a whole stage, which is FSDP's root, PyTorch decides in the stage's first forward.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and group._reshard_after_forward
