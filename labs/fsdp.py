"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

`fully_shard(module)` makes of the parameters in `module`, but for those that an inner call has taken, a group: cut over
the ranks, gathered at once, dropped at once.  Call it on each layer, and on the model for the rest:

    mesh = Mesh((4,), ("dp",))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters())       # after it: the model's parameters are shards now

The events are those of `labs.zero`; what they do differs where FSDP2 differs from FSDP1, whose vectors `zero` has:

                        labs.zero, stage 3                  labs.fsdp
    a shard is          a part of a layer's vector          a DTensor under the parameter's own name, Shard(0)
    so the optimizer    treats a whole layer alike          may treat each parameter in its own way
    padding             once a layer                        once a parameter, and a copy out of what was gathered
    frozen, trained     a vector each, so a gather each     one gather
    state dict          zero.state_dict()                   model.state_dict()
    before_forward      gather                              wait for it, and send for the next layer's
    after_forward       drop                                drop; keep (False); or keep a larger piece (a number)
    before_backward     gather                              wait for it, and send for the layer's before it
    after_backward      drop                                drop
    gradient_ready      reduce, and wait                    send to be reduced; wait for the layer's behind it
    the model itself    a layer like the others             stays gathered from forward to backward
    over two axes       -                                   sharded along the last, replicated along the first (HSDP)

Names and arguments are PyTorch's (torch.distributed.fsdp, FSDP2; Zhao et al. 2023, arXiv 2304.11277, is of FSDP1).
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from labs.autograd import Call, Moved, alias, differentiable, require_dense
from labs.group import everybodys, require_equal
from labs.layers import Home
from labs.mesh import Mesh, along
from labs.sharded import MixedPrecisionPolicy, OffloadPolicy, ParameterGroup, ShardedParameter

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

    mesh: of one axis, or of two for HSDP, which shards along the last and replicates along the first; all ranks, where
    it is None.  reshard_after_forward: drop what was gathered until backward (True), keep it (False), or keep as much
    as makes a group of so many ranks hold all of it between them (a number).  None is True, and False for the outermost
    module, whose backward begins where its forward ends.

    Raises ValueError for what cannot be sharded, and where ranks do not start from the same parameters.
    """
    mesh = mesh or Mesh((dist.get_world_size(),), ("dp",))
    homes = homes_of(module)
    require_shardable(module, homes, mesh, reshard_after_forward, mp_policy)
    for axis in mesh.mesh_dim_names:
        require_equal({places[0].name: p for p, places in homes.items()}, mesh.get_group(axis))
    parameters = [ShardedParameter(places, p, mesh, mp_policy, offload_policy) for p, places in homes.items()]
    module._sharding = Sharding(
        module,
        ParameterGroup(parameters, mesh, mp_policy),
        reshard_after_forward,
        smaller_group(mesh, reshard_after_forward),
    )
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    return module


class FSDPModule:
    """What `fully_shard` adds to a module; of PyTorch's methods these."""

    _sharding: "Sharding"

    def unshard(self) -> None:
        """Gather this module's parameters, and wait."""
        self._sharding.unshard()

    def reshard(self) -> None:
        """Drop them."""
        self._sharding.group.drop()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps whole gradients and sends nothing, for all micro-batches but the last."""
        for sharding in shardings(self, recurse):
            sharding.sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        for sharding in shardings(self, recurse):
            sharding.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        for sharding in shardings(self, recurse):
            sharding.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to send for when this one's forward begins, in the place of the one that came next in the last step."""
        self._sharding.next_in_forward = [module._sharding for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """What to send for when this one's backward begins, in the place of the one before it in forward."""
        self._sharding.next_in_backward = [module._sharding for module in modules]


class Sharding:
    """One module's part in a training step: a method for each event."""

    def __init__(
        self, module: nn.Module, group: ParameterGroup, reshard: bool | int | None, smaller: ProcessGroup | None
    ):
        self.module, self.group, self.smaller, self.policy = module, group, smaller, group.policy
        self.reshard_after_forward, self.reshard_after_backward, self.sync = reshard, True, True
        self.next_in_forward: list[Sharding] | None = None
        self.next_in_backward: list[Sharding] | None = None
        self.step: Step | None = None
        self.call: Call | None = None
        self.due, self.counted = 0, None  # gradients that this backward still brings
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)

    def settle(self, step: "Step") -> None:
        self.step = step
        for p in self.trained:
            p.full.register_post_accumulate_grad_hook(self.gradient_ready)

    @property
    def trained(self) -> list[ShardedParameter]:
        return [p for p in self.group.parameters if p.shard.requires_grad]

    def settled(self) -> None:
        """The outermost module is the one whose forward begins first."""
        if self.step is None:
            names = {module._sharding: name for name, module in fsdp_modules(self.module)}
            for p in chain(*(sharding.group.parameters for sharding in names)):
                p.settle()
            step = Step(self, names)
            for sharding in names:
                sharding.settle(step)

    def unshard(self) -> list[Tensor]:
        self.settled()
        self.group.gather(self.smaller)
        self.group.arrive()
        return self.group.show()

    # ---- the events of a training step -------------------------------------------------------------------

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.settled()
        self.step.forward_begins(self)
        self.group.require_current()
        uses = self.unshard()
        self.prefetch(self.step.after(self) if self.next_in_forward is None else self.next_in_forward)
        if self.policy.cast_forward_inputs and self.policy.param_dtype:
            args, kwargs = tree_map(partial(cast, self.policy.param_dtype), (args, kwargs))
        args, kwargs = tuple(map(alias, args)), {key: alias(value) for key, value in kwargs.items()}
        if torch.is_grad_enabled():
            begins = partial(self.before_backward, self.group.versions())
            self.call = Call(differentiable([args, kwargs]), uses, begins, self.after_backward)
        return args, kwargs

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Called when the module's output is there, or its forward has failed."""
        if self.reshards and not in_backward():  # a recomputation needs it at once
            if self.smaller:
                self.group.keep(self.smaller)
            self.group.drop()
        if self.policy.output_dtype:
            output = tree_map(partial(cast, self.policy.output_dtype), output)
        if self.call:
            self.call.ends(differentiable([output, args, kwargs]))
            self.call = None
        return output

    @property
    def reshards(self) -> bool:
        reshard = self.reshard_after_forward
        return self.step and self.step.root is not self if reshard is None else bool(reshard)

    def before_backward(self, versions: tuple[int, ...]) -> None:
        """Called when the gradient of the module's output is there; `versions` of the shards as in its forward."""
        if versions != self.group.versions():
            raise RuntimeError(
                "backward() of a loss from before step(): the parameters that it was computed with are gone"
            )
        self.step.backward_begins()
        self.expect()
        self.unshard()
        self.prefetch(self.step.before(self) if self.next_in_backward is None else self.next_in_backward)

    def expect(self) -> None:
        """Count the gradients that this backward will bring."""
        if self.counted != (backward := torch._C._current_graph_task_id()):
            nodes = [get_gradient_edge(p.full).node for p in self.trained]
            self.due, self.counted = sum(map(torch._C._will_engine_execute_node, nodes)), backward

    def after_backward(self) -> None:
        """Called when the gradients of the module's parameters and inputs are there."""
        if self.reshard_after_backward:
            self.group.drop()

    def gradient_ready(self, full: nn.Parameter) -> None:
        """Called when all uses of one parameter have been added up."""
        self.due -= 1
        if self.due == 0:
            self.step.reduce(self)

    def prefetch(self, others: Sequence["Sharding"]) -> None:
        for other in others:
            other.group.gather(other.smaller)


