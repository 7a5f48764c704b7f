"""Tensor parallelism: every matrix of a transformer split over the ranks, by a plan.

A matrix that is split by columns makes of a whole x a piece of the result; one that is split by rows takes such a
piece, and makes of it a summand of the result.  So two of them, columns and then rows, need one sum at the end and
nothing between them, as long as what stands there works on each piece by itself: a head's attention, a feature's silu.

        x ──▶ copy ──▶ q k v ──▶ heads ──▶ o ──▶ reduce ──▶        copy, reduce: labs.conjugate
                      columns             rows                     with sequence parallelism: gather, scatter

    x whole       every rank has all of x; norms, residuals and dropout are computed on every rank alike
    x in shards   every rank has a part of the sequence there, and computes those on its own tokens alone

A plan says which submodule is split how; `parallelize` obeys it:

    style                 its module         what it splits                 what comes in        what goes out
    ColwiseParallel       Linear             outputs: weight Shard(0)       whole                features
    RowwiseParallel       Linear             inputs: weight Shard(1)        features             summands: a sum
    RowwiseParallel       Embedding          the vocabulary: Shard(0)       tokens               summands: a sum
    PrepareModuleInput    a block            nothing: one border for all    whole, or a shard    -
                                             of its ColwiseParallel
    SequenceParallel      norm, dropout      nothing: works on shards       a shard              a shard
    LossParallel          the GPT's loss     nothing: labs.vocabulary       logits               the loss

(A Linear keeps its matrix as [outputs, inputs], so that its columns are the weight's rows.)

    placements          how each parameter lies on the mesh
    full_parameters     the whole parameters, from all ranks

A rank's part is an ordinary parameter of a smaller shape.  So all that knows parameters goes on top: an optimizer;
labs.fsdp, on another axis of the mesh.  Names are PyTorch's (torch.distributed.tensor.parallel).  Sources: Shoeybi et
al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.
"""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from labs.autograd import differentiable
from labs.group import everybodys, fingerprint, require_equal
from labs.mesh import Mesh
from labs.model import Config
from labs.placement import Placement, Replicate, Shard
from labs.shares import Cut, Keys, Queries
from labs.styles import (
    ColwiseParallel,
    LossParallel,
    Place,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Style,
)

__all__ = [
    "ColwiseParallel",
    "LossParallel",
    "Plan",
    "PrepareModuleInput",
    "RowwiseParallel",
    "SequenceParallel",
    "full_parameters",
    "gpt_plan",
    "parallelize",
    "placements",
]


# ---- the plan --------------------------------------------------------------------------------------------


class Plan(dict[str, Style]):
    """From the name of a submodule to its style; `*` stands for one part of a name."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}   {style!r}" for name, style in self.items())

    def rows(self, model: nn.Module) -> list[tuple[str, nn.Module, Style]]:
        """Each submodule that the plan names, with its style, outer ones first."""
        modules, rows = dict(model.named_modules()), {}
        for pattern, style in self.items():
            found = [name for name in modules if matches(name, pattern)]
            if not found:
                near = get_close_matches(pattern, {generalised(name) for name in modules if name}, 1, 0)
                raise ValueError(
                    f"the plan has {pattern!r}, and no submodule is called that: did you mean {near[0]!r}?"
                )
            rows |= {name: style for name in found}
        return [(name, module, rows[name]) for name, module in modules.items() if name in rows]


def matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def generalised(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def gpt_plan(config: Config, sequence_parallel: bool = False) -> Plan:
    """For the course's GPT: the borders of x, whole or in shards of the sequence."""
    x = Shard(1) if sequence_parallel else Replicate()
    queries, keys = Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)
    norms = ("layers.*.attention_norm", "layers.*.mlp_norm", "norm") if sequence_parallel else ()
    return Plan(
        {
            "embed": RowwiseParallel(output_layouts=x),
            "layers.*.attention": PrepareModuleInput(input_layouts=x),
            "layers.*.attention.q": ColwiseParallel(heads=queries),
            "layers.*.attention.[kv]": ColwiseParallel(heads=keys),
            "layers.*.attention.o": RowwiseParallel(heads=queries, output_layouts=x),
            "layers.*.mlp": PrepareModuleInput(input_layouts=x),
            "layers.*.mlp.gate": ColwiseParallel(),
            "layers.*.mlp.up": ColwiseParallel(),
            "layers.*.mlp.down": RowwiseParallel(output_layouts=x),
            "head": ColwiseParallel(input_layouts=x),
            "loss": LossParallel(config.vocab),
            **{norm: SequenceParallel() for norm in norms},
        }
    )


