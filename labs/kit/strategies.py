"""Every strategy of the course, ours and PyTorch's own, in one table; and the one training loop they share.

The tour, the contract test and the benchmarks read STRATEGIES and nothing else: a strategy joins all three as one row.

    name      what `--strategies` calls it; those      side      "ours" or "native"
              of PyTorch begin with "torch-"
    apply     (model, mesh) -> Training                axes      ranks asked for -> the sizes of its mesh, by axis
    predict   labs.cost.Job -> Prediction of a step    batch     along which of them the batch is cut: ranks that
    sent      (root, layers, ranks, rank) ->                     differ in another axis only, read the same part
              bytes, for any model by the shapes       bitwise   on how many ranks it equals the micro-batched
              of its layers; root: the other parts;              process bit by bit, in float32
              None where the tokens count, too         takes     the models that it can train: for a GPT it has a plan
    computes  in which dtype; at rest all is float32   note      where PyTorch's differs from its stage, or from ours
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import prod
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from labs import cost, ddp, dtensor, fsdp, native, pp
from labs.group import everybodys
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT
from labs.sharded import MixedPrecisionPolicy
from labs.tp import full_parameters, gpt_plan, parallelize
from labs.zero import Zero

Batch = tuple[Tensor, Tensor]
Layers = Sequence[cost.Layer]
# A larger eps than usual: where a gradient is all but zero, Adam would blow its rounding up to a whole step.  So, 30
# steps of the tour's model leave rounding below 1e-6; with lr 3e-3 and eps 1e-6, on some texts, it grows to 1e-3.
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@dataclass(frozen=True)
class Training:
    """A model under a strategy: what a step needs of it, on one rank.

    backward: (x, y, micro_batches) -> the mean loss of each (0-dim), whose gradients it has added up; no losses on a
    rank that has not the model's end.
    optimizer: has step() and zero_grad().  trained: whose `.grad` it uses.
    full: the whole parameters by name, the same on every rank.  finish: called between backward and step().
    reads: whether this rank reads x, and whether y; where it does not, it is given None.
    divided: whether backward has divided the gradients by the number of micro-batches.
    """

    backward: Callable[[Tensor | None, Tensor | None, int], list[Tensor]]
    optimizer: Any
    trained: Sequence[Tensor]
    full: Callable[[], Mapping[str, Tensor]]
    finish: Callable[[], Any] = lambda: None
    reads: tuple[bool, bool] = (True, True)
    divided: bool = False


@dataclass(frozen=True)
class Strategy:
    """A row of the table, as the head of this file has it."""

    name: str
    side: str
    apply: Callable[[nn.Module, Mesh], Training]
    predict: Callable[[cost.Job], cost.Prediction]
    sent: Callable[..., int] | None
    axes: Callable[[int], Mapping[str, int]] = lambda asked: {"dp": asked}
    batch: tuple[str, ...] = ("dp",)
    bitwise: tuple[int, ...] = (2,)
    takes: type[nn.Module] = nn.Module
    computes: torch.dtype = torch.float32
    note: str = ""

    def ranks(self, asked: int) -> int:
        """How many it takes of those asked for."""
        return prod(self.axes(asked).values())

    def fits(self, asked: int) -> bool:
        """Whether `axes` has a mesh for so many; it raises ValueError where not."""
        try:
            return bool(self.axes(asked))
        except ValueError:
            return False

    def parts(self, asked: int) -> int:
        """Into how many parts the batch is cut."""
        return prod(self.axes(asked)[axis] for axis in self.batch)

    def part(self, mesh: Mesh) -> int:
        """Which of them this rank reads."""
        number = 0
        for axis in self.batch:
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
        return number


# ---- how each is set up ----------------------------------------------------------------------------------


def single(model: nn.Module, mesh: Mesh) -> Training:
    return replicated(model, partial(backward, model))


def average_with(wrap: Callable[..., ddp.DataParallel], model: nn.Module, mesh: Mesh) -> Training:
    module = wrap(model, group=mesh.get_group("dp"))
    return replicated(model, partial(backward, module, no_sync=module.no_sync), finish=module.sync)


def torch_ddp(model: nn.Module, mesh: Mesh) -> Training:
    module = native.ddp(model, mesh.get_group("dp"))
    return replicated(model, partial(backward, module, no_sync=module.no_sync))


def zero(stage: int, model: nn.Module, mesh: Mesh) -> Training:
    sharded = Zero(model, stage, partial(torch.optim.AdamW, **ADAMW), group=mesh.get_group("dp"))
    return Training(
        partial(backward, model), sharded, sharded.shards, lambda: sharded.state_dict()["model"], sharded.sync
    )


def torch_zero1(model: nn.Module, mesh: Mesh) -> Training:
    module, optimizer = native.zero1(model, torch.optim.AdamW, mesh.get_group("dp"), **ADAMW)
    steps = partial(backward, module, no_sync=module.no_sync)
    return Training(steps, optimizer, trainable(model), lambda: dict(model.named_parameters()))


def our_fsdp(reshard: bool, precision: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> Training:
    policy = MixedPrecisionPolicy(**precision)
    for layer in layers_of(model):
        fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return sharded(fsdp.fully_shard(model, mesh=mesh, mp_policy=policy))


def torch_fsdp(reshard: bool, precision: Mapping[str, Any], model: nn.Module, mesh: Mesh) -> Training:
    return sharded(native.fsdp(model, layers_of(model), native.device_mesh(mesh), reshard, **precision))


def our_tp(sequence_parallel: bool, model: GPT, mesh: Mesh) -> Training:
    parallelize(model, mesh, gpt_plan(model.config, sequence_parallel))
    return replace(replicated(model, partial(backward, model)), full=partial(full_parameters, model))


def torch_tp(sequence_parallel: bool, model: GPT, mesh: Mesh) -> Training:
    native.tp(model, native.device_mesh(mesh), gpt_plan(model.config, sequence_parallel))
    return replace(sharded(model), backward=partial(backward_of_split_logits, model))


def our_fsdp_tp(model: GPT, mesh: Mesh) -> Training:
    parallelize(model, mesh["tp"], gpt_plan(model.config))
    return replace(our_fsdp(True, {}, model, mesh["dp"]), full=partial(full_parameters, model))


def torch_fsdp_tp(model: GPT, mesh: Mesh) -> Training:
    grid = native.device_mesh(mesh)
    native.tp(model, grid["tp"], gpt_plan(model.config))
    native.fsdp(model, layers_of(model), grid["dp"])
    return replace(sharded(model), backward=partial(backward_of_split_logits, model))


def backward_of_split_logits(model: nn.Module, x: Tensor, y: Tensor, micro_batches: int) -> list[Tensor]:
    with loss_parallel():
        return backward(model, x, y, micro_batches)


def our_pp(schedule: str, stages: int, model: GPT, mesh: Mesh) -> Training:
    group, ranks = mesh.get_group("pp"), mesh.size("pp")
    lists = partial(schedule_of, schedule, ranks)
    pipeline = pp.Pipeline(pp.cut(model, stages * ranks), lists(1), model.loss, group)

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int) -> list[Tensor]:
        if pipeline.microbatches != micro_batches * ranks:
            pipeline.follow(lists(micro_batches))
        mark("pipeline")
        return pipeline.forward_backward(x, y)

    return piped(backward, pipeline.stages, stages * ranks, group)


def torch_pp(schedule: str, stages: int, model: GPT, mesh: Mesh) -> Training:
    group, ranks = mesh.get_group("pp"), mesh.size("pp")
    number = pp.ranks_of(schedule_of(schedule, ranks, 1))
    mine = {s: stage for s, stage in enumerate(pp.cut(model, stages * ranks)) if number[s] == mesh.get_local_rank("pp")}
    parts = [mine.get(s) for s in range(stages * ranks)]  # the others may go
    build = cache(partial(native.pp, parts, schedule, loss=model.loss, group=group))

    def backward(x: Tensor | None, y: Tensor | None, micro_batches: int) -> list[Tensor]:
        losses: list[Tensor] = []
        last = {"target": y, "losses": losses} if y is not None else {}
        mark("pipeline")
        build(micro_batches * ranks).step(*[] if x is None else [x], **last)
        return [loss.detach() for loss in losses]

    return piped(backward, mine, stages * ranks, group)


def schedule_of(name: str, ranks: int, micro_batches: int) -> pp.Schedule:
    """Each micro-batch of other strategies is one for each rank here, which would idle else."""
    return pp.SCHEDULES[name](ranks, micro_batches * ranks)


def piped(
    backward: Callable[..., list[Tensor]], mine: Mapping[int, nn.Module], stages: int, group: dist.ProcessGroup
) -> Training:
    """Every rank holds and steps its own stages; it has their parameters' names as the model has them."""
    own = {name: p for stage in mine.values() for name, p in stage.named_parameters()}
    trained = [p for p in dict.fromkeys(own.values()) if p.requires_grad]

    def full() -> dict[str, Tensor]:
        _, parts = everybodys({name: p.detach().cpu() for name, p in own.items()}, group)
        return {name: p for part in parts for name, p in part.items()}

    reads = 0 in mine, stages - 1 in mine
    return Training(backward, torch.optim.AdamW(trained, **ADAMW), trained, full, reads=reads, divided=True)


