"""Bytes held by one rank over time, by kind, watched from outside.

    with StorageWatch() as watch: train()
    timeline(watch.tape)        # [(nanoseconds, {"P": bytes, "G": bytes, ...}), ...]

A dispatch mode sees every operator of the rank and notes each storage (the block of memory behind one or several
tensors) when it appears and, through a weak reference, when it goes: nothing is kept alive.  What a storage is
*for* is often known only after its birth, so a kind belongs to the whole life of a storage.  The first that fits:

    P          parameters as modules hold them at rest: when they are registered, and whenever the outermost
               forward begins
    G          what the `.grad` of such a parameter holds
    S          what `optimizer.state` holds, counters included; and master copies, that is, parameters of an
               optimizer that no module has
    A          what autograd keeps for the backward, by itself or through a hook (checkpointing, as it recomputes)
    comm       buffers handed to collectives; parameters gathered for a forward (FSDP's full ones), and their gradients
    temporary  the rest

Counted are the bytes that operators of this job ask the allocator for.  Outside stay copies that a kernel or a
backend makes for itself (gloo's), and memory that operators only look at, such as the text of a file.
torch.func.grad does not work while this is on: torch allows it no hooks on what autograd keeps.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

KINDS = ("P", "G", "S", "A", "comm", "temporary")
GATHERED = "gathered"  # comm, whatever else is found out about it
STRENGTH = {kind: strength for strength, kind in enumerate([*reversed(KINDS), GATHERED])}
Tape = dict[str, Any]


class StorageWatch(TorchDispatchMode):
    """Notes births, changes of size and deaths of storages while it is entered; `tape` is small and picklable."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[int, int, int]] = []  # (nanoseconds, number of the storage, bytes more)
        self.kinds: list[str] = []  # by number of storage
        self.sizes: list[int] = []
        self.alive: dict[int, tuple[int, weakref.ref]] = {}  # address of a storage: its number, its death
        self.finders = Finders(self)

    @property
    def tape(self) -> Tape:
        kinds = ["comm" if kind == GATHERED else kind for kind in self.kinds]
        return {"changes": self.changes, "kinds": kinds}

    def __enter__(self) -> StorageWatch:
        self.finders.install()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self.finders.remove()
        self.alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a DTensor: it takes itself apart, and its local operators come by here
        answer = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.tag((args, answer), "comm")
        elif isinstance(answer, torch.Tensor):
            self.see(func, answer)
        elif isinstance(answer, (tuple, list)):
            for tensor in tree_leaves(answer):
                if isinstance(tensor, torch.Tensor):
                    self.see(func, tensor)
        return answer

    def see(self, func: Any, tensor: torch.Tensor) -> None:
        for storage in storages_of(tensor):
            if storage._cdata in self.alive:
                self.resized(storage)
            elif allocates(func):
                self.born(storage)

    def tag(self, values: Any, kind: str) -> None:
        """Every storage under `values` is of this kind, unless a stronger kind is known."""
        for value in tree_leaves(values):
            for storage in storages_of(value):
                number = self.born(storage)
                if STRENGTH[kind] > STRENGTH[self.kinds[number]]:
                    self.kinds[number] = kind

    def kind(self, tensor: torch.Tensor) -> str | None:
        """The strongest kind known of the storages under a tensor; None for one that was never seen."""
        known = [self.alive[s._cdata][0] for s in storages_of(tensor) if s._cdata in self.alive]
        return max((self.kinds[number] for number in known), key=STRENGTH.__getitem__, default=None)

    def born(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key not in self.alive:
            number = len(self.kinds)
            self.kinds.append("temporary")
            self.sizes.append(0)
            self.alive[key] = number, weakref.ref(storage, partial(self.died, key))
            self.change(number, storage.nbytes())
        return self.alive[key][0]

    def resized(self, storage: torch.UntypedStorage) -> None:
        if known := self.alive.get(storage._cdata):
            self.change(known[0], storage.nbytes())

    def died(self, key: int, _: weakref.ref) -> None:
        if key in self.alive:
            self.change(self.alive.pop(key)[0], 0)

    def change(self, number: int, size: int) -> None:
        if delta := size - self.sizes[number]:
            self.sizes[number] = size
            # In one piece: a storage may die in any thread, and whenever the garbage collector runs.
            self.changes.append((time.monotonic_ns(), number, delta))


class Finders:
    """Hooks, each global to the process, by which the kinds are found without a word in the watched code."""

    def __init__(self, watch: StorageWatch) -> None:
        self.watch = watch
        self.hooked = WeakIdKeyDictionary()  # parameter: handle of the hook that meets its gradient
        self.depth = 0  # forwards inside of one another
        self.undo: list[Callable[[], Any]] = []

    def install(self) -> None:
        handles = [
            modules.register_module_parameter_registration_hook(self.registered),
            modules.register_module_forward_pre_hook(self.forward_begins),
            modules.register_module_forward_hook(self.forward_ends, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self.optimizer_steps),
            optimizers.register_optimizer_step_post_hook(self.optimizer_steps),
        ]
        self.undo = [handle.remove for handle in handles]
        self.replace(saved_tensors_hooks, "__enter__", self.enter_saved_tensors_hooks)
        self.replace(torch.UntypedStorage, "resize_", self.resize_)
        nn.Parameter.grad = property(torch.Tensor.grad.__get__, self.assigned, torch.Tensor.grad.__delete__)
        self.undo.append(partial(delattr, nn.Parameter, "grad"))
        torch._C._autograd._push_saved_tensors_default_hooks(self.keeping(keep), lambda kept: kept)
        self.undo.append(torch._C._autograd._pop_saved_tensors_default_hooks)

    def remove(self) -> None:
        for undo in self.undo + [handle.remove for handle in self.hooked.values()]:
            undo()

    def replace(self, cls: type, name: str, method: Callable[..., Any]) -> None:
        original = getattr(cls, name)
        setattr(cls, name, lambda *args: method(original, *args))
        self.undo.append(lambda: setattr(cls, name, original))

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self.at_rest(parameter)

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        if self.depth == 0:
            for parameter in module.parameters():
                self.at_rest(parameter)
        self.depth += 1

    def forward_ends(self, module: nn.Module, args: Any, answer: Any) -> None:
        self.depth -= 1
        for parameter in parameters_behind(module):
            if self.watch.kind(parameter) != "P":
                self.watch.tag(parameter, GATHERED)
                self.meet_gradient(parameter)

    def at_rest(self, parameter: torch.Tensor) -> None:
        if parameter.is_leaf:  # torch.func.functional_call lends a module other tensors
            self.watch.tag(parameter, "P")
            self.meet_gradient(parameter)

    def meet_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and parameter not in self.hooked:
            self.hooked[parameter] = parameter.register_post_accumulate_grad_hook(self.accumulated)

    def accumulated(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self.watch.tag(parameter.grad, "G" if self.watch.kind(parameter) == "P" else "comm")

    def assigned(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(parameter, gradient)
        if gradient is not None and self.watch.kind(parameter) == "P":
            self.watch.tag(gradient, "G")

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if self.watch.kind(parameter) != "P":
                self.watch.tag(parameter, "S" if self.hooked else "P")  # without any module they are no copies
            self.watch.tag(parameter.grad, "G")
        self.watch.tag([list(state.values()) for state in optimizer.state.values()], "S")

    def keeping(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A hook of saved_tensors_hooks whose answer is what the backward keeps."""

        def packed(tensor: torch.Tensor) -> Any:
            answer = pack(tensor)
            self.watch.tag(answer, "A")
            return answer

        packed.__dict__ = getattr(pack, "__dict__", {})  # by its attributes torch's checkpoint knows whose a hook is
        return packed

    def enter_saved_tensors_hooks(self, original: Callable[..., Any], hooks: saved_tensors_hooks) -> None:
        # Only the innermost pair of hooks is called: ours would not see what checkpointing keeps as it recomputes.
        torch._C._autograd._push_saved_tensors_default_hooks(self.keeping(hooks.pack_hook), hooks.unpack_hook)

    def resize_(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        answer = original(storage, size)
        self.watch.resized(storage)
        return answer


def parameters_behind(module: nn.Module) -> Iterator[nn.Parameter]:
    """What a module computes with: its parameters, and those that plain attributes of it are views of."""
    for value in (*module._parameters.values(), *vars(module).values()):
        if isinstance(value, torch.Tensor):
            value = value if value._base is None else value._base
            if isinstance(value, nn.Parameter):
                yield value


def keep(tensor: torch.Tensor) -> torch.Tensor:
    # Without its graph: a node that kept its own output, with it, would never be freed.  A leaf has none, and must
    # stay itself, so that a parameter whose data is exchanged meanwhile is freed as it would be.
    return tensor if tensor.grad_fn is None else tensor.detach()


# PyTorch 2.15 warns of hooks around selective checkpoints, but for its own: for these it asks which were there before.
keep._checkpoint_internal, keep._user_hooks = True, None


def allocates(func: Any) -> bool:
    """Whether an operator's outputs are new memory; torch.tensor() shows its own only as lift_fresh."""
    if func is torch.ops.aten.lift_fresh.default:
        return True
    return not any(output.alias_info for output in func._schema.returns)


def storages_of(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor, however it is wrapped (DTensor, AsyncCollectiveTensor); none for other values."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from storages_of(getattr(value, name))
    elif value.layout == torch.sparse_coo:
        yield from (value._indices().untyped_storage(), value._values().untyped_storage())
    elif value.layout == torch.strided:
        yield value.untyped_storage()


def timeline(tape: Tape) -> list[tuple[int, dict[str, int]]]:
    """(nanoseconds, bytes by kind) after each change, from the birth of the first storage."""
    held = dict.fromkeys(KINDS, 0)
    moments = []
    for moment, storage, delta in tape["changes"]:
        held[tape["kinds"][storage]] += delta
        moments.append((moment, dict(held)))
    return moments
