"""Tensor parallelism: every matrix of a transformer split over the ranks, by a plan.

A matrix that is split by columns turns a whole x into a piece of the result.  A matrix that is split by rows turns such
a piece into a summand of the result.  So two matrices, split by columns and then by rows, need one sum at the end and
no communication between them, if each operation between them works on a piece by itself, as the attention of a head or
the silu of a feature.

        x ──▶ copy ──▶ q k v ──▶ heads ──▶ o ──▶ reduce ──▶        copy, reduce: labs.tp.conjugate
                      columns             rows                     with sequence parallelism: gather, scatter

    x whole       every rank has all of x; norms, residuals and dropout are computed on every rank alike
    x in shards   every rank has a part of the sequence, and computes norms, residuals and dropout on its own tokens

A plan gives a style to each submodule that is split; `parallelize` applies it:

    style                 its module         what it splits                 what comes in        what goes out
    ColwiseParallel       Linear             outputs: weight Shard(0)       whole                features
    RowwiseParallel       Linear             inputs: weight Shard(1)        features             summands: a sum
    RowwiseParallel       Embedding          the vocabulary: Shard(0)       tokens               summands: a sum
    PrepareModuleInput    a block            nothing: one border for all    whole, or a shard    -
                                             of its ColwiseParallel
    SequenceParallel      norm, dropout      nothing: works on shards       a shard              a shard
    LossParallel          the GPT's loss     nothing: labs.tp.vocabulary       logits               the loss

A Linear keeps its matrix as [outputs, inputs], so the columns of the matrix are the rows of its weight.

    placements          returns the placement of each parameter on the mesh
    slices              returns the slices that cut this rank's part out of each whole parameter, as labs.llama needs
    full_parameters     gathers the whole parameters from all ranks
    clip_gradients      clips by the global norm, in which a gradient that is whole on every rank counts once

In the first step, the ranks compare the values that must be the same on all of them (labs.tp.first_step).

A rank's part is an ordinary parameter of a smaller shape.  So other methods work on top of tensor parallelism: an
optimizer that works element by element, or labs.fsdp along another axis of the mesh.  The styles have the names of
torch.distributed.tensor.parallel.  Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.agree import require_equal
from labs.clip import global_norm, shorten
from labs.dtensor import Placement, Replicate, Shard
from labs.mesh import Mesh
from labs.model import Config
from labs.moe import MoEConfig, ParallelExperts
from labs.tp import whole_model_check
from labs.tp.first_step import FirstStep
from labs.tp.parallel_layers import Place, Region, unwatch
from labs.tp.parameter_cuts import Cut, Keys, Queries
from labs.tp.splittable import Rows, expect_whole, require_in_no_graph, require_splittable
from labs.tp.styles import (
    IN_FEATURES,
    ColwiseParallel,
    LossParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Style,
)

# ---- the plan --------------------------------------------------------------------------------------------


class Plan(dict[str, Style]):
    """A table from names of submodules to styles; `*` stands for one part of a name, "" for the model itself."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}   {style!r}" for name, style in self.items())

    def rows(self, model: nn.Module) -> Rows:
        """Return (name, submodule, style) for each submodule that the plan names, outer modules first.

        Raises ValueError for a name that no submodule has, and TypeError for a value that is no style.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        styles: dict[nn.Module, Style] = {}
        for pattern, style in self.items():
            if not isinstance(style, Style):
                raise TypeError(f"the plan gives {pattern!r} {style!r:.60}, which is no style of labs.tp")
            found = [module for name, module in modules.items() if matches(name, pattern)]
            if not found:
                near = get_close_matches(pattern, dict.fromkeys(map(generalised, filter(None, modules))), 1, 0)
                meant = f"did you mean {near[0]!r}?" if near else f"a {type(model).__name__} has none"
                raise ValueError(f"the plan has {pattern!r}, and no submodule is called that: {meant}")
            styles |= dict.fromkeys(found, style)
        return [(name, module, styles[module]) for name, module in model.named_modules() if module in styles]

    def within(self, part: nn.Module) -> "Plan":
        """Return the rows of the plan that concern a part of the model, whose modules keep their names in the model."""
        names = [name for name, _ in part.named_modules() if name]
        return Plan({each: style for each, style in self.items() if any(matches(name, each) for name in names)})


def matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    if not name or not pattern:  # the model itself
        return name == pattern
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def generalised(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def gpt_plan(config: Config, sequence_parallel: bool = False) -> Plan:
    """Return the plan of the course's GPT.

    sequence_parallel: whether x is in shards of the sequence between split layers

    Raises ValueError for a model with experts, if x is not in shards or its loss has a balance loss.
    """
    x = Shard(1) if sequence_parallel else Replicate()
    queries, keys = Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)
    norms = ("layers.*.attention_norm", "layers.*.mlp_norm", "norm") if sequence_parallel else ()
    mlp = "layers.*.mlp"
    if isinstance(config, MoEConfig):
        if not sequence_parallel or config.balance:
            raise ValueError(
                f"sequence_parallel is {sequence_parallel}, and balance is {config.balance}: along tp each rank routes "
                "its own shard of the sequence, whose balance loss no other rank has; give True, and balance=0 (with "
                "is_biased=True, balance_biases keeps loads even)"
            )
        norms += ("layers.*.mlp.router.gate",)
        mlp = "layers.*.mlp.shared"
    feed_forward = {
        mlp: PrepareModuleInput(input_layouts=x),
        f"{mlp}.gate": ColwiseParallel(),
        f"{mlp}.up": ColwiseParallel(),
        f"{mlp}.down": RowwiseParallel(output_layouts=x),
    }
    return Plan(
        {
            "embed": RowwiseParallel(output_layouts=x),
            "layers.*.attention": PrepareModuleInput(input_layouts=x),
            "layers.*.attention.q": ColwiseParallel(heads=queries),
            "layers.*.attention.[kv]": ColwiseParallel(heads=keys),
            "layers.*.attention.o": RowwiseParallel(heads=queries, output_layouts=x),
            **(feed_forward if getattr(config, "shared", True) else {}),
            "head": ColwiseParallel(input_layouts=x),
            "loss": LossParallel(config.vocab),
            **{norm: SequenceParallel() for norm in norms},
        }
    )


# ---- applying it -----------------------------------------------------------------------------------------


class TensorParallel(FirstStep):
    """The state of a split model, in its attribute `tensor_parallel`; cuts: `{name of a split parameter: its cut}`."""

    def __init__(self, mesh: Mesh, cuts: dict[str, Cut], rows: Rows):
        _, first, style = rows[0] if rows else ("", None, None)
        # If the first split module takes its input in parts, so does the model.
        in_parts = isinstance(first, nn.Linear) and style.input_layouts == IN_FEATURES
        super().__init__(mesh, in_parts or any(style.takes_shards for _, _, style in rows), cuts)
        self.cuts = cuts
        self.names = [name for name, _, _ in rows]
        for name, module, _ in rows:  # hooks on parameters hold this object, so it must not hold a module itself
            module.split_as = name, {*module._parameters, *module._modules}

    @torch.compiler.disable
    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        require_unchanged(model)
        super().before_forward(model, args, kwargs)


def require_unchanged(model: nn.Module) -> TensorParallel:
    """Return the state of a split model; raise RuntimeError if a split module was moved or has new parameters."""
    for name in model.tensor_parallel.names:
        try:
            there = model.get_submodule(name)
            found, known = there.split_as
        except AttributeError:
            there = found = None
        added = set() if there is None else {*there._parameters, *there._modules} - known
        if found != name or not all(each.startswith("flat") for each in added):  # labs.zero's vectors
            raise RuntimeError(
                f"{name!r} was changed after parallelize(): replace, prune or parametrize modules and add parameters "
                "before it, and fold in parameters computed from others (prune.remove, remove_parametrizations)"
            )
    return model.tensor_parallel


def parallelize(model: nn.Module, mesh: Mesh, plan: Mapping[str, Style] | Style) -> nn.Module:
    """Split the model over a mesh with one axis; return the same model.

    model: the model, equal on all ranks, or a part of a larger model, such as a pipeline's stage; a parameter that an
        earlier part shares with this one was split with the earlier part.
    mesh: device mesh with one axis.
    plan: `{name of a submodule: style}`, or a style for the model itself.

    Raises ValueError or TypeError, before anything is changed, if the plan does not fit the model or the ranks.
    """
    plan = {"": plan} if isinstance(plan, Style) else plan
    if not isinstance(plan, Mapping):
        raise TypeError(f"{plan!r:.60} is no plan: give a style, or a table of styles by the names of submodules")
    rows = Plan(plan).rows(model)
    require_splittable(model, mesh, rows)
    cuts = cuts_of(model, rows, mesh.size())
    experts = {p for each in model.modules() if isinstance(each, ParallelExperts) for p in each.parameters()}
    whole = {name: p for name, p in model.named_parameters() if not hasattr(p, "cut_alike") and p not in experts}
    for name, (p, _) in cuts.items():
        require_in_no_graph(name, p)
    for name, p in model.named_parameters():
        _, cut = cuts.get(name, (p, None))
        if getattr(p, "cut_alike", cut) != cut:
            raise ValueError(f"{name!r} is tied to a parameter of an earlier part, which was split differently")
    require_equal(whole, mesh.get_group())
    for name, p in whole.items():
        _, p.cut_alike = cuts.get(name, (p, None))
        if p.cut_alike:
            keep_part(p, p.cut_alike, mesh.get_local_rank())
    model.tensor_parallel = TensorParallel(mesh, {name: cut for name, (_, cut) in cuts.items()}, rows)
    change(rows, model.tensor_parallel)
    expect_whole(model, {module for _, module, _ in rows}, model.tensor_parallel)
    whole = [name for name, p in model.named_parameters() if name not in cuts and p not in experts]
    model.tensor_parallel.parts.begin(model)
    model.register_load_state_dict_pre_hook(require_parts)
    model.tensor_parallel.watch(model, whole, whole_model_check.compare, then=unwatch)
    return model


def require_parts(model: nn.Module, state: Mapping[str, Tensor], prefix: str, *others: Any) -> None:
    """Raise ValueError, before load_state_dict, if a state has the whole of a split parameter."""
    parameters = dict(model.named_parameters())
    for name in model.tensor_parallel.cuts:
        given, own = state.get(prefix + name), parameters.get(name)
        if given is not None and own is not None and given.shape != own.shape:
            raise ValueError(
                f"{prefix + name!r} has shape {tuple(given.shape)}, and this rank's part of it {tuple(own.shape)}: "
                "load state[name][labs.tp.slices(model)[name]] for what is split, or save and load by labs.checkpoint"
            )


def keep_part(p: nn.Parameter, cut: Cut, rank: int) -> None:
    """Keep this rank's part of a parameter, and of the gradient that the parameter may have."""
    gradient, p.grad = p.grad, None
    p.data = part_of(p.data, cut, rank)
    p.grad = None if gradient is None else part_of(gradient, cut, rank)