def layers_of(model: nn.Module) -> list[nn.Module]:
    containers = (child for child in model.children() if isinstance(child, nn.ModuleDict))
    return [layer for container in containers for layer in container.children()]


def sharded(model: nn.Module) -> Training:
    """Its parameters are DTensors, the optimizer's too; under tensor parallelism not all of them."""
    trained = trainable(model)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    return Training(
        partial(backward, model),
        optimizer,
        trained,
        lambda: {name: whole(p) for name, p in model.named_parameters()},
    )


def whole(p: Tensor) -> Tensor:
    """PyTorch's is gathered along one axis of the mesh after the other, since it warns of two at once."""
    if isinstance(p, dtensor.DTensor):
        return p.full_tensor()
    if not isinstance(p, DTensor):
        return p
    for axis in range(p.device_mesh.ndim):
        p = p.redistribute(placements=[Replicate()] * (axis + 1) + [*p.placements[axis + 1 :]])
    return p.to_local()


def replicated(model: nn.Module, backward: Callable[..., list[Tensor]], **others: Any) -> Training:
    """Every rank holds and steps all of it."""
    trained = trainable(model)
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    return Training(backward, optimizer, trained, lambda: dict(model.named_parameters()), **others)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# ---- the table -------------------------------------------------------------------------------------------


