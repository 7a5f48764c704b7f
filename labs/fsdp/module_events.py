"""Events of a training step, for one group of sharded parameters.

The events are those of `labs.zero`.  Their actions differ as FSDP2 differs from FSDP1, whose flat vectors `zero` has:

                        labs.zero, stage 3                  labs.fsdp
    a shard is          a part of a layer's vector          a DTensor under the parameter's own name, Shard(0)
    so the optimizer    treats a whole layer alike          may treat each parameter in its own way
    padding             once per layer                      once per parameter, and a copy out of what was gathered
    frozen, trained     a vector each, so a gather each     one gather; each forward checks which are trained
    state dict          zero.full_state_dict()              model.state_dict()
    before_forward      gather                              wait for the gather, and start the next layer's
    after_forward       drop                                drop or keep, according to reshard_after_forward
    before_backward     gather                              wait for the gather, and start that of the layer before
    after_backward      drop                                drop
    gradient_ready      reduce, and wait                    wait for the layer after, then start to reduce
    backward ends       -                                   reduce the rest, and gradients of earlier micro-batches
    not used            its gradient counts as zero         no gradient, unless another rank has one
    the model itself    a layer like the others             stays gathered from forward to backward
    over two axes       -                                   sharded along the last, replicated along the first (HSDP)

To follow one parameter through a step, read the events in this file, then step_state, parameter_group and
sharded_parameter: each calls the next one, and none calls back.

A reentrant checkpoint runs a backward inside of a backward.  "backward ends" is the end of the outermost one.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from labs.fsdp.parameter_group import ParameterGroup
from labs.fsdp.step_state import SharedState, in_backward
from labs.fsdp.what_can_be_sharded import is_sharded, require_all_sharded
from labs.hooks import LayerCall, alias, differentiable, require_counted, require_inside, weakly
from labs.unaveraged import require_all_averaged


class Sharding:
    """A group of modules in a training step, with a method for each event.

    A turn begins as the first of the group's modules is called, and ends when all of them have run.  Calls within calls
    belong to the same turn.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        group: ParameterGroup,
        reshard: bool | int | None,
        ignored: set[nn.Parameter],
    ):
        self.modules, self.group, self.policy = modules, group, group.policy
        self.reshard_after_forward, self.ignored = reshard, ignored
        self.shared: SharedState | None = None
        self.call: LayerCall | None = None
        self.depth, self.to_run = 0, set()  # running calls; modules that have yet to run in this turn
        self.leads_back = False  # whether an output of this turn requires a gradient
        self.place = 0  # its index in the order of layers in the last forward
        self.due, self.counted = 0, None  # gradients yet to come in a backward; the id of that backward
        for module in modules:
            # The hook runs before those that the user registered, which may compute a weight from the parameters.
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)

    # ---- the events of a training step -------------------------------------------------------------------

    @torch.compiler.disable
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.depth == 1 and module not in self.to_run:
            self.begin_turn(module)
        if self.is_root:
            require_counted(module, args, kwargs)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast(self.policy.param_dtype, (args, kwargs))
        args, kwargs = tuple(map(alias, args)), {key: alias(value) for key, value in kwargs.items()}
        if torch.is_grad_enabled():
            given = differentiable([args, kwargs])
            if self.call:
                self.call.takes(given)
            else:
                begins = partial(weakly(self.before_backward), self.group.shard_versions(), self.place)
                self.call = LayerCall(given, self.group.uses(), begins, weakly(self.after_backward))
        return args, kwargs

    @torch.compiler.disable
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End the module's call; the hook runs when its output is computed, or its forward has failed."""
        self.depth -= 1
        self.to_run.discard(module)
        self.group.require_unwritten()
        if output is not None:
            require_inside(output, {p.whole.untyped_storage()._cdata: p.name for p in self.group.parameters})
        output = cast(self.policy.output_dtype, output)
        if self.call:
            self.leads_back |= self.call.ends(differentiable([output, args, kwargs]))
        if not self.running:
            self.end_turn()
            if self.leads_back and not in_backward():
                self.shared.order.leading.append(self.group)
            if self.is_root and not in_backward():
                self.end_forward(module, failed=output is None)
        return output

    def before_backward(self, versions: tuple[int, ...], place: int) -> None:
        """Gather the parameters, and prefetch those of the layer before, as the gradient of the output is computed.

        versions: the shards' versions in forward.  place: the place of that forward in the order of layers.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True goes through fully_shard, which drops the parameters that a second "
                "one would read: compute a gradient penalty in one process, or with labs.ddp"
            )
        if versions != self.group.shard_versions():
            raise RuntimeError("backward() of a loss from before step(): the parameters of its forward are gone")
        self.shared.backward_begins()
        self.shared.order.back.append(self.group)
        self.expect()
        self.group.unshard()
        earlier = self.shared.order.before(place)
        prefetch(earlier if self.group.next_in_backward is None else self.group.next_in_backward)

    def after_backward(self) -> None:
        """Drop the parameters once the gradients of the module's parameters and inputs are computed."""
        self.group.drop_after_backward()
        self.reduce_early()

    def gradient_ready(self, full: nn.Parameter) -> None:
        """Reduce the group's gradients if this one, whose uses have all been added up, was the last."""
        self.shared.backward_begins()
        self.shared.order.waiting[self.group] = None
        self.due -= self.counted == torch._C._current_graph_task_id()
        self.reduce_early()

    # ---- their steps --------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.depth > 0 or bool(self.to_run)

    def begin_turn(self, module: nn.Module) -> None:
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("fully_shard within torch.func.grad or vmap, which see no gather: use backward()")
        self.to_run = {module} if in_backward() else set(self.modules)  # a recomputation may run only one of them
        self.leads_back, self.call = False, None
        self.settle_model()
        if in_backward():  # a recomputation
            self.shared.backward_begins()
        else:
            self.place = self.shared.forward_begins(self.group)
        self.group.in_use = True
        self.group.require_unchanged()
        if not in_backward() and self.group.follow():
            self.train()
        self.group.unshard()
        following = [] if in_backward() else self.shared.order.after()
        prefetch(following if self.group.next_in_forward is None else self.group.next_in_forward)

    def end_turn(self) -> None:
        """Put the shards back, and drop the full parameters, or keep them, according to reshard_after_forward."""
        self.to_run, self.call, self.group.in_use = set(), None, False
        if in_backward():  # backward needs them at once
            return
        self.group.hide()
        self.group.idle = not torch.is_grad_enabled()
        if self.reshards:
            if self.group.smaller and self.group.gathered and torch.is_grad_enabled():
                self.group.keep()
            self.group.drop()

    def end_forward(self, root: nn.Module, failed: bool) -> None:
        """End the forward of the model, whose outermost module is `root`."""
        shardings = shardings_in(*self.modules)
        for other in shardings:
            if other.running:  # not all modules of its list were called
                other.end_turn()
            if other.group.arriving:  # a prefetch in vain
                other.group.drop()
        if not failed:
            self.shared.forward_ends()
            require_all_sharded(root, set().union(*(each.ignored for each in shardings)))

    def unshard(self) -> None:
        self.settle_model()
        self.group.unshard()

    def wait(self) -> None:
        """Wait for the all-gather that unshard(async_op=True) started, unless the module has waited for it itself."""
        if self.group.arriving:
            self.unshard()

    @property
    def is_root(self) -> bool:
        return self.shared is not None and self.shared.root is self.group

    @property
    def reshards(self) -> bool:
        reshard = self.reshard_after_forward
        return self.shared and not self.is_root if reshard is None else bool(reshard)

    def expect(self) -> None:
        """Count the gradients that this backward will compute."""
        if self.counted != (backward := torch._C._current_graph_task_id()):
            self.due, self.counted = self.group.gradients_due(), backward
        if self.group.trained and (self.due or self.shared.brings_gradients()):
            self.shared.order.waiting[self.group] = None  # even if this rank computes none: another rank may

    def reduce_early(self) -> None:
        """Reduce once all gradients of this backward are computed; groups that lack some are reduced when it ends.

        Every rank reaches this point at the same place in its order of layers, whichever parameters it uses.  Autograd
        runs the newest nodes first, and a module creates the nodes of its parameters as its forward begins.  So these
        nodes run after all other nodes of the module, and before those of all earlier modules.
        """
        if self.due == 0:
            self.shared.reduce(self.group)

    # ---- before the first forward --------------------------------------------------------------------------

    def settle_model(self) -> None:
        """Create the state that all modules share: the outermost module is the one whose forward begins first."""
        if self.shared is None:
            shardings = shardings_in(*self.modules)
            with torch.inference_mode(False):  # tensors made in inference mode could never be trained
                for sharding in shardings:
                    sharding.settle()
            shared = SharedState(self.group, {each.group: name for each, name in shardings.items()})
            shards = {p.shard for group in shared.groups for p in group.parameters}
            axes = [group for group in (self.group.group, self.group.replicas) if group]
            require_all_averaged(shared, shards.__contains__, axes)
            shared.require_same_prefetch()
            for sharding in shardings:
                sharding.shared = shared
                sharding.train()

    def settle(self) -> None:
        if self.shared is None:
            for p in self.group.parameters:
                p.settle()

    def train(self) -> None:
        for p in self.group.parameters:
            p.train(weakly(self.gradient_ready))


def shardings_in(*modules: nn.Module) -> dict[Sharding, str]:
    return {each._sharding: name for module in modules for name, each in module.named_modules() if is_sharded(each)}


def prefetch(groups: Iterable[ParameterGroup]) -> None:
    with torch.inference_mode(False):
        for group in groups:
            group.gather()


def cast(dtype: torch.dtype | None, values: Any) -> Any:
    """Return the values with all floating-point tensors in lists, dicts and dataclasses converted to `dtype`."""
    return values if dtype is None else tree_map(partial(cast_one, dtype), values)


def cast_one(dtype: torch.dtype, x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{field.name: cast(dtype, getattr(x, field.name)) for field in fields(x) if field.init})
    return x