def part_of(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    return cut.part(whole, rank).clone(memory_format=torch.contiguous_format)


def change(rows: Rows, of: TensorParallel) -> None:
    regions: dict[str, Region] = {}
    for name, module, style in rows:
        place = Place(name, of.mesh, None, of)
        if isinstance(style, PrepareModuleInput):
            regions[name] = style.region(place)
        around = [region for block, region in regions.items() if not block or f"{name}.".startswith(f"{block}.")]
        style.change(module, replace(place, region=around[-1] if around else None))


def cuts_of(model: nn.Module, rows: Rows, ranks: int) -> dict[str, tuple[nn.Parameter, Cut]]:
    """Return `{first name of a split parameter: (parameter, its cut)}`."""
    planned = {}
    for name, module, style in rows:
        for attribute, cut in style.cuts(name, module, ranks).items():
            if attribute not in module._parameters:
                raise ValueError(
                    f"{dotted(name, attribute)} is computed from other parameters: fold it in before (prune.remove, "
                    "remove_parametrizations, remove_weight_norm)"
                )
            planned[module, attribute] = cut
    first: dict[nn.Parameter, tuple[str, Cut | None]] = {}
    for path, module in model.named_modules():
        for attribute, p in module.named_parameters(recurse=False):
            name, cut = dotted(path, attribute), planned.get((module, attribute))
            if cut != first.setdefault(p, (name, cut))[1]:
                raise ValueError(
                    f"{first[p][0]!r} and {name!r} are one parameter (tied), and the plan splits them differently: "
                    "give both styles that cut it alike"
                )
    return {name: (p, cut) for p, (name, cut) in first.items() if cut}


def dotted(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


# ---- the parameters of all ranks together ----------------------------------------------------------------


def placements(model: nn.Module) -> dict[str, Placement]:
    """Return `{name: placement}`: Shard(dim) for a parameter that `parallelize` split, Replicate() for any other."""
    cuts = require_unchanged(model).cuts
    return {name: Shard(cuts[name].dim) if name in cuts else Replicate() for name, _ in model.named_parameters()}


def slices(model: nn.Module) -> dict[str, tuple[slice, ...]]:
    """Return `{name: slices}` for each split parameter: whole[slices] is this rank's part."""
    of = require_unchanged(model)
    return {name: cut.slices(of.mesh.get_local_rank()) for name, cut in of.cuts.items()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return `{name: whole parameter}` on every rank; all ranks must call this function."""
    of = require_unchanged(model)
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: of.cuts[name].whole(p, of.mesh) if name in of.cuts else p for name, p in whole.items()}


def clip_gradients(model: nn.Module, max_norm: float, groups: Sequence[ProcessGroup | None] = ()) -> Tensor:
    """Clip the gradients of a split model as `labs.clip.clip_gradients` does; return the norm before (0-dim).

    A gradient that is the same on several ranks counts once.

    groups: other process groups over which the parameters are sharded, as by labs.fsdp.
    """
    parameters, everywhere = list(model.parameters()), [model.tensor_parallel.mesh.get_group(), *groups]
    norm = global_norm(parameters, everywhere, copies(model))
    shorten(parameters, norm, max_norm)
    return norm


def copies(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return `{parameter: number of ranks that hold the same numbers}`; these ranks hold the same gradient, too."""
    of = require_unchanged(model)
    return {p: of.cuts[name].copies if name in of.cuts else of.mesh.size() for name, p in model.named_parameters()}
