"""The events of a training step: what each sharded module does there, and what all of a model's do together.

The events are those of `labs.zero`; what they do differs where FSDP2 differs from FSDP1, whose vectors `zero` has:

                        labs.zero, stage 3                  labs.fsdp
    a shard is          a part of a layer's vector          a DTensor under the parameter's own name, Shard(0)
    so the optimizer    treats a whole layer alike          may treat each parameter in its own way
    padding             once per layer                      once per parameter, and a copy out of what was gathered
    frozen, trained     a vector each, so a gather each     one gather; and each forward asks which is which
    state dict          zero.full_state_dict()              model.state_dict()
    before_forward      gather                              wait for it, and start the next layer's
    after_forward       drop                                drop; or keep, as reshard_after_forward says
    before_backward     gather                              wait for it, and start that of the layer before it
    after_backward      drop                                drop
    gradient_ready      reduce, and wait                    start to reduce, when that of the layer after it is done
    backward ends       -                                   reduce what still waits, of earlier micro-batches, too
    not used            its gradient counts as zero         no gradient, unless another rank has one
    the model itself    a layer like the others             stays gathered from forward to backward
    over two axes       -                                   sharded along the last, replicated along the first (HSDP)

Checkpoints may be reentrant, and run a backward inside of a backward: the outermost one's end is meant.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from labs.autograd import Call, alias, differentiable, require_inside, weakly
from labs.fsdp.order import LayerOrder
from labs.fsdp.parameter_group import ParameterGroup, Reduction
from labs.fsdp.shardable import is_sharded


class Sharding:
    """One module's part in a training step: a method for each event."""

    def __init__(
        self, module: nn.Module, group: ParameterGroup, reshard: bool | int | None, smaller: ProcessGroup | None
    ):
        self.module, self.group, self.smaller, self.policy = module, group, smaller, group.policy
        self.reshard_after_forward, self.reshard_after_backward, self.sync = reshard, True, True
        self.next_in_forward: list[Sharding] | None = None
        self.next_in_backward: list[Sharding] | None = None
        self.shared: SharedState | None = None
        self.call: Call | None = None
        self.running = False  # its forward
        self.place = 0  # of its last forward among the others
        self.due, self.counted = 0, None  # gradients that a backward still brings, and which one
        # Before the hooks that are there already, which may compute a weight from the parameters.
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)

    def settle(self, shared: "SharedState") -> None:
        self.shared = shared
        self.train()

    def train(self) -> None:
        for p in self.group.parameters:
            p.train(weakly(self.gradient_ready))

    def settled(self) -> None:
        """The outermost module is the one whose forward begins first."""
        if self.shared is None:
            names = shardings_in(self.module)
            with torch.inference_mode(False):  # what is made in it could never be trained
                for p in chain(*(sharding.group.parameters for sharding in names if sharding.shared is None)):
                    p.settle()
            shared = SharedState(self, names)
            for sharding in names:
                sharding.settle(shared)

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
        self.shared.forward_begins(self)
        self.group.require_current()
        if not in_backward() and self.group.follow():
            self.train()
        uses = self.unshard()
        self.prefetch(self.shared.after() if self.next_in_forward is None else self.next_in_forward)
        if self.policy.cast_forward_inputs and self.policy.param_dtype:
            args, kwargs = tree_map(partial(cast, self.policy.param_dtype), (args, kwargs))
        args, kwargs = tuple(map(alias, args)), {key: alias(value) for key, value in kwargs.items()}
        if torch.is_grad_enabled():
            given = differentiable([args, kwargs])
            begins = partial(weakly(self.before_backward), self.group.shard_versions(), self.place)
            self.call = Call(given, uses, begins, weakly(self.after_backward))
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
        if self.shared:
            if self.shared.root is self and output is not None:
                require_all_sharded(module)
            self.shared.forward_ends(self, leads_back, failed=output is None)
        return output

    @property
    def reshards(self) -> bool:
        reshard = self.reshard_after_forward
        return self.shared and self.shared.root is not self if reshard is None else bool(reshard)

    def before_backward(self, versions: tuple[int, ...], place: int) -> None:
        """Called when the gradient of the module's output is there; versions (of shards) and place as in forward."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True goes through fully_shard, which drops the parameters that a second "
                "one would read: compute a gradient penalty in one process, or with labs.ddp"
            )
        if versions != self.group.shard_versions():
            raise RuntimeError("backward() of a loss from before step(): the parameters of its forward are gone")
        self.shared.backward_begins()
        self.shared.order.back.append(self)
        self.expect()
        self.unshard()
        self.prefetch(self.shared.order.before(place) if self.next_in_backward is None else self.next_in_backward)

    def expect(self) -> None:
        """Count the gradients that this backward will bring."""
        if self.counted != (backward := torch._C._current_graph_task_id()):
            self.due, self.counted = self.gradients_due(), backward
        if self.group.trained and (self.due or self.shared.brings_gradients()):
            self.shared.order.waiting[self] = None  # where this rank has none, too: another may have some

    def gradients_due(self) -> int:
        nodes = [get_gradient_edge(p.full).node for p in self.group.parameters if p.full.requires_grad]
        return sum(map(torch._C._will_engine_execute_node, nodes))

    def after_backward(self) -> None:
        """Called when the gradients of the module's parameters and inputs are there."""
        if self.reshard_after_backward and not self.running:
            self.group.drop()
        self.reduce_early()

    def gradient_ready(self, full: nn.Parameter) -> None:
        """Called when all uses of one parameter have been added up."""
        self.shared.backward_begins()
        self.shared.order.waiting[self] = None
        self.due -= self.counted == torch._C._current_graph_task_id()
        self.reduce_early()

    def reduce_early(self) -> None:
        """Where all that is due has come; else at the end of the backward.

        That is the same moment on all ranks, whichever parameters they use.  Autograd goes first through what was made
        last, and what stands for the parameters is made as the module begins: all that it did comes before, and all
        that was done before it comes after.
        """
        if self.due == 0:
            self.shared.reduce(self)

    def prefetch(self, others: Sequence["Sharding"]) -> None:
        with torch.inference_mode(False):
            for other in others:
                other.group.gather(other.smaller)


