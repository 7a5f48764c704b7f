"""ZeRO: data parallelism without the spare copies.

Under data parallelism each of N ranks holds all parameters P, all gradients G and all optimizer state S.  ZeRO cuts
them into N shards, each stage one more kind, and adds a collective before a rank needs a part that it does not hold.  A
stage is a column of this table; an event is a line of it, and a method of `Zero`:

                        stage 1                 stage 2                 stage 3
    at rest             P    G    S/N           P    G/N  S/N           P/N  G/N  S/N
    before_forward      -                       -                       all_gather P
    after_forward       -                       -                       drop P
    before_backward     -                       -                       all_gather P
    after_backward      -                       -                       drop P
    gradient_ready      -                       reduce_scatter G        reduce_scatter G
    sync                reduce_scatter G        -                       -
    step                update, all_gather P    update, all_gather P    update

The first five events happen to one layer at a time, so that a rank holds sharded parameters and gradients in full for
one layer only. Stages 1 and 2 send the bytes of an all-reduce, which is a reduce-scatter and an all-gather; stage 3
sends P once more. Stages 2 and 3 have no room to add up full gradients, so they reduce the gradients of each
micro-batch; stage 1 reduces once per step.  Source: Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7.

    zero = Zero(model, stage=2, optimizer=partial(AdamW, lr=1e-3))      # in the optimizer's place
    model(x, y).backward()
    zero.sync()                                                         # needed only to clip the shards' gradients
    zero.step()

The parameters of a layer lie in one vector, `full`, padded to a multiple of N; its N-th part is this rank's `shard`.
The modules' own parameters are views of `full`.  Reduced gradients are in the `.grad` of `zero.shards`.

- The optimizer must treat each element by itself, and all elements of a layer alike, as SGD and AdamW do.  Muon and
  LAMB look at matrices and norms, so they are refused.  A learning rate scheduler takes `zero.optimizer`.
- `labs.clip` clips gradients.  `nn.utils.clip_grad_norm_` would use another norm on every rank, which the ranks notice
  one step later (`labs.zero.scale_check`).
- Whole layers can be frozen or unfrozen later; single parameters cannot.
- Buffers, such as running statistics, take the first rank's values at the start and at the end of each `step()`.
- If a layer is used, but one of its parameters is not, the gradient of that parameter counts as zero, and the
  parameter is updated, too.
- `labs.checkpoint` saves a Zero.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.agree import Order, Some, require_equal_replicas
from labs.group import send_buffers
from labs.hooks import LayerCall, alias, differentiable, require_counted, require_inside, weakly
from labs.optimizer_probe import shapeless
from labs.zero.flat import FlatLayer, Unit
from labs.zero.flattenable import (
    BY_LAYERS,
    guard,
    refuse_parts,
    require_all_sharded,
    require_elementwise,
    require_order,
    require_trainable,
)
from labs.zero.hidden_gradients import own_gradient
from labs.zero.layers import in_layers, take_out
from labs.zero.scale_check import Scaled, remembered


class Zero:
    """Sharded training of `model` over the ranks of `group`, used in place of its optimizer.

    model: the module to train; it is changed.
    stage: the stage of ZeRO: 1, 2 or 3.
    optimizer: a function from a list of 1-D parameters, this rank's `shards`, to their optimizer.
    layers: the modules whose parameters are gathered together; by default the model's children, with containers
        opened, and the model itself for the rest.
    group: the ranks that shard; all ranks by default.
    initial: a function (name, shape) -> the initial numbers of a parameter that is on the meta device.  `initial` is
        called for one layer at a time, so that under stage 3 no rank ever holds the whole model.

    Raises ValueError for another stage, a model without trainable parameters, layers that miss some parameters, an
    optimizer that takes the shards in another order, and, without `initial`, replicas that do not start equal.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        optimizer: Callable[[list[nn.Parameter]], Any],
        layers: Iterable[nn.Module] | None = None,
        group: ProcessGroup | None = None,
        initial: Callable[[str, torch.Size], Tensor] | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"Zero takes a model, and not a {type(model).__name__}: Zero(model, stage, optimizer)")
        homes_in = in_layers(model, layers)
        require_trainable(model, stage, initial)
        require_elementwise(optimizer)
        if initial is None:
            require_equal_replicas(model, group)
        send_buffers(model, group)
        self.model, self.stage, self.keys, self.updates = model, stage, keys(model), 0
        self.reduced: list[Some | None] = []  # some numbers of each shard's gradient after sync()
        self.layers, unit_of, self.order = [], {}, Order(group)
        for module, homes in homes_in.items():
            for number, named in enumerate(take_out(homes, but=unit_of)):
                unit = Unit(named, stage, group, initial)
                unit_of |= dict.fromkeys(named, unit)
                unit.stand_in(module, f"flat{number}")
            self.layers.append(FlatLayer(module, homes, unit_of, self.order))
            refuse_parts(module)
        self.units = list(dict.fromkeys(unit_of.values()))
        self.trained = [unit for unit in self.units if unit.full.requires_grad]
        self.shards = [unit.shard for unit in self.trained]
        with shapeless(self.shards, BY_LAYERS):
            self.optimizer = optimizer(self.shards)
        require_elementwise(self.optimizer)
        require_order(self.optimizer, self.shards, [unit.full for unit in self.trained])
        self.refresh(self.units)  # an optimizer that resumes an earlier training has changed the shards
        self.register_hooks()

    def register_hooks(self) -> None:
        self.stepping = False
        guard(self.optimizer, ref(self))
        # The compiler breaks its graphs at these hooks: parameters that are gathered and dropped stay out of them.
        before_forward, after_forward = map(torch.compiler.disable, (self.before_forward, self.after_forward))
        for layer in self.layers:
            # The hook runs before those that the user registered, which may compute a weight from the parameters.
            layer.module.register_forward_pre_hook(partial(before_forward, layer), prepend=True, with_kwargs=True)
            if self.stage == 3:
                layer.module.register_forward_hook(partial(after_forward, layer), with_kwargs=True, always_call=True)
        self.model.register_load_state_dict_pre_hook(self.before_load)
        self.model.register_forward_pre_hook(require_counted, with_kwargs=True)
        after_model = self.after_evaluation if self.stage == 3 else self.after_model
        self.model.register_forward_hook(torch.compiler.disable(after_model), with_kwargs=True)
        for unit in self.trained:
            unit.full.register_post_accumulate_grad_hook(weakly(self.gradient_ready, unit))

    # ---- the events of a training step -------------------------------------------------------------------

    def before_forward(self, layer: "FlatLayer", module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or module._compiled_call_impl:
            raise RuntimeError(f"{type(module).__name__}.compile() would compile Zero's hooks, too: compile its parts")
        if self.stage < 3:
            for unit in layer.homes:
                unit.require_as_sharded()
            if torch.is_grad_enabled():  # backward runs the newest nodes first: new views let it reach layers in order
                layer.show()
            return args, kwargs
        layer.gather("forward")
        args, kwargs = tuple(map(alias, args)), {key: alias(value) for key, value in kwargs.items()}
        if torch.is_grad_enabled():
            begins = partial(weakly(self.before_backward, layer), self.updates)
            layer.call = LayerCall(
                differentiable([args, kwargs]), layer.show(), begins, weakly(self.after_backward, layer)
            )
        return args, kwargs

    def after_forward(self, layer: "FlatLayer", module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Drop the layer; the hook is called when the layer's output is computed, or its forward has failed."""
        require_inside(output, {unit.full.untyped_storage()._cdata: unit.name for unit in layer.homes})
        layer.drop("forward")
        if layer.call:
            # The arguments count, too: the layer may have added its output to a list among them.
            layer.call.ends(differentiable([output, args, kwargs]))
            layer.call = None

    def after_model(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Let backward check, under stages 1 and 2, that no step() came after this forward of the model."""
        given = set(map(id, differentiable([args, kwargs])))  # inputs outlive the step, and hooks on them would, too
        for x in differentiable(output):
            if id(x) not in given:
                x.register_hook(partial(weakly(self.require_fresh), self.updates))

    def after_evaluation(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Compare the order of layers between ranks after a forward in evaluation; in training, `sync` compares it."""
        if not torch.is_grad_enabled():
            self.order.compare(self.shards[0].device)

    def before_backward(self, layer: "FlatLayer", updates: int) -> None:
        """Gather the layer, when the gradient of its output is computed; updates: `self.updates` in its forward."""
        self.require_fresh(updates)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: stage 3 has dropped parameters for a second backward: use stage 1 or 2"
            )
        layer.gather("backward")

    def after_backward(self, layer: "FlatLayer") -> None:
        """Drop the layer, when the gradients of its parameters and inputs are computed; otherwise `step` drops it."""
        layer.drop("forward", "backward")

    def gradient_ready(self, unit: "Unit", full: nn.Parameter) -> None:
        """Reduce a unit's gradient, when all uses of its parameters have been added up in `full.grad`."""
        if self.stage > 1 and own_gradient(full) is not None:  # the unit may have been frozen since the forward
            self.order.add(f"reduces the gradient of {unit.name!r}")
            unit.reduce()

    def require_fresh(self, updates: int, *gradient: Tensor) -> None:
        """Raise RuntimeError if a step() came between this backward and its forward; updates: `self.updates` then."""
        if updates != self.updates:
            raise RuntimeError(
                "backward() of a loss from before step(): the parameters of its forward are gone, so run it again"
            )

    def sync(self) -> None:
        """Make every shard's gradient the mean over the ranks; `step()` does so for gradients not reduced yet."""
        self.reduce()
        self.reduced = self.reduced or remembered(self.shards)

    def reduce(self) -> None:
        for unit in self.trained:
            unit.require_no_gradient_at_rest()
        due = [unit for unit in self.trained if own_gradient(unit.full) is not None]
        for unit in due:
            self.order.add(f"reduces the gradient of {unit.name!r}")
        require_all_sharded(self.model, {unit.at_rest for unit in self.units})
        self.order.compare(self.shards[0].device)
        for unit in due:
            unit.reduce()

    def step(self, closure: None = None) -> None:
        """Update the shards, and under stages 1 and 2 gather them into every rank's parameters.

        Raises RuntimeError if no shard has a gradient, and TypeError for a closure.
        """
        if closure is not None:
            raise TypeError("step(closure): run the closure, and backward(), before step(), which takes none here")
        scaled = Scaled.since(self.reduced, self.shards) if self.reduced else Scaled()
        self.reduce()
        self.order.add(scaled)
        if all(shard.grad is None for shard in self.shards):
            raise RuntimeError("step() found no gradient: each step() needs a backward() before it, and uses it up")
        self.stepping = True
        try:
            self.optimizer.step()
        finally:
            self.stepping = False
        self.zero_grad()
        self.refresh(self.trained)
        send_buffers(self.model, self.order.group)

    def refresh(self, units: list[Unit]) -> None:
        """Gather the changed shards of `units` into all ranks' parameters, and refuse backwards of earlier forwards."""
        self.updates += 1
        works = []
        for unit in units:
            unit.renew()
            if self.stage == 3:
                unit.drop()
            else:
                works.append(unit.gather(async_op=True))
        for work in works:
            work.wait()
        if self.stage < 3:
            for layer in self.layers:  # a user may read a parameter before its layer's forward
                layer.show()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Zero has no {name}: the optimizer is zero.optimizer, the model zero.model (labs.checkpoint saves both), "
            "and a loss is scaled with labs.memory.precision.LossScale"
        )

    def zero_grad(self) -> None:
        for unit in self.trained:
            unit.forget()
        self.reduced = []

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's `state_dict()`, as before sharding, on every rank; all ranks must call this."""
        full = dict(self.model.named_buffers(remove_duplicate=False))
        for unit in self.units:
            full |= unit.whole(unit.shard.data)
        return {key: full[name] for key, name in self.keys.items()}

    def before_load(self, model: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        if any(f"{prefix}{name}" in state for unit in self.units for name in unit.layout.shapes):
            raise RuntimeError(
                "load_state_dict() of a model whose parameters lie in vectors: load it before Zero shards it, or load "
                "what labs.checkpoint has saved"
            )


def keys(model: nn.Module) -> dict[str, str]:
    """Return `{key of model.state_dict(): name of the parameter or buffer}`; a tied parameter has several keys."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {key: first.get(id(value), key) for key, value in model.state_dict(keep_vars=True).items()}
