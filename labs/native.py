"""The same verbs as PyTorch ships them: what you write at work.

ours                              PyTorch's
ddp.Overlapped(model); .sync()    ddp(model); nothing to call: the end of backward waits
zero.Zero(model, stage=1, ...)    zero1(model, AdamW, lr=...): another sharding, whole parameters to each rank
zero.Zero(model, stage=2, ...)    fsdp(model, layers, reshard_after_forward=False), but at rest P is sharded, too
zero.Zero(model, stage=3, ...)    fsdp(model, layers)
fsdp.fully_shard(layer), ...      fsdp(model, layers, mesh, ...): mesh, resharding and dtypes go by the same names
mesh.Mesh((2, 2), names)          device_mesh(mesh)
tp.parallelize(model, mesh, plan) tp(model, mesh, plan): the same plan; loss and backward within loss_parallel()
parallel.Parallel(stages, ...)    parallel(mine, device_mesh(mesh), plan), and then pp(stages, ...)
pp.Pipeline(stages, lists, loss)  pp(stages, "1f1b", microbatches, loss), and step() in place of forward_backward()
checkpoint.save(folder, step, ..) save_checkpoint(where, model, optimizer): more is lost without a word
checkpoint.load(where, held)      load_checkpoint(where, model, optimizer)
checkpoint.Saver(folder).save(..) save_in_background(where, model, optimizer), and .result()
llama's names, in safetensors     save_hugging_face(where, model), load_hugging_face(where, model)
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor import parallel as tensor_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from labs.dtensor import placement
from labs.mesh import Mesh
from labs.tp import Plan, styles

V = "zbv", "dualpipev"  # schedules in which a rank has two stages that follow one another: the last rank, at its turn
HAS_V = torch.__version__ >= "2.12"


def ddp(model: nn.Module, group: ProcessGroup | None = None, find_unused: bool = False) -> nn.Module:
    """`labs.ddp.Overlapped`: a copy on every rank, gradients averaged in buckets during backward.

    The first bucket is closed at 1 MiB, the others at 25 MiB; they are filled in the order in which gradients
    came in the first step. Rank 0's parameters and buffers are copied to all instead of being compared.
    """
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=find_unused)


def zero1(
    model: nn.Module, optimizer: type[Optimizer], group: ProcessGroup | None = None, **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """`labs.zero.Zero`, stage 1, after a fashion: DDP's gradients, and each parameter stepped by one rank.

    Parameters are dealt out whole, so the shards are only about equal. DDP has all-reduced the gradients, though
    each rank needs a part of them; after the step each rank broadcasts the parameters it has stepped.
    """
    with warnings.catch_warnings():  # importing this uses torch.jit.script, about which PyTorch itself warns
        warnings.simplefilter("ignore", DeprecationWarning)
        # Not at the head of the file: every rank of every job would wait 0.3 s for it.
        from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    return ddp(model, group), ZeroRedundancyOptimizer(trained, optimizer, process_group=group, **settings)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The same grid, or the same part of one, for the device that tensors are made on by default."""
    root = mesh.root
    whole = init_device_mesh(torch.get_default_device().type, root.shape, mesh_dim_names=root.mesh_dim_names)
    return whole if mesh is root else whole[mesh.mesh_dim_names]