def data_parallel(name: str, side: str, apply: Callable[..., Training], variant: str, **others: Any) -> Strategy:
    """A row whose predictions are `labs.cost.ddp`'s for this variant."""

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.ddp_sent(sizes_of(root, layers), ranks, variant, rank)

    return Strategy(name, side, apply, partial(cost.ddp, variant=variant), sent, **others)


def of_stage(stage: int) -> Strategy:
    """A row of ours whose predictions are `labs.cost.zero`'s."""

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.zero_sent([*root, *layers], ranks, stage)

    # Its sums are those of one process, in the same order, on any number of ranks.
    return Strategy(
        f"zero-{stage}", "ours", partial(zero, stage), partial(cost.zero, stage=stage), sent, bitwise=(2, 3, 4)
    )


def zero_redundancy() -> Strategy:
    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        return cost.zero_redundancy_sent(sizes_of(root, layers), ranks, rank)

    note = "deals out whole parameters; all-reduces G where stage 1 reduce-scatters it, then broadcasts P: 3Ψ, not 2Ψ"
    return Strategy("torch-zero-1", "native", torch_zero1, cost.zero_redundancy, sent, note=note)


def fully_sharded(
    name: str, side: str, reshard: bool = True, computes: torch.dtype = torch.float32, **others: Any
) -> Strategy:
    """A row whose layers are sharded parameter by parameter, with gradients averaged in float32."""
    replicas = 2 if "axes" in others else 1
    how = {"reshard_after_forward": reshard, "replicas": replicas, "itemsize": computes.itemsize}
    precision = {"param_dtype": computes, "reduce_dtype": torch.float32} if computes != torch.float32 else {}

    def sent(root: Layers, layers: Layers, ranks: int, rank: int) -> int:
        trained, frozen = (tuple(chain(*(getattr(layer, kind) for layer in root))) for kind in ("trained", "frozen"))
        return cost.fully_shard_sent(cost.Layer(trained, frozen), layers, ranks, rank=rank, **how)

    apply, predict = (our_fsdp, cost.fsdp) if side == "ours" else (torch_fsdp, cost.fully_shard)
    apply, predict = partial(apply, reshard, precision), partial(predict, **how)
    return Strategy(name, side, apply, predict, sent, computes=computes, **others)


def split(name: str, side: str, sequence_parallel: bool = False, **others: Any) -> Strategy:
    """A row of tensor parallelism."""
    apply, predict = (our_tp, cost.tp) if side == "ours" else (torch_tp, cost.parallelize_module)
    predict = partial(predict, sequence_parallel=sequence_parallel)
    return Strategy(name, side, partial(apply, sequence_parallel), predict, None, **others, **PAIR)


