"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

`fully_shard(module)` makes a group of the parameters in `module`, except those that an inner call has taken: cut over
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
    padding             once per layer                      once per parameter, and a copy out of what was gathered
    frozen, trained     a vector each, so a gather each     one gather; and each forward asks which is which
    state dict          zero.state_dict()                   model.state_dict()
    before_forward      gather                              wait for it, and start the next layer's
    after_forward       drop                                drop; or keep, as reshard_after_forward says
    before_backward     gather                              wait for it, and start that of the layer before it
    after_backward      drop                                drop
    gradient_ready      reduce, and wait                    start to reduce, when that of the layer after it is done
    backward ends       -                                   reduce what still waits, of earlier micro-batches, too
    not used            its gradient counts as zero         no gradient, unless another rank has one
    the model itself    a layer like the others             stays gathered from forward to backward
    over two axes       -                                   sharded along the last, replicated along the first (HSDP)

Names and arguments are PyTorch's (torch.distributed.fsdp, FSDP2; Zhao et al. 2023, arXiv 2304.11277, is about FSDP1).
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from labs.autograd import Call, alias, differentiable, require_inside, weakly
from labs.group import require_equal
from labs.mesh import Mesh, smaller_group
from labs.parameter_group import ParameterGroup
from labs.prefetch import Step, in_backward
from labs.shardable import homes_of, require_shardable
from labs.sharded import MixedPrecisionPolicy, OffloadPolicy, ShardedParameter

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

    _sharding: "Sharding"

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            f"copy.deepcopy of a {type(self).__name__}, whose process groups cannot be copied: for an average of the "
            "parameters, average shards, [p.detach().clone() for p in model.parameters()]; for another model, copy "
            "before fully_shard"
        )

    def unshard(self) -> None:
        """Gather this module's parameters, and wait."""
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
        self.running = False  # its forward
        self.place = 0  # of its last forward among the others
        self.due, self.counted = 0, None  # gradients that a backward still brings, and which one
        self.over = False  # that backward has gone through the module, and on to its inputs
        # Before the hooks that are there already, which may compute a weight from the parameters.
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)

    def settle(self, step: Step) -> None:
        self.step = step
        self.train()

    def train(self) -> None:
        for p in self.group.parameters:
            p.train(weakly(self.gradient_ready))

    def settled(self) -> None:
        """The outermost module is the one whose forward begins first."""
        if self.step is None:
            names = {module._sharding: name for name, module in fsdp_modules(self.module)}
            with torch.inference_mode(False):  # what is made in it could never be trained
                for p in chain(*(sharding.group.parameters for sharding in names)):
                    p.settle()
            step = Step(self, names)
            for sharding in names:
                sharding.settle(step)

    def unshard(self) -> list[Tensor]:
        self.settled()
        with torch.inference_mode(False):
            self.group.gather(self.smaller)
            self.group.arrive()
            return self.group.show()

    # ---- the events of a training step -------------------------------------------------------------------

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.running = True
        self.settled()
        self.step.forward_begins(self)
        self.group.require_current()
        if not in_backward() and self.group.follow():
            self.train()
        if self.step.root is self:
            require_all_sharded(module)
        uses = self.unshard()
        self.prefetch(self.step.after(self) if self.next_in_forward is None else self.next_in_forward)
        if self.policy.cast_forward_inputs and self.policy.param_dtype:
            args, kwargs = tree_map(partial(cast, self.policy.param_dtype), (args, kwargs))
        args, kwargs = tuple(map(alias, args)), {key: alias(value) for key, value in kwargs.items()}
        if torch.is_grad_enabled():
            given = differentiable([args, kwargs])
            begins = partial(weakly(self.before_backward), self.group.versions(), self.place)
            self.call = Call(given, uses, begins, partial(weakly(self.after_backward), bool(given)))
        return args, kwargs

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Called when the module's output is there, or its forward has failed."""
        self.running = False
        self.group.require_unwritten()
        if output is not None:
            require_inside(output, {p.whole.untyped_storage()._cdata: p.name for p in self.group.parameters})
        if self.reshards and not in_backward():  # a recomputation needs it at once
            if self.smaller and self.group.gathered and torch.is_grad_enabled():
                self.group.keep(self.smaller)
            self.group.drop()
        if self.policy.output_dtype:
            output = tree_map(partial(cast, self.policy.output_dtype), output)
        leads_back = self.call and self.call.ends(differentiable([output, args, kwargs]))
        self.call = None
        if self.step:
            self.step.forward_ends(self, leads_back, failed=output is None)
        return output

    @property
    def reshards(self) -> bool:
        reshard = self.reshard_after_forward
        return self.step and self.step.root is not self if reshard is None else bool(reshard)

    def before_backward(self, versions: tuple[int, ...], place: int) -> None:
        """Called when the gradient of the module's output is there; versions (of shards) and place as in forward."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True goes through fully_shard, which drops the parameters that a second "
                "one would read: compute a gradient penalty in one process, or with labs.ddp"
            )
        if versions != self.group.versions():
            raise RuntimeError("backward() of a loss from before step(): the parameters of its forward are gone")
        self.step.backward_begins()
        self.step.back.append(self)
        self.expect()
        self.unshard()
        self.prefetch(self.step.before(place) if self.next_in_backward is None else self.next_in_backward)

    def expect(self) -> None:
        """Count the gradients that this backward will bring."""
        self.over = False
        if self.counted != (backward := torch._C._current_graph_task_id()):
            self.due, self.counted = self.gradients_due(), backward
        if self.group.trained and (self.due or self.step.brings_gradients()):
            self.step.waiting[self] = None  # where this rank has none, too: another may have some

    def gradients_due(self) -> int:
        nodes = [get_gradient_edge(p.full).node for p in self.group.parameters if p.full.requires_grad]
        return sum(map(torch._C._will_engine_execute_node, nodes))

    def after_backward(self, leads_on: bool) -> None:
        """Called when the gradients of the module's parameters and inputs are there; leads_on: some inputs have one."""
        if self.reshard_after_backward and not self.running:
            self.group.drop()
        self.over = leads_on
        self.reduce_early()

    def gradient_ready(self, full: nn.Parameter) -> None:
        """Called when all uses of one parameter have been added up."""
        self.step.backward_begins()
        self.step.waiting[self] = None
        self.due -= self.counted == torch._C._current_graph_task_id()
        self.reduce_early()

    def reduce_early(self) -> None:
        """Where the backward has left the module, or all others, which it does on all ranks alike; else at its end."""
        if self.due == 0 and (self.over or self.step.nothing_else(self)):
            self.step.reduce(self)

    def prefetch(self, others: Sequence["Sharding"]) -> None:
        with torch.inference_mode(False):
            for other in others:
                other.group.gather(other.smaller)


def require_all_sharded(root: nn.Module) -> None:
    for name, p in root.named_parameters():
        if p.requires_grad and not hasattr(p, "to_local"):
            raise RuntimeError(
                f"parameter {name!r} was added after the model was sharded, and is not averaged: add it before "
                "fully_shard, or fully_shard its module before the first forward, too"
            )


def cast(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def fsdp_modules(module: nn.Module) -> list[tuple[str, "FSDPModule"]]:
    return [(name, each) for name, each in module.named_modules() if isinstance(each, FSDPModule)]


def shardings(module: nn.Module, recurse: bool) -> list[Sharding]:
    return [each._sharding for name, each in fsdp_modules(module) if recurse or not name]