def fsdp(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    **precision: torch.dtype,
) -> nn.Module:
    """`labs.zero.Zero`, stage 3: parameters sharded one by one, each along its first dim; gathered layer by layer.

    The model itself takes what is in none of the layers, and is not resharded between forward and backward. With
    `reshard_after_forward=False` neither are the layers: a whole copy from forward to backward, as under stage 2.

    mesh: of one axis, or of two for HSDP, replicas first; all ranks, where it is None. precision: param_dtype and
    reduce_dtype, in which parameters are gathered and gradients averaged; at rest both stay as they were.
    """
    mesh = mesh or init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(**precision)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def tp(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, styles.Style]) -> nn.Module:
    """`labs.tp.parallelize`: split by the same plan.

    A rank's part is a DTensor.  All sizes must divide by the ranks, and heads of keys and values, too, since they are
    cut like features.  A block of PrepareModuleInput is to be called with its inputs by position.
    A loss of split logits is computed, and differentiated, within `torch.distributed.tensor.parallel.loss_parallel()`.
    """
    rows = Plan(plan).rows(model)
    splits_the_loss = any(isinstance(style, styles.LossParallel) for _, _, style in rows)
    blocks = tuple(f"{name}." for name, _, style in rows if isinstance(style, styles.PrepareModuleInput))
    theirs = {
        name: style_of(style, module, splits_the_loss and not name.startswith(blocks)) for name, module, style in rows
    }
    return tensor_parallel.parallelize_module(model, mesh, {name: style for name, style in theirs.items() if style})


def style_of(style: styles.Style, module: nn.Module, is_head: bool) -> tensor_parallel.ParallelStyle | None:
    """is_head: what a ColwiseParallel makes stays a DTensor, for a loss that knows them."""
    match style:
        case styles.PrepareModuleInput():
            ends = {"input_layouts": (layout(style.input_layouts),)}
            return tensor_parallel.PrepareModuleInput(**ends, desired_input_layouts=(placement_types.Replicate(),))
        case styles.ColwiseParallel():
            ends = {"input_layouts": layout(style.input_layouts), "output_layouts": layout(style.output_layouts)}
            return tensor_parallel.ColwiseParallel(**ends, use_local_output=not is_head)
        case styles.RowwiseParallel():
            given = placement_types.Replicate() if isinstance(module, nn.Embedding) else layout(style.input_layouts)
            return tensor_parallel.RowwiseParallel(input_layouts=given, output_layouts=layout(style.output_layouts))
        case styles.SequenceParallel():
            return tensor_parallel.SequenceParallel()
    return None  # LossParallel: a context, no module


def layout(ours: placement.Placement) -> placement_types.Placement:
    return placement_types.Shard(ours.dim) if isinstance(ours, placement.Shard) else placement_types.Replicate()


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
    from torch.distributed.pipelining import PipelineStage, schedules  # not at the head of the file: as with zero1

    kind = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb1p": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    rank, ranks, is_v = dist.get_rank(group), dist.get_world_size(group), name in V
    if is_v and not HAS_V and dist.get_backend(group) == "gloo":
        raise NotImplementedError(
            f"PyTorch {torch.__version__} sends a message from a stage to the next one before it runs {name}, and gloo "
            "has none from a rank to itself: take PyTorch 2.12 or later, or labs.pp"
        )
    if microbatches < ranks:
        raise ValueError(
            f"{microbatches} micro-batches are fewer than the {ranks} ranks along pp, some of which would always wait: "
            f"cut the batch into {ranks} or more"
        )
    mine = [rank, 2 * ranks - 1 - rank] if is_v else range(rank, len(stages), ranks)
    if name in ("zb1p", *V):
        require_gathered(name, {s: stages[s] for s in mine})
    device = torch.get_default_device()
    parts = [PipelineStage(stages[s], s, len(stages), device, group=group) for s in mine]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(parts[0] if single else parts, microbatches, loss_fn=loss)


