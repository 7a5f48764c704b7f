"""PyTorch's DistributedDataParallel, alone and with an optimizer whose state is sharded (ZeRO, stage 1)."""

import warnings
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def ddp(model: nn.Module, group: ProcessGroup | None = None, find_unused: bool = False) -> nn.Module:
    """Wrap a model so that backward averages its gradients in buckets, as `labs.ddp.Overlapped` does.

    The first bucket is closed at 1 MiB, the others at 25 MiB; buckets are filled in the order in which gradients
    arrived in the first step. Rank 0's parameters and buffers are copied to all ranks, rather than compared.
    """
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=find_unused)


def zero1(
    model: nn.Module, optimizer: type[Optimizer], group: ProcessGroup | None = None, **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """Return a model under DDP and an optimizer in which each parameter is stepped by one rank.

    The two together are a variant of `labs.zero.Zero` in stage 1. Each rank steps whole parameters, so the ranks'
    shares of them are only about equal. DDP all-reduces all gradients, although each rank needs only those of its own
    parameters. After the step, each rank broadcasts the parameters that it has stepped.
    """
    with warnings.catch_warnings():  # importing this uses torch.jit.script, about which PyTorch itself warns
        warnings.simplefilter("ignore", DeprecationWarning)
        # The import is not at the head of the file, since every rank of every job would wait 0.3 s for it.
        from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    return ddp(model, group), ZeroRedundancyOptimizer(trained, optimizer, process_group=group, **settings)
