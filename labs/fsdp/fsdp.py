"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

`fully_shard(module)` makes a group of the parameters in `module`, except those that an inner call has taken: cut over
the ranks, gathered at once, dropped at once.  Call it on each layer, and on the model for the rest:

    mesh = Mesh((4,), ("dp",))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters())       # after it: the model's parameters are shards now

Names and arguments are PyTorch's (torch.distributed.fsdp, FSDP2; Zhao et al. 2023, arXiv 2304.11277, is about FSDP1).
"""

from typing import Any

import torch.distributed as dist
from torch import nn

from labs.agree import require_equal
from labs.fsdp.parameter_group import ParameterGroup
from labs.fsdp.shardable import homes_of, require_shardable
from labs.fsdp.sharded import MixedPrecisionPolicy, OffloadPolicy, ShardedParameter
from labs.fsdp.sharding import Sharding, shardings_in
from labs.mesh import Mesh, smaller_group

AS_THEY_ARE, ON_THE_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()


def fully_shard(
    module: nn.Module,
    *,
    mesh: Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = AS_THEY_ARE,
    offload_policy: OffloadPolicy = ON_THE_DEVICE,
) -> nn.Module:
    """Shard the parameters in `module` that no inner call has taken; the same module, which is an FSDPModule now.

    mesh: of one axis, or of two for HSDP, which shards along the last and replicates along the first; all ranks, if it
    is None.  reshard_after_forward: drop what was gathered until backward (True), keep it (False), or keep so much that
    a group of this many ranks holds all of it between them (a number).  None means True, but False for the outermost
    module, whose backward begins where its forward ends.

    Hooks on parameters stay: those of register_hook get this rank's own gradient, those of
    register_post_accumulate_grad_hook the shard, with its mean.

    Raises ValueError for what cannot be sharded, and if ranks do not start from the same parameters.
    """
    mesh = mesh or Mesh((dist.get_world_size(),), ("dp",))
    homes = homes_of(module)
    require_shardable(module, homes, mesh, reshard_after_forward, mp_policy)
    named = {places[0].name + ("" if p.requires_grad else " (frozen)"): p for p, places in homes.items()}
    for axis in mesh.mesh_dim_names:
        require_equal(named, mesh.get_group(axis))
    parameters = [ShardedParameter(places, p, mesh, mp_policy, offload_policy) for p, places in homes.items()]
    module._sharding = Sharding(
        module,
        ParameterGroup(parameters, mesh, mp_policy),
        reshard_after_forward,
        None if isinstance(reshard_after_forward, bool | None) else smaller_group(mesh, reshard_after_forward),
    )
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    return module


class FSDPModule:
    """What `fully_shard` adds to a module: these of PyTorch's methods."""

    _sharding: Sharding

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"copy.deepcopy of a {type(self).__name__}, whose process groups cannot be copied: for an average of the "
            "parameters, average shards, [p.detach().clone() for p in model.parameters()]; for another model, copy "
            "before fully_shard"
        )

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this module's parameters, and wait; or only begin to, unless they are here or on their way.

        Whoever began waits by what is returned, or leaves that to this module's next forward or backward.
        """
        if async_op:
            return UnshardHandle(self._sharding)
        self._sharding.unshard()

    def reshard(self) -> None:
        """Drop them."""
        self._sharding.group.drop()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps whole gradients and sends nothing, for all micro-batches but the last.

        What it keeps is in no `.grad`, so zero_grad() does not forget it.
        """
        for sharding in shardings(self, recurse):
            sharding.sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        for sharding in shardings(self, recurse):
            sharding.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for sharding in shardings(self, recurse):
            sharding.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to gather when this one's forward begins, instead of the one that came next in the last step."""
        self._sharding.next_in_forward = [module._sharding for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to gather when this one's backward begins, instead of the one before it in forward."""
        self._sharding.next_in_backward = [module._sharding for module in modules]


class UnshardHandle:
    """Parameters on their way: wait() until they are here, unless somebody has waited for them."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        sharding.settled()
        sharding.prefetch([sharding])

    def wait(self) -> None:
        if self.sharding.group.arriving:
            self.sharding.unshard()


def shardings(module: nn.Module, recurse: bool) -> list[Sharding]:
    return [sharding for sharding, name in shardings_in(module).items() if recurse or not name]
