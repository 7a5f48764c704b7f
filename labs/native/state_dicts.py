"""What a checkpoint is made of, whole or in shards.

torch.distributed.checkpoint is not imported at the head of the file: every rank of every job would wait for it.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def states(model: nn.Module, optimizer: Optimizer, full: bool = False) -> dict[str, Any]:
    """What a checkpoint is made of, by the names of parameters: {"model": ..., "optimizer": ...}.

    Sharded, each rank has its own shards, and they are no copies.  If full, all is gathered, one tensor after the
    other, on the CPU of rank 0, and the others have nothing: what `torch.save` takes for a single file.

    An optimizer that has not stepped yet is stepped here, by gradients of zero and a learning rate of zero: whatever
    counts its steps has counted one.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def set_states(model: nn.Module, optimizer: Optimizer, found: Mapping[str, Any], full: bool = False) -> None:
    """What `states` returns, put back; if full, from rank 0, which sends every tensor to all: each keeps its shard."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    # Not set_state_dict: where a rank brings nothing of a model, it takes that for an optimizer's alone, and hangs.
    state_dict.set_model_state_dict(model, found["model"], options=options)
    state_dict.set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)