def pipeline(name: str, side: str, stages: int = 1, **others: Any) -> Strategy:
    """A row of pipeline parallelism; stages: of each rank."""
    schedule = name.removeprefix("torch-").removeprefix("pp-")
    apply, predict = (our_pp, cost.pp) if side == "ours" else (torch_pp, cost.pipelining)

    def predicted(job: cost.Job) -> cost.Prediction:
        """As the schedule has it: `job.batch` is cut into as many micro-batches as there are ranks."""
        lists = schedule_of(schedule, job.ranks, job.accumulation)
        if job.batch % job.ranks:
            raise ValueError(f"a batch of {job.batch} does not divide by {job.ranks} micro-batches, one for each rank")
        cut = replace(job, batch=job.batch // job.ranks, accumulation=job.accumulation * job.ranks)
        return predict(cut, pp.plan(lists))

    axes = partial(four_stages, schedule, side, stages)
    return Strategy(name, side, partial(apply, schedule, stages), predicted, None, axes, **others, **ALONG)


def sizes_of(root: Layers, layers: Layers) -> list[int]:
    return [size for layer in (*root, *layers) for size in layer.sizes]


def two_replicas(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(f"2 replicas of 2 shards or more take 4 ranks, 6, 8, ...: not {asked}")
    return {"replicate": 2, "shard": asked // 2}


# Heads of keys and values can be shared equally by 2 ranks in all sizes of the GPT, and by more not in the small ones.
def pair(asked: int) -> dict[str, int]:
    if asked < 2:
        raise ValueError(f"tensor parallelism takes 2 ranks: not {asked}")
    return {"tp": 2}


def rows_of_two(asked: int) -> dict[str, int]:
    if asked < 4 or asked % 2:
        raise ValueError(f"rows of 2 ranks, and 2 of them or more, take 4 ranks, 6, 8, ...: not {asked}")
    return {"dp": asked // 2, "tp": 2}


# A small GPT has 4 layers, and each stage needs one.  A batch that divides by the ranks asked for, does so by these.
def four_stages(schedule: str, side: str, stages: int, asked: int) -> dict[str, int]:
    ranks = max(n for n in range(1, 4 // stages + 1) if asked % n == 0)
    if ranks == 1:
        counts = "2, 3 or 4 ranks" if stages == 1 else "2 ranks"
        raise ValueError(f"pp with {schedule} takes {counts}, or a multiple of that: not {asked}")
    if side == "native" and schedule in native.V and not native.HAS_V:
        raise ValueError(f"PyTorch {torch.__version__} runs no {schedule} over gloo: take PyTorch 2.12 or later")
    return {"pp": ranks}


ALONG = {"batch": (), "takes": GPT}
PAIR = {"axes": pair, "batch": (), "bitwise": (), "takes": GPT}
GRID = {"sent": None, "axes": rows_of_two, "bitwise": (), "takes": GPT}
HYBRID = {"axes": two_replicas, "batch": ("replicate", "shard"), "bitwise": ()}
ONE_DEVICE = data_parallel("one device", "ours", single, "single", axes=lambda asked: {"dp": 1}, bitwise=())
STRATEGIES = (
    data_parallel("ddp-naive", "ours", partial(average_with, ddp.Naive), "naive"),
    data_parallel("ddp-bucketed", "ours", partial(average_with, ddp.Bucketed), "bucketed"),
    data_parallel("ddp-overlapped", "ours", partial(average_with, ddp.Overlapped), "overlapped"),
    data_parallel("torch-ddp", "native", torch_ddp, "torch"),
    of_stage(1),
    zero_redundancy(),
    of_stage(2),
    fully_sharded("fsdp-no-reshard", "ours", reshard=False, bitwise=(2, 3, 4)),
    fully_sharded(
        "torch-fsdp-no-reshard",
        "native",
        reshard=False,
        note="holds P whole from forward to backward only; at rest it is sharded, unlike stage 2's",
    ),
    of_stage(3),
    fully_sharded("fsdp", "ours", bitwise=(2, 3, 4)),
    fully_sharded(
        "torch-fsdp",
        "native",
        note="gathers embedding, norm and head once a step, where stage 3 gathers them twice; unlike ours it holds P "
        "with its padding, and reduces from one buffer, where an all-to-all has two",
    ),
    fully_sharded("hsdp", "ours", **HYBRID),
    fully_sharded("torch-hsdp", "native", **HYBRID),
    fully_sharded("fsdp-bf16", "ours", computes=torch.bfloat16, bitwise=(2, 3, 4)),
    fully_sharded(
        "torch-fsdp-bf16",
        "native",
        computes=torch.bfloat16,
        bitwise=(),
        note="leaves gradients of norms, which come in float32, as they are from PyTorch 2.15 on",
    ),
    split("tp", "ours"),
    split(
        "torch-tp",
        "native",
        note="sends the loss's three numbers a token one by one, and holds the embedding's gradient for the whole "
        "vocabulary on each rank",
    ),
    split("tp-sp", "ours", sequence_parallel=True),
    split(
        "torch-tp-sp",
        "native",
        sequence_parallel=True,
        note="does so, too; it adds up norms' gradients only as AdamW uses them, three times in a step",
    ),
    Strategy("fsdp-tp", "ours", our_fsdp_tp, cost.fsdp_tp, **GRID),
    Strategy(
        "torch-fsdp-tp",
        "native",
        torch_fsdp_tp,
        cost.fully_shard_tp,
        **GRID,
        note="sends and holds more for the reasons of both",
    ),
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
        note="keeps for W all that F has kept, where W needs inputs of matrices and gradients alone",
    ),
)
ROWS = {row.name: row for row in (ONE_DEVICE, *STRATEGIES)}


# ---- the loop --------------------------------------------------------------------------------------------


def train(
    strategy: Strategy,
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Batch]],
    micro_batches: int = 1,
    keep: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """Take a step for each batch that this rank reads; runs on every rank of a job.

    build: makes the model, the same on every rank; it maps a batch to its mean loss.  batches[part][step]: inputs and
    targets.  micro_batches: into how many each batch is cut, their gradients added up; in a pipeline, into as many for
    each rank.  Returns this rank's loss in each step (none where it has not the model's end), and by name the full
    parameters (on the CPU) as they were after `keep` steps.
    """
    training, part = set_up(strategy, build())
    losses, kept = [], {}
    for number, batch in enumerate(batches[part]):
        mark("step")
        loss = step(training, *own_batch(training, batch), micro_batches)
        losses += [] if loss is None else [loss]
        if number + 1 == keep:
            mark("end")
            kept = {name: p.detach().to("cpu", copy=True) for name, p in training.full().items()}
    mark("end")
    return losses, kept


def own_batch(training: Training, batch: Batch) -> Iterator[Tensor | None]:
    """What this rank reads of it: a copy of its own, as a loader would make it, which dies with its step."""
    for x, reads in zip(batch, training.reads, strict=True):
        yield x.to(torch.get_default_device(), copy=True) if reads else None


def set_up(strategy: Strategy, model: nn.Module) -> tuple[Training, int]:
    """The training of a model by all ranks of this job, and the number of the part of the batch that this one reads."""
    axes = strategy.axes(dist.get_world_size())
    mesh = Mesh(tuple(axes.values()), tuple(axes))
    return strategy.apply(model, mesh), strategy.part(mesh)


def step(training: Training, x: Tensor | None, y: Tensor | None, micro_batches: int = 1) -> float | None:
    """Take one step on x, y: [batch, time]; this rank's mean loss, or None where it has not the model's end."""
    losses = training.backward(x, y, micro_batches)
    mark("sync")
    training.finish()
    # Once and at the end, as data parallelism does it: the sum over micro-batches is rounded like that over ranks.
    for p in training.trained if micro_batches > 1 and not training.divided else ():
        p.grad /= micro_batches
    mark("optimizer")
    training.optimizer.step()
    training.optimizer.zero_grad()
    # At the end, since on a GPU this waits for everything.
    return fmean(loss.item() for loss in losses) if losses else None


def backward(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    micro_batches: int,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> list[Tensor]:
    """Forward and backward of each micro-batch in turn, all but the last within `no_sync()`; their mean losses (0-dim).

    x, y: [batch, time].  Raises ValueError for a batch that does not divide by `micro_batches`.
    """
    if len(x) % micro_batches:
        raise ValueError(f"a batch of {len(x)} does not divide by {micro_batches} micro-batches")
    losses = []
    for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        with no_sync() if len(losses) + 1 < micro_batches else nullcontext():
            mark("forward")
            loss = module(micro_x, micro_y)
            mark("backward")
            loss.backward()
            losses.append(loss.detach())
    return losses
