"""Annotations of a layer: a function of its forward and backward, and the few layouts that are given for it.

    the weight of             dim 0 (out)   dim 1 (in)    because
    q, k, v, gate, up, head   tp            dp            each rank along tp has its own heads, and columns of the MLP
    o, down                   dp            tp            each rank takes the outputs of its own heads, or columns
    embed                     tp            dp            each rank has a part of the vocabulary
    a norm                    dp
    tokens, activations       dp                          the batch is cut

An axis that the mesh does not have cuts nothing: dp alone is FSDP, tp alone is tensor parallelism, and with both, each
matrix is cut into tiles.  A gradient has the layout of its parameter or activation.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from labs.dtensor.placement import Placement, Replicate, Shard
from labs.gspmd.tracing import Graph, Value

SECOND_OF_TWO = ("o", "down")


def layout_of(name: str, axes: Sequence[str]) -> tuple[Placement, ...]:
    """Return the layout of the weight with this name: a placement for each axis of the mesh."""
    layer = name.split(".")[-2]
    if layer.endswith("norm"):
        return placed({"dp": 0}, axes)
    return placed({"dp": 0, "tp": 1} if layer in SECOND_OF_TWO else {"tp": 0, "dp": 1}, axes)


def rows(axes: Sequence[str]) -> tuple[Placement, ...]:
    """Return the layout of a batch: a placement for each axis of the mesh."""
    return placed({"dp": 0}, axes)


def placed(dims: dict[str, int], axes: Sequence[str]) -> tuple[Placement, ...]:
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in axes)


def forward_and_backward(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function (x, gradient of y, *weights) -> (y, gradient of x, *gradients of weights), y = module(x)."""
    names = [name for name, _ in module.named_parameters()]

    def fn(x: Tensor, gradient: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
        y = functional_call(module, dict(zip(names, leaves[1:], strict=True)), (leaves[0],))
        return y.detach(), *torch.autograd.grad(y, leaves, gradient)

    return fn


def given(graph: Graph, names: Sequence[str], axes: Sequence[str]) -> dict[Value, tuple[Placement, ...]]:
    """Return the layouts of a layer's arguments and results, from which all others follow; names: those of weights."""
    (x, gradient, *weights), (y, gradient_of_x, *gradients) = graph.arguments, graph.results
    layouts = dict.fromkeys((x, gradient, y, gradient_of_x), rows(axes))
    for name, weight, its in zip(names, weights, gradients, strict=True):
        layouts[weight] = layouts[its] = layout_of(name, axes)
    return layouts