class SharedState:
    """What the modules of one model have in common: the order of their layers, and what is in flight because of it.

    PyTorch calls it FSDPStateContext, and what is in flight FSDPCommContext.
    """

    def __init__(self, root: Sharding, names: dict[Sharding, str]):
        self.root, self.members, self.order = root, list(names), LayerOrder(names)
        self.in_backward = False
        self.reducing: Reduction | None = None
        self.averaging: list[Reduction] = []
        self.asked: tuple[int, bool] = (-1, False)

    def forward_begins(self, member: Sharding) -> None:
        if in_backward():  # a recomputation
            self.backward_begins()
            return
        if member is self.root:
            if self.in_backward:
                self.give_up()
            self.order.begin()
        member.place = self.order.append(member)

    def after(self) -> list[Sharding]:
        return [] if in_backward() else self.order.after()

    def forward_ends(self, member: Sharding, leads_back: bool, failed: bool) -> None:
        if in_backward():
            return
        if leads_back:
            self.order.leading.append(member)
        if member is self.root:
            for other in self.members:
                if other.group.arriving:  # sent for in vain
                    other.group.drop()
            if not failed:
                self.require_same("ranks use different layers", self.order.now)
                self.require_same("ranks can go back through different layers", self.order.leading)

    def backward_begins(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.backward_ends)

    def brings_gradients(self) -> bool:
        """Whether this backward brings any parameter a gradient: one that is asked for inputs' gradients does not."""
        backward = torch._C._current_graph_task_id()
        if self.asked[0] != backward:
            self.asked = backward, any(member.gradients_due() for member in self.members)
        return self.asked[1]

    def reduce(self, member: Sharding) -> None:
        """One reduction at a time is on its way, so that no more than one layer's gradients wait."""
        if not member.sync:
            member.group.accumulate()
        elif member in self.order.waiting:
            del self.order.waiting[member]
            self.finish()
            self.reducing = Reduction(member.group)

    def finish(self) -> None:
        if self.reducing:
            self.reducing.average_replicas()
            self.averaging.append(self.reducing)
            self.reducing = None

    def backward_ends(self) -> None:
        for member in reversed([*self.order.waiting]):
            self.reduce(member)
        self.finish()
        for reduction in self.averaging:
            reduction.finish()
        for member in self.members:
            if member.reshard_after_backward and not member.running:
                member.group.drop()
        self.in_backward, self.averaging = False, []
        self.require_same("ranks go back through different layers", self.order.end())

    def give_up(self) -> None:
        """The last backward has failed: what it left must not be taken for this one's."""
        self.finish()
        self.in_backward, self.averaging = False, []
        self.order.end()
        self.order.waiting.clear()
        for member in self.members:
            member.group.forget()

    def require_same(self, what: str, order: list[Sharding]) -> None:
        """Raise RuntimeError, on every rank, where they differ in what they used; asked when a new order is used.

        Nothing fails by itself where layers of equal size meet in a collective: one's numbers become the other's.
        """
        if names := self.order.news(what, order):
            self.root.group.require_same(
                names,
                f"{what}: {{}}; what meets in one collective must belong to one layer, so use the same layers on all "
                "ranks, in the same order",
            )
            self.order.agreed[what] = order


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shardings_in(module: nn.Module) -> dict[Sharding, str]:
    return {each._sharding: name for name, each in module.named_modules() if is_sharded(each)}


def require_all_sharded(root: nn.Module) -> None:
    for name, p in root.named_parameters():
        if p.requires_grad and not hasattr(p, "to_local"):
            raise RuntimeError(
                f"parameter {name!r} was added after the model was sharded, and is not averaged: add it before "
                "fully_shard, or fully_shard its module before the first forward, too"
            )


def cast(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
