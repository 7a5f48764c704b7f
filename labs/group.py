"""Collectives that strategies call, for any backend.

    all_gather             gathers every rank's part, all of one size, side by side into one vector
    broadcast              copies the first rank's numbers to all ranks, also between strided views
    send_buffers           copies the first rank's buffers (running statistics) into every rank's model
    reduce_scatter         returns this rank's part of the sum over all ranks, with the least bytes on any backend
    start_reduce_scatter   starts a reduce-scatter, which is in flight while the rank computes
    divisor_before         returns the part of a mean's divisor that is applied before the sum; above 1 for float16 only
    meeting_place          returns the device on which ranks compare values of the host without waiting for a GPU

Neither this file nor the backend checks that the ranks pass tensors that belong together: `labs.agree` compares tensors
    between ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# PyTorch 2.13 gave both functions a new name, and warns about the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# The dtypes that gloo can send; tensors of other dtypes are sent as bytes.
SENT = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}


def broadcast(x: Tensor, group: ProcessGroup | None) -> None:
    """Copy the `x` of the group's first rank into every rank's `x`.

    A backend sends a range of memory.  If `x` is a view, its numbers may lie in memory in another order, or with others
    between them; if `x` is expanded, it has more elements than memory.  So a contiguous copy of `x` is sent.
    """
    numbers = x.resolve_conj().resolve_neg().contiguous()
    sent = numbers if numbers.dtype in SENT else numbers.flatten().view(torch.uint8)
    dist.broadcast(sent, group=group, group_src=0)
    if numbers is not x:
        once = tuple(slice(None) if step else slice(1) for step in x.stride())
        # Writing would raise the version of `x`, and a backward that saved it would fail: write only what differs.
        if not torch.equal(x[once], numbers[once]):
            x[once].copy_(numbers[once])


def send_buffers(model: nn.Module, group: ProcessGroup | None) -> None:
    """Overwrite the model's buffers by the first rank's, except DTensors, which agree on all ranks already."""
    for buffer in model.buffers():
        if not (buffer.is_meta or buffer.is_sparse or hasattr(buffer, "to_local")):
            broadcast(buffer, group)


def reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's part of the sum of all ranks' vectors `full`: one N-th of it, 1-D."""
    return start_reduce_scatter(full, group)()


def start_reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Callable[[], Tensor]:
    """Start a reduce-scatter, and return a function that waits for it and returns this rank's part.

    `full` must not change before the returned function has returned.

    gloo's own reduce-scatter makes a copy of `full` and all-reduces that, which sends twice as many bytes.  On gloo,
    therefore, each rank sends every other rank its part, and adds up the parts that it receives in the order of the
    ranks, so that every run rounds alike.  The received parts take as much memory as gloo's copy would.
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
        total = sum_parts(parts, ranks)
        free(parts)
        return total

    return total


def divisor_before(dtype: torch.dtype, divisor: float) -> int:
    """Return the part of a divisor by which numbers of this dtype are divided before their sum; the sum gets the rest.

    In float16 a sum may exceed 65504, the largest number, although the mean does not.  A number that is divided before
    the sum may fall below 6e-8, the smallest number, and become 0.  So float16 numbers are divided by about the square
    root of the divisor before the sum, a power of two; PyTorch's FSDP2 does the same.  float32 and bfloat16 have enough
    range to need no such split.
    """
    before = 1
    while dtype == torch.float16 and divisor % before == 0 and divisor / before > before:
        before *= 2
    return before


def sum_parts(parts: Tensor, ranks: int) -> Tensor:
    first, *others = parts.chunk(ranks)
    total = first.clone()
    for part in others:
        total += part
    return total


def free(x: Tensor) -> None:
    # Dropping the reference is not enough: a thread of the backend may hold one for a moment longer.
    x.untyped_storage().resize_(0)


def meeting_place(group: ProcessGroup | None, device: torch.device) -> torch.device:
    """Return the CPU if the group has a backend for it (gloo, alone or beside NCCL), and otherwise `device`."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device
