"""The same verbs as PyTorch ships them: what you write at work.

ours                              PyTorch's
ddp.Overlapped(model); .sync()    ddp(model); nothing to call: the end of backward waits
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


def ddp(model: nn.Module, group: ProcessGroup | None = None, find_unused: bool = False) -> nn.Module:
    """`labs.ddp.Overlapped`: a copy on every rank, gradients averaged in buckets during backward.

    The first bucket is closed at 1 MiB, the others at 25 MiB; they are filled in the order in which gradients
    came in the first step. Rank 0's parameters and buffers are copied to all instead of being compared.
    """
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=find_unused)
