"""Checks that a model can be split by a plan.

require_splittable    refuses models, meshes and plans that cannot be split
require_in_no_graph   refuses a parameter that is still part of a graph
expect_whole          lets modules that are not split refuse a piece of the features, when they get one
"""

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from labs.mesh import Mesh
from labs.model import CrossEntropy
from labs.tp.first_step import FirstStep
from labs.tp.parallel_layers import SPLIT
from labs.tp.styles import PrepareModuleInput, RowwiseParallel, Style

Rows = list[tuple[str, nn.Module, Style]]


def require_splittable(model: nn.Module, mesh: Mesh, rows: Rows) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f'{mesh!r:.60} is no Mesh: give Mesh((4,), ("tp",)), or mesh["tp"] of a larger one')
    if mesh.ndim != 1:
        raise ValueError(f"{mesh} has {mesh.ndim} axes: tensor parallelism takes one, as in mesh['tp']")
    for name, module in model.named_modules():
        if isinstance(module, SPLIT):
            raise ValueError(f"{name!r} has been split by an earlier parallelize(): give one plan for all of the model")
    for name, module, _ in rows:
        if "forward" in vars(module):
            raise ValueError(
                f"{name!r} has been given another forward (by labs.memory.recompute?), which would be called "
                "instead of the split one: call parallelize() first"
            )
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(f"parameter {name!r} is lazy: run a forward before parallelize(), so that it has a shape")
        if hasattr(p, "full_tensor"):
            raise ValueError(f"parameter {name!r} is a DTensor already: parallelize() first, and then fully_shard()")
    require_one_way_out(rows)


def require_one_way_out(rows: Rows) -> None:
    """Raise ValueError if a block gathers its sequence once, but several of its layers cut the sequence again.

    After the first of these layers, x is a shard again, which no later layer of the block expects.
    """
    for block, _, style in rows:
        if isinstance(style, PrepareModuleInput) and style.input_layouts.is_shard():
            rowwise = [(name, end) for name, _, end in rows if isinstance(end, RowwiseParallel)]
            ends = [name for name, end in rowwise if end.output_layouts.is_shard() and name.startswith(f"{block}.")]
            if len(ends) > 1:
                raise ValueError(
                    f"{block!r} gathers its sequence once, but leaves its split part at "
                    f"{' and '.join(map(repr, ends))}: give PrepareModuleInput to each block that begins with columns "
                    "and ends with rows, not to a larger one"
                )


def require_in_no_graph(name: str, p: nn.Parameter) -> None:
    """Raise ValueError if a parameter is part of a graph: autograd would expect gradients of its old shape."""
    if p._use_count() > 1:
        raise ValueError(
            f"parameter {name!r} is part of a graph that is still alive, of an earlier loss or a wrapper such as DDP: "
            "keep loss.item() in place of the loss, and wrap the model after parallelize()"
        )


def expect_whole(model: nn.Module, planned: set[nn.Module], first_step: FirstStep) -> None:
    """Let modules that are not split raise ValueError when they get a piece of the features, or of the logits."""
    for name, module in model.named_modules():
        own = [attribute for attribute, _ in module.named_parameters(recurse=False)]
        if own and any(inner in planned for inner in module.modules() if inner is not module):
            module.register_forward_hook(partial(explain, name, own), always_call=True)
        if module in planned:
            continue
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm):
            wide = module.in_features if isinstance(module, nn.Linear) else module.normalized_shape[-1]
            module.register_forward_pre_hook(partial(require_whole, name, wide))
        if isinstance(module, CrossEntropy | _Loss):
            module.register_forward_pre_hook(partial(require_same, name, first_step))


def explain(name: str, own: list[str], module: nn.Module, args: Any, output: Any) -> None:
    """Add a note to torch's error about two shapes if a block's own parameter meets a part of the heads or features."""
    error = sys.exc_info()[1]
    if output is None and isinstance(error, RuntimeError) and "must match the size" in str(error):
        error.add_note(
            f"{' and '.join(own)} of {name!r} is whole on each rank; between columns and rows there are only some of "
            "the features, or heads, that it may have a number for: leave these columns and rows out of the plan"
        )


def require_whole(name: str, wide: int, module: nn.Module, args: Any) -> None:
    if args and isinstance(args[0], Tensor) and args[0].shape[-1] != wide:
        raise ValueError(
            f"{name!r} ({type(module).__name__}) is not split, takes all {wide} features, and got {args[0].shape[-1]}: "
            "behind ColwiseParallel() a rank has a piece of them; put a RowwiseParallel() in between, or give the "
            "columns output_layouts=Replicate()"
        )


def require_same(name: str, first_step: FirstStep, module: nn.Module, args: Any) -> None:
    if args and isinstance(args[0], Tensor):
        first_step.takes_whole(name, args[0])
