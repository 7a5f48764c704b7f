"""Checks of a model and an optimizer: `labs.zero` must be able to lay the parameters into vectors.

Each function of this file refuses one kind of mistake:

require_trainable      a model that Zero cannot train
require_elementwise    an optimizer whose update of an element needs other elements
require_order          an optimizer that takes other parameters than the shards, or in another order
guard                  a step of the optimizer that zero.step() did not start
require_all_sharded    in each step, a parameter that was added after the model was sharded
refuse_parts           at any time, freezing a part of a layer
"""

from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from labs import optimizer_probe
from labs.hooks import require_dense

ANEW = "load zero.full_state_dict() into a new model, and shard that"
NO_HOOKS = "its gradient is a part of a vector's, so change the gradients of zero.shards, after zero.sync()"
NOT_ELEMENTWISE = ("adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap")
# Attributes of a partial, and of the wrappers in labs.memory.precision and labs.memory.offload.
INSIDE = ("func", "inner", "optimizer")
BY_LAYERS = (
    "a shard is a part of a layer's vector, weights and biases in one, so that they cannot be told apart by name or "
    "ndim; give them layers of their own, or use labs.fsdp"
)


def require_trainable(model: nn.Module, stage: int, initial: Any) -> None:
    if stage not in (1, 2, 3):
        raise ValueError(f"stage {stage}: ZeRO has the stages 1, 2 and 3")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no trainable parameters: there is nothing to shard")
    require_dense(model)
    for name, p in model.named_parameters():
        if is_hooked(p):
            raise ValueError(f"parameter {name!r} has a hook, which would not be called: {NO_HOOKS}")
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta and initial is None:
        raise ValueError(f"parameter {meta[0]!r} is on the meta device: say with initial= which numbers it starts from")


def is_hooked(p: nn.Parameter) -> bool:
    """Return whether `p` has a hook on its gradient, besides hooks that only watch, such as the memory recorder's."""
    after = (p._post_accumulate_grad_hooks or {}).values()
    return bool(p._backward_hooks) or not all(hasattr(hook, "only_watches") for hook in after)


def require_elementwise(optimizer: Any) -> None:
    """Raise ValueError for an optimizer, or one inside of it, whose update of an element depends on other elements.

    An optimizer's class is judged by its name; an optimizer that has parameters is tried out on small ones.
    """
    if isinstance(optimizer, type) and any(name in optimizer.__name__.lower() for name in NOT_ELEMENTWISE):
        raise ValueError(
            f"{optimizer.__name__} looks at matrices or norms, and a shard is a part of a vector: "
            "give Zero an optimizer that treats each element by itself, as SGD and AdamW do"
        )
    if not isinstance(optimizer, type):
        for inside in ("__class__", *INSIDE):
            if hasattr(optimizer, inside):
                require_elementwise(getattr(optimizer, inside))
    if isinstance(optimizer, torch.optim.Optimizer) and all(group["params"] for group in optimizer.param_groups):
        optimizer_probe.require_elementwise(optimizer, "Give Zero an optimizer like SGD or AdamW", shape=(2, 4))


def require_order(optimizer: Any, shards: list[nn.Parameter], fulls: list[nn.Parameter]) -> None:
    place = {id(shard): index for index, shard in enumerate(shards)}
    given = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if not {*map(id, fulls)}.isdisjoint(given):
        raise ValueError("the optimizer was made of the model's parameters: make it of the shards that it is given")
    if not all(group["params"] for group in optimizer.param_groups):
        raise ValueError(f"the optimizer has a group without parameters: {BY_LAYERS}")
    # Masters, which replace the shards in the groups of `labs.memory.precision`, have no place here.
    taken = [place[p] for p in given if p in place]
    if taken != sorted(taken):
        raise ValueError("the optimizer takes the shards in another order than they were given: use one group")


def guard(optimizer: Any, zero: ref) -> None:
    """Refuse optimizer.step() outside of zero.step(), and let optimizer.zero_grad() do what zero.zero_grad() does."""

    def require_own_step(*_: Any) -> None:
        if not zero().stepping:
            raise RuntimeError(
                "zero.optimizer.step() would change this rank's shards alone: call zero.step(). A GradScaler cannot, "
                "and looks for overflows on one rank alone: scale the loss with labs.memory.precision.LossScale"
            )

    optimizer.zero_grad = lambda set_to_none=True: zero().zero_grad()
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.register_step_pre_hook(require_own_step)
        optimizer._step_supports_amp_scaling = True  # otherwise a GradScaler may skip step() on some ranks


def require_all_sharded(model: nn.Module, known: set[nn.Parameter]) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad and p not in known:
            raise RuntimeError(f"parameter {name!r} was added after the model was sharded, and is not averaged: {ANEW}")


def refuse_parts(layer: nn.Module) -> None:
    """Refuse requires_grad_() of modules inside of a layer: their parameters lie in the layer's vector."""
    for name, module in layer.named_modules():
        if module is not layer and not any(True for _ in module.parameters()):
            module.requires_grad_ = partial(refuse_alone, name)


def refuse_alone(name: str, requires_grad: bool = True) -> None:
    raise RuntimeError(
        f"{name!r} lies in one vector with the others of its layer: freeze the layer, or this one before sharding"
    )
