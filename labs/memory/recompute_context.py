"""The state that a second run of a function needs in order to repeat the first one.

Stash           holds a call's arguments until backward, as tensors that autograd has saved
Surroundings    holds default device, random numbers, autocast and buffers, as the first run found them
norms           sums up a run's output in a few numbers, which show if the second run gave another output
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Buffers = list[tuple[dict[str, Any], str, Tensor, Tensor]]  # a buffer's dict and name, the buffer, its numbers


class SaveForBackward(torch.autograd.Function):
    """A node of autograd's graph that computes nothing, and only lets autograd save tensors for backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:  # forward mode saves nothing
        return torch.zeros(0)


class Stash:
    """A nested value, such as a call's arguments, that is held until backward.

    Autograd saves the tensors in the value, so saved_tensors_hooks around the call apply to them: a checkpoint within a
    checkpoint holds nothing until the outer one is recomputed.  If a saved tensor is changed in place before backward,
    backward raises an error.
    """

    def __init__(self, values: Any) -> None:
        leaves, self.structure = tree_flatten(values)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.indices = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        self.anchor = SaveForBackward.apply(anchor, *(leaves[n] for n in self.indices))

    def take_out(self) -> Any:
        leaves = list(self.others)
        for n, tensor in zip(self.indices, self.anchor.grad_fn.saved_tensors, strict=True):
            leaves[n] = tensor
        return tree_unflatten(leaves, self.structure)


class Surroundings:
    """A record of the default device, random numbers, autocast and buffers, as they are now.

    Random numbers and autocast are recorded for the CPU and for the tensors' devices, which takes about 5 KB.  The
    recorded buffers are those of modules among the values, and of modules that `fn` is, belongs to, or refers to by
    name.
    """

    def __init__(self, fn: Any, *values: Any) -> None:
        devices = {x.device for x in tree_leaves(values) if isinstance(x, Tensor)}
        devices -= {torch.device("cpu"), torch.device("meta")}
        self.default = torch.get_default_device()
        self.cpu_random = torch.get_rng_state()
        self.random = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}
        cache = torch.is_autocast_cache_enabled()
        self.autocasts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache)
            for kind in {"cpu", *(device.type for device in devices)}
        ]
        self.buffers = as_now((m._buffers, name) for m in modules_in(fn, *values) for name in m._buffers)

    def forget_what_stayed(self) -> None:
        self.buffers = [each for each in self.buffers if each[0][each[1]] is not each[2] or not each[2].equal(each[3])]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng(list(self.random)), torch.enable_grad(), ExitStack() as stack:
            torch.set_rng_state(self.cpu_random)
            for device, state in self.random.items():
                torch.get_device_module(device).set_rng_state(state, device)
            for autocast in self.autocasts:
                stack.enter_context(autocast)
            if self.default != torch.get_default_device():
                stack.enter_context(self.default)
            stack.callback(put_back, as_now(each[:2] for each in self.buffers))
            put_back(self.buffers)
            yield


def modules_in(fn: Any, *values: Any) -> list[nn.Module]:
    if isinstance(fn, partial):
        return modules_in(fn.func, fn.args, fn.keywords, *values)
    named = inspect.getclosurevars(fn)[:2] if inspect.isfunction(fn) else ()
    found = tree_leaves((fn, getattr(fn, "__self__", None), named, values))
    return list(dict.fromkeys(m for each in found if isinstance(each, nn.Module) for m in each.modules()))


def as_now(places: Iterable[tuple[dict[str, Any], str]]) -> Buffers:
    found = [(of, name, of[name]) for of, name in places]
    return [(of, name, b, b.detach().clone()) for of, name, b in found if type(b) is Tensor and not b.is_meta]


def put_back(buffers: Buffers) -> None:
    for of, name, b, numbers in buffers:
        of[name] = b
        b.data.copy_(numbers)  # without a new version, which would make a backward fail


def norms(output: Any) -> list[float]:
    """Return the norm of each output on the CPU; the host would have to wait for the norm of an output on a GPU."""
    given = [x.detach() for x in tree_leaves(output) if type(x) is Tensor and x.is_cpu and x.is_floating_point()]
    return [x.norm().item() for x in given if x.dtype.itemsize > 1]
