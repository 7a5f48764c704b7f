"""The table of rules: operations, their letters, and the inputs in which they are linear (labs.dtensor.algebra).

`print(RULES)` shows the table.  An in-place operation, such as "add_", has the rule of "add".  If letters depend on
shapes, a function returns them (labs.dtensor.letters).  If ranks must call something other than the operation itself on
their blocks, the rule has a function for it.  IN_TERMS_OF has operations that are computed by other operations.
"""

from collections.abc import Callable
from math import prod
from textwrap import wrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.dtensor.algebra import Doing, Rule
from labs.dtensor.letters import (
    alike,
    broadcast,
    joined,
    looked_up,
    looked_up_backward,
    normalised,
    parted,
    permuted,
    reduced,
    reshaped,
    resized,
    transposed,
    whole_along,
)
from labs.dtensor.placement import Replicate

# ---- functions that a rank calls with its blocks, in place of the operation ------------------------------


def to_block(doing: Doing, x: Tensor, *args: Any) -> Tensor:
    return x.reshape(doing.block.shape)


def expand_to_block(doing: Doing, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.expand(doing.block.shape)


def into_block(doing: Doing, gradient: Tensor, sizes: Any, *args: Any) -> Tensor:
    return doing.op(gradient, doing.block.shape, *args)


def empty_alike(doing: Doing, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(x)


def share_of_mean(doing: Doing, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Return this rank's summand of a mean: the sum of its own elements, divided by the number of all elements."""
    return x.sum(dim=dim, keepdim=keepdim, dtype=dtype) / (
        prod(doing.inputs[0].shape) / max(1, prod(doing.outputs[0].shape))
    )


def own_rows(doing: Doing, weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    """Look up the rows of an embedding that this rank holds; return zeros for rows that another rank holds."""
    rows, block = doing.inputs[0].shape[0], doing.inputs[0].block(doing.mesh.get_coordinate())
    outside = (indices < 0) | (indices >= rows)
    if outside.any():
        raise IndexError(f"an embedding of {rows} rows has no row {indices[outside][0].item()}")
    start, size = block.offset[0], block.shape[0]
    mine = (indices >= start) & (indices < start + size)
    if not size:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    return doing.op(weight, (indices - start) * mine, *args) * mine.unsqueeze(-1)


def draw_random(doing: Doing, x: Tensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
    """Draw random numbers: the same on ranks that hold the same piece, and different ones for different pieces.

    The seed is the next number of a rank's own generator; along an axis on which all ranks hold the same piece, the
    first rank's seed is sent to all.  So it does not matter how the ranks were seeded, and a layer that is recomputed
    in backward draws the same numbers again.
    """
    seed, number = torch.randint(2**62, (), device=x.device, generator=generator), 0
    for axis, placement in enumerate(doing.outputs[0].placements):
        if placement.is_shard():
            number = number * doing.mesh.size(axis) + doing.mesh.get_local_rank(axis)
        elif doing.mesh.size(axis) > 1:
            dist.broadcast(seed, group=doing.mesh.get_group(axis), group_src=0)
    return doing.op(x, *args, generator=torch.Generator(x.device).manual_seed(seed.item() + number))


# ---- the table -------------------------------------------------------------------------------------------


class Rules(dict[str, Rule]):
    def __repr__(self) -> str:
        by_rule: dict[Rule, list[str]] = {}
        for name, rule in self.items():
            by_rule.setdefault(rule, []).append(name)
        lines = [f"{'letters':18} {'linear in':10} operations"]
        for rule, names in by_rule.items():
            first, *others = wrap(", ".join(names), 90)
            letters = rule.letters if isinstance(rule.letters, str) else EXAMPLES[rule.letters]
            lines += [f"{letters:18} {rule.linear or '-':10} {first}", *(" " * 30 + other for other in others)]
        return "\n".join(lines)


EXAMPLES = {  # letters that the table prints for a function
    broadcast: "ab,.b->ab",
    alike: "ab->ab",
    reduced: "ab->a",
    transposed: "ab->ba",
    permuted: "abc->cab",
    whole_along: "a.->a.",
    joined: "a.,a.->a.",
    parted: "a.->a.,a.",
    resized: "a.->a.",
    normalised: "a.,.,.->a.,a.,a.",
    looked_up: "vw,ab->abw",
    looked_up_backward: "abw,ab->.w",
    reshaped: "A.c->Ac",
}
NOT_LINEAR = (
    *("abs", "sign", "sgn", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "sin", "cos", "relu", "gelu", "silu"),
    *("tanh", "sigmoid", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "fill"),
    *("eq", "ne", "gt", "ge", "lt", "le", "isnan", "isfinite", "logical_and", "addcmul", "addcdiv"),
    *("bitwise_or", "bitwise_and", "bitwise_not", "erfinv"),  # with `any`, for nn.init.trunc_normal_
)
RULES = Rules(
    {
        "mm": Rule("ik,kj->ij", "each"),
        "bmm": Rule("bik,bkj->bij", "each"),
        "mv": Rule("ik,k->i", "each"),
        "dot": Rule("k,k->", "each"),
        "sum": Rule(reduced, "together"),
        "mean": Rule(reduced, "together", share_of_mean),
        "embedding": Rule(looked_up, "first", own_rows),
        "embedding_dense_backward": Rule(looked_up_backward, "first"),
        "t": Rule(transposed, "together"),
        "transpose": Rule(transposed, "together"),
        "permute": Rule(permuted, "together"),
        **dict.fromkeys(("view", "_unsafe_view", "unsqueeze", "squeeze"), Rule(reshaped, "together", to_block)),
        "expand": Rule(broadcast, "together", expand_to_block),
        "cat": Rule(joined, "together", tensors=None),
        **dict.fromkeys(("split", "split_with_sizes"), Rule(parted, "together")),
        "slice": Rule(resized, "together"),
        "slice_backward": Rule(resized, "together", into_block),
        **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), Rule(normalised)),
        **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), Rule(normalised, "first")),
        **dict.fromkeys(("_softmax", "_log_softmax"), Rule(whole_along)),
        **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), Rule(whole_along, "first")),
        **dict.fromkeys(("add", "sub", "lerp", "copy"), Rule(broadcast, "together", tensors=2)),
        **dict.fromkeys(
            ("neg", "clone", "detach", "alias", "_to_copy", "zero", "zeros_like"), Rule(broadcast, "together")
        ),
        **dict.fromkeys(("ones_like", "full_like", "empty_like"), Rule(broadcast, "shape")),
        "new_empty_strided": Rule(alike, "together", empty_alike),
        "mul": Rule(broadcast, "each"),
        **dict.fromkeys(
            ("div", "threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"),
            Rule(broadcast, "first"),
        ),
        **dict.fromkeys(("bernoulli", "uniform", "normal"), Rule(broadcast, local=draw_random)),
        **dict.fromkeys(NOT_LINEAR, Rule(broadcast)),
    }
)


# ---- operations in terms of others -----------------------------------------------------------------------

aten = torch.ops.aten


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return aten.add(bias * beta if beta != 1 else bias, aten.mm(a, b), alpha=alpha)


def rsub(x: Tensor, other: Any, alpha: float = 1) -> Tensor:
    return aten.add(aten.mul(x, -alpha), other)


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Do a dropout, a single operation on an accelerator, out of the operations that F.dropout consists of on a CPU."""
    keep = 1.0 if train is False else 1 - p
    mask = aten.bernoulli_(aten.empty_like(x, dtype=torch.bool), keep)
    return native_dropout_backward(x, mask, 1 / keep if keep else 0.0), mask


def native_dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    return aten.mul(aten.mul(gradient, mask), scale)


def any_of(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return aten.gt(aten.sum(aten.ne(x, 0), [] if dim is None else [dim], keepdim), 0)


def item(x: Tensor) -> Any:
    return x.moved([Replicate()] * x.device_mesh.ndim).item()


IN_TERMS_OF: dict[str, Callable[..., Any]] = {
    "addmm": addmm,
    "any": any_of,
    "rsub": rsub,
    "native_dropout": native_dropout,
    "native_dropout_backward": native_dropout_backward,
    "_local_scalar_dense": item,
}