# ---- obeying it ------------------------------------------------------------------------------------------


def parallelize(model: nn.Module, mesh: Mesh, plan: Mapping[str, Style]) -> nn.Module:
    """Split the model over the ranks of a mesh of one axis, which start from equal ones; the same model.

    Raises ValueError, before anything is changed, for a plan that does not fit the model or the ranks.
    """
    if mesh.ndim != 1:
        raise ValueError(f"{mesh} has {mesh.ndim} axes: tensor parallelism takes one, as in mesh['tp']")
    rows = Plan(plan).rows(model)
    require_one_way_out(rows)
    cuts = cuts_of(model, rows, mesh.size())
    require_equal(dict(model.named_parameters()), mesh.get_group())
    for p, cut in cuts.values():
        p.data = cut.part(p.data, mesh.get_local_rank()).clone(memory_format=torch.contiguous_format)
    regions = {name: style.region(mesh) for name, _, style in rows if isinstance(style, PrepareModuleInput)}
    for name, module, style in rows:
        around = [region for prefix, region in regions.items() if f"{name}.".startswith(f"{prefix}.")]
        style.change(module, Place(name, mesh, around[-1] if around else None))
    expect_whole(model, {name for name, _, _ in rows})
    model.tensor_parallel = TensorParallel(mesh, {name: cut for name, (_, cut) in cuts.items()})
    model.register_forward_pre_hook(model.tensor_parallel.before_forward, with_kwargs=True)
    model.register_forward_hook(model.tensor_parallel.after_forward)
    return model


def require_one_way_out(rows: list[tuple[str, nn.Module, Style]]) -> None:
    """Of a block whose sequence is gathered: what has left it is a shard again, and nothing in it expects that."""
    for block, _, style in rows:
        if isinstance(style, PrepareModuleInput) and style.input_layouts.is_shard():
            ends = [name for name, _, end in rows if isinstance(end, RowwiseParallel) and name.startswith(f"{block}.")]
            if len(ends) > 1:
                raise ValueError(
                    f"{block!r} gathers its sequence once, but leaves its split part at "
                    f"{' and '.join(map(repr, ends))}: give PrepareModuleInput to each block that begins with columns "
                    "and ends with rows, not to a larger one"
                )


