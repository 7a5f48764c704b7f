"""Strategies on several mesh axes at once: pipeline stages with FSDP, and with tensor parallelism as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from labs import cost, native, pp, tp
from labs.agree import everybodys
from labs.kit.record import mark
from labs.kit.rows.fsdp_rows import whole
from labs.kit.rows.pp_rows import Weighed, piped, schedule_of
from labs.kit.rows.row import Strategy
from labs.kit.training.training_step import Training
from labs.mesh import Mesh
from labs.model import GPT
from labs.parallel import Parallel


def ours(schedule: str, model: GPT, mesh: Mesh) -> Training:
    ranks = mesh.size("pp")
    lists = partial(schedule_of, schedule, ranks)
    stages = pp.cut(model, len(pp.ranks_of(lists(1))))
    parallel = Parallel(stages, lists(1), mesh, tp.gpt_plan(model.config))

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int, over: float | None = None) -> list[Tensor]:
        if parallel.microbatches != micro_batches * ranks:
            parallel.follow(lists(micro_batches))
        mark("pipeline")
        return parallel.forward_backward(x, y, over)

    full, clip = parallel.full_parameters, parallel.clip_gradients
    return composed(backward, parallel.stages, len(stages), mesh, full, clip)


def pytorchs(schedule: str, model: GPT, mesh: Mesh) -> Training:
    ranks, rank, grid = mesh.size("pp"), mesh.get_local_rank("pp"), native.device_mesh(mesh)
    rank_of = pp.ranks_of(schedule_of(schedule, ranks, 1))
    mine = {s: stage for s, stage in enumerate(pp.cut(model, len(rank_of))) if rank_of[s] == rank}
    native.parallel(list(mine.values()), grid, tp.gpt_plan(model.config))
    parts = [mine.get(number) for number in range(len(rank_of))]
    loss = Weighed(model.loss)
    build = cache(partial(native.pp, parts, schedule, loss=loss, group=mesh.get_group("pp")))

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int, over: float | None = None) -> list[Tensor]:
        losses: list[Tensor] = []
        loss.over = over and over / (micro_batches * ranks)
        last = {"target": y, "losses": losses} if y is not None else {}
        mark("pipeline")
        with loss_parallel():
            build(micro_batches * ranks).step(*[] if x is None else [x], **last)
        return [whole(loss.detach()) for loss in losses]

    def full() -> dict[str, Tensor]:
        return {name: whole(p) for stage in mine.values() for name, p in stage.named_parameters()}

    return composed(backward, mine, len(rank_of), mesh, full)


def composed(
    backward: Callable[..., list[Tensor]],
    mine: Mapping[int, nn.Module],
    stages: int,
    mesh: Mesh,
    whole_ones: Callable[[], Mapping[str, Tensor]],
    clip: Callable[[float], Tensor] | None = None,
) -> Training:
    """Return the training of a rank of a pipeline whose full parameters are first gathered along all other axes."""
    own = piped(backward, mine, stages, mesh.get_group("pp"), clip)

    def full() -> dict[str, Tensor]:
        parts = everybodys({name: p.detach().cpu() for name, p in whole_ones().items()}, mesh.get_group("pp"))
        return {name: p for part in parts.values() for name, p in part.items()}

    return replace(own, full=full)


def sharded(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(f"2 pipeline stages, each on 2 ranks or more, take 4, 6, 8, ... ranks: not {asked}")
    return {"pp": 2, "replicate": 1, "shard": asked // 2, "tp": 1}


def split(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 4:
        raise ValueError(f"2 pipeline stages, each split over tp=2, take 4, 8, 12, ... ranks: not {asked}")
    return {"pp": 2, "replicate": 1, "shard": asked // 4, "tp": 2}


def row(name: str, side: str, axes: Callable[[int], Mapping[str, int]], schedule: str = "1f1b") -> Strategy:
    apply, predict = (ours, cost.parallel) if side == "ours" else (pytorchs, cost.pipelining_on_a_mesh)

    def predicted(job: cost.Job) -> cost.Prediction:
        sizes = axes(job.ranks)
        lists = schedule_of(schedule, sizes["pp"], job.accumulation)
        if job.batch % sizes["pp"]:
            raise ValueError(f"a batch of {job.batch} is not divisible by {sizes['pp']} micro-batches, one per stage")
        cut = replace(job, batch=job.batch // sizes["pp"], accumulation=job.accumulation * sizes["pp"])
        return predict(cut, pp.plan(lists), sizes)

    return Strategy(name, side, partial(apply, schedule), predicted, None, axes, ("replicate", "shard"), (), GPT)


def scheduled(strategy: Strategy, schedule: str) -> Strategy:
    """Return the row of a strategy with another pipeline schedule, if it has pipelines on several axes."""
    kinds = {"pp-fsdp": sharded, "pp-fsdp-tp": split}
    kind = kinds.get(strategy.name.removeprefix("torch-"))
    return row(strategy.name, strategy.side, kind, schedule) if kind else strategy


PARALLEL = (
    row("pp-fsdp", "ours", sharded),
    row("torch-pp-fsdp", "native", sharded),
    row("pp-fsdp-tp", "ours", split),
    row("torch-pp-fsdp-tp", "native", split),
)
