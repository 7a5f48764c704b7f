"""Hooks that strategies share, which tell when the backward of a layer begins, and when it ends.

differentiable     returns the tensors that may get a gradient, among a layer's inputs or outputs
LayerCall          one forward of a layer, and its backward
require_counted    refuses ignored targets in a rank's part of a batch, unless the loss is told the whole batch's count
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves


def alias(x: Any) -> Any:
    """Return a view of `x`, whose gradient is complete when the gradients of all uses of the view have been added up.

    A value that is no tensor, or requires no gradient, is returned as it is.
    """
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x


def weakly(method: Callable, *arguments: Any) -> Callable[..., None]:
    """Return a function for a hook on a tensor, which calls method(*arguments, ...) through weak references.

    The garbage collector cannot see the objects that a tensor's hook holds, so a strong reference would keep them
    alive.
    """
    owner, others = WeakMethod(method), [ref(argument) for argument in arguments]

    def hook(*more: Any) -> None:
        if (call := owner()) is not None:
            call(*(other() for other in others), *more)

    return hook


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors that require a gradient, in a nest of lists, dicts, dataclasses and other objects."""
    return [x for x in tensors_in(values, set()) if x.requires_grad]


def tensors_in(values: Any, seen: set[int]) -> list[Tensor]:
    """Return all tensors in a nest of values; seen: ids of the objects that contain this nest, so that cycles end."""
    found = []
    for x in tree_leaves(values):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, Mapping):  # pytree takes types that it does not know, as a subclass of dict, for leaves
            found += tensors_in(list(x.values()), seen)
        elif isinstance(x, (list, tuple)):
            found += tensors_in(list(x), seen)
        elif is_dataclass(x) and not isinstance(x, type):
            found += tensors_in([getattr(x, field.name, None) for field in fields(x)], seen)
        elif hasattr(x, "__dict__") and not callable(x) and id(x) not in seen:
            found += tensors_in(list(vars(x).values()), seen | {id(x)})
    return found


class LayerCall:
    """One forward of a layer, and its backward.

    given: the layer's input tensors.
    uses: aliases of the layer's parameters, through which the layer uses them.
    before_backward: a function to call when the gradient of one of the layer's outputs is computed.
    after_backward: a function to call when the backward of this forward has computed all gradients of `given` and
        `uses` that it will compute; an unused mask, for example, gets none.
    """

    def __init__(self, given: list[Tensor], uses: list[Tensor], before_backward: Callable, after_backward: Callable):
        self.given = [(x, x._version) for x in given]
        self.before_backward = before_backward
        self.expect = when_all_have_gradients([*given, *uses], after_backward)

    def takes(self, given: list[Tensor]) -> None:
        """Record the inputs of another call that belongs to this forward."""
        self.given += [(x, x._version) for x in given]

    def ends(self, found: list[Tensor]) -> bool:
        """Watch the backward of the forward's outputs; return whether the forward has any.

        found: the tensors among the forward's inputs and outputs; an input that was changed in place is an output.
        """
        before_backward, expect = self.before_backward, self.expect  # a hook that knew `given` would keep it alive

        def gradient_there(gradient: Tensor) -> None:
            before_backward()
            expect()

        made = [x for x in found if not any(x is y and x._version == version for y, version in self.given)]
        for x in made:
            x.register_hook(gradient_there)
        return bool(made)


def require_inside(output: Any, memory: Mapping[int, str]) -> None:
    """Raise RuntimeError if `output` has a view of a parameter that is dropped as the forward ends.

    memory: `{storage: name of the parameter in it}`.
    """
    for x in tensors_in(output, set()):
        if type(x) is Tensor and (name := memory.get(x.untyped_storage()._cdata)):
            raise RuntimeError(
                f"a forward returns its parameter {name!r}, or a view of it, which is dropped as the forward ends: "
                "return a copy, parameter.clone()"
            )


def when_all_have_gradients(tensors: list[Tensor], then: Callable[[], None]) -> Callable[[], None]:
    """Let a backward call `then` as soon as it has computed all gradients of these tensors that it will compute.

    Return a function that counts these gradients: call it in each backward, before the first of them is computed.
    """
    nodes = [get_gradient_edge(x).node for x in tensors]
    due, counted = 0, None

    def expect() -> None:
        nonlocal due, counted
        if counted != (backward := torch._C._current_graph_task_id()):
            due, counted = sum(map(torch._C._will_engine_execute_node, nodes)), backward

    # torch.autograd.graph.register_multi_grad_hook would keep all of these gradients until the last one is there.
    def one_more(gradient: Tensor) -> None:  # a hook that referred to a tensor or node would keep it alive
        nonlocal due
        due -= 1
        if due == 0:
            then()

    for x in tensors:
        x.register_hook(one_more)
    return expect


def at_the_very_end_of_backward(then: Callable[[], None]) -> None:
    """Call `then` after all other callbacks at the end of backward, in which labs.fsdp finishes its gradients."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(then))


@torch.compiler.disable
def require_counted(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError, before a forward, if a rank's part of a batch has targets of -100 and no `over` is passed."""
    several = torch.is_grad_enabled() and dist.is_initialized() and dist.get_world_size() > 1
    for x in tensors_in((args, kwargs), set()) if several and kwargs.get("over") is None else ():
        if x.dtype is torch.int64 and not x.is_meta:
            none_is_ignored = (x != -100).all()
            if x.device.type != "cpu":
                torch._assert_async(none_is_ignored, IGNORED)
            elif not none_is_ignored:
                raise ValueError(IGNORED)


IGNORED = (
    "a target is -100, which a loss ignores, and ranks may ignore different numbers of them: the mean of their means "
    "is not the batch's mean; give model(x, y, over=n), which divides the sum of the losses (labs.model.CrossEntropy): "
    "n is the number of targets that count in the whole batch, divided by the number of its parts"
)


def require_dense(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(f"{name!r} makes sparse gradients, which are not averaged here: give it sparse=False")
