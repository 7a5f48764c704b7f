"""The tensors of a dry run: small tensors on the host have numbers; all others are fake, with a shape and no numbers.

    on the device                    a fake tensor: a shape, a dtype, and a storage with a size but no memory
    on the host                      a real tensor; a fake one if it is large, as a model's initial values are
    from the device to the host      a `Read`: the host would wait until the device has finished all queued work

In a dry run, a copy of a tensor from the device to the host returns a fake tensor.  An operation that needs numbers,
such as `.item()`, `if tensor` or a shape that depends on values, raises NeedsNumbers, which names the line.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from labs.group import all_gather, reduce_scatter_single
from labs.kit.simulated.device import NAME
from labs.kit.simulated.fake_shapes import Fakes
from labs.kit.watch.stack_frames import LABS, TORCH, is_machinery, learner_frame, source_line
from labs.kit.watch.storages import takes_itself_apart


def is_set_to(x: Tensor, y: Tensor) -> bool:
    memories = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return memories and (x.storage_offset(), x.shape, x.stride()) == (y.storage_offset(), y.shape, y.stride())


def swapped(x: Tensor, y: Tensor) -> None:
    """Swap two tensors as torch.utils.swap_tensors does for Module.to(), but allow a fake tensor's weak references."""
    with patch.object(weakref, "getweakrefs", lambda _: []):
        swap_tensors(x, y)


swap_tensors, composed_attention = torch.utils.swap_tensors, F.scaled_dot_product_attention


def under_way(name: str) -> dict[str, Any]:
    return {"group": torch._C._distributed_c10d._resolve_process_group(name), "async_op": True}


def reduced(out: Tensor, x: Tensor, reduction: str, name: str) -> dist.Work:
    return dist.all_reduce(out, **under_way(name))


def gathered(out: Tensor, x: Tensor, ranks: int, name: str) -> dist.Work:
    return all_gather(out, x, **under_way(name))


def scattered(out: Tensor, x: Tensor, reduction: str, ranks: int, name: str) -> dist.Work:
    return reduce_scatter_single(out, x, **under_way(name))


def exchanged(out: Tensor, x: Tensor, taken: list[int], sent: list[int], name: str) -> dist.Work:
    return dist.all_to_all_single(out, x, taken, sent, **under_way(name))


FUNCTIONAL = torch.ops._c10d_functional
# PyTorch's fake kernels of functional collectives call no c10d operator, which a recording would see; these kernels do.
ISSUED = {
    FUNCTIONAL.all_reduce.default: reduced,
    FUNCTIONAL.all_gather_into_tensor.default: gathered,
    FUNCTIONAL.reduce_scatter_tensor.default: scattered,
    FUNCTIONAL.all_to_all_single.default: exchanged,
}
ANSWERED = {  # operators whose results need no kernel
    torch.ops.prim.device.default: lambda x: x.fake_device if isinstance(x, FakeTensor) else x.device,
    torch.ops.aten.is_set_to.default: is_set_to,
}
if hasattr(FUNCTIONAL, "_wrap_tensor_autograd"):  # not in PyTorch 2.10
    ANSWERED[FUNCTIONAL._wrap_tensor_autograd.default] = AsyncCollectiveTensor
LARGE = 2**20  # a tensor on the host is fake, too, if it has so many elements or more
PIPELINES = os.path.join(LABS, "pp", ""), os.path.join(TORCH, "distributed", "pipelining", "")
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class NeedsNumbers(RuntimeError):
    """The error of code that reads a number of a tensor in a dry run, whose tensors have no numbers."""


@dataclass(frozen=True)
class Read:
    """A point at which the host would wait for the device: the reason, and the line of code that causes the wait."""

    what: str
    line: str


class Pretend(TorchDispatchMode):
    """A dispatch mode that fakes operations on the device, and lets the host compute operations on host tensors.

    reads: all points at which the host would wait for the device, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes, self.reads = Fakes(), []
        self.works: dict[int, dist.Work] = {}  # {storage of an output: functional collective in flight}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, so no guard around each operator is needed

    @contextmanager
    def on_this_host(self) -> Iterator[Pretend]:
        def shown(x: FakeTensor, **options: Any) -> str:
            self.reads.append(Read("a tensor that is printed", line()))
            return Tensor.__repr__(x, **options)

        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor() first creates a tensor on the host
        try:
            with (
                patch.object(FakeTensor, "__repr__", shown),
                patch.object(torch.utils, "swap_tensors", swapped),
                # Optimizers update the parameters one by one, as on a CPU.
                patch.object(optimizer, "_get_foreach_kernels_supported_devices", list),
                patch.object(F, "scaled_dot_product_attention", attention),
                self,
            ):
                yield self
        finally:
            torch._C._set_only_lift_cpu_tensors(before)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(takes_itself_apart, types)):
            return NotImplemented
        if func in ANSWERED:
            return ANSWERED[func](*args)
        if func is FUNCTIONAL.wait_tensor.default:
            return self.waited(*args)
        # DTensor runs operators on fake tensors of its own mode to learn the shapes of results.
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) or not is_fake(args, kwargs):
            return func(*args, **kwargs)
        if func in COPIES and leaves_the_device(func, args, kwargs):
            self.reads.append(Read("a copy to the host", line()))
        try:
            answer = self.fakes.answer(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise NeedsNumbers(refusal(sys._getframe(1))) from None
        if func in ISSUED:
            self.works[answer.untyped_storage()._cdata] = ISSUED[func](answer, *args)
        return answer

    def waited(self, x: Tensor) -> Tensor:
        if work := self.works.pop(x.untyped_storage()._cdata, None):
            work.wait()
        return x


def is_fake(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for x in (*args, *kwargs.values()):
        if isinstance(x, FakeTensor) or (isinstance(x, torch.device) and x.type == NAME):
            return True
        if isinstance(x, (list, tuple)) and (is_large(x) or any(isinstance(each, FakeTensor) for each in x)):
            return True
    return False


def is_large(sizes: Sequence[Any]) -> bool:
    """Return whether a host tensor of these sizes is so large that a dry run fakes it."""
    return all(isinstance(size, int) for size in sizes) and prod(sizes) >= LARGE


def leaves_the_device(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("non_blocking"):
        return False
    if func is torch.ops.aten.copy_.default:
        to, source = args[0].device, args[1].device
        return to.type == "cpu" and source.type == NAME and not (len(args) > 2 and args[2])
    return args[0].device.type == NAME and torch.device(kwargs.get("device") or NAME).type == "cpu"


def line() -> str:
    return source_line(learner_frame(sys._getframe(2)))


def refusal(frame: FrameType | None) -> str:
    asked = source_line(learner_frame(frame))
    while frame is not None and not frame.f_code.co_filename.startswith(PIPELINES):
        frame = frame.f_back
    if frame is None:
        return (
            f"{asked} asks for numbers, which a dry run does not have, and for which the host would wait for a GPU: "
            "leave it out of the function"
        )
    while frame is not None and (is_machinery(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(LABS)):
        frame = frame.f_back
    return (
        f"{source_line(frame)} asks its neighbours in the pipeline what they will send, and in a dry run nobody "
        "answers: run it within labs.kit.dry.neighbours(torch.empty(2, 64, 128, device='meta')), with the shape of the "
        "messages between stages"
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the CPU's kernel, as the job does for which the dry run stands in."""
    if dropout_p or attn_mask is not None or q.device.type != NAME:
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return composed_attention(q, k, v, **options, scale=scale, enable_gqa=enable_gqa)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, is_causal=is_causal, scale=scale)[0]
