"""Matrix products that take longer, so that what overlaps with them can be seen in a timeline.

paced([whole, in_chunks], (x, up, down, mesh), times=12, seconds=80e-6)   run each function 12 times, as steps
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from labs.kit.record import mark

PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class Slower(TorchFunctionMode):
    """A mode in which each product of [B, T, D] takes `seconds` longer for each of its T tokens."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            time.sleep(self.seconds * result.shape[1])
        return result


def paced(ways: Iterable[Callable[..., Tensor]], inputs: Sequence[Any], times: int, seconds: float) -> list[Tensor]:
    """Run each of several functions `times` times on a rank, as recorded steps that begin together on all ranks.

    seconds: how much longer a matrix product takes per token.
    Returns the last result of each function.
    """
    results = []
    for way in ways:
        for _ in range(times):
            time.sleep(0.05)  # a gap in the timeline
            dist.barrier()
            mark("step")
            with Slower(seconds):
                result = way(*inputs)
            mark("end")
        results.append(result)
    return results
