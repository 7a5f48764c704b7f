"""An accelerator that only pretends: a device type of its own, "gpu", whose tensors have shapes and no numbers.

PyTorch lets a backend register a device type under the key PrivateUse1.  This one registers what a strategy asks of an
accelerator (a guard, streams, events, one device) and no kernel at all: its tensors are fake ones (host.py).

So a tensor made on the wrong device is refused, as on a GPU.  A device type is there until the process ends.  A
generator of random numbers, which only C++ can register, is one of the CPU: nobody draws from it.
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

from labs.kit.dry import autocast
from labs.kit.watch.frames import learner_frame, source_line

NAME = "gpu"

error_is_set = ctypes.pythonapi.PyErr_Occurred
error_is_set.restype = ctypes.c_void_p


class Stream:
    """What is queued on it is done at once: nobody ever waits."""

    stream_id, device_index, device_type = 0, 0, 20  # as PyTorch numbers PrivateUse1

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
    """`torch.gpu`."""

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
    """`torch.Generator`, on this device, too."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class Guard(backend_registration._DummyDeviceGuard):
    """Autograd asks it for its type as it leaves a node, also where a hook there has raised.

    Python code cannot be called while an error is on its way: the process would end.  So the error is kept here until
    the engine has come back.
    """

    raised: BaseException | None = None

    def type_(self) -> Any:
        try:
            error_is_set()  # ctypes raises what is on its way
        except BaseException as error:
            Guard.raised = error
        return torch._C._autograd.DeviceType.PrivateUse1


class Engine(torch._C._ImperativeEngine):
    """Autograd's, which raises what was kept."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        Guard.raised = None
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # it returned nothing, and no error
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
    raise NotImplementedError(f"a tensor of the device {NAME!r} has no numbers outside of a dry run")


class TooLarge(ValueError):
    """A tensor was asked for whose bytes do not fit into an integer."""


class ByDefault(DeviceContext):
    """Tensors are made on this device where none is named."""

    def __torch_function__(self, *call: Any) -> Any:
        try:
            return super().__torch_function__(*call)
        except (RuntimeError, TypeError) as error:
            if "overflow" not in str(error).lower():
                raise
            line = source_line(learner_frame(sys._getframe(1)))
        raise TooLarge(f"{line} asks for a tensor of 2**63 bytes or more, which no device has: make it smaller")


# A device without a kernel of its own for these would take them apart, and need room for the parts.
WHOLE_ON_THE_CPU = "silu_backward", "mish_backward"
KERNELS = torch.library.Library("aten", "IMPL")


@contextmanager
def pretended() -> Iterator[None]:
    """Inside, tensors are made on the pretended device by default, and a backward runs in this thread."""
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
