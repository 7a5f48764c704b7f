"""DistributedDataParallel: a copy of the model on every rank; and its optimizer's state dealt out."""

import warnings
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def ddp(model: nn.Module, group: ProcessGroup | None = None, find_unused: bool = False) -> nn.Module:
    """`labs.ddp.Overlapped`: a copy on every rank, gradients averaged in buckets during backward.

    The first bucket is closed at 1 MiB, the others at 25 MiB; they are filled in the order in which gradients
    came in the first step. Rank 0's parameters and buffers are copied to all instead of being compared.
    """
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=find_unused)


def zero1(
    model: nn.Module, optimizer: type[Optimizer], group: ProcessGroup | None = None, **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """`labs.zero.Zero`, stage 1, after a fashion: DDP's gradients, and each parameter stepped by one rank.

    Parameters are dealt out whole, so the shards are only about equal. DDP has all-reduced the gradients, though
    each rank needs a part of them; after the step each rank broadcasts the parameters it has stepped.
    """
    with warnings.catch_warnings():  # importing this uses torch.jit.script, about which PyTorch itself warns
        warnings.simplefilter("ignore", DeprecationWarning)
        # Not at the head of the file: every rank of every job would wait 0.3 s for it.
        from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    return ddp(model, group), ZeroRedundancyOptimizer(trained, optimizer, process_group=group, **settings)
