"""Strategies of pipeline parallelism, which give each rank some of the layers, by schedule, ours and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs import cost, native, pp
from labs.agree import everybodys
from labs.checkpoint import Held
from labs.kit.record import mark
from labs.kit.rows.row import Strategy
from labs.kit.training.training_step import ADAMW, Training
from labs.mesh import Mesh
from labs.model import GPT, CrossEntropy


def our_pp(schedule: str, stages: int, model: GPT, mesh: Mesh) -> Training:
    group, ranks = mesh.get_group("pp"), mesh.size("pp")
    lists = partial(schedule_of, schedule, ranks)
    pipeline = pp.Pipeline(pp.cut(model, stages * ranks), lists(1), model.loss, group)

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int, over: float | None = None) -> list[Tensor]:
        if pipeline.microbatches != micro_batches * ranks:
            pipeline.follow(lists(micro_batches))
        mark("pipeline")
        return pipeline.forward_backward(x, y, over)

    return piped(backward, pipeline.stages, stages * ranks, group, pipeline.clip_gradients)


def torch_pp(schedule: str, stages: int, model: GPT, mesh: Mesh) -> Training:
    group, ranks = mesh.get_group("pp"), mesh.size("pp")
    number = pp.ranks_of(schedule_of(schedule, ranks, 1))
    mine = {s: stage for s, stage in enumerate(pp.cut(model, stages * ranks)) if number[s] == mesh.get_local_rank("pp")}
    parts = [mine.get(s) for s in range(stages * ranks)]  # holds no reference to the other ranks' stages
    loss = Weighed(model.loss)
    build = cache(partial(native.pp, parts, schedule, loss=loss, group=group))

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int, over: float | None = None) -> list[Tensor]:
        losses: list[Tensor] = []
        loss.over = over and over / (micro_batches * ranks)
        last = {"target": y, "losses": losses} if y is not None else {}
        mark("pipeline")
        build(micro_batches * ranks).step(*[] if x is None else [x], **last)
        return [loss.detach() for loss in losses]

    return piped(backward, mine, stages * ranks, group)


class Weighed:
    """A loss for PyTorch's pipelines with a divisor (`over`): they pass only a micro-batch's output and targets."""

    def __init__(self, loss: CrossEntropy):
        self.loss, self.over = loss, None

    def __call__(self, y: Tensor, targets: Tensor) -> Tensor:
        return self.loss(y, targets, self.over)


def schedule_of(name: str, ranks: int, micro_batches: int) -> pp.Schedule:
    """Return a pipeline schedule that cuts each micro-batch of other strategies into one micro-batch per rank.

    With fewer micro-batches than ranks, some ranks would always idle.
    """
    return pp.SCHEDULES[name](ranks, micro_batches * ranks)


def piped(
    backward: Callable[..., list[Tensor]],
    mine: Mapping[int, nn.Module],
    stages: int,
    group: dist.ProcessGroup,
    clip: Callable[[float], Tensor] | None = None,
) -> Training:
    """Return the training of a rank of a pipeline, which holds and updates only its own stages.

    The rank's parameters have the names that they have in the whole model.

    clip: the function that clips the gradients of all ranks; by default, one for PyTorch's pipelines.
    """
    own = {name: p for stage in mine.values() for name, p in stage.named_parameters()}
    trained = [p for p in dict.fromkeys(own.values()) if p.requires_grad]

    def full() -> dict[str, Tensor]:
        parts = everybodys({name: p.detach().cpu() for name, p in own.items()}, group)
        return {name: p for part in parts.values() for name, p in part.items()}

    reads = 0 in mine, stages - 1 in mine
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    clip = clip or partial(native.clip_gradients, trained, group=group)
    held = partial(Held, *mine.values(), optimizer=optimizer)
    return Training(backward, optimizer, trained, full, reads=reads, divided=True, clip=clip, held=held)


def pipeline(name: str, side: str, stages: int = 1, **others: Any) -> Strategy:
    """Return the row of a strategy of pipeline parallelism; stages: number of stages per rank."""
    schedule = name.removeprefix("torch-").removeprefix("pp-")
    apply, predict = (our_pp, cost.pp) if side == "ours" else (torch_pp, cost.pipelining)

    def predicted(job: cost.Job) -> cost.Prediction:
        """Predict a step of a pipeline, which cuts `job.batch` into as many micro-batches as there are ranks."""
        lists = schedule_of(schedule, job.ranks, job.accumulation)
        if job.batch % job.ranks:
            raise ValueError(f"a batch of {job.batch} is not divisible by {job.ranks} micro-batches, one per rank")
        cut = replace(job, batch=job.batch // job.ranks, accumulation=job.accumulation * job.ranks)
        return predict(cut, pp.plan(lists))

    axes = partial(four_stages, schedule, side, stages)
    return Strategy(name, side, partial(apply, schedule, stages), predicted, None, axes, **others, **ALONG)


# A small GPT has 4 layers, and each stage needs at least one.  The number of ranks that the strategy uses divides the
# number asked for, so that a batch that can be divided among the ranks asked for can be divided among these ranks.
def four_stages(schedule: str, side: str, stages: int, asked: int) -> dict[str, int]:
    ranks = max(n for n in range(1, 4 // stages + 1) if asked % n == 0)
    if ranks == 1:
        counts = "2, 3 or 4 ranks" if stages == 1 else "2 ranks"
        raise ValueError(f"pp with {schedule} takes {counts}, or a multiple of that: not {asked}")
    if side == "native" and schedule in native.V and not native.HAS_V:
        raise ValueError(f"PyTorch {torch.__version__} does not run {schedule} over gloo: use PyTorch 2.12 or later")
    return {"pp": ranks}


ALONG = {"batch": (), "takes": GPT}
PP = (
    pipeline("pp-gpipe", "ours", bitwise=(2, 4)),
    pipeline("torch-pp-gpipe", "native", note="keeps the logits of all micro-batches until its step is over"),
    pipeline("pp-1f1b", "ours", bitwise=(2, 4)),
    pipeline("torch-pp-1f1b", "native"),
    pipeline("pp-interleaved", "ours", stages=2, bitwise=(2, 4)),
    pipeline("torch-pp-interleaved", "native", stages=2),
    pipeline("pp-zbv", "ours", stages=2, bitwise=(2, 4)),
    pipeline(
        "torch-pp-zbv",
        "native",
        stages=2,
        note="saves for W everything that F has saved, where W needs only the inputs of matrices, and gradients",
    ),
)
