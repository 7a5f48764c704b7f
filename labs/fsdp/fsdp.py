"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

`fully_shard(module)` makes a group of the parameters in `module`, except those that an inner call has taken.  The
parameters of a group are sharded over the ranks, gathered at once, and dropped at once.  Call it on each layer, and on
the model for the rest:

    mesh = Mesh((4,), ("dp",))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters())       # after fully_shard: the model's parameters are shards now

Names and arguments are those of FSDP2 in PyTorch, torch.distributed.fsdp.  Source: Zhao et al. 2023, arXiv 2304.11277,
which describes FSDP1.
"""

import sys
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn

from labs.agree import require_equal
from labs.fsdp.module_events import Sharding, prefetch, shardings_in
from labs.fsdp.parameter_group import ParameterGroup
from labs.fsdp.sharded_parameter import MixedPrecisionPolicy, OffloadPolicy, ShardedParameter
from labs.fsdp.what_can_be_sharded import homes_of, require_shardable
from labs.mesh import Mesh, smaller_group

AS_THEY_ARE, ON_THE_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: nn.Module | Iterable[nn.Module],
    *,
    mesh: Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = AS_THEY_ARE,
    offload_policy: OffloadPolicy = ON_THE_DEVICE,
    ignored_params: Iterable[nn.Parameter] = (),
    **others: Any,
) -> Any:
    """Shard the parameters in `module` that no inner call has taken; return the same module, now an FSDPModule.

    module: a module, or a list of modules that form one group: it is gathered before the first of them runs, and
        dropped after the last.
    mesh: device mesh with one axis, or two for HSDP, which shards along the last and replicates along the first; by
        default one axis of all ranks.
    reshard_after_forward: True drops the gathered parameters until backward, False keeps them; a number n keeps so
        large a part that n ranks hold all parameters between them.  None means True, but False for the outermost
        module, whose backward begins as its forward ends.
    mp_policy: the dtypes of gathered parameters, reduced gradients and outputs.
    offload_policy: the memory that holds the shards.
    ignored_params: parameters that stay whole, and whose gradients are not averaged; pass them to each call.

    Hooks on parameters are kept: a hook of register_hook gets this rank's own gradient, and a hook of
    register_post_accumulate_grad_hook gets the shard, whose gradient is the mean.

    Raises ValueError for what cannot be sharded, and if ranks do not start from the same parameters.
    """
    for name in others:
        raise TypeError(LACKING.get(name, f"fully_shard() has no argument {name!r}"))
    mesh = mesh or Mesh((dist.get_world_size(),), ("dp",))
    modules = [module] if isinstance(module, nn.Module) else list(module)
    homes = homes_of(modules, ignored := set(ignored_params))
    require_shardable(modules, homes, mesh, reshard_after_forward, mp_policy)
    named = {places[0].name + ("" if p.requires_grad else " (frozen)"): p for p, places in homes.items()}
    for axis in mesh.mesh_dim_names:
        require_equal(named, mesh.get_group(axis))
    parameters = [ShardedParameter(places, p, mesh, mp_policy, offload_policy) for p, places in homes.items()]
    smaller = None if isinstance(reshard_after_forward, bool | None) else smaller_group(mesh, reshard_after_forward)
    sharding = Sharding(
        modules,
        ParameterGroup(parameters, mesh, mp_policy, smaller),
        reshard_after_forward,
        ignored,
    )
    for each in modules:
        each._sharding = sharding
        each.__class__ = type(f"FSDP{type(each).__name__}", (FSDPModule, type(each)), {})
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the parameters of a sharded module around another method than forward, such as `generate`."""
    if not isinstance(module, FSDPModule):
        return
    method, sharding = getattr(module, method_name), module._sharding

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = None
        args, kwargs = sharding.before_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        finally:
            output = sharding.after_forward(module, args, kwargs, output)
        return output

    setattr(module, method_name, wrapped)


LACKING = {  # options of PyTorch that are missing here: what to do instead
    "shard_placement_fn": "labs.fsdp cuts parameters along their first dim: transpose one that must be cut otherwise",
    "set_requires_all_reduce": "labs.fsdp reduces over both axes or none: set_requires_gradient_sync(False)",
}


class FSDPModule:
    """A module after `fully_shard`, with the methods of PyTorch's FSDPModule."""

    _sharding: Sharding

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a module of the original class: a new module, such as a slice of this one, is not sharded."""
        return cls.__mro__[2](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in LACKING:
            raise AttributeError(LACKING[name])
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"copy.deepcopy of a {type(self).__name__}, copy.copy or pickle, and its process groups cannot be copied: "
            "for an average of the parameters, average shards, [p.detach().clone() for p in model.parameters()]; for "
            "another model, copy before fully_shard; to save it, labs.checkpoint.save, or each p.full_tensor()"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                "torch.distributed.checkpoint takes a DTensor of labs for a whole: save with labs.checkpoint, or "
                "full_tensor() of each in model.state_dict()"
            )
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of shards, even between unshard() and reshard()."""
        for sharding in shardings(self, True):
            sharding.group.hide()
        return super().state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of shards, and the full gradients that earlier micro-batches left unreduced."""
        for sharding in shardings(self, True):
            sharding.group.hide()
            sharding.group.forget_gradients()
        super().zero_grad(set_to_none)

    def unshard(self, async_op: bool = False) -> Sharding | None:
        """Gather this module's parameters, unless they are gathered already.

        async_op: only start the all-gather, and return a handle, whose wait() waits for it.  The module's next forward
            or backward waits for it, too.
        """
        if not async_op:
            return self._sharding.unshard()
        self._sharding.settle_model()
        prefetch([self._sharding.group])
        return self._sharding

    def reshard(self) -> None:
        """Drop this module's gathered parameters; raise RuntimeError if they were written to since."""
        self._sharding.group.require_unwritten()
        self._sharding.group.is_stale()  # raises an error if .data was written to
        self._sharding.group.drop()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients: pass False for all micro-batches but the last.

        With False, backward sends nothing and adds up full gradients.  They are in no `.grad`: model.zero_grad() drops
        them, and an optimizer's zero_grad() does not.
        """
        for sharding in shardings(self, recurse):
            sharding.group.sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: PyTorch waits for reduced gradients in the last backward only, and labs.fsdp in each."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients by `factor` instead of the number of ranks."""
        self._sharding.group.divisor = factor

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward({reshard_after_forward!r}): give True or False")
        for sharding in shardings(self, recurse):
            sharding.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for sharding in shardings(self, recurse):
            sharding.group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Choose the modules to gather as this one's forward begins, instead of the next one of the last step."""
        self._sharding.group.next_in_forward = groups_of(modules)
        self.require_same_prefetch()

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Choose the modules to gather as this one's backward begins, instead of the one before it in forward."""
        self._sharding.group.next_in_backward = groups_of(modules)
        self.require_same_prefetch()

    def require_same_prefetch(self) -> None:
        if self._sharding.shared:  # otherwise the first forward compares
            self._sharding.shared.require_same_prefetch()


def groups_of(modules: list[FSDPModule]) -> list[ParameterGroup]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"a {type(module).__name__} to prefetch, which was not given to fully_shard")
    return [module._sharding.group for module in modules]


def shardings(module: nn.Module, recurse: bool) -> list[Sharding]:
    return [sharding for sharding, name in shardings_in(module).items() if recurse or not name]