def parallel(stages: Sequence[nn.Module], mesh: DeviceMesh, plan: Mapping[str, styles.Style]) -> None:
    """`labs.parallel.Parallel`, over the same four axes, but for the pipeline: split and shard this rank's stages.

    What comes next is `pp(stages, ..., group=mesh.get_group("pp"))`, whose steps run within `loss_parallel()`.

    Raises ValueError for a GPT's stages that are tied: each copy would go its own way, without a word.
    """
    for stage in stages:
        if stage.config.tied:
            raise ValueError(
                "the head is tied to the embedding, and PyTorch's pipeline would leave the stage of each with its part "
                "of the gradient: give tied=False"
            )
        if mesh["tp"].size() > 1:
            tp(stage, mesh["tp"], Plan(plan).within(stage))
        if (data := mesh["replicate", "shard"]).size() > 1:
            fsdp(stage, stage.layers.values(), data, reshard_after_forward=False)
            stage.set_reshard_after_forward(False)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, group: ProcessGroup) -> Tensor:
    """`labs.parallel.Parallel.clip_gradients`; group: of the ranks along pp.

    `nn.utils.clip_grad_norm_` would clip each stage by its own norm, and fails where parameters lie on several meshes.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [gradient.norm() for gradient in gradients]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    squares = sum(norm.double() ** 2 for norm in whole)
    dist.all_reduce(squares, group=group)
    for gradient in gradients:
        gradient.mul_((max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).to(gradient.dtype))
    return squares.sqrt()


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


# ---- checkpoints -----------------------------------------------------------------------------------------
# torch.distributed.checkpoint is not imported at the head of the file: as with zero1.


def states(model: nn.Module, optimizer: Optimizer, full: bool = False) -> dict[str, Any]:
    """What a checkpoint is made of, by the names of parameters: {"model": ..., "optimizer": ...}.

    Sharded, each rank has its own shards, and they are no copies.  If full, all is gathered, one tensor after the
    other, on the CPU of rank 0, and the others have nothing: what `torch.save` takes for a single file.

    An optimizer that has not stepped yet is stepped here, by gradients of zero and a learning rate of zero: whatever
    counts its steps has counted one.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def set_states(model: nn.Module, optimizer: Optimizer, found: Mapping[str, Any], full: bool = False) -> None:
    """What `states` returns, put back; if full, from rank 0, which sends every tensor to all: each keeps its shard."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    # Not set_state_dict: where a rank brings nothing of a model, it takes that for an optimizer's alone, and hangs.
    state_dict.set_model_state_dict(model, found["model"], options=options)
    state_dict.set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)


def save_checkpoint(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> None:
    """`labs.checkpoint.save`: each rank writes its shards side by side, and the group's first one an index.

    What several ranks hold is written by one of them, and nobody looks whether it is the same on all.  A checkpoint
    that lies there already is overwritten in place; until the index, `.metadata`, is there, nobody loads it.
    """
    from torch.distributed import checkpoint

    checkpoint.save(states(model, optimizer), checkpoint_id=where, process_group=group)


def save_in_background(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> Future:
    """`labs.checkpoint.Saver.save`: returns when the shards are copied, and a thread writes; `.result()` waits for it.

    What the thread raises, only `.result()` raises.  It uses the group meanwhile: give it one of its own, with gloo.
    """
    from torch.distributed import checkpoint

    return checkpoint.async_save(states(model, optimizer), checkpoint_id=where, process_group=group)


def load_checkpoint(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> None:
    """`labs.checkpoint.load`: into any layout of DTensors; a rank reads the pieces of which it needs a part, whole.

    Numbers are cast to the dtype that is here, what nobody asks for is left out, and no checksum is looked at.  The
    index and all that is no tensor are unpickled: what somebody else has written can run whatever they like.
    """
    from torch.distributed import checkpoint

    found = states(model, optimizer)
    checkpoint.load(found, checkpoint_id=where, process_group=group)
    set_states(model, optimizer, found)


def save_hugging_face(where: str | Path, model: nn.Module) -> None:
    """A model's weights in the format of Hugging Face, under the model's own names.

    Each rank writes its shards to where/sharded, and rank 0 then puts whole tensors together in where.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    writer = checkpoint.HuggingFaceStorageWriter(str(where), save_distributed=True, enable_consolidation=True)
    checkpoint.save(get_model_state_dict(model), storage_writer=writer)


def load_hugging_face(where: str | Path, model: nn.Module) -> None:
    """Each rank reads its slices; all `*.safetensors` in the folder count."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    found = get_model_state_dict(model)
    checkpoint.load(found, storage_reader=checkpoint.HuggingFaceStorageReader(str(where)))
    set_model_state_dict(model, found)
