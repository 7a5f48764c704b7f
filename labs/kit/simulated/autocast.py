"""torch.autocast on the simulated device: the operations that compute in bfloat16, and those that compute in float32.

PyTorch has such lists of operations in C++, for each of its own devices, but none for a new device.  The lists in this
file have the operations of the course's models, as PyTorch's lists for CUDA do.

Source: the autocast op reference, docs.pytorch.org/docs/stable/amp.html.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

SHORT = "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"
LONG = "layer_norm", "rms_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss", "exp", "rsqrt"
KEY = torch._C.DispatchKey.AutocastPrivateUse1
RULES = torch.library.Library("aten", "IMPL")
ALL_OTHERS = torch.library.Library("_", "IMPL")


def register(device: str) -> None:
    ALL_OTHERS.fallback(torch.library.fallthrough_kernel, KEY.name)
    for name in SHORT:
        RULES.impl(name, casting(name, partial(torch.get_autocast_dtype, device)), KEY.name)
    for name in LONG:
        RULES.impl(name, casting(name, lambda: torch.float32), KEY.name)


def casting(name: str, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
    op, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, op), overload or "default")

    def cast(x: Any) -> Any:
        return x.to(dtype()) if isinstance(x, Tensor) and x.is_floating_point() else x

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel
