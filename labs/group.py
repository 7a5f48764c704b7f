"""What a strategy asks of its process group.

    all_gather             every rank's equal part, side by side in one vector
    broadcast              the first rank's numbers, wherever in its memory they lie
    reduce_scatter         this rank's part of the sum over all ranks, with the least bytes on any backend
    start_reduce_scatter   the same, while the rank computes
    divisor_before         how much of a mean's division comes before the sum: more than 1 for float16 alone
    meeting_place          where ranks compare what the host knows, without waiting for the device

That all ranks bring what belongs together is not checked here, nor by the backend: `labs.agree` compares.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# PyTorch 2.13 gave both a new name, and warns about the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def broadcast(x: Tensor, group: ProcessGroup | None) -> None:
    """Every rank's `x` becomes that of the group's first.

    A backend sends memory.  Where `x` is a view, that may be in another order, with others' numbers in between, or, if
    it was expanded, less than `x` has.
    """
    numbers = x.contiguous()
    dist.broadcast(numbers, group=group, group_src=0)
    if numbers is not x:
        once = tuple(slice(None) if step else slice(1) for step in x.stride())
        if not torch.equal(
            x[once], numbers[once]
        ):  # a backward may still need it, and would see that it was written to
            x[once].copy_(numbers[once])


def reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's N-th part of the sum over all ranks' `full`, 1-D."""
    return start_reduce_scatter(full, group)()


def start_reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Callable[[], Tensor]:
    """The same, in flight: what is returned waits for this rank's part. Until then `full` must stay as it is.

    gloo's own reduce-scatter is an all-reduce of a copy that it makes, and sends twice as much.  There each rank sends
    every other one its part, and adds up what it gets in the order of the ranks: all of them, and every run, round
    alike.  What it gets is as large as that copy.
    """
    ranks = dist.get_world_size(group)
    if full.is_cuda and "nccl" in dist.get_backend_config(group):
        part = full.new_empty(full.numel() // ranks)
        work = reduce_scatter_single(part, full, group=group, async_op=True)

        def arrived() -> Tensor:
            work.wait()
            return part

        return arrived
    parts = torch.empty_like(full)
    work = dist.all_to_all_single(parts, full, group=group, async_op=True)

    def total() -> Tensor:
        work.wait()
        total = added_up(parts, ranks)
        free(parts)
        return total

    return total


def divisor_before(dtype: torch.dtype, divisor: float) -> int:
    """Return by how much to divide numbers of this dtype before they are added up; the sum is divided by the rest.

    A sum of float16 may pass 65504, its largest number, where the mean does not.  What is divided before may pass below
    6e-8, its smallest, and becomes 0.  So about the square root of the divisor goes before, a power of two; PyTorch's
    FSDP2 does the same.  float32 and bfloat16 have range enough.
    """
    before = 1
    while dtype == torch.float16 and divisor % before == 0 and divisor / before > before:
        before *= 2
    return before


def added_up(parts: Tensor, ranks: int) -> Tensor:
    first, *others = parts.chunk(ranks)
    total = first.clone()
    for part in others:
        total += part
    return total


def free(x: Tensor) -> None:
    # Letting go of it is not enough: a thread of the backend may hold it a moment longer.
    x.untyped_storage().resize_(0)


def meeting_place(group: ProcessGroup | None, device: torch.device) -> torch.device:
    """The CPU, where the group has a backend for it (gloo, alone or beside NCCL); else their device."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
