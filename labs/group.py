"""What a strategy asks of its process group.

all_gather               every rank's equal part, side by side in one vector
reduce_scatter           this rank's part of the sum over all ranks, with the least bytes on any backend
require_equal_replicas   the same parameters on every rank, or an error that names the first that differs
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# PyTorch 2.13 gave both a new name, and warns of the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_scatter(full: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's N-th part of the sum over all ranks' `full`, 1-D.

    gloo's own reduce-scatter is an all-reduce, which sends twice as much.  There each rank sends every other one its
    part, and adds up what it gets in the order of the ranks: all of them, and every run, round alike.
    """
    ranks = dist.get_world_size(group)
    if full.is_cuda and "nccl" in dist.get_backend_config(group):
        part = full.new_empty(full.numel() // ranks)
        reduce_scatter_single(part, full, group=group)
        return part
    parts = torch.empty_like(full)
    dist.all_to_all_single(parts, full, group=group)
    first, *others = parts.chunk(ranks)
    total = first.clone()
    for part in others:
        total += part
    free(parts)
    return total


def free(x: Tensor) -> None:
    # To let go of it is not enough: a thread of the backend may hold it a moment longer.
    x.untyped_storage().resize_(0)


def require_equal_replicas(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Raise ValueError, on every rank, where a parameter is not rank 0's; name the first one and the rank.

    Averaged gradients keep equal replicas equal.  They cannot make them so.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    replicas = [{} for _ in ranks]
    dist.all_gather_object(replicas, {name: fingerprint(p) for name, p in model.named_parameters()}, group)
    for rank, replica in zip(ranks, replicas, strict=True):
        for name in replicas[0] | replica:
            first, other = replicas[0].get(name, "absent"), replica.get(name, "absent")
            if first != other:
                raise ValueError(
                    f"replicas differ from the start: parameter {name!r} is {first} on rank {ranks[0]}, "
                    f"but {other} on rank {rank}; build the same model from the same seed on every rank"
                )


def fingerprint(p: Tensor) -> str:
    """Type, shape, and the sum of the bits weighted by place: any changed or exchanged element changes it."""
    bits = p.detach().flatten().view(INTEGER[p.itemsize]).long()
    checksum = (bits * torch.arange(1, len(bits) + 1, device=p.device)).sum().item()
    return f"{p.dtype} of shape {tuple(p.shape)}, checksum {checksum:x}"


INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
