"""The saving of a training's state: all ranks write their own shares at the same time.

    compare            a piece of a tensor that several ranks hold must be equal on them; one of these ranks writes it
    write and flush    each rank writes its file into a draft of the checkpoint's folder
    commit             the first rank writes the index, flushes it, and renames the draft

So no rank ever holds the whole state, and no rank waits while another one writes the whole state.

Source: torch.distributed.checkpoint, docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import on_all_ranks
from labs.checkpoint.agreement import Contribution, Share, agreed_plan, bytes_of, contribute, require_equal_copies
from labs.checkpoint.index import commit, drafted, entry
from labs.checkpoint.parts import Savable
from labs.memory.mapped_files import checksum, flush


def save(
    folder: str | Path,
    step: int,
    held: Savable,
    values: Any = None,
    own: Any = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write the state that all ranks hold to folder/step-<step>, and return that path.

    Every rank of the group must call this function, with the same folder and step.

    held: the state that this rank holds, such as `Held(model, optimizer=optimizer)`
    values: further values to save, the same on all ranks, made of what JSON can hold
    own: further values to save for this rank alone, made of what JSON can hold
    group: the ranks that save; by default all ranks

    Raises, on all ranks, ValueError if ranks hold different models or give different values, for values that JSON
    cannot hold, for a step that is not an integer of 0 or more, and if this checkpoint exists already; OSError if the
    disk is full, or cannot be written.  Earlier checkpoints stay as they are when a save fails.
    """
    return finish(partial(contribute, folder, step, held, values, own), group)


def finish(share: Callable[[], Share], group: ProcessGroup | None) -> Path:
    """Do the part of a save that involves other ranks and the disk; any thread may call this function.

    share: function that returns this rank's contribution and tensors; if it raises an error, all ranks raise it
    """
    rank, tensors = dist.get_rank(group), {}

    def contribution() -> Contribution:
        mine, its_tensors = share()
        tensors.update(its_tensors)
        return mine

    contributions = on_all_ranks(contribution, group)
    global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    plan = agreed_plan(dict(zip(global_ranks, contributions, strict=True)))
    require_equal_copies([bytes_of(each.described) for each in contributions], tensors, group)
    final, draft = plan.final, plan.final.with_name(f"{plan.final.name}.{contributions[0].word}.draft")
    with ExitStack() as stack:
        on_all_ranks(lambda: stack.enter_context(drafted(final, draft)) if rank == 0 else None, group)
        mine = {entry(*piece): tensors[piece] for piece in plan.writes[rank]}
        checksums = on_all_ranks(lambda: write(draft / plan.files[rank], mine), group)
        on_all_ranks(lambda: commit(draft, final, plan.record(checksums)) if rank == 0 else None, group)
    return final


def write(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write a file of tensors, flush it, and return its checksum."""
    numbers = {name: x.to("cpu").contiguous() for name, x in tensors.items()}
    storages = {name: x.untyped_storage().data_ptr() for name, x in numbers.items()}
    uses = Counter(storages.values())  # safetensors refuses tensors that share a storage
    try:
        save_file({name: x.clone() if uses[storages[name]] > 1 else x for name, x in numbers.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}): make room, or save to another folder") from error
    flush(path)
    return checksum(path)
