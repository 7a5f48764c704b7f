"""A simulated accelerator: a device type of its own, "gpu", whose tensors have shapes and no numbers.

PyTorch lets a backend register a device type under the key PrivateUse1.  This backend registers everything that a
strategy uses of an accelerator: a guard, streams, events and one device.  The backend registers no kernels, since its
tensors are fake (host.py).  With a device type of its own, a dry run refuses a tensor on the wrong device, as a GPU
does.

A registered device type stays until the process ends.  Only C++ can register a generator of random numbers, so the
device's generators are the CPU's; no random numbers are drawn from them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils import backend_registration
from torch.utils._device import DeviceContext

from labs.kit.simulated import autocast
from labs.kit.watch.stack_frames import learner_frame, source_line

NAME = "gpu"

error_is_set = ctypes.pythonapi.PyErr_Occurred
error_is_set.restype = ctypes.c_void_p


class Stream:
    """A stream of the simulated device, on which all work is complete at once."""

    stream_id, device_index, device_type = 0, 0, 20  # 20 is PyTorch's number of PrivateUse1

    def __init__(self, device: Any = None, priority: int = 0) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...


class Device(backend_registration._DummyBackendModule):
    """The module `torch.gpu`, which is for the simulated device what torch.cuda is for CUDA."""

    Stream, Event = Stream, Event
    default = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self.default

    default_stream = current_stream

    def stream(self, stream: Stream) -> nullcontext:
        return nullcontext()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...
    def set_device(self, device: Any) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...


class Generator(torch.Generator):
    """A `torch.Generator` that can also be made for the simulated device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class Guard(backend_registration._DummyDeviceGuard):
    """A device guard of the simulated device, which stores an error that a hook of autograd has raised.

    Autograd asks the guard for its type as it leaves a node of the graph, even after a hook of that node has raised an
    error.  Calling Python code while an error is set would end the process.  So the guard stores the error until
    autograd's engine returns.
    """

    raised: BaseException | None = None

    def type_(self) -> Any:
        try:
            error_is_set()  # if an error is set, ctypes raises it
        except BaseException as error:
            Guard.raised = error
        return torch._C._autograd.DeviceType.PrivateUse1


class Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which raises the error that the device guard has kept."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        Guard.raised = None
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # the engine has returned neither a result nor an error
            error, Guard.raised = Guard.raised, None
            if error is None:
                raise
            raise error from None


@functools.cache
def register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, Device(), device_guard=Guard())
    autocast.register(NAME)
    for name in WHOLE_ON_THE_CPU:
        KERNELS.impl(name, not_here, "PrivateUse1")


def not_here(*args: Any) -> Any:
    raise NotImplementedError(f"a tensor of the device {NAME!r} has no memory, so it cannot be used outside of `dry`")


class TooLarge(ValueError):
    """The error of a tensor whose number of bytes does not fit into an integer."""


class ByDefault(DeviceContext):
    """A context in which tensors are created on the simulated device by default."""

    def __torch_function__(self, *call: Any) -> Any:
        try:
            return super().__torch_function__(*call)
        except (RuntimeError, TypeError) as error:
            if "overflow" not in str(error).lower():
                raise
            line = source_line(learner_frame(sys._getframe(1)))
        raise TooLarge(f"{line} asks for a tensor of 2**63 bytes or more, which no device has: make it smaller")


# Without its own kernel of these operators, a device decomposes them into others, whose results take more memory.
WHOLE_ON_THE_CPU = "silu_backward", "mish_backward"
KERNELS = torch.library.Library("aten", "IMPL")


@contextmanager
def pretended() -> Iterator[None]:
    """Create tensors on the simulated device by default, and run backward in this thread."""
    register()
    engine, Variable._execution_engine = Variable._execution_engine, Engine()
    try:
        with (
            ByDefault(torch.device(NAME)),
            torch.autograd.set_multithreading_enabled(False),
            patch.object(torch.accelerator, "synchronize", Device().synchronize),
            patch.object(torch, "Generator", Generator),
        ):
            yield
    finally:
        Variable._execution_engine = engine
