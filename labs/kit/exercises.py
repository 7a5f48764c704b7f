"""A learner's exercises in place of the course's own functions: do they carry a whole training run?

unshard_with(unshard, reshard)      a learner's own in `labs.fsdp`
remember, mixed_step, …             the course's own, for a notebook that shows no answers
published_runs, reports             the data of two exercises of notebook 15
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from labs.exercises.deepspeed.left_out import missing_bytes
from labs.exercises.offload.step_seconds import slots
from labs.exercises.one_device.bytes_by_kind import by_kind
from labs.exercises.plan_a_run.bottlenecks import REPORTS
from labs.exercises.plan_a_run.exposed import waits
from labs.exercises.plan_a_run.forecast import Published, Run, published, seconds  # noqa: F401 (a notebook makes a Run)
from labs.exercises.plan_a_run.fullest_rank import bytes_held
from labs.exercises.plan_a_run.mesh_sizes import meshes
from labs.exercises.resume.interval import young
from labs.fsdp.parameter_group import ParameterGroup


def unshard_with(unshard: Callable[..., Any], reshard: Callable[..., Any]) -> None:
    """Make `labs.fsdp` gather and drop with these two functions from now on, in this process.

    unshard(shards, fulls), reshard(fulls): as `check.unshard_and_reshard` has them.  `unshard` waits, so nothing is
    gathered ahead.
    """

    def arrive(group: ParameterGroup) -> None:
        if group.parameters and not group.gathered:
            unshard([p.local for p in group.parameters], fulls_of(group))
            for p in group.parameters:
                p.versions.allow()
            group.gathered, group.taken = True, group.shard_versions()

    def drop(group: ParameterGroup) -> None:
        if group.gathered:
            for p in group.parameters:
                p.hide()
                p.versions.forbid()
            reshard(fulls_of(group))
            group.gathered = False

    ParameterGroup.gather = lambda group, smaller=None: None
    ParameterGroup.arrive, ParameterGroup.drop = arrive, drop


def fulls_of(group: ParameterGroup) -> list[Any]:
    return [p.full.data for p in group.parameters]


def remember(p: Tensor) -> dict[str, Tensor]:
    """Return the state that `check.mixed_precision` asks for, for a learner whose own function is not there yet."""
    return {"master": p.detach().float(), "mean": torch.zeros(p.shape), "square": torch.zeros(p.shape)}


@torch.no_grad()
def mixed_step(p: Tensor, kept: dict[str, Tensor], t: int, lr, betas, eps, weight_decay) -> None:
    """Take the step that `check.mixed_precision` asks for, for a learner whose own function is not there yet."""
    if p.grad is not None:
        master, mean, square = kept["master"], kept["mean"], kept["square"]
        gradient = p.grad.float()
        mean.lerp_(gradient, 1 - betas[0])
        square.lerp_(gradient**2, 1 - betas[1])
        scale = (square / (1 - betas[1] ** t)).sqrt() + eps
        master.mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)
        p.copy_(master)


def offloaded_step(due: list[int], fetch: Callable, update: Callable, store: Callable) -> None:
    """Take the step that `check.offloaded_step` asks for: one thread stores and fetches, while the caller updates."""
    with ThreadPoolExecutor(1) as thread:
        coming, stored = [thread.submit(fetch, i) for i in due[:1]], []
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            stored.append(thread.submit(store, i, update(i, values)))
    for each in stored:
        each.result()


bytes_by_kind, step_seconds, interval, left_out = by_kind, slots, young, missing_bytes
mesh_sizes, fullest_rank, exposed, forecast = meshes, bytes_held, waits, seconds


def published_runs() -> list[Published]:
    """Return the runs that notebook 15 shows; `check.forecast` judges by the others."""
    return published(seen=True)


def reports() -> list[dict[str, Any]]:
    """Return the rows of notebook 15's last exercise, without the bottlenecks that are to be found."""
    return [{"": name, **report._asdict()} for name, (report, _) in REPORTS.items()]
