"""What the caller has set in PyTorch that changes numbers: its ranks compute under the same settings.

    travels                               a rank's own
    default dtype                         default device: see run(device=)
    deterministic algorithms              random numbers: seed them in the function
    precision of matmuls, cuDNN's choice  number of threads: 1
    gradients on or off, autocast         what PyTorch cannot say (set_flush_denormal)
    anomaly detection                     what other libraries have set

Under torchrun the ranks are the caller, and have all of its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

FLAGS = {  # of torch.backends
    "cudnn": ("benchmark", "deterministic"),
    "mkldnn": ("enabled",),
    "cuda.matmul": ("fp32_precision",),
    "mkldnn.matmul": ("fp32_precision",),
}


def each() -> Iterator[tuple[str, Callable[[], Any], Callable[..., Any]]]:
    """Yield the name of each setting that travels, what returns it, and what sets it to what was returned."""
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
    except RuntimeError:  # set in the newer way, by the flags
        return None


def anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def settings() -> dict[str, Any]:
    """Return the settings that travel, by name. Raises ValueError where tensors are made on another device than the
    CPU."""
    if (device := torch.get_default_device()).type != "cpu":
        raise ValueError(
            f"tensors are made on {str(device)!r} by default here (set_default_device, or a with), and each rank has a "
            "device of its own: call torch.set_default_device('cpu') before run(), and choose one in the function, or "
            "by run(..., device=)"
        )
    return {name: get() for name, get, _ in each()}


def apply(wanted: dict[str, Any]) -> None:
    """Set here what is different in `wanted`."""
    for name, get, put in each():
        if wanted.get(name) is not None and get() != wanted[name]:
            put(wanted[name])