def cuts_of(
    model: nn.Module, rows: list[tuple[str, nn.Module, Style]], ranks: int
) -> dict[str, tuple[nn.Parameter, Cut]]:
    """Each parameter that is split, by its first name, and how."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, tuple[nn.Parameter, Cut]] = {}
    planned = {}
    for name, module, style in rows:
        for attribute, cut in style.cuts(name, module, ranks).items():
            p = getattr(module, attribute)
            planned[f"{name}.{attribute}"] = cut
            found[names[id(p)]] = p, cut
    for name, p in model.named_parameters(remove_duplicate=False):
        first = names[id(p)]
        if first in found and planned.get(name) != found[first][1]:
            other = next(each for each, cut in planned.items() if cut == found[first][1])
            raise ValueError(
                f"{name!r} and {other!r} are one parameter (tied), and the plan splits them differently: give both "
                "styles that cut it alike"
            )
    return found


def expect_whole(model: nn.Module, planned: set[str]) -> None:
    """Let modules that are not split tell it in a sentence when they get a piece of the features."""
    for name, module in model.named_modules():
        wide = getattr(module, "in_features", None) or getattr(module, "normalized_shape", (None,))[-1]
        if name not in planned and isinstance(wide, int):
            module.register_forward_pre_hook(partial(require_whole, name, wide))


def require_whole(name: str, wide: int, module: nn.Module, args: Any) -> None:
    if args and isinstance(args[0], Tensor) and args[0].shape[-1] != wide:
        raise ValueError(
            f"{name!r} ({type(module).__name__}) is not split, takes all {wide} features, and got {args[0].shape[-1]}: "
            "behind ColwiseParallel() a rank has a piece of them; put a RowwiseParallel() in between, or give the "
            "columns output_layouts=Replicate()"
        )


class TensorParallel:
    """What a split model knows of its ranks; cuts: by the names of the parameters that are split.

    What must be alike on all ranks is compared once: what they read, as the first forward begins; and as the first
    backward ends, some of the gradients of parameters that each has whole.
    """

    def __init__(self, mesh: Mesh, cuts: dict[str, Cut]):
        self.mesh, self.cuts = mesh, cuts
        self.inputs_compared = self.gradients_compared = False

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.inputs_compared:
            self.inputs_compared = True
            self.require_alike(inputs(model, args, kwargs), DIFFERENT_INPUTS)

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self.gradients_compared:
            for x in differentiable(output):
                x.register_hook(lambda gradient: at_the_very_end_of_backward(partial(self.compare_gradients, model)))

    def compare_gradients(self, model: nn.Module) -> None:
        whole = {name: p.grad for name, p in model.named_parameters() if name not in self.cuts and p.grad is not None}
        if whole and not self.gradients_compared:
            self.gradients_compared = True
            self.require_alike({name: some_of(gradient) for name, gradient in whole.items()}, DIFFERENT_GRADIENTS)

    def require_alike(self, mine: dict[str, Any], text: str) -> None:
        ranks, (first, *others) = everybodys(mine, self.mesh.get_group())
        for rank, other in zip(ranks[1:], others, strict=True):
            for name in first | other:
                if name not in first or name not in other or first[name] != other[name]:
                    raise RuntimeError(text.format(name=name, first=ranks[0], other=rank))


DIFFERENT_INPUTS = (
    "{name} differs on ranks {first} and {other}: under tensor parallelism all ranks of a group read the same tokens, "
    "and draw the same random numbers (the batch is cut along another axis of the mesh)"
)
DIFFERENT_GRADIENTS = (
    "parameter {name!r} is not split, and its gradient differs on ranks {first} and {other}: it was used inside a "
    "split layer, or on shards, and each rank has only its part of the gradient; give its module SequenceParallel(), "
    "or split it"
)


def inputs(model: nn.Module, args: Any, kwargs: Any) -> dict[str, str]:
    """What ranks must have alike in a forward."""
    found = {f"input {i}": x for i, x in enumerate(tree_leaves((args, kwargs))) if isinstance(x, Tensor)}
    if model.training and any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        found["the state of random numbers"] = torch.get_rng_state()
    return {name: fingerprint(x) for name, x in found.items()}


class Alike(list[float]):
    """Equal but for rounding, which may differ from machine to machine."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Alike)
        most = max(map(abs, [*self, *other]), default=0)
        return len(self) == len(other) and all(
            math.isclose(a, b, abs_tol=0.05 * most) for a, b in zip(self, other, strict=True)
        )

    __hash__ = None


def some_of(gradient: Tensor) -> Alike:
    mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return Alike(mine.flatten()[:16].tolist())


def at_the_very_end_of_backward(then: Callable[[], None]) -> None:
    """Behind what others have asked for at the end of backward: the gradients of labs.fsdp, say, come only there."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(then))


# ---- what the ranks have between them --------------------------------------------------------------------


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each parameter lies on the ranks that `parallelize` split the model over."""
    cuts = model.tensor_parallel.cuts
    return {name: Shard(cuts[name].dim) if name in cuts else Replicate() for name, _ in model.named_parameters()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, on every rank."""
    of = model.tensor_parallel
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: of.cuts[name].whole(p, of.mesh) if name in of.cuts else p for name, p in whole.items()}
