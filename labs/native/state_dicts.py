"""State dicts of model and optimizer for a checkpoint, whole or in shards.

torch.distributed.checkpoint is not imported at the head of the file, since every rank of every job would wait for it.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def states(model: nn.Module, optimizer: Optimizer, full: bool = False) -> dict[str, Any]:
    """Return the states of a checkpoint by the names of parameters, as {"model": ..., "optimizer": ...}.

    By default each rank gets its own shards, which share memory with the model.  With `full`, all tensors are gathered,
    one after the other, on the CPU of rank 0, and the other ranks get nothing: rank 0 can `torch.save` a single file.

    An optimizer that has not stepped yet makes a step in this call, with gradients of zero and a learning rate of zero;
    the optimizer's step counter counts that step.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def set_states(model: nn.Module, optimizer: Optimizer, found: Mapping[str, Any], full: bool = False) -> None:
    """Put the states that `states` returned back into model and optimizer.

    With `full`, rank 0 sends every tensor to all ranks, and each rank keeps its shard.
    """
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    # set_state_dict would hang: it takes the empty model state of the other ranks for a request to set the optimizer.
    state_dict.set_model_state_dict(model, found["model"], options=options)
    state_dict.set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)
