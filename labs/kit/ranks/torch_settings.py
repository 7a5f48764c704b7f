"""Settings of PyTorch that change results: the ranks copy the caller's settings.

    copied from the caller                a rank's own
    default dtype                         default device: see run(device=)
    deterministic algorithms              random numbers: seed them in the function
    precision of matmuls, cuDNN's choice  number of threads: 1
    gradients on or off, autocast         settings that PyTorch cannot read back (set_flush_denormal)
    anomaly detection                     settings of other libraries

Under torchrun, each rank is its own caller, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

FLAGS = {  # attributes of torch.backends
    "cudnn": ("benchmark", "deterministic"),
    "mkldnn": ("enabled",),
    "cuda.matmul": ("fp32_precision",),
    "mkldnn.matmul": ("fp32_precision",),
}


def each() -> Iterator[tuple[str, Callable[[], Any], Callable[..., Any]]]:
    """Yield (name, getter, setter) of each setting of PyTorch that is copied; the setter takes the getter's result."""
    yield "dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "deterministic", deterministic, lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1])
    yield "matmul", matmul_precision, torch.set_float32_matmul_precision
    for place, flags in FLAGS.items():
        backend = torch.backends
        for part in place.split("."):
            backend = getattr(backend, part)
        for flag in flags:
            yield f"{place}.{flag}", partial(getattr, backend, flag), partial(setattr, backend, flag)
    yield "gradients", torch.is_grad_enabled, torch.set_grad_enabled
    for kind in ("cpu", "cuda"):
        yield f"autocast on {kind}", partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield f"autocast to, {kind}", partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    yield "anomaly", anomaly, lambda on: torch.autograd.set_detect_anomaly(*on)


def deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the precision was set by the newer flags of torch.backends
        return None


def anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def settings() -> dict[str, Any]:
    """Return the settings of PyTorch that the ranks copy, as {name: value}.

    Raises ValueError if PyTorch's default device is not the CPU.
    """
    if (device := torch.get_default_device()).type != "cpu":
        raise ValueError(
            f"PyTorch's default device is {str(device)!r} here, by set_default_device or a with statement, but each "
            "rank has a device of its own: call torch.set_default_device('cpu') before run(), and choose a device in "
            "the function, or by run(..., device=)"
        )
    return {name: get() for name, get, _ in each()}


def apply(wanted: dict[str, Any]) -> None:
    """Set each setting of PyTorch whose value in this process differs from its value in `wanted`."""
    for name, get, put in each():
        if wanted.get(name) is not None and get() != wanted[name]:
            put(wanted[name])
