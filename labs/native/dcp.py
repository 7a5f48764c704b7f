"""torch.distributed.checkpoint, the field's DCP: shards side by side, or as Hugging Face has them.

It is not imported at the head of the file: every rank of every job would wait for it.
"""

from concurrent.futures import Future
from pathlib import Path

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from labs.native.state_dicts import set_states, states


def save_checkpoint(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> None:
    """`labs.checkpoint.save`: each rank writes its shards side by side, and the group's first one an index.

    What several ranks hold is written by one of them, and nobody looks whether it is the same on all.  A checkpoint
    that lies there already is overwritten in place; until the index, `.metadata`, is there, nobody loads it.
    """
    from torch.distributed import checkpoint

    checkpoint.save(states(model, optimizer), checkpoint_id=where, process_group=group)


def save_in_background(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> Future:
    """`labs.checkpoint.Saver.save`: returns when the shards are copied, and a thread writes; `.result()` waits for it.

    What the thread raises, only `.result()` raises.  It uses the group meanwhile: give it one of its own, with gloo.
    """
    from torch.distributed import checkpoint

    return checkpoint.async_save(states(model, optimizer), checkpoint_id=where, process_group=group)


def load_checkpoint(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> None:
    """`labs.checkpoint.load`: into any layout of DTensors; a rank reads the pieces of which it needs a part, whole.

    Numbers are cast to the dtype that is here, what nobody asks for is left out, and no checksum is looked at.  The
    index and all that is no tensor are unpickled: what somebody else has written can run whatever they like.
    """
    from torch.distributed import checkpoint

    found = states(model, optimizer)
    checkpoint.load(found, checkpoint_id=where, process_group=group)
    set_states(model, optimizer, found)


def save_hugging_face(where: str | Path, model: nn.Module) -> None:
    """A model's weights in the format of Hugging Face, under the model's own names.

    Each rank writes its shards to where/sharded, and rank 0 then puts whole tensors together in where.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    writer = checkpoint.HuggingFaceStorageWriter(str(where), save_distributed=True, enable_consolidation=True)
    checkpoint.save(get_model_state_dict(model), storage_writer=writer)


def load_hugging_face(where: str | Path, model: nn.Module) -> None:
    """Each rank reads its slices; all `*.safetensors` in the folder count."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    found = get_model_state_dict(model)
    checkpoint.load(found, storage_reader=checkpoint.HuggingFaceStorageReader(str(where)))
    set_model_state_dict(model, found)
