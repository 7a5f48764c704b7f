"""Hooks that find out whether a tensor's memory holds parameters, gradients, optimizer state or activations.

Each hook is global to the process, so that the watched code needs no line for it.  A hook tags a storage (the block of
memory behind one or several tensors) with its kind:

    parameters     tagged when a module registers a parameter, when the outermost forward begins, and when a lazy
                   parameter gets its memory
    gradients      tagged by a hook on each such parameter, and when the program sets a parameter's `.grad`
    state          tagged before and after an optimizer's step
    activations    tagged by hooks on the tensors that autograd saves; the program's own hooks (activation
                   checkpointing) are wrapped
    gathered       tagged after a forward: parameters that a module computed with, but does not hold between steps

Further hooks report memory that no operator of the watched thread allocates: storages that are resized or copied, and
the memory of other threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.nn.parameter import UninitializedTensorMixin, is_lazy
from torch.optim import optimizer as optimizers

from labs.kit.watch.storage_ledger import GATHERED, Ledger


class Finders:
    """A set of hooks that tag storages with their kind in the body of a with statement.

    ledger: the record of all storages.
    this_thread: function that returns the context manager that each new thread must enter.
    """

    def __init__(self, ledger: Ledger, this_thread: Callable[[Finders], AbstractContextManager[None]]) -> None:
        self.ledger, self.this_thread = ledger, this_thread
        self.pack = self.keeping(keep)
        self.hooked: dict[int, tuple[weakref.ref, Any]] = {}  # id of a parameter: (weak reference, handle of its hook)
        self.forwards = threading.local()  # the depth of nested forwards
        self.undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Finders:
        handles = [
            modules.register_module_parameter_registration_hook(self.registered),
            modules.register_module_forward_pre_hook(self.forward_begins),
            modules.register_module_forward_hook(self.forward_ends, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self.optimizer_steps),
            optimizers.register_optimizer_step_post_hook(self.optimizer_steps),
        ]
        self.undo = [handle.remove for handle in handles]
        self.replace(saved_tensors_hooks, "__enter__", self.enter_saved_tensors_hooks)
        self.replace(graph, "disable_saved_tensors_hooks", self.disable_saved_tensors_hooks)
        self.replace(torch.UntypedStorage, "resize_", self.resize_)
        self.replace(torch.UntypedStorage, "clone", self.clone)
        self.replace(UninitializedTensorMixin, "materialize", self.materialize)
        self.replace(threading.Thread, "start", self.start)
        self.replace(eval_frame, "_callback_from_stance", self.run_compiled)
        self.uncompiled = torch.compiler.set_stance("force_eager")  # set_stance acts at once, not in __enter__
        around = vars(nn.Parameter).get("grad")  # a budget may start a recorder within another
        self.set_gradient = around.fset if around else torch.Tensor.grad.__set__
        nn.Parameter.grad = property(torch.Tensor.grad.__get__, self.assigned, torch.Tensor.grad.__delete__)
        self.undo.append(
            partial(setattr, nn.Parameter, "grad", around) if around else partial(delattr, nn.Parameter, "grad")
        )
        return self

    def __exit__(self, *failure: Any) -> None:
        self.uncompiled.__exit__(None, None, None)
        for undo in self.undo + [handle.remove for _, handle in self.hooked.values()]:
            undo()

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        self.undo.append(lambda: setattr(owner, name, original))

    # ---- parameters, gradients, optimizer state ------------------------------------------------------------

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self.at_rest(parameter)

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        depth = getattr(self.forwards, "depth", 0)
        if depth == 0:
            for parameter in module.parameters():
                self.at_rest(parameter)
        self.forwards.depth = depth + 1

    def forward_ends(self, module: nn.Module, args: Any, answer: Any) -> None:
        self.forwards.depth -= 1
        for parameter in parameters_behind(module):
            if self.ledger.kind(parameter) != "P":
                self.ledger.tag(parameter, GATHERED)
                self.meet_gradient(parameter)

    def at_rest(self, parameter: torch.Tensor) -> None:
        if parameter.is_leaf:  # torch.func.functional_call lends a module other tensors
            self.ledger.tag(parameter, "P")
            if (shard := getattr(parameter, "ds_tensor", None)) is not None:  # DeepSpeed's stage 3
                self.ledger.tag(shard, "P")
            self.meet_gradient(parameter)

    def meet_gradient(self, parameter: nn.Parameter) -> None:
        key = id(parameter)
        # A parameter without memory gets its hook at its first forward.  Before that, torch.utils.swap_tensors may give
        # the parameter memory in place, and swap_tensors refuses a tensor with weak references.
        without_memory = parameter.is_meta or is_lazy(parameter)
        if parameter.requires_grad and key not in self.hooked and not without_memory:
            handle = parameter.register_post_accumulate_grad_hook(self.accumulated)
            self.hooked[key] = weakref.ref(parameter, partial(self.hooked.pop, key)), handle

    def accumulated(self, parameter: nn.Parameter) -> None:
        gradient = torch.Tensor.grad.__get__(parameter)  # a strategy may override `parameter.grad`
        if gradient is not None:
            self.ledger.tag(gradient, "G" if self.ledger.kind(parameter) == "P" else "comm")

    accumulated.only_watches = True  # a strategy that replaces its parameters may drop this hook

    def assigned(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        self.set_gradient(parameter, gradient)
        if gradient is not None and self.ledger.kind(parameter) == "P":
            self.ledger.tag(gradient, "G")

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if self.ledger.kind(parameter) != "P":
                self.ledger.tag(parameter, "S" if self.hooked else "P")  # a master copy, unless there are no modules
            if parameter.grad is not None:
                self.ledger.tag(parameter.grad, "G")
        for state in optimizer.state.values():
            for value in state.values():
                self.ledger.tag(value, "S")

    def materialize(self, original: Callable[..., Any], parameter: Any, *args: Any, **kwargs: Any) -> None:
        original(parameter, *args, **kwargs)
        if isinstance(parameter, nn.Parameter):
            self.at_rest(parameter)

    # ---- activations -------------------------------------------------------------------------------------------

    def keeping(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Wrap a pack hook of saved_tensors_hooks so that the tensor that autograd saves is tagged as an activation."""

        def packed(tensor: torch.Tensor) -> Any:
            answer = pack(tensor)
            self.ledger.tag(answer, "A")
            return answer

        packed.__dict__ = getattr(pack, "__dict__", {})  # torch's checkpoint recognises its own hooks by attributes
        return packed

    def enter_saved_tensors_hooks(self, original: Callable[..., Any], hooks: saved_tensors_hooks) -> None:
        # Autograd calls only the innermost pair of hooks, so the program's pair must tag what it saves, as well.
        torch._C._autograd._push_saved_tensors_default_hooks(self.keeping(hooks.pack_hook), hooks.unpack_hook)

    @contextmanager
    def hooks_on_saved_tensors(self) -> Iterator[None]:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, itself)
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    @contextmanager
    def disable_saved_tensors_hooks(self, original: Callable[..., Any], message: str) -> Iterator[None]:
        """Remove this kit's hooks while torch.func runs, which refuses hooks; the program's own hooks stay."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[0] is not self.pack:
            with original(message):
                yield
            return
        self.ledger.warn("torch.func allows no hooks on saved tensors; within it, activations count as temporary")
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with original(message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, itself)

    # ---- memory that no operator of this thread allocates --------------------------------------------------

    def resize_(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        answer = original(storage, size)
        self.ledger.resized(storage)
        return answer

    def clone(self, original: Callable[..., Any], storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy a storage, as copy.deepcopy of a tensor does, and record the birth of the copy."""
        copy = original(storage)
        if copy.device.type != "meta":
            self.ledger.born(copy)
        return copy

    def start(self, original: Callable[..., Any], thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            with self.this_thread(self):
                run()

        thread.run = watched
        original(thread)

    def run_compiled(self, original: Callable[..., Any], callback: Any) -> Any:
        """Warn when a compiled function is called; without a callback, torch runs it uncompiled anyway."""
        if callback:
            self.ledger.warn("compiled functions run uncompiled, since generated code has no operators to see")
        return original(callback)


def parameters_behind(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module computes with: its registered ones, and those whose views are attributes."""
    for value in (*module._parameters.values(), *vars(module).values()):
        if isinstance(value, torch.Tensor):
            value = value if value._base is None else value._base
            if isinstance(value, nn.Parameter):
                yield value


def keep(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor with a graph is saved without it: a node that saved its own output would hold itself, and would never be
    # freed.  A leaf is saved itself, so that a parameter whose data is replaced is freed as usual.
    return tensor if tensor.grad_fn is None else tensor.detach()


# PyTorch 2.15 warns of hooks around selective activation checkpointing, unless the hooks have the attributes of its own
# hooks: `_checkpoint_internal`, and `_user_hooks` with the hooks that were there before.
keep._checkpoint_internal, keep._user_hooks = True, None


def itself(kept: Any) -> Any:
    return kept
