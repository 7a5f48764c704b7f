"""Tensor parallelism by parallelize_module: a plan of ours, translated into PyTorch's styles."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as tensor_parallel
from torch.distributed.tensor import placement_types

from labs.dtensor import placement
from labs.tp import Plan, styles


def tp(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, styles.Style]) -> nn.Module:
    """Split a model by the same plan as `labs.tp.parallelize`.

    A rank's part of a parameter is a DTensor.  All sizes must be divisible by the number of ranks, even the number of
    heads of keys and values, since heads are cut like features.  Call a block of PrepareModuleInput with its inputs by
    position.  Compute a loss of split logits, and its backward, within
    `torch.distributed.tensor.parallel.loss_parallel()`.
    """
    rows = Plan(plan).rows(model)
    splits_the_loss = any(isinstance(style, styles.LossParallel) for _, _, style in rows)
    blocks = tuple(f"{name}." for name, _, style in rows if isinstance(style, styles.PrepareModuleInput))
    theirs = {
        name: style_of(style, module, splits_the_loss and not name.startswith(blocks)) for name, module, style in rows
    }
    return tensor_parallel.parallelize_module(model, mesh, {name: style for name, style in theirs.items() if style})


def style_of(style: styles.Style, module: nn.Module, is_head: bool) -> tensor_parallel.ParallelStyle | None:
    """Return PyTorch's style for a module.

    is_head: whether the output of a ColwiseParallel stays a DTensor, for a loss that accepts it
    """
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
    return None  # LossParallel is a context in PyTorch, and no style of a module


def layout(ours: placement.Placement) -> placement_types.Placement:
    return placement_types.Shard(ours.dim) if isinstance(ours, placement.Shard) else placement_types.Replicate()