class Step:
    """What the modules of one model know of each other: in which order they come, and whose gradients are under way."""

    def __init__(self, root: Sharding, names: dict[Sharding, str]):
        self.root, self.names = root, names
        self.last: list[Sharding] = []  # the order of the last forward,
        self.now: list[Sharding] = []  # and of this one
        self.agreed: list[str] = []  # the order of which all ranks know that it is everybody's
        self.in_backward, self.reducing, self.averaging = False, None, []

    def forward_begins(self, sharding: Sharding) -> None:
        if in_backward():
            return
        if sharding is self.root:
            self.last, self.now = self.now, []
        self.now.append(sharding)

    def after(self, sharding: Sharding) -> list[Sharding]:
        """The one that came next in the last forward, if that began as this one does."""
        n = len(self.now)
        return self.last[n : n + 1] if self.last[:n] == self.now and not in_backward() else []

    def before(self, sharding: Sharding) -> list[Sharding]:
        last = max(i for i, other in enumerate(self.now) if other is sharding)
        return self.now[max(last - 1, 0) : last]

    def backward_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.backward_ends)

    def reduce(self, sharding: Sharding) -> None:
        """One reduction at a time is on its way, so that no more than one layer's gradients wait."""
        if not sharding.sync:
            sharding.group.accumulate()
            return
        self.finish()
        sharding.group.reduce()
        self.reducing = sharding.group
        self.averaging.append(sharding.group)

    def finish(self) -> None:
        if self.reducing:
            self.reducing.finish_reduce()
            self.reducing = None

    def backward_ends(self) -> None:
        self.finish()
        for group in self.averaging:
            group.finish_average()
        for sharding in self.names:
            if sharding.reshard_after_backward:
                sharding.group.drop()
        self.in_backward, self.averaging = False, []
        self.require_same_order()

    def require_same_order(self) -> None:
        """Raise RuntimeError, on every rank, where ranks used different layers; asked when a new order is used.

        Nothing fails by itself where layers of equal size meet in a collective: one's numbers become the other's.
        """
        order = [self.names[sharding] or "the model" for sharding in self.now]
        if order == self.agreed:
            return
        ranks, (first, *others) = everybodys(order, self.root.group.group)
        for rank, other in zip(ranks[1:], others, strict=True):
            if other != first:
                raise RuntimeError(
                    f"ranks use different layers: rank {ranks[0]} {first}, rank {rank} {other}; what meets in one "
                    "collective must be of one layer, so use the same layers on all ranks, in the same order"
                )
        self.agreed = order


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def cast(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def fsdp_modules(module: nn.Module) -> list[tuple[str, "FSDPModule"]]:
    return [(name, each) for name, each in module.named_modules() if isinstance(each, FSDPModule)]


def shardings(module: nn.Module, recurse: bool) -> list[Sharding]:
    return [each._sharding for name, each in fsdp_modules(module) if recurse or not name]


# ---- what is sharded -------------------------------------------------------------------------------------


def homes_of(module: nn.Module) -> dict[nn.Parameter, list[Home]]:
    """The parameters in `module`, but for those of inner FSDPModules, each with the places where it stands."""
    homes: dict[nn.Parameter, list[Home]] = {}

    def walk(inner: nn.Module, path: str) -> None:
        for attribute, p in inner._parameters.items():
            if p is not None:
                homes.setdefault(p, []).append(Home(inner, attribute, path + attribute))
        for name, child in inner.named_children():
            if not isinstance(child, FSDPModule):
                walk(child, f"{path}{name}.")

    walk(module, "")
    return homes


def require_shardable(
    module: nn.Module, homes: dict[nn.Parameter, list[Home]], mesh: Mesh, reshard: Any, policy: MixedPrecisionPolicy
) -> None:
    kind = type(module).__name__
    if isinstance(module, FSDPModule):
        raise ValueError(f"fully_shard twice on the same {kind}: its parameters are sharded already")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"fully_shard of a {kind}, which has no forward: call it on each of the modules in it")
    if mesh.ndim > 2:
        raise ValueError(
            f"{mesh} has {mesh.ndim} axes: give one to shard along, or two, replicas first, mesh['dp', ...]"
        )
    ranks = mesh.size(-1)
    if not isinstance(reshard, bool | None) and (reshard < 2 or reshard >= ranks or ranks % reshard):
        fits = [n for n in range(2, ranks) if ranks % n == 0]
        raise ValueError(
            f"reshard_after_forward={reshard} on {ranks} ranks: give True, False, or a smaller number of ranks that "
            f"divides them{f' ({fits})' if fits else ''}"
        )
    require_dense(module)
    for p, (home, *_) in homes.items():
        if isinstance(p, Moved):
            raise ValueError(
                f"parameter {home.name!r} is shared with a module that was sharded before this {kind}: tied parameters "
                "travel together, so shard the module that has both, and neither of them by itself"
            )
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"parameter {home.name!r} is lazy: run a forward before fully_shard, so that it has a shape"
            )
        if p.ndim == 0:
            raise ValueError(f"parameter {home.name!r} has no dim to cut along: give it the shape (1,)")
    dtypes = {p.dtype: home.name for p, (home, *_) in homes.items()}
    if len(dtypes) > 1 and policy.param_dtype is None:
        names = " and ".join(f"{name!r} ({dtype})" for dtype, name in dtypes.items())
        raise ValueError(
            f"{names} cannot be gathered at once: shard their modules one by one, or give mp_policy a param_dtype"
        )


def smaller_group(mesh: Mesh, ranks: bool | int | None) -> ProcessGroup | None:
    """The neighbours that have all of a layer between them, where that is a number; made once for a mesh."""
    if isinstance(ranks, bool | None):
        return None
    axes = mesh.made_of[mesh.mesh_dim_names[-1]]
    key = (*axes, f"by {ranks}")
    if key not in mesh.groups:
        for line in along(mesh.root.mesh, [mesh.root.number(axis) for axis in axes]).flatten(1):
            for part in line.split(ranks):
                group = dist.new_group(part.tolist())
                if mesh.rank in part:
                    mesh.groups[key] = group
    return mesh.groups[key]
