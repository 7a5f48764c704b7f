"""Rows that have several axes besides each other: stages, which are split and sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from labs import cost, pp, tp
from labs.agree import everybodys
from labs.kit.record import mark
from labs.kit.rows.pp_rows import schedule_of
from labs.kit.rows.row import Strategy
from labs.kit.training import ADAMW, Training
from labs.mesh import Mesh
from labs.model import GPT
from labs.parallel import Parallel


def ours(model: GPT, mesh: Mesh) -> Training:
    ranks = mesh.size("pp")
    lists = partial(schedule_of, "1f1b", ranks)
    parallel = Parallel(pp.cut(model, ranks), lists(1), mesh, tp.gpt_plan(model.config))

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int) -> list[Tensor]:
        if parallel.microbatches != micro_batches * ranks:
            parallel.follow(lists(micro_batches))
        mark("pipeline")
        return parallel.forward_backward(x, y)

    def full() -> dict[str, Tensor]:
        own = {name: p.detach().cpu() for name, p in parallel.full_parameters().items()}
        return {name: p for part in everybodys(own, mesh.get_group("pp")).values() for name, p in part.items()}

    trained = [p for p in parallel.parameters() if p.requires_grad]
    reads = 0 in parallel.stages, parallel.last in parallel.stages
    return Training(backward, torch.optim.AdamW(trained, **ADAMW), trained, full, reads=reads, divided=True)


def sharded(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(f"2 stages, each on 2 ranks or more, take 4 ranks, 6, 8, ...: not {asked}")
    return {"pp": 2, "replicate": 1, "shard": asked // 2, "tp": 1}


def split(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 4:
        raise ValueError(f"2 stages, split in 2, take 4 ranks, and sharded besides 8, 12, ...: not {asked}")
    return {"pp": 2, "replicate": 1, "shard": asked // 4, "tp": 2}


def composed(name: str, axes) -> Strategy:
    def predicted(job: cost.Job) -> cost.Prediction:
        sizes: Mapping[str, int] = axes(job.ranks)
        lists = schedule_of("1f1b", sizes["pp"], job.accumulation)
        if job.batch % sizes["pp"]:
            raise ValueError(f"a batch of {job.batch} is not divisible by {sizes['pp']} micro-batches, one a stage")
        cut = replace(job, batch=job.batch // sizes["pp"], accumulation=job.accumulation * sizes["pp"])
        return cost.parallel(cut, pp.plan(lists), sizes)

    return Strategy(name, "ours", ours, predicted, None, axes, ("replicate", "shard"), (), GPT)


PARALLEL = (composed("pp-fsdp", sharded), composed("pp-fsdp-tp", split))
