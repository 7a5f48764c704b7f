"""Checks of a model before `labs.fsdp` shards it, and after each forward.

homes_of             returns the parameters that a call of fully_shard takes, each with all its places
require_shardable    refuses modules, meshes and parameters that cannot be sharded
require_all_sharded  refuses parameters that were added after fully_shard
"""

from typing import Any

from torch import nn

from labs.dropped import Moved
from labs.dtensor import DTensor
from labs.fsdp.sharded_parameter import MixedPrecisionPolicy
from labs.hooks import require_dense
from labs.mesh import Mesh
from labs.zero.layers import Home


def homes_of(modules: list[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, list[Home]]:
    """Return the parameters in `modules` that no inner call has taken, each with the places where it stands."""
    homes: dict[nn.Parameter, list[Home]] = {}

    def walk(inner: nn.Module, path: str) -> None:
        for attribute, p in inner._parameters.items():
            if p is not None and p not in ignored:
                homes.setdefault(p, []).append(Home(inner, attribute, path + attribute))
        for name, child in inner.named_children():
            if not is_sharded(child):
                walk(child, f"{path}{name}.")

    for number, module in enumerate(modules):
        walk(module, f"{number}." if len(modules) > 1 else "")
    return homes


def is_sharded(module: nn.Module) -> bool:
    return "_sharding" in vars(module)


def require_shardable(
    modules: list[Any], homes: dict[nn.Parameter, list[Home]], mesh: Mesh, reshard: Any, policy: MixedPrecisionPolicy
) -> None:
    if not modules:
        raise ValueError("fully_shard of an empty list: give a module, or those that make one group, [norm, head]")
    for module in modules:
        kind = type(module).__name__
        if is_sharded(module):
            raise ValueError(f"fully_shard twice on the same {kind}: its parameters are sharded already")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard of a {kind}, which has no forward: call it on each of the modules in it")
        require_dense(module)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={mesh!r} is no labs.mesh.Mesh: give Mesh((ranks,), ('dp',)), or two axes for HSDP")
    if mesh.ndim > 2:
        raise ValueError(
            f"{mesh} has {mesh.ndim} axes: give one to shard along, or two, replicas first, mesh['dp', ...]"
        )
    ranks = mesh.size(-1)
    if not isinstance(reshard, bool | int | None):
        raise ValueError(f"reshard_after_forward={reshard!r}: give True, False, None, or a number of ranks")
    if not isinstance(reshard, bool | None) and (reshard < 2 or reshard >= ranks or ranks % reshard):
        fits = [n for n in range(2, ranks) if ranks % n == 0]
        raise ValueError(
            f"reshard_after_forward={reshard} on {ranks} ranks: give True, False, or a smaller number of ranks that "
            f"divides them{f' ({fits})' if fits else ''}"
        )
    for p, (home, *_) in homes.items():
        require_cuttable(p, home.name, kind, policy)
    dtypes = {p.dtype: home.name for p, (home, *_) in homes.items()}
    if len(dtypes) > 1 and policy.param_dtype is None:
        names = " and ".join(f"{name!r} ({dtype})" for dtype, name in dtypes.items())
        raise ValueError(
            f"{names} cannot be gathered at once: shard their modules one by one, or give mp_policy a param_dtype"
        )


def require_cuttable(p: nn.Parameter, name: str, kind: str, policy: MixedPrecisionPolicy) -> None:
    if isinstance(p, Moved):
        raise ValueError(
            f"parameter {name!r} is shared with a module that was sharded before this {kind}: tied parameters "
            "travel together, so shard the module that has both, and neither of them by itself"
        )
    if isinstance(p, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor already, and fully_shard cuts plain ones: labs.parallel puts FSDP on "
            "tensor parallelism"
        )
    if hasattr(p, "__tensor_flatten__") or hasattr(p, "fsdp_pre_all_gather"):
        raise ValueError(f"parameter {name!r} is a {type(p).__name__} with ways of its own: give a plain parameter")
    if nn.parameter.is_lazy(p):
        raise ValueError(f"parameter {name!r} is lazy: run a forward before fully_shard, so that it has a shape")
    if p.grad is not None:
        raise ValueError(f"parameter {name!r} has a gradient, and its shard takes its place: call zero_grad() before")
    if policy.param_dtype is not None and not p.is_floating_point():
        raise ValueError(
            f"parameter {name!r} is of {p.dtype}, and would be gathered as {policy.param_dtype}, which loses "
            "some of it: shard its module by itself, without a param_dtype"
        )
    if not p.is_contiguous():
        raise ValueError(f"parameter {name!r} has the strides {p.stride()}: do p.data = p.data.contiguous() before")
    if p.ndim == 0:
        raise ValueError(f"parameter {name!r} has no dim to cut along: give it the shape (1,)")


def require_all_sharded(root: nn.Module, ignored: set[nn.Parameter]) -> None:
    for name, p in root.named_parameters():
        if p.requires_grad and not hasattr(p, "to_local") and p not in ignored:
            raise RuntimeError(
                f"parameter {name!r} was added after the model was sharded, and is not averaged: add it before "
                "fully_shard, or fully_shard its module before the first forward, too"
            )
