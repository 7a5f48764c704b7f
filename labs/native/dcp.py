"""Checkpoints by torch.distributed.checkpoint (DCP): in shards side by side, or in Hugging Face's format.

DCP is not imported at the head of the file, since every rank of every job would wait for the import.
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
    """Save a checkpoint, as `labs.checkpoint.save` does: each rank writes its shards, and the first rank an index.

    A tensor that several ranks hold is written by one of them, without a check that all copies are equal.  An earlier
    checkpoint in the same folder is overwritten in place.  Until its index `.metadata` exists, the checkpoint cannot be
    loaded.
    """
    from torch.distributed import checkpoint

    checkpoint.save(states(model, optimizer), checkpoint_id=where, process_group=group)


def save_in_background(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> Future:
    """Copy the shards and return; a thread writes them, as with `labs.checkpoint.Saver.save`.

    `.result()` waits for the thread, and only `.result()` raises the thread's error.  While the thread writes, it uses
    the group, so give it a gloo group of its own.
    """
    from torch.distributed import checkpoint

    return checkpoint.async_save(states(model, optimizer), checkpoint_id=where, process_group=group)


def load_checkpoint(
    where: str | Path, model: nn.Module, optimizer: Optimizer, group: ProcessGroup | None = None
) -> None:
    """Load a checkpoint into any layout of DTensors, as `labs.checkpoint.load` does.

    A rank reads the whole of every piece of which it needs a part.  Numbers are cast to the model's dtypes, entries
    that the model lacks are ignored, and no checksum is verified.  The index and everything that is no tensor are
    unpickled, so a file from somebody else can run any code.
    """
    from torch.distributed import checkpoint

    found = states(model, optimizer)
    checkpoint.load(found, checkpoint_id=where, process_group=group)
    set_states(model, optimizer, found)


def save_hugging_face(where: str | Path, model: nn.Module) -> None:
    """Save a model's weights in the format of Hugging Face, under the model's own names.

    Each rank writes its shards to the folder `where`/sharded; then rank 0 merges them into whole tensors in `where`.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    writer = checkpoint.HuggingFaceStorageWriter(str(where), save_distributed=True, enable_consolidation=True)
    checkpoint.save(get_model_state_dict(model), storage_writer=writer)


def load_hugging_face(where: str | Path, model: nn.Module) -> None:
    """Load weights from all `*.safetensors` in a folder; each rank reads its slices."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    found = get_model_state_dict(model)
    checkpoint.load(found, storage_reader=checkpoint.HuggingFaceStorageReader(str(where)))
    set_model_state_dict(model, found)
